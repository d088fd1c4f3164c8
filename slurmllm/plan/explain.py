"""Explains from the predicted figures why a layout is the best and why others are not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from slurmllm.core.config.recipe import TrainConfig
from slurmllm.core.format import format_gib, format_plural, format_seconds
from slurmllm.plan.estimate import LayoutEstimate, MemoryUse
from slurmllm.plan.evidence import evidence_text
from slurmllm.plan.mesh import has_block_masks
from slurmllm.plan.search import TIGHT_COST

_RUNNERS_UP = 2
# By whether attention between documents computes blocks.
_DOCUMENTS = {
    True: "attention computes only within them; its predicted time is an upper limit, that of one "
    "document a sequence",
    False: "a dense mask separates them, and attention computes all pairs of tokens",
}


def describe(candidate: LayoutEstimate) -> str:
    """Return `TP 32 × PP 8 × DP 4, micro batch 1, selective checkpointing, ZeRO 1, …`."""
    recipe = candidate.config.recipe
    nodes = recipe.parallel.shard_nodes
    shards = "" if nodes is None else f" over {format_plural(nodes, 'node')}"
    settings_text = (
        f"{degrees(candidate)}, micro batch {candidate.mesh.micro_batch}, "
        f"{_checkpointing(recipe.train)}, ZeRO {recipe.parallel.zero}{shards}"
    )
    return f"{settings_text}, sequence parallel" if recipe.parallel.sequence else settings_text


def degrees(candidate: LayoutEstimate) -> str:
    """Return `TP 32 × PP 8 × DP 4`; `PP 8 (2 chunks)` if interleaved."""
    mesh = candidate.mesh
    chunks = f" ({mesh.virtual_pipeline} chunks)" if mesh.virtual_pipeline > 1 else ""
    return f"TP {mesh.tensor} × PP {mesh.pipeline}{chunks} × DP {mesh.data}"


def describe_memory(memory: MemoryUse, max_parts: int | None = 3) -> str:
    """Return `14.1 of 15.75 GiB: activations 6.02, …`: the `max_parts` largest parts, or all."""
    parts = sorted(memory.parts.items(), key=lambda named: -named[1])
    sizes = [(name.replace("_", " "), size) for name, size in parts if size > 0]
    named = [f"{name} {format_gib(size)}" for name, size in sizes[:max_parts]]
    if len(named) < len(sizes):
        named.append("…")
    whole = f"{format_gib(memory.peak)} of {format_gib(memory.limit)} GiB"
    return f"{whole}: {', '.join(named)}"


def why_too_large(memory: MemoryUse, max_parts: int | None = 3) -> str:
    """Return `describe_memory` and the excess over the limit: `…; 2.31 GiB too much`."""
    excess = format_gib(memory.peak - memory.limit)
    return f"{describe_memory(memory, max_parts)}; {excess} GiB too much"


# Parts of a worker's memory whose names do not say what they are.
PARTS = {
    "programs": "instructions, DMA rings and collectives' memory of the compiled graphs, assumed",
    "buffers": "the larger of one block's temporary tensors in the backward pass and what the "
    "collectives of the optimizer's step have in flight",
    "pipeline buffers": "received activations and gradients, one per micro batch each way",
    "whole weights": "what FSDP gathers within a step",
    "output or block": "the logits and their gradients, or the largest need of one block",
    "end of the step": "whole gradients of embedding and head, and their copy on its way",
}


def explain_parts(message: str) -> list[str]:
    """Return a line on the parts of memory that `message` names, if some need it."""
    named = [name for name in PARTS if re.search(rf"(^|[:,] ){name} [0-9]", message)]
    return ["; ".join(f"{name}: {PARTS[name]}" for name in named)] if named else []


def explain(fitting: Sequence[LayoutEstimate], too_large: Sequence[LayoutEstimate]) -> list[str]:
    """Return lines on why the first of `fitting` is the best: links, memory, runners-up."""
    best = fitting[0]
    lines = [f"best: {describe(best)}: {_speed(best)}"]
    lines += [f"  {line}" for line in _memory_lines(best, fitting, too_large)]
    if best.config.recipe.data.mask == "document" and best.config.backend != "nxd":
        lines.append(f"  documents: {_DOCUMENTS[has_block_masks(best.config)]}")
    lines.append(f"  evidence: {evidence_text(best)}")
    # Runners-up: the best layouts of other tensor and pipeline degrees, then all others by rank.
    meshes = {(best.mesh.tensor, best.mesh.pipeline): best}
    for candidate in fitting[1:]:
        meshes.setdefault((candidate.mesh.tensor, candidate.mesh.pipeline), candidate)
    runners_up = list(meshes.values())[1:]
    runners_up += [candidate for candidate in fitting[1:] if candidate not in runners_up]
    for other in runners_up[:_RUNNERS_UP]:
        lines.append(f"runner-up: {describe(other)}: {_speed(other)}")
        lines.append(f"  {_slowdown(best, other)}")
    # A larger micro batch alone is in `_memory_lines` already.
    faster = [layout for layout in too_large if layout.seq_per_s > best.seq_per_s]
    faster = [c for c in faster if differing_settings(c, best) != {"micro_batch"}]
    if faster:
        smallest = min(faster, key=lambda layout: layout.memory.peak)
        lines.append(
            f"faster, but too large: {describe(smallest)}: {smallest.seq_per_s:.4g} seq/s; "
            f"{why_too_large(smallest.memory)}"
        )
    return lines


def _memory_lines(
    best: LayoutEstimate, fitting: Sequence[LayoutEstimate], too_large: Sequence[LayoutEstimate]
) -> Iterator[str]:
    """Yield the memory of the best layout, of a larger micro batch and of less checkpointing."""
    yield f"memory: {describe_memory(best.memory)}"
    if best.memory.tight:
        line = f"tight: {_share(best.memory)}"
        roomy = max((layout.seq_per_s for layout in fitting if not layout.memory.tight), default=0)
        if roomy < (1 - TIGHT_COST) * best.seq_per_s:  # --rank lower prefers others too
            line += "; layouts with more left are over 3 % slower"
        yield line
    fastest = max(fitting, key=lambda c: c.seq_per_s)
    if fastest.memory.tight and fastest is not best:
        percent = 100 * (fastest.seq_per_s / best.seq_per_s - 1)
        why = f"{describe(fastest)}: {_share(fastest.memory)}"
        yield f"{percent:.1f} % faster, but ranked lower because tight: {why}"
    layouts = (*fitting, *too_large)
    larger = [c for c in layouts if differing_settings(c, best) == {"micro_batch"}]
    larger = [c for c in larger if c.mesh.micro_batch > best.mesh.micro_batch]
    if larger:
        next_larger = min(larger, key=lambda c: c.mesh.micro_batch)
        yield f"micro batch {next_larger.mesh.micro_batch} {_compare(next_larger, best)}"


def _share(memory: MemoryUse) -> str:
    return f"{100 * memory.peak / memory.limit:.1f} % of the memory"


def _compare(other: LayoutEstimate, best: LayoutEstimate) -> str:
    if not other.fits:
        return f"would need {why_too_large(other.memory)}"
    return f"would fit ({format_gib(other.memory.peak)} GiB): {_slowdown(best, other)}"


def _slowdown(best: LayoutEstimate, other: LayoutEstimate) -> str:
    """Return `8 % fewer seq/s: tensor +3.1 s, bubble +1.2 s per step`, the largest first."""
    best_parts = best.step.parts()
    other_parts = other.step.parts()
    differences = [(name, other_parts[name] - best_parts[name]) for name in best_parts]
    parts = ", ".join(
        f"{name} {'+' if seconds > 0 else '-'}{format_seconds(abs(seconds))}"
        for name, seconds in sorted(differences, key=lambda named: -abs(named[1]))
        if abs(seconds) >= 0.001 * best.step.total
    )
    percent = 100 * (1 - other.seq_per_s / best.seq_per_s)
    speed = f"{abs(percent):.1f} % {'fewer' if percent > 0 else 'more'} seq/s"
    if not round(percent, 1):
        speed = "as fast"
    return f"{speed}: {parts} per step" if parts else speed


def settings(candidate: LayoutEstimate) -> dict[str, int | bool | str | None]:
    """Return a layout's settings, named as in `plan --json`."""
    mesh, recipe = candidate.mesh, candidate.config.recipe
    return {
        "tensor": mesh.tensor,
        "pipeline": mesh.pipeline,
        "virtual_pipeline": mesh.virtual_pipeline,
        "data": mesh.data,
        "micro_batch": mesh.micro_batch,
        "sequence": recipe.parallel.sequence,
        "activation_checkpointing": recipe.train.checkpointing_text,
        "zero": recipe.parallel.zero,
        "shard_nodes": recipe.parallel.shard_nodes,
    }


