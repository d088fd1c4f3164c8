"""A line in the log every now and then."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from statistics import mean

from slurmllm.train.hooks.base import Hook, Moment
from slurmllm.train.job import Job

# After a start or a resume somebody looks whether it goes on well.
_FIRST_STEPS = 3


class ProgressHook(Hook):
    """Prints where training is; every `train.log_every` steps, the first ones and the last."""

    def __init__(self, job: Job) -> None:
        self._every = job.config.recipe.train.log_every
        self._last_step = job.last_step
        self._first_step = job.step + 1
        # Step times for the estimate; the first step compiles and tells nothing.
        self._step_times_s: deque[float] = deque(maxlen=50)

    def after_step(self, moment: Moment) -> None:
        """Print the line if it is time."""
        row = moment.row
        made = row.step - self._first_step + 1
        if made > 1:
            self._step_times_s.append(row.step_time_s)
        if made > _FIRST_STEPS and row.step % self._every and not moment.last:
            return
        print(
            f"step {row.step}/{self._last_step}  loss {row.loss:.4f}  "
            f"grad norm {row.grad_norm:.3f}  lr {row.lr:.2e}  {row.seq_per_s:.1f} seq/s  "
            f"{row.tokens_per_s:,.0f} tokens/s  eta {self._eta(row.step)}",
            flush=True,
        )

    def _eta(self, step: int) -> str:
        if not self._step_times_s:
            return "?"
        seconds = mean(self._step_times_s) * (self._last_step - step)
        return str(timedelta(seconds=round(seconds)))
