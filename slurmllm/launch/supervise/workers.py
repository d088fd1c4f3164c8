"""The workers of one node in one attempt: start, signal, wait, end.

Plays the part of torchrun (the same environment variables) with two differences: workers get a stop
signal and the time to save, where torchrun kills them 30 s after SIGTERM (pytorch #119856), and the
exit of every rank is recorded for the supervisor.

The precompile stage runs it as a program under the compiler's own tool:
`python -m slurmllm.launch.supervise.workers RUN STAGE ATTEMPT`.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

from slurmllm.core.config.load import load
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.config.variables import mask
from slurmllm.core.errors import EXIT_REQUEUE, NodeError, SlurmllmError, StorageError
from slurmllm.core.format import format_duration
from slurmllm.core.log import setup_logging
from slurmllm.core.run.flight_recorder import recorder_variables
from slurmllm.core.run.host_memory import count_oom_kills
from slurmllm.core.run.records import AttemptRecord, ByRank, FailureRecord, NodeRecord
from slurmllm.core.run.rundir import RunDir, Stage
from slurmllm.core.run.safe_files import os_error_text
from slurmllm.core.run.worker_files import STACKS_SIGNAL
from slurmllm.core.slurm.client import wait_for
from slurmllm.core.slurm.error_texts import ChildProcess, StopCheck
from slurmllm.core.slurm.setup import Variables
from slurmllm.launch.graphs.reuse import sharing, threads_of
from slurmllm.launch.supervise.allocation import SLURMLLM
from slurmllm.launch.supervise.classify import is_echo
from slurmllm.launch.supervise.collectives import collect_dumps, query_ras
from slurmllm.launch.supervise.rank_logs import RankLogs
from slurmllm.launch.supervise.watchdog import Heartbeats
from slurmllm.plan.mesh import Mesh, load_mesh
from slurmllm.train.backends.environment import worker_environment
from slurmllm.train.control.plane import SOCKET as CONTROL_SOCKET
from slurmllm.train.control.relay import Position, Relay
from slurmllm.train.control.rendezvous import (
    INTERFACES,
    NODE_NAME,
    SHARING,
    die_with_parent,
    interface_variables,
    own_node_rank,
    own_secret,
    rendezvous_variables,
)

log = logging.getLogger(__name__)

# CAUTION: NCCL may use SIGUSR1 in the workers (submitit's warning), so they get SIGUSR2.
WORKER_SIGNAL = signal.SIGUSR2
STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
POLL_S = 0.05
REPEAT_SIGNAL_S = 5.0  # a worker that still imports torch ignores the signal: repeat it
# For the peers of a failed worker to record what they saw: longer if that worker itself only lost a
# peer, for then one of the others may hold the cause.
CLEAR_GRACE_S = 1.0
PEER_GRACE_S = 5.0
LOOK_S = 5.0  # interval between looks at the shared file system for the supervisor's files
COMPILE_LOG_S = 30.0  # interval between log lines while the first step compiles
SAVE_RETRY_S = 15.0  # if the shared file system refuses the node's record
STACKS_S = 15.0  # for all nodes to notice a hang and to dump stacks


class Workers:
    """The workers of this node; `node_record` is the node's record as last written."""

    def __init__(self, run: RunDir, stage: Stage, attempt: int) -> None:
        self.run = run
        self.stage = stage
        self.attempt = run.attempt(stage, attempt)
        self.record = AttemptRecord.load(self.attempt.record)
        self.config: RunConfig = load(run.config, trusted=True)
        self.local = self.record.job_id is None
        self.watched = stage == "train"  # whether the watchdog reads this node's heartbeats
        self.node_rank = own_node_rank()
        self.node = os.environ.get(NODE_NAME) or self.record.nodes[self.node_rank]
        self.compiles = False  # whether the first step of the train stage compiles graphs
        self._compiles_since = 0.0
        self._next_compile_log = 0.0
        self.processes: dict[int, ChildProcess] = {}
        self.variables: Variables = {}  # of the workers, besides this process's
        self.stop_requested = False
        self.node_record = NodeRecord(node=self.node)
        self.heartbeats: Heartbeats | None = None  # from `start` on
        self.relay: Relay | None = None
        # Often enough for the watchdog's limits, however short these are.
        self._look_s = min(LOOK_S, max(self.config.recipe.watchdog.min_step_s / 8, 0.25))
        self._looked_at = 0.0
        self._oom_kills = count_oom_kills()  # of the node, before the workers start
        self.logs = RankLogs(self.config, run, self.record, self.node)

    def watch_signals(self) -> None:
        """Record stop signals instead of dying of them."""

        def on_stop(number: int, frame: object) -> None:
            self.stop_requested = True

        for number in STOP_SIGNALS:
            signal.signal(number, on_stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def load_record(self) -> None:
        """Reload the node's record, which the other program of this node may have written."""
        self.node_record = NodeRecord.find(self.attempt.node(self.node)) or self.node_record

    def save(self, **update: object) -> None:
        if self.processes:
            update["exit_codes"] = self.exit_codes()
        self.node_record = self.node_record.model_copy(update=update)
        self.node_record.save(self.attempt.node(self.node))

    def save_with_retries(self, **update: object) -> None:
        """Write the node's record for the last time, retrying while the disk refuses.

        The workers' logs come first: the supervisor reads them once it has all records.
        """
        self.logs.collect()
        update["oom_kills"] = count_oom_kills() - self._oom_kills
        deadline = time.monotonic() + SAVE_RETRY_S
        while True:
            try:
                self.save(**update)
                return
            except StorageError as error:
                if time.monotonic() > deadline:
                    log.error("%s", error)
                    return
                time.sleep(1.0)

    def end_with_error(self, error: SlurmllmError) -> None:
        self.end()
        self.save_with_retries(error=str(error), error_code=error.exit_code)
        log.error("%s", error)

    def start(self) -> None:
        per_node = self.config.workers_per_node
        self.heartbeats = Heartbeats(self.attempt, self.node, self.config.recipe.watchdog)
        folder = self.heartbeats.folder
        if self.watched and folder is not None:
            self.variables |= recorder_variables(
                folder, os.environ, self.config.cluster.device == "cuda"
            )
        self.start_services(self.heartbeats, per_node)
        mesh = load_mesh(self.run.plan)
        for local_rank in range(per_node):
            rank = self.node_rank * per_node + local_rank
            environment = {
                **os.environ,
                **self.variables,
                **self.environment(mesh, rank, local_rank),
            }
            try:
                self.processes[rank] = self.start_worker(rank, environment)
            except OSError as error:
                raise NodeError(
                    f"rank {rank} cannot be started on {self.node}: {os_error_text(error)}"
                ) from error
        variables = mask(
            {
                **os.environ,
                **interface_variables(self.record.master_addr),
                **self.config.worker_secrets(),
            }
        )
        names = [*worker_environment(self.config, self.run), *INTERFACES]
        self.save(
            pids={rank: worker.pid for rank, worker in self.processes.items()},
            environment={name: variables[name] for name in names if name in variables},
            log_folder=None if self.logs.folder is None else str(self.logs.folder),
        )

    def start_worker(self, rank: int, environment: Variables) -> ChildProcess:
        command = [
            *SLURMLLM,
            "worker",
            str(self.run.path),
            "--stage",
            self.stage,
            "--attempt",
            str(self.attempt.number),
        ]
        with os.fdopen(self.logs.open(rank), "wb") as stream:
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=None if rank == 0 else subprocess.STDOUT,
                preexec_fn=prepare_child,
            )

    def start_services(self, heartbeats: Heartbeats, per_node: int) -> None:
        """Copy what all workers read, and start the control plane if there are several."""
        record = self.record
        if self.watched:
            heartbeats.copy_run(self.run)
        if record.world_size == 1:
            return
        if heartbeats.folder is None:
            raise NodeError(
                f"{self.node} has no memory disk for the control plane's socket: neither /dev/shm "
                "nor the folder for temporary files is writable; free space there"
            )
        self.relay = Relay(
            Position(self.node_rank, record.nodes, per_node),
            heartbeats.folder / "control",
            (record.master_addr, record.control_port),
            own_secret(),
        )
        self.relay.start()

    def environment(self, mesh: Mesh, rank: int, local_rank: int) -> Variables:
        """Return the variables of a worker, beyond this process's."""
        # Compiled CPU graphs contain the number of threads: precompile must use train's.
        on_node = os.environ.get("SLURM_CPUS_ON_NODE") or len(os.sched_getaffinity(0))
        return {
            **rendezvous_variables(
                self.record.master_addr,
                self.record.master_port,
                nodes=len(self.record.nodes),
                workers_per_node=self.config.workers_per_node,
                node_rank=self.node_rank,
                local_rank=local_rank,
                threads=threads_of(
                    self.config.cluster.cpus_per_node or int(on_node), mesh, self.local
                ),
            ),
            NODE_NAME: self.node,
            SHARING: str(sharing(mesh, self.local)),
            "PATH": search_path(),
            **self.config.worker_secrets(),
            "PYTHONUNBUFFERED": "1",  # the last lines of a killed worker must be in its log
            **(self.heartbeats.environment(rank) if self.heartbeats and self.watched else {}),
            **({} if self.relay is None else {CONTROL_SOCKET: str(self.relay.path)}),
        }

    def wait(self) -> bool:
        """Wait for all workers; returns whether one of them failed."""
        signalled_at = -REPEAT_SIGNAL_S
        while self.pids():
            if failed := self._failed_ranks():
                self._end_peers(failed)
                break
            if self._must_end():
                self.end()
                return True
            if self.stop_requested and time.monotonic() - signalled_at >= REPEAT_SIGNAL_S:
                signalled_at = time.monotonic()
                self.ask_to_stop()
            self.observe()
            time.sleep(POLL_S)
        return bool(self._failed_ranks())

    def ask_to_stop(self) -> None:
        """Ask the workers that have not ended to save and leave; repeated until they have."""
        for worker in self.processes.values():
            worker.send_signal(WORKER_SIGNAL)

    def observe(self) -> None:
        """Forward what the workers do, a few times a second."""
        if self.heartbeats is not None and self.watched:
            self.heartbeats.update(self.pids())
            first = self.heartbeats.phases.get(0)
            if self.compiles and first is not None and first.phase == "first_step":
                self.log_compiling()

    def log_compiling(self) -> None:
        """Log that the first step compiles: at once, then now and then with the time so far."""
        now = time.monotonic()
        if now >= self._next_compile_log:
            self._compiles_since = self._compiles_since or now
            self._next_compile_log = now + COMPILE_LOG_S
            seconds = now - self._compiles_since
            log.info(
                "compiling the first step …%s",
                f", {format_duration(seconds)} so far" if seconds else "",
            )

    def _end_peers(self, failed: Sequence[int]) -> None:
        """End the peers of failed workers; before that they get some time to record why."""
        self.record_failures()
        cause_known = any(self.exit_codes()[rank] < 0 for rank in failed)
        for rank in failed:
            with suppress(StorageError):  # it left no failure record
                cause_known |= not is_echo(FailureRecord.load(self.attempt.failure(rank)))
        wait_for(lambda: not self.pids(), CLEAR_GRACE_S if cause_known else PEER_GRACE_S, POLL_S)
        self.record_failures()
        self.end()

    def record_failures(self) -> None:
        """Record why workers failed; ours do so themselves."""

    def _must_end(self) -> bool:
        """Whether the supervisor has found a hang, or a newer attempt has taken over."""
        if self.heartbeats is None or not self.watched:
            return False
        if time.monotonic() - self._looked_at < self._look_s:
            return False
        self._looked_at = time.monotonic()
        hang_found = superseded = False
        with suppress(OSError):  # the shared file system refuses for a moment
            hang_found = self.attempt.hang.is_file()
            # The folder of the next attempt: another supervisor has begun it (see newer_attempt).
            superseded = self.run.attempt(self.stage, self.attempt.number + 1).path.is_dir()
        if hang_found:
            if self.node_rank == 0:
                query_ras(self.attempt)
            self.collect_dumps()
            self.dump_stacks(self.heartbeats)
            # Wait for the other nodes' stacks: a worker that loses a peer no longer hangs.
            wait_for(self._all_dumped, STACKS_S, 0.5)
            return True
        return superseded

    def _all_dumped(self) -> bool:
        with suppress(OSError):
            return len([*self.attempt.stacks(0).parent.iterdir()]) >= self.record.world_size
        return False

    def collect_dumps(self) -> None:
        """Store the ranks' recordings of their collectives."""
        collect_dumps(self.attempt, {**os.environ, **self.variables}, self.record.started_at)

    def dump_stacks(self, heartbeats: Heartbeats) -> None:
        heartbeats.dump_stacks(self.pids())

    def exit_codes(self) -> ByRank:
        """Rank → exit code of the workers that have ended; negative: by that signal."""
        return {r: w.returncode for r, w in self.processes.items() if w.poll() is not None}

    def pids(self) -> ByRank:
        """Rank → process id of the running workers."""
        return {r: worker.pid for r, worker in self.processes.items() if worker.poll() is None}

    def _failed_ranks(self) -> list[int]:
        return [r for r, code in self.exit_codes().items() if code not in (0, EXIT_REQUEUE)]

    def end(self) -> None:
        """Kill the running workers: a peer of a failed rank waits in a collective for ever."""
        if not self.processes:
            return
        # SIGKILL: a worker that waits in a collective never returns to Python to handle SIGTERM.
        running = list(self.pids())
        self.kill(running)
        for rank in running:
            self.processes[rank].wait()
        # it may be called again
        self.node_record = self.node_record.model_copy(
            update={"stopped_ranks": (*self.node_record.stopped_ranks, *running)}
        )

    def kill(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.processes[rank].kill()

    def run_to_end(self, meanwhile: Callable[[], None] = lambda: None) -> bool:
        """Run the workers and record their exits; returns whether one failed.

        `meanwhile` is called once they have started; if it raises, they are ended.
        """
        try:
            self.start()
            try:
                meanwhile()
            except BaseException:
                self.end()  # first: workers that lose their relay would record failures
                raise
            failed = self.wait()
            self.record_failures()
            if failed:
                self.collect_dumps()
            self.save_with_retries()
        finally:
            if self.relay is not None:
                self.relay.close()
            if self.heartbeats is not None:
                self.heartbeats.close()
        return failed


def search_path() -> str:
    """Return $PATH with this interpreter's folder: jobs activate no environment."""
    folder = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath)
    return path if folder in path.split(os.pathsep) else f"{path}{os.pathsep}{folder}"


