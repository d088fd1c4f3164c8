"""What works near a request that no layout fits: other node counts and global batches."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.format import format_gib, format_number, format_plural
from slurmllm.plan.estimate import LayoutEstimate
from slurmllm.plan.explain import describe, describe_memory
from slurmllm.plan.mesh import format_change, near_batches, near_nodes, next_to
from slurmllm.plan.neuron_memory import score_bytes
from slurmllm.plan.search import (
    LARGEST,
    Unsupported,
    model_degrees,
    search,
    smallest_layouts,
    some_fits,
)


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
