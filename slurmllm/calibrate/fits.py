"""From measurements to the figures that the planner reads; torch-free.

Each figure is the one with which the planner's own formula (`plan/step.py`) gives back what was
measured. A maker's peak that the profile already has is kept, as long as nothing was faster;
without one the peak is the fastest that was seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from slurmllm.calibrate.node import Kind, Sample, Task
from slurmllm.config.cluster import GIB, Hardware
from slurmllm.errors import NodeError

_MOVED_SHARE = 0.8  # of a product's seconds: then it measures memory, not matrix units
_DIGITS = 4


@dataclass(frozen=True)
class Found:
    """Fitted hardware figures."""

    hardware: Hardware
    notes: tuple[str, ...]  # one line for each figure that was not measured, with its replacement


def hardware_of(
    samples: Sequence[Sample], task: Task, given: Hardware | None, source: str
) -> Found:
    """Compute the figures from measurements.

    Args:
        given: The profile's figures so far; rough ones replace what is not measured, and
            count for nothing else.

    Raises:
        NodeError: a measurement is missing.
    """
    found = _Samples(samples)
    notes: list[str] = []
    # What is not measured stays as it was: the overlap of data-parallel communication, for one.
    unfitted = {"source", "rough", "assumed"}
    values: dict[str, Any] = given.model_dump(exclude=unfitted) if given else {}
    values |= _memory(found, given)
    values |= _matrices(found, task.precision, given, values["memory_gb_s"])
    # FLOP/s, of the profile's TFLOP/s.
    peak = values[f"{task.precision}_tflops"] * 1e12
    attention = found.one("attention", task.precision)
    values["attention_efficiency"] = min(1.0, attention.sizes[0] / attention.value / peak)
    values |= _links(found, task, given, values["memory_gb_s"], notes)
    # Tiny models of few and of more layers: a block's operators, and the rest of a step. The
    # planner counts forward once and backward twice.
    few, *_, many = found.several("step")
    layer = max(0.0, (many.value - few.value) / (many.sizes[0] - few.sizes[0]))
    values["operator_us"] = layer / few.sizes[1] / 3 * 1e6
    values["step_overhead_s"] = max(0.0, few.value - few.sizes[0] * layer)
    rounded: dict[str, Any] = {
        name: float(f"{value:.{_DIGITS}g}") if isinstance(value, int | float) else value
        for name, value in values.items()
    }
    # What was measured is no longer assumed.
    links = {"node": "node_link_efficiency", "network": "network_efficiency"}
    kept = {"overlap", "part_of_node"}
    kept |= {name for where, name in links.items() if not found.all("all_reduce", where)}
    rounded["assumed"] = [name for name in (given.assumed if given else ()) if name in kept]
    if "network_efficiency" not in kept:
        rounded["network_efficiency_range"] = None
    return Found(Hardware.model_validate({"source": source, **rounded}), tuple(notes))


class _Samples:
    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def all(self, kind: Kind, of: str = "") -> list[Sample]:
        """Those of a kind, smallest first."""
        found = [sample for sample in self._samples if (sample.kind, sample.of) == (kind, of)]
        return sorted(found, key=lambda sample: sample.sizes)

    def one(self, kind: Kind, of: str = "") -> Sample:
        return self.several(kind, of, 1)[0]

    def several(self, kind: Kind, of: str = "", least: int = 2) -> list[Sample]:
        """Those of a kind, which must be at least so many."""
        found = self.all(kind, of)
        if len(found) < least:
            raise NodeError(f"the nodes did not measure {' '.join([kind, of]).strip()}")
        return found


def fit_products(products: Sequence[Sample]) -> tuple[float, float]:
    """Rate of large products, FLOP/s, and the smallest dimension that reaches half of it.

    Seconds for a FLOP are 1 / rate + half / rate · 1 / d in a product whose smallest dimension is
    d: least squares of the relative deviation, with no figure below 0.

    Args:
        products: With sizes [m, n, k] and the seconds of forward product and both gradients.
    """
    rows = [(product_flops(p) / p.value, 1 / min(p.sizes)) for p in products]
    # Relative: (rate · slow + rate · half · slow / d - 1)², for slow = FLOP/s as measured.
    a11 = sum(y * y for y, _ in rows)
    a12 = sum(y * y * inverse for y, inverse in rows)
    a22 = sum((y * inverse) ** 2 for y, inverse in rows)
    b1, b2 = sum(y for y, _ in rows), sum(y * inverse for y, inverse in rows)
    determinant = a11 * a22 - a12 * a12
    if determinant > 1e-12 * a11 * a22:
        one, half = (b1 * a22 - b2 * a12) / determinant, (a11 * b2 - a12 * b1) / determinant
        if one > 0 and half >= 0:
            return 1 / one, half / one
    # Singular or unphysical: least squares of the rate alone, with half = 0.
    return a11 / b1, 0.0


def product_flops(product: Sample) -> float:
    """FLOPs of a measured matrix product: the forward product and both gradients."""
    m, n, k = product.sizes
    # A multiplication and an addition each.
    return 3 * 2.0 * m * n * k


def matrix_figures(samples: Sequence[Sample], precision: str, given: Hardware) -> Hardware:
    """A profile's figures with those of matrix products replaced by what was measured."""
    return given.model_copy(
        update=_matrices(_Samples(samples), precision, given, given.memory_gb_s)
    )


