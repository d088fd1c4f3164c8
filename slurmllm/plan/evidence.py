"""How far a prediction is from published runs, and the interval that follows from it.

`published_runs.csv` has the runs that `tools/benchmarks/planner.py` predicts, each with the ratio
of predicted to published throughput, with constants fitted to software of the same years, without
its publisher (without its model, of years with one publisher). The interval of a prediction is

    predicted · exp(± w · (1 + d / 2))

w is Student's t quantile times the root of the mean ln² ratio of the runs on such devices (GPUs, or
NeuronCores); on GPUs of those, with software of any years, that were predicted without their
publisher. Each publisher weighs the same and is one degree of freedom: a prediction is for a
trainer of one's own, which differs from theirs as they differ from each other. d is how many
octaves (factors of 2) the prediction is outside the range of the runs on the same device with the
software that the profile's shares are fitted to (`hardware.software`), summed over model size,
nodes and their devices, sequence length, tensor and pipeline degree, and below that of their
networks; 2 if there are none. Devices are the same if their peaks are, whatever the profile's name.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import mean
from typing import Literal

from pydantic import TypeAdapter

from slurmllm.core.config.cluster import Hardware
from slurmllm.core.format import format_count, format_number
from slurmllm.plan.parameters import parameters
from slurmllm.plan.search import LayoutEstimate, known_hardware
from slurmllm.plan.step import step_time

FILE = Path(__file__).parent / "published_runs.csv"
_SAME_PEAK = 0.15  # devices of one make differ by less in peak, also as measured or with less power
FAR = 2.0  # octaves outside the range from which a prediction is `beyond`
_NETWORK = "network_gb_s"  # of several nodes; a faster one is not outside
Status = Literal["interpolated", "extrapolated", "beyond"]
STATUS_TEXTS: dict[Status, str] = {
    "interpolated": "interpolated between published runs",
    "extrapolated": "extrapolated from published runs",
    "beyond": "beyond all published runs",
}
# Fields of a run by which the distance to it is measured.
_AXES = ("parameters", "nodes", "devices_per_node", "sequence", "tensor", "pipeline", _NETWORK)


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
    bf16_tflops: float  # peak of a device
    memory_gib: float  # of a device
    network_gb_s: float  # of a node
    seq_per_s: float
    mfu: float
    left_out: float  # predicted over published, with constants fitted without its model
    generation: str  # years of its software, such as 2023-26; constants are fitted by generation
    publisher: str  # or its model; its runs are left out of the fit that predicts them
    source: str

    @property
    def point(self) -> dict[str, float]:
        names = _AXES if self.nodes > 1 else _AXES[:-1]
        return {name: getattr(self, name) for name in names}

    def is_on(self, hardware: Hardware) -> bool:
        return math.isclose(self.bf16_tflops, hardware.bf16_tflops, rel_tol=_SAME_PEAK)


@dataclass(frozen=True)
class RunEvidence:
    """What published runs support of a prediction.

    Attributes:
        reasons: Why the prediction is not interpolated.
        nearest: The run of the same hardware that differs by the fewest octaves, summed over
            `_AXES`; None without a run on this hardware.
        interval: Lower and upper bound, sequences/s; None without a run on this kind of device.
    """

    status: Status
    reasons: Sequence[str]
    generations: str  # of the software of the runs on the same hardware
    nearest: MeasuredRun | None = None
    interval: tuple[float, float] | None = None

    @property
    def interval_text(self) -> str:
        """Return `14.1–17.9`, sequences/s."""
        return "–".join(map(format_number, self.interval)) if self.interval else "-"

    def hours_interval(self, hours: float | None) -> tuple[float, float] | None:
        """Return the bounds of a predicted time that follow from those of the throughput."""
        if hours is None or self.interval is None:
            return None
        factor = math.sqrt(self.interval[1] / self.interval[0])
        return hours / factor, hours * factor


def evidence_text(published: RunEvidence) -> str:
    """Return the interval with its evidence, and the nearest published run."""
    interval = f"{published.interval_text} seq/s (90 % interval)"
    facts = [interval if published.interval else "no interval", STATUS_TEXTS[published.status]]
    if (near := published.nearest) is not None:
        facts.append(f"for software of {published.generations}")
        speed = f"{near.seq_per_s:.4g} seq/s, MFU {100 * near.mfu:.1f} %"
        facts.append(f"nearest run {near.name}: {speed}")
    return "; ".join([*facts, *published.reasons])


@lru_cache
def published_runs() -> Sequence[MeasuredRun]:
    with FILE.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    return TypeAdapter(list[MeasuredRun]).validate_python(rows)


def outside(point: Mapping[str, float], runs: Sequence[MeasuredRun]) -> dict[str, float]:
    """Return axis → octaves by which a point is outside the range of the runs, one at least."""
    octaves = {}
    for axis, value in point.items():
        values = [run.point[axis] for run in runs if axis in run.point] or [value]
        highest = math.inf if axis == _NETWORK else max(values)
        nearest = min(max(value, min(values)), highest)
        distance = abs(math.log2(value / nearest))
        # Variants of a model that differ by their vocabulary are the same size.
        if distance > 0.1:
            octaves[axis] = distance
    return octaves


def half_width(runs: Sequence[MeasuredRun], octaves: float) -> float:
    """Return half the interval's width, as a logarithm, from the errors of left-out runs."""
    from scipy.special import stdtrit

    squares: defaultdict[str, list[float]] = defaultdict(list)
    for run in runs:
        squares[run.publisher].append(math.log(run.left_out) ** 2)
    variance = mean(mean(values) for values in squares.values())
    return float(stdtrit(len(squares), 0.95)) * math.sqrt(variance) * (1 + octaves / 2)


