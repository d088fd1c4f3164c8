"""Sends the steps of a run that a tracker does not have yet, from the run's metrics files.

The metrics of all attempts are merged (`metrics.merge`), and of each attempt the record of a
tracker remembers the last step that was sent. A requeue so continues the tracker's run, whichever
process sends: the supervisor's child on the first node, or `slurmllm track sync` on the login node.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from slurmllm.config.recipe import TrackerName
from slurmllm.config.resolve import RunConfig
from slurmllm.config.trackers import missing
from slurmllm.config.yaml_source import flatten
from slurmllm.errors import ConfigError, InfrastructureError, RunError, SlurmllmError
from slurmllm.metrics.curves import TAGS, VAL_LOSS, Curve, Ints
from slurmllm.metrics.row_reader import evaluation_values
from slurmllm.metrics.source import read_run
from slurmllm.run.records import CONTINUES, AttemptRecord, JobsRecord, Record
from slurmllm.run.rundir import RunDir
from slurmllm.run.safe_files import open_lock
from slurmllm.track.trackers import (
    TRACKERS,
    Description,
    State,
    StepValues,
    Tracker,
    variables,
    without_secrets,
)

INTERVAL_S = 30.0  # between two looks at the metrics
READING_SHARE = 0.05  # of the time, at most, for reading the metrics of a long run
_BATCH = 80  # steps that are sent before the record is saved: about one request of MLflow's

log = logging.getLogger(__name__)


class TrackerRecord(Record):
    """`trackers/<tracker>.json`: the tracker's run, and what it has."""

    run_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9]{1,64}$")]  # W&B's id; a tag in MLflow
    url: str = ""  # of the tracker's page
    sent: dict[int, int] = Field(default_factory=dict)  # attempt → last step that was sent


def unsent(curve: Curve, sent: Mapping[int, int], repeats: bool) -> Ints:
    """Return the rows of the merged metrics that a tracker does not have.

    Steps that were recomputed after a restart are sent again if the tracker can have a step twice
    (`repeats`) and their values differ: after an inexact resume, or after a roll-back.
    """
    last = np.array([sent.get(int(attempt), -1) for attempt in curve.attempts], dtype=np.int64)
    new = curve.steps > last
    differ = curve.overlap_identical is False or bool(curve.skips)
    if not (repeats and differ):
        new &= curve.steps > max(sent.values(), default=-1)
    rows: Ints = np.flatnonzero(new)
    return rows


class Session:
    """One tracker's run, open in this process."""

    def __init__(self, run: RunDir, config: RunConfig, name: TrackerName) -> None:
        self.name: TrackerName = name
        self._run, self._config, self._path = run, config, run.tracker(name)
        self.record = TrackerRecord.find(self._path) or TrackerRecord(run_id=secrets.token_hex(8))
        self._tracker: Tracker | None = None

    def send(self, curve: Curve, last: bool = True) -> int:
        """Send what the tracker does not have, and return the number of steps.

        Before the `last` call, a last step that is being evaluated is not sent: a tracker takes
        each step once. Raises InfrastructureError if its package failed; what was sent is recorded.
        """
        with self._failing():
            tracker = self._tracker or self._open()
        rows = unsent(curve, self.record.sent, tracker.repeats)
        if not last and len(rows) and self._evaluating(curve, int(rows[-1])):
            rows = rows[:-1]
        for begin in range(0, len(rows), _BATCH):
            part = rows[begin : begin + _BATCH]
            with self._failing():
                tracker.log([_values(curve, int(row)) for row in part])
            sent = dict(self.record.sent)
            for row in part:  # ascending within an attempt
                sent[int(curve.attempts[row])] = int(curve.steps[row])
            self._save(sent=sent)
        return len(rows)

    def _evaluating(self, curve: Curve, row: int) -> bool:
        recipe, step = self._config.recipe, int(curve.steps[row])
        every = recipe.eval.every_steps
        if every is None or row + 1 < len(curve.steps):
            return False
        due = step % every == 0 or step == recipe.train.steps
        return due and (VAL_LOSS not in curve.absent or bool(curve.absent[VAL_LOSS][row]))

    def close(self, state: State) -> None:
        """Wait until the tracker has everything; raise as `send`."""
        if self._tracker is not None:
            with self._failing():
                self._tracker.close(state)
            self._tracker = None

    def _open(self) -> Tracker:
        self._save()  # first: the id must outlive this process
        tracker = TRACKERS[self.name](self._config)
        tracker.open(self.record.run_id, describe(self._run, self._config))
        sent = self.record.sent
        if (next_step := tracker.next_step()) is not None:
            sent = {attempt: min(step, next_step - 1) for attempt, step in sent.items()}
        self._save(url=tracker.url or self.record.url, sent=sent)
        self._tracker = tracker
        return tracker

    def _save(self, **fields: Any) -> None:
        self.record = self.record.model_copy(update=fields)
        self.record.save(self._path)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except SlurmllmError:
            raise
        except Exception as error:  # of the packages and of all that they use
            lines = str(error).strip().splitlines() or [""]
            text = without_secrets(f"{type(error).__name__}: {lines[0]:.500}", self._config)
            raise InfrastructureError(
                f"{self.name}: {text}; nothing is lost: `slurmllm track sync {self._run.name}` "
                "sends what is missing"
            ) from error


