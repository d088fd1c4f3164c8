"""The batch script's own process: one attempt of one stage, from the nodes to the verdict.

    close what the last attempt left open → open this one → check the nodes → graphs onto them →
    launchers → wait (signals, deadlines) → classify → record → requeue, stop or finish

It lives on the first node of the attempt. When that node dies it writes nothing, so the next
attempt closes this one's record from Slurm's accounting.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from slurmllm.backends.environment import node_local_cache
from slurmllm.config.load import load
from slurmllm.config.recipe import SlurmConfig
from slurmllm.config.resolve import RunConfig
from slurmllm.errors import (
    EXIT_NEGATIVE,
    EXIT_OK,
    EXIT_REQUEUE,
    SlurmError,
    SlurmllmError,
    StorageError,
)
from slurmllm.graphs.archive import broadcast_path
from slurmllm.graphs.completeness import IncompleteGraphsError, faults, require_complete
from slurmllm.graphs.merge import merge_new_graphs
from slurmllm.records import AttemptRecord, GraphManifest, JobsRecord
from slurmllm.rundir import RunDir, Stage
from slurmllm.slurm.client import AccountingRow, SlurmClient, patiently
from slurmllm.supervise import attempts
from slurmllm.supervise.allocation import Allocation, SlurmAllocation, current_allocation
from slurmllm.supervise.attempt_monitor import (
    AttemptMonitor,
    Outcome,
    StopSignals,
    newer_attempt,
    say,
)
from slurmllm.supervise.attempts import ended_at, ending_of_orphaned, incarnation, still_runs
from slurmllm.supervise.classify import Ending, Evidence, classify
from slurmllm.supervise.evidence import gather_evidence
from slurmllm.supervise.exclusion import drain, exclude_failed, excluded, nodes_to_avoid, requeue
from slurmllm.supervise.policy import MAX_BACKOFF_S, may_pass
from slurmllm.supervise.preflight import preflight

WRITABLE_S = 600.0  # for a run directory to be writable again, before a requeue
EXIT_FAILED = {
    "bad_configuration": 2, "storage_failure": 4, "divergence": 71, "cancelled": EXIT_NEGATIVE,
    "superseded": EXIT_NEGATIVE,
}  # fmt: skip


class Supervisor:
    """One attempt of one stage."""

    def __init__(self, run: RunDir, stage: Stage, allocation: Allocation) -> None:
        self.run, self.stage, self.allocation = run, stage, allocation
        self.config: RunConfig = load(run.config)
        self.stop = StopSignals()

    def main(self) -> int:
        """Run the attempt.

        Returns:
            0 finished, 75 to be started again, another code of errors.py where it stopped.

        Raises:
            StorageError: the run directory can no longer be written; the attempt's record is
                open.
        """
        self.stop.install()
        stopped = self._close_unfinished()
        if stopped is not None:
            return self._exit_code(stopped)
        record = attempts.open_attempt(self.run, self.stage, self.config, self.allocation)
        self._say(record, f"{len(record.nodes)} node(s): {' '.join(record.nodes)}")
        phases: dict[str, float] = {}
        outcome = Outcome()
        try:
            self._merge_new_graphs()
            ending = self._preflight(record, phases)
            if ending is None:
                phases["cache"] = self._broadcast_graphs()
                record = record.model_copy(update={"phases_s": dict(phases)})
                record.save(self.run.attempt(self.stage, record.attempt).record)
                launchers = self.allocation.launch(self.run.path, self.stage, record.attempt)
        except SlurmllmError as error:
            closed = self._close(record, ending_of_error(error, record.nodes[0]), phases, outcome)
            if closed.action == "requeue":
                return self._act(closed)
            print(f"error: {error}", file=sys.stderr, flush=True)
            return error.exit_code
        if ending is None:
            started = time.monotonic()
            outcome = self._wait(launchers, record)
            phases["workers"] = time.monotonic() - started
            ending = classify(self._observe(record, outcome))
        return self._act(self._close(record, ending, phases, outcome))

    def _wait(self, launchers: list[subprocess.Popen[bytes]], record: AttemptRecord) -> Outcome:
        limited = self.allocation.job_id is not None
        return AttemptMonitor(
            self.run, record, self.config, launchers, self.stop, limited
        ).to_the_end()

    def _close(
        self, record: AttemptRecord, ending: Ending, phases: dict[str, float], outcome: Outcome
    ) -> AttemptRecord:
        """Write down the ending and what follows, unless another supervisor has done so."""
        on_disk = AttemptRecord.load(self.run.attempt(self.stage, record.attempt).record)
        if on_disk.ended_at is not None:
            self._say(on_disk, "another supervisor has closed this attempt and goes on")
            return on_disk.model_copy(update={"ending": "superseded", "action": "stop"})
        first = record.restart_count == 0  # what a requeued one waited, the records say
        row = incarnation(record, self._accounting(record.job_id)) if first else None
        closed = attempts.close_attempt(
            self.run, record, ending, phases, sign_at=outcome.sign_at, row=row
        )
        self._exclude_failed(closed)
        self._say(closed, f"{closed.ending} → {closed.action}: {'; '.join(closed.evidence)}")
        nodes = attempts.node_records(self.run, record)
        if line := attempts.unequal_versions({name: n.versions for name, n in nodes.items()}):
            self._say(closed, f"warning: {line}")
        # A requeue must not wait; the next attempt begins with it.
        if closed.action != "requeue" and closed.ending != "superseded":
            self._merge_new_graphs()
        return closed

    def _preflight(self, record: AttemptRecord, phases: dict[str, float]) -> Ending | None:
        """Have every node check itself; the ending where one fails."""
        if not self.config.cluster.health.enabled:
            return None
        started = time.monotonic()
        found = preflight(
            self.run, record, self.config, self.allocation, lambda: self.stop.name is not None
        )
        phases["preflight"] = time.monotonic() - started
        for line in found.warnings:
            say(f"preflight: warning: {line}")
        return found.ending

    def _broadcast_graphs(self) -> float:
        """Send the archive to every node's own disk; returns the seconds it took.

        Raises:
            StorageError: precompile left no manifest.
            IncompleteGraphsError: graphs are not compiled, and the recipe says to refuse.
        """
        if self.stage == "precompile":
            return 0.0
        started = time.monotonic()
        if not self.run.graphs_manifest.is_file():
            raise StorageError(
                f"{self.run.graphs_manifest} is missing: the precompile stage did not finish; "
                f"see {self.run.stage_log('precompile')}, then `slurmllm resume {self.run.name}`"
            )
        manifest = GraphManifest.load(self.run.graphs_manifest)
        require_complete(manifest, self.run, self.config.recipe.train.incomplete_graphs)
        target = broadcast_path(Path(node_local_cache(self.config, self.run)))
        archive = self.run.graphs_archive(manifest.archive)
        fault = self.allocation.broadcast(archive, target)
        if fault is not None:
            say(f"sbcast: {fault}; the nodes read {archive}")
        seconds = time.monotonic() - started
        say(f"graph cache: {manifest.graphs} graphs to all nodes in {seconds:.1f} s")
        return seconds

    def _merge_new_graphs(self) -> None:
        """Put graphs that were compiled while training into the archive."""
        if self.stage == "precompile":
            return
        try:
            names = merge_new_graphs(self.run)
        except StorageError as error:
            say(f"warning: {error}")  # they can be compiled again
            return
        if names:
            shown = ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
            say(f"graph cache: {len(names)} new graphs in the archive: {shown}")

    def _uncompiled(self) -> tuple[str, ...]:
        """Why the archive that this precompile attempt left is not complete."""
        if self.stage == "train":
            return ()
        if not self.run.graphs_manifest.is_file():
            return ("no archive of compiled graphs was written",)
        return faults(GraphManifest.load(self.run.graphs_manifest), self.run)

    def _observe(self, record: AttemptRecord, outcome: Outcome) -> Evidence:
        stop_signal = None if outcome.failed_first else self.stop.name
        return gather_evidence(
            self.run, record, self.allocation, outcome, stop_signal, self._uncompiled()
        )

    def _accounting(self, job_id: str | None) -> list[AccountingRow]:
        if job_id is None or not isinstance(self.allocation, SlurmAllocation):
            return []
        return self.allocation.client.accounting(job_id)

    def _act(self, closed: AttemptRecord) -> int:
        newer = newer_attempt(self.run, self.stage, closed.attempt)
        if closed.action == "requeue" and newer is not None:
            self._say(closed, f"attempt {newer} has taken the run over: it is not requeued")
            return EXIT_NEGATIVE
        if closed.action == "requeue":
            if isinstance(self.allocation, SlurmAllocation):
                self._requeue(self.allocation, closed)
            else:
                wait_out(closed.backoff_s, self.stop)
            return EXIT_REQUEUE
        return self._exit_code(closed)

    def _exit_code(self, closed: AttemptRecord) -> int:
        if closed.action == "finish":
            return EXIT_OK
        return EXIT_FAILED.get(str(closed.ending), 70)

    def _requeue(self, allocation: SlurmAllocation, closed: AttemptRecord) -> None:
        client, slurm = allocation.client, self.config.recipe.slurm
        partition = os.environ.get("SLURM_JOB_PARTITION")
        try:
            if started_again(allocation):
                self._say(closed, "Slurm has started the job again: it is not requeued")
                return
            lost = attempts.lost_nodes(self.run, closed)
            before = [node.node for node in excluded(self.run)]
            avoid = nodes_to_avoid(
                client, len(closed.nodes), lost, before, partition, allocation.job_id
            )
            if self.stage == "precompile" and avoid:
                self._keep_train_off(client, partition)
            listed = self.run.excluded.is_file()
            requeue(client, allocation.job_id, avoid, slurm.exclude, listed, closed.backoff_s)
        except SlurmError as error:
            # The record says requeue and the job may be lost to it: say so where it is looked for.
            say(f"{error}; if the job ends here, `slurmllm resume {self.run.name}`")

    def _keep_train_off(self, client: SlurmClient, partition: str | None) -> None:
        """Have the train job, which waits for this one, keep off the same nodes."""
        sent = JobsRecord.load(self.run.jobs).submissions[-1]
        avoid = nodes_to_avoid(
            client, sent.nodes, [], [node.node for node in excluded(self.run)], partition
        )
        if sent.train_job is not None and avoid:
            given = self.config.recipe.slurm.exclude
            client.exclude(sent.train_job, [*([given] if given else []), *avoid])

    def _exclude_failed(self, closed: AttemptRecord) -> None:
        """Write down the nodes that the attempt lost, and drain them where that is wished."""
        try:
            new = exclude_failed(self.run, closed, self.config)
        except StorageError as error:
            say(f"warning: {error}")  # Slurm's own list still keeps off them
            return
        if self.config.recipe.slurm.drain and isinstance(self.allocation, SlurmAllocation):
            drain(self.allocation.client, new)

    def _close_unfinished(self) -> AttemptRecord | None:
        """Close attempts before this one where their supervisors could not.

        Returns:
            The last one where it ended the run: a limit of the recipe is reached.
        """
        closed: AttemptRecord | None = None
        for record in attempts.load_attempts(self.run, self.stage):
            if record.ended_at is not None:
                continue
            if words := still_runs(record, self.allocation):
                self._say(record, f"is still open, and this attempt takes over from it: {words}")
                continue
            reported = attempts.node_records(self.run, record)
            row = incarnation(record, self._accounting(record.job_id))
            ending = ending_of_orphaned(record, reported, row)
            closed = attempts.close_attempt(
                self.run, record, ending, ended_at=ended_at(row), row=row
            )
            self._say(closed, f"{closed.ending}: {'; '.join(closed.evidence)}")
            self._exclude_failed(closed)
        if closed is None or self.stage == "precompile" or closed.action != "stop":
            return None
        return closed if closed.attempt >= attempts.first_attempt(self.run) else None

    def _say(self, record: AttemptRecord, words: str) -> None:
        job = f" of job {record.job_id}" if record.job_id else ""
        say(f"{self.stage} attempt {record.attempt}{job}: {words}")


def ending_of_error(error: SlurmllmError, node: str) -> Ending:
    """How an attempt ended that the supervisor could not even start."""
    if isinstance(error, IncompleteGraphsError):
        return Ending("compile_failure", tuple(line.strip() for line in str(error).splitlines()))
    if error.blame == "user":
        return Ending("bad_configuration", (str(error),))
    if isinstance(error, StorageError):
        return Ending("storage_failure", (str(error),))
    if error.blame == "infrastructure":
        return Ending("node_failure", (str(error),), (node,))
    return Ending("code_error", (str(error),))


def started_again(allocation: SlurmAllocation) -> bool:
    """Whether the job runs as another incarnation than this one, which Slurm had lost."""
    client, job_id = allocation.client, allocation.job_id
    if patiently(lambda: client.restarts(job_id)) <= allocation.restart_count:
        return False
    job = patiently(lambda: client.queue([job_id])).get(job_id)
    return job is not None and job.state == "RUNNING"


def wait_out(seconds: float, stop: StopSignals) -> None:
    """What a requeued job waits in Slurm's queue, a local one waits here."""
    deadline = time.monotonic() + seconds
    if seconds:
        say(f"waiting {seconds:.0f} s before the next attempt")
    while stop.name is None and time.monotonic() < deadline:
        time.sleep(0.2)


