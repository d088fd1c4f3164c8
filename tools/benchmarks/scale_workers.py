"""Forked launchers and workers, each with its part of the control plane, and what they measure.

All processes are forked after one import and wait at a gate; the time to open begins when it opens.
Launchers run their relay in a thread, as `slurmllm.supervise.workers` does; workers are children of
their launcher and connect to it. They write what they measure into memory that all share.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slurmllm.control.plane import ControlPlane
from slurmllm.control.relay import Position, Relay
from slurmllm.control.rendezvous import die_with_parent, free_port
from slurmllm.run.artifact_records import CheckpointFile
from slurmllm.train.agreement import Agreement, Flags

SECRET = b"of this benchmark"
Table = npt.NDArray[np.float64]
_CPU_CLOCK = 2  # linux/posix-timers.h: CPUCLOCK_SCHED
_POSITION = {"version": 2, "corpus": "0" * 64, "tokenizer": "0" * 64, "epoch": 3}


class Measured:
    """Tables in memory that the processes share; the last axis of most is the round."""

    def __init__(self, workers: int, nodes: int, rounds: int) -> None:
        self.opened = shared(workers)  # time.perf_counter() after the first barrier
        self.open_cpu = shared(workers)  # CPU time of a worker until then, s
        self.step = shared(workers, rounds)  # agreement within a step: post and read, s
        self.step_cpu = shared(workers)  # CPU time of a worker for it, s
        self.decide = shared(workers, rounds)  # agreement that is waited for, s
        self.save = shared(workers, rounds)
        self.resume = shared(workers, rounds)
        self.traffic = shared(workers, 2)  # messages and bytes of an agreement
        self.files = shared(workers, 2)  # sockets and descriptors
        self.relay_files = shared(nodes, 2)
        self.relay_cpu = shared(nodes)  # CPU time of a launcher for an agreement, s
        self.relay_open_cpu = shared(nodes)  # until the first barrier, s
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
    found = Measured(workers, nodes, rounds)
    names = tuple(f"n{index}" for index in range(nodes))
    root = "127.0.0.1", free_port()
    folder = Path(tempfile.mkdtemp(prefix="slurmllm-scale-"))
    ready, gate = Gate(), Gate()
    gc.freeze()  # no process copies the pages of what is imported
    launchers = []
    try:
        for index in range(nodes):
            position = Position(index, names, per_node)

            def launch(position: Position = position) -> None:
                gate.close_write()
                _launch(position, folder, root, ready, gate, found, step_s)

            launchers.append(fork(launch))
        ready.close_write()
        ready.wait()  # until all processes have started
        begun = time.perf_counter()
        gate.close_write()
        codes = [os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]) for one in launchers]
        launchers.clear()
    finally:
        for one in launchers:
            os.kill(one, signal.SIGKILL)
            os.waitpid(one, 0)
        for end in (ready, gate):
            end.close()
        shutil.rmtree(folder)
    if any(codes) or found.failed[0]:
        raise SystemExit(f"{workers} workers: a process failed; see above")
    return begun, found


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


def fork(work: Callable[[], None]) -> int:
    """Run a function in a process of its own, which ends with this one; returns its id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent()
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _launch(
    position: Position,
    folder: Path,
    root: tuple[str, int],
    ready: Gate,
    gate: Gate,
    found: Measured,
    step_s: float,
) -> None:
    path, local = folder / f"control-{position.index}", Gate()
    before = len(_descriptors())
    children = []
    # Before the relay's thread exists: a process forked later would have its sockets too.
    for rank in position.workers():

        def work(rank: int = rank) -> None:
            local.close_write()
            ready.close()
            gate.close()
            local.wait()
            local.close()
            _work(rank, position, path, found, step_s)

        children.append(fork(work))
    ready.close_write()
    gate.wait()
    relay = Relay(position, path, root, SECRET)
    relay.start()
    local.close_write()
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    relay.close()
    found.relay_files[position.index] -= (0, before)
    if any(codes):
        found.failed[0] = 1


def _work(rank: int, position: Position, path: Path, found: Measured, step_s: float) -> None:
    world, rounds = position.world_size, found.step.shape[1]
    first = rank == position.workers()[0]  # it measures the launcher too
    relay_cpu = _cpu_clock(os.getppid())
    base = time.thread_time(), relay_cpu(), len(_descriptors())
    control = ControlPlane(rank, world, str(path), SECRET)
    control.barrier()
    found.opened[rank] = time.perf_counter()
    found.open_cpu[rank] = time.thread_time() - base[0]
    own = _descriptors()
    found.files[rank] = sum(name.startswith("socket:") for name in own), len(own)
    control.barrier()
    if first:
        found.relay_open_cpu[position.index] = relay_cpu() - base[1]
        files = _descriptors(os.getppid())
        sockets = sum(name.startswith("socket:") for name in files)
        found.relay_files[position.index] += (sockets, len(files))
    _agree(control, found, rank, step_s, position.index if first else None, relay_cpu)
    agreement = Agreement(control)

    def decide() -> None:
        agreement.post(Flags())
        agreement.read()

    exchanges: Sequence[tuple[Callable[[], None], Table]] = (
        (decide, found.decide),
        (lambda: _save_decision(control), found.save),
        (lambda: _resume_decision(control), found.resume),
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
    found: Measured,
    rank: int,
    step_s: float,
    node: int | None,
    relay_cpu: Callable[[], float],
) -> None:
    """Agreements as steps make them: posted after a step, read after the next one."""
    agreement, rounds = Agreement(control), found.step.shape[1]
    agreement.post(Flags())
    time.sleep(step_s)
    agreement.read()
    agreement.post(Flags())
    cpu_s, relay_s, sent = 0.0, relay_cpu(), control.traffic
    for index in range(rounds):
        time.sleep(step_s)  # the step's own work
        begun, cpu = time.perf_counter(), time.thread_time()
        agreement.read()
        agreement.post(Flags())
        cpu_s += time.thread_time() - cpu
        found.step[rank, index] = time.perf_counter() - begun
    found.step_cpu[rank] = cpu_s / rounds
    found.traffic[rank] = (np.array(control.traffic) - sent) / rounds
    if node is not None:
        found.relay_cpu[node] = (relay_cpu() - relay_s) / rounds
    agreement.read()
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
    world, shares = control.world_size, None
    control.broadcast(None if control.rank else ([100, 200, 300], {}, [], {}, []))
    if control.rank == 0:
        shares = [
            [CheckpointFile(path=f"shard_{rank:05d}.distcp", bytes=1 << 30, sha256="0" * 64)]
            for rank in range(world)
        ]
    control.scatter(shares)
    faults: list[str] = []
    control.gather(faults)
    control.broadcast(faults)
    control.first(None)
    control.broadcast(_POSITION)


def _cpu_clock(pid: int) -> Callable[[], float]:
    """The CPU time of another process so far, s."""
    clock = (~pid << 3) | _CPU_CLOCK  # clock_getcpuclockid(3)
    return lambda: time.clock_gettime(ctypes.c_int(clock).value)


def _descriptors(pid: int | None = None) -> list[str]:
    """What each open descriptor refers to."""
    found = []
    for link in Path(f"/proc/{pid or 'self'}/fd").iterdir():
        with suppress(OSError):  # the one that lists them
            found.append(str(link.readlink()))
    return found


@contextmanager
def deadline(limit_s: int) -> Iterator[None]:
    """End this process, and with it all that it forked, if the block takes too long."""
    signal.alarm(limit_s)
    try:
        yield
    finally:
        signal.alarm(0)
