"""Step time and rates: the one definition of log lines, metrics, `status`, `report` and trackers.

A step lasts from the request for its batch to the exchange of stop signals, by the clock of the
device (`Backend.mark`): on a GPU the host may read it a step later. Saves, evaluations and hooks
are between steps. Its rates are the global batch over that time; those of a log line the global
batch over the mean time of the steps since the line before. `status` and predictions take the
median of several steps, so that single slow ones (a hiccup of the file system) change nothing. The
steps after a start compile, fill caches and have their memory counted: estimates of the remaining
time leave out the first one, comparisons with a prediction the first `FIRST_STEPS`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from pydantic import ValidationError

from slurmllm.core.errors import RunError
from slurmllm.core.format import Texts, format_plural
from slurmllm.core.metrics.row_reader import (
    json_number,
    last_rows,
    line_error,
    read_events,
    read_rows,
)
from slurmllm.core.run.records import (
    WAITS,
    Attempts,
    MetricsRow,
    Submission,
    first_problem,
)
from slurmllm.core.run.rundir import RunDir

FIRST_STEPS = 6  # not steady, in each attempt; memory is read after the fifth
MIN_STEPS = 5  # for a median
RECENT_STEPS = 100


Group = tuple[int, int | None]  # number of the last submission before attempts, from 1; their nodes


class StepSplit(NamedTuple):
    """Sections of a step after the wait for data, s."""

    forward_backward_s: float  # until rank 0 had the loss
    optimizer_s: float  # from there until it had the norms
    rest_s: float  # from there to the end of the step


@dataclass(frozen=True)
class SteadySteps:
    """Medians over the steady steps of attempts of one configuration."""

    attempts: tuple[int, ...]  # oldest first
    nodes: int | None  # number of nodes; None if no record has it
    steps: int
    step_s: float
    data_wait_s: float  # until rank 0 had its sequences
    split: StepSplit | None  # None if not measured
    warnings: Texts = ()


@dataclass(frozen=True)
class Pace:
    """The pace of a run's recent steps."""

    step_s: float  # median
    seq_per_s: float | None  # median; None if no row has it
    tokens_per_s: float | None  # the same
    waits_s: float  # per step, that training waited for saves and evaluations, over the attempt

    def seconds(self, steps: int) -> float:
        """Estimate the duration of some steps, saves included and restarts not."""
        return steps * (self.step_s + self.waits_s)


class Rates(NamedTuple):
    """What a run trains on in a second."""

    seq_per_s: float
    tokens_per_s: float


def step_rates(step_s: float, global_batch: int, seq_len: int) -> Rates:
    """Return the rates of a step, or of several with that mean time."""
    return Rates(global_batch / step_s, global_batch * seq_len / step_s)


def read_steady_steps(
    run: RunDir, attempts: Attempts, submissions: Sequence[Submission]
) -> SteadySteps:
    """Read the steady steps of the newest attempts that have enough of them.

    Attempts of one submission on the same number of nodes had one configuration and are combined.
    Raises RunError if there are too few steps, or a metrics file is damaged.
    """
    nodes = {record.attempt: len(record.nodes) for record in attempts if record.stage == "train"}
    groups: dict[Group, dict[int, list[MetricsRow]]] = {}  # attempt → its rows
    for path in run.metrics_files():
        number = int(path.stem.removeprefix("attempt_"))
        submission = sum(s.first_attempt <= number for s in submissions)
        group = groups.setdefault((submission, nodes.get(number)), {})
        group[number] = _read_rows(path)
    count = sum(len(rows) for group in groups.values() for rows in group.values())
    if not count:
        raise RunError(
            f"run {run.name} has made no step yet; it can be compared with a prediction after "
            f"{FIRST_STEPS + MIN_STEPS} steps: see `slurmllm status {run.name}`"
        )
    steady = {
        key: [row for rows in group.values() for row in rows[FIRST_STEPS:]]
        for key, group in groups.items()
    }
    used = next((key for key in reversed(groups) if len(steady[key]) >= MIN_STEPS), None)
    if used is None:
        raise RunError(
            f"run {run.name} has made {count} steps, of which {max(map(len, steady.values()))} are "
            f"steady: the first {FIRST_STEPS} after each start are not; let it train until "
            f"{MIN_STEPS} are"
        )
    rows = steady[used]
    splits = [
        (loss, norms, row.step_time_s - row.data_wait_s - loss - norms)
        for row in rows
        if (loss := row.forward_backward_s) is not None and (norms := row.optimizer_s) is not None
    ]
    split = None
    if len(splits) == len(rows):  # all rows have them
        split = StepSplit(*(median(section) for section in zip(*splits, strict=True)))
    return SteadySteps(
        attempts=tuple(n for n, steps in groups[used].items() if len(steps) > FIRST_STEPS),
        nodes=used[1],
        steps=len(rows),
        step_s=median(row.step_time_s for row in rows),
        data_wait_s=median(row.data_wait_s for row in rows),
        split=split,
        warnings=tuple(_unused_warnings(used, groups)),
    )


