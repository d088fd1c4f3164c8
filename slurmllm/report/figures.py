"""The plots of the page as data; `report.js` draws them with plotly.js.

Every curve has three x axes (step, tokens, hours) and is stored twice: thinned to its extremes, for
display, and as means of equally long pieces, for smoothing.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from slurmllm.format import format_elapsed, format_names, format_number
from slurmllm.metrics.curves import Curve, Floats, Ints, piece_means, thin_rows
from slurmllm.report.blocks import RUN_COLORS, Json, PlotData
from slurmllm.report.facts import RunFacts
from slurmllm.report.summary_figures import summary_figures
from slurmllm.report.throughput import per_s

# The page must stay small enough to send by mail: rows of all curves of a figure.
_MOST_ROWS = 6000
_FEWEST_ROWS = 300
_MOST_PIECES = 600  # of a stacked figure
_MOST_STACKS = 4
_METRICS = (
    ("loss", "Loss", "nats"),
    ("val_loss", "Validation loss", "nats"),
    ("grad_norm", "Gradient norm", "before clipping"),
    ("param_norm", "Parameter norm", ""),
    ("lr", "Learning rate", ""),
    ("seq_per_s", "Throughput", "sequences/s"),
    ("tokens_per_s", "Throughput, tokens", "tokens/s"),
    ("step_time_s", "Step time", "s"),
)
# Parts of a step, in order; neighbours differ in lightness.
STEP_PARTS = (
    ("data wait", "#f2a65a"),
    ("forward and backward", "#12466b"),
    ("optimizer and norms", "#7fb3d5"),
    ("rest", "#9aa5ab"),
)


@dataclass(frozen=True)
class _Positions:
    """The positions of a curve's rows on each of its axes."""

    axes: Mapping[str, Floats] = field(default_factory=dict)

    def at(self, rows: Ints) -> Json:
        return {name: _packed(values[rows]) for name, values in self.axes.items()}

    def pieces(self, most: int) -> Json:
        return {name: _packed(piece_means(values, most)) for name, values in self.axes.items()}


def figures(runs: Sequence[RunFacts]) -> list[PlotData]:
    """All plots that have data, in the page's order."""
    positions = [_positions(facts.curve) for facts in runs]
    found = [*_curves(runs, positions), *_stacks(runs, positions), *_memory(runs, positions)]
    return [*found, *summary_figures(runs)]


def page_data(runs: Sequence[RunFacts], drawn: Sequence[PlotData]) -> Json:
    """The input of the page's script."""
    return {
        "runs": [
            {"name": escape(facts.name), "color": RUN_COLORS[i % len(RUN_COLORS)]}
            for i, facts in enumerate(runs)
        ],
        "figures": {plot.name: plot.content for plot in drawn},
    }


def step_parts(curve: Curve) -> list[Floats] | None:
    """Seconds of each step by STEP_PARTS; None without step times."""
    taken = curve.columns.get("step_time_s")
    if taken is None:
        return None
    rest = taken
    found = []
    for metric in ("data_wait_s", "forward_backward_s", "optimizer_s"):
        part = np.nan_to_num(curve.columns.get(metric, np.zeros(len(taken))))
        found.append(part)
        rest = rest - part
    return [*found, np.maximum(rest, 0.0)]


def series(curve: Curve, metric: str) -> Floats | None:
    """The values of a metric, NaN in rows without it; None if no row has it."""
    if metric in ("seq_per_s", "tokens_per_s"):
        sequences, tokens = per_s(curve)
        values = sequences if metric == "seq_per_s" else tokens
    else:
        values = curve.columns.get(metric)
    return values if values is not None and np.isfinite(values).any() else None


def shown_metrics(runs: Sequence[RunFacts]) -> list[tuple[str, str, str]]:
    """The metrics to draw, with title and unit; tokens/s only if a run has no seq/s."""
    curves = [facts.curve for facts in runs if facts.curve is not None]
    known = [row for row in _METRICS if any(series(curve, row[0]) is not None for curve in curves)]
    sequences = all(series(c, "seq_per_s") is not None for c in curves)
    return [row for row in known if row[0] != "tokens_per_s" or not sequences]