def prepare_child() -> None:
    """In the child before exec: die with the launcher; ignore stop signals until handled.

    Ignored signals stay ignored through exec, so a signal that comes while the worker imports
    torch does not kill it.
    """
    die_with_parent()
    for number in (*STOP_SIGNALS, STACKS_SIGNAL, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def run_command(command: list[str], stop: StopCheck, on_stop: signal.Signals) -> int:
    """Run a command in its own process group; returns its exit code, negative for a signal.

    When `stop` returns True, sends the group `on_stop`, and again every few seconds. Raises an
    OSError if the command cannot be started.
    """
    process = subprocess.Popen(
        command,
        env={**os.environ, "PATH": search_path()},
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=prepare_child,
    )
    stopped_at = -REPEAT_SIGNAL_S
    try:
        while process.poll() is None:
            if stop() and time.monotonic() - stopped_at >= REPEAT_SIGNAL_S:
                stopped_at = time.monotonic()
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, on_stop)
            time.sleep(POLL_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode


def main(arguments: list[str]) -> int:
    """Run one node's workers; returns 0 if each of them finished, or saved and left, else 1."""
    die_with_parent()
    setup_logging()
    path, stage, attempt = arguments
    workers = Workers(RunDir(Path(path)), cast("Stage", stage), int(attempt))
    workers.watch_signals()
    workers.load_record()
    try:
        failed = workers.run_to_end()
    except SlurmllmError as error:
        workers.end_with_error(error)
        return 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
