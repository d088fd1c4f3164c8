"""Checkpoints: every `checkpoint.every_steps`, at the last step and at a stop."""

from __future__ import annotations

import time

from slurmllm.checkpoint.replicas import ReplicaCopier, open_replica
from slurmllm.checkpoint.save import Save, refuse_if_superseded
from slurmllm.errors import StorageError
from slurmllm.train.hooks.base import Hook, StepEnd
from slurmllm.train.job import Job
from slurmllm.train.save_interval import MEASURED_STEPS, SaveInterval

# A save at a stop may take so many times the one before it.
_MARGIN = 1.2
# Of waiting for a copy at a stop, where nobody has said how long it may take.
_STOP_COPY_S = 10.0


class CheckpointHook(Hook):
    """Saves; every worker has this hook, for all of them write.

    With `checkpoint.asynchronous`, training goes on while the files are written. A save is
    finished after the step at which all workers have written theirs, before the next one begins,
    and before training ends.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._save: Save | None = None
        self._finished: Save | None = None
        self._waited_s = 0.0
        self._save_s: float | None = None
        first = job.worker.rank == 0
        self._interval = SaveInterval(job) if first else None
        self._copier = _copier(job) if first else None

    def after_step(self, moment: StepEnd) -> None:
        """Begin or finish a save if it is time (collective)."""
        job = self._job
        if self._interval is not None and moment.row.step > job.first_step + 1:
            self._interval.made_step(moment.row.step_time_s, saving=self._save is not None)
        finished = self._save is not None and (moment.saving or self._written(self._save))
        if finished:
            self._finish()
        if moment.saving and (moment.last or not moment.leaving or self._fits()):
            self._begin()
            if moment.leaving or not job.config.recipe.checkpoint.asynchronous:
                self._finish()
                finished = True
        if moment.leaving:
            self._leave(moment)
        elif finished or job.step == job.first_step + MEASURED_STEPS:
            self._choose()

    def close(self) -> None:
        """Let what has expired be removed."""
        if self._finished is not None:
            self._finished.join_retention()

    def _written(self, save: Save) -> bool:
        return all(self._job.backend.gather(save.written()))

    def _begin(self) -> None:
        job = self._job
        job.pulse.beat("saving", job.step)
        began = time.monotonic()
        self._save = Save(job.run, job.backend, job.train_state(), job.attempt)
        self._waited_s = time.monotonic() - began
        job.saves.choose(None)

    def _finish(self) -> None:
        assert self._save is not None
        job, save = self._job, self._save
        job.pulse.beat("saving", job.step)
        began = time.monotonic()
        self.close()
        copied = self._copier.in_use if self._copier is not None else ()
        self._save_s = save.finish((*copied, *job.guard.needed()))
        self._save, self._finished = None, save
        between_s = self._waited_s + time.monotonic() - began
        waited_s = between_s + save.waited_s
        job.say(f"saved step {save.step} in {self._save_s:.2f} s; training waited {waited_s:.2f} s")
        if self._interval is not None:
            cost_s = self._interval.saved(self._save_s, between_s, save.waited_s)
            job.events.add(
                "save",
                save.step,
                seconds=self._save_s,
                waited_s=waited_s,
                bytes=save.num_bytes,
                values={"cost_s": cost_s},
            )
        if self._copier is not None:
            self._copier.copy(save.step)

    def _choose(self) -> None:
        """Settle when the next one is due, where nobody has said (collective)."""
        job = self._job
        if not job.saves.auto or self._save is not None:
            return
        choice = self._interval.choose(job.step) if self._interval is not None else None
        choice = job.backend.gather(choice)[0]
        job.saves.choose(choice.step)
        job.say(choice.message)
        job.events.add("interval", job.step, message=choice.message, values=choice.values)

    def _fits(self) -> bool:
        """Whether a save at a stop can be finished before its end (collective)."""
        job = self._job
        left = job.stop.left_s(job.config.recipe.slurm.signal_lead_s)
        answers = job.backend.gather((left, self._save_s))
        needed = answers[0][1]
        known = [left for left, _ in answers if left is not None]
        if needed is None or not known or needed * _MARGIN <= min(known):
            return True
        message = (
            f"step {job.step} is not saved: the last save took {needed:.1f} s and "
            f"{max(0.0, min(known)):.1f} s are left; a longer slurm.signal_lead_s leaves room"
        )
        job.say(message)
        values = {"left_s": min(known), "needed_s": needed}
        job.events.add("save_skipped", job.step, message=message, values=values)
        return False

    def _leave(self, moment: StepEnd) -> None:
        """Finish the copy under way if the time allows; at a stop it is short."""
        if self._copier is None:
            return
        job = self._job
        limit_s = job.config.recipe.watchdog.save_s / 2
        if not moment.last:
            left_s = job.stop.left_s(job.config.recipe.slurm.signal_lead_s)
            limit_s = min(limit_s, _STOP_COPY_S if left_s is None else left_s / 2)
        job.pulse.beat("saving", job.step)
        if not self._copier.finish(limit_s):
            job.say("the copy to checkpoint.replica is not complete; the run goes on without")


def _copier(job: Job) -> ReplicaCopier | None:
    """What copies to the second place; a place that cannot be used is told and costs no run."""
    config = job.config.recipe.checkpoint
    try:
        tier = open_replica(config, job.run.name)
    except StorageError as error:
        job.say(f"warning: {error}")
        return None
    if tier is None:
        return None

    def told(step: int, seconds: float, num_bytes: int, fault: str | None) -> None:
        if fault is None:
            job.events.add("copied", step, seconds=seconds, bytes=num_bytes)
            return
        job.say(f"warning: {fault}; tried again at the next save")
        job.events.add("copied", step, message=fault, seconds=seconds)

    return ReplicaCopier(
        tier,
        job.run,
        config.replica_keep,
        lambda: refuse_if_superseded(job.run, job.attempt),
        told,
    )
