"""The batch script's own process: one attempt of one stage, from the nodes to the verdict.

    close what the last attempt left open → open this one → check the nodes → graphs onto them →
    launchers → wait (signals, deadlines) → classify → record → requeue, stop or finish

It lives on the first node of the attempt. When that node dies it writes nothing, so the next
attempt closes this one's record from Slurm's accounting.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType

from slurmllm.config.resolve import RunConfig, load
from slurmllm.errors import EXIT_OK, EXIT_REQUEUE, SlurmError, SlurmllmError, StorageError
from slurmllm.records import AttemptRecord, GraphManifest, JobsRecord, NodeRecord
from slurmllm.rundir import RunDir, Stage
from slurmllm.slurm.client import AccountingRow, SlurmClient
from slurmllm.slurm.render import node_local_cache
from slurmllm.supervise import attempts
from slurmllm.supervise.allocation import Allocation, SlurmAllocation, current_allocation
from slurmllm.supervise.cache import broadcast_path
from slurmllm.supervise.classify import Ending, Observed, classify, reported_all
from slurmllm.supervise.exclusion import drain, exclude_failed, excluded
from slurmllm.supervise.gate import IncompleteGraphsError, faults, require_complete
from slurmllm.supervise.preflight import preflight
from slurmllm.supervise.refill import merge_added
from slurmllm.supervise.requeue import nodes_to_avoid, requeue, usable

POLL_S = 0.5
REPEAT_SIGNAL_S = 5.0
LAUNCHER_GRACE_S = 20.0  # from the first launcher's failure to the end of the others
ACCOUNTING_LAG_S = 3.0
KILL_MARGIN_S = 30.0  # before the time limit: Slurm does not requeue a job that it timed out
EXIT_FAILED = {"bad_configuration": 2, "storage_failure": 4, "divergence": 71}


class Supervisor:
    """One attempt of one stage."""

    def __init__(self, run: RunDir, stage: Stage, allocation: Allocation) -> None:
        self.run, self.stage, self.allocation = run, stage, allocation
        self.config: RunConfig = load(run.config)
        self.stop_signal: str | None = None
        self.stop_at = 0.0
        self.overran_s: float | None = None
        self.failed_first = False

    def main(self) -> int:
        """Run the attempt.

        Returns:
            0 finished, 75 to be started again, another code of errors.py where it stopped.
        """
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        self._close_unfinished()
        record = attempts.open_attempt(self.run, self.stage, self.config, self.allocation)
        self._say(record, f"{len(record.nodes)} node(s): {' '.join(record.nodes)}")
        phases: dict[str, float] = {}
        launchers: list[subprocess.Popen[bytes]] = []
        try:
            self._merge_added()
            ending = self._preflight(record, phases)
            if ending is None:
                phases["cache"] = self._broadcast_graphs()
                launchers = self.allocation.launch(self.run.path, self.stage, record.attempt)
        except SlurmllmError as error:
            attempts.close_attempt(self.run, record, ending_of_error(error, record.nodes[0]))
            raise
        if ending is None:
            started = time.monotonic()
            self._wait(launchers, record)
            phases["workers"] = time.monotonic() - started
            ending = classify(self._observe(record))
        closed = attempts.close_attempt(self.run, record, ending, phases)
        self._exclude_failed(closed)
        self._say(closed, f"{closed.ending} → {closed.action}: {'; '.join(closed.evidence)}")
        nodes = attempts.node_records(self.run, record)
        if line := attempts.unequal_versions({name: n.versions for name, n in nodes.items()}):
            self._say(closed, f"warning: {line}")
        if closed.action != "requeue":  # a requeue must not wait; the next attempt begins with it
            self._merge_added()
        return self._act(closed)

    def _preflight(self, record: AttemptRecord, phases: dict[str, float]) -> Ending | None:
        """Have every node check itself; the ending where one fails."""
        if not self.config.cluster.health.enabled:
            return None
        started = time.monotonic()
        found = preflight(
            self.run, record, self.config, self.allocation, lambda: self.stop_signal is not None
        )
        phases["preflight"] = time.monotonic() - started
        for line in found.warnings:
            print(f"preflight: warning: {line}", flush=True)
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
            print(f"sbcast: {fault}; the nodes read {archive}", flush=True)
        seconds = time.monotonic() - started
        print(f"graph cache: {manifest.graphs} graphs to all nodes in {seconds:.1f} s", flush=True)
        return seconds

    def _merge_added(self) -> None:
        """Put graphs that were compiled while training into the archive."""
        if self.stage == "precompile":
            return
        try:
            names = merge_added(self.run)
        except StorageError as error:
            print(f"warning: {error}", flush=True)  # they can be compiled again
            return
        if names:
            shown = ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
            print(f"graph cache: {len(names)} new graphs in the archive: {shown}", flush=True)

    def _uncompiled(self) -> tuple[str, ...]:
        """Why the archive that this precompile attempt left is not complete."""
        if self.stage == "train":
            return ()
        if not self.run.graphs_manifest.is_file():
            return ("no archive of compiled graphs was written",)
        return faults(GraphManifest.load(self.run.graphs_manifest), self.run)

    def _wait(self, launchers: list[subprocess.Popen[bytes]], record: AttemptRecord) -> None:
        """Until every launcher has ended; passes signals on and keeps the deadlines."""
        signalled_at = -REPEAT_SIGNAL_S
        failed_at: float | None = None
        while any(launcher.poll() is None for launcher in launchers):
            now = time.monotonic()
            if self.stop_signal is not None and now - signalled_at >= REPEAT_SIGNAL_S:
                signalled_at = now
                _send(launchers, signal.SIGUSR2)  # srun passes it on to the launchers
            if failed_at is None and self._failed(launchers, record):
                failed_at = now
            if failed_at is not None and now - failed_at > LAUNCHER_GRACE_S:
                _send(launchers, signal.SIGKILL)
            if self._past_deadline(now):
                self.overran_s = now - self.stop_at
                _send(launchers, signal.SIGKILL)
            time.sleep(POLL_S)

    def _failed(self, launchers: list[subprocess.Popen[bytes]], record: AttemptRecord) -> bool:
        """Whether somebody has failed; a stop signal after that is Slurm cleaning up."""
        # The folder appears with the first failure written: one look at the shared file system,
        # however many nodes there are. A worker killed outright is told by its peers' failures.
        failures = self.run.attempt(self.stage, record.attempt).failure(0).parent
        failed = any(launcher.poll() for launcher in launchers) or failures.is_dir()
        self.failed_first = self.failed_first or (failed and self.stop_signal is None)
        return failed

    def _past_deadline(self, now: float) -> bool:
        """Whether a stop has taken so long that the time limit itself comes near."""
        if self.stop_signal is None or self.allocation.job_id is None or self.overran_s is not None:
            return False
        lead_s = self.config.recipe.slurm.signal_lead_s
        return now - self.stop_at > max(lead_s - KILL_MARGIN_S, lead_s / 2)

    def _observe(self, record: AttemptRecord) -> Observed:
        return Observed(
            expected_nodes=record.nodes,
            nodes=attempts.node_records(self.run, record),
            failures=attempts.failure_records(self.run, record),
            slurm_state=self._slurm_state(),
            step_out_of_memory=self._out_of_memory(),
            down_nodes=self._down_nodes(record),
            stop_signal=None if self.failed_first else self.stop_signal,
            overran_s=self.overran_s,
            uncompiled=self._uncompiled(),
        )

    def _slurm_state(self) -> str:
        """Slurm's word for what happened; it comes into the accounting a moment after SIGTERM."""
        deadline = time.monotonic() + (ACCOUNTING_LAG_S if self.stop_signal == "SIGTERM" else 0.0)
        state = self.allocation.state()
        while state in ("RUNNING", "COMPLETING") and time.monotonic() < deadline:
            time.sleep(POLL_S)
            state = self.allocation.state()
        return state

    def _out_of_memory(self) -> bool:
        rows = self._accounting(self.allocation.job_id)
        return any(row.state == "OUT_OF_MEMORY" for row in rows[-3:])

    def _down_nodes(self, record: AttemptRecord) -> list[str]:
        if not isinstance(self.allocation, SlurmAllocation):
            return []
        try:
            states = self.allocation.client.node_states()
        except SlurmError:
            return []
        return [name for name in record.nodes if not usable(states.get(name, "unknown"))]

    def _accounting(self, job_id: str | None) -> list[AccountingRow]:
        if job_id is None or not isinstance(self.allocation, SlurmAllocation):
            return []
        return self.allocation.client.accounting(job_id)

    def _act(self, closed: AttemptRecord) -> int:
        if closed.action == "finish":
            return EXIT_OK
        if closed.action == "requeue":
            if isinstance(self.allocation, SlurmAllocation):
                self._requeue(self.allocation, closed)
            return EXIT_REQUEUE
        return EXIT_FAILED.get(str(closed.ending), 1 if closed.ending == "cancelled" else 70)

    def _requeue(self, allocation: SlurmAllocation, closed: AttemptRecord) -> None:
        client, slurm = allocation.client, self.config.recipe.slurm
        partition = os.environ.get("SLURM_JOB_PARTITION")
        try:
            lost = attempts.lost_nodes(self.run, closed)
            before = [node.node for node in excluded(self.run)]
            avoid = nodes_to_avoid(client, len(closed.nodes), lost, before, partition)
            if self.stage == "precompile" and avoid:
                self._keep_train_off(client, partition)
            listed = self.run.excluded.is_file()
            requeue(client, allocation.job_id, avoid, slurm.exclude, avoided_before=listed)
        except SlurmError as error:
            # The record says requeue and the job may be lost to it: say so where it is looked for.
            print(f"{error}; if the job ends here, `slurmllm resume {self.run.name}`", flush=True)

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
            print(f"warning: {error}", flush=True)  # Slurm's own list still keeps off them
            return
        if self.config.recipe.slurm.drain and isinstance(self.allocation, SlurmAllocation):
            drain(self.allocation.client, new)

    def _close_unfinished(self) -> None:
        """Close the attempt before this one where its supervisor could not."""
        for record in attempts.load_attempts(self.run, self.stage):
            if record.ended_at is None:
                reported = attempts.node_records(self.run, record)
                row = incarnation(record, self._accounting(record.job_id))
                ending = ending_of_lost(record, reported, row)
                closed = attempts.close_attempt(self.run, record, ending, ended_at=ended_at(row))
                self._say(closed, f"{closed.ending}: {'; '.join(closed.evidence)}")
                self._exclude_failed(closed)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if self.stop_signal is None:
            self.stop_signal, self.stop_at = signal.Signals(number).name, time.monotonic()

    def _say(self, record: AttemptRecord, words: str) -> None:
        job = f" of job {record.job_id}" if record.job_id else ""
        print(f"{self.stage} attempt {record.attempt}{job}: {words}", flush=True)


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


