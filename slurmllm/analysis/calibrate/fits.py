"""From measurements to the figures that the planner reads; torch-free.

Each figure is the one with which the planner's own formula (`plan/step.py`) gives back what was
measured. A maker's peak that the profile already has is kept, as long as nothing was faster;
without one the peak is the fastest that was seen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from slurmllm.analysis.calibrate.node import Kind, Sample, Samples, Task, step_config
from slurmllm.core.config.cluster import GIB, Hardware
from slurmllm.core.errors import NodeError
from slurmllm.core.format import Json, Texts, Values
from slurmllm.plan.mesh import make_mesh
from slurmllm.plan.step import step_time

_MOVED_SHARE = 0.8  # of a product's seconds: then it measures memory, not matrix units
_DIGITS = 4


def hardware_of(
    samples: Samples, task: Task, profile: Hardware | None, source: str
) -> tuple[Hardware, Texts]:
    """Compute the figures from measurements; also a line for each that was not measured.

    Args:
        profile: The profile's figures so far; rough ones replace what is not measured, and
            count for nothing else.

    Raises:
        NodeError: a measurement is missing.
    """
    notes: list[str] = []
    # What is not measured stays as it was: the overlap of data-parallel communication, for one.
    unfitted = {"source", "rough", "assumed"}
    values: Json = profile.model_dump(exclude=unfitted) if profile else {}
    values |= _memory(samples, profile)
    values |= matrix_figures(samples, task.precision, profile, values["memory_gb_s"])
    # FLOP/s, of the profile's TFLOP/s.
    peak = values[f"{task.precision}_tflops"] * 1e12
    attention = _select(samples, "attention", task.precision)[0]
    values["attention_efficiency"] = min(1.0, attention.sizes[0] / attention.value / peak)
    values |= _links(samples, task, profile, values["memory_gb_s"], notes)
    # Models of few and of more layers: a block's operators, and the rest of a step. The planner
    # counts forward once and backward twice.
    few, *_, many = _select(samples, "step", minimum=2)
    layer = max(0.0, (many.value - few.value) / (many.sizes[0] - few.sizes[0]))
    values["operator_us"] = layer / few.sizes[1] / 3 * 1e6
    values["step_overhead_s"] = max(0.0, few.value - few.sizes[0] * layer)
    if _select(samples, "gpu_step", minimum=0):
        values["memory_efficiency"] = fit_steps(
            _select(samples, "gpu_step", minimum=2), task, values
        )
    rounded: Json = {
        name: float(f"{value:.{_DIGITS}g}") if isinstance(value, int | float) else value
        for name, value in values.items()
    }
    # What was measured is no longer assumed.
    links = {"node": "node_link_efficiency", "network": "network_efficiency"}
    unmeasured = {"overlap", "part_of_node"}
    unmeasured |= {
        name for link, name in links.items() if not _select(samples, "all_reduce", link, 0)
    }
    rounded["assumed"] = [
        name for name in (profile.assumed if profile else ()) if name in unmeasured
    ]
    if "network_efficiency" not in unmeasured:
        rounded["network_efficiency_range"] = None
    return Hardware.model_validate({"source": source, **rounded}), tuple(notes)


def _select(samples: Samples, kind: Kind, variant: str = "", minimum: int = 1) -> list[Sample]:
    """Return those of a kind by size; raise NodeError if there are fewer than `minimum`."""
    matching = [sample for sample in samples if (sample.kind, sample.of) == (kind, variant)]
    if len(matching) < minimum:
        raise NodeError(f"the nodes did not measure {' '.join([kind, variant]).strip()}")
    return sorted(matching, key=lambda sample: sample.sizes)


def fit_products(products: Samples) -> tuple[float, float]:
    """Return the rate of large products, FLOP/s, and the dimension that reaches half of it.

    Seconds for a FLOP are 1 / rate + half / rate · 1 / d in a product whose smallest dimension is
    d: least squares of the relative deviation, with no figure below 0.

    Args:
        products: With sizes [m, n, k] and the seconds of forward product and both gradients.
    """
    import numpy as np
    from scipy.optimize import nnls

    flops = np.array([product_flops(product) / product.value for product in products])
    measured = flops / flops.max()
    columns = np.stack([measured, measured / [min(product.sizes) for product in products]], axis=1)
    (slope, half), _ = nnls(columns, np.ones(len(products)))
    if slope == 0:  # unphysical: the rate alone
        slope = measured.sum() / (measured @ measured)
        half = 0.0
    return float(flops.max() / slope), float(half / slope)


def product_flops(product: Sample) -> float:
    """Return FLOPs of a measured matrix product: the forward product and both gradients."""
    m, n, k = product.sizes
    # A multiplication and an addition each.
    return 3 * 2.0 * m * n * k


def matrix_figures(
    measured: Samples, precision: str, profile: Hardware | None, memory_gb_s: float
) -> dict[str, float]:
    """Return peaks of both precisions, efficiency and half of the recipe's."""
    other, width = ("bf16", 4) if precision == "fp32" else ("fp32", 2)
    limit = memory_gb_s * 1e9
    products = _select(measured, "product", precision, 2)

    def moved_s(m: int, n: int, k: int) -> float:
        return 3 * (m * k + k * n + m * n) * width / limit

    # Products that memory limits would lower the fitted rate of the matrix units.
    bound = [p for p in products if moved_s(*p.sizes) < _MOVED_SHARE * p.value]
    rate, half = fit_products(bound or products)
    fastest = max(rate, *(product_flops(p) / p.value for p in products))
    peak = _peak(profile, f"{precision}_tflops", fastest / 1e12) * 1e12
    efficiency = min(1.0, rate / peak)
    # The other precision has only its largest product: efficiency and half are assumed the same.
    largest = max(_select(measured, "product", other), key=lambda p: min(p.sizes))
    filled = min(largest.sizes) / (min(largest.sizes) + half)
    of_other = product_flops(largest) / largest.value / filled / efficiency
    other_tflops = _peak(profile, f"{other}_tflops", of_other / 1e12)
    return {
        f"{precision}_tflops": peak / 1e12,
        f"{other}_tflops": other_tflops,
        "matrix_efficiency": efficiency,
        "matrix_half": half,
    }


