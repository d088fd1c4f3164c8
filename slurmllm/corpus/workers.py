"""Shards in processes of this machine.

A worker is a fresh interpreter that takes one shard after the other from its standard input and
answers on its standard output. It dies with the process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import queue
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slurmllm import errors
from slurmllm.corpus.shard import Shard, write_shard
from slurmllm.corpus.work_folder import WorkFolder
from slurmllm.errors import CodeError, NodeError, SlurmError
from slurmllm.slurm.arrays import (
    MOST_TASKS,
    Resources,
    SlurmOptions,
    array_of,
    cancel,
    submit_array,
)

if TYPE_CHECKING:
    from pathlib import Path


_POLL_S = 0.3
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# Called with the bytes read so far of each shard that is being written.
Report = Callable[[Mapping[str, int]], None]


def run_here(shards: Sequence[Shard], work: WorkFolder, report: Report) -> Iterator[ShardResult]:
    """Write shards in this process."""

    def run(shard: Shard) -> ShardResult:
        return run_shard(shard, work.path, lambda done: report({shard.name: done}))

    yield from map(run, shards)


def run_locally(
    shards: Sequence[Shard], work: WorkFolder, workers: int, report: Report
) -> Iterator[ShardResult]:
    """Write shards in several processes.

    Args:
        shards: What to write.
        work: The work folder.
        workers: How many processes.
        report: Called a few times a second.

    Yields:
        How each shard ended, in the order they do.

    Raises:
        NodeError: a worker was killed.
        CodeError: a worker failed of itself.
    """
    free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(workers))
        for _ in range(workers):
            # Started by this thread: a process dies with the thread that started it.
            free.put(stack.enter_context(_Worker(work)))
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)

        def on_a_free_one(shard: Shard) -> ShardResult:
            worker = free.get()
            try:
                return worker.run(shard)
            finally:
                free.put(worker)

        waiting = {threads.submit(on_a_free_one, shard) for shard in shards}
        while waiting:
            done, waiting = wait(waiting, _POLL_S, FIRST_COMPLETED)
            report(work.running())
            for future in done:
                yield future.result()


class _Worker:
    def __init__(self, work: WorkFolder) -> None:
        self._work = work

    def __enter__(self) -> _Worker:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def run(self, shard: Shard) -> ShardResult:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump((shard, self._work.path), self._process.stdin)
            self._process.stdin.flush()
            outcome: ShardResult = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
            raise self._lost(shard) from error
        return outcome

    def _lost(self, shard: Shard) -> Exception:
        code = self._process.wait()
        first = shard.files[0].name
        where = f"shard {shard.name} ({first}" + (
            f" and {len(shard.files) - 1} files after it)" if len(shard.files) > 1 else ")"
        )
        if code < 0:
            name = signal.Signals(-code).name
            return NodeError(
                f"the process that read {where} was killed by {name}; the usual cause is a "
                "machine without memory: see `dmesg`, or lower --workers. Finished shards are "
                "kept: the same command goes on from them"
            )
        return CodeError(f"the process that read {where} ended with exit code {code}: see above")


def _serve() -> None:
    """The worker: shards come in, outcomes go out."""
    with contextlib.suppress(OSError, AttributeError):  # another system than Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        return  # it died before that
    # Ctrl-C reaches the whole process group; who started this process decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            shard, work = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(run_shard(shard, work), sys.stdout.buffer)
        sys.stdout.buffer.flush()


_POLL_S_SLURM_WORKERS = 1.0
# What a task takes, at least, so that it reads for longer than it waits: a few shards.
_TASKS_PER_WORKER = 4


def run_on_slurm(
    shards: Sequence[Shard],
    work: WorkFolder,
    workers: int,
    options: SlurmOptions,
    report: Report,
    on_note: Callable[[str], None],
) -> Iterator[ShardResult]:
    """Write shards in the jobs of one array; it is cancelled when this ends early.

    Args:
        shards: What to write.
        work: The work folder, on a file system that the nodes share.
        workers: Jobs at a time.
        options: How they are submitted.
        report: Called every second.
        on_note: Called with the job's id.

    Yields:
        How each shard ended, in the order they do.

    Raises:
        SlurmError: Slurm refused the jobs, or one of them failed.
    """
    count = min(len(shards), workers * _TASKS_PER_WORKER, MOST_TASKS)
    parts = [list(shards[index::count]) for index in range(count)]
    jobs = submit_array(
        run_shards,
        [(part, work.path) for part in parts],
        logs=work.logs,
        name="slurmllm-data",
        at_once=workers,
        options=options,
        resources=Resources(cpus=1),
        what="the jobs that read the inputs",
        instead="read them on this machine without --slurm",
    )
    array = array_of(jobs)
    on_note(f"Slurm job {array}: {len(shards):,} shards in {count:,} tasks, {workers:,} at a time")
    waiting = dict(zip(jobs, parts, strict=True))
    try:
        while waiting:
            time.sleep(_POLL_S_SLURM_WORKERS)
            report(work.running())
            for job in [job for job in waiting if job.done()]:
                del waiting[job]
                yield from _outcomes(job)
    finally:
        if waiting:
            cancel(array)


def run_shards(shards: Sequence[Shard], work: Path) -> list[ShardResult]:
    """What one job does: some shards, up to the first error."""
    outcomes = []
    for shard in shards:
        outcomes.append(run_shard(shard, work))
        if outcomes[-1].error is not None:
            break
    return outcomes


def _outcomes(job: Any) -> list[ShardResult]:
    import submitit

    try:
        outcomes: list[ShardResult] = job.result()
    except (submitit.core.utils.UncompletedJobError, submitit.core.utils.FailedJobError) as error:
        log = job.paths.stderr
        raise SlurmError(
            f"Slurm job {job.job_id}, which read inputs, ended as {job.state}; "
            f"{f'its log is {log}' if log.exists() else 'it never began'}. Finished shards are "
            "kept: the same command goes on from them"
        ) from error
    return outcomes


class ShardResult(NamedTuple):
    """How a shard ended; plain values, for it crosses to another process.

    Attributes:
        shard: Its name.
        error: Class and message of the error that stopped it, None where it is written.
        process: Its id.
        peak_bytes: The most memory that the process has had so far (resident set).
    """

    shard: str
    error: tuple[str, str] | None
    process: int
    peak_bytes: int

    def raise_error(self) -> None:
        """Raise the error, if there was one."""
        if self.error is not None:
            name, message = self.error
            raise getattr(errors, name)(message)


def run_shard(
    shard: Shard, work: Path, on_progress: Callable[[int], None] | None = None
) -> ShardResult:
    """Write a shard.

    Args:
        shard: The shard.
        work: The work folder.
        on_progress: Called with the bytes read; where left out, a file says how many.
    """
    error = None
    try:
        write_shard(shard, WorkFolder(work), on_progress)
    except errors.SlurmllmError as fault:
        error = (type(fault).__name__, str(fault))
    return ShardResult(shard.name, error, os.getpid(), peak_bytes())


def peak_bytes() -> int:
    """The most memory that this process has had (resident set)."""
    # Not getrusage: its figure is at least what the process was forked from had.
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # another system than Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


if __name__ == "__main__":
    # Results are pickled: their class must be this module's, not that of `__main__`.
    from slurmllm.corpus import workers

    workers._serve()
