"""Processes that write shards: this one, workers on this machine, or the tasks of a Slurm array.

A local worker is a new interpreter that reads one pickled (shard, work folder) after the other
from its standard input and writes a pickled ShardResult to its standard output for each. It dies
with the process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import queue
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from slurmllm.core.errors import CodeError, NodeError, SlurmError, SlurmllmError
from slurmllm.core.slurm.arrays import (
    MOST_TASKS,
    FailedJob,
    Resources,
    SlurmOptions,
    array_of,
    finished_jobs,
    submit_array,
)
from slurmllm.data.corpus.shard import Shard, write_shard
from slurmllm.data.corpus.work_folder import WorkFolder

_LOCAL_POLL_S = 0.3
# At most 4 array tasks per worker: each writes several shards, so queueing does not dominate.
_TASKS_PER_WORKER = 4
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# Called with the bytes read so far of each shard that is being written.
Report = Callable[[Mapping[str, int]], None]


class ShardResult(NamedTuple):
    """How a shard ended."""

    shard: str
    error: SlurmllmError | None  # that stopped it
    process: int
    peak_bytes: int  # largest resident set of that process so far


def run_shard(
    shard: Shard, work: Path, on_progress: Callable[[int], None] | None = None
) -> ShardResult:
    """Write a shard in this process; see `write_shard`."""
    failure = None
    try:
        write_shard(shard, WorkFolder(work), on_progress)
    except SlurmllmError as error:
        failure = error
    return ShardResult(shard.name, failure, os.getpid(), peak_bytes())


def peak_bytes() -> int:
    """Return the largest resident set of this process so far."""
    # Not getrusage: a child inherits the maximum of the process that forked it.
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(peak[1]) * 1024 if peak else 0


def run_locally(
    shards: Sequence[Shard], work: WorkFolder, workers: int, report: Report
) -> Iterator[ShardResult]:
    """Write shards in worker processes; yields their results as they end."""
    idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(workers))
        for _ in range(workers):
            # In this thread, not the pool's: PDEATHSIG is sent when the parent's thread ends.
            idle.put(stack.enter_context(_worker()))
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)

        def run(shard: Shard) -> ShardResult:
            worker = idle.get()
            try:
                return _run_in(worker, shard, work)
            finally:
                idle.put(worker)

        pending = {threads.submit(run, shard) for shard in shards}
        while pending:
            done, pending = wait(pending, _LOCAL_POLL_S, FIRST_COMPLETED)
            report(work.running())
            for future in done:
                yield future.result()


@contextlib.contextmanager
def _worker() -> Iterator[subprocess.Popen[bytes]]:
    """Start a worker process on this machine, and kill it at the end."""
    # -P: not the modules of the working directory, which may be another user's.
    command = [sys.executable, "-P", "-m", __name__, str(os.getpid())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        with contextlib.suppress(BrokenPipeError), process:  # closes the pipes
            process.wait()


def _run_in(process: subprocess.Popen[bytes], shard: Shard, work: WorkFolder) -> ShardResult:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        pickle.dump((shard, work.path), process.stdin)
        process.stdin.flush()
        result: ShardResult = pickle.load(process.stdout)  # noqa: S301 (its own child)
    except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
        code = process.wait()
        more_files = f" and {len(shard.files) - 1} more files" if len(shard.files) > 1 else ""
        reader = f"the process that read shard {shard.name} ({shard.files[0].name}{more_files})"
        if code >= 0:
            raise CodeError(f"{reader} ended with exit code {code}: see above") from error
        raise NodeError(
            f"{reader} was killed by {signal.Signals(-code).name}; the usual cause is that the "
            "machine is out of memory: see `dmesg`, or lower --workers. Finished shards are kept; "
            "run the same command again to continue"
        ) from error
    return result


def _serve() -> None:
    """Read shards from stdin to its end, and write their results to stdout."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        return  # the parent died before prctl
    # Ctrl-C goes to the whole process group; the parent alone decides how to end its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            shard, work = pickle.load(sys.stdin.buffer)  # noqa: S301 (its own parent)
        except EOFError:
            return
        pickle.dump(run_shard(shard, work), sys.stdout.buffer)
        sys.stdout.buffer.flush()


def run_on_slurm(
    shards: Sequence[Shard],
    work: WorkFolder,
    workers: int,
    options: SlurmOptions,
    report: Report,
    on_note: Callable[[str], None],
) -> Iterator[ShardResult]:
    """Write shards in the tasks of a job array, `workers` at a time; yields results as they end.

    The array is cancelled if this ends early. `work` is on a file system that the nodes share.
    """
    count = min(len(shards), workers * _TASKS_PER_WORKER, MOST_TASKS)
    parts = [list(shards[index::count]) for index in range(count)]
    jobs = submit_array(
        run_shards,
        [(job, work.path) for job in parts],
        logs=work.logs,
        name="slurmllm-data",
        at_once=workers,
        options=options,
        resources=Resources(cpus=1),
        description="the jobs that read the inputs",
        alternative="read them on this machine without --slurm",
    )
    on_note(
        f"Slurm job {array_of(jobs)}: {len(shards):,} shards in {count:,} tasks, {workers:,} at a "
        "time"
    )
    with contextlib.closing(finished_jobs(jobs, lambda: report(work.running()))) as finished:
        for job_id, _, results in finished:
            if isinstance(results, FailedJob):
                raise SlurmError(
                    f"Slurm job {job_id}, which read inputs, {results.how}. Finished shards are "
                    "kept; run the same command again to continue"
                )
            yield from results


def run_shards(shards: Sequence[Shard], work: Path) -> list[ShardResult]:
    """Write shards up to the first error, as a task of the array."""
    results = []
    for shard in shards:
        results.append(run_shard(shard, work))
        if results[-1].error is not None:
            break
    return results


if __name__ == "__main__":
    # Not _serve() of this module: its results would be pickled as `__main__.ShardResult`, which
    # the parent does not have.
    from slurmllm.data.corpus import workers

    workers._serve()