def _peak(profile: Hardware | None, name: str, fastest: float) -> float:
    if not profile or profile.rough:
        return fastest
    return max(fastest, float(getattr(profile, name)))


def _memory(measured: Samples, profile: Hardware | None) -> dict[str, float]:
    """Return the bandwidth, and the share of it that elementwise work reaches.

    The share of GPUs, on which it is not measured alone, is that of a copy until `fit_steps`.
    """
    copy = _select(measured, "copy")[0]
    of_gpu = _select(measured, "gpu_step", minimum=0)
    kinds = () if of_gpu else ("block", "logits", "optimizer")
    works = [_select(measured, "elementwise", variant)[0] for variant in kinds] or [copy]
    rates = [sample.sizes[0] / sample.value for sample in (*works, copy)]
    peak = _peak(profile, "memory_gb_s", max(rates) / 1e9)
    # A harmonic mean: of the seconds that equal bytes of each kind take.
    mean = len(works) / sum(work.value / work.sizes[0] for work in works)
    return {
        "memory_gb_s": peak,
        "memory_efficiency": mean / 1e9 / peak,
        "memory_gib": _select(measured, "memory")[0].value / GIB,
        "reserved_gib": _select(measured, "reserved")[0].value / GIB,
    }


def fit_steps(steps: Samples, task: Task, values: Values) -> float:
    """Return the `memory_efficiency` with which the planner gives back the time of a layer.

    Args:
        steps: A GPU's, of few and of more layers.
        values: All other figures.
    """
    few, *_, many = steps

    def excess_s(efficiency: float) -> float:
        hardware = Hardware.model_validate(
            {"source": "", **values, "memory_efficiency": efficiency}
        )
        predicted = []
        for sample in (few, many):
            config = step_config(task, sample.sizes[0])
            cluster = config.cluster.model_copy(update={"hardware": hardware})
            step = step_time(replace(config, cluster=cluster), make_mesh(config, 1))
            predicted.append(step.total - step.overhead)
        return predicted[1] - predicted[0] - (many.value - few.value)

    low = 0.05
    high = 1.0
    for _ in range(20):  # bisection: the prediction falls as the efficiency rises
        middle = (low + high) / 2
        low, high = (middle, high) if excess_s(middle) > 0 else (low, middle)
    return high


