"""Why a layout is the best, why others are not, and what works near a request that none fits."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.format import (
    Json,
    by_key,
    format_gib,
    format_mfu,
    format_number,
    format_plural,
    format_seconds,
)
from slurmllm.plan.mesh import format_change, near_batches, near_nodes, next_to
from slurmllm.plan.neuron_memory import score_bytes
from slurmllm.plan.search import (
    LARGEST,
    LayoutEstimate,
    MemoryUse,
    SearchResult,
    Unsupported,
    model_degrees,
    search,
    smallest_layouts,
    some_fits,
)

_MOST_REASONS = 4  # for refused layouts


def describe_memory(memory: MemoryUse) -> str:
    """Return `14.1 of 15.75 GiB: activations 6.02, …`: the parts of at least 1 %, by size."""
    sizes = ", ".join(
        f"{name.replace('_', ' ')} {format_gib(size)}"
        for name, size in sorted(memory.parts.items(), key=lambda named: -named[1])
        if size >= 0.01 * memory.peak
    )
    return f"{memory}: {sizes}"


def why_too_large(memory: MemoryUse) -> str:
    """Return `describe_memory` and the excess over the limit: `…; 2.31 GiB too much`."""
    return f"{describe_memory(memory)}; {format_gib(memory.peak - memory.limit)} GiB too much"


def explain(result: SearchResult, runners_up: Sequence[LayoutEstimate]) -> Iterator[str]:
    """Yield lines on why the first layout is the best."""
    best = result.fitting[0]
    yield f"best: {best.description}: {_speed(best)}"
    tight = "tight: " if best.memory.tight else ""
    yield f"  memory: {tight}{describe_memory(best.memory)}"
    fastest = max(result.fitting, key=lambda layout: layout.seq_per_s)
    if fastest.memory.tight and fastest is not best:
        yield f"faster, but ranked lower because tight: {fastest.description}: {_speed(fastest)}"
    for layout in runners_up:
        yield f"runner-up: {layout.description}: {_speed(layout)}"
        yield f"  {_slowdown(best, layout)}"
    faster = [layout for layout in result.too_large if layout.seq_per_s > best.seq_per_s]
    if faster:
        yield (
            f"faster, but too large: {faster[0].description}: {_speed(faster[0])}; "
            f"{why_too_large(faster[0].memory)}"
        )


def _slowdown(best: LayoutEstimate, other: LayoutEstimate) -> str:
    """Return `-8.0 % seq/s: tensor +3.1 s, bubble +1.2 s per step`, the largest first."""
    other_parts = other.step.parts()
    parts = {name: other_parts[name] - value for name, value in best.step.parts().items()}
    differences = ", ".join(
        f"{name} {'+' if change_s > 0 else '-'}{format_seconds(abs(change_s))}"
        for name, change_s in sorted(parts.items(), key=lambda part: -abs(part[1]))
        if abs(change_s) >= 0.001 * best.step.total
    )
    percent = 100 * (other.seq_per_s / best.seq_per_s - 1)
    return f"{percent:+.1f} % seq/s: {differences or 'the same'} per step"


def most_refused(refused: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the commonest reasons for refused layouts, as (reason, number of layouts).

    Reasons that differ only in numbers are counted together.
    """
    groups = by_key((re.sub(r"\d+", "#", reason), reason) for reason in refused)
    rows = []
    for reasons in groups.values():
        similar = f" (and {len(reasons) - 1} similar rules)" if len(reasons) > 1 else ""
        rows.append((reasons[0] + similar, sum(refused[reason] for reason in reasons)))
    return sorted(rows, key=lambda row: -row[1])[:_MOST_REASONS]


def misfit_reasons(result: SearchResult) -> list[str]:
    """Return why no layout fits: the smallest one's memory, or the commonest broken rules."""
    for layout in result.too_large[:1]:
        return [f"closest to fitting: {layout.description}: {why_too_large(layout.memory)}"]
    return [
        f"{format_plural(count, 'layout')}: {reason}"
        for reason, count in most_refused(result.refused)
    ]


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


