"""Explanations of why a layout is the best and others are not, from the predicted figures.

The reasoning is that of HLAT (arXiv 2404.10630) and of Narayanan et al. 2021 (arXiv 2104.04473):
tensor parallelism on the fastest links, pipeline stages on groups of nodes, data parallelism over
the rest. The text states the traffic of each kind of link and the memory of a layout; if the
figures contradict that order, so does the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from slurmllm.format import format_bytes, format_gib, format_seconds
from slurmllm.plan.collectives import Group, data_group, group, rate, tensor_group
from slurmllm.plan.estimate import LayoutEstimate, MemoryUse, known_hardware
from slurmllm.plan.step import formats, step_time

_RUNNERS_UP = 2
_CHECKPOINTING = ("none", "selective", "full")  # the more of it, the less memory


def describe(candidate: LayoutEstimate) -> str:
    """`TP 32 × PP 8 × DP 4, micro batch 1, selective checkpointing, ZeRO 1, sequence parallel`."""
    recipe = candidate.config.recipe
    texts = [degrees(candidate), f"micro batch {candidate.mesh.micro_batch}"]
    texts.append(_checkpointing(recipe.train.activation_checkpointing))
    texts.append(f"ZeRO {recipe.parallel.zero}")
    if recipe.parallel.sequence:
        texts.append("sequence parallel")
    return ", ".join(texts)


def degrees(candidate: LayoutEstimate) -> str:
    """`TP 32 × PP 8 × DP 4`; `PP 8 (2 chunks)` if interleaved."""
    mesh = candidate.mesh
    chunks = f" ({mesh.virtual_pipeline} chunks)" if mesh.virtual_pipeline > 1 else ""
    return f"TP {mesh.tensor} × PP {mesh.pipeline}{chunks} × DP {mesh.data}"


def describe_memory(memory: MemoryUse, most: int | None = 3) -> str:
    """`14.1 of 15.75 GiB: activations 6.02, weights 4.11, optimizer 3.05, …`; None: all parts."""
    parts = sorted(memory.parts.items(), key=lambda part: -part[1])
    named = [f"{name.replace('_', ' ')} {format_gib(size)}" for name, size in parts[:most] if size]
    rest = ["…"] if sum(size > 0 for _, size in parts) > len(named) else []
    whole = f"{format_gib(memory.peak)} of {format_gib(memory.limit)} GiB"
    return f"{whole}: {', '.join([*named, *rest])}"


def why_too_large(memory: MemoryUse, most: int | None = 3) -> str:
    """`describe_memory`, with the excess."""
    return f"{describe_memory(memory, most)}; {format_gib(memory.peak - memory.limit)} GiB too much"


def explain(fitting: Sequence[LayoutEstimate], too_large: Sequence[LayoutEstimate]) -> list[str]:
    """Lines on why the first of the `fitting` layouts is the best: links, memory, runners-up."""
    best = fitting[0]
    lines = [f"best: {describe(best)}: {_speed(best)}"]
    lines += [f"  {line}" for line in _links(best)]
    lines += [f"  {line}" for line in _memory_limits(best, fitting, too_large)]
    # The best layouts of other tensor and pipeline degrees, else the next in order.
    meshes = {(best.mesh.tensor, best.mesh.pipeline): best}
    for candidate in fitting[1:]:
        meshes.setdefault((candidate.mesh.tensor, candidate.mesh.pipeline), candidate)
    others = list(meshes.values())[1:]
    others += [candidate for candidate in fitting[1:] if candidate not in others]
    for other in others[:_RUNNERS_UP]:
        lines.append(f"runner-up: {describe(other)}: {_speed(other)}")
        lines += [f"  {line}" for line in (_slower(best, other), *_links(other))]
    # These are in `_memory_limits` already.
    explained = {"micro_batch"}, {"activation_checkpointing"}
    faster = [
        one
        for one in too_large
        if one.seq_per_s > best.seq_per_s and differing_settings(one, best) not in explained
    ]
    if faster:
        nearest = min(faster, key=lambda one: one.memory.peak)
        lines.append(
            f"faster, but too large: {describe(nearest)}: {nearest.seq_per_s:.4g} seq/s; "
            f"{why_too_large(nearest.memory)}"
        )
    return lines


def _links(candidate: LayoutEstimate) -> Iterator[str]:
    yield _tensor(candidate)
    yield from _pipeline(candidate)
    yield _data(candidate)


def _tensor(candidate: LayoutEstimate) -> str:
    mesh, members = candidate.mesh, tensor_group(candidate.mesh)
    if mesh.tensor == 1:
        return "tensor parallel: none, each device computes whole matrices"
    hardware = known_hardware(candidate.config)
    carried, seconds = traffic(candidate).tensor, candidate.step.tensor
    line = (
        f"tensor parallel {_where(members)}: a device sends {format_bytes(carried)} per step at "
        f"{rate(members, hardware) / 1e9:.3g} GB/s, {_part(candidate, seconds)}"
    )
    if members.within_node and mesh.nodes > 1:
        share = rate(group(mesh.devices_per_node, mesh.nodes, mesh.devices_per_node), hardware)
        line += f"; its share of the network is {share / 1e9:.3g} GB/s"
    return line


def _pipeline(candidate: LayoutEstimate) -> Iterator[str]:
    mesh, step = candidate.mesh, candidate.step
    if mesh.pipeline == 1:
        yield "pipeline: none, no stage waits for another"
        return
    devices = mesh.tensor * mesh.data
    if devices >= mesh.devices_per_node:
        nodes = devices / mesh.devices_per_node
        where = f"{mesh.pipeline} stages of {nodes:g} node{'s' * (nodes != 1)} each"
    else:
        where = f"{mesh.pipeline} stages of {devices} device{'s' * (devices != 1)} each"
    yield (
        f"pipeline over {where}: a device sends {format_bytes(traffic(candidate).stages)} per step "
        f"to its neighbours, {_part(candidate, step.transfer)}"
    )
    waits = (mesh.pipeline - 1) / mesh.virtual_pipeline
    turns = "turn" if waits == 1 else "turns"
    chunks = f" / {mesh.virtual_pipeline} chunks" if mesh.virtual_pipeline > 1 else ""
    yield (
        f"bubble: ({mesh.pipeline} stages - 1){chunks} = {waits:g} {turns} in addition to the "
        f"{mesh.accumulation} micro batches of a step, {_part(candidate, step.bubble)}"
    )


def _data(candidate: LayoutEstimate) -> str:
    mesh, members = candidate.mesh, data_group(candidate.mesh)
    if mesh.data == 1:
        return "data parallel: none, one copy of the model"
    carried, left = traffic(candidate), candidate.step.data
    speed = rate(members, known_hardware(candidate.config)) / 1e9
    hidden = carried.data_s - left
    also = f", another {format_seconds(hidden)} while it computes" if hidden > 0 else ""
    return (
        f"data parallel {_where(members)}: a device sends {format_bytes(carried.data)} of "
        f"gradients and weights per step at {speed:.3g} GB/s, {_part(candidate, left)}{also}"
    )


def _memory_limits(
    best: LayoutEstimate, fitting: Sequence[LayoutEstimate], too_large: Sequence[LayoutEstimate]
) -> Iterator[str]:
    """Memory of the layout, and of a larger micro batch or less checkpointing."""
    yield f"memory: {describe_memory(best.memory)}"
    everything = (*fitting, *too_large)
    larger = [c for c in everything if differing_settings(c, best) == {"micro_batch"}]
    larger = [c for c in larger if c.mesh.micro_batch > best.mesh.micro_batch]
    if larger:
        following = min(larger, key=lambda c: c.mesh.micro_batch)
        yield f"micro batch {following.mesh.micro_batch} {_compared(following, best)}"
    level = _CHECKPOINTING.index(best.config.recipe.train.activation_checkpointing)
    for how in reversed(_CHECKPOINTING[:level]):
        for other in everything:
            held = other.config.recipe.train.activation_checkpointing
            if held == how and differing_settings(other, best) == {"activation_checkpointing"}:
                yield f"{_checkpointing(how)} {_compared(other, best)}"
                return


def _compared(other: LayoutEstimate, best: LayoutEstimate) -> str:
    if not other.fits:
        return f"would need {why_too_large(other.memory)}"
    return f"would fit ({format_gib(other.memory.peak)} GiB): {_slower(best, other)}"


def _slower(best: LayoutEstimate, other: LayoutEstimate) -> str:
    """`8 % fewer seq/s: tensor +3.1 s, bubble +1.2 s per step`, the largest difference first."""
    mine, theirs = best.step.parts(), other.step.parts()
    apart = {name: theirs[name] - mine[name] for name in mine}
    threshold = 0.001 * best.step.total
    named = sorted(
        (part for part in apart.items() if abs(part[1]) >= threshold),
        key=lambda part: -abs(part[1]),
    )
    parts = ", ".join(
        f"{name} {'+' if s > 0 else '-'}{format_seconds(abs(s))}" for name, s in named
    )
    less = 1 - other.seq_per_s / best.seq_per_s
    speed = f"{100 * less:.1f} % fewer seq/s" if round(100 * less, 1) else "as fast"
    return f"{speed}: {parts} per step" if parts else speed


def settings(candidate: LayoutEstimate) -> dict[str, int | bool | str]:
    """A layout's settings, named as in `plan --json`."""
    mesh, recipe = candidate.mesh, candidate.config.recipe
    return {
        "tensor": mesh.tensor,
        "pipeline": mesh.pipeline,
        "virtual_pipeline": mesh.virtual_pipeline,
        "data": mesh.data,
        "micro_batch": mesh.micro_batch,
        "sequence": recipe.parallel.sequence,
        "activation_checkpointing": recipe.train.activation_checkpointing,
        "zero": recipe.parallel.zero,
    }


