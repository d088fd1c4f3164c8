"""How both ends of a connection prove that they belong to this start of the attempt.

Each proves to the other that it knows the secret, by an HMAC of both their random challenges: a
stranger, or a late worker of an earlier attempt, is refused. Until then a relay reads only a
greeting of fixed length, and unpickles nothing. Any program that reaches the relay's port can
connect: none may delay a worker, fill the log or use up the launcher's descriptors.
"""

from __future__ import annotations

import errno
import hmac
import logging
import math
import selectors
import socket
import struct
import time
from collections.abc import Container
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from secrets import token_bytes
from typing import NamedTuple

MAX_PENDING = 256  # connections from other machines; the oldest gives way and connects again
_GREETING_S = 5.0  # for another node's relay, which connects again if it was too slow
_WORKER_GREETING_S = 600.0  # through the Unix socket, which no other user reaches
_PAUSE_S = 0.1
_CLAIM = struct.Struct("!BII")  # role, rank (of a worker) or index (of a node), workers of the run
_CHALLENGE = _PROOF = 32  # bytes
GREETING_BYTES = _CLAIM.size + _CHALLENGE + _PROOF

log = logging.getLogger(__name__)


class Role(IntEnum):
    """Who connects."""

    WORKER = 1
    NODE = 2


class Peer(NamedTuple):
    """A worker, or the relay of another node: what its greeting claims and proves."""

    role: Role
    number: int  # rank of a worker, or index of a node in the attempt


def authenticate(peer: socket.socket, claim: Peer, world_size: int, secret: bytes) -> None:
    """Prove to a relay that this peer is of its attempt, and have it prove the same.

    And that both know the same number of workers: a node may have read an old configuration.
    Raises an OSError, TimeoutError included, if it does not.
    """
    challenge = _read(peer, _CHALLENGE)
    greeting = _CLAIM.pack(*claim, world_size) + token_bytes(_CHALLENGE)
    peer.sendall(greeting + _proof(secret, b"peer", challenge + greeting))
    if not hmac.compare_digest(_read(peer, _PROOF), _proof(secret, b"relay", challenge + greeting)):
        raise ConnectionRefusedError("it does not know the secret of this attempt")


def _read(peer: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        if not (part := peer.recv(length - len(data))):
            raise ConnectionResetError("closed")
        data += part
    return data


def _proof(secret: bytes, role: bytes, text: bytes) -> bytes:
    return hmac.digest(secret, role + text, "sha256")


@dataclass
class _PendingConnection:
    """A connection to a relay that has not proved yet that it is of this attempt."""

    deadline: float
    challenge: bytes = field(default_factory=partial(token_bytes, _CHALLENGE))
    greeting: bytes = b""


class Authenticator:
    """The pending connections of a relay, whose selector wakes it when one sends its greeting."""

    def __init__(self, selector: selectors.BaseSelector, secret: bytes, world_size: int) -> None:
        self._selector, self._secret, self._world_size = selector, secret, world_size
        self._pending: dict[socket.socket, _PendingConnection] = {}  # the oldest first
        self._warned = False  # once: a port scan must not fill the log

    def __contains__(self, peer: object) -> bool:
        return peer in self._pending

    def accept(self, server: socket.socket) -> None:
        try:
            peer, _ = server.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._free_descriptor()
            return
        limit_s = _WORKER_GREETING_S if peer.family == socket.AF_UNIX else _GREETING_S
        pending = _PendingConnection(time.monotonic() + limit_s)
        try:
            peer.setblocking(False)
            peer.send(pending.challenge)
        except OSError:
            peer.close()
            return
        self._pending[peer] = pending
        self._selector.register(peer, selectors.EVENT_READ)
        strangers = self._strangers()
        if len(strangers) > MAX_PENDING:
            self._dismiss(strangers[0])

    def authenticate(self, peer: socket.socket, expected: Container[Peer]) -> Peer | None:
        """Read a peer's greeting; returns its claim once it is proved, and one of those `expected`.

        The caller has the connection from then on.
        """
        pending, refusal = self._pending[peer], ""
        try:
            part = peer.recv(GREETING_BYTES - len(pending.greeting))
            pending.greeting += part
            if part and len(pending.greeting) < GREETING_BYTES:
                return None
            greeting, proof = pending.greeting[:-_PROOF], pending.greeting[-_PROOF:]
            text = pending.challenge + greeting
            if part and hmac.compare_digest(proof, _proof(self._secret, b"peer", text)):
                role, number, world_size = _CLAIM.unpack_from(greeting)
                claim = Peer(Role(role), number)
                if world_size == self._world_size and claim in expected:
                    peer.send(_proof(self._secret, b"relay", text))
                    del self._pending[peer]
                    return claim
                refusal = f"{claim.role.name.lower()} {number} of a run of {world_size}: unexpected"
            elif part:
                refusal = "it does not know the secret of this attempt"
        except BlockingIOError:
            return None
        except (OSError, ValueError):
            pass  # closed, or of no known role
        if refusal:
            level = logging.DEBUG if self._warned else logging.WARNING
            self._warned = True
            log.log(level, "control plane: refused a connection: %s", refusal)
        self._dismiss(peer)
        return None

    def dismiss_late(self, now: float) -> float:
        """Close connections that have not greeted in time; returns when the next one is due."""
        for peer in [peer for peer, each in self._pending.items() if each.deadline <= now]:
            self._dismiss(peer)
        return min((pending.deadline for pending in self._pending.values()), default=math.inf)

    def close(self) -> None:
        for peer in self._pending:
            peer.close()
        self._pending.clear()

    def _strangers(self) -> list[socket.socket]:
        return [peer for peer in self._pending if peer.family != socket.AF_UNIX]

    def _free_descriptor(self) -> None:
        """The launcher has no descriptor left: a connection waits until one is free."""
        if strangers := self._strangers():
            self._dismiss(strangers[0])
            return
        if not self._warned:
            log.warning("control plane: too many open files in the launcher: raise `ulimit -n`")
            self._warned = True
        time.sleep(_PAUSE_S)  # the selector reports the waiting connection at once again

    def _dismiss(self, peer: socket.socket) -> None:
        self._selector.unregister(peer)
        del self._pending[peer]
        peer.close()
