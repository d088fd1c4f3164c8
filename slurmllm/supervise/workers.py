"""The workers of one node in one attempt: started, signalled, waited for, ended.

It plays torchrun's part (the same environment variables) and differs where a long run needs it:
a stop signal is passed on and the workers get the time to save, where torchrun kills them 30 s
after SIGTERM (pytorch #119856), and how each rank ended is written down for the supervisor.

As a program (`python -m slurmllm.supervise.workers RUN STAGE ATTEMPT`) it is what the precompile
stage puts under the compiler's own tool.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from slurmllm.config.load import load
from slurmllm.config.resolve import RunConfig
from slurmllm.error_patterns import meaning_of
from slurmllm.errors import EXIT_REQUEUE, SlurmllmError, StorageError
from slurmllm.graphs.fingerprint import sharing, threads_of
from slurmllm.plan.mesh import Mesh, load_mesh
from slurmllm.pulse import STACKS_SIGNAL
from slurmllm.records import AttemptRecord, FailureRecord, NodeRecord
from slurmllm.rundir import RunDir, Stage
from slurmllm.submit.render import worker_environment
from slurmllm.supervise.allocation import NODE_NAME, NODE_RANK, SHARING, die_with_parent
from slurmllm.supervise.heartbeat import Heartbeats
from slurmllm.supervise.interfaces import VARIABLES, interface_variables

# CAUTION: NCCL may use SIGUSR1 in the workers (submitit's warning), so they get SIGUSR2.
WORKER_SIGNAL = signal.SIGUSR2
STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
POLL_S = 0.05
REPEAT_SIGNAL_S = 5.0  # a worker that still imports torch ignores the signal: it comes again
# For workers to write down what they saw when another one failed: longer where that one itself
# only lost a peer, for then the cause may be among them.
CLEAR_GRACE_S, PEER_GRACE_S = 1.0, 5.0
LOOK_S = 1.0  # between two looks at the shared file system for words of the supervisor
STACKS_S = 10.0  # for all nodes to see that they are to take stacks, and to take them
PATIENCE_S = 15.0  # with a shared file system that refuses the node's record


class Workers:
    """The workers of this node.

    Attributes:
        seen: The node's record, as last written.
        stop_requested: Whether somebody asked for a stop.
    """

    def __init__(self, run: RunDir, stage: Stage, attempt: int) -> None:
        self.run, self.stage = run, stage
        self.attempt = run.attempt(stage, attempt)
        self.record = AttemptRecord.load(self.attempt.record)
        self.config: RunConfig = load(run.config)
        self.node_rank = int(os.environ.get(NODE_RANK) or os.environ.get("SLURM_NODEID") or 0)
        self.node = os.environ.get(NODE_NAME) or self.record.nodes[self.node_rank]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.stop_requested = False
        self.seen = NodeRecord(node=self.node)
        self.heartbeats: Heartbeats | None = None
        if stage == "train":
            watched = self.config.recipe.watchdog
            self.heartbeats = Heartbeats(self.attempt, self.node, watched)
        self._looked_at = 0.0

    @property
    def local(self) -> bool:
        """Whether the nodes are launchers on this machine."""
        return self.record.job_id is None

    def watch_signals(self) -> None:
        """Take stop signals as wishes, from now on."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def load_seen(self) -> None:
        """Take over what the other program of this node has written into the node's record."""
        path = self.attempt.node(self.node)
        if path.is_file():
            self.seen = NodeRecord.load(path)

    def save(self, **update: object) -> None:
        """Write the node's record."""
        self.seen = self.seen.model_copy(update=update)
        codes = {r: w.returncode for r, w in self.processes.items() if w.poll() is not None}
        if self.processes:
            self.seen = self.seen.model_copy(update={"exit_codes": codes})
        self.seen.save(self.attempt.node(self.node))

    def save_at_last(self, **update: object) -> None:
        """Write the node's record for the last time: a disk that refuses is asked for a while."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self.save(**update)
            except StorageError as error:
                if time.monotonic() > deadline:
                    print(f"{self.node}: {error}", file=sys.stderr, flush=True)
                    return None
                time.sleep(1.0)

    def start(self) -> None:
        """Start one worker a device."""
        per_node = self.config.cluster.devices_per_node
        for local_rank in range(per_node):
            rank = self.node_rank * per_node + local_rank
            log = self.run.worker_log(self.stage, self.attempt.number, rank)
            if rank != 0:
                log.parent.mkdir(parents=True, exist_ok=True)
            # Rank 0 speaks into the stage's log; the others have a file each.
            output = None if rank == 0 else log.open("ab")
            self.processes[rank] = subprocess.Popen(
                [sys.executable, "-m", "slurmllm", "worker", str(self.run.path),
                 "--stage", self.stage, "--attempt", str(self.attempt.number)],
                env={**os.environ, **self._environment(rank, local_rank, per_node)},
                stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT if output else None,
                preexec_fn=prepare_child,
            )  # fmt: skip
            if output is not None:
                output.close()
        self.save(
            pids={rank: worker.pid for rank, worker in self.processes.items()},
            environment=self._told(),
        )

    def _environment(self, rank: int, local_rank: int, per_node: int) -> dict[str, str]:
        mesh = load_mesh(self.run.plan)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.record.world_size),
            "LOCAL_WORLD_SIZE": str(per_node),
            "GROUP_RANK": str(self.node_rank),
            "MASTER_ADDR": self.record.master_addr,
            "MASTER_PORT": str(self.record.master_port),
            NODE_NAME: self.node,
            SHARING: str(sharing(mesh, self.local)),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(self._threads(mesh)),
            "PATH": search_path(),
            "PYTHONUNBUFFERED": "1",
            **(self.heartbeats.environment(rank) if self.heartbeats is not None else {}),
            **interface_variables(self.record.master_addr),
        }

    def _told(self) -> dict[str, str]:
        """The variables of backend, profile and recipe that the workers see, with their values."""
        found = {**os.environ, **interface_variables(self.record.master_addr)}
        names = [*worker_environment(self.config, self.run), *VARIABLES]
        return {name: found[name] for name in names if name in found}

    def _threads(self, mesh: Mesh) -> int:
        """CPU threads of a worker.

        Compiled CPU graphs hold the number, so that precompile must use the one that train will.
        """
        on_node = os.environ.get("SLURM_CPUS_ON_NODE") or len(os.sched_getaffinity(0))
        cpus = self.config.cluster.cpus_per_node or int(on_node)
        return threads_of(cpus, mesh, self.local)

    def wait(self) -> bool:
        """Wait for all workers; returns whether one of them failed."""
        signalled_at = -REPEAT_SIGNAL_S
        while any(worker.poll() is None for worker in self.processes.values()):
            if self._failed_ranks():
                self._let_peers_speak()
                self.end()
                break
            if self._told_to_end():
                self.end()
                return True
            if self.stop_requested and time.monotonic() - signalled_at >= REPEAT_SIGNAL_S:
                signalled_at = time.monotonic()
                for worker in self.processes.values():
                    if worker.poll() is None:
                        worker.send_signal(WORKER_SIGNAL)
            if self.heartbeats is not None:
                self.heartbeats.update(self._pids())
            time.sleep(POLL_S)
        return bool(self._failed_ranks())

    def _told_to_end(self) -> bool:
        """Whether the supervisor found that the attempt hangs, or another one has taken over."""
        if self.heartbeats is None or time.monotonic() - self._looked_at < LOOK_S:
            return False
        self._looked_at = time.monotonic()
        if self.attempt.hang.is_file():
            self.heartbeats.dump_stacks(self._pids())
            self._let_others_dump()
            return True
        return self.run.attempt(self.stage, self.attempt.number + 1).path.is_dir()

    def _let_others_dump(self) -> None:
        """Wait for the other nodes' stacks: a worker that loses a peer no longer hangs."""
        folder, deadline = self.attempt.stacks(0).parent, time.monotonic() + STACKS_S
        while time.monotonic() < deadline and self._dumped(folder) < self.record.world_size:
            time.sleep(POLL_S)

    @staticmethod
    def _dumped(folder: Path) -> int:
        try:
            return sum(1 for _ in folder.iterdir())
        except OSError:
            return 0

    def _pids(self) -> dict[int, int]:
        """The workers that run, rank → process id."""
        return {r: worker.pid for r, worker in self.processes.items() if worker.poll() is None}

    def _failed_ranks(self) -> list[int]:
        codes = {rank: worker.poll() for rank, worker in self.processes.items()}
        return [rank for rank, code in codes.items() if code not in (None, 0, EXIT_REQUEUE)]

    def _let_peers_speak(self) -> None:
        clear = any(self._knows_why(rank) for rank in self._failed_ranks())
        deadline = time.monotonic() + (CLEAR_GRACE_S if clear else PEER_GRACE_S)
        while time.monotonic() < deadline:
            if all(worker.poll() is not None for worker in self.processes.values()):
                return
            time.sleep(POLL_S)

    def _knows_why(self, rank: int) -> bool:
        """Whether a worker that failed is itself the cause: killed, or by its own words."""
        if self.processes[rank].returncode < 0:
            return True
        try:
            failure = FailureRecord.load(self.attempt.failure(rank))
        except StorageError:
            return False
        return meaning_of(f"{failure.error} {failure.message}") != "lost_peer"

    def end(self) -> None:
        """Kill what still runs: a peer of a failed rank waits in a collective for ever."""
        if not self.processes:
            return
        running = [rank for rank, worker in self.processes.items() if worker.poll() is None]
        for rank in running:
            self.processes[rank].kill()
        for rank in running:
            self.processes[rank].wait()
        self.seen = self.seen.model_copy(update={"stopped_ranks": tuple(running)})

    def run_to_end(self) -> bool:
        """Start the workers, wait for them, write down how they ended.

        Returns:
            Whether one of them failed.
        """
        try:
            self.start()
            failed = self.wait()
            self.save_at_last()
        finally:
            if self.heartbeats is not None:
                self.heartbeats.close()
        return failed

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self.stop_requested = True


