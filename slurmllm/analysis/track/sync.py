"""Sends the steps of a run that a tracker does not have yet, from the run's metrics files.

A tracker's run is resumed by its id, which `trackers/<tracker>.json` has with the newest step that
was sent: all attempts of a run are one run of the tracker, whichever process sends them, the
supervisor's child on the first node or `slurmllm track sync` on the login node.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from slurmllm.analysis.track.trackers import (
    TRACKERS,
    Description,
    State,
    StepValues,
    Tracker,
    variables,
    without_secrets,
)
from slurmllm.core.config.recipe import TrackerName
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.config.trackers import missing_for_trackers
from slurmllm.core.config.yaml_source import flatten
from slurmllm.core.errors import ConfigError, InfrastructureError, RunError, SlurmllmError
from slurmllm.core.metrics.curves import TAGS, Curve
from slurmllm.core.metrics.row_reader import evaluation_values
from slurmllm.core.metrics.source import read_run
from slurmllm.core.run.records import CONTINUES, AttemptRecord, JobsRecord, Record
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.run.safe_files import open_lock

INTERVAL_S = 30.0  # between two looks at the metrics
READING_SHARE = 0.05  # of the time, at most, for reading the metrics of a long run
_BATCH = 80  # steps that are sent before the record is saved: about one request of MLflow's

log = logging.getLogger(__name__)


class TrackerRecord(Record):
    """`trackers/<tracker>.json`: the tracker's run, and what it has."""

    run_id: str = ""  # by which the tracker resumes it; empty until the tracker has made it
    url: str = ""  # of the tracker's page
    last_step: int = -1  # newest step that was sent


class Session:
    """One tracker's run, open in this process."""

    def __init__(self, run: RunDir, config: RunConfig, name: TrackerName) -> None:
        self.name: TrackerName = name
        self.steps_sent = 0
        self._run, self._config, self._path = run, config, run.tracker(name)
        self.record = TrackerRecord.find(self._path) or TrackerRecord()
        self._tracker: Tracker | None = None

    def send(self, curve: Curve, last: bool = True) -> None:
        """Send the steps that the tracker does not have; raise whatever its package raises.

        Before the `last` call, the newest step is not sent: it may be evaluated now, and a tracker
        takes each step once.
        """
        tracker = self._tracker or self._open()
        rows = np.flatnonzero(curve.steps > self.record.last_step)
        if not last:
            rows = rows[rows < len(curve.steps) - 1]
        for begin in range(0, len(rows), _BATCH):
            batch = rows[begin : begin + _BATCH].tolist()
            tracker.log([step_values(curve, row) for row in batch])
            self._save(last_step=int(curve.steps[batch[-1]]))
            self.steps_sent += len(batch)

    def close(self, state: State) -> None:
        """Wait until the tracker has everything."""
        if self._tracker is not None:
            self._tracker.close(state)
            self._tracker = None

    def _open(self) -> Tracker:
        tracker = TRACKERS[self.name](self._config)
        run_id = tracker.open(self.record.run_id, describe(self._run, self._config))
        self._save(run_id=run_id, url=tracker.url or self.record.url)
        last_step = tracker.last_step()
        if last_step is not None:
            self._save(last_step=last_step)
        self._tracker = tracker
        return tracker

    def _save(self, **fields: Any) -> None:
        self.record = self.record.model_copy(update=fields)
        self.record.save(self._path)


def step_values(curve: Curve, row: int) -> StepValues:
    """Return the metrics of a row under the tags of TensorBoard."""
    values = {
        tag: float(curve.columns[name][row])
        for name, tag in TAGS.items()
        if name in curve.columns and not (name in curve.absent and curve.absent[name][row])
    }
    for metric, name in curve.validation.items():
        if not curve.absent[metric][row]:
            values |= evaluation_values({name: float(curve.columns[metric][row])})
    values[TAGS["attempt"]] = float(curve.attempts[row])
    written_at = float(curve.columns["time"][row]) if "time" in curve.columns else math.nan
    if not math.isfinite(written_at):
        written_at = time.time()
    return StepValues(int(curve.steps[row]), written_at, values)


def describe(run: RunDir, config: RunConfig) -> Description:
    """Return the configuration, commit and directories of a run."""
    submissions = JobsRecord.of(run).submissions
    notes = {"slurmllm.run_dir": str(run.path), "slurmllm.analysis.report": str(run.report)}
    jobs = [record.train_job for record in submissions if record.train_job is not None]
    if jobs:
        notes["slurmllm.jobs"] = " ".join(jobs)
    commits = [record.git_commit for record in submissions if record.git_commit is not None]
    if commits:
        notes["slurmllm.git_commit"] = commits[-1]
    return Description(run.name, run.trackers, flatten(config.values()), notes)


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
) -> list[Session]:
    """Send a run's metrics until `ended`, and return each tracker's session.

    While the run continues, failures are logged, each once, and sending is retried.

    Raises:
        ConfigError: A package, a key or a server's address is missing.
        RunError: Another process sends the run's metrics.
        InfrastructureError: A tracker failed at the last try.
    """
    if faults := missing_for_trackers(config, names):
        raise ConfigError(f"{run.name} cannot be sent to {', '.join(names)}", faults)
    os.environ.update(variables(config))
    with only_one(run):
        sessions = [Session(run, config, name) for name in names]
        logged: set[str] = set()
        while True:
            last = ended()  # before the metrics are read
            begin = time.monotonic()
            curve = None
            with suppress(RunError):  # no step yet
                curve = read_run(run.path, lenient=True)
            reading_s = time.monotonic() - begin
            failures = []
            for session in sessions:
                try:
                    if curve is not None:
                        session.send(curve, last)
                    if last:
                        session.close(state_of(run))
                except Exception as error:  # of the packages and of all that they use
                    failures.append(_failure_text(session.name, error, run, config))
            if last:
                break
            for failure in failures:
                if failure not in logged:
                    log.warning("%s", failure)
            logged.update(failures)
            sleep(max(INTERVAL_S, reading_s / READING_SHARE))
    if failures:
        raise InfrastructureError("\n".join(failures))
    return sessions


def _failure_text(name: TrackerName, error: Exception, run: RunDir, config: RunConfig) -> str:
    if isinstance(error, SlurmllmError):
        return str(error)
    first_line = next(iter(str(error).strip().splitlines()), "")
    cause = without_secrets(f"{type(error).__name__}: {first_line:.500}", config)
    return (
        f"{name}: {cause}; nothing is lost: `slurmllm track sync {run.name}` sends what is missing"
    )
