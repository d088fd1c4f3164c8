"""Checkpoints: every `checkpoint.every_steps`, at the last step and at a stop."""

from __future__ import annotations

import time

from slurmllm.checkpoint.save import Save
from slurmllm.train.hooks.base import Hook, Moment
from slurmllm.train.job import Job


class CheckpointHook(Hook):
    """Saves; every worker has this hook, for all of them write.

    With `checkpoint.asynchronous`, training goes on while the files are written. A save is
    finished after the step at which all workers have written theirs, before the next one begins,
    and before training ends.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._save: Save | None = None
        self._waited_s = 0.0

    def after_step(self, moment: Moment) -> None:
        """Begin or finish a save if it is time (collective)."""
        job = self._job
        if self._save is not None and (moment.saving or self._written(self._save)):
            self._finish(self._save)
        if not moment.saving:
            return
        began = time.monotonic()
        self._save = Save(job.run, job.backend, job.train_state(), job.attempt)
        self._waited_s = time.monotonic() - began
        if moment.leaving or not job.config.recipe.checkpoint.asynchronous:
            self._finish(self._save)

    def _written(self, save: Save) -> bool:
        return all(self._job.backend.gather(save.written()))

    def _finish(self, save: Save) -> None:
        began = time.monotonic()
        seconds = save.finish()
        self._save = None
        self._waited_s += time.monotonic() - began
        self._job.say(
            f"saved step {save.step} in {seconds:.2f} s; training waited {self._waited_s:.2f} s"
        )