def _matrices(
    found: _Samples, precision: str, given: Hardware | None, memory_gb_s: float
) -> dict[str, float]:
    """Peaks of both precisions, efficiency and half of the recipe's."""
    other, width = ("bf16", 4) if precision == "fp32" else ("fp32", 2)
    limit = memory_gb_s * 1e9
    products = found.several("product", precision)

    def moved_s(m: int, n: int, k: int) -> float:
        return 3 * (m * k + k * n + m * n) * width / limit

    # Products that memory limits would lower the fitted rate of the matrix units.
    bound = [p for p in products if moved_s(*p.sizes) < _MOVED_SHARE * p.value]
    rate, half = fit_products(bound or products)
    fastest = max(rate, *(product_flops(p) / p.value for p in products))
    peak = _peak(given, f"{precision}_tflops", fastest / 1e12) * 1e12
    efficiency = min(1.0, rate / peak)
    # The other precision has only its largest product: efficiency and half are assumed the same.
    largest = max(found.several("product", other), key=lambda p: min(p.sizes))
    filled = min(largest.sizes) / (min(largest.sizes) + half)
    of_other = product_flops(largest) / largest.value / filled / efficiency
    kept = _peak(given, f"{other}_tflops", of_other / 1e12)
    return {
        f"{precision}_tflops": peak / 1e12,
        f"{other}_tflops": kept,
        "matrix_efficiency": efficiency,
        "matrix_half": half,
    }


def _peak(given: Hardware | None, name: str, fastest: float) -> float:
    """The profile's figure of that name, or what was faster than that."""
    if given is None or given.rough:
        return fastest
    return max(fastest, float(getattr(given, name)))


def _memory(found: _Samples, given: Hardware | None) -> dict[str, float]:
    """Bandwidth, and the share of it that equal bytes of each kind of elementwise work reach."""
    works = [found.one("elementwise", of) for of in ("block", "logits", "optimizer")]
    rates = [sample.sizes[0] / sample.value for sample in (*works, found.one("copy"))]
    peak = _peak(given, "memory_gb_s", max(rates) / 1e9)
    # A harmonic mean: of the seconds that equal bytes of each kind take.
    mean = len(works) / sum(work.value / work.sizes[0] for work in works)
    return {
        "memory_gb_s": peak,
        "memory_efficiency": mean / 1e9 / peak,
        "memory_gib": found.one("memory").value / GIB,
        "reserved_gib": found.one("reserved").value / GIB,
    }


class Link(NamedTuple):
    """What collectives reach."""

    rate: float  # bytes a second that a worker passes on in an all-reduce
    hop_s: float  # one of its log2(workers) hops
    alone: float  # share of the rate that gathering and scattering reach on their own


def fit_link(found: Sequence[Sample]) -> Link:
    """What collectives over one group reach.

    A gather, or a reduction that scatters, takes (n - 1) / n · bytes / rate + log2(n) · hop, and an
    all-reduce twice that. The hop follows from the smallest all-reduce; the rates from the largest
    collectives.
    """
    workers = found[0].sizes[0]
    share, hops = (workers - 1) / workers, math.log2(workers)
    large = max(sample.sizes[1] for sample in found)
    least = min((s for s in found if s.kind == "all_reduce"), key=lambda s: s.sizes)
    small = least.value / 2

    def a_byte(seconds: float) -> float:
        # A small message that takes nearly as long as a large one was disturbed.
        return max(seconds - small, 0.1 * seconds) / (large - least.sizes[1]) / share

    several = [sample for sample in found if sample.sizes[1] == large]
    halves = [sample.value for sample in several if sample.kind != "all_reduce"]
    summed = a_byte(sum(s.value for s in several if s.kind == "all_reduce") / 2)
    alone = a_byte(sum(halves) / len(halves))
    hop_s = max(0.0, small - least.sizes[1] * share * summed) / hops
    return Link(1 / summed, hop_s, min(1.0, summed / alone))


def _links(
    found: _Samples,
    task: Task,
    given: Hardware | None,
    memory_gb_s: float,
    notes: list[str],
) -> dict[str, float]:
    measured: dict[str, tuple[float, float]] = {}  # where → GB/s, microseconds of a hop
    alone = []
    # Over the network each worker of a node has a ring of its own; the link carries all at once.
    for where, rings in (("node", 1), ("network", task.workers)):
        kinds: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
        samples = [sample for kind in kinds for sample in found.all(kind, where)]
        if samples:
            link = fit_link(samples)
            measured[where] = link.rate * rings / 1e9, link.hop_s * 1e6
            alone.append(link.alone)
    values = {"shard_efficiency": sum(alone) / len(alone)} if alone else {}
    for where, name, lacking in (
        ("node", "node_link", "a node has one worker"),
        ("network", "network", "there was one node"),
    ):
        if where in measured:
            gb_s, hop_us = measured[where]
            peak = _peak(given, f"{name}_gb_s", gb_s)
            efficiency = gb_s / peak
        elif given is not None:
            whose = "the profile's guess" if given.rough else "the profile's own"
            notes.append(f"{name}_…: {whose}, for {lacking}")
            peak = getattr(given, f"{name}_gb_s")
            efficiency = getattr(given, f"{name}_efficiency")
            hop_us = getattr(given, f"{name}_latency_us")
        else:
            other = next(iter(measured.values()), (memory_gb_s, 0.0))
            (peak, hop_us), efficiency = other, 1.0
            stead = "the other link's" if measured else "memory_gb_s"
            notes.append(f"{name}_…: {stead}, for {lacking}")
        values |= {
            f"{name}_gb_s": peak,
            f"{name}_efficiency": efficiency,
            f"{name}_latency_us": hop_us,
        }
    return values