def incarnation(record: AttemptRecord, rows: Sequence[AccountingRow]) -> AccountingRow | None:
    """The row of the job's start that an attempt belongs to, of all rows that sacct has."""
    of_job = [row for row in rows if row.job_id == record.job_id]
    return of_job[record.restart_count] if record.restart_count < len(of_job) else None


def ended_at(row: AccountingRow | None) -> float | None:
    """Unix time of an incarnation's end; None where Slurm knows none."""
    try:
        return datetime.fromisoformat(row.end).timestamp() if row is not None else None
    except ValueError:  # "Unknown", "None"
        return None


def ending_of_lost(
    record: AttemptRecord, reported: Mapping[str, NodeRecord], row: AccountingRow | None
) -> Ending:
    """How an attempt ended whose supervisor died with its node, by Slurm's accounting.

    Args:
        record: The attempt, still open.
        reported: What its launchers wrote before the end.
        row: sacct's row of its incarnation of the job, where there is accounting.
    """
    state = row.state if row is not None else "UNKNOWN"
    evidence = (
        f"Slurm: {state}; the supervisor on {record.nodes[0]} ended without a word"
        if record.job_id is not None
        else "the supervisor ended without a word",
    )
    if state == "CANCELLED":
        return Ending("cancelled", evidence)
    if state in ("TIMEOUT", "PREEMPTED"):
        return Ending("advance_signal", evidence)
    silent = tuple(name for name in record.nodes if not reported_all(reported.get(name)))
    # With Slurm's word for it one of the silent nodes is to blame; which one is not known.
    return Ending("node_failure", evidence, silent if len(silent) == 1 else ())


def _send(processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def supervise(run: RunDir, stage: Stage) -> int:
    """Entry of the hidden verb `supervise`."""
    return Supervisor(run, stage, current_allocation()).main()
