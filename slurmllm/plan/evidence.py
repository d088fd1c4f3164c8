"""How far a prediction is from published runs, and the interval that follows from it.

`published_runs.csv` has the runs that `tools/benchmarks/planner.py` predicts, each with the ratio
of predicted to published throughput, with constants fitted to the other models only. The
interval of a prediction is

    predicted · exp(± w · (1 + d / 2))

w is the 90 % quantile of |ln ratio| of the runs on the same hardware; if there are none, of those
on all GPUs or on trn1. d is how many octaves (factors of 2) the prediction is outside the range of
the runs on the same hardware, summed over model size, nodes and their devices, sequence length,
tensor and pipeline degree, and below that of their networks; 2 if there are none.
`parallel.shard_nodes`, which no published run has, adds 1. Hardware is the same if peak and memory
of a device are, whatever the profile is called. The interval holds for software of the runs' years.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from slurmllm.core.config.cluster import Hardware
from slurmllm.core.config.layers import value_at
from slurmllm.core.config.profiles import read_profile
from slurmllm.core.config.resolve import clusters_dir
from slurmllm.core.format import format_number, format_plural
from slurmllm.plan.parameters import parameters
from slurmllm.plan.search import LayoutEstimate
from slurmllm.plan.step import step_time

FILE = Path(__file__).parent / "published_runs.csv"
_SAME = 0.05  # devices of one make differ by less in peak and memory, also as measured
_COPIES = 1.0  # octaves that copies of shards count for: a guess, as no published run has them
_FAR = 2.0  # octaves outside the range from which a prediction is `beyond`
Status = Literal["interpolated", "extrapolated", "beyond"]
_STATUS: dict[Status, str] = {
    "interpolated": "interpolated between published runs on this hardware",
    "extrapolated": "extrapolated from published runs on this hardware",
    "beyond": "beyond all published runs",
}


@dataclass(frozen=True)
class MeasuredRun:
    """A published run."""

    name: str
    profile: str  # of the cluster that it ran on
    model: str
    parameters: int
    nodes: int
    devices_per_node: int
    sequence: int
    tensor: int
    pipeline: int
    network_gb_s: float  # of a node
    seq_per_s: float
    mfu: float
    left_out: float  # predicted over published, with constants fitted without its model
    generation: str  # years of its software, such as 2023-24; constants are fitted by generation
    source: str

    @property
    def point(self) -> dict[str, float]:
        unused = _NETWORK if self.nodes == 1 else ""
        return {name: getattr(self, name) for name in _AXES if name != unused}


COLUMNS = tuple(field.name for field in fields(MeasuredRun))
# In JSON.
_SHOWN = [name for name in COLUMNS if name not in ("profile", "parameters", "left_out")]
_NETWORK = "network_gb_s"  # of several nodes; a faster one is not outside
# Fields by which the distance of runs is measured → their names in messages.
_AXES = {
    "parameters": "model size",
    "nodes": "nodes",
    "devices_per_node": "devices of a node",
    "sequence": "sequence length",
    "tensor": "tensor degree",
    "pipeline": "pipeline stages",
    _NETWORK: "network (GB/s)",
}


@dataclass(frozen=True)
class RunEvidence:
    """What published runs support of a prediction.

    Attributes:
        reasons: Why the prediction is not interpolated: what is outside which range.
        nearest: The run of the same hardware that differs by the fewest octaves, summed over
            `_AXES`; None without a run on this hardware.
        lower, upper: The interval, sequences/s; None without a run on this kind of device.
    """

    status: Status
    reasons: tuple[str, ...]
    generations: str  # of the software of the runs on the same hardware
    nearest: MeasuredRun | None
    lower: float | None
    upper: float | None

    def to_json(self) -> dict[str, Any]:
        near = self.nearest
        interval = None if self.lower is None else [self.lower, self.upper]
        return {
            "evidence": self.status,
            "evidence_reasons": list(self.reasons),
            "evidence_software": self.generations or None,
            "nearest_run": near and {name: getattr(near, name) for name in _SHOWN},
            "seq_per_s_interval": interval,
        }


def interval_text(published: RunEvidence) -> str:
    """Return `14.1–17.9`, sequences/s."""
    if published.lower is None or published.upper is None:
        return "-"
    return f"{format_number(published.lower)}–{format_number(published.upper)}"


def evidence_text(candidate: LayoutEstimate) -> str:
    """Return `15.02–19.04 seq/s (90 % interval, …); interpolated between …`."""
    published = evidence(candidate)
    why = f": {'; '.join(published.reasons)}" if published.reasons else ""
    span = ""
    if published.lower is not None:
        method = "90 % interval, by the errors on published runs left out of the fit"
        span = f"{interval_text(published)} seq/s ({method}); "
    software = f" (software of {published.generations})" if published.generations else ""
    return f"{span}{_STATUS[published.status]}{software}{why}"


def evidence_lines(candidate: LayoutEstimate) -> Iterator[str]:
    """Yield a layout's interval with its evidence, and the nearest published run."""
    yield f"evidence       {evidence_text(candidate)}"
    near = evidence(candidate).nearest
    if near is not None:
        devices = near.nodes * near.devices_per_node
        size = "one GPU" if devices == 1 else format_plural(near.nodes, "node")
        yield (
            f"nearest run    {near.name}: {near.model} on {size}, sequence {near.sequence:,}, "
            f"TP {near.tensor} × PP {near.pipeline}: {near.seq_per_s:.4g} seq/s, "
            f"MFU {100 * near.mfu:.1f} %"
        )
    span = network_range(candidate)
    if span is not None:
        yield (
            f"network        {format_number(span[0])}–{format_number(span[1])} seq/s over the "
            "assumed range of network_efficiency"
        )


