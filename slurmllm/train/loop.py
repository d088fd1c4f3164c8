"""The training loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, SupportsFloat

from slurmllm.core.errors import EXIT_OK, EXIT_REQUEUE
from slurmllm.core.format import Json
from slurmllm.core.metrics.step_time import FIRST_STEPS, step_rates
from slurmllm.core.run.records import MetricsRow
from slurmllm.train.hooks import Hook, StepEnd
from slurmllm.train.job import Job
from slurmllm.train.schedules import learning_rate

log = logging.getLogger(__name__)


def train(job: Job, hooks: Sequence[Hook]) -> int:
    """Train to the last step, or until a stop is requested: then return EXIT_REQUEUE, else 0.

    All workers end after the same step. Raises a DivergenceError on all if the guard ends training.
    """
    job.decide()
    for hook in hooks:
        hook.before_training()
    posted = job.post_flags()
    unread: list[Step] = []
    while job.step < job.last_step and job.stop.agreed is None:
        for hook in hooks:
            hook.before_step(job.step + 1)
        job.phases.begin("first_step" if job.step == job.first_step else "stepping", job.step)
        unread.append(run_step(job))
        with job.backend.part("waiting"):
            job.read_flags(posted)  # as posted after the step before
        unread[-1] = unread[-1]._replace(ended=job.backend.mark())
        last = job.step == job.last_step
        leaving = last or job.stop.agreed is not None
        saving = leaving or job.saves.due(job.step)
        # At a stop there may be too little time: the next attempt evaluates the step.
        evaluating = job.evaluates(job.step) and (last or not leaving)
        # Before a save the metrics of all steps are read, so that a state that is not finite is
        # found and not saved; and before an evaluation, which needs the weights of this step. The
        # first step compiles: until it has been read, nothing is known of the start.
        read_now = saving or evaluating or job.step == job.first_step + 1
        read_now = read_now or any(hook.reads_model(job.step) for hook in hooks)
        deferred = job.backend.deferred_metrics and not read_now
        while len(unread) > deferred:
            step = unread.pop(0)
            row = read_metrics(job, step)
            if job.guard.diverged:  # no hook sees the step; the flags tell the other workers
                continue
            end = StepEnd(row, batch=step.batch)
            if not unread:  # the newest step
                end = end._replace(last=last, saving=saving, leaving=leaving, evaluating=evaluating)
            for hook in hooks:
                with job.backend.part(f"hook {hook}"):
                    hook.after_step(end)
                if job.stop.agreed is not None and not unread:  # it may have come meanwhile
                    end = end._replace(saving=True, leaving=True)
        if (saving or evaluating) and job.guard.diverged:
            job.decide()  # the others decide in the guard's hook
        posted = job.post_flags()
    if job.step < job.last_step:
        log.info("stopped by %s after step %d of %d", job.stop.agreed, job.step, job.last_step)
        return EXIT_REQUEUE
    return EXIT_OK


class Step(NamedTuple):
    """A step that has been run, or is still running on the device."""

    number: int
    batch: int  # number of the global batch in the stream, from 1
    started: Any  # `Backend.mark`, as is `ended`
    ended: Any
    fields: Json  # of its `MetricsRow`, as far as they are known
    loss: SupportsFloat
    grad_norm: SupportsFloat
    param_norm: SupportsFloat
    forward_marks: Sequence[tuple[Any, Any]]  # `Backend.forward_marks`


def run_step(job: Job) -> Step:
    recipe = job.config.recipe
    backend = job.backend
    started = backend.mark()
    deferred = backend.deferred_metrics
    number = job.step + 1
    lr = learning_rate(recipe.optim, recipe.train.steps, number)
    with backend.part("data"):
        batch = job.next_batch()
    data_at = time.perf_counter()
    loss = backend.forward_backward(batch.micro_batches, batch.num_targets)
    if not deferred:
        with backend.part("waiting"):
            float(loss)
    loss_at = time.perf_counter()
    with backend.part("optimizer"):
        grad_norm = backend.optimizer_step(lr)
        param_norm = backend.param_norm()
    norms_at = time.perf_counter()
    job.step = number
    job.tokens += job.mesh.global_batch * recipe.model.seq_len
    fields: Json = {
        "step": number,
        "attempt": job.attempt,
        "lr": lr,
        "tokens": job.tokens,
        "data_wait_s": batch.wait_s,
    }
    # If the backend's calls return before the work is done, host timers cannot separate the two.
    if not deferred:
        fields |= {"forward_backward_s": loss_at - data_at, "optimizer_s": norms_at - loss_at}
    # It has ended when the flags of the step before have been read.
    return Step(
        number,
        batch.number,
        started,
        None,
        fields,
        loss,
        grad_norm,
        param_norm,
        backend.forward_marks,
    )


def read_metrics(job: Job, step: Step) -> MetricsRow:
    """Read the metrics of a step; waits for the device."""
    with job.backend.part("waiting"):
        loss = float(step.loss)
        grad_norm = float(step.grad_norm)
    job.guard.check_finite("loss", loss, step.number, step.batch)
    job.guard.check_finite("gradient norm", grad_norm, step.number, step.batch)
    param_norm = float(step.param_norm)
    step_time_s = step.ended - step.started
    window_s = job.config.recipe.watchdog.window_s
    if window_s and step.forward_marks and step.number > job.first_step + FIRST_STEPS:
        # A backward pass computes twice as much. Asynchronous devices hide the waits for data.
        own_s = 3 * sum(end - begun for begun, end in step.forward_marks)
        if not job.backend.deferred_metrics:
            own_s += step.fields["data_wait_s"]
        job.phases.add_step(own_s, window_s)
    rates = step_rates(step_time_s, job.mesh.global_batch, job.config.recipe.model.seq_len)
    return MetricsRow(
        **step.fields,
        **rates._asdict(),
        time=time.time(),
        loss=loss,
        grad_norm=grad_norm,
        param_norm=param_norm,
        step_time_s=step_time_s,
    )
