"""How a run continues when its job must end: the same job, its successor, or another job.

A requeue is the job's own; a chain's successor (`successor.py`) waits since the attempt's start; a
job that Slurm cannot start again is replaced by a new one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from slurmllm.core.config.load import load
from slurmllm.core.config.operation import SlurmConfig
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import EXIT_REQUEUE, SlurmError, SlurmllmError, StorageError
from slurmllm.core.run.records import AttemptRecord, JobsRecord, UnrecordedEnding, comment_with
from slurmllm.core.run.rundir import STAGES, RunDir, Stage, storage_errors
from slurmllm.core.run.safe_files import read_limited, write_error
from slurmllm.core.slurm.client import PATIENCE_S, Names, retry_unreachable, wait_for
from slurmllm.launch.supervise import attempts
from slurmllm.launch.supervise.allocation import Allocation, SlurmAllocation, is_requeued
from slurmllm.launch.supervise.attempts import log_attempt
from slurmllm.launch.supervise.classify import Ending
from slurmllm.launch.supervise.exclusion import (
    delay,
    excluded_names,
    nodes_to_avoid,
    requeue,
)
from slurmllm.launch.supervise.policy import backoff_s, gained, is_transient
from slurmllm.launch.supervise.run_lock import locked, was_restarted
from slurmllm.launch.supervise.successor import LOCK_S, ensure_successor, restart_of

CLOSE_S = 120.0  # for a run directory to be writable again, before the job leaves it to the next
WRITABLE_S = 600.0  # for a run directory to be writable again, before a requeue
# Between submissions of a successor that sbatch refuses, such as for a limit on jobs
RETRY_S = 30.0
log = logging.getLogger(__name__)


@dataclass
class NextJob:
    """How a run continues after its present job: requeued, in a successor, or in a new job."""

    run: RunDir
    stage: Stage
    config: RunConfig
    allocation: Allocation
    _retries_stopped: threading.Event = field(default_factory=threading.Event)
    _retries: threading.Thread | None = None

    @property
    def _job(self) -> SlurmAllocation:
        assert isinstance(self.allocation, SlurmAllocation)
        return self.allocation

    @property
    def chained(self) -> bool:
        return self.stage == "train" and restart_of(self.run, self.allocation) == "chain"

    def submit_ahead(self) -> None:
        """Submit the successor of this job if the site refuses requeues; a thread retries."""
        if not isinstance(self.allocation, SlurmAllocation) or not self.chained:
            return
        if self._retries is None and not self._submit_successor():
            self._retries = threading.Thread(target=self._retry_submission, daemon=True)
            self._retries.start()

    def stop_retries(self) -> None:
        """Stop the retries, before the successor takes over the run or is cancelled."""
        self._retries_stopped.set()
        if self._retries is not None:
            self._retries.join()

    def _retry_submission(self) -> None:
        while not self._retries_stopped.wait(RETRY_S) and not self._submit_successor():
            pass

    def _submit_successor(self) -> bool:
        try:
            ensure_successor(self.run, self._job, self._script("train"), self._avoided_by_train())
        except SlurmllmError as error:
            log.warning("no successor job yet; retrying in %.0f s: %s", RETRY_S, error)
            return False
        return True

    def _script(self, stage: Stage) -> str:
        return script_of(self.run, stage, self.config.cluster.trusted_group)

    def _avoided_by_train(self) -> list[str]:
        """Return the excluded nodes without which the run's next train job can start."""
        client = self._job.client
        excluded = excluded_names(client, self.run, self.config)
        return nodes_to_avoid(client, self._script("train"), (), excluded)

    def replace(self, avoid: Names = (), slurm_forgot_it: bool = True) -> None:
        """Submit this job once more, as another job, and with it what depends on it.

        `slurm_forgot_it`: slurmctld has forgotten this start. Slurmd remembers the job as running
        and refuses its next start, for which Slurm drains the node and holds the job. `avoid`:
        nodes to exclude.
        """
        client = self._job.client
        stages = STAGES[STAGES.index(self.stage) :]
        try:
            with locked(self.run, "supervise"):
                last = JobsRecord.last_of(self.run)
                old = {
                    name: job for name, job in last.jobs.items() if name in (*stages, "successor")
                }
                if old.get(self.stage) != self._job.job_id:
                    return  # resumed since
                if slurm_forgot_it and client.batch_job(self._job.job_id).state != "PENDING":
                    return  # cancelled since, or Slurm has started it elsewhere
                job = None
                for stage in (stage for stage in stages if stage in old):
                    job = client.submit(
                        self._script(stage),
                        after_ok=job,
                        exclude=avoid or client.batch_job(old[stage]).excluded.split(),
                        requeue=last.restart == "requeue",
                        name=last.lane if stage == "train" else None,
                    )
                    JobsRecord.change_last(self.run, **{f"{stage}_job": job})
                    log.warning("submitted job %s in place of job %s", job, old[stage])
                JobsRecord.change_last(self.run, successor_job=None)
                client.cancel([*reversed(old.values())])
        except SlurmllmError as error:
            name = self.run.name
            log.error("%s; `slurmllm cancel %s`, then `slurmllm resume %s`", error, name, name)

    def return_to_queue(self, closed: AttemptRecord, lost_nodes: Names = ()) -> AttemptRecord:
        """Requeue the job, or leave the run to its successor; returns the record.

        `lost_nodes`: those of the attempt that cannot be used. If that is refused, the action
        changes: from requeue to chain (slurm.restart: auto), from chain to stop.
        """
        client, job = self._job.client, self._job.job_id
        auto = self.config.recipe.slurm.restart == "auto"
        try:
            # A second requeue would end the incarnation that runs now.
            if was_restarted(self._job):
                log_attempt(closed, "Slurm has started the job again: not requeued")
                return closed
            before = excluded_names(client, self.run, self.config)
            if len(closed.blamed_nodes) == 1 and not gained(closed):
                before += closed.blamed_nodes  # without evidence: another node may work
            # Slurm may not have noticed the loss yet and would start the job on the same nodes.
            script = self._script(self.stage) if lost_nodes or before else ""
            avoid = nodes_to_avoid(client, script, lost_nodes, before, job, self._job.all_nodes)
            if closed.action == "chain":
                return self._chain(closed, avoid)
            without_lost = auto and self.stage == "train" and {*lost_nodes} & {*avoid}
            if without_lost and self._submit_replacement(closed, avoid):
                return self._changed(closed, action="chain")
            if self.stage == "precompile" and avoid:
                # The train job depends on this one; it may not start on the same nodes either.
                last = JobsRecord.last_of(self.run)
                train_avoid = self._avoided_by_train()
                if last.train_job is not None and train_avoid:
                    self._exclude(last.train_job, train_avoid)
            listed = retry_unreachable(lambda: client.batch_job(job)).excluded
            try:
                requeue(client, job)
            except SlurmError as error:
                # Not after scancel: the job no longer runs then.
                if not auto or client.batch_job(job).state != "RUNNING":
                    raise
                log.warning("%s: another job continues the run", error)
                return self._chain(self._changed(closed, action="chain"), avoid)
            if avoid or listed:
                self._exclude(job, avoid)
            delay(client, job, closed.backoff_s)
        except SlurmllmError as error:
            # The record has the action, but the job may end here.
            log.error("%s; if the job ends here, `slurmllm resume %s`", error, self.run.name)
        return closed

    def _exclude(self, job: str, avoid: Names) -> None:
        """Exclude these nodes and the recipe's from the next start of a pending job."""
        recipe = self.config.recipe.slurm.exclude
        names = [*([recipe] if recipe else []), *avoid]
        retry_unreachable(lambda: self._job.client.exclude(job, names))
        log.info("job %s excludes %s from now on", job, " ".join(names) or "no node")

    def _submit_replacement(self, closed: AttemptRecord, avoid: Names) -> bool:
        """Submit another job that continues the run at once; returns whether that succeeded.

        A requeued job would wait until Slurm has noticed the loss of a node (SlurmdTimeout), and
        then until its credential has expired (cred_expire).
        """
        recorded = False
        try:
            with locked(self.run, "supervise", LOCK_S):
                last = JobsRecord.last_of(self.run)
                before = (*last.earlier_jobs, self._job.job_id)
                if last.train_job != before[-1] or last.cancelled_at is not None or last.lane:
                    return False
                job = self._job.client.submit(self._script("train"), exclude=avoid)
                JobsRecord.change_last(self.run, train_job=job, earlier_jobs=before)
                recorded = True
            log.info("job %s continues the run at once, without %s", job, " ".join(avoid))
            delay(self._job.client, job, closed.backoff_s)
        except SlurmllmError as error:
            log.warning("%s", error)
        return recorded

    def _chain(self, closed: AttemptRecord, avoid: Names) -> AttemptRecord:
        """Leave the run to the successor of this job, which waits since the attempt's start."""
        if self.stage == "precompile":
            self.replace(avoid, slurm_forgot_it=False)
            return closed
        try:
            job = self._successor(avoid)
        except SlurmllmError as error:
            reason = f"no successor job: {error}; `slurmllm resume {self.run.name}` continues"
            log_attempt(closed, reason)
            return self._changed(closed, action="stop", evidence=(*closed.evidence, reason))
        try:
            if job is not None:
                if avoid:
                    self._exclude(job, avoid)
                delay(self._job.client, job, closed.backoff_s)
        except SlurmError as error:
            log.warning("job %s starts without excluded nodes or a wait: %s", job, error)
        return closed

    def _successor(self, avoid: Names) -> str | None:
        """Submit the successor if there is none, with retries for PATIENCE_S; returns its id."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return ensure_successor(self.run, self._job, self._script("train"), avoid)
            except SlurmError as error:
                if time.monotonic() > deadline:
                    raise
                log.warning("no successor job yet; retrying in %.0f s: %s", RETRY_S, error)
                time.sleep(RETRY_S)

    def _changed(self, closed: AttemptRecord, **changes: object) -> AttemptRecord:
        closed = closed.model_copy(update=changes)
        closed.save(closed.files(self.run).record)
        return closed


def script_of(run: RunDir, stage: Stage, group: str | None = None) -> str:
    """Return the text of a stage's batch script; StorageError if others may have written it."""
    path = run.script(stage)
    with storage_errors(f"cannot read {path}"):
        return read_limited(path, trusted=True, group=group).decode()


