"""The batch script's own process: the attempts of one stage in one job, from nodes to actions.

    close orphaned attempts → open one → check the nodes, broadcast graphs and environment →
      ↑                       launchers → wait (signals, deadlines) → classify → record →
      └───────────── restart in the allocation ───────────── or requeue, chain, stop, finish

It runs on the first node of the job. If that node dies, the next attempt closes this one's record
by Slurm's accounting.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from slurmllm.backends.environment import (
    BROADCAST,
    broadcast_path,
    make_cache_folder,
    node_local_cache,
)
from slurmllm.config.load import load
from slurmllm.config.operation import SlurmConfig
from slurmllm.config.resolve import RunConfig
from slurmllm.errors import (
    EXIT_NEGATIVE,
    EXIT_OK,
    EXIT_REQUEUE,
    SlurmError,
    SlurmllmError,
    StorageError,
)
from slurmllm.graphs import reuse
from slurmllm.graphs.archive import IncompleteGraphsError, load_manifest, require_complete
from slurmllm.graphs.merge import merge_new_graphs
from slurmllm.plan.mesh import make_mesh, save_mesh
from slurmllm.records import Action, AttemptRecord, JobsRecord
from slurmllm.rundir import STAGES, RunDir, Stage, SweepDir
from slurmllm.safe_files import open_trusted, reason
from slurmllm.slurm.client import AccountingRow, retry_unreachable, to_unix
from slurmllm.staging.broadcast import broadcast_environment
from slurmllm.supervise import attempts
from slurmllm.supervise.allocation import (
    Allocation,
    SlurmAllocation,
    current_allocation,
    lost_start,
    started_again,
    unrecorded,
)
from slurmllm.supervise.attempt_monitor import AttemptMonitor, Observations, StopSignals
from slurmllm.supervise.attempts import (
    ending_of_orphaned,
    incarnation,
    other_supervisor,
    still_runs,
)
from slurmllm.supervise.classify import Ending, classify
from slurmllm.supervise.evidence import gather_evidence
from slurmllm.supervise.exclusion import (
    drain,
    exclude_failed,
    excluded,
    failing,
    nodes_to_avoid,
    requeue,
    to_avoid,
)
from slurmllm.supervise.notify import Notifier
from slurmllm.supervise.policy import backoff_s, is_transient
from slurmllm.supervise.preflight import preflight
from slurmllm.supervise.run_lock import locked
from slurmllm.supervise.successor import (
    cancel_successor,
    ensure_successor,
    restart_of,
    take_over,
)
from slurmllm.supervise.tracking import Tracking

RETURNS = ("requeue", "chain")  # actions that return a run to the queue
# For what is left of an attempt's processes to end before a restart in the allocation; a step that
# holds a lost node does not end before Slurm notices the loss.
STEPS_END_S, LOST_STEPS_END_S = 15.0, 2.0
WRITABLE_S = 600.0  # for a run directory to be writable again, before a requeue
EXIT_FAILED = {  # by class of ending; 70 for the others
    "bad_configuration": 2, "storage_failure": 4, "divergence": 71, "cancelled": EXIT_NEGATIVE,
    "superseded": EXIT_NEGATIVE,
}  # fmt: skip

log = logging.getLogger(__name__)


class Supervisor:
    """The attempts of one stage in one job."""

    def __init__(self, run: RunDir, stage: Stage, allocation: Allocation) -> None:
        self.run, self.stage, self.allocation = run, stage, allocation
        self.config: RunConfig = load(run.config, trusted=True)
        self.stop = StopSignals()
        self.notifier = Notifier(run, self.config)
        self.tracking = Tracking(run, self.config)
        self._failed_nodes: set[str] = set()  # of this job
        self._next_nodes: tuple[str, ...] = ()
        # Archive of graphs that all nodes of the job have got, and whether the environment.
        self._sent_graphs, self._sent_environment = "", False

    def main(self) -> int:
        """Run the attempts; returns 0 finished, 75 to be started again, or a code of errors.py.

        Raises:
            StorageError: The run directory is no longer writable; the attempt's record is open.
        """
        self.stop.install()
        if reason := take_over(self.run, self.allocation):
            log.error("%s; this job, which would have continued it, leaves", reason)
            return EXIT_NEGATIVE
        if reason := lost_start(self.allocation):
            log.warning("%s", reason)
            self._replace_jobs()
            return EXIT_REQUEUE  # Slurm ignores the end of a script that it does not know of
        if reason := unrecorded(self.run, self.allocation):
            log.error("%s", reason)
            return EXIT_NEGATIVE
        if reason := other_supervisor(self.run, self.stage, self.allocation):
            log.error("%s; this supervisor leaves", reason)
            return EXIT_NEGATIVE
        stopped = self._close_orphaned()
        if stopped is not None:
            return self._act(stopped)
        while True:
            closed, error = self._attempt()
            if closed.action == "restart":
                self._restart(closed)
            elif error is not None and closed.action not in RETURNS:
                log.error("%s", error)
                self._act(closed)
                return error.exit_code
            else:
                return self._act(closed)

    def _attempt(self) -> tuple[AttemptRecord, SlurmllmError | None]:
        """Run one attempt; returns its closed record, and the error that ended it, if any."""
        record = attempts.open_attempt(self.run, self.stage, self.config, self.allocation)
        self._log(record, f"{len(record.nodes)} node(s): {' '.join(record.nodes)}")
        self.notifier.started(record)
        self._submit_ahead()
        phases: dict[str, float] = {}
        observed = Observations()
        try:
            self._take_graphs()
            self._merge_new_graphs()
            ending = self._prepare_nodes(record, phases)
            if ending is None:
                record = record.model_copy(update={"phases_s": dict(phases)})
                record.save(self.run.attempt(self.stage, record.attempt).record)
                launchers = self.allocation.launch(self.run.path, self.stage, record.attempt)
                self.tracking.start(self.stage)
        except SlurmllmError as error:
            ending = ending_of_error(error, record.nodes[0])
            return self._close(record, ending, phases, observed), error
        if ending is None:
            started = time.monotonic()
            observed = AttemptMonitor(
                self.run, record, self.config, launchers, self.stop,
                job_limited=self.allocation.job_id is not None,
            ).wait()  # fmt: skip
            phases["workers"] = time.monotonic() - started
            stop_signal = None if observed.failed_first else self.stop.name
            ending = classify(
                gather_evidence(self.run, record, self.allocation, observed, stop_signal)
            )
        return self._close(record, ending, phases, observed), None

    def _restart(self, closed: AttemptRecord) -> None:
        """Make the allocation ready for new workers."""
        assert isinstance(self.allocation, SlurmAllocation)
        left_out = [name for name in closed.nodes if name not in self._next_nodes]
        self.allocation.restart(self._next_nodes, STEPS_END_S if not left_out else LOST_STEPS_END_S)
        if left_out:
            spares = [name for name in self._next_nodes if name not in closed.nodes]
            self._log(closed, f"{' '.join(spares)} in place of {' '.join(left_out)}")

    def _nodes_for_restart(self, record: AttemptRecord, ending: Ending) -> tuple[str, ...]:
        """The nodes for new workers in this job; empty if too few are healthy, or time is over."""
        if not isinstance(self.allocation, SlurmAllocation) or self.stage != "train":
            return ()
        if self.stop.name is not None or not self.config.recipe.slurm.restart_in_job:
            return ()
        update = {"ending": ending.ending, "blamed_nodes": ending.blamed_nodes}
        blamed = record.model_copy(update={**update, "evidence": ending.evidence})
        self._failed_nodes |= failing(self.run, blamed, self.config).keys()
        chosen = self.allocation.choose(self._failed_nodes, len(record.nodes))
        try:
            if chosen:
                self.allocation.give_up(self._failed_nodes)
        except SlurmError as error:
            log.warning("no restart in the allocation: %s", error)
            return ()
        return chosen

    def _submit_ahead(self) -> None:
        """Submit the successor of this job if the site refuses requeues."""
        if not isinstance(self.allocation, SlurmAllocation) or not self._chained():
            return
        try:
            ensure_successor(self.run, self.allocation, self._script("train"), self._to_exclude())
        except SlurmllmError as error:
            log.warning("no successor job yet, tried again at the end: %s", error)

    def _chained(self) -> bool:
        return self.stage == "train" and restart_of(self.run, self.allocation) == "chain"

    def _to_exclude(self) -> list[str]:
        """The nodes that a new job of the run excludes; empty: those of its script."""
        assert isinstance(self.allocation, SlurmAllocation)
        client, given = self.allocation.client, self.config.recipe.slurm.exclude
        avoid = to_avoid(client, self.run, self.config, self.allocation.size)
        return [*([given] if given else []), *avoid] if avoid else []

    def _close(
        self, record: AttemptRecord, ending: Ending, phases: dict[str, float], seen: Observations
    ) -> AttemptRecord:
        """Record the ending and the action, unless another supervisor has done so."""
        if ending.ending == "node_failure" and (reason := lost_start(self.allocation)):
            ending = Ending("superseded", (reason,))  # srun was refused: no node has failed
            self._replace_jobs()
        # Read again: after a network partition another supervisor may have closed it.
        on_disk = AttemptRecord.load(self.run.attempt(self.stage, record.attempt).record)
        if on_disk.ended_at is not None:
            self._log(on_disk, "another supervisor has closed this attempt and continues the run")
            return on_disk.model_copy(update={"ending": "superseded", "action": "stop"})
        # The queue time of a requeued attempt follows from the records.
        first = record.restart_count == 0
        row = incarnation(record, self._accounting(record.job_id)) if first else None
        self._next_nodes = self._nodes_for_restart(record, ending)
        closed = attempts.close_attempt(
            self.run, record, ending, phases, sign_at=seen.sign_at, row=row,
            again=restart_of(self.run, self.allocation), in_allocation=bool(self._next_nodes),
        )  # fmt: skip
        self._exclude_failed(closed)
        self._log(closed, f"{closed.ending} → {closed.action}: {'; '.join(closed.evidence)}")
        self.notifier.closed(closed)
        nodes = attempts.node_records(self.run, record)
        if line := attempts.unequal_versions({name: n.versions for name, n in nodes.items()}):
            self._log(closed, f"warning: {line}")
        # A requeue must not wait for the merge: the next attempt begins with it.
        if closed.action in ("finish", "stop") and closed.ending != "superseded":
            self._merge_new_graphs()
        return closed

    def _replace_jobs(self, avoid: Sequence[str] = (), lost: bool = True) -> None:
        """Submit this job once more, as another job, and with it what depends on it.

        Slurmd remembers the job of a `lost` start as running: it refuses its next start, for which
        Slurm drains the node and holds the job. `avoid`: nodes to exclude.
        """
        assert isinstance(self.allocation, SlurmAllocation)
        client, own = self.allocation.client, self.allocation.job_id
        stages = STAGES[STAGES.index(self.stage) :]
        try:
            with locked(self.run, "supervise"):
                *before, last = JobsRecord.load(self.run.jobs).submissions
                old = {
                    stage: last.train_job if stage == "train" else last.precompile_job
                    for stage in stages
                }
                if old[self.stage] != own:
                    return  # resumed since
                if lost and client.batch_job(own).state != "PENDING":
                    return  # cancelled since, or Slurm has started it elsewhere
                requeue = last.restart == "requeue"
                job: str | None = None
                for stage in stages:
                    replaced = old[stage]
                    if replaced is None:  # a run that only compiles graphs for a sweep
                        continue
                    exclude = client.batch_job(replaced).excluded
                    script = self._script(stage)
                    job = client.submit(
                        script, after_ok=job, exclude=",".join(avoid) or exclude, requeue=requeue,
                        name=last.lane if stage == "train" else None,
                    )  # fmt: skip
                    last = last.model_copy(update={f"{stage}_job": job})
                    JobsRecord(submissions=(*before, last)).save(self.run.jobs)
                    log.warning("submitted job %s in place of job %s", job, replaced)
                jobs = (last.successor_job, *reversed(old.values()))
                last = last.model_copy(update={"successor_job": None})
                JobsRecord(submissions=(*before, last)).save(self.run.jobs)
                client.cancel([job for job in jobs if job is not None])
        except SlurmllmError as error:
            name = self.run.name
            log.error("%s; `slurmllm cancel %s`, then `slurmllm resume %s`", error, name, name)

    def _script(self, stage: Stage) -> str:
        return script_of(self.run, stage, self.config.cluster.trusted_group)

    def _prepare_nodes(self, record: AttemptRecord, phases: dict[str, float]) -> Ending | None:
        """Check the nodes and send graphs and environment to them, at the same time.

        Returns the ending if a node fails its checks, which also ends the copying. The phase
        `cache` is what the copying takes longer than the checks.
        """
        ended = threading.Event()

        def stop() -> bool:
            return ended.is_set() or self.stop.name is not None

        # What the all-reduce reaches must not depend on a broadcast.
        checks_first = self.config.cluster.health.bandwidth == "always"
        with ThreadPoolExecutor(2, thread_name_prefix="broadcast") as pool:
            ending = None
            try:
                if checks_first:
                    ending = self._preflight(record, phases)
                    if ending is not None:
                        return ending
                graphs = pool.submit(self._broadcast_graphs, stop)
                environment = pool.submit(self._broadcast_environment, stop)
                if not checks_first:
                    ending = self._preflight(record, phases)
                started = time.monotonic()
                if ending is None:
                    os.environ.update(graphs.result())
                    os.environ.update(environment.result())
                    phases["cache"] = time.monotonic() - started
            finally:
                ended.set()
        return ending

    def _preflight(self, record: AttemptRecord, phases: dict[str, float]) -> Ending | None:
        """Have every node check itself; returns the ending if a node fails."""
        if not self.config.cluster.health.enabled:
            return None
        started = time.monotonic()
        found = preflight(
            self.run, record, self.config, self.allocation, lambda: self.stop.name is not None
        )
        phases["preflight"] = time.monotonic() - started
        for line in found.warnings:
            log.warning("preflight: warning: %s", line)
        return found.ending

    def _broadcast_graphs(self, stop: Callable[[], bool]) -> dict[str, str]:
        """Copy the archive to every node's own disk; returns the launchers' variables."""
        # The launchers of --local share the folder, and start at once.
        make_cache_folder(self.config, self.run)
        if self.stage == "precompile":
            return {}
        started = time.monotonic()
        if not self.run.graphs_manifest.is_file():
            raise StorageError(
                f"{self.run.graphs_manifest} is missing: the precompile stage did not finish; "
                f"see {self.run.stage_log('precompile')}, then `slurmllm resume {self.run.name}`"
            )
        manifest = load_manifest(self.run, self.config.cluster.trusted_group)
        require_complete(manifest, self.run, self.config.recipe.train.incomplete_graphs)
        if manifest.archive_sha256 == self._sent_graphs:
            return {}  # in this job, to the spare nodes too
        if self._failed_nodes:
            return {BROADCAST: ""}  # sbcast would wait for them; the nodes read the shared archive
        target = broadcast_path(Path(node_local_cache(self.config, self.run)))
        archive = self.run.graphs_archive(manifest.archive)
        fault = self.allocation.broadcast(archive, target, stop)
        seconds = time.monotonic() - started
        if fault is None:
            self._sent_graphs = manifest.archive_sha256
            log.info("graph cache: %d graphs to all nodes in %.1f s", manifest.graphs, seconds)
        elif not stop():
            log.warning("sbcast: %s; the nodes read %s", fault, archive)
        return {BROADCAST: str(target)}

    def _take_graphs(self) -> None:
        """Link a run of a sweep to the graphs that another one has compiled for it."""
        last = JobsRecord.of(self.run).last
        if last is None or last.graphs_of is None or self.run.graphs_manifest.is_file():
            return
        source = SweepDir(self.run.path.parent).graph_run(last.graphs_of)
        if reason := reuse.adopt(source, self.run, self.config.cluster.trusted_group):
            raise StorageError(
                f"cannot use the graphs of {source.path}: {reason}; `slurmllm resume "
                f"{self.run.name}` compiles them"
            )
        measured = reuse.measured_micro_batch(self.run)
        save_mesh(make_mesh(self.config, last.nodes, measured), self.run.plan)

    def _broadcast_environment(self, stop: Callable[[], bool]) -> dict[str, str]:
        if self._sent_environment or self._failed_nodes:
            return {}
        found = broadcast_environment(self.run, self.config, self.allocation, stop)
        self._sent_environment = not stop()
        return found

    def _merge_new_graphs(self) -> None:
        if self.stage == "precompile":
            return
        try:
            names = merge_new_graphs(self.run, self.config.cluster.trusted_group)
        except StorageError as error:
            log.warning("%s", error)  # the graphs can be compiled again
            return
        if names:
            shown = ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
            log.info("graph cache: %d new graphs in the archive: %s", len(names), shown)

    def _accounting(self, job_id: str | None) -> list[AccountingRow]:
        if job_id is None or not isinstance(self.allocation, SlurmAllocation):
            return []
        return self.allocation.client.accounting(job_id)

    def _act(self, closed: AttemptRecord) -> int:
        """Carry out the action of a closed attempt; returns the exit code."""
        if closed.action not in RETURNS:
            if closed.ending != "superseded" and self._chained():
                cancel_successor(self.run, self.allocation)
            return self._exit_code(closed)
        newer = attempts.newer_attempt(self.run, self.stage, closed.attempt)
        if newer is not None:
            self._log(closed, f"superseded by attempt {newer}: not requeued")
            return EXIT_NEGATIVE
        if isinstance(self.allocation, SlurmAllocation) and self.allocation.requeues:
            closed = self._return_to_queue(self.allocation, closed)
            return EXIT_REQUEUE if closed.action in RETURNS else self._exit_code(closed)
        # A requeued job waits in Slurm's queue, a local run here.
        if closed.backoff_s:
            log.info("waiting %.0f s before the next attempt", closed.backoff_s)
        deadline = time.monotonic() + closed.backoff_s
        while self.stop.name is None and time.monotonic() < deadline:
            time.sleep(0.2)
        return EXIT_REQUEUE

    def _exit_code(self, closed: AttemptRecord) -> int:
        if closed.action == "finish":
            return EXIT_OK
        return EXIT_FAILED.get(str(closed.ending), 70)

    def _return_to_queue(self, allocation: SlurmAllocation, closed: AttemptRecord) -> AttemptRecord:
        """Requeue the job, or leave the run to its successor; returns the record.

        If that is refused, the action changes: from requeue to chain (slurm.restart: auto), from
        chain to stop.
        """
        client, slurm = allocation.client, self.config.recipe.slurm
        partition = os.environ.get("SLURM_JOB_PARTITION")
        try:
            # A second requeue would end the incarnation that runs now.
            if started_again(allocation):
                self._log(closed, "Slurm has started the job again: not requeued")
                return closed
            lost = attempts.lost_nodes(self.run, closed)
            before = [node.node for node in excluded(self.run)]
            # Slurm may not have noticed the loss yet and would start the job on the same nodes.
            own_job = allocation.job_id
            avoid = nodes_to_avoid(client, allocation.size, lost, before, partition, own_job)
            given = [slurm.exclude] if slurm.exclude else []
            if closed.action == "chain":
                return self._chain(allocation, closed, [*given, *avoid] if avoid else [])
            if self.stage == "precompile" and avoid:
                # The train job depends on this one; it may not start on the same nodes either.
                last = JobsRecord.load(self.run.jobs).submissions[-1]
                before = [node.node for node in excluded(self.run)]
                kept_out = nodes_to_avoid(client, last.nodes, [], before, partition)
                if last.train_job is not None and kept_out:
                    client.exclude(last.train_job, [*given, *kept_out])
            listed = self.run.excluded.is_file()
            try:
                requeue(client, own_job, avoid, slurm.exclude, listed, closed.backoff_s)
            except SlurmError as error:
                # Not after scancel: the job no longer runs then.
                if slurm.restart != "auto" or client.batch_job(own_job).state != "RUNNING":
                    raise
                log.warning("%s: another job continues the run", error)
                closed = self._changed(closed, "chain")
                return self._chain(allocation, closed, [*given, *avoid] if avoid else [])
        except SlurmllmError as error:
            # The record has the action, but the job may end here.
            log.error("%s; if the job ends here, `slurmllm resume %s`", error, self.run.name)
        return closed

    def _chain(
        self, allocation: SlurmAllocation, closed: AttemptRecord, exclude: Sequence[str]
    ) -> AttemptRecord:
        """Leave the run to the successor of this job, which waits since the attempt's start."""
        client = allocation.client
        if self.stage == "precompile":
            self._replace_jobs(exclude, lost=False)
            return closed
        try:
            job = ensure_successor(self.run, allocation, self._script("train"), exclude)
        except SlurmllmError as error:
            text = f"no successor job: {error}; `slurmllm resume {self.run.name}` continues"
            self._log(closed, text)
            return self._changed(closed, "stop", (*closed.evidence, text))
        try:
            if job is not None and exclude:
                retry_unreachable(lambda: client.exclude(job, exclude))
                log.info("job %s excludes %s", job, " ".join(exclude))
            if job is not None and closed.backoff_s:
                retry_unreachable(lambda: client.delay(job, closed.backoff_s))
        except SlurmError as error:
            log.warning("job %s starts without excluded nodes or a wait: %s", job, error)
        return closed

    def _changed(
        self, closed: AttemptRecord, action: Action, evidence: tuple[str, ...] | None = None
    ) -> AttemptRecord:
        evidence = closed.evidence if evidence is None else evidence
        closed = closed.model_copy(update={"action": action, "evidence": evidence})
        closed.save(self.run.attempt(self.stage, closed.attempt).record)
        return closed

    def _exclude_failed(self, closed: AttemptRecord) -> None:
        """Record the nodes that the attempt lost, and drain them if the recipe has slurm.drain."""
        try:
            new = exclude_failed(self.run, closed, self.config)
        except StorageError as error:
            log.warning("%s", error)  # the requeued job's own list still excludes them
            return
        if self.config.recipe.slurm.drain and isinstance(self.allocation, SlurmAllocation):
            drain(self.allocation.client, new)

    def _close_orphaned(self) -> AttemptRecord | None:
        """Close earlier attempts whose supervisors died; returns the last if it ended the run."""
        closed: AttemptRecord | None = None
        for record in attempts.load_attempts(self.run, self.stage):
            if record.ended_at is not None:
                continue
            if reason := still_runs(self.run, record, self.allocation):
                self._log(record, f"is still open and is superseded by this attempt: {reason}")
                continue
            row = incarnation(record, self._accounting(record.job_id))
            ending = ending_of_orphaned(record, attempts.node_records(self.run, record), row)
            own = record.job_id is not None and record.job_id == self.allocation.job_id
            if own and record.restart_count == self.allocation.restart_count:
                text = f"slurmctld lost this start of job {record.job_id}, and started it again"
                ending, row = Ending("node_failure", (text,)), None  # and no node is to blame
            ended_at = None if row is None else to_unix(row.end)
            closed = attempts.close_attempt(
                self.run, record, ending, ended_at=ended_at, row=row,
                again=restart_of(self.run, self.allocation),
            )  # fmt: skip
            self._log(closed, f"{closed.ending}: {'; '.join(closed.evidence)}")
            self.notifier.closed(closed)
            self._exclude_failed(closed)
        if closed is None or self.stage == "precompile" or closed.action != "stop":
            return None
        return closed if closed.attempt >= attempts.first_attempt(self.run) else None

    def _log(self, record: AttemptRecord, message: str) -> None:
        # `logs` finds the attempts of a stage's log by this form of line.
        job = f" of job {record.job_id}" if record.job_id else ""
        log.info("%s attempt %d%s: %s", self.stage, record.attempt, job, message)


