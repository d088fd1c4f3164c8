"""Data workers: processes that tokenize ahead of training, and the pipes to them.

`WorkerProcess` starts one: `python -m slurmllm.data.prefetch`, which runs `main`. It is a new
interpreter instead of a fork: the parent has torch, device handles and threads, none of which
survive a fork. The worker does not import torch.

    stdin    pickled: the stream; then the positions; then nothing
    stdout   pickled, for each batch: positions and counts after it, tokens, marks; or an error
    stderr   inherited from the parent

A worker exits when its parent has exited: at the end of stdin, at a broken pipe, or when its parent
process id changes (other children of the parent may keep the pipes open).
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from slurmllm.core.errors import CodeError, NodeError, SlurmllmError, StorageError
from slurmllm.core.slurm.processes import end_child
from slurmllm.data.slots import SlotGroup
from slurmllm.data.sources import open_all
from slurmllm.data.sources.base import Integers, Marks, Tokens
from slurmllm.data.spec import StreamSpec

# Slurm and terminals send these to every process of a job. Workers ignore them: the parent decides
# when to stop, and needs batches until its current step is finished.
PARENT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_PARENT_POLL_S = 1.0
# Batches kept ready: enough to cover the tokenization of a few documents of megabytes.
PREFETCH_BATCHES = 8


class WorkerProcess:
    """One process that tokenizes ahead for consecutive slots (rows of the global batch).

    It starts immediately and imports its libraries while the parent does other work; it begins to
    read when `begin` sends the positions.
    """

    def __init__(self, spec: StreamSpec, slots: range) -> None:
        self.slots = slots
        # The worker must import the same modules as this process, however this one was started.
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
            # One thread per worker: thread pools of all workers would compete for the node's cores.
            "TOKENIZERS_PARALLELISM": "false",
            "RAYON_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        # Race: a signal to the whole job could kill a data worker before it ignores the signal.
        # Blocked signals stay blocked in the child, which unblocks them once it ignores them.
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, PARENT_SIGNALS)
        try:
            self._process = subprocess.Popen(
                # -P: a file in the current folder must not shadow a module.
                [sys.executable, "-P", "-m", "slurmllm.data.prefetch"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        assert self._process.stdin is not None
        assert isinstance(self._process.stdout, BufferedReader)
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        self.pid = self._process.pid
        # Kills the worker when this object is deleted or the interpreter exits.
        self._finalizer = weakref.finalize(self, end_child, self._process, os.getpid())
        self._send((spec, os.getpid()))

    def begin(self, positions: Sequence[Sequence[int]], counts: Sequence[int]) -> None:
        """Send `positions` and `counts` (sequences drawn so far) for `SlotGroup`."""
        self._send((self.slots, positions, counts))

    def next_batch(self) -> tuple[Integers, Integers, Tokens, Marks]:
        """Return the next batch as `SlotGroup` does; its errors are raised, NodeError or
        StorageError if it has ended.
        """
        try:
            message = pickle.load(self._stdout)  # noqa: S301 (its own child)
        except (EOFError, pickle.UnpicklingError):  # the second: cut off
            self._raise_exited()
        if isinstance(message, tuple):
            return message
        raise message

    def close(self) -> None:
        """Kill the process; it has no state to save."""
        self._finalizer()

    def _send(self, message: tuple[object, ...]) -> None:
        try:
            pickle.dump(message, self._stdin)
            self._stdin.flush()
        except BrokenPipeError:
            self._raise_exited()

    def _raise_exited(self) -> NoReturn:
        code = self._process.wait()
        if code == -signal.SIGBUS:
            raise StorageError(
                f"data worker (pid {self.pid}) was killed by SIGBUS: a corpus was truncated or "
                "overwritten while it was read, or its file system failed; restore the corpus and "
                "resume"
            )
        if code == -signal.SIGKILL:
            how = (
                "was killed by signal 9; the kernel kills processes when memory runs out: request "
                "more memory, or lower data.num_workers"
            )
        elif code < 0:
            how = f"was killed by signal {-code}"
        else:
            how = f"ended with exit code {code}; the log has its messages"
        raise NodeError(f"data worker (pid {self.pid}) {how}")


def main() -> NoReturn:
    for number in PARENT_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # The parent blocked them while it started this process; now they are ignored.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENT_SIGNALS)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that a stray print cannot break the messages

    spec, parent_pid = _receive()
    threading.Thread(target=_exit_with_parent, args=(parent_pid,), daemon=True).start()
    # Bounded: tokenizing pauses when it is this many batches ahead.
    outgoing: queue.Queue[object] = queue.Queue(maxsize=PREFETCH_BATCHES)
    threading.Thread(target=_write_messages, args=(out, outgoing), daemon=True).start()
    try:
        sources, _ = open_all(spec)
        group = SlotGroup(spec, sources, *_receive())
        # It exits this process at the end of stdin.
        threading.Thread(target=_receive, daemon=True).start()
        while True:
            outgoing.put(group.next_batch())
    except BaseException as error:
        is_ours = type(error).__module__ == SlurmllmError.__module__
        failure = CodeError(f"a data worker failed:\n{traceback.format_exc()}")
        outgoing.put(error if is_ours else failure)
    # The parent kills this process once it has read the failure.
    while True:
        time.sleep(_PARENT_POLL_S)


def _write_messages(out: BinaryIO, outgoing: queue.Queue[object]) -> None:
    try:
        while True:
            pickle.dump(outgoing.get(), out, pickle.HIGHEST_PROTOCOL)
            out.flush()
    except OSError:  # the parent closed its end
        os._exit(0)


def _receive() -> Any:
    """Return the next message of the parent; at the end of stdin, exit."""
    try:
        return pickle.load(sys.stdin.buffer)  # noqa: S301 (its own parent)
    except EOFError:
        # Not sys.exit: it would wait for `_write_messages`, which may be blocked on a full pipe.
        os._exit(0)


def _exit_with_parent(parent_pid: int) -> None:
    # The system gives an orphaned process another parent.
    while os.getppid() == parent_pid:
        time.sleep(_PARENT_POLL_S)
    os._exit(0)


if __name__ == "__main__":
    main()