def figures(candidate: LayoutEstimate) -> dict[str, Any]:
    """Return a layout's settings and predictions, named as in `plan --json`."""
    memory = candidate.memory
    return {
        **settings(candidate),
        "accumulation": candidate.mesh.accumulation,
        "seq_per_s": candidate.seq_per_s,
        "step_s": candidate.step.total,
        "parts_s": candidate.step.parts(),
        "mfu": candidate.mfu,
        "memory_bytes": memory.peak,
        "memory": dict(memory.parts),
        "memory_limit_bytes": memory.limit,
        "fits": candidate.fits,
        "tight": memory.tight,
    }


def differing_settings(layout: LayoutEstimate, other: LayoutEstimate) -> set[str]:
    values = settings(other)
    return {name for name, value in settings(layout).items() if values[name] != value}


def _speed(candidate: LayoutEstimate) -> str:
    parts = sorted(candidate.step.parts().items(), key=lambda named: -named[1])
    total = candidate.step.total
    shares = ", ".join(f"{name} {100 * s / total:.0f} %" for name, s in parts if s >= 0.005 * total)
    return (
        f"{candidate.seq_per_s:.4g} seq/s, MFU {100 * candidate.mfu:.1f} %, "
        f"{format_seconds(total)} per step: {shares}"
    )


def _checkpointing(train: TrainConfig) -> str:
    return f"{train.checkpointing_text if train.recomputed else 'no'} checkpointing"
