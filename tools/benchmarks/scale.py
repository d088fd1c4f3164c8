"""What the control plane costs at 16 to 1,024 workers.

    python tools/benchmarks/scale.py [--workers 16,64,256,512] [--per-node 32] [--rounds 5]
        [--step-s 1.0]

Forks real launchers (relays) and workers (control planes) after one import, without the model's
arithmetic. All processes wait at a gate; the time to open begins when it opens. They write what
they measure into memory that all share:

    open      from the start of the relays until all workers have completed a first barrier
    agree     an agreement as a step pays for it: post the flags, and read those of the step before;
              the step's own work is a sleep of --step-s. Median over workers and steps, and the
              CPU time of a worker and of a launcher
    decide    an agreement that is waited for, as before a save
    save      what a save exchanges (data positions, verdicts, the files for the manifest)
    resume    what a resume exchanges (listing, manifest shares, faults, training state)

All workers share this machine's cores, so what is waited for grows with their number; on a cluster
each worker and each launcher has a core.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import mmap
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.context import ForkProcess
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slurmllm.core.display.tables import markdown_table
from slurmllm.core.run.artifact_records import CheckpointFile
from slurmllm.train.control.plane import ControlPlane
from slurmllm.train.control.relay import Position, Relay
from slurmllm.train.control.rendezvous import die_with_parent, free_port

_FLAGS = [0, 0, 0]  # `slurmllm.train.job.Job.post_flags`
SECRET = b"of this benchmark"
LIMIT_S = 600  # for one number of workers
Row = dict[str, float]
Table = npt.NDArray[np.float64]
_CPU_CLOCK = 2  # linux/posix-timers.h: CPUCLOCK_SCHED
_POSITION = {"version": 2, "corpus": "0" * 64, "tokenizer": "0" * 64, "epoch": 3}
# Key → title and format of a column.
COLUMNS = {
    "workers": ("workers", ".0f"),
    "open_s": ("open, s", ".2f"),
    "agree_ms": ("agree, ms", ".3f"),
    "agree_cpu_us": ("CPU, µs", ".0f"),
    "launcher_cpu_us": ("launcher, µs", ".0f"),
    "decide_ms": ("decide, ms", ".1f"),
    "save_ms": ("save, ms", ".1f"),
    "resume_ms": ("resume, ms", ".1f"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", default="16,64,256,512", help="numbers of workers")
    parser.add_argument("--per-node", type=int, default=32, help="workers a launcher")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-s", type=float, default=1.0, help="sleep in the place of a step")
    args = parser.parse_args()
    rows = []
    for workers in map(int, args.workers.split(",")):
        signal.alarm(LIMIT_S)  # ends this process, and with it all that it forked
        rows.append(row_of(workers, args.per_node, args.rounds, args.step_s))
        signal.alarm(0)
        print(f"{workers} workers done, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    cells = [[f"{row[key]:{form}}" for key, (_, form) in COLUMNS.items()] for row in rows]
    print(markdown_table([title for title, _ in COLUMNS.values()], cells), end="")


def row_of(workers: int, per_node: int, rounds: int, step_s: float) -> Row:
    begun, figures = measure(workers, per_node, rounds, step_s)
    return {
        "workers": workers,
        "open_s": figures.opened.max() - begun,
        "agree_ms": np.median(figures.step) * 1e3,
        "agree_cpu_us": np.median(figures.step_cpu) * 1e6,
        "launcher_cpu_us": figures.relay_cpu.max() * 1e6,
        "decide_ms": np.median(figures.decide) * 1e3,
        "save_ms": np.median(figures.save) * 1e3,
        "resume_ms": np.median(figures.resume) * 1e3,
    }


class Measured:
    """Tables in memory that the processes share; the last axis of most is the round."""

    def __init__(self, workers: int, nodes: int, rounds: int) -> None:
        self.opened = shared(workers)  # time.perf_counter() after the first barrier
        self.step = shared(workers, rounds)  # agreement within a step: post and read, s
        self.step_cpu = shared(workers)  # CPU time of a worker for it, s
        self.decide = shared(workers, rounds)  # agreement that is waited for, s
        self.save = shared(workers, rounds)
        self.resume = shared(workers, rounds)
        self.relay_cpu = shared(nodes)  # CPU time of a launcher for an agreement, s
        self.failed = shared(1)


def shared(*shape: int) -> Table:
    count = int(np.prod(shape))
    return np.frombuffer(mmap.mmap(-1, 8 * count), np.float64, count).reshape(shape)


def measure(workers: int, per_node: int, rounds: int, step_s: float) -> tuple[float, Measured]:
    """Run the control planes of so many workers; returns the time of the start too."""
    per_node = min(per_node, workers)
    if workers % per_node:
        raise SystemExit(f"--per-node {per_node} does not divide {workers} workers")
    nodes = workers // per_node
    figures = Measured(workers, nodes, rounds)
    names = tuple(f"n{index}" for index in range(nodes))
    root = "127.0.0.1", free_port()
    folder = Path(tempfile.mkdtemp(prefix="slurmllm-scale-"))
    ready, gate = Gate(), Gate()
    gc.freeze()  # no process copies the pages of what is imported
    launchers: list[ForkProcess] = []
    try:
        for index in range(nodes):
            position = Position(index, names, per_node)
            launch = partial(_launch, position, folder, root, ready, gate, figures, step_s)
            launchers.append(fork(launch))
        ready.close_write()
        ready.wait()  # until all processes have started
        begun = time.perf_counter()
        gate.close_write()
        for launcher in launchers:
            launcher.join()
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.join()
        for end in (ready, gate):
            end.close()
        shutil.rmtree(folder)
    if any(launcher.exitcode for launcher in launchers) or figures.failed[0]:
        raise SystemExit(f"{workers} workers: a process failed; see above")
    return begun, figures


class Gate:
    """A pipe at which processes wait until all that hold its other end have closed it."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def wait(self) -> None:
        os.read(self._read, 1)

    def close_write(self) -> None:
        if self._write >= 0:
            os.close(self._write)
            self._write = -1

    def close(self) -> None:
        self.close_write()
        os.close(self._read)