def search_path() -> str:
    """$PATH with this interpreter's own folder: jobs activate no environment."""
    own, given = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    return given if own in given.split(os.pathsep) else f"{given}{os.pathsep}{own}"


def prepare_child() -> None:
    """In the child before exec: die with the launcher; ignore stop signals until handled.

    Ignored signals stay ignored through exec, so a signal that comes while the worker imports
    torch does not kill it.
    """
    die_with_parent()
    for number in (*STOP_SIGNALS, STACKS_SIGNAL, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def run_command(
    command: list[str], stop: Callable[[], bool], on_stop: Callable[[int], None]
) -> int:
    """Run a command in a process group of its own.

    Args:
        command: The command.
        stop: Whether a stop is asked for.
        on_stop: Called with the group's id then, and again every few seconds.

    Returns:
        Its exit code, negative: ended by that signal.

    Raises:
        OSError: it cannot be started.
    """
    process = subprocess.Popen(
        command, env={**os.environ, "PATH": search_path()}, stdin=subprocess.DEVNULL,
        process_group=0, preexec_fn=prepare_child,
    )  # fmt: skip
    stopped_at = -REPEAT_SIGNAL_S
    try:
        while process.poll() is None:
            if stop() and time.monotonic() - stopped_at >= REPEAT_SIGNAL_S:
                stopped_at = time.monotonic()
                on_stop(process.pid)
            time.sleep(POLL_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode


def main(arguments: list[str]) -> int:
    """The program's entry: one node's workers in one attempt.

    Returns:
        0 where every worker finished or saved and left, else 1.
    """
    die_with_parent()
    path, stage, attempt = arguments
    workers = Workers(
        RunDir(Path(path)), "train" if stage == "train" else "precompile", int(attempt)
    )
    workers.watch_signals()
    workers.load_seen()
    try:
        failed = workers.run_to_end()
    except SlurmllmError as error:
        workers.end()
        workers.save_at_last(error=str(error))
        print(f"{workers.node}: {error}", file=sys.stderr, flush=True)
        return 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