def wait_writable(run: RunDir, patience_s: float) -> bool:
    """Wait, at most `patience_s`, until the job's log is writable: else Slurm fails the job."""
    return wait_for(lambda: write_error(run.logs) is None, patience_s, 1.0)


def close_when_writable(
    run: RunDir,
    allocation: Allocation,
    record: AttemptRecord,
    ending: Ending,
    close: Callable[[], AttemptRecord],
) -> AttemptRecord:
    """Close an attempt; while its record cannot be written, the job's comment has its ending.

    Raises the StorageError if that lasts, or is not transient: the next attempt then closes it.
    """
    try:
        return close()
    except StorageError as error:
        log.warning("%s", error)
        # Slurm takes comments of at most 1,024 characters.
        _set_comment(
            allocation,
            UnrecordedEnding(
                stage=record.stage,
                attempt=record.attempt,
                ended_at=time.time(),
                ending=ending.ending,
                evidence=tuple(line[:300] for line in ending.evidence[:2]),
                blamed_nodes=ending.blamed_nodes[:8],
            ),
        )
        if not is_transient([str(error)]) or not wait_writable(run, CLOSE_S):
            raise
    closed = close()
    _set_comment(allocation, None)
    return closed


def unrecorded_ending(allocation: Allocation, record: AttemptRecord) -> UnrecordedEnding | None:
    """Return the ending of an open attempt that its job's comment has, if it has one."""
    job = record.job_id
    if isinstance(allocation, SlurmAllocation) and job is not None:
        with suppress(SlurmError):
            queue = allocation.client.queue([job])
            unrecorded = UnrecordedEnding.of_comment(queue[job].comment) if job in queue else None
            if unrecorded and unrecorded.attempt == record.attempt:
                _set_comment(allocation, None)  # it is about to be recorded
                return unrecorded
    return None