def hours(curve: Curve) -> Floats | None:
    """Wall time of each row since the start of the first one, h; None without times."""
    ends, taken = curve.columns.get("time"), curve.columns.get("step_time_s")
    if ends is None or not np.isfinite(ends).any():
        return None if taken is None else np.cumsum(np.nan_to_num(taken)) / 3600.0
    first = float(ends[np.isfinite(ends)][0])
    begin = first - (float(np.nan_to_num(taken[0])) if taken is not None else 0.0)
    return (ends - begin) / 3600.0


def _positions(curve: Curve | None) -> _Positions:
    if curve is None:
        return _Positions()
    axes = {"step": curve.steps.astype(np.float64)}
    tokens, passed = curve.positions("tokens"), hours(curve)
    if np.isfinite(tokens).any():
        axes["tokens"] = tokens
    if passed is not None:
        axes["hours"] = passed
    return _Positions(axes)


def _curves(runs: Sequence[RunFacts], positions: Sequence[_Positions]) -> Iterator[PlotData]:
    most = max(_FEWEST_ROWS, _MOST_ROWS // max(1, len(runs)))
    for metric, title, unit in shown_metrics(runs):
        lines = []
        for number, (facts, where) in enumerate(zip(runs, positions, strict=True)):
            values = None if facts.curve is None else series(facts.curve, metric)
            if facts.curve is None or values is None:
                continue
            if metric in facts.curve.absent:
                there = np.flatnonzero(~facts.curve.absent[metric])
                where = _Positions({name: x[there] for name, x in where.axes.items()})
                values = values[there]
            lines.append(_line(number, values, where, most))
        markers = [
            one
            for number, facts in enumerate(runs)
            for one in marks(number, facts, everything=metric == "loss")
        ]
        content: Json = {
            "kind": "curve",
            "title": title,
            "unit": unit,
            "series": lines,
            "marks": _packed_marks(runs, positions, markers),
        }
        yield PlotData(metric, title, "curves", content)


def _line(number: int, values: Floats, where: _Positions, most: int) -> Json:
    rows = thin_rows(values, most)
    line: Json = {"run": number, "x": where.at(rows), "y": _packed(values[rows], "f4")}
    if len(rows) < len(values):
        pieces = max(1, most // 3)
        line["mean"] = {"x": where.pieces(pieces), "y": _packed(piece_means(values, pieces), "f4")}
    return line


def _packed_marks(
    runs: Sequence[RunFacts], positions: Sequence[_Positions], found: Sequence[Mark]
) -> list[Json]:
    """Positions and texts of the markers, by run and kind."""
    packed = []
    for number, facts in enumerate(runs):
        for kind in dict.fromkeys(mark.kind for mark in found if mark.run == number):
            own = [mark for mark in found if (mark.run, mark.kind) == (number, kind)]
            assert facts.curve is not None
            rows = np.searchsorted(facts.curve.steps, [mark.step for mark in own])
            packed.append(
                {
                    "run": number,
                    "kind": kind,
                    "x": positions[number].at(np.minimum(rows, len(facts.curve.steps) - 1)),
                    "text": ["<br>".join(map(escape, mark.lines)) for mark in own],
                }
            )
    return packed


def _stacks(runs: Sequence[RunFacts], positions: Sequence[_Positions]) -> Iterator[PlotData]:
    """The parts of each run's steps, for the first runs only."""
    split = [(i, parts) for i, f in enumerate(runs) if f.curve and (parts := step_parts(f.curve))]
    for number, parts in split[:_MOST_STACKS]:
        layers = [
            {"name": name, "color": color, "y": _packed(piece_means(part, _MOST_PIECES), "f4")}
            for (name, color), part in zip(STEP_PARTS, parts, strict=True)
            if part.any()
        ]
        content: Json = {
            "kind": "stack",
            "title": "Step time by parts",
            "unit": "s",
            "x": positions[number].pieces(_MOST_PIECES),
            "layers": layers,
        }
        shares = ", ".join(
            f"{name} {100 * float(np.sum(part)) / max(float(sum(map(np.sum, parts))), 1e-30):.1f} %"
            for (name, _), part in zip(STEP_PARTS, parts, strict=True)
            if part.any()
        )
        title = f"Step time by parts: {runs[number].name}"
        yield PlotData(f"parts-{number}", title, "curves", content, f"Of all steps: {shares}.")


def _memory(runs: Sequence[RunFacts], positions: Sequence[_Positions]) -> Iterator[PlotData]:
    """Peak memory of a worker, if the attempts measured it."""
    lines, limits = [], set()
    for number, facts in enumerate(runs):
        measured = [e for e in facts.events if e.kind == "memory" and "peak_bytes" in e.values]
        if not measured or facts.curve is None:
            continue
        rows = np.searchsorted(facts.curve.steps, [event.step for event in measured])
        peaks = np.array([event.values["peak_bytes"] / 1e9 for event in measured])
        limits |= {e.values["limit_bytes"] / 1e9 for e in measured if "limit_bytes" in e.values}
        where = positions[number].at(np.minimum(rows, len(facts.curve.steps) - 1))
        lines.append({"run": number, "x": where, "y": _packed(peaks, "f4"), "points": True})
    if lines:
        content = {"kind": "curve", "title": "Memory", "unit": "GB", "series": lines, "marks": []}
        most = " or ".join(f"{limit:.2f}" for limit in sorted(limits))
        note = "The worker with the highest peak." + (f" Its limit is {most} GB." if most else "")
        yield PlotData("memory", "Peak memory of a worker", "curves", content, note)


def _packed(values: npt.NDArray[Any], kind: Literal["f4", "f8"] = "f8") -> Json:
    """An array as base64 of its little-endian bytes, which `report.js` decodes."""
    with np.errstate(over="ignore"):
        raw = np.ascontiguousarray(values, dtype=f"<{kind}").tobytes()
    return {"t": kind, "b": base64.b64encode(raw).decode("ascii")}


_MOST = 300  # markers per kind and run, the latest


@dataclass(frozen=True)
class Mark:
    """A marker at a step.

    Attributes:
        run: Index of the run in the report.
        kind: Kind of the event.
        step: Its step.
        lines: Text shown on hover.
    """

    run: int
    kind: Literal["restart", "save", "spike"]
    step: int
    lines: tuple[str, ...]


def marks(number: int, facts: RunFacts, everything: bool = True) -> list[Mark]:
    """The markers of a run.

    Args:
        number: Index of the run in the report.
        facts: The run.
        everything: Whether to include saves and spikes, not only restarts.
    """
    if facts.curve is None:
        return []
    found = list(_restarts(number, facts))[-_MOST:]
    for save in facts.saved[-_MOST:] if everything else ():
        duration = "" if save.seconds is None else f", {format_elapsed(save.seconds)} s"
        text = f"{facts.name}: saved step {save.step}{duration}"
        found.append(Mark(number, "save", save.step, (text,)))
    spikes = facts.spikes.spikes if facts.spikes is not None and everything else ()
    for spike in spikes[-_MOST:]:
        height = format_number(spike.height)
        text = f"{facts.name}: spike at step {spike.peak_step}, {height} above the mean"
        found.append(Mark(number, "spike", spike.peak_step, (text,)))
    return found


def _restarts(number: int, facts: RunFacts) -> Iterator[Mark]:
    assert facts.curve is not None
    records = {attempt.attempt: attempt for attempt in facts.train}
    steps, attempts = facts.curve.steps, facts.curve.attempts
    for row in (np.flatnonzero(np.diff(attempts) != 0) + 1).tolist():
        before, after = int(attempts[row - 1]), int(attempts[row])
        lines = [f"{facts.name}: attempt {after} from step {steps[row]}"]
        for one in range(before, after):
            record = records.get(one)
            if record is not None and record.ending is not None:
                why = "; ".join(record.evidence)
                lines.append(
                    f"attempt {one} ended: {record.ending}{f' ({why:.150})' if why else ''}"
                )
        if after in records:
            lines.append(f"nodes: {format_names(records[after].nodes)}")
        yield Mark(number, "restart", int(steps[row]), tuple(lines))