def fork(work: Callable[[], None], daemon: bool = False) -> ForkProcess:
    """Run a function in a process that ends with this one; of an error too, if it is a daemon."""

    def run() -> None:
        die_with_parent()
        work()

    process = ForkProcess(target=run, daemon=daemon)
    process.start()
    return process


def _launch(
    position: Position,
    folder: Path,
    root: tuple[str, int],
    ready: Gate,
    gate: Gate,
    figures: Measured,
    step_s: float,
) -> None:
    gate.close_write()
    path, local = folder / f"control-{position.index}", Gate()
    children = []
    # Before the relay's thread exists: a process forked later would have its sockets too.
    for rank in position.workers():

        def work(rank: int = rank) -> None:
            local.close_write()
            ready.close()
            gate.close()
            local.wait()
            local.close()
            _work(rank, position, path, figures, step_s)

        children.append(fork(work, daemon=True))
    ready.close_write()
    gate.wait()
    relay = Relay(position, path, root, SECRET)
    relay.start()
    local.close_write()
    for child in children:
        child.join()
    relay.close()
    if any(child.exitcode for child in children):
        figures.failed[0] = 1


def _work(rank: int, position: Position, path: Path, figures: Measured, step_s: float) -> None:
    world, rounds = len(position.names) * position.per_node, figures.step.shape[1]
    first = rank == position.workers()[0]  # it measures the launcher too
    relay_cpu = _cpu_clock(os.getppid())
    control = ControlPlane(rank, world, str(path), SECRET)
    control.barrier()
    figures.opened[rank] = time.perf_counter()
    control.barrier()
    _agree(control, figures, rank, step_s, position.index if first else None, relay_cpu)

    def decide() -> None:
        control.reduce(_FLAGS, "max")()

    exchanges: Sequence[tuple[Callable[[], None], Table]] = (
        (decide, figures.decide),
        (lambda: _save_decision(control), figures.save),
        (lambda: _resume_decision(control), figures.resume),
    )
    for exchange, table in exchanges:
        exchange()
        for index in range(rounds):
            control.barrier()
            begun = time.perf_counter()
            exchange()
            table[rank, index] = time.perf_counter() - begun
    control.barrier()
    control.close()


def _agree(
    control: ControlPlane,
    figures: Measured,
    rank: int,
    step_s: float,
    node: int | None,
    relay_cpu: Callable[[], float],
) -> None:
    """Agreements as steps make them: posted after a step, read after the next one."""
    rounds = figures.step.shape[1]
    flags = control.reduce(_FLAGS, "max")
    time.sleep(step_s)
    flags()
    flags = control.reduce(_FLAGS, "max")
    cpu_s, relay_s = 0.0, relay_cpu()
    for index in range(rounds):
        time.sleep(step_s)  # the step's own work
        begun, cpu = time.perf_counter(), time.thread_time()
        flags()
        flags = control.reduce(_FLAGS, "max")
        cpu_s += time.thread_time() - cpu
        figures.step[rank, index] = time.perf_counter() - begun
    figures.step_cpu[rank] = cpu_s / rounds
    if node is not None:
        figures.relay_cpu[node] = (relay_cpu() - relay_s) / rounds
    flags()
    control.barrier()


def _save_decision(control: ControlPlane) -> None:
    """What `checkpoint.save.Save` exchanges, with the files of a worker but without writing any."""
    control.gather(_POSITION)  # Job.train_state
    for _ in range(3):  # folder created, shards begun, files written
        control.first(None)
    file = CheckpointFile(path=f"shard_{control.rank:05d}.distcp", bytes=1 << 30, sha256="0" * 64)
    control.first(None)
    control.gather([file])
    control.first(None)  # published


def _resume_decision(control: ControlPlane) -> None:
    """What `checkpoint.resume.find_resumable` exchanges for one checkpoint that verifies."""
    control.broadcast(None if control.rank else ([100, 200, 300], {}, [], {}, []))
    control.first(None)
    ranks = range(0 if control.rank else control.world_size)
    names = (f"shard_{rank:05d}.distcp" for rank in ranks)
    control.broadcast([{"path": name, "bytes": 1 << 30, "sha256": "0" * 64} for name in names])
    faults: list[str] = []
    control.gather(faults)
    control.broadcast(faults)
    control.first(None)
    control.broadcast(_POSITION)


def _cpu_clock(pid: int) -> Callable[[], float]:
    """The CPU time of another process so far, s."""
    clock = (~pid << 3) | _CPU_CLOCK  # clock_getcpuclockid(3)
    return lambda: time.clock_gettime(ctypes.c_int(clock).value)


if __name__ == "__main__":
    main()
