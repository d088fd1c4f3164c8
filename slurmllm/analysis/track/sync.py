"""Sends the steps of a run that Weights & Biases or MLflow does not have yet.

A tracker's run is resumed by its id, which `trackers/<tracker>.json` has with the newest step that
was sent: all attempts of a run are one run of the tracker, whichever process sends them, the
supervisor's child on the first node or `slurmllm track sync` on the login node.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from slurmllm.analysis.evaluate.scores import read_scores
from slurmllm.core.config.recipe import TrackerName
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.config.trackers import missing_for_trackers, tracking_uri
from slurmllm.core.config.variables import MASK, is_secret
from slurmllm.core.config.yaml_source import flatten
from slurmllm.core.errors import ConfigError, InfrastructureError, RunError, SlurmllmError
from slurmllm.core.format import Texts, Values
from slurmllm.core.metrics.curves import TAGS, Curve
from slurmllm.core.metrics.row_reader import evaluation_values
from slurmllm.core.metrics.source import read_run
from slurmllm.core.run.records import CONTINUES, AttemptRecord, JobsRecord, Record
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.run.safe_files import open_lock
from slurmllm.core.slurm.setup import Variables

INTERVAL_S = 30.0  # between two looks at the metrics
READING_SHARE = 0.05  # of the time, at most, for reading the metrics of a long run
_BATCH = 80  # steps that are sent before the record is saved: about one request of MLflow's

log = logging.getLogger(__name__)


class TrackerRecord(Record):
    """`trackers/<tracker>.json`: the tracker's run, and what it has."""

    run_id: str = ""  # by which the tracker resumes it; empty until the tracker has made it
    url: str = ""  # of the tracker's page
    last_step: int = -1  # newest step that was sent
    scores: Texts = ()  # scores of checkpoints that were sent


class Session:
    """One tracker's run, open in this process."""

    def __init__(self, run: RunDir, config: RunConfig, name: TrackerName) -> None:
        self.name: TrackerName = name
        self.steps_sent = 0
        self._run = run
        self._config = config
        self._path = run.tracker(name)
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

    def send_scores(self) -> None:
        """Send new scores of checkpoints, which are later than their steps."""
        assert self._tracker is not None
        for key, scored in read_scores(self._run)[0]:
            name = f"{scored.checkpoint:.16}/{key}"
            if name not in self.record.scores:
                tags = {  # with the characters that MLflow allows
                    re.sub(r"[^\w./: -]", "_", f"evaluate/{scored.task}/{metric}"): value
                    for metric, value in scored.scores.items()
                }
                self._tracker.log_scores(
                    StepValues(scored.step, scored.evaluated_at, tags),
                    max(self.record.last_step, 0),
                )
                self._save(scores=(*self.record.scores, name))

    def close(self, state: State) -> None:
        """Wait until the tracker has everything."""
        if self._tracker:
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
    if not last or last.action in (None, *CONTINUES) or last.ending == "superseded":
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
        logged = set()
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
                    if curve:
                        session.send(curve, last)
                        session.send_scores()
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
    cause = f"{type(error).__name__}: {first_line:.500}"
    for variable, value in {**os.environ, **variables(config)}.items():
        if variable.startswith(("WANDB_", "MLFLOW_")) and is_secret(variable, value):
            cause = cause.replace(value, MASK)
    return (
        f"{name}: {cause}; nothing is lost: `slurmllm track sync {run.name}` sends what is missing"
    )


# How the run ended; "running" also between two attempts.
State = Literal["running", "finished", "failed", "cancelled"]


@dataclass(frozen=True)
class StepValues:
    """The metrics of one step."""

    step: int
    time: float  # Unix time, s
    values: Mapping[str, float]  # by tag, those that the step has


@dataclass(frozen=True)
class Description:
    """What a tracker shows of a run apart from its metrics."""

    name: str
    files: Path  # folder for the tracker's own files
    config: Values  # the resolved configuration by dotted path; secrets are masked
    notes: Mapping[str, str]  # commit, report, directory and jobs


class Tracker(ABC):
    """A run of a tracker, open until `close`. Any of these may raise whatever its package does."""

    url = ""  # of the run, once it is open

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    @abstractmethod
    def open(self, run_id: str, about: Description) -> str:
        """Resume the run with this id, or create one if it is empty; return its id."""

    def last_step(self) -> int | None:
        """Return the newest step that the tracker has; None if it cannot tell."""
        return None

    @abstractmethod
    def log(self, steps: Sequence[StepValues]) -> None: ...

    def log_scores(self, scores: StepValues, newest: int) -> None:
        """Log scores of a step that may be earlier than `newest`, the last one logged."""
        self.log([scores])

    @abstractmethod
    def close(self, state: State) -> None: ...


