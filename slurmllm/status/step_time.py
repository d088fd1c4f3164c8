"""The steady steps of a run: what a step takes once a start is over.

The steps after a start compile, fill caches and have their memory counted; those are left out.
Attempts that were submitted together and had as many nodes had one configuration: they count
together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from pydantic import ValidationError

from slurmllm.errors import RunError
from slurmllm.metrics.row_reader import MetricsFile, read_events
from slurmllm.records import AttemptRecord, MetricsRow
from slurmllm.rundir import RunDir
from slurmllm.status.history import RunHistory, read_submissions

FIRST_STEPS = 6  # of each attempt, which are left out; memory is read after the fifth
ENOUGH = 5  # for a median


class AttemptGroup(NamedTuple):
    """What attempts of one configuration have in common.

    Attributes:
        submission: Number of the last one before them, from 1; 0: none is recorded.
        nodes: That they ran on; None where no record tells.
    """

    submission: int
    nodes: int | None


class StepParts(NamedTuple):
    """What followed the wait for data in a step, s.

    Attributes:
        forward_backward_s: Until rank 0 had the loss.
        optimizer_s: From there until it had the norms.
        rest_s: From there to the step's end.
    """

    forward_backward_s: float
    optimizer_s: float
    rest_s: float


@dataclass(frozen=True)
class SteadySteps:
    """Medians over the steady steps of some attempts of a run.

    Attributes:
        attempts: Whose steps they are, oldest first.
        nodes: That these ran on; None where no record tells.
        steps: How many.
        step_s: A step.
        data_wait_s: Of it, until rank 0 had its sequences.
        split: What followed; None: not measured apart.
        warnings: What a reader of the figures should know.
    """

    attempts: tuple[int, ...]
    nodes: int | None
    steps: int
    step_s: float
    data_wait_s: float
    split: StepParts | None
    warnings: tuple[str, ...] = ()


def read_steady_steps(run: RunDir, history: RunHistory) -> SteadySteps:
    """Read the steady steps of the newest attempts that have enough of them.

    Args:
        run: The run.
        history: What it did.

    Raises:
        RunError: there are too few, or a metrics file is damaged.
    """
    groups = _groups(run, history)
    made = {number: _rows(run.metrics(number)) for group in groups.values() for number in group}
    count = sum(len(rows) for rows in made.values())
    if not count:
        raise RunError(
            f"run {run.name} has made no step yet; a prediction can be held against it once it "
            f"has made {FIRST_STEPS + ENOUGH}: see `slurmllm status {run.name}`"
        )
    steady = {
        group: [row for number in attempts for row in made[number][FIRST_STEPS:]]
        for group, attempts in groups.items()
    }
    for group in reversed(groups):
        if len(steady[group]) >= ENOUGH:
            attempts = tuple(n for n in groups[group] if len(made[n]) > FIRST_STEPS)
            return _medians(attempts, group.nodes, steady[group], _warnings(group, groups))
    most = max(len(rows) for rows in steady.values())
    raise RunError(
        f"run {run.name} has made {count} steps, of which {most} are steady: the first "
        f"{FIRST_STEPS} after each start are not; let it train until {ENOUGH} are"
    )


def _groups(run: RunDir, history: RunHistory) -> dict[AttemptGroup, list[int]]:
    """The attempts that have metrics, in the order of the groups' first ones."""
    nodes = {one.attempt: len(one.nodes) for one in history.attempts if one.stage == "train"}
    begins = [submission.first_attempt for submission in read_submissions(run)]
    groups: dict[AttemptGroup, list[int]] = {}
    for path in run.metrics_files():
        number = int(path.stem.removeprefix("attempt_"))
        group = AttemptGroup(sum(first <= number for first in begins), nodes.get(number))
        groups.setdefault(group, []).append(number)
    return groups


