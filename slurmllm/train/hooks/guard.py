"""The divergence guard looks at each step after it is told and before it is saved."""

from __future__ import annotations

from slurmllm.train.hooks.base import Hook, Moment
from slurmllm.train.job import Job


class GuardHook(Hook):
    """Shows the gradient norm to `job.guard`; every worker has this hook."""

    def __init__(self, job: Job) -> None:
        self._guard = job.guard

    def after_step(self, moment: Moment) -> None:
        """Look at the step; what has diverged is not saved (collective where a save is due)."""
        self._guard.see(moment.row.step, moment.batch, moment.row.grad_norm)
        if moment.saving:
            self._guard.agree()
