"""Rows of published_gpu_2.csv against the shipped constants: one half for fitting, one held out.

`planner.py --halves` prints this, with the rows of published_gpu_3.csv, which were collected when
the constants were fitted, as `fresh`: nothing is fitted to them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from published_rows import Row, rows

from slurmllm.plan.evidence import evidence
from slurmllm.plan.search import known_hardware, predict
from slurmllm.plan.step import step_time

FILE, FRESH_FILE = "published_gpu_2.csv", "published_gpu_3.csv"
HALVES = ("fit", "held_out", "fresh")
SLOW_GB_S = 100  # of a node's network: 800 Gbit/s


@dataclass(frozen=True)
class Prediction:
    """A row, and what the planner says of it."""

    row: Row
    ratio: float  # predicted over published
    is_inside: bool  # whether the interval has the published value
    status: str  # of its evidence


def prediction(row: Row) -> Prediction:
    candidate = predict(row.config, row.mesh)
    candidate = replace(candidate, step=step_time(row.config, row.mesh, row.trainer))
    published = evidence(candidate)
    low, high = published.interval or (candidate.seq_per_s, candidate.seq_per_s)
    ratio = candidate.seq_per_s / row.measured
    return Prediction(row, ratio, low <= row.measured <= high, published.status)


def _kinds(every: Sequence[Prediction]) -> Iterator[tuple[str, list[Prediction]]]:
    """Yield name → rows in bf16; those in FP8 are last."""
    in_fp8 = [of for of in every if of.row.precision == "fp8_mixed"]
    in_bf16 = [of for of in every if of.row.precision != "fp8_mixed"]

    def network(of: Prediction) -> str:
        if of.row.mesh.nodes == 1:
            return "one node"
        if not of.row.network_is_stated:
            return "nodes, network not stated"
        speed = known_hardware(of.row.config).network_gb_s
        return f"nodes, {'up to' if speed <= SLOW_GB_S else 'above'} {SLOW_GB_S} GB/s"

    def layout(of: Prediction) -> str:
        mesh = of.row.mesh
        if mesh.tensor * mesh.pipeline > 1:
            return "tensor or pipeline parallel"
        return "data parallel, copies" if mesh.replicate > 1 else "data parallel"

    yield "all", in_bf16
    fields: tuple[Callable[[Prediction], str], ...] = (
        lambda of: f"software of {of.row.software}",
        lambda of: of.row.hardware,
        network,
        layout,
        lambda of: f"gradients in {of.row.gradients or 'a format not stated'}",
        lambda of: of.status,
        lambda of: of.row.group.partition(" ")[0],
    )
    for field in fields:
        for name in sorted({field(of) for of in in_bf16}):
            yield name, [of for of in in_bf16 if field(of) == name]
    yield "FP8", in_fp8


def summary(of: Sequence[Prediction]) -> str:
    """Return rows, median error, bias (median, mean) and share inside the interval."""
    if not of:
        return f"{0:5} {'-':>7} {'-':>7} {'-':>7} {'-':>6}"
    errors = [one.ratio - 1 for one in of]
    median = statistics.median(map(abs, errors))
    bias, mean = statistics.median(errors), statistics.mean(errors)
    inside = statistics.mean(one.is_inside for one in of)
    return f"{len(of):5} {median:7.1%} {bias:+7.1%} {mean:+7.1%} {inside:6.0%}"


def print_halves(each: bool, chosen: Sequence[str] = HALVES) -> None:
    wanted = (row for file in (FILE, FRESH_FILE) for row in rows(file) if row.half in chosen)
    every = list(map(prediction, wanted))
    columns = f"{'rows':>5} {'median':>7} {'bias':>7} {'mean':>7} {'inside':>6}"
    print(f"{'':<34}{'  '.join(f'{half:<36}' for half in chosen)}")
    print(f"{'':<34}{'  '.join(columns for _ in chosen)}")
    for name, of_kind in _kinds(every):
        halves = [summary([of for of in of_kind if of.row.half == half]) for half in chosen]
        print(f"{name:<34}{'  '.join(halves)}")
    for one in every if each else []:
        speed = f"{one.row.measured:9.2f} seq/s {one.ratio - 1:+7.1%}"
        hit = "" if one.is_inside else "outside the interval"
        print(f"{one.row.name:<45} {one.row.half:<8} {speed}  {one.status:<12} {hit}")