def _rows(path: Path) -> list[MetricsRow]:
    source = MetricsFile(path)
    found = []
    for values in source.rows():
        try:
            row = MetricsRow.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            raise source.fault(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        if not 0 < row.step_time_s < math.inf:
            raise source.fault(f"step_time_s is {row.step_time_s}, no number of seconds above 0")
        found.append(row)
    return found


def _medians(
    attempts: tuple[int, ...],
    nodes: int | None,
    rows: Sequence[MetricsRow],
    warnings: Iterator[str],
) -> SteadySteps:
    return SteadySteps(
        attempts=attempts,
        nodes=nodes,
        steps=len(rows),
        step_s=median(row.step_time_s for row in rows),
        data_wait_s=median(row.data_wait_s for row in rows),
        split=_split(rows),
        warnings=tuple(warnings),
    )


def _split(rows: Sequence[MetricsRow]) -> StepParts | None:
    """Medians of the parts, where all rows have them: those of an older version do not."""
    told = [
        (loss, norms, row.step_time_s - row.data_wait_s - loss - norms)
        for row in rows
        if (loss := row.forward_backward_s) is not None and (norms := row.optimizer_s) is not None
    ]
    if len(told) < len(rows):
        return None
    return StepParts(*(median(part) for part in zip(*told, strict=True)))


def _warnings(used: AttemptGroup, groups: Mapping[AttemptGroup, Sequence[int]]) -> Iterator[str]:
    """What was left out, and why."""
    order = list(groups)
    at = order.index(used)
    for group in order[at + 1 :]:
        yield f"{_named(groups[group], group)}: fewer than {ENOUGH} steady steps, not used"
    if any(group.submission > used.submission for group in order):
        yield (
            f"the steps of {_named(groups[used], used)} were made before the run was resumed, "
            "which may have changed its configuration: the prediction is of what it is now"
        )
    if at:
        before = sorted(number for group in order[:at] for number in groups[group])
        yield f"{_named(before, None)}: of another submission or node count, not used"


def _named(attempts: Sequence[int], group: AttemptGroup | None) -> str:
    words = ", ".join(str(number) for number in attempts)
    nodes = "" if group is None or group.nodes is None else f" on {_counted(group.nodes)}"
    return f"attempt{'s' if len(attempts) > 1 else ''} {words}{nodes}"


def _counted(nodes: int) -> str:
    return f"{nodes} node{'s' if nodes > 1 else ''}"


RECENT = 100  # steps
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True)
class Pace:
    """The pace of a run's recent steps.

    Attributes:
        step_s: Median of their seconds.
        seq_per_s: Median of their rates; None where the rows have none.
        saves_s: Seconds a step that training waited for saves, over the attempt.
    """

    step_s: float
    seq_per_s: float | None
    saves_s: float

    def seconds(self, steps: int) -> float:
        """How long so many steps take, saves included and restarts not."""
        return steps * (self.step_s + self.saves_s)


def read_pace(run: RunDir, attempts: Sequence[AttemptRecord]) -> Pace | None:
    """The pace of the newest attempt that has made steps on as many workers as the last one.

    The first step of an attempt compiles and counts for nothing.

    Args:
        run: The run.
        attempts: Its train attempts, oldest first.

    Returns:
        None where there is no such step.
    """
    known = {attempt.attempt: attempt for attempt in attempts}
    for path in reversed(run.metrics_files()):
        number = int(path.stem.removeprefix("attempt_"))
        attempt = known.get(number)
        if attempt is not None and attempt.world_size != attempts[-1].world_size:
            continue
        rows = _recent(path)
        if not rows:
            continue
        rates = [rate for row in rows if (rate := finite_number(row, "seq_per_s")) is not None]
        return Pace(
            step_s=median(row["step_time_s"] for row in rows),
            seq_per_s=median(rates) if rates else None,
            saves_s=_saves_s(run, number, rows[-1]["step"], attempt),
        )
    return None


def finite_number(row: dict[str, Any], name: str) -> float | None:
    """A finite number of a row; None where it is absent or none."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _recent(path: Path) -> list[dict[str, Any]]:
    """The last rows of a metrics file, oldest first, without the attempt's first."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - _TAIL_BYTES))
            # The first line is the attempt's first, or cut.
            lines = stream.read().split(b"\n")[1:]
    except OSError:
        return []
    rows = []
    for line in lines[-RECENT - 1 :]:  # the last one is empty or cut
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            if (
                isinstance(row, dict)
                and type(row.get("step")) is int
                and finite_number(row, "step_time_s") is not None
            ):
                rows.append(row)
    return rows


def _saves_s(run: RunDir, number: int, step: int, attempt: AttemptRecord | None) -> float:
    made = step - ((attempt.checkpoint_before or 0) if attempt is not None else 0)
    with suppress(RunError):
        waited = [e.waited_s or 0.0 for e in read_events(run, number) if e.kind == "save"]
        return math.fsum(waited) / max(made, 1)
    return 0.0
