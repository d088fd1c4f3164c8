"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, SupportsFloat

from slurmllm.backends.base import IGNORED, MicroBatch
from slurmllm.errors import EXIT_OK, EXIT_REQUEUE
from slurmllm.records import MetricsRow
from slurmllm.train.hooks.base import Hook, StepEnd
from slurmllm.train.job import Job
from slurmllm.train.schedules import learning_rate


def train(job: Job, hooks: Sequence[Hook]) -> int:
    """Train to the last step, or until somebody asks to stop.

    Returns:
        0 at the last step; EXIT_REQUEUE after a stop, all workers after the same step.

    Raises:
        DivergenceError: on all workers, where the guard ends training; nothing is saved.
    """
    signal_name = stop_requested(job)
    unread: list[Step] = []
    while job.step < job.last_step and signal_name is None:
        job.pulse.beat("first_step" if job.step == job.first_step else "stepping", job.step)
        unread.append(one_step(job))
        signal_name = stop_requested(job)
        last = job.step == job.last_step
        leaving = last or signal_name is not None
        saving = leaving or job.saves.due(job.step)
        # A save comes after the figures of all steps that it holds: one that is not finite is
        # found before.
        late = job.backend.deferred_metrics and not saving
        while len(unread) > late:
            step = unread.pop(0)
            row = read(job, step)
            newest = not unread
            moment = StepEnd(
                row,
                last=last and newest,
                saving=saving and newest,
                leaving=leaving and newest,
                batch=step.batch,
            )
            for hook in hooks:
                hook.after_step(moment)
    if job.step < job.last_step:
        job.say(f"stopped by {signal_name} after step {job.step} of {job.last_step}")
        return EXIT_REQUEUE
    return EXIT_OK


class Step(NamedTuple):
    """A step that was made, or is under way on the device.

    Attributes:
        began: time.perf_counter() before it.
        tokens: Trained on so far, this step included.
        data_wait_s: Until this worker had its sequences.
        forward_backward_s: From there to the loss. None, with `optimizer_s`, where the backend's
            calls return before the work is done: the host's clock cannot tell the two apart.
        optimizer_s: From there to the norms of gradient and weights.
        batch: The global batch, as the stream counts them.
    """

    number: int
    batch: int
    began: float
    lr: float
    tokens: int
    data_wait_s: float
    forward_backward_s: float | None
    optimizer_s: float | None
    loss: SupportsFloat
    grad_norm: SupportsFloat
    param_norm: SupportsFloat


def one_step(job: Job) -> Step:
    """One optimizer step (collective)."""
    began = time.perf_counter()
    recipe, backend = job.config.recipe, job.backend
    number = job.step + 1
    lr = learning_rate(recipe.optim, recipe.train.steps, number)
    batches = job.micro_batches()
    had_data = time.perf_counter()
    batch = job.stream.batches
    loss = backend.forward_backward(batches, counted_labels(job, batches))
    if not backend.deferred_metrics:
        job.guard.check_finite("loss", float(loss), number, batch)
    had_loss = time.perf_counter()
    grad_norm = backend.optimizer_step(lr)
    param_norm = backend.param_norm()
    had_norms = time.perf_counter()
    in_order = not backend.deferred_metrics
    job.step = number
    job.tokens += job.mesh.global_batch * recipe.model.seq_len
    return Step(
        number, batch, began, lr, job.tokens,
        data_wait_s=had_data - began,
        forward_backward_s=had_loss - had_data if in_order else None,
        optimizer_s=had_norms - had_loss if in_order else None,
        loss=loss, grad_norm=grad_norm, param_norm=param_norm,
    )  # fmt: skip


def counted_labels(job: Job, batches: Sequence[MicroBatch]) -> int:
    """How many labels of the global batch the loss is the mean over (collective)."""
    mesh = job.mesh
    if job.stream.trains_every_token:
        return mesh.global_batch * job.config.recipe.model.seq_len
    own = sum(int((batch.labels != IGNORED).sum()) for batch in batches)
    # All workers of a replica read the same sequences.
    return int(sum(job.backend.gather(own))) // (mesh.tensor * mesh.pipeline)


def read(job: Job, step: Step) -> MetricsRow:
    """What was measured in a step; waits for it."""
    loss, grad_norm = float(step.loss), float(step.grad_norm)
    job.guard.check_finite("loss", loss, step.number, step.batch)
    job.guard.check_finite("gradient norm", grad_norm, step.number, step.batch)
    param_norm = float(step.param_norm)
    now = time.perf_counter()
    # A step that was begun before the one before it was read took the time between the two.
    step_time_s = now - max(step.began, job.read_at)
    job.read_at = now
    sequences = job.mesh.global_batch
    seq_len = job.config.recipe.model.seq_len
    return MetricsRow(
        step=step.number,
        attempt=job.attempt,
        loss=loss,
        grad_norm=grad_norm,
        param_norm=param_norm,
        lr=step.lr,
        tokens=step.tokens,
        seq_per_s=sequences / step_time_s,
        tokens_per_s=sequences * seq_len / step_time_s,
        step_time_s=step_time_s,
        data_wait_s=step.data_wait_s,
        forward_backward_s=step.forward_backward_s,
        optimizer_s=step.optimizer_s,
        time=time.time(),
    )


def stop_requested(job: Job) -> str | None:
    """The signal that reached one of the workers, if any; the same answer on all (collective).

    Raises:
        DivergenceError: on all workers, where the guard of one of them has found a divergence.
    """
    return next((name for name in job.guard.agree(job.stop.signal_name) if name), None)
