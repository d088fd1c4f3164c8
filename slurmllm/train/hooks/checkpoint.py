"""Checkpoints: every `checkpoint.every_steps`, at the last step and at a stop."""

from __future__ import annotations

import logging
import math
import time
from functools import partial

from slurmllm.core.errors import StorageError
from slurmllm.train.checkpoint.replicas import ReplicaCopier, open_replica
from slurmllm.train.checkpoint.save import Save, refuse_if_superseded
from slurmllm.train.hooks import Hook, StepEnd
from slurmllm.train.job import Job
from slurmllm.train.schedules import MEASURED_STEPS, SaveInterval

log = logging.getLogger(__name__)

_MARGIN = 1.2  # a save at a stop may take so many times the one before it
_STOP_COPY_S = 10.0  # wait for a replica at a stop whose time limit is unknown


class CheckpointHook(Hook):
    """Saving of checkpoints; on every worker, because all of them write.

    With `checkpoint.asynchronous`, training continues while the files are written. A save is
    finished after the step at which all workers have written theirs, before the next one begins,
    and before training ends.
    """

    _finished: Save | None = None
    _waited_s = 0.0
    _save_s: float | None = None
    _interval: SaveInterval | None = None
    _copier: ReplicaCopier | None = None

    def __init__(self, job: Job) -> None:
        self._job = job
        if job.worker.rank == 0:
            self._interval = SaveInterval(
                job.run,
                job.attempt,
                job.mesh.nodes,
                job.start.started,
                job.config.cluster.node_mtbf_hours,
            )
            self._copier = _make_copier(job)

    def after_step(self, end: StepEnd) -> None:
        """Begin or finish a save if it is due (collective)."""
        job = self._job
        save = self._job.save
        if self._interval is not None and end.row.step > job.first_step + 1:
            self._interval.add_step(end.row.step_time_s, saving=save is not None)
        if save is not None and (end.saving or not job.writing):
            self._finish()
        if end.saving and (end.last or not end.leaving or self._enough_time()):
            job.phases.begin("saving", job.step)
            began = time.monotonic()
            job.save = Save(job.run, job.backend, job.train_state(), job.attempt)
            self._waited_s = time.monotonic() - began
            job.saves.next = None
            if end.leaving or not job.config.recipe.checkpoint.asynchronous:
                self._finish()
        if end.leaving:
            self._finish_copy(end)
        elif job.saves.auto and job.saves.next is None and job.save is None:
            if job.step < job.first_step + MEASURED_STEPS:  # the step time is not known yet
                return
            # Chosen by rank 0, which has the measurements; all workers save after the same step.
            chosen = self._interval.choose(job.step) if self._interval is not None else None
            chosen = job.control.broadcast(chosen)
            job.saves.next = chosen.step
            log.info(chosen.message)
            job.events.add("interval", job.step, message=chosen.message, values=chosen.values)

    def close(self) -> None:
        """Wait for the removal of expired checkpoints."""
        if self._finished is not None:
            self._finished.join_retention()

    def _finish(self) -> None:
        job = self._job
        save = self._job.save
        assert save is not None
        job.phases.begin("saving", job.step)
        began = time.monotonic()
        self.close()
        copied = self._copier.in_use if self._copier is not None else ()
        self._save_s = save.finish((*copied, *job.guard.protected_steps()))
        job.save, self._finished = None, save
        between_s = self._waited_s + time.monotonic() - began
        waited_s = between_s + save.waited_s
        log.info(
            "saved step %d in %.2f s; training waited %.2f s", save.step, self._save_s, waited_s
        )
        if self._interval is not None:
            cost_s = self._interval.add_save(self._save_s, between_s, save.waited_s)
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

    def _enough_time(self) -> bool:
        """Return whether a save at a stop can finish before the time limit (collective)."""
        job = self._job
        left_s = job.stop.left_s(job.config.recipe.slurm.signal_lead_s)
        # Rank 0's last save counts; infinite: unknown.
        needed_s = self._save_s if job.control.rank == 0 else None
        times_s = [math.inf if seconds is None else seconds for seconds in (left_s, needed_s)]
        least_s, needed_s = job.control.all_reduce(times_s, "min")
        if math.isinf(needed_s) or needed_s * _MARGIN <= least_s:
            return True
        message = (
            f"step {job.step} is not saved: the last save took {needed_s:.1f} s and "
            f"{max(0.0, least_s):.1f} s are left; raise slurm.signal_lead_s to have more time"
        )
        log.warning(message)
        values = {"left_s": least_s, "needed_s": needed_s}
        job.events.add("save_skipped", job.step, message=message, values=values)
        return False

    def _finish_copy(self, end: StepEnd) -> None:
        """Wait for the replica that is being copied, at a stop only briefly."""
        if self._copier is None:
            return
        job = self._job
        limit_s = job.config.recipe.watchdog.save_s / 2
        if not end.last:
            left_s = job.stop.left_s(job.config.recipe.slurm.signal_lead_s)
            limit_s = min(limit_s, _STOP_COPY_S if left_s is None else left_s / 2)
        job.phases.begin("saving", job.step)
        if not self._copier.finish(limit_s):
            log.warning("the copy to checkpoint.replica is incomplete; continuing without it")


def _make_copier(job: Job) -> ReplicaCopier | None:
    """Make the copier of replicas; a replica that cannot be used does not stop the run."""
    config = job.config.recipe.checkpoint
    try:
        replica = open_replica(config, job.run.name)
        if replica is None:
            return None
        replica.make_folder(job.config.cluster.trusted_group)
    except StorageError as error:
        log.warning(error)
        return None

    def report(step: int, seconds: float, num_bytes: int, fault: str | None) -> None:
        if fault is None:
            job.events.add("copied", step, seconds=seconds, bytes=num_bytes)
            return
        log.warning("%s; retrying at the next save", fault)
        job.events.add("copied", step, message=fault, seconds=seconds)

    check = partial(refuse_if_superseded, job.run, job.attempt)
    return ReplicaCopier(replica, job.run, config.replica_keep, check, report)