def differing_settings(one: LayoutEstimate, other: LayoutEstimate) -> set[str]:
    return {name for name, value in settings(one).items() if settings(other)[name] != value}


def _speed(candidate: LayoutEstimate) -> str:
    parts = sorted(candidate.step.parts().items(), key=lambda part: -part[1])
    total = candidate.step.total
    shares = ", ".join(f"{name} {100 * s / total:.0f} %" for name, s in parts if s >= 0.005 * total)
    return (
        f"{candidate.seq_per_s:.4g} seq/s, MFU {100 * candidate.mfu:.1f} %, "
        f"{format_seconds(total)} per step: {shares}"
    )


def _where(members: Group) -> str:
    if members.within_node:
        return f"{members.size} inside the node"
    return f"{members.size} over {members.nodes} nodes"


def _part(candidate: LayoutEstimate, seconds: float) -> str:
    return f"{format_seconds(seconds)}, {100 * seconds / candidate.step.total:.1f} % of the step"


def _checkpointing(how: str) -> str:
    return f"{'no' if how == 'none' else how} checkpointing"


@dataclass(frozen=True)
class Traffic:
    """What one worker sends in a step."""

    tensor: float  # bytes within its tensor-parallel group
    stages: float  # bytes to the pipeline stages before and after it
    data: float  # bytes to other data-parallel workers
    data_s: float  # time of the data-parallel communication, hidden or not, s


