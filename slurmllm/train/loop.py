"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from slurmllm.errors import EXIT_OK, EXIT_REQUEUE, DivergenceError
from slurmllm.records import MetricsRow
from slurmllm.train.hooks.base import Hook, Moment
from slurmllm.train.job import Job
from slurmllm.train.schedule import learning_rate


def train(job: Job, hooks: Sequence[Hook]) -> int:
    """Train to the last step, or until somebody asks to stop.

    Returns:
        0 at the last step; EXIT_REQUEUE after a stop, all workers after the same step.

    Raises:
        DivergenceError: the loss or the gradient norm is not finite; nothing is saved.
    """
    every = job.config.recipe.checkpoint.every_steps
    signal_name = stop_requested(job)
    while job.step < job.last_step and signal_name is None:
        row = one_step(job)
        signal_name = stop_requested(job)
        last = job.step == job.last_step
        due = job.step % every == 0
        moment = Moment(row, last=last, saving=last or due or signal_name is not None)
        for hook in hooks:
            hook.after_step(moment)
    if job.step < job.last_step:
        job.say(f"stopped by {signal_name} after step {job.step} of {job.last_step}")
        return EXIT_REQUEUE
    return EXIT_OK


def one_step(job: Job) -> MetricsRow:
    """One optimizer step and what was measured (collective)."""
    began = time.perf_counter()
    recipe, backend = job.config.recipe, job.backend
    step = job.step + 1
    lr = learning_rate(recipe.optim, recipe.train.steps, step)
    loss = backend.forward_backward(job.micro_batches())
    _require_finite("loss", loss, step)
    grad_norm = backend.optimizer_step(lr)
    _require_finite("gradient norm", grad_norm, step)
    param_norm = backend.param_norm()
    step_time_s = time.perf_counter() - began
    sequences = job.mesh.global_batch
    job.step = step
    job.tokens += sequences * recipe.model.seq_len
    return MetricsRow(
        step=step,
        attempt=job.attempt,
        loss=loss,
        grad_norm=grad_norm,
        param_norm=param_norm,
        lr=lr,
        tokens=job.tokens,
        seq_per_s=sequences / step_time_s,
        tokens_per_s=sequences * recipe.model.seq_len / step_time_s,
        step_time_s=step_time_s,
        time=time.time(),
    )


def stop_requested(job: Job) -> str | None:
    """The signal that reached one of the workers, if any; the same answer on all (collective)."""
    return next((name for name in job.backend.gather(job.stop.signal_name) if name), None)


def _require_finite(name: str, value: float, step: int) -> None:
    if not math.isfinite(value):
        raise DivergenceError(
            f"the {name} of step {step} is {value}; the checkpoints hold earlier weights: "
            "lower optim.lr or lengthen optim.warmup_steps in a new run"
        )
