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
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

from slurmllm.data.build.run_shard import Outcome, run_shard
from slurmllm.data.build.shards import Shard
from slurmllm.data.build.work import WorkFolder
from slurmllm.errors import CodeError, NodeError

_POLL_S = 0.3
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# Called with the bytes read so far of each shard that is being written.
Report = Callable[[Mapping[str, int]], None]


def run_here(shards: Sequence[Shard], work: WorkFolder, report: Report) -> Iterator[Outcome]:
    """Write shards in this process."""

    def run(shard: Shard) -> Outcome:
        return run_shard(shard, work.path, lambda done: report({shard.name: done}))

    yield from map(run, shards)


def run_locally(
    shards: Sequence[Shard], work: WorkFolder, workers: int, report: Report
) -> Iterator[Outcome]:
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

        def on_a_free_one(shard: Shard) -> Outcome:
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

    def run(self, shard: Shard) -> Outcome:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump((shard, self._work.path), self._process.stdin)
            self._process.stdin.flush()
            outcome: Outcome = pickle.load(self._process.stdout)
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


if __name__ == "__main__":
    _serve()
