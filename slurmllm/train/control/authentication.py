"""How both ends of a connection prove that they belong to this start of the attempt.

One HMAC of both their nonces shows that each knows the secret: the peer sends its first half, the
relay answers with the second. A stranger, or a late worker of an earlier attempt, is refused. Until
then a relay reads only a greeting of fixed length, and unpickles nothing. Any program that reaches
the relay's port can connect: none may delay a worker, fill the log or use up the launcher's
descriptors.
"""

from __future__ import annotations

import errno
import hmac
import logging
import selectors
import socket
import struct
import time
from collections.abc import Container
from contextlib import suppress
from enum import IntEnum
from secrets import token_bytes
from typing import NamedTuple

MAX_PENDING = 256  # connections from other machines; the oldest gives way and connects again
_PAUSE_S = 0.1
_CLAIM = struct.Struct("!BII")  # role, rank (of a worker) or index (of a node), workers of the run
_NONCE = _PROOF = 32  # bytes
GREETING_BYTES = _CLAIM.size + _NONCE + _PROOF
_EXCHANGE_BYTES = _NONCE + GREETING_BYTES  # with the relay's nonce
_UNPROVEN = "it does not know the secret of this attempt"

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
    challenge = _read(peer, _NONCE)
    greeting = _CLAIM.pack(*claim, world_size) + token_bytes(_NONCE)
    of_peer, of_relay = _proofs(secret, challenge + greeting)
    peer.sendall(greeting + of_peer)
    if not hmac.compare_digest(_read(peer, _PROOF), of_relay):
        raise ConnectionRefusedError(_UNPROVEN)


def _read(peer: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        received = peer.recv(length - len(data))
        if not received:
            raise ConnectionResetError("closed")
        data += received
    return data


def _proofs(secret: bytes, exchange: bytes) -> tuple[bytes, bytes]:
    """Return the halves of one HMAC over both nonces: the peer sends one, the relay the other."""
    digest = hmac.digest(secret, exchange, "sha512")
    return digest[:_PROOF], digest[_PROOF:]


class Authenticator:
    """The pending connections of a relay, whose selector wakes it when one sends its greeting."""

    def __init__(self, selector: selectors.BaseSelector, secret: bytes, world_size: int) -> None:
        self._selector, self._secret, self._world_size = selector, secret, world_size
        # Connection → the relay's nonce, and what has arrived of the greeting; the oldest first.
        self._pending: dict[socket.socket, bytes] = {}
        self._has_warned = False

    def __contains__(self, peer: object) -> bool:
        return peer in self._pending

    def accept(self, server: socket.socket) -> None:
        try:
            peer, _ = server.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._warn("too many open files in the launcher: raise `ulimit -n`")
                self._limit_strangers(0)
                time.sleep(_PAUSE_S)  # the selector reports the waiting connection at once again
            return
        nonce = token_bytes(_NONCE)
        try:
            peer.setblocking(False)
            peer.send(nonce)
        except OSError:
            peer.close()
            return
        self._pending[peer] = nonce
        self._selector.register(peer, selectors.EVENT_READ)
        self._limit_strangers(MAX_PENDING)

    def authenticate(self, peer: socket.socket, expected: Container[Peer]) -> Peer | None:
        """Read a peer's greeting; returns its claim once it is proved, and one of those `expected`.

        The caller has the connection from then on.
        """
        received = self._pending[peer]
        try:
            chunk = peer.recv(_EXCHANGE_BYTES - len(received))
        except BlockingIOError:
            return None
        except OSError:
            chunk = b""
        received += chunk
        if chunk and len(received) < _EXCHANGE_BYTES:
            self._pending[peer] = received
            return None
        if chunk and (claim := self._verify(peer, received, expected)):
            del self._pending[peer]
            return claim
        self._dismiss(peer)
        return None

    def _verify(
        self, peer: socket.socket, received: bytes, expected: Container[Peer]
    ) -> Peer | None:
        """Answer a proved and expected claim."""
        exchange, proof = received[:-_PROOF], received[-_PROOF:]
        of_peer, of_relay = _proofs(self._secret, exchange)
        if not hmac.compare_digest(proof, of_peer):
            self._warn(f"refused a connection: {_UNPROVEN}")
            return None
        role, number, world_size = _CLAIM.unpack_from(exchange, _NONCE)
        claim = Peer(Role(role), number)
        if world_size != self._world_size or claim not in expected:
            name = f"{claim.role.name.lower()} {number} of a run of {world_size}"
            self._warn(f"refused a connection: {name}: unexpected")
            return None
        with suppress(OSError):  # noticed when the connection is read
            peer.send(of_relay)
        return claim

    def close(self) -> None:
        for peer in self._pending:
            peer.close()
        self._pending.clear()

    def _warn(self, message: str) -> None:
        """Log it, the first time as a warning: a port scan must not fill the log."""
        level = logging.DEBUG if self._has_warned else logging.WARNING
        self._has_warned = True
        log.log(level, "control plane: %s", message)

    def _limit_strangers(self, limit: int) -> None:
        """Have the oldest connection from another machine give way if there are more."""
        strangers = [peer for peer in self._pending if peer.family != socket.AF_UNIX]
        if len(strangers) > limit:
            self._dismiss(strangers[0])

    def _dismiss(self, peer: socket.socket) -> None:
        self._selector.unregister(peer)
        del self._pending[peer]
        peer.close()
