"""Why a layout is the best, why others are not, and what works near a request that none fits."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from slurmllm.core.config.recipe import TrainConfig
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.format import format_gib, format_number, format_plural, format_seconds
from slurmllm.plan.evidence import evidence_text
from slurmllm.plan.mesh import format_change, has_block_masks, near_batches, near_nodes, next_to
from slurmllm.plan.neuron_memory import score_bytes
from slurmllm.plan.search import (
    LARGEST,
    TIGHT_COST,
    LayoutEstimate,
    MemoryUse,
    Unsupported,
    model_degrees,
    search,
    smallest_layouts,
    some_fits,
)

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


@dataclass(frozen=True)
class SettingSuggestion:
    """A change of a request with which a layout fits."""

    options: tuple[str, str]  # of the command line: `--nodes 8`, `--set train.global_batch=264`
    change: str  # what that changes
    ratio: float  # of the new node count or batch to the old one
    config: RunConfig  # with the change
    nodes: int
    unsupported: Unsupported
    fixed: Collection[str]

    @cached_property
    def best(self) -> LayoutEstimate:
        return search(self.config, self.nodes, self.unsupported, self.fixed).fitting[0]

    def __str__(self) -> str:
        speed = format_number(self.best.seq_per_s)
        return f"{' '.join(self.options)}: {self.change}; {speed} seq/s predicted"

    def to_json(self) -> dict[str, Any]:
        mesh = self.best.mesh
        return {
            "options": self.options,
            "change": self.change,
            "nodes": self.nodes,
            "tensor": mesh.tensor,
            "global_batch": mesh.global_batch,
            "seq_per_s": self.best.seq_per_s,
        }


def fitting_changes(
    config: RunConfig, nodes: int, unsupported: Unsupported, fixed: Collection[str] = ()
) -> list[SettingSuggestion]:
    """Return the nearest node counts and global batches, below and above, that fit.

    A side on which there is none is left out. Node counts above `LARGEST` are not tried. Arguments
    are those of `search`; with `train.global_batch` fixed, no batches are tried.
    """
    changes: list[SettingSuggestion] = []
    for counts in next_to(nodes, _possible_nodes(config, fixed)):
        for count in counts:
            if some_fits(config, count, unsupported, fixed):
                minimum = ", the minimum" if count > nodes and not changes else ""
                suggestion = SettingSuggestion(
                    options=("--nodes", str(count)),
                    change=f"{format_change(count, nodes)} nodes{minimum}",
                    ratio=count / nodes,
                    config=config,
                    nodes=count,
                    unsupported=unsupported,
                    fixed=fixed,
                )
                changes.append(suggestion)
                break
    batch = config.recipe.train.global_batch
    for sizes in next_to(batch, _possible_batches(config, nodes, fixed)):
        for size in sizes:
            changed = config.with_settings("train", global_batch=size)
            if some_fits(changed, nodes, unsupported, fixed):
                on_nodes = f"on {format_plural(nodes, 'node')}"
                suggestion = SettingSuggestion(
                    options=("--set", f"train.global_batch={size}"),
                    change=f"{format_change(size, batch)} sequences a step, {on_nodes}",
                    ratio=size / batch,
                    config=changed,
                    nodes=nodes,
                    unsupported=unsupported,
                    fixed=fixed,
                )
                changes.append(suggestion)
                break
    return changes


def memory_shortfall(
    config: RunConfig, nodes: int, unsupported: Unsupported, fixed: Collection[str] = ()
) -> list[str]:
    """Return what a run lacks that fits on no number of nodes.

    Returns:
        The layout that needs the least memory on any number of nodes, with the bytes that are
        missing; empty if no layout is possible at all.
    """
    counts = {*_possible_nodes(config, fixed), nodes}
    layouts = [
        layout
        for count in sorted(counts, key=lambda count: (abs(count - nodes), count))
        for layout in smallest_layouts(config, count, unsupported, fixed)
    ]
    if not layouts:
        return []
    smallest = min(layouts, key=lambda layout: (layout.memory.peak, layout.mesh.nodes))
    missing = format_gib(smallest.memory.peak - smallest.memory.limit)
    lines = [
        f"no number of nodes up to {LARGEST} is enough: {describe(smallest)} needs the least, on "
        f"{format_plural(smallest.mesh.nodes, 'node')} {describe_memory(smallest.memory)}; a "
        f"device with {missing} GiB more would do"
    ]
    scores = score_bytes(smallest.config, smallest.mesh) if config.backend == "nxd" else 0
    if 2 * scores > smallest.memory.peak:
        lines.append(
            f"attention scores are {format_gib(scores)} GiB of it: the {config.backend} backend "
            "computes those of a whole sequence at once, seq_len² for each head; shorten "
            "model.seq_len"
        )
    return lines


def _possible_nodes(config: RunConfig, fixed: Collection[str]) -> set[int]:
    meshes = model_degrees(config, LARGEST, fixed)
    return {n for n in near_nodes(config, meshes, _at_once(config, fixed)) if n <= LARGEST}


def _possible_batches(config: RunConfig, nodes: int, fixed: Collection[str]) -> set[int]:
    parallel, world = config.recipe.parallel, nodes * config.cluster.devices_per_node
    batches: set[int] = set()
    if "train.global_batch" in fixed:
        return batches
    for tensor, pipeline in model_degrees(config, nodes, fixed):
        data, remainder = divmod(world, tensor * pipeline)
        interleaved = "parallel.virtual_pipeline" in fixed and parallel.virtual_pipeline > 1
        rounds = pipeline if interleaved else 1
        if not remainder:
            unit = data * _at_once(config, fixed) * rounds
            batches.update(near_batches(config.recipe.train.global_batch, unit))
    return batches


def _at_once(config: RunConfig, fixed: Collection[str]) -> int:
    """Return the sequences that a data-parallel worker takes at once, at least."""
    micro = config.recipe.train.micro_batch
    return 1 if micro == "auto" or "train.micro_batch" not in fixed else micro
