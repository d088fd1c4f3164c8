"""Connections of the control plane: authentication, frames, and how relays combine messages.

Both ends prove by one HMAC of both their nonces that they belong to this start of the attempt.

Contributions to an operation are bytes, and relays unpickle none of them:

    SUM, MAX, MIN   a JSON list of numbers, element by element
    GATHER          the workers' values in the order of their ranks; only rank 0 gets them
    BROADCAST       the value of one worker; nothing from the others
"""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import IntEnum
from secrets import token_bytes
from typing import Any, NamedTuple

from slurmllm.core.errors import NodeError

MAX_PAYLOAD_BYTES = 1 << 30
_HEADER = struct.Struct("!BQQ")  # kind, number of the operation, bytes of the payload
# Below glibc's threshold (128 KB) for memory that is mapped and unmapped at each use.
_RECEIVE_BYTES = 1 << 16
_LONG_RECEIVE_BYTES = 1 << 20
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
    GATHER = 5
    BROADCAST = 6
    FAULT = 16  # the payload is why no operation can complete any more
    LEAVE = 17  # the sender ends as planned
    MISUSE = 18  # as FAULT; the cause is the code of the workers


FAULTS = (Kind.FAULT, Kind.MISUSE)
_REDUCTIONS: dict[Kind, Callable[[Iterable[Any]], Any]]
_REDUCTIONS = {Kind.SUM: sum, Kind.MAX: max, Kind.MIN: min}


class Frame(NamedTuple):
    """A message, or a contribution to an operation, or its result."""

    kind: Kind
    number: int  # of the operation, from 0; 0 for other messages
    payload: bytes

    def encode(self) -> bytes:
        return _HEADER.pack(self.kind, self.number, len(self.payload)) + self.payload


class Connection:
    """A socket that sends and receives frames, blocking or not."""

    _missing = 0  # bytes of a frame that has arrived in part

    def __init__(self, peer: socket.socket) -> None:
        self.socket = peer
        self._in = bytearray()
        self.unsent: deque[memoryview] = deque()
        if peer.family == socket.AF_INET:
            for option in _TCP_OPTIONS:
                peer.setsockopt(*option)

    def queue(self, frame: bytes) -> None:
        """Send a frame as far as the socket takes it without waiting; OSError if it is closed."""
        self.unsent.append(memoryview(frame))
        self.flush()

    def flush(self) -> None:
        with suppress(BlockingIOError):
            while self.unsent:
                chunk = self.unsent[0]
                num_sent = self.socket.send(chunk)
                if num_sent == len(chunk):
                    self.unsent.popleft()
                else:
                    self.unsent[0] = chunk[num_sent:]

    def receive(self) -> list[Frame]:
        """Return the frames that have arrived; waits for the first bytes if the socket blocks.

        Raises a ConnectionResetError if the other end is closed, a NodeError if it sends what no
        worker does.
        """
        chunk = self.socket.recv(min(max(_RECEIVE_BYTES, self._missing), _LONG_RECEIVE_BYTES))
        if not chunk:
            raise ConnectionResetError("closed")
        self._in += chunk
        frames = []
        while len(self._in) >= _HEADER.size:
            kind, number, length = _HEADER.unpack_from(self._in)
            if length > MAX_PAYLOAD_BYTES:
                raise NodeError(f"a message of {length} bytes, which no worker sends")
            end = _HEADER.size + length
            self._missing = max(0, end - len(self._in))
            if self._missing:
                break
            with memoryview(self._in) as view:
                payload = bytes(view[_HEADER.size : end])
            del self._in[:end]
            frames.append(Frame(Kind(kind), number, payload))
        return frames


def combine(kind: Kind, contributions: Iterable[bytes]) -> bytes:
    """Combine the contributions of all workers of a relay into one, in their order.

    Raises a ValueError if lists of numbers are not equally long.
    """
    if kind in _REDUCTIONS:
        reduction = _REDUCTIONS[kind]
        # Mostly all are equal, and their maximum needs no decoding.
        lists = [*(contributions if kind is Kind.SUM else dict.fromkeys(contributions))]
        if len(lists) == 1:
            return lists[0]
        columns = zip(*map(json.loads, lists), strict=True)
        return encode_numbers(reduction(column) for column in columns)
    return b"".join(contributions)  # the workers' values, or that of one


def encode_numbers(numbers: Iterable[float]) -> bytes:
    return json.dumps([*numbers]).encode()


# How both ends of a connection prove that they belong to this start of the attempt.
#
# One HMAC of both their nonces shows that each knows the secret: the peer sends its first half,
# the relay answers with the second. A stranger, or a late worker of an earlier attempt, is
# refused. Until then a relay reads only a greeting of fixed length, and unpickles nothing.

_CLAIM = struct.Struct("!BII")  # role, rank (of a worker) or index (of a node), workers of the run
_NONCE = _PROOF = 32  # bytes
GREETING_BYTES = _CLAIM.size + _NONCE + _PROOF


class Role(IntEnum):
    """Who connects."""

    WORKER = 1
    NODE = 2


class Peer(NamedTuple):
    """A worker, or the relay of another node: what its greeting claims and proves."""

    role: Role
    number: int  # rank of a worker, or index of a node in the attempt


async def prove(peer: socket.socket, claim: Peer, world_size: int, secret: bytes) -> None:
    """Prove to a relay that this end of a non-blocking socket is of its attempt, as it must too.

    And that both know the same number of workers: a node may have read an old configuration.
    Raises an OSError if the relay does not answer with its proof.
    """
    challenge = await _receive(peer, _NONCE)
    greeting = _CLAIM.pack(*claim, world_size) + token_bytes(_NONCE)
    of_peer, of_relay = _proofs(secret, challenge + greeting)
    await asyncio.get_running_loop().sock_sendall(peer, greeting + of_peer)
    _require_proof(await _receive(peer, _PROOF), of_relay)


async def read_claim(peer: socket.socket, secret: bytes) -> tuple[Peer, int, bytes]:
    """Return what a peer claims and has proved to be, its number of workers, and the answer.

    Raises an OSError if it does not prove it.
    """
    challenge = token_bytes(_NONCE)
    await asyncio.get_running_loop().sock_sendall(peer, challenge)
    received = await _receive(peer, GREETING_BYTES)
    of_peer, of_relay = _proofs(secret, challenge + received[:-_PROOF])
    _require_proof(received[-_PROOF:], of_peer)
    role, number, world_size = _CLAIM.unpack_from(received)
    return Peer(Role(role), number), world_size, of_relay


async def _receive(peer: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        chunk = await asyncio.get_running_loop().sock_recv(peer, length - len(data))
        if not chunk:
            raise ConnectionResetError("closed")
        data += chunk
    return data


def _proofs(secret: bytes, exchange: bytes) -> tuple[bytes, bytes]:
    """Return the halves of one HMAC over both nonces: the peer sends one, the relay the other."""
    digest = hmac.digest(secret, exchange, "sha512")
    return digest[:_PROOF], digest[_PROOF:]


def _require_proof(proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise ConnectionRefusedError("it does not know the secret of this attempt")
