"""Explains from the predicted figures why a layout is the best and why others are not.

The explanation follows HLAT (arXiv 2404.10630) and Narayanan et al. 2021 (arXiv 2104.04473): tensor
parallelism on the fastest links, pipeline stages on groups of nodes, data parallelism over the
rest. For each of the three it reports the predicted traffic, and the memory of the layout; it never
assumes that this assignment is the fastest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slurmllm.config.cluster import Hardware
from slurmllm.config.recipe import TrainConfig
from slurmllm.format import format_bytes, format_gib, format_plural, format_seconds
from slurmllm.plan.estimate import LayoutEstimate, MemoryUse, known_hardware
from slurmllm.plan.evidence import evidence_text
from slurmllm.plan.mesh import Mesh, has_block_masks
from slurmllm.plan.search import CHECKPOINTING, TIGHT_COST
from slurmllm.plan.step import (
    Group,
    StepTime,
    copies_group,
    formats,
    group,
    rate,
    shard_group,
    step_time,
    tensor_group,
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
    texts = [
        degrees(candidate),
        f"micro batch {candidate.mesh.micro_batch}",
        _checkpointing(recipe.train),
        f"ZeRO {recipe.parallel.zero}{shards}",
        *["sequence parallel"] * recipe.parallel.sequence,
    ]
    return ", ".join(texts)


def degrees(candidate: LayoutEstimate) -> str:
    """Return `TP 32 × PP 8 × DP 4`; `PP 8 (2 chunks)` if interleaved."""
    mesh = candidate.mesh
    chunks = f" ({mesh.virtual_pipeline} chunks)" if mesh.virtual_pipeline > 1 else ""
    return f"TP {mesh.tensor} × PP {mesh.pipeline}{chunks} × DP {mesh.data}"


def describe_memory(memory: MemoryUse, most: int | None = 3) -> str:
    """Return `14.1 of 15.75 GiB: activations 6.02, …`: the `most` largest parts, or all."""
    parts = sorted(memory.parts.items(), key=lambda part: -part[1])
    named = [f"{name.replace('_', ' ')} {format_gib(size)}" for name, size in parts[:most] if size]
    rest = ["…"] if sum(size > 0 for _, size in parts) > len(named) else []
    whole = f"{format_gib(memory.peak)} of {format_gib(memory.limit)} GiB"
    return f"{whole}: {', '.join([*named, *rest])}"


def why_too_large(memory: MemoryUse, most: int | None = 3) -> str:
    """Return `describe_memory` and the excess over the limit: `…; 2.31 GiB too much`."""
    return f"{describe_memory(memory, most)}; {format_gib(memory.peak - memory.limit)} GiB too much"


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


def explain_parts(text: str) -> list[str]:
    """Return a line on the parts of memory that `text` names, if some need it."""
    named = [name for name in PARTS if re.search(rf"(^|[:,] ){name} [0-9]", text)]
    return ["; ".join(f"{name}: {PARTS[name]}" for name in named)] if named else []


def explain(fitting: Sequence[LayoutEstimate], too_large: Sequence[LayoutEstimate]) -> list[str]:
    """Return lines on why the first of `fitting` is the best: links, memory, runners-up."""
    best = fitting[0]
    lines = [f"best: {describe(best)}: {_speed(best)}"]
    lines += [f"  {line}" for line in _traffic_lines(best)]
    lines += [f"  {line}" for line in _memory_lines(best, fitting, too_large)]
    if best.config.recipe.data.mask == "document" and best.config.backend != "nxd":
        lines.append(f"  documents: {_DOCUMENTS[has_block_masks(best.config)]}")
    lines.append(f"  evidence: {evidence_text(best)}")
    # Runners-up: the best layouts of other tensor and pipeline degrees, then all others by rank.
    meshes = {(best.mesh.tensor, best.mesh.pipeline): best}
    for candidate in fitting[1:]:
        meshes.setdefault((candidate.mesh.tensor, candidate.mesh.pipeline), candidate)
    others = list(meshes.values())[1:]
    others += [candidate for candidate in fitting[1:] if candidate not in others]
    for other in others[:_RUNNERS_UP]:
        lines.append(f"runner-up: {describe(other)}: {_speed(other)}")
        lines += [f"  {line}" for line in (_slowdown(best, other), *_traffic_lines(other))]
    # Layouts that differ from the best only in one of these are in `_memory_lines` already.
    explained = {"micro_batch"}, {"activation_checkpointing"}
    faster = [
        layout
        for layout in too_large
        if layout.seq_per_s > best.seq_per_s and differing_settings(layout, best) not in explained
    ]
    if faster:
        smallest = min(faster, key=lambda layout: layout.memory.peak)
        lines.append(
            f"faster, but too large: {describe(smallest)}: {smallest.seq_per_s:.4g} seq/s; "
            f"{why_too_large(smallest.memory)}"
        )
    return lines


def _traffic_lines(candidate: LayoutEstimate) -> Iterator[str]:
    """Yield what tensor, pipeline and data parallelism send, and how long that takes."""
    mesh, step, sent = candidate.mesh, candidate.step, traffic(candidate)
    hardware = known_hardware(candidate.config)
    if mesh.tensor == 1:
        yield "tensor parallel: none, each device computes whole matrices"
    else:
        members = tensor_group(mesh)
        line = (
            f"tensor parallel {_extent(members)}: a device sends {format_bytes(sent.tensor)} per "
            f"step at {rate(members, hardware) / 1e9:.3g} GB/s, "
            f"{_time_and_share(candidate, step.tensor)}"
        )
        if members.within_node and mesh.nodes > 1:
            everyone = group(mesh.devices_per_node, mesh.nodes, mesh.devices_per_node)
            line += f"; over the network it would be {rate(everyone, hardware) / 1e9:.3g} GB/s"
        yield line
    yield from _pipeline_lines(candidate, sent.stages)
    if mesh.data == 1:
        yield "data parallel: none, one copy of the model"
        return
    members, hidden_s = shard_group(mesh), sent.data_s - step.data
    also = f"; another {format_seconds(hidden_s)} overlap with computation" if hidden_s > 0 else ""
    between = ""
    if mesh.replicate > 1:
        between = (
            f", and {format_bytes(sent.copies)} of gradients between {mesh.replicate} copies at "
            f"{rate(copies_group(mesh), hardware) / 1e9:.3g} GB/s"
        )
    yield (
        f"data parallel {_extent(members)}: a device sends {format_bytes(sent.data)} of gradients "
        f"and weights per step at {rate(members, hardware) / 1e9:.3g} GB/s{between}, "
        f"{_time_and_share(candidate, step.data)}{also}"
    )


def _pipeline_lines(candidate: LayoutEstimate, sent_bytes: float) -> Iterator[str]:
    mesh, step = candidate.mesh, candidate.step
    if mesh.pipeline == 1:
        yield "pipeline: none, no stage waits for another"
        return
    devices = mesh.tensor * mesh.data
    if devices >= mesh.devices_per_node:
        nodes = devices / mesh.devices_per_node
        stages = f"{mesh.pipeline} stages of {nodes:g} node{'s' * (nodes != 1)} each"
    else:
        stages = f"{mesh.pipeline} stages of {devices} device{'s' * (devices != 1)} each"
    yield (
        f"pipeline over {stages}: a device sends {format_bytes(sent_bytes)} per step to the "
        f"adjacent stages, {_time_and_share(candidate, step.transfer)}"
    )
    idle = (mesh.pipeline - 1) / mesh.virtual_pipeline
    chunks = f" / {mesh.virtual_pipeline} chunks" if mesh.virtual_pipeline > 1 else ""
    yield (
        f"bubble: per step, each stage computes {mesh.accumulation} micro batches and idles for "
        f"the time of ({mesh.pipeline} stages - 1){chunks} = {idle:g} "
        f"micro batch{'es' * (idle != 1)}, {_time_and_share(candidate, step.bubble)}"
    )


def _memory_lines(
    best: LayoutEstimate, fitting: Sequence[LayoutEstimate], too_large: Sequence[LayoutEstimate]
) -> Iterator[str]:
    """Yield the memory of the best layout, of a larger micro batch and of less checkpointing."""
    yield f"memory: {describe_memory(best.memory)}"
    if best.memory.tight:
        roomy = max((layout.seq_per_s for layout in fitting if not layout.memory.tight), default=0)
        why = "; layouts with more left are over 3 % slower"
        why *= roomy < (1 - TIGHT_COST) * best.seq_per_s  # --rank lower prefers others too
        yield f"tight: {_share(best.memory)}{why}"
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
    how = best.config.recipe.train.activation_checkpointing
    level = CHECKPOINTING.index(how) if how in CHECKPOINTING else 0
    others = [c for c in layouts if differing_settings(c, best) == {"activation_checkpointing"}]
    for less in reversed(CHECKPOINTING[:level]):
        for train, other in ((other.config.recipe.train, other) for other in others):
            if train.activation_checkpointing == less:
                yield f"{_checkpointing(train)} {_compare(other, best)}"
                return


def _share(memory: MemoryUse) -> str:
    return f"{100 * memory.peak / memory.limit:.1f} % of the memory"


def _compare(other: LayoutEstimate, best: LayoutEstimate) -> str:
    if not other.fits:
        return f"would need {why_too_large(other.memory)}"
    return f"would fit ({format_gib(other.memory.peak)} GiB): {_slowdown(best, other)}"


def _slowdown(best: LayoutEstimate, other: LayoutEstimate) -> str:
    """Return `8 % fewer seq/s: tensor +3.1 s, bubble +1.2 s per step`, the largest first."""
    best_parts, other_parts = best.step.parts(), other.step.parts()
    differences = [(name, other_parts[name] - best_parts[name]) for name in best_parts]
    parts = ", ".join(
        f"{name} {'+' if seconds > 0 else '-'}{format_seconds(abs(seconds))}"
        for name, seconds in sorted(differences, key=lambda part: -abs(part[1]))
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
    parts = sorted(candidate.step.parts().items(), key=lambda part: -part[1])
    total = candidate.step.total
    shares = ", ".join(f"{name} {100 * s / total:.0f} %" for name, s in parts if s >= 0.005 * total)
    return (
        f"{candidate.seq_per_s:.4g} seq/s, MFU {100 * candidate.mfu:.1f} %, "
        f"{format_seconds(total)} per step: {shares}"
    )


def _extent(members: Group) -> str:
    if members.within_node:
        return f"{members.size} inside the node"
    return f"{members.size} over {members.nodes} nodes"


def _time_and_share(candidate: LayoutEstimate, seconds: float) -> str:
    return f"{format_seconds(seconds)}, {100 * seconds / candidate.step.total:.1f} % of the step"


def _checkpointing(train: TrainConfig) -> str:
    return f"{train.checkpointing_text if train.recomputed else 'no'} checkpointing"


@dataclass(frozen=True)
class Traffic:
    """The communication of one worker in a step."""

    tensor: float  # bytes sent within its tensor-parallel group
    stages: float  # bytes sent to the pipeline stages before and after it
    data: float  # bytes sent to the other data-parallel workers of a copy of the model
    copies: float  # bytes sent to the other copies
    # time of the data-parallel communication, s, including what overlaps with computation
    data_s: float


def traffic(candidate: LayoutEstimate) -> Traffic:
    config, mesh = candidate.config, candidate.mesh
    hardware = known_hardware(config)
    # Bytes are computed from predicted times: without overlap, times include all communication, and
    # without latency they are proportional to bytes.
    no_overlap = hardware.model_copy(update={"overlap": 0.0})
    no_latency = no_overlap.model_copy(
        update={"node_link_latency_us": 0.0, "network_latency_us": 0.0}
    )

    def predict_step(changed: Hardware, on: Mesh = mesh) -> StepTime:
        cluster = config.cluster.model_copy(update={"hardware": changed})
        return step_time(replace(config, cluster=cluster), on)

    times = predict_step(no_latency)
    batch = mesh.global_batch // mesh.replicate
    copy = replace(mesh, data=mesh.shard, replicate=1, global_batch=batch)
    within_copy_s = predict_step(no_latency, copy).data
    shards = mesh.tensor if config.recipe.parallel.sequence else 1
    bytes_per_token = config.recipe.model.hidden_size * formats(config).computed / shards
    crossings = 2 * mesh.accumulation * mesh.virtual_pipeline if mesh.pipeline > 1 else 0
    return Traffic(
        tensor=times.tensor * rate(tensor_group(mesh), no_latency),
        stages=crossings * mesh.micro_batch * config.recipe.model.seq_len * bytes_per_token,
        data=within_copy_s * rate(shard_group(mesh), no_latency),
        copies=(times.data - within_copy_s) * rate(copies_group(mesh), no_latency),
        data_s=predict_step(no_overlap).data,
    )
