"""One process a node: puts the graphs in place, starts the node's workers, records their ends.

It plays torchrun's part (the same environment variables) and differs where a long run needs it:
a stop signal is passed on and the workers get the time to save, where torchrun kills them 30 s
after SIGTERM (pytorch #119856), and how each rank ended is written down for the supervisor.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from slurmllm.config.resolve import RunConfig, load
from slurmllm.errors import EXIT_REQUEUE, NodeError, SlurmllmError
from slurmllm.records import AttemptRecord, GraphManifest, NodeRecord, WorkerRecord
from slurmllm.rundir import RunDir, Stage
from slurmllm.supervise import cache as graph_cache
from slurmllm.supervise.allocation import NODE_NAME, NODE_RANK, die_with_parent

# CAUTION: NCCL may use SIGUSR1 in the workers (submitit's warning), so they get SIGUSR2.
WORKER_SIGNAL = signal.SIGUSR2
STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
POLL_S = 0.2
REPEAT_SIGNAL_S = 5.0  # a worker that still imports torch ignores the signal: it comes again
PEER_GRACE_S = 5.0  # for workers to write down what they saw when another one failed


class Launcher:
    """The workers of one node in one attempt."""

    def __init__(self, run: RunDir, stage: Stage, attempt: int) -> None:
        self.run, self.stage = run, stage
        self.attempt = run.attempt(stage, attempt)
        self.record = AttemptRecord.load(self.attempt.record)
        self.config: RunConfig = load(run.config)
        self.node_rank = int(os.environ.get(NODE_RANK) or os.environ.get("SLURM_NODEID") or 0)
        self.node = os.environ.get(NODE_NAME) or self.record.nodes[self.node_rank]
        self.cache = Path(os.environ["SLURMLLM_CACHE"])
        self.workers: dict[int, subprocess.Popen[bytes]] = {}
        self.stop_requested = False
        self.seen = NodeRecord(node=self.node)

    def main(self) -> int:
        """Run the node's share of the attempt.

        Returns:
            0 where every worker finished or saved and left, else 1: the supervisor reads the
            records, and srun ends the other launchers on any other code than 0.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._prepare_cache()
            self._start_workers()
            failed = self._wait()
            finished = all(worker.returncode == 0 for worker in self.workers.values())
            if self.stage == "precompile" and finished and self.node_rank == 0:
                self._pack_cache()
        except SlurmllmError as error:
            self._end_workers()
            self._save(error=str(error))
            print(f"{self.node}: {error}", file=sys.stderr, flush=True)
            return 1
        self._save()
        return 1 if failed else 0

    def _prepare_cache(self) -> None:
        started = time.monotonic()
        if self.stage == "precompile":
            graph_cache.fresh_cache(self.cache)
            return
        manifest = GraphManifest.load(self.run.graphs_manifest)
        origin = graph_cache.put_in_place(self.cache, self.run, manifest)
        self._save(cache=origin, cache_s=time.monotonic() - started)

    def _start_workers(self) -> None:
        per_node = self.config.cluster.devices_per_node
        for local_rank in range(per_node):
            rank = self.node_rank * per_node + local_rank
            log = self.run.worker_log(self.stage, self.attempt.number, rank)
            if rank != 0:
                log.parent.mkdir(parents=True, exist_ok=True)
            # Rank 0 speaks into the stage's log; the others have a file each.
            output = None if rank == 0 else log.open("ab")
            self.workers[rank] = subprocess.Popen(
                [sys.executable, "-m", "slurmllm", "worker", str(self.run.path),
                 "--stage", self.stage, "--attempt", str(self.attempt.number)],
                env={**os.environ, **self._worker_env(rank, local_rank, per_node)},
                stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT if output else None,
                preexec_fn=_prepare_child,
            )  # fmt: skip
            if output is not None:
                output.close()
        self._save(pids={rank: worker.pid for rank, worker in self.workers.items()})

    def _worker_env(self, rank: int, local_rank: int, per_node: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.record.world_size),
            "LOCAL_WORLD_SIZE": str(per_node),
            "GROUP_RANK": str(self.node_rank),
            "MASTER_ADDR": self.record.master_addr,
            "MASTER_PORT": str(self.record.master_port),
            NODE_NAME: self.node,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(self._threads(per_node)),
            "PYTHONUNBUFFERED": "1",
        }

    def _threads(self, per_node: int) -> int:
        """CPU threads of a worker.

        Compiled CPU graphs hold the number, so that precompile must use the one that train will:
        the nodes of --local share this machine's CPUs in both stages.
        """
        on_node = os.environ.get("SLURM_CPUS_ON_NODE") or len(os.sched_getaffinity(0))
        cpus = self.config.cluster.cpus_per_node or int(on_node)
        sharing = per_node
        if self.record.job_id is None:
            sharing *= int(json.loads(self.run.plan.read_text(encoding="utf-8"))["nodes"])
        return max(1, cpus // sharing)

    def _wait(self) -> bool:
        """Wait for all workers; returns whether one of them failed."""
        signalled_at = -REPEAT_SIGNAL_S
        while any(worker.poll() is None for worker in self.workers.values()):
            if self._failed_ranks():
                self._let_peers_speak()
                self._end_workers()
                break
            if self.stop_requested and time.monotonic() - signalled_at >= REPEAT_SIGNAL_S:
                signalled_at = time.monotonic()
                for worker in self.workers.values():
                    if worker.poll() is None:
                        worker.send_signal(WORKER_SIGNAL)
            time.sleep(POLL_S)
        return bool(self._failed_ranks())

    def _failed_ranks(self) -> list[int]:
        codes = {rank: worker.poll() for rank, worker in self.workers.items()}
        return [rank for rank, code in codes.items() if code not in (None, 0, EXIT_REQUEUE)]

    def _let_peers_speak(self) -> None:
        deadline = time.monotonic() + PEER_GRACE_S
        while time.monotonic() < deadline:
            if all(worker.poll() is not None for worker in self.workers.values()):
                return
            time.sleep(POLL_S)

    def _end_workers(self) -> None:
        """Kill what still runs: a peer of a failed rank waits in a collective for ever."""
        running = [rank for rank, worker in self.workers.items() if worker.poll() is None]
        for rank in running:
            self.workers[rank].kill()
        for rank in running:
            self.workers[rank].wait()
        self.seen = self.seen.model_copy(update={"stopped_ranks": tuple(running)})

    def _pack_cache(self) -> None:
        first = WorkerRecord.load(self.attempt.worker(0))
        manifest = graph_cache.pack(self.cache, self.run, self.config.backend, first.first_step_s)
        print(
            f"graph cache: {manifest.graphs} graphs in {manifest.archive_bytes / 1e6:.1f} MB; "
            f"first step {first.first_step_s:.1f} s with an empty cache",
            flush=True,
        )

    def _save(self, **update: object) -> None:
        codes = {r: w.returncode for r, w in self.workers.items() if w.poll() is not None}
        self.seen = self.seen.model_copy(update={**update, "exit_codes": codes})
        self.seen.save(self.attempt.node(self.node))

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self.stop_requested = True


def launch(run: RunDir, stage: Stage, attempt: int) -> int:
    """Entry of the hidden verb `launch`."""
    if "SLURMLLM_CACHE" not in os.environ:
        raise NodeError("SLURMLLM_CACHE is not set: `launch` is started by the job scripts")
    return Launcher(run, stage, attempt).main()


def _prepare_child() -> None:
    """In the child before exec: die with the launcher; ignore stop signals until handled.

    Ignored signals stay ignored through exec, so a signal that comes while the worker imports
    torch does not kill it.
    """
    die_with_parent()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