def wait_writable(run: RunDir, patience_s: float) -> None:
    """Until a file can be written where the job's log lies, some minutes at most.

    Slurm fails a job for good whose log it cannot open.
    """
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        with suppress(OSError), tempfile.TemporaryFile(dir=run.logs) as probe:
            probe.write(bytes(4096))
            probe.flush()
            return
        time.sleep(1.0)


def requeue_blindly(run: RunDir, stage: Stage, allocation: Allocation, error: StorageError) -> int:
    """Go on with a run whose directory cannot be written just now; the next attempt closes the
    record that stays open.

    Returns:
        The exit code for another start.

    Raises:
        StorageError: the fault is not one that passes, or there were as many such starts in a row
            as slurm.storage_budget allows.
    """
    if not may_pass([str(error)]):
        raise error
    limits, recorded = SlurmConfig(), -1
    with suppress(SlurmllmError):
        limits = load(run.config).recipe.slurm
        of_job = [a for a in attempts.load_attempts(run, stage) if a.job_id == allocation.job_id]
        recorded = max((a.restart_count for a in of_job), default=-1)
    starts = max(allocation.restart_count - recorded, 1)  # those that left no record, or this one
    if starts > limits.storage_budget:
        raise StorageError(
            f"{error}; {starts} starts in a row found it so (slurm.storage_budget "
            f"{limits.storage_budget}): mend the file system, then `slurmllm resume {run.name}`"
        ) from error
    backoff_s = min(limits.backoff_s * 2.0 ** min(starts - 1, 20), MAX_BACKOFF_S)
    say(f"{error}; trying again in {backoff_s:.0f} s")
    if isinstance(allocation, SlurmAllocation):
        wait_writable(run, WRITABLE_S)
        if not started_again(allocation):
            requeue(allocation.client, allocation.job_id, [], limits.exclude, backoff_s=backoff_s)
    else:
        time.sleep(backoff_s)
    return EXIT_REQUEUE


def supervise(run: RunDir, stage: Stage) -> int:
    """Entry of the hidden verb `supervise`."""
    allocation = current_allocation(run)
    try:
        return Supervisor(run, stage, allocation).main()
    except StorageError as error:
        return requeue_blindly(run, stage, allocation, error)
