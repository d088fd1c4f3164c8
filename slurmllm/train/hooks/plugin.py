"""A hook of another package, whose exceptions name it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from slurmllm.errors import PluginError, SlurmllmError
from slurmllm.train.exits import classify_error
from slurmllm.train.hooks import Evaluation, Hook, StepEnd
from slurmllm.train.job import Job

log = logging.getLogger(__name__)


class PluginHook(Hook):
    """A hook of another package; what that raises is raised as a PluginError.

    Errors of the infrastructure (a lost peer, a full disk) and of slurmllm pass unchanged.
    """

    def __init__(self, job: Job, name: str, hook: Hook) -> None:
        self._job, self._name, self._hook = job, name, hook

    def __str__(self) -> str:
        return type(self._hook).__name__

    def reads_model(self, step: int) -> bool:
        with self._named("reads_model", step):
            return self._hook.reads_model(step)

    def before_training(self) -> None:
        with self._named("before_training", self._job.step):
            self._hook.before_training()

    def after_evaluation(self, evaluation: Evaluation) -> None:
        with self._named("after_evaluation", evaluation.step):
            self._hook.after_evaluation(evaluation)

    def before_step(self, step: int) -> None:
        with self._named("before_step", step):
            self._hook.before_step(step)

    def after_step(self, end: StepEnd) -> None:
        with self._named("after_step", end.row.step):
            self._hook.after_step(end)

    def close(self) -> None:
        """Close it; what it raises is logged, since it would hide how the training ended."""
        try:
            self._hook.close()
        except Exception as error:
            log.exception("%s", self._text("close", self._job.step, error))

    @contextmanager
    def _named(self, method: str, step: int) -> Iterator[None]:
        try:
            yield
        except SlurmllmError:
            raise
        except Exception as error:
            if classify_error(error).blame == "infrastructure":
                raise
            raise PluginError(self._text(method, step, error)) from error

    def _text(self, method: str, step: int, error: Exception) -> str:
        path = f"hooks.{self._name}"
        return (
            f"{path}: {self}.{method} of module {type(self._hook).__module__} raised "
            f"{type(error).__name__} at step {step}: {error}; a hook must not raise: correct it "
            "(the traceback is in this worker's log), or train without it: `slurmllm resume "
            f"{self._job.run.name} --set {path}=null`"
        )