@lru_cache
def published_runs() -> tuple[MeasuredRun, ...]:
    kinds = {"int": int, "float": float, "str": str}
    with FILE.open(encoding="utf-8", newline="") as lines:
        return tuple(
            MeasuredRun(**{f.name: kinds[str(f.type)](row[f.name]) for f in fields(MeasuredRun)})
            for row in csv.DictReader(lines)
        )


def outside(point: Mapping[str, float], runs: Iterable[MeasuredRun]) -> dict[str, float]:
    """Return axis → octaves by which a point is outside the runs' range; {"": _FAR} if none."""
    octaves = {}
    points = [run.point for run in runs]
    if not points:
        return {"": _FAR}
    for axis, value in point.items():
        values = [run_point[axis] for run_point in points if axis in run_point] or [value]
        above = 0.0 if axis == _NETWORK else math.log2(value / max(values))
        beyond = max(math.log2(min(values) / value), above)
        # Variants of a model that differ by their vocabulary are the same size.
        if beyond > 0.1:
            octaves[axis] = beyond
    return octaves


def half_width(runs: Sequence[MeasuredRun], octaves: float) -> float:
    """Return half the interval's width, as a logarithm, from the errors of left-out runs."""
    errors = sorted(abs(math.log(run.left_out)) for run in runs)
    return errors[math.ceil(0.9 * len(errors)) - 1] * (1 + octaves / 2)