def figures(candidate: LayoutEstimate) -> Json:
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
    return {name for name, _ in settings(layout).items() ^ settings(other).items()}


def _speed(candidate: LayoutEstimate) -> str:
    return (
        f"{candidate.seq_per_s:.4g} seq/s, "
        f"MFU {format_mfu(candidate.mfu, candidate.config.recipe.train.precision, 1)}, "
        f"{format_seconds(candidate.step.total)} per step"
    )


@dataclass(frozen=True)
class SettingSuggestion:
    """A change of a request with which a layout fits."""

    options: tuple[str, str]  # of the command line: `--nodes 8`, `--set train.global_batch=264`
    change: str  # what that changes
    ratio: float  # of the new node count or batch to the old one
    best: LayoutEstimate  # the best layout with the change

    def __str__(self) -> str:
        speed = format_number(self.best.seq_per_s)
        return f"{' '.join(self.options)}: {self.change}; {speed} seq/s predicted"

    def to_json(self) -> Json:
        mesh = self.best.mesh
        return {
            "options": self.options,
            "change": self.change,
            "nodes": mesh.nodes,
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
    on_nodes = f"on {format_plural(nodes, 'node')}"
    requests = (
        (nodes, _possible_nodes(config, fixed), "--nodes", "", "nodes"),
        (
            config.recipe.train.global_batch,
            _possible_batches(config, nodes, fixed),
            "--set",
            "train.global_batch=",
            f"sequences a step, {on_nodes}",
        ),
    )
    changes = []
    for requested, possible, option, setting, noun in requests:
        for values in next_to(requested, possible):
            for value in values:
                changed, count = config, value
                if setting:
                    changed, count = config.with_settings("train", global_batch=value), nodes
                if some_fits(changed, count, unsupported, fixed):
                    best = search(changed, count, unsupported, fixed).fitting[0]
                    change = f"{format_change(value, requested)} {noun}"
                    options = (option, f"{setting}{value}")
                    changes.append(SettingSuggestion(options, change, value / requested, best))
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
    layouts = [
        layout
        for count in (nodes, *_possible_nodes(config, fixed))
        for layout in smallest_layouts(config, count, unsupported, fixed)
    ]
    if not layouts:
        return []
    smallest = min(layouts, key=lambda layout: (layout.memory.peak, layout.mesh.nodes))
    lines = [
        f"no number of nodes up to {LARGEST} is enough: {smallest.description} needs the least, on "
        f"{format_plural(smallest.mesh.nodes, 'node')} {why_too_large(smallest.memory)}"
    ]
    scores = score_bytes(smallest.config, smallest.mesh) if config.backend == "nxd" else 0
    if 2 * scores > smallest.memory.peak:
        lines.append(
            f"attention scores are {format_gib(scores)} GiB of it: the nxd backend computes those "
            "of a whole sequence at once, seq_len² for each head; shorten model.seq_len"
        )
    return lines


def _possible_nodes(config: RunConfig, fixed: Collection[str]) -> set[int]:
    meshes = model_degrees(config, LARGEST, fixed)
    return {n for n in near_nodes(config, meshes, _at_once(config, fixed)) if n <= LARGEST}


def _possible_batches(config: RunConfig, nodes: int, fixed: Collection[str]) -> set[int]:
    train, parallel = config.recipe.train, config.recipe.parallel
    batches: set[int] = set()
    if "train.global_batch" in fixed:
        return batches
    interleaved = "parallel.virtual_pipeline" in fixed and parallel.virtual_pipeline > 1
    for tensor, pipeline in model_degrees(config, nodes, fixed):
        data, remainder = divmod(nodes * config.cluster.devices_per_node, tensor * pipeline)
        if not remainder:
            unit = data * _at_once(config, fixed) * (pipeline if interleaved else 1)
            batches.update(near_batches(train.global_batch, unit))
    return batches


def _at_once(config: RunConfig, fixed: Collection[str]) -> int:
    """Return the sequences that a data-parallel worker takes at once, at least."""
    micro = config.recipe.train.micro_batch
    return 1 if micro == "auto" or "train.micro_batch" not in fixed else micro
