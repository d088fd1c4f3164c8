"""How a run continues when its job must end: the same job, its successor, or another job.

A requeue is the job's own; a chain's successor (`successor.py`) waits since the attempt's start; a
job that Slurm cannot start again is replaced by a new one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from slurmllm.core.config.load import load
from slurmllm.core.config.operation import SlurmConfig
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import EXIT_REQUEUE, SlurmError, SlurmllmError, StorageError
from slurmllm.core.run.records import AttemptRecord, JobsRecord, UnrecordedEnding, comment_with
from slurmllm.core.run.rundir import STAGES, RunDir, Stage, storage_errors
from slurmllm.core.run.safe_files import read_limited, write_error
from slurmllm.core.slurm.client import PATIENCE_S, retry_unreachable, wait_for
from slurmllm.launch.supervise import attempts
from slurmllm.launch.supervise.allocation import Allocation, SlurmAllocation
from slurmllm.launch.supervise.attempts import log_attempt
from slurmllm.launch.supervise.classify import Ending
from slurmllm.launch.supervise.exclusion import (
    excluded_names,
    nodes_to_avoid,
    requeue,
    to_avoid,
)
from slurmllm.launch.supervise.policy import backoff_s, gained, is_transient
from slurmllm.launch.supervise.run_lock import locked, was_restarted
from slurmllm.launch.supervise.successor import LOCK_S, ensure_successor, restart_of

CLOSE_S = 120.0  # for a run directory to be writable again, before the job leaves it to the next
WRITABLE_S = 600.0  # for a run directory to be writable again, before a requeue
# Between submissions of a successor that sbatch refuses: a limit on the user's jobs, or a partition
# that takes none now, may pass.
AHEAD_S = 30.0
log = logging.getLogger(__name__)


@dataclass
class NextJob:
    """How a run continues after its present job: requeued, in a successor, or in a new job."""

    run: RunDir
    stage: Stage
    config: RunConfig
    allocation: Allocation
    _leaving: threading.Event = field(default_factory=threading.Event)
    _ahead: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._excluded = self.config.recipe.slurm.exclude

    def submit_ahead(self) -> None:
        """Submit the successor of this job if the site refuses requeues, if need be in a thread."""
        if not isinstance(self.allocation, SlurmAllocation) or not self.chained:
            return
        if self._ahead is None and not self._submit_successor():
            self._ahead = threading.Thread(target=self._retry_ahead, daemon=True)
            self._ahead.start()

    def stop_ahead(self) -> None:
        """End the retries, before the job leaves the run to its successor or cancels that."""
        self._leaving.set()
        if self._ahead is not None:
            self._ahead.join()

    def _retry_ahead(self) -> None:
        while not self._leaving.wait(AHEAD_S) and not self._submit_successor():
            pass

    def _submit_successor(self) -> bool:
        assert isinstance(self.allocation, SlurmAllocation)
        try:
            script = self._script("train")
            ensure_successor(
                self.run,
                self.allocation,
                script,
                self._with_recipes(to_avoid(self.allocation.client, self.run, script, self.config)),
            )
        except SlurmllmError as error:
            log.warning("no successor job yet, tried again in %.0f s: %s", AHEAD_S, error)
            return False
        return True

    @property
    def chained(self) -> bool:
        return self.stage == "train" and restart_of(self.run, self.allocation) == "chain"

    def _with_recipes(self, avoid: Sequence[str]) -> list[str]:
        """Add the recipe's exclusion to some nodes; if empty, the script's list applies."""
        return [*([self._excluded] if self._excluded and avoid else []), *avoid]

    def replace(self, avoid: Sequence[str] = (), lost: bool = True) -> None:
        """Submit this job once more, as another job, and with it what depends on it.

        Slurmd remembers the job of a `lost` start as running: it refuses its next start, for which
        Slurm drains the node and holds the job. `avoid`: nodes to exclude.
        """
        assert isinstance(self.allocation, SlurmAllocation)
        client = self.allocation.client
        this_job = self.allocation.job_id
        stages = STAGES[STAGES.index(self.stage) :]
        try:
            with locked(self.run, "supervise"):
                last = JobsRecord.last_of(self.run)
                old = {s: getattr(last, f"{s}_job") for s in stages}
                if old[self.stage] != this_job:
                    return  # resumed since
                if lost and client.batch_job(this_job).state != "PENDING":
                    return  # cancelled since, or Slurm has started it elsewhere
                requeue = last.restart == "requeue"
                job = None
                for stage in stages:
                    replaced = old[stage]
                    if replaced is None:  # a run that only compiles graphs for a sweep
                        continue
                    exclude = ",".join(avoid) or client.batch_job(replaced).excluded
                    name = last.lane if stage == "train" else None
                    job = client.submit(
                        self._script(stage),
                        after_ok=job,
                        exclude=exclude,
                        requeue=requeue,
                        name=name,
                    )
                    JobsRecord.change_last(self.run, **{f"{stage}_job": job})
                    log.warning("submitted job %s in place of job %s", job, replaced)
                JobsRecord.change_last(self.run, successor_job=None)
                jobs = (last.successor_job, *reversed(old.values()))
                client.cancel([job for job in jobs if job is not None])
        except SlurmllmError as error:
            name = self.run.name
            log.error("%s; `slurmllm cancel %s`, then `slurmllm resume %s`", error, name, name)

    def _script(self, stage: Stage) -> str:
        return script_of(self.run, stage, self.config.cluster.trusted_group)

    def return_to_queue(
        self, allocation: SlurmAllocation, closed: AttemptRecord, lost: Sequence[str] = ()
    ) -> AttemptRecord:
        """Requeue the job, or leave the run to its successor; returns the record.

        `lost` are the attempt's nodes that cannot be used. If that is refused, the action changes:
        from requeue to chain (slurm.restart: auto), from chain to stop.
        """
        client = allocation.client
        slurm = self.config.recipe.slurm
        try:
            # A second requeue would end the incarnation that runs now.
            if was_restarted(allocation):
                log_attempt(closed, "Slurm has started the job again: not requeued")
                return closed
            before = excluded_names(client, self.run, self.config)
            if len(closed.blamed_nodes) == 1 and not gained(closed):
                before += closed.blamed_nodes  # no evidence, but another node may be better
            # Slurm may not have noticed the loss yet and would start the job on the same nodes.
            job = allocation.job_id
            avoid = nodes_to_avoid(
                client,
                self._script(self.stage) if lost or before else "",
                lost,
                before,
                self._excluded,
                job,
            )
            if closed.action == "chain":
                return self._chain(allocation, closed, self._with_recipes(avoid))
            may_leave = slurm.restart == "auto" and self.stage == "train"
            if may_leave and {*lost} & {*avoid} and self._leave_nodes(allocation, closed, avoid):
                return self._changed(closed, action="chain")
            if self.stage == "precompile" and avoid:
                # The train job depends on this one; it may not start on the same nodes either.
                last = JobsRecord.last_of(self.run)
                train_avoid = to_avoid(client, self.run, self._script("train"), self.config)
                if last.train_job is not None and train_avoid:
                    client.exclude(last.train_job, self._with_recipes(train_avoid))
            listed = retry_unreachable(lambda: client.batch_job(job)).excluded != ""
            try:
                requeue(client, job, avoid, slurm.exclude, listed, closed.backoff_s)
            except SlurmError as error:
                # Not after scancel: the job no longer runs then.
                if slurm.restart != "auto" or client.batch_job(job).state != "RUNNING":
                    raise
                log.warning("%s: another job continues the run", error)
                closed = self._changed(closed, action="chain")
                return self._chain(allocation, closed, self._with_recipes(avoid))
        except SlurmllmError as error:
            # The record has the action, but the job may end here.
            log.error("%s; if the job ends here, `slurmllm resume %s`", error, self.run.name)
        return closed

    def _leave_nodes(
        self, allocation: SlurmAllocation, closed: AttemptRecord, avoid: Sequence[str]
    ) -> bool:
        """Submit another job, which continues the run at once; returns whether that succeeded.

        A requeued job would wait until Slurm has noticed the loss of a node (SlurmdTimeout), and
        then until its credential has expired (cred_expire).
        """
        client = allocation.client
        this_job = allocation.job_id
        recorded = False
        try:
            with locked(self.run, "supervise", LOCK_S):
                last = JobsRecord.last_of(self.run)
                if last.train_job != this_job or last.cancelled_at is not None or last.lane:
                    return False
                exclude = ",".join(self._with_recipes(avoid))
                job = client.submit(self._script("train"), exclude=exclude)
                JobsRecord.change_last(
                    self.run, train_job=job, earlier_jobs=(*last.earlier_jobs, this_job)
                )
                recorded = True
            log.info("job %s continues the run at once, without %s", job, " ".join(avoid))
            if closed.backoff_s:
                client.delay(job, closed.backoff_s)
        except SlurmllmError as error:
            log.warning("%s", error)
        return recorded

    def _chain(
        self, allocation: SlurmAllocation, closed: AttemptRecord, exclude: Sequence[str]
    ) -> AttemptRecord:
        """Leave the run to the successor of this job, which waits since the attempt's start."""
        client = allocation.client
        if self.stage == "precompile":
            self.replace(exclude, lost=False)
            return closed
        try:
            job = self._successor(allocation, exclude)
        except SlurmllmError as error:
            reason = f"no successor job: {error}; `slurmllm resume {self.run.name}` continues"
            log_attempt(closed, reason)
            return self._changed(closed, action="stop", evidence=(*closed.evidence, reason))
        try:
            if job is not None and exclude:
                retry_unreachable(lambda: client.exclude(job, exclude))
                log.info("job %s excludes %s", job, " ".join(exclude))
            if job is not None and closed.backoff_s:
                retry_unreachable(lambda: client.delay(job, closed.backoff_s))
        except SlurmError as error:
            log.warning("job %s starts without excluded nodes or a wait: %s", job, error)
        return closed

    def _successor(self, allocation: SlurmAllocation, exclude: Sequence[str]) -> str | None:
        """Make sure of the successor, against refusals for PATIENCE_S."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return ensure_successor(self.run, allocation, self._script("train"), exclude)
            except SlurmError as error:
                if time.monotonic() > deadline:
                    raise
                log.warning("no successor job yet, tried again in %.0f s: %s", AHEAD_S, error)
                time.sleep(AHEAD_S)

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
        unrecorded = UnrecordedEnding(
            stage=record.stage,
            attempt=record.attempt,
            ended_at=time.time(),
            ending=ending.ending,
            evidence=tuple(line[:300] for line in ending.evidence[:2]),
            blamed_nodes=ending.blamed_nodes[:8],
        )
        _set_comment(allocation, unrecorded)
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
    slurm = isinstance(allocation, SlurmAllocation)
    if not is_transient([str(error)]) or (slurm and allocation.state() == "CANCELLED"):
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
    if isinstance(allocation, SlurmAllocation) and allocation.requeues:
        restart_mode = restart_of(run, allocation) if wait_writable(run, WRITABLE_S) else "requeue"
        if restart_mode == "none":
            raise error
        if restart_mode == "chain" and stage == "train":
            ensure_successor(run, allocation, script_of(run, stage), [])
        elif not was_restarted(allocation):
            requeue(allocation.client, allocation.job_id, [], limits.exclude, backoff_s=wait_s)
    else:
        time.sleep(wait_s)
    return EXIT_REQUEUE
