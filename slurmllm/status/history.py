"""What a run did and when, as the accounting of its node hours needs it; read or simulated."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slurmllm.errors import RunError, SlurmError, SlurmllmError
from slurmllm.metrics.attempt_metrics import read_attempts
from slurmllm.metrics.curve_table import Part
from slurmllm.metrics.row_reader import read_events
from slurmllm.records import AttemptRecord, JobsRecord, Submission
from slurmllm.rundir import RunDir, Stage
from slurmllm.slurm.client import AccountingRow, SlurmClient

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Incarnation:
    """One start of a Slurm job: what it had of the cluster.

    Attributes:
        job_id: The job.
        stage: The stage that it ran.
        nodes: How many.
        start: Unix time, s.
        end: Likewise; of one that runs, the time of asking.
        running: Whether it had no end yet.
    """

    job_id: str
    stage: Stage
    nodes: int
    start: float
    end: float
    running: bool = False


@dataclass(frozen=True)
class Steps:
    """The steps that an attempt made, in its order.

    Attributes:
        numbers: Of the steps. [steps]
        seconds: That each took, s. [steps]
        ends: Unix time at its end, s. [steps]
    """

    numbers: Ints
    seconds: Floats
    ends: Floats

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True)
class RunHistory:
    """A run's past.

    Attributes:
        name: The run's.
        attempts: Of both stages.
        steps: Train attempt → its steps; only attempts that made some.
        waited_s: Train attempt → seconds that training waited for its saves, where known.
        saves: Of each save that is known: how long training waited, how long all of it took, s.
        incarnations: Of the jobs by Slurm's accounting; empty where there is none.
        submissions: Unix times at which somebody submitted or resumed the run.
        warnings: What a reader of the figures should know.
    """

    name: str
    attempts: Sequence[AttemptRecord]
    steps: Mapping[int, Steps] = field(default_factory=dict)
    waited_s: Mapping[int, float] = field(default_factory=dict)
    saves: Sequence[tuple[float, float]] = ()
    incarnations: Sequence[Incarnation] = ()
    submissions: Sequence[float] = ()
    warnings: tuple[str, ...] = ()


def read_history(run: RunDir, incarnations: Sequence[Incarnation] = ()) -> RunHistory:
    """Read what a run has written, as far as it can be read."""
    warnings: list[str] = []
    attempts = list(_attempts(run, warnings))
    steps: dict[int, Steps] = {}
    for path in run.metrics_files():
        number = int(path.stem.removeprefix("attempt_"))
        made = _steps(path, warnings)
        if len(made):
            steps[number] = made
    waited_s: dict[int, float] = {}
    saves: list[tuple[float, float]] = []
    for number in steps:
        found = [event for event in read_events(run, number) if event.kind == "save"]
        if found:
            waited_s[number] = math.fsum(event.waited_s or 0.0 for event in found)
            saves += [(event.waited_s or 0.0, event.seconds or 0.0) for event in found]
    if steps and not waited_s:
        warnings.append("no save in events/: what training waited for saves counts as idle")
    unknown = sorted(set(steps) - {a.attempt for a in attempts if a.stage == "train"})
    if unknown:
        words = ", ".join(str(number) for number in unknown)
        warnings.append(f"metrics without an attempt record count for nothing: attempt {words}")
    submitted = tuple(sent.submitted_at for sent in _submissions(run, warnings))
    return RunHistory(
        run.name, attempts, steps, waited_s, saves, incarnations, submitted, tuple(warnings)
    )


def read_submissions(run: RunDir) -> Sequence[Submission]:
    """Every submission of a run, oldest first; none where jobs.json is absent or damaged."""
    return _submissions(run, [])


def _submissions(run: RunDir, warnings: list[str]) -> Sequence[Submission]:
    try:
        return JobsRecord.load(run.jobs).submissions if run.jobs.is_file() else ()
    except SlurmllmError as error:
        warnings.append(str(error))
        return ()


def _attempts(run: RunDir, warnings: list[str]) -> Iterator[AttemptRecord]:
    stages: tuple[Stage, ...] = ("precompile", "train")
    for stage in stages:
        for paths in run.attempts(stage):
            if not paths.record.is_file():
                continue
            try:
                record, unknown = AttemptRecord.load_known(paths.record)
                yield record
                if unknown:
                    warnings.append(
                        f"{paths.record}: {', '.join(unknown)}; such values count as absent: the "
                        "file may be of a newer version of slurmllm"
                    )
            except SlurmllmError as error:
                warnings.append(str(error))


def _steps(path: Path, warnings: list[str]) -> Steps:
    try:
        parts, left_out = read_attempts([path], lenient=True)
    except RunError as error:  # the rest of the run can still be counted
        warnings.append(str(error))
        return Steps(np.empty(0, dtype=np.int64), np.empty(0), np.empty(0))
    warnings += left_out
    none = np.empty(0)
    numbers = np.concatenate([none.astype(np.int64), *(part.steps for part in parts)])
    seconds, ends = (
        np.concatenate([none, *(_column(part, name) for part in parts)])
        for name in ("step_time_s", "time")
    )
    timed = np.isfinite(seconds) & np.isfinite(ends) & (seconds >= 0) & (ends >= 0)
    if not timed.all():
        rows = int(np.count_nonzero(~timed))
        warnings.append(
            f"{path}: {rows} rows count for nothing, whose step_time_s or time is no number of "
            "seconds"
        )
    return Steps(numbers[timed], seconds[timed], ends[timed])


def _column(part: Part, name: str) -> Floats:
    return part.columns.get(name, np.full(len(part.steps), np.nan))


_SLACK_S = 60.0  # between the clocks of the login node and Slurm's


def read_incarnations(submissions: Sequence[Submission], client: SlurmClient) -> list[Incarnation]:
    """Every start of every job of a run, oldest first; empty without accounting or Slurm."""
    found = []
    sizes: dict[str, int] = {}
    for job_id, stage in _jobs(submissions):
        for row in client.accounting(job_id):
            if row.job_id != job_id:
                continue  # a step
            if row.nodes not in sizes:
                sizes[row.nodes] = _count(row.nodes, client)
            started = _unix(row.start)
            if started is None or not sizes[row.nodes]:
                continue  # cancelled in the queue, or there still
            if started < submissions[0].submitted_at - _SLACK_S:
                continue  # another job, before Slurm began to count anew
            found.append(_incarnation(row, stage, sizes[row.nodes], started))
    return sorted(found, key=lambda incarnation: incarnation.start)


def _incarnation(row: AccountingRow, stage: Stage, nodes: int, start: float) -> Incarnation:
    end = _unix(row.end)
    running = end is None
    return Incarnation(
        row.job_id, stage, nodes, start, max(start, time.time() if end is None else end), running
    )


def _jobs(submissions: Sequence[Submission]) -> Iterator[tuple[str, Stage]]:
    for sent in submissions:
        if sent.precompile_job is not None:
            yield sent.precompile_job, "precompile"
        if sent.train_job is not None:
            yield sent.train_job, "train"


def _count(nodelist: str, client: SlurmClient) -> int:
    """How many nodes a list names; 0 for `None assigned`."""
    if not nodelist or nodelist.startswith("None"):
        return 0
    if "[" not in nodelist:
        return nodelist.count(",") + 1
    try:
        return len(client.hostnames(nodelist))
    except SlurmError:
        return 0


def _unix(moment: str) -> float | None:
    """sacct's local time as Unix time; None for `Unknown` and `None`."""
    try:
        return datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return None
