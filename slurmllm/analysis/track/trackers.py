"""Weights & Biases and MLflow: one run of the tracker for a run, whatever its attempts."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slurmllm.core.config.recipe import TrackerName
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.config.trackers import tracking_uri
from slurmllm.core.config.variables import MASK, is_secret

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
    config: Mapping[str, Any]  # the resolved configuration by dotted path; secrets are masked
    notes: Mapping[str, str]  # commit, report, directory and jobs


class Tracker(ABC):
    """A run of a tracker, open until `close`. Any of these may raise whatever its package does."""

    url = ""  # of the run, once it is open

    @abstractmethod
    def __init__(self, config: RunConfig) -> None: ...

    @abstractmethod
    def open(self, run_id: str, about: Description) -> str:
        """Resume the run with this id, or create one if it is empty; return its id."""

    def last_step(self) -> int | None:
        """Return the newest step that the tracker has; None if it cannot tell."""
        return None

    @abstractmethod
    def log(self, steps: Sequence[StepValues]) -> None: ...

    @abstractmethod
    def close(self, state: State) -> None: ...


class Wandb(Tracker):
    """Weights & Biases."""

    def __init__(self, config: RunConfig) -> None:
        self._trackers = config.cluster.trackers
        self._run: Any = None

    def open(self, run_id: str, about: Description) -> str:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        about.files.mkdir(exist_ok=True)
        self._run = wandb.init(
            project=self._trackers.project,
            entity=self._trackers.entity,
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

    def __init__(self, config: RunConfig) -> None:
        self._project = config.cluster.trackers.project
        self._uri = tracking_uri(config) or ""
        self._run_id = ""

    def open(self, run_id: str, about: Description) -> str:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        import mlflow

        mlflow.set_tracking_uri(self._uri)
        mlflow.set_experiment(self._project)
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
        if self._uri.startswith("http"):
            page = f"#/experiments/{run.info.experiment_id}/runs/{self._run_id}"
            self.url = f"{self._uri.rstrip('/')}/{page}"
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


def variables(config: RunConfig) -> dict[str, str]:
    """Return the trackers' variables of recipe and profile: keys, among others."""
    both = {**config.cluster.env, **config.recipe.env}
    return {
        name: value
        for name, value in both.items()
        if name.startswith(("WANDB_", "MLFLOW_")) and value != MASK
    }


def without_secrets(message: str, config: RunConfig) -> str:
    """Return a message of a tracker's package without the values of secret variables."""
    for name, value in {**os.environ, **variables(config)}.items():
        if name.startswith(("WANDB_", "MLFLOW_")) and is_secret(name, value):
            message = message.replace(value, MASK)
    return message