def _values(curve: Curve, row: int) -> StepValues:
    values = {
        tag: float(curve.columns[name][row])
        for name, tag in TAGS.items()
        if name in curve.columns and not (name in curve.absent and curve.absent[name][row])
    }
    for metric, text in curve.validation.items():
        if not curve.absent[metric][row]:
            values |= evaluation_values({text: float(curve.columns[metric][row])})
    values[TAGS["attempt"]] = float(curve.attempts[row])
    at = float(curve.columns["time"][row]) if "time" in curve.columns else math.nan
    return StepValues(int(curve.steps[row]), at if math.isfinite(at) else time.time(), values)


def describe(run: RunDir, config: RunConfig) -> Description:
    """Return the configuration, commit and places of a run."""
    submissions = JobsRecord.of(run).submissions
    notes = {"slurmllm.run_dir": str(run.path), "slurmllm.report": str(run.report)}
    if jobs := [sent.train_job for sent in submissions if sent.train_job is not None]:
        notes["slurmllm.jobs"] = " ".join(jobs)
    if commits := [sent.git_commit for sent in submissions if sent.git_commit is not None]:
        notes["slurmllm.git_commit"] = commits[-1]
    return Description(run.name, run.path, run.trackers, flatten(config.values()), notes)


def state_of(run: RunDir) -> State:
    """Return the state of a run by the record of its last train attempt."""
    attempts = run.attempts("train")
    last = AttemptRecord.find(attempts[-1].record) if attempts else None
    if last is None or last.action in (None, *CONTINUES) or last.ending == "superseded":
        return "running"
    if last.action == "finish":
        return "finished"
    return "cancelled" if last.ending == "cancelled" else "failed"


@contextmanager
def only_one(run: RunDir) -> Iterator[None]:
    """Hold the lock of the run's trackers.

    Raises:
        RunError: Another process has it.
    """
    run.trackers.mkdir(exist_ok=True)
    with open_lock(run.trackers / "lock") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise RunError(
                f"another process sends the metrics of {run.name}: while it trains, the one on "
                f"its first node does (see {run.track_log})"
            ) from None
        except OSError as error:  # a file system without locks
            log.debug("%s: %s", run.trackers, error)
        yield


def sync(
    run: RunDir,
    config: RunConfig,
    names: Sequence[TrackerName],
    ended: Callable[[], bool] = lambda: True,
    sleep: Callable[[float], object] = time.sleep,
) -> dict[TrackerName, tuple[int, TrackerRecord]]:
    """Send a run's metrics until `ended`; return the number of steps sent, and the records.

    While the run continues, failures are logged, each once, and sending is retried.

    Raises:
        ConfigError: A package, a key or a server's address is missing.
        RunError: Another process sends the run's metrics.
        InfrastructureError: A tracker failed at the last try.
    """
    if faults := missing(config, names):
        raise ConfigError(f"{run.name} cannot be sent to {', '.join(names)}", faults)
    os.environ.update(variables(config))
    with only_one(run):
        sessions = [Session(run, config, name) for name in names]
        counts = dict.fromkeys(names, 0)
        logged: set[str] = set()
        while True:
            last, begin = ended(), time.monotonic()  # before the metrics are read
            failed: list[SlurmllmError] = []
            curve = None
            with suppress(RunError):  # no step yet
                curve = read_run(run.path, lenient=True)
            took_s = time.monotonic() - begin
            for session in sessions:
                try:
                    if curve is not None:
                        counts[session.name] += session.send(curve, last)
                    if last:
                        session.close(state_of(run))
                except SlurmllmError as error:
                    failed.append(error)
            if last:
                break
            for text in map(str, failed):
                if text not in logged:
                    logged.add(text)
                    log.warning("%s", text)
            sleep(max(INTERVAL_S, took_s / READING_SHARE))
    if failed:
        raise InfrastructureError("\n".join(map(str, failed)))
    return {session.name: (counts[session.name], session.record) for session in sessions}