def traffic(candidate: LayoutEstimate) -> Traffic:
    """The traffic of a worker in a middle stage of the pipeline."""
    config, mesh = candidate.config, candidate.mesh
    hardware = known_hardware(config)
    # Bytes are recovered from times: without overlap nothing is hidden, and without latency time is
    # proportional to bytes.
    shown = hardware.model_copy(update={"overlap": 0.0})
    swift = shown.model_copy(update={"node_link_latency_us": 0.0, "network_latency_us": 0.0})

    def on(figures: object) -> LayoutEstimate:
        cluster = config.cluster.model_copy(update={"hardware": figures})
        changed = replace(config, cluster=cluster)
        return replace(candidate, config=changed, step=step_time(changed, mesh))

    moved = on(swift).step
    shared = mesh.tensor if config.recipe.parallel.sequence else 1
    width = config.recipe.model.hidden_size * formats(config).computed / shared
    crossings = 2 * mesh.accumulation * mesh.virtual_pipeline if mesh.pipeline > 1 else 0
    return Traffic(
        tensor=moved.tensor * rate(tensor_group(mesh), swift),
        stages=crossings * mesh.micro_batch * config.recipe.model.seq_len * width,
        data=moved.data * rate(data_group(mesh), swift),
        data_s=on(shown).step.data,
    )
