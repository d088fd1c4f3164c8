"""The parent's side of `worker`: start, read, and end the processes that tokenize ahead."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from slurmllm import errors
from slurmllm.data.sources.base import Integers, Marks, Tokens
from slurmllm.data.spec import StreamSpec
from slurmllm.data.worker import BATCH, FRAME, PARENT_SIGNALS
from slurmllm.errors import CodeError, NodeError, StorageError

# Batches that a worker keeps ready: enough to cover a few documents of megabytes.
PREFETCH_BATCHES = 8


class WorkerProcess:
    """One process that tokenizes ahead for consecutive slots.

    It starts at once and loads its libraries while the parent does other things; it begins to
    read when `begin` tells it where.

    Args:
        spec: What to read.
        slots: The slots it serves.
    """

    def __init__(self, spec: StreamSpec, slots: range) -> None:
        self.slots = slots
        self._process = _start()
        # Ends the process with this object, and with the interpreter.
        self._finalizer = weakref.finalize(self, _end, self._process, os.getpid())
        self._tell(
            {
                "spec": spec.to_json(),
                "prefetch": PREFETCH_BATCHES,
                "parent_pid": os.getpid(),
            }
        )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def begin(self, positions: Sequence[Sequence[int]], counts: Sequence[int]) -> None:
        """Tell the worker where each of its slots begins, and the draws so far; see `SlotGroup`."""
        slots = [self.slots.start, self.slots.stop]
        self._tell({"slots": slots, "positions": positions, "counts": counts})

    def next_batch(
        self, tokens: Tokens, marks: Marks, positions: Integers, counts: Integers
    ) -> None:
        """Fill this worker's rows.

        Args:
            tokens: [slots, seq_len + 1].
            marks: [slots, seq_len + 1].
            positions: After the batch, [slots, 3 * corpora].
            counts: After the batch, [corpora].

        Raises:
            SlurmllmError: what the worker met with.
            NodeError: the worker ended without a word.
            StorageError: a corpus was cut under its hands.
        """
        header = bytearray(FRAME.size)
        self._read(memoryview(header))
        kind, length = FRAME.unpack(header)
        if kind == BATCH:
            assert length == len(tokens), "a worker answers for the slots it was given"
            for part in (positions, counts, tokens, marks):
                self._read(part.data.cast("B"))
            return
        content = bytearray(length)
        self._read(memoryview(content))
        _raise(json.loads(content))

    def close(self) -> None:
        """End the process; it holds nothing worth saving."""
        self._finalizer()

    def _tell(self, message: dict[str, object]) -> None:
        stream = _stream(self._process.stdin)
        try:
            stream.write(json.dumps(message).encode() + b"\n")
            stream.flush()
        except BrokenPipeError:
            self._ended()

    def _read(self, into: memoryview) -> None:
        stream = _stream(self._process.stdout)
        while into.nbytes:
            count = stream.readinto(into)  # type: ignore[attr-defined]
            if not count:
                self._ended()
            into = into[count:]

    def _ended(self) -> None:
        code = self._process.wait()
        if code == -signal.SIGBUS:
            raise StorageError(
                f"the process that reads the data (pid {self.pid}) met the end of a file in the "
                "middle of it: a corpus was cut or overwritten while it was read, or its file "
                "system failed; put the corpus back and resume"
            )
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise NodeError(
            f"the process that tokenizes ahead (pid {self.pid}) {how}; the kernel kills so when "
            "memory runs out: ask for more memory, or lower data.num_workers"
        )


def _start() -> subprocess.Popen[bytes]:
    # The same imports as here, from whatever this process was started with.
    paths = [path or str(Path.cwd()) for path in sys.path]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        # One worker is one thread: pools of every worker of a node would fight for its cores.
        "TOKENIZERS_PARALLELISM": "false",
        "RAYON_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    # Blocked signals stay blocked in the child until it ignores them: no moment is left in which
    # a signal to the whole job would kill a worker that is just starting.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PARENT_SIGNALS)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "slurmllm.data.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(process: subprocess.Popen[bytes], owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return  # a fork of the owner must not end the owner's worker
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None, "both ends were asked for as pipes"
    return stream


def _raise(failure: dict[str, str]) -> None:
    known = getattr(errors, failure["error"] or "none", None)
    if isinstance(known, type) and issubclass(known, errors.SlurmllmError):
        raise known(failure["message"])
    raise CodeError(f"the process that tokenizes ahead failed:\n{failure['traceback']}")