def evidence(candidate: LayoutEstimate) -> RunEvidence:
    cluster, mesh, speed = candidate.config.cluster, candidate.mesh, candidate.seq_per_s
    hardware = known_hardware(candidate.config)
    of_kind = runs_on(cluster.device)
    published_apart = [run for run in of_kind if run.publisher != run.model]
    software = hardware.software
    runs = [r for r in of_kind if r.is_on(hardware) and software in (None, r.generation)]
    size = parameters(candidate.config.recipe.model)
    point: dict[str, float] = {
        "parameters": size,
        "nodes": mesh.nodes,
        "devices_per_node": mesh.devices_per_node,
        "sequence": candidate.config.recipe.model.seq_len,
        "tensor": mesh.tensor,
        "pipeline": mesh.pipeline,
    }
    if mesh.nodes > 1:
        point[_NETWORK] = hardware.network_gb_s
    beyond = outside(point, runs)
    octaves = sum(beyond.values())
    reasons = [
        f"{axis} {format_count(point[axis])} is a factor of {2**distance:.3g} "
        "outside the published runs"
        for axis, distance in beyond.items()
    ]
    if not runs:
        octaves = FAR
        reasons = [f"no published run on {cluster.name}"]
        if years := generations(run for run in of_kind if run.is_on(hardware)):
            reasons[0] += f" has software of {software}, only of {years}"
    if candidate.config.recipe.train.is_fp8:
        octaves += FAR
        reasons.append("no run in fp8_mixed is among the published ones")
    alike = [run for run in runs if size / 2 <= run.parameters <= 2 * size]
    highest = max((run.mfu for run in alike or runs), default=math.inf)
    if candidate.mfu > highest:
        reasons.append(
            f"MFU {100 * candidate.mfu:.1f} % is above the highest published on this hardware for "
            f"such a model, {100 * highest:.1f} %"
        )
    status: Status = "extrapolated" if reasons else "interpolated"
    if not of_kind:
        return RunEvidence("beyond", reasons, "")
    factor = math.exp(half_width(published_apart or of_kind, octaves))
    if octaves >= FAR or candidate.mfu / factor > highest:
        status = "beyond"

    def octaves_apart(run: MeasuredRun) -> float:
        axes = point.keys() & run.point.keys()
        return sum(abs(math.log2(point[axis] / run.point[axis])) for axis in axes)

    nearest = min(runs, key=octaves_apart, default=None)
    interval = speed / factor, speed * factor
    return RunEvidence(status, reasons, generations(runs), nearest, interval)


def network_range(candidate: LayoutEstimate) -> tuple[float, float] | None:
    """Return sequences/s at both bounds of an assumed network efficiency; None if it is
    measured, or on one node.
    """
    config, mesh = candidate.config, candidate.mesh
    hardware = known_hardware(config)
    if hardware.network_efficiency_range is None or mesh.nodes == 1:
        return None
    rates = []
    for efficiency in hardware.network_efficiency_range:
        other = hardware.model_copy(update={"network_efficiency": efficiency})
        cluster = config.cluster.model_copy(update={"hardware": other})
        rates.append(mesh.global_batch / step_time(replace(config, cluster=cluster), mesh).total)
    return min(rates), max(rates)


@lru_cache
def runs_on(device: str) -> Sequence[MeasuredRun]:
    """Return the published runs on a kind of device."""
    neuron = {"neuron": True, "cuda": False}.get(device)
    return [run for run in published_runs() if run.profile.startswith("trn") is neuron]


def generations(runs: Iterable[MeasuredRun]) -> str:
    return ", ".join(sorted({run.generation for run in runs}))
