"""What works near a request that no layout fits: other node counts and global batches."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, takewhile
from typing import Any

from slurmllm.config.resolve import RunConfig
from slurmllm.config.rules import divisors
from slurmllm.format import format_gib, format_number, format_plural
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

_SHORTEST = 128  # tokens: shorter sequences are not suggested
_NEAR = 0.05  # a batch that differs by less is suggested if it is faster by more than _FASTER
_FASTER = 1.03


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

    A side on which there is none is left out. A batch that is farther away, but by less than 5 %,
    is added if it is faster by more than 3 %. Node counts above `LARGEST` are not tried. A
    tensor-parallel degree that the search does not try is added if it fits with the same nodes and
    batch.
    Arguments are those of `search`; with `train.global_batch` fixed, no batches are tried.
    """
    where = f"on {format_plural(nodes, 'node')}"

    def suggest(
        options: tuple[str, str],
        change: str,
        ratio: float = 1.0,
        config: RunConfig = config,
        nodes: int = nodes,
        fixed: Collection[str] = fixed,
    ) -> SettingSuggestion | None:
        if not some_fits(config, nodes, unsupported, fixed):
            return None
        return SettingSuggestion(options, change, ratio, config, nodes, unsupported, fixed)

    def with_nodes(count: int) -> SettingSuggestion | None:
        minimum = ", the minimum" * (count > nodes and not changes)
        text = f"{format_change(count, nodes)} nodes{minimum}"
        return suggest(("--nodes", str(count)), text, count / nodes, nodes=count)

    changes: list[SettingSuggestion] = []
    for counts in next_to(nodes, _possible_nodes(config, fixed)):
        changes += islice(filter(None, map(with_nodes, counts)), 1)
    batch = config.recipe.train.global_batch

    def with_batch(size: int) -> SettingSuggestion | None:
        text = f"{format_change(size, batch)} sequences a step, {where}"
        changed = config.with_settings("train", global_batch=size)
        return suggest(("--set", f"train.global_batch={size}"), text, size / batch, changed)

    closest: list[SettingSuggestion] = []
    farther: list[SettingSuggestion] = []
    for sizes in next_to(batch, _possible_batches(config, nodes, fixed)):
        fitting = filter(None, map(with_batch, sizes))
        closest += islice(fitting, 1)
        farther += takewhile(lambda change: abs(change.ratio - 1) < _NEAR, fitting)
    changes += closest
    if farther:
        fastest = max(farther, key=lambda change: change.best.seq_per_s)
        if fastest.best.seq_per_s > _FASTER * max(change.best.seq_per_s for change in closest):
            changes.append(fastest)
    for changed, fixed_too in _other_degrees(config, fixed):
        options = ("--set", f"parallel.tensor={changed.recipe.parallel.tensor}")
        text = f"no published run of {config.cluster.name} has that degree, {where}"
        if change := suggest(options, text, config=changed, fixed=fixed_too):
            return [*changes, change]
    return changes


def no_batch_reason(
    config: RunConfig, nodes: int, unsupported: Unsupported, fixed: Collection[str] = ()
) -> str:
    """Return why no global batch fits on a number of nodes; arguments as for `fitting_changes`."""
    none = f"no other global batch fits on {format_plural(nodes, 'node')}"
    batch = config.recipe.train.global_batch
    sizes = sorted(_possible_batches(config, nodes, fixed), key=lambda size: abs(size - batch))
    if not sizes:
        devices = nodes * config.cluster.devices_per_node
        return f"{none}: no product of tensor and pipeline degree divides the {devices:,} workers"
    changed = [config.with_settings("train", global_batch=size) for size in sizes]
    layouts = chain.from_iterable(smallest_layouts(c, nodes, unsupported, fixed) for c in changed)
    least = min(layouts, key=lambda layout: layout.memory.peak, default=None)
    if least is None:
        refused = search(changed[0], nodes, unsupported, fixed).refused
        return f"{none}: {next(iter(refused), 'no layout is possible')}"
    return (
        f"{none}: {describe(least)} needs the least memory, {format_gib(least.memory.peak)} of "
        f"{format_gib(least.memory.limit)} GiB"
    )