class Link(NamedTuple):
    """What collectives reach."""

    rate: float  # bytes a second that a worker passes on in an all-reduce
    hop_s: float  # one of its workers - 1 hops
    alone: float  # share of the rate that gathering and scattering reach on their own


def fit_link(samples: Samples) -> Link:
    """Return what collectives over one group reach.

    A gather, or a reduction that scatters, takes (n - 1) / n · bytes / rate + (n - 1) · hop, and an
    all-reduce twice that. The hop follows from the smallest all-reduce; the rates from the largest
    collectives.
    """
    workers = samples[0].sizes[0]
    share = (workers - 1) / workers
    hops = workers - 1
    large = max(sample.sizes[1] for sample in samples)
    smallest = min((s for s in samples if s.kind == "all_reduce"), key=lambda s: s.sizes)
    small = smallest.value / 2

    def a_byte(seconds: float) -> float:
        # A small message that takes nearly as long as a large one was disturbed.
        return max(seconds - small, 0.1 * seconds) / (large - smallest.sizes[1]) / share

    largest = [sample for sample in samples if sample.sizes[1] == large]
    halves = [sample.value for sample in largest if sample.kind != "all_reduce"]
    summed = a_byte(sum(s.value for s in largest if s.kind == "all_reduce") / 2)
    alone = a_byte(sum(halves) / len(halves))
    hop_s = max(0.0, small - smallest.sizes[1] * share * summed) / hops
    return Link(1 / summed, hop_s, min(1.0, summed / alone))


def _links(
    measured: Samples,
    task: Task,
    profile: Hardware | None,
    memory_gb_s: float,
    notes: list[str],
) -> dict[str, float]:
    figures = {}  # where → GB/s, microseconds of a hop
    alone = []
    # Over the network each worker of a node has a ring of its own; the link carries all at once.
    for span, rings in (("node", 1), ("network", task.workers)):
        kinds: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
        samples = [sample for kind in kinds for sample in _select(measured, kind, span, 0)]
        if samples:
            link = fit_link(samples)
            figures[span] = link.rate * rings / 1e9, link.hop_s * 1e6
            alone.append(link.alone)
    values = {"shard_efficiency": sum(alone) / len(alone)} if alone else {}
    for span, name, lacking in (
        ("node", "node_link", "a node has one worker"),
        ("network", "network", "there was one node"),
    ):
        fields = [f"{name}_{figure}" for figure in ("gb_s", "efficiency", "latency_us")]
        if span in figures:
            gb_s, hop_us = figures[span]
            peak = _peak(profile, fields[0], gb_s)
            link_figures = [peak, gb_s / peak, hop_us]
        elif profile:
            whose = "the profile's guess" if profile.rough else "the profile's own"
            notes.append(f"{name}_…: {whose}, for {lacking}")
            link_figures = [getattr(profile, field) for field in fields]
        else:
            peak, hop_us = next(iter(figures.values()), (memory_gb_s, 0.0))
            link_figures = [peak, 1.0, hop_us]
            stead = "the other link's" if figures else "memory_gb_s"
            notes.append(f"{name}_…: {stead}, for {lacking}")
        values |= dict(zip(fields, link_figures, strict=True))
    return values