def _set_comment(allocation: Allocation, unrecorded: UnrecordedEnding | None) -> None:
    if not isinstance(allocation, SlurmAllocation):
        return
    client = allocation.client
    job_id = allocation.job_id
    try:
        job = client.queue([job_id]).get(job_id)
        client.comment(job_id, comment_with(unrecorded, "" if job is None else job.comment))
    except SlurmError as error:
        log.warning("the comment of job %s is unchanged: %s", job_id, error)


def requeue_unrecorded(
    run: RunDir, stage: Stage, allocation: Allocation, error: StorageError
) -> int:
    """Requeue a run whose directory is not writable; the next attempt closes the open record.

    Raises the error if it is not transient, or if as many starts in a row failed with it as
    slurm.storage_budget allows.
    """
    if not is_transient([str(error)]) or (
        isinstance(allocation, SlurmAllocation) and allocation.state() == "CANCELLED"
    ):
        raise error
    limits = SlurmConfig()
    recorded = -1
    with suppress(SlurmllmError):
        limits = load(run.config).recipe.slurm
        of_job = [a for a in attempts.load_attempts(run, stage) if a.job_id == allocation.job_id]
        recorded = max((a.restart_count for a in of_job), default=-1)
    starts = max(allocation.restart_count - recorded, 1)  # those without a record, or this one
    if starts > limits.storage_budget:
        raise StorageError(
            f"{error}; {starts} starts in a row failed with it (slurm.storage_budget "
            f"{limits.storage_budget}): fix the file system, then `slurmllm resume {run.name}`"
        ) from error
    wait_s = backoff_s(limits.backoff_s, starts)
    log.warning("%s; trying again in %.0f s", error, wait_s)
    if is_requeued(allocation):
        restart_mode = restart_of(run, allocation) if wait_writable(run, WRITABLE_S) else "requeue"
        if restart_mode == "none":
            raise error
        if restart_mode == "chain" and stage == "train":
            ensure_successor(run, allocation, script_of(run, stage), [])
        elif not was_restarted(allocation):
            requeue(allocation.client, allocation.job_id)
            delay(allocation.client, allocation.job_id, wait_s)
    else:
        time.sleep(wait_s)
    return EXIT_REQUEUE
