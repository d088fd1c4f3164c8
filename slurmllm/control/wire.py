"""Connections of the control plane: how both ends prove who they are, and the frames they send.

Both ends first prove to each other that they know the secret of this start of the attempt, by an
HMAC of both their random challenges: a stranger, or a late worker of an earlier attempt, is
refused. Until then only a greeting of fixed length is read and nothing is unpickled.
"""

from __future__ import annotations

import hmac
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import IntEnum
from secrets import token_bytes
from typing import NamedTuple

from slurmllm.errors import NodeError

MAX_PAYLOAD_BYTES = 1 << 30
_HEADER = struct.Struct("!BQQ")  # kind, number of the operation, bytes of the payload
_CLAIM = struct.Struct("!BII")  # role, rank (of a worker) or index (of a node), workers of the run
_CHALLENGE = _PROOF = 32  # bytes
GREETING_BYTES = _CLAIM.size + _CHALLENGE + _PROOF
# Below glibc's threshold (128 KB) for memory that is mapped and unmapped at each use.
_RECEIVE_BYTES, _LONG_RECEIVE_BYTES = 1 << 16, 1 << 20
_JOINED_BYTES = 1 << 12  # payloads that are copied behind their header
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
    LISTENS = 18  # launcher → root: the port for the nodes below it
    PARENT = 19  # root → launcher: host and port of the node above it
    MISUSE = 20  # as FAULT; the cause is the code of the workers


FAULTS = (Kind.FAULT, Kind.MISUSE)


class Role(IntEnum):
    """Who connects."""

    WORKER = 1
    NODE = 2


class Claim(NamedTuple):
    """Who a peer is, proved by its greeting."""

    role: Role
    number: int  # rank of a worker, or place of a node in the attempt
    world_size: int


class Frame(NamedTuple):
    """A message, or a contribution to an operation, or its result."""

    kind: Kind
    number: int  # of the operation, from 0; 0 for other messages
    payload: bytes

    def encode(self) -> tuple[bytes, ...]:
        """Header and payload; a long payload stays the same object, for all that get it."""
        header = _HEADER.pack(self.kind, self.number, len(self.payload))
        if len(self.payload) <= _JOINED_BYTES:
            return (header + self.payload,)
        return header, self.payload


class Connection:
    """A socket that sends and receives frames, blocking or not.

    Attributes:
        messages: Frames sent and received.
        num_bytes: Bytes sent and received, headers included.
    """

    def __init__(self, peer: socket.socket) -> None:
        self.socket = peer
        self.messages = self.num_bytes = 0
        self._in = bytearray()
        self._missing = 0  # bytes of a frame that has arrived in part
        self._out: deque[memoryview] = deque()
        if peer.family == socket.AF_INET:
            for option in _TCP_OPTIONS:
                peer.setsockopt(*option)

    def queue(self, frame: Frame) -> None:
        """Send a frame as far as the socket takes it without waiting; OSError if it is closed."""
        self.queue_encoded(frame.encode())

    def queue_encoded(self, parts: tuple[bytes, ...]) -> None:
        self.messages += 1
        for part in parts:
            self.num_bytes += len(part)
            self._out.append(memoryview(part))
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
        """The frames that have arrived; waits for the first bytes if the socket blocks.

        Raises:
            ConnectionResetError: The other end is closed.
            NodeError: It sends what no worker does.
        """
        part = self.socket.recv(min(max(_RECEIVE_BYTES, self._missing), _LONG_RECEIVE_BYTES))
        if not part:
            raise ConnectionResetError("closed")
        self._in += part
        self.num_bytes += len(part)
        return list(self._frames())

    def receive_one(self) -> Frame:
        """Wait for one frame on a socket that blocks, if the other end sends no more than that."""
        while True:
            for frame in self.receive():
                return frame

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


class Guest:
    """A connection to a relay that has not proved yet that it is of this attempt."""

    def __init__(self, peer: socket.socket, deadline: float) -> None:
        self.deadline = deadline
        self._socket, self._greeting = peer, b""
        self._challenge = token_bytes(_CHALLENGE)
        peer.setblocking(False)
        peer.send(self._challenge)

    def greet(
        self, secret: bytes, world_size: int, refuse: Callable[[Claim], str | None]
    ) -> Claim | None:
        """Read the greeting; returns the peer's claim, None before the greeting is complete.

        Raises an OSError if the peer is not of this attempt, or `refuse` returns a reason.
        """
        part = self._socket.recv(GREETING_BYTES - len(self._greeting))
        self._greeting += part
        if not part:
            raise ConnectionResetError("closed")
        if len(self._greeting) < GREETING_BYTES:
            return None
        claim, proof = self._greeting[:-_PROOF], self._greeting[-_PROOF:]
        if not hmac.compare_digest(proof, _proof(secret, b"peer", self._challenge + claim)):
            raise ConnectionRefusedError("it does not know the secret of this attempt")
        role, number, claimed = _CLAIM.unpack_from(claim)
        if claimed != world_size:
            raise ConnectionRefusedError(f"it belongs to {claimed} workers, not {world_size}")
        found = Claim(Role(role), number, claimed)
        if (reason := refuse(found)) is not None:
            raise ConnectionRefusedError(reason)
        self._socket.send(_proof(secret, b"relay", self._challenge + claim))
        return found


def introduce(peer: socket.socket, claim: Claim, secret: bytes) -> None:
    """Prove to a relay that this peer is of its attempt, and have it prove the same.

    Raises an OSError, TimeoutError included, if it does not.
    """
    challenge = _read(peer, _CHALLENGE)
    own = _CLAIM.pack(*claim) + token_bytes(_CHALLENGE)
    peer.sendall(own + _proof(secret, b"peer", challenge + own))
    if not hmac.compare_digest(_read(peer, _PROOF), _proof(secret, b"relay", challenge + own)):
        raise ConnectionRefusedError("it does not know the secret of this attempt")


def _read(peer: socket.socket, length: int) -> bytes:
    found = b""
    while len(found) < length:
        part = peer.recv(length - len(found))
        if not part:
            raise ConnectionResetError("closed")
        found += part
    return found


def _proof(secret: bytes, role: bytes, text: bytes) -> bytes:
    return hmac.digest(secret, role + text, "sha256")