class Wandb(Tracker):
    """Weights & Biases."""

    _run: Any = None

    def open(self, run_id: str, about: Description) -> str:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        about.files.mkdir(exist_ok=True)
        self._run = wandb.init(
            project=self._config.cluster.trackers.project,
            entity=self._config.cluster.trackers.entity,
            id=run_id or None,
            resume="allow",
            name=about.name,
            dir=str(about.files),
            # The metrics are those of the workers: nothing of this process belongs in the run.
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                init_timeout=30,
                x_disable_stats=True,
                x_disable_meta=True,
                x_save_requirements=False,
            ),
        )
        self._run.config.update({**about.config, **about.notes}, allow_val_change=True)
        self.url = "" if self._run.offline else self._run.url or ""
        return str(self._run.id)

    def last_step(self) -> int | None:
        # What was lost with a process that was killed is missing there. Offline it is 0.
        return None if self._run.offline else int(self._run.step) - 1

    def log(self, steps: Sequence[StepValues]) -> None:
        for step in steps:
            self._run.log({**step.values, "time": step.time}, step=step.step)

    def log_scores(self, scores: StepValues, newest: int) -> None:
        # W&B accepts no value of an earlier step: the scores get an axis of their own.
        self._run.define_metric("evaluate/*", step_metric="evaluate/step")
        self._run.log({**scores.values, "evaluate/step": scores.step}, step=newest)

    def close(self, state: State) -> None:
        self._run.finish(exit_code=1 if state == "failed" else 0)


class Mlflow(Tracker):
    """MLflow."""

    _BATCH = 1000  # metrics in a request; the server takes no more
    _PARAMS = 100  # parameters, likewise
    _LONGEST = 6000  # characters of a parameter
    _STATUS: Mapping[State, str] = {
        "running": "RUNNING",
        "finished": "FINISHED",
        "failed": "FAILED",
        "cancelled": "KILLED",
    }

    _run_id = ""

    def open(self, run_id: str, about: Description) -> str:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        import mlflow

        uri = tracking_uri(self._config) or ""
        mlflow.set_tracking_uri(uri)
        mlflow.set_experiment(self._config.cluster.trackers.project)
        run = mlflow.active_run()  # of a try that failed below
        if run is None:
            run = mlflow.start_run(run_id=run_id or None, run_name=None if run_id else about.name)
        self._run_id = run.info.run_id
        params = {key: str(value)[: self._LONGEST] for key, value in about.config.items()}
        logged = run.data.params  # a parameter cannot change
        new = [(key, value) for key, value in params.items() if key not in logged]
        for begin in range(0, len(new), self._PARAMS):
            mlflow.log_params(dict(new[begin : begin + self._PARAMS]))
        tags = dict(about.notes)
        if "slurmllm.git_commit" in tags:  # the name under which MLflow's pages show it
            tags["mlflow.source.git.commit"] = tags["slurmllm.git_commit"]
        tags |= {key: value for key, value in params.items() if logged.get(key, value) != value}
        for key, value in tags.items():
            mlflow.set_tag(key, value)
        if uri.startswith("http"):
            self.url = (
                f"{uri.rstrip('/')}/#/experiments/{run.info.experiment_id}/runs/{self._run_id}"
            )
        return self._run_id

    def log(self, steps: Sequence[StepValues]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        metrics = [
            Metric(tag, value, round(step.time * 1000), step.step)
            for step in steps
            for tag, value in step.values.items()
        ]
        for begin in range(0, len(metrics), self._BATCH):
            MlflowClient().log_batch(self._run_id, metrics=metrics[begin : begin + self._BATCH])

    def close(self, state: State) -> None:
        import mlflow

        mlflow.end_run(self._STATUS[state])


TRACKERS: Mapping[TrackerName, type[Tracker]] = {"wandb": Wandb, "mlflow": Mlflow}


def variables(config: RunConfig) -> Variables:
    """Return the trackers' variables of recipe and profile: keys, among others."""
    return {
        name: value
        for name, value in {**config.cluster.env, **config.recipe.env}.items()
        if name.startswith(("WANDB_", "MLFLOW_")) and value != MASK
    }
