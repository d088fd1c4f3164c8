"""Connections of the control plane, and the frames that they carry."""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

from slurmllm.errors import NodeError

MAX_PAYLOAD_BYTES = 1 << 30
_HEADER = struct.Struct("!BQQ")  # kind, number of the operation, bytes of the payload
# Below glibc's threshold (128 KB) for memory that is mapped and unmapped at each use.
_RECEIVE_BYTES, _LONG_RECEIVE_BYTES = 1 << 16, 1 << 20
# A machine that loses power closes no connection, and a firewall may drop packets: keep-alive
# detects both after half a minute, TCP_USER_TIMEOUT if data are in flight.
_TCP_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 35_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class Kind(IntEnum):
    """The kinds of frames: operations that all workers call in the same order, and messages."""

    SUM = 1
    MAX = 2
    MIN = 3
    FIRST = 4
    GATHER = 5
    BROADCAST = 6
    SCATTER = 7
    FAULT = 16  # the payload is why no operation can complete any more
    LEAVE = 17  # the sender ends as planned
    MISUSE = 18  # as FAULT; the cause is the code of the workers


FAULTS = (Kind.FAULT, Kind.MISUSE)


class Frame(NamedTuple):
    """A message, or a contribution to an operation, or its result."""

    kind: Kind
    number: int  # of the operation, from 0; 0 for other messages
    payload: bytes

    def encode(self) -> bytes:
        return _HEADER.pack(self.kind, self.number, len(self.payload)) + self.payload


class Connection:
    """A socket that sends and receives frames, blocking or not."""

    def __init__(self, peer: socket.socket) -> None:
        self.socket = peer
        self.messages = self.num_bytes = 0  # sent and received, headers included
        self._in = bytearray()
        self._missing = 0  # bytes of a frame that has arrived in part
        self._out: deque[memoryview] = deque()
        if peer.family == socket.AF_INET:
            for option in _TCP_OPTIONS:
                peer.setsockopt(*option)

    def queue(self, frame: Frame) -> None:
        """Send a frame as far as the socket takes it without waiting; OSError if it is closed."""
        self.queue_encoded(frame.encode())

    def queue_encoded(self, frame: bytes) -> None:
        self.messages += 1
        self.num_bytes += len(frame)
        self._out.append(memoryview(frame))
        self.flush()

    def flush(self) -> None:
        with suppress(BlockingIOError):
            while self._out:
                part = self._out[0]
                sent = self.socket.send(part)
                if sent == len(part):
                    self._out.popleft()
                else:
                    self._out[0] = part[sent:]

    @property
    def unsent(self) -> bool:
        return bool(self._out)

    def receive(self) -> list[Frame]:
        """Return the frames that have arrived; waits for the first bytes if the socket blocks.

        Raises a ConnectionResetError if the other end is closed, a NodeError if it sends what no
        worker does.
        """
        part = self.socket.recv(min(max(_RECEIVE_BYTES, self._missing), _LONG_RECEIVE_BYTES))
        if not part:
            raise ConnectionResetError("closed")
        self._in += part
        self.num_bytes += len(part)
        return list(self._frames())

    def _frames(self) -> Iterator[Frame]:
        while len(self._in) >= _HEADER.size:
            kind, number, length = _HEADER.unpack_from(self._in)
            if length > MAX_PAYLOAD_BYTES:
                raise NodeError(f"a message of {length} bytes, which no worker sends")
            end = _HEADER.size + length
            self._missing = max(0, end - len(self._in))
            if self._missing:
                return
            with memoryview(self._in) as view:
                payload = bytes(view[_HEADER.size : end])
            del self._in[:end]
            self.messages += 1
            yield Frame(Kind(kind), number, payload)