def evidence(candidate: LayoutEstimate) -> RunEvidence:
    cluster, mesh = candidate.config.cluster, candidate.mesh
    of_kind = _of_kind(cluster.device)
    if not of_kind:
        reason = f"no published run on {cluster.device}"
        return RunEvidence("beyond", (reason,), "", None, None, None)
    same_hardware = runs_on(cluster.device, cluster.hardware)
    point: dict[str, float] = {
        "parameters": parameters(candidate.config.recipe.model),
        "nodes": mesh.nodes,
        "devices_per_node": mesh.devices_per_node,
        "sequence": candidate.config.recipe.model.seq_len,
        "tensor": mesh.tensor,
        "pipeline": mesh.pipeline,
    }
    if mesh.nodes > 1 and cluster.hardware is not None:
        point[_NETWORK] = cluster.hardware.network_gb_s
    beyond = outside(point, same_hardware)
    octaves = sum(beyond.values())
    reasons = [] if same_hardware else [f"no published run on {cluster.name}"]
    for axis in beyond if same_hardware else ():
        values = [run.point[axis] for run in same_hardware if axis in run.point]
        low, high = (_axis_text(axis, value) for value in (min(values), max(values)))
        span = low if low == high else f"{low} to {high}"
        value = _axis_text(axis, point[axis])
        reasons.append(f"{_AXES[axis]} {value} is outside {span} of the published runs")
    if mesh.replicate > 1:
        octaves += _COPIES
        reasons.append("no published run keeps copies of its shards (parallel.shard_nodes)")
    size = point["parameters"]
    alike = [run for run in same_hardware if size / 2 <= run.parameters <= 2 * size]
    highest = max((run.mfu for run in alike or same_hardware), default=math.inf)
    if candidate.mfu > highest:
        peers = "models of half to twice the size" if alike else "any model"
        reasons.append(
            f"MFU {100 * candidate.mfu:.1f} % is above the highest published on this hardware for "
            f"{peers}, {100 * highest:.1f} %"
        )
    factor = math.exp(half_width(same_hardware or of_kind, octaves))

    def octaves_apart(run: MeasuredRun) -> float:
        axes = point.keys() & run.point.keys()
        return sum(abs(math.log2(point[axis] / run.point[axis])) for axis in axes)

    near = min(same_hardware, key=octaves_apart, default=None)
    far = octaves >= _FAR or candidate.mfu / factor > highest
    status: Status = "beyond" if far else "extrapolated" if reasons else "interpolated"
    speed = candidate.seq_per_s
    interval = speed / factor, speed * factor
    return RunEvidence(status, tuple(reasons), generations(same_hardware), near, *interval)


def network_range(candidate: LayoutEstimate) -> tuple[float, float] | None:
    """Return sequences/s at both bounds of an assumed network efficiency; None if it is
    measured, or on one node.
    """
    config, mesh = candidate.config, candidate.mesh
    hardware = config.cluster.hardware
    if hardware is None or hardware.network_efficiency_range is None or mesh.nodes == 1:
        return None
    rates = []
    for efficiency in hardware.network_efficiency_range:
        other = hardware.model_copy(update={"network_efficiency": efficiency})
        cluster = config.cluster.model_copy(update={"hardware": other})
        step = step_time(replace(config, cluster=cluster), mesh)
        rates.append(mesh.global_batch / step.total)
    return min(rates), max(rates)


@lru_cache
def _of_kind(device: str) -> tuple[MeasuredRun, ...]:
    neuron = {"neuron": True, "cuda": False}.get(device)
    return tuple(run for run in published_runs() if run.profile.startswith("trn") is neuron)


@lru_cache
def runs_on(device: str, hardware: Hardware | None) -> tuple[MeasuredRun, ...]:
    if hardware is None:
        return ()
    tflops, gib = hardware.bf16_tflops, hardware.memory_gib

    def is_same(peak: float, memory: float) -> bool:
        return abs(peak / tflops - 1) < _SAME and abs(memory / gib - 1) < _SAME

    return tuple(run for run in _of_kind(device) if is_same(*_peaks_of(run.profile)))


def generations(runs: Iterable[MeasuredRun]) -> str:
    return ", ".join(sorted({run.generation for run in runs}))


@lru_cache
def _peaks_of(profile: str) -> tuple[float, float]:
    """Return peak, TFLOP/s, and memory, GiB, of a shipped profile's devices."""
    tree = read_profile(clusters_dir() / f"{profile}.yaml", clusters_dir())
    return value_at(tree, "hardware.bf16_tflops"), value_at(tree, "hardware.memory_gib")


def _axis_text(axis: str, value: float) -> str:
    return f"{value / 1e9:.3g}B" if axis == "parameters" else f"{value:,g}"
