"""A run's history: attempts, steps, saves and job starts, read from its directory and Slurm.

Utilization and recoveries are computed from it; the month simulator produces the same object.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from slurmllm.core.errors import RunError, SlurmError, SlurmllmError
from slurmllm.core.format import Texts, by_key
from slurmllm.core.metrics.attempt_metrics import read_attempts
from slurmllm.core.metrics.curves import Floats, Ints
from slurmllm.core.metrics.merge import FileRows, join_columns
from slurmllm.core.metrics.row_reader import read_events
from slurmllm.core.run.records import WAITS, AttemptRecord, Attempts, JobsRecord, Submission
from slurmllm.core.run.rundir import STAGES, RunDir, Stage, read_all
from slurmllm.core.slurm.client import SlurmClient, to_unix

_MOST_STEPS = 50_000_000
_LONGEST_S = 1e10  # longer durations and later Unix times are damage
_SLACK_S = 60.0  # between the clocks of the login node and of slurmctld


@dataclass(frozen=True)
class Incarnation:
    """One start of a Slurm job."""

    job_id: str
    stage: Stage
    nodes: int
    start: float  # Unix time, s
    end: float  # Unix time, s; the current time if the job is running
    running: bool = False  # whether the job is running


@dataclass(frozen=True)
class Steps:
    """The steps of an attempt, in the order in which it completed them."""

    numbers: Ints  # step numbers [steps]
    seconds: Floats  # duration of each, s [steps]
    ends: Floats  # Unix time at the end of each, s [steps]

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True)
class RunHistory:
    """What a run did, and when."""

    name: str
    attempts: Attempts  # attempts of both stages
    # train attempt → its steps; only attempts with steps
    steps: Mapping[int, Steps] = field(default_factory=dict)
    # train attempt → seconds that training waited for its saves, if known
    waited_s: Mapping[int, float] = field(default_factory=dict)
    # (seconds that training waited, seconds in total) of each known save
    saves: Sequence[tuple[float, float]] = ()
    # job starts in Slurm's accounting; empty without accounting
    incarnations: Sequence[Incarnation] = ()
    submissions: Sequence[float] = ()  # Unix times of submit and of every resume
    warnings: Texts = ()  # what could not be read
    # train attempt → seconds of its evaluations, if it made any
    evaluated_s: Mapping[int, float] = field(default_factory=dict)


def read_history(
    run: RunDir, incarnations: Sequence[Incarnation] = (), metrics: FileRows | None = None
) -> RunHistory:
    """Read a run's history; unreadable files are skipped with a warning.

    `metrics` has the files of metrics that were read leniently before.
    """
    warnings: list[str] = []
    records = (a.record for stage in STAGES for a in run.attempts(stage))
    attempts = [
        attempt
        for attempt in read_all(lambda record: _read_attempt(record, warnings), records)
        if attempt
    ]
    steps = {}
    resumed = {a.attempt: a.checkpoint_before or 0 for a in attempts if a.stage == "train"}
    files = run.metrics_files()
    metrics = dict(metrics or {})
    with suppress(RunError):  # all together: small files by themselves are read line by line
        read_attempts([path for path in files if path not in metrics], True, metrics)
    for path in files:
        number = int(path.stem.removeprefix("attempt_"))
        if steps_of_file := _read_steps(path, metrics, warnings):
            steps[number] = _each_step(steps_of_file, resumed.get(number, 0))
    waited_s: dict[int, float] = {}
    evaluated_s: dict[int, float] = {}
    saves: list[tuple[float, float]] = []
    waits_of = read_all(lambda n: [e for e in read_events(run, n) if e.kind in WAITS], steps)
    for number, events in zip(steps, waits_of, strict=True):
        for kind, seconds in (("save", waited_s), ("evaluation", evaluated_s)):
            if waits := [event.waited_s or 0.0 for event in events if event.kind == kind]:
                seconds[number] = math.fsum(waits)
        saves += [(e.waited_s or 0.0, e.seconds or 0.0) for e in events if e.kind == "save"]
    if steps and not waited_s:
        warnings.append("no save in events/: waits for saves are counted as idle")
    unknown = sorted(set(steps) - {a.attempt for a in attempts if a.stage == "train"})
    if unknown:
        numbers = ", ".join(str(number) for number in unknown)
        warnings.append(f"ignoring metrics: no attempt record of attempt {numbers}")
    return RunHistory(
        name=run.name,
        attempts=attempts,
        steps=steps,
        waited_s=waited_s,
        saves=saves,
        incarnations=incarnations,
        submissions=tuple(
            submission.submitted_at for submission in read_submissions(run, warnings)
        ),
        warnings=tuple(warnings),
        evaluated_s=evaluated_s,
    )


def _read_attempt(record: Path, warnings: list[str]) -> AttemptRecord | None:
    """Return an attempt; None if its record is damaged, or absent (being opened)."""
    if not record.is_file():
        return None
    try:
        attempt, ignored = AttemptRecord.load_known(record)
    except SlurmllmError as error:
        warnings.append(str(error))
        return None
    if ignored:
        warnings.append(
            f"{record}: {', '.join(ignored)}; ignoring these values: the file may be of a newer "
            "version of slurmllm"
        )
    return attempt


def read_submissions(run: RunDir, warnings: list[str] | None = None) -> Sequence[Submission]:
    """Return every submission of a run, oldest first; none if jobs.json is absent or damaged."""
    try:
        return JobsRecord.of(run).submissions
    except SlurmllmError as error:
        if warnings is not None:
            warnings.append(str(error))
        return ()


def _read_steps(path: Path, metrics: FileRows, warnings: list[str]) -> Steps | None:
    try:
        blocks, left_out = metrics.get(path) or read_attempts([path], lenient=True)
    except RunError as error:  # a damaged file must not hide the other attempts
        warnings.append(str(error))
        return None
    warnings += left_out
    numbers = np.concatenate([np.empty(0, dtype=np.int64), *(block.steps for block in blocks)])
    columns, absent = join_columns(blocks)
    unknown = np.full(len(numbers), np.nan)
    seconds = columns.get("step_time_s", unknown)
    ends = columns.get("time", unknown)
    if "step_time_s" not in columns:  # another trainer's
        seconds = np.zeros(len(numbers))
    elif "step_time_s" in absent:
        measured = seconds[np.isfinite(seconds)]
        seconds[absent["step_time_s"]] = np.median(measured) if measured.size else 0.0
    timed = (seconds >= 0) & (seconds < _LONGEST_S) & (ends >= 0) & (ends < _LONGEST_S)
    if not timed.all():
        rows = int(np.count_nonzero(~timed))
        warnings.append(
            f"{path}: ignoring {rows} rows: step_time_s or time is not a number of seconds"
        )
    return Steps(numbers[timed], seconds[timed], ends[timed])


def _each_step(steps: Steps, resumed: int) -> Steps:
    """Return all steps after `resumed` if the rows are of every tenth, say, as of other trainers.

    A row has the mean time of the steps since the row before.
    """
    intervals = np.diff(steps.numbers)
    if not len(intervals) or np.median(intervals) <= 1 or steps.numbers.max() > _MOST_STEPS:
        return steps
    once = np.append(intervals != 0, True)  # a row that was written again
    numbers = steps.numbers[once]
    seconds = steps.seconds[once]
    ends = steps.ends[once]
    intervals = np.diff(numbers)
    first = min(intervals[0], numbers[0])
    first = numbers[0] - resumed if 0 < numbers[0] - resumed < first else first
    counts = np.append(first, intervals).clip(1, None)
    rows = np.arange(len(numbers)).repeat(counts)
    back = counts.cumsum()[rows] - 1 - np.arange(len(rows))  # steps before the row's
    return Steps(numbers[rows] - back, seconds[rows], ends[rows] - back * seconds[rows])


def read_incarnations(submissions: Sequence[Submission], client: SlurmClient) -> list[Incarnation]:
    """Return every start of every job of a run, oldest first; empty without Slurm or accounting."""
    jobs: list[tuple[str | None, Stage]] = []
    for submission in submissions:
        jobs.append((submission.precompile_job, "precompile"))
        jobs += [(job, "train") for job in (*submission.earlier_jobs, submission.train_job)]
    accounted = client.accounting(*dict.fromkeys(job for job, _ in jobs if job is not None))
    rows = by_key((row.job_id, row) for row in accounted)

    @cache
    def count_nodes(nodes: str) -> int:  # scontrol expands a list once
        if "[" in nodes:
            with suppress(SlurmError):
                return len(client.hostnames(nodes))
            return 0
        # `None assigned`
        return nodes.count(",") + 1 if nodes and not nodes.startswith("None") else 0

    incarnations = []
    for job, stage in jobs:
        for row in rows.get(job or "", ()):  # not those of its steps
            start = to_unix(row.start)
            end = to_unix(row.end)
            if start is None or not (nodes := count_nodes(row.nodes)):
                continue  # pending, or cancelled while pending
            if start < submissions[0].submitted_at - _SLACK_S:
                continue  # another job of the same id, from before Slurm's job ids were reset
            last = max(start, time.time() if end is None else end)
            incarnations.append(Incarnation(row.job_id, stage, nodes, start, last, end is None))
    return sorted(incarnations, key=lambda incarnation: incarnation.start)