def memory_shortfall(
    config: RunConfig, nodes: int, unsupported: Unsupported, fixed: Collection[str] = ()
) -> list[str]:
    """Return what a run lacks that fits on no number of nodes.

    Returns:
        The layout that needs the least memory on any number of nodes, with the bytes that are
        missing, and the longest sequence that would fit; empty if no layout is possible at all.
    """
    configs = [(config, fixed), *_other_degrees(config, fixed)]

    def smallest(length: int) -> Iterator[LayoutEstimate]:
        shorter = [(base.with_settings("model", seq_len=length), names) for base, names in configs]
        counts = {count for base, names in shorter for count in _possible_nodes(base, names)}
        for count in sorted({*counts, nodes}, key=lambda count: (abs(count - nodes), count)):
            for base, names in shorter:
                yield from smallest_layouts(base, count, unsupported, names)

    length = config.recipe.model.seq_len
    least = min(smallest(length), key=lambda e: (e.memory.peak, e.mesh.nodes), default=None)
    if least is None:
        return []
    missing = format_gib(least.memory.peak - least.memory.limit)
    lines = [
        f"no number of nodes up to {LARGEST} is enough: {describe(least)} needs the least, on "
        f"{format_plural(least.mesh.nodes, 'node')} {describe_memory(least.memory)}; a device "
        f"with {missing} GiB more would do"
    ]
    scores = score_bytes(least.config, least.mesh) if config.backend == "nxd" else 0
    if 2 * scores > least.memory.peak:
        lines.append(
            f"attention scores are {format_gib(scores)} GiB of it: the {config.backend} backend "
            "computes those of a whole sequence at once, seq_len² for each head"
        )
    while (length := length // 2) >= _SHORTEST:
        if fitting := next((layout for layout in smallest(length) if layout.fits), None):
            mesh = fitting.mesh
            options = f"--set model.seq_len={length} --nodes {mesh.nodes}"
            if "parallel.tensor" not in fixed:
                options += f" --set parallel.tensor={mesh.tensor}"
            return [*lines, f"{options}: would fit, with shorter sequences"]
    return lines


def _other_degrees(
    config: RunConfig, fixed: Collection[str]
) -> list[tuple[RunConfig, Collection[str]]]:
    """Return configurations with the tensor-parallel degrees not searched, and their `fixed`."""
    if "parallel.tensor" in fixed:
        return []
    tried = {tensor for tensor, _ in model_degrees(config, LARGEST, fixed)}
    return [
        (config.with_settings("parallel", tensor=tensor), (*fixed, "parallel.tensor"))
        for tensor in divisors(config.recipe.model.num_heads)
        if tensor <= config.cluster.devices_per_node and tensor not in tried
    ]


def _possible_nodes(config: RunConfig, fixed: Collection[str]) -> set[int]:
    meshes = model_degrees(config, LARGEST, fixed)
    return {n for n in near_nodes(config, meshes, _at_once(config, fixed)) if n <= LARGEST}


def _possible_batches(config: RunConfig, nodes: int, fixed: Collection[str]) -> set[int]:
    parallel, world = config.recipe.parallel, nodes * config.cluster.devices_per_node
    batches: set[int] = set()
    if "train.global_batch" in fixed:
        return batches
    for tensor, pipeline in model_degrees(config, nodes, fixed):
        data, rest = divmod(world, tensor * pipeline)
        interleaved = "parallel.virtual_pipeline" in fixed and parallel.virtual_pipeline > 1
        rounds = pipeline if interleaved else 1
        if not rest:
            unit = data * _at_once(config, fixed) * rounds
            batches.update(near_batches(config.recipe.train.global_batch, unit))
    return batches


def _at_once(config: RunConfig, fixed: Collection[str]) -> int:
    """Return the sequences that a data-parallel worker takes at once, at least."""
    micro = config.recipe.train.micro_batch
    return 1 if micro == "auto" or "train.micro_batch" not in fixed else micro
