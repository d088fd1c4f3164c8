"""What the workers of a trainer print: written to their logs within limits, and looked at.

A thread reads the pipes of all workers of a node. A log gets the first MAX_LOG_BYTES of an attempt
and, at its end, the last lines; of a progress bar that overwrites itself, what it shows now and
then. A disk that refuses must not block the trainer: what it refuses is left out.
"""

from __future__ import annotations

import fcntl
import os
import re
import selectors
import threading
import time
from collections import deque
from contextlib import suppress

from slurmllm.launch.supervise.rank_logs import MAX_LOG_BYTES
from slurmllm.launch.supervise.trainer_command import OutputLine

_READ_BYTES = 1 << 20
_TAIL_BYTES = 64 << 10
_MOST_PENDING = 16 << 20  # of the rank that shows progress, until the launcher looks at it
_POLL_S = 0.2
_OVERWRITTEN = re.compile(rb"(?:[^\r\n]*\r(?!\n))+")


class _Stream:
    """The output of one worker."""

    def __init__(self, log: int, pipe: int) -> None:
        self.log = log
        self.pipe = pipe
        self.written = self.left_out = 0
        self.tail: deque[tuple[float, bytes]] = deque()  # with the Unix time of its arrival
        self.tail_bytes = 0
        self._next_bar = 0.0
        self._bar = b""
        self._last = b"\n"  # byte of the log

    def add(self, data: bytes) -> None:
        now = time.time()
        self.tail.append((now, data[-_TAIL_BYTES:]))
        self.tail_bytes += len(self.tail[-1][1])
        while self.tail_bytes - len(self.tail[0][1]) >= _TAIL_BYTES:
            self.tail_bytes -= len(self.tail.popleft()[1])
        data = self._bar + data
        self._bar = b""
        if b"\r" in data and now >= self._next_bar:
            self._next_bar = now + 5.0  # to the next text of a progress bar in the log
        elif b"\r" in data:
            data = _OVERWRITTEN.sub(b"\r", data)
            begin = data.rfind(b"\r")
            if data.find(b"\n", begin) < 0 and len(data) - begin < _TAIL_BYTES:
                data, self._bar = data[:begin], data[begin:]  # a bar's last text, so far
        self._write(data, max(MAX_LOG_BYTES - self.written, 0))

    def _write(self, data: bytes, room: int) -> None:
        begin = 0
        end = min(room, len(data))
        with suppress(OSError):
            while begin < end:
                begin += os.write(self.log, data[begin:end])
        self.written += begin
        self.left_out += len(data) - begin
        self._last = data[begin - 1 : begin] or self._last

    def lines(self) -> list[OutputLine]:
        lines = []
        tail = ""
        for arrived_at, data in list(self.tail):
            *whole, tail = re.split(r"[\r\n]+", tail + data.decode(errors="replace"))
            lines += [OutputLine(arrived_at, line) for line in whole]
        return [*lines, OutputLine(self.tail[-1][0], tail)] if tail else lines

    def close(self) -> None:
        self._write(self._bar, max(MAX_LOG_BYTES - self.written, 0))
        if self.left_out:
            last = b"".join(data for _, data in self.tail)[-_TAIL_BYTES:]
            note = b"\n[%d bytes left out]\n" % max(self.left_out - len(last), 0)
            self._write(note + last, len(note + last))
        if self._last != b"\n":  # rank 0 shares the log with what follows
            self._write(b"\n", 1)
        os.close(self.log)


class WorkerOutput:
    """The output of a node's workers, by rank; that of one of all ranks can be taken."""

    def __init__(self, printing: int) -> None:
        self._printing = printing
        self._streams: dict[int, _Stream] = {}
        self._selector = selectors.DefaultSelector()
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._lock = threading.Lock()  # of these two
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._read, name="output", daemon=True)
        self.printed = 0  # bytes of that rank

    def open(self, rank: int, log: int) -> int:
        """Return a descriptor for a worker's output, which goes to `log`; the caller closes it."""
        read, write = os.pipe()
        with suppress(OSError):  # beyond the user's limit
            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, _READ_BYTES)
        os.set_blocking(read, False)
        self._streams[rank] = _Stream(log, read)
        self._selector.register(read, selectors.EVENT_READ, rank)
        return write

    def start(self) -> None:
        self._thread.start()

    def lines(self, rank: int) -> list[OutputLine]:
        return self._streams[rank].lines()

    def take(self) -> bytes:
        """Return what that rank has printed since the last call."""
        with self._lock:
            parts = [*self._pending]
            self._pending.clear()
            self._pending_bytes = 0
        return b"".join(parts)

    def close(self) -> None:
        """Read what is left and end; a process that outlives its worker is not waited for."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()
        for stream in self._streams.values():
            stream.close()
            os.close(stream.pipe)
        self._streams = {}
        self._selector.close()

    def _read(self) -> None:
        while self._selector.get_map():
            ending = self._ending.is_set()
            ready = self._selector.select(0 if ending else _POLL_S)
            for key, _ in ready:
                self._read_stream(key.data, key.fd)
            if ending and not ready:
                return

    def _read_stream(self, rank: int, pipe: int) -> None:
        try:
            data = os.read(pipe, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(pipe)
            return
        self._streams[rank].add(data)
        if rank == self._printing:
            self.printed += len(data)
            with self._lock:
                self._pending.append(data)
                self._pending_bytes += len(data)
                while self._pending_bytes > _MOST_PENDING:
                    self._pending_bytes -= len(self._pending.popleft())