def read_pace(run: RunDir, attempts: Attempts) -> Pace | None:
    """Read the pace of the newest attempt with steps on as many workers as the last one.

    Returns None if there is no such step. The train attempts are given oldest first.
    """
    records = {attempt.attempt: attempt for attempt in attempts}
    for path in reversed(run.metrics_files()):
        number = int(path.stem.removeprefix("attempt_"))
        record = records.get(number)
        if record is not None and record.world_size != attempts[-1].world_size:
            continue
        rows = []
        with suppress(OSError):
            # One more than is used: the oldest may be the attempt's first step, which compiles.
            rows = last_rows(path, RECENT_STEPS + 1)[1:]
        paces = {
            name: [value for row in rows if (value := finite_number(row, name)) is not None]
            for name in ("step_time_s", "seq_per_s", "tokens_per_s")
        }
        if not paces["step_time_s"]:
            continue
        begin = (record.checkpoint_before or 0) if record is not None else 0
        waited_s = 0.0
        with suppress(RunError):
            waited_s = math.fsum(
                event.waited_s or 0.0 for event in read_events(run, number) if event.kind in WAITS
            )
        return Pace(
            step_s=median(paces.pop("step_time_s")),
            **{name: median(values) if values else None for name, values in paces.items()},
            waits_s=waited_s / max(rows[-1]["step"] - begin, 1),
        )
    return None


def finite_number(row: Mapping[str, Any], name: str) -> float | None:
    value = json_number(row.get(name))
    # A number beyond 2**53 is damage, and a large integer is no float.
    return value if value is not None and abs(value) < 2**1000 else None


def _read_rows(path: Path) -> list[MetricsRow]:
    rows = []
    for line, values in read_rows(path):
        try:
            row = MetricsRow.model_validate(values)
        except ValidationError as error:
            raise line_error(path, line, first_problem(error, "the line")) from error
        if not 0 < row.step_time_s < math.inf:
            raise line_error(
                path, line, f"step_time_s is {row.step_time_s}, not a number of seconds above 0"
            )
        rows.append(row)
    return rows


def _unused_warnings(used: Group, groups: Mapping[Group, Collection[int]]) -> Iterator[str]:
    order = list(groups)
    position = order.index(used)
    for group in order[position + 1 :]:
        yield (
            f"{_group_name(groups[group], group[1])}: fewer than {MIN_STEPS} steady steps, not used"
        )
    if any(submission > used[0] for submission, _ in order):
        yield (
            f"the steps of {_group_name(groups[used], used[1])} were made before the run was "
            "resumed, which may have changed its configuration: the prediction uses the present one"
        )
    if position:
        before = sorted(number for group in order[:position] for number in groups[group])
        yield f"{_group_name(before, None)}: of another submission or node count, not used"


def _group_name(attempts: Collection[int], nodes: int | None) -> str:
    name = f"attempt{'s' if len(attempts) > 1 else ''} {', '.join(map(str, attempts))}"
    return name if nodes is None else f"{name} on {format_plural(nodes, 'node')}"