def script_of(run: RunDir, stage: Stage, group: str | None = None) -> str:
    """The text of a stage's batch script; StorageError if others may have written it."""
    path = run.script(stage)
    try:
        with open_trusted(path, group) as stream:
            return stream.read().decode()
    except OSError as error:
        raise StorageError(f"cannot read {path}: {reason(error)}") from error


def ending_of_error(error: SlurmllmError, node: str) -> Ending:
    if isinstance(error, IncompleteGraphsError):
        return Ending("compile_failure", tuple(line.strip() for line in str(error).splitlines()))
    if error.blame == "user":
        return Ending("bad_configuration", (str(error),))
    if isinstance(error, StorageError):
        return Ending("storage_failure", (str(error),))
    if error.blame == "infrastructure":
        return Ending("node_failure", (str(error),), (node,))
    return Ending("code_error", (str(error),))


def wait_writable(run: RunDir, patience_s: float) -> bool:
    """Wait, at most `patience_s`, until the job's log is writable: else Slurm fails the job."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        with suppress(OSError), tempfile.TemporaryFile(dir=run.logs) as probe:
            probe.write(bytes(4096))
            probe.flush()
            return True
        time.sleep(1.0)
    return False


def requeue_unrecorded(
    run: RunDir, stage: Stage, allocation: Allocation, error: StorageError
) -> int:
    """Requeue a run whose directory is not writable; the next attempt closes the open record.

    Raises:
        StorageError: The fault is not transient, or as many starts in a row failed with it as
            slurm.storage_budget allows.
    """
    if not is_transient([str(error)]):
        raise error
    limits, recorded = SlurmConfig(), -1
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
        writable = wait_writable(run, WRITABLE_S)
        again = restart_of(run, allocation) if writable else "requeue"
        if again == "none":
            raise error
        if again == "chain" and stage == "train":
            ensure_successor(run, allocation, script_of(run, stage), [])
        elif not started_again(allocation):
            requeue(allocation.client, allocation.job_id, [], limits.exclude, backoff_s=wait_s)
    else:
        time.sleep(wait_s)
    return EXIT_REQUEUE


def supervise(run: RunDir, stage: Stage) -> int:
    """Entry of the hidden verb `supervise`."""
    allocation = current_allocation(run)
    try:
        supervisor = Supervisor(run, stage, allocation)
        code = EXIT_REQUEUE
        try:
            code = supervisor.main()
        finally:
            supervisor.tracking.stop(requeued=code == EXIT_REQUEUE)
            supervisor.notifier.wait()
        return code
    except StorageError as error:
        return requeue_unrecorded(run, stage, allocation, error)
