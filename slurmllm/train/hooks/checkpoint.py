"""Checkpoints: every `checkpoint.every_steps`, at the last step and at a stop."""

from __future__ import annotations

from slurmllm.checkpoint.save import save
from slurmllm.train.hooks.base import Hook, Moment
from slurmllm.train.job import Job


class CheckpointHook(Hook):
    """Saves; every worker has this hook, for all of them write."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def after_step(self, moment: Moment) -> None:
        """Save if it is time (collective)."""
        if not moment.saving:
            return
        job = self._job
        seconds = save(job.run, job.backend, job.train_state(), job.attempt)
        job.say(f"saved step {moment.row.step} in {seconds:.2f} s")
