"""The workers' network: a star of TCP connections around rank 0.

When a worker ends, its connection closes and all workers that wait fail at once: rank 0 watches all
connections while it waits for one of them, and the others watch their connection to rank 0.

Rank 0 and a worker first prove to each other that they know the workers' secret, by an HMAC of both
their random challenges. Until then nothing but a greeting of fixed length is read and nothing is
unpickled; who sends none within seconds is disconnected, and nobody waits for it.
"""

from __future__ import annotations

import hmac
import pickle
import selectors
import socket
import struct
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from secrets import token_bytes
from typing import Any

from slurmllm.backends.rendezvous import listen
from slurmllm.errors import NodeError

RENDEZVOUS_S = 600.0  # until the last worker connects; nodes start minutes apart
COLLECTIVE_S = 1800.0  # longer than the save of a peer
RETRY_S = 0.1
_GREETING_S = 5.0  # for a peer to prove that it is a worker
_MAX_GUESTS = 512  # connections that have not proved it yet; the oldest gives way
_MAX_MESSAGE_BYTES = 1 << 30
_LENGTH = struct.Struct("!Q")
_CLAIM = struct.Struct("!II")  # rank, workers
_CHALLENGE = _PROOF = 32  # bytes
_GREETING = _CLAIM.size + _CHALLENGE + _PROOF
# A machine that loses power closes no connection: keep-alive detects it after half a minute.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


@dataclass
class _Guest:
    """A connection to rank 0 that is not yet known to be a worker's."""

    deadline: float
    challenge: bytes
    greeting: bytes = b""


class Star:
    """The connections of one worker: to rank 0, or on rank 0 to all others.

    Args:
        address: Host and port of rank 0.
        secret: What only the workers know.

    Raises:
        NodeError: Not all workers connected, or one disconnected.
        OSError: The port of rank 0 is in use.
    """

    def __init__(self, rank: int, world_size: int, address: tuple[str, int], secret: bytes) -> None:
        self.rank, self.world_size, self._secret = rank, world_size, secret
        self._peers: dict[int, socket.socket] = {}
        deadline = time.monotonic() + RENDEZVOUS_S
        try:
            if rank == 0:
                self._accept(address, deadline)
            else:
                self._connect(address, deadline)
        except BaseException:
            self.close()
            raise
        for peer in self._peers.values():
            for option in _KEEPALIVE:
                peer.setsockopt(*option)
            peer.settimeout(COLLECTIVE_S)

    def gather(self, value: Any) -> list[Any]:
        """Return the picklable values of all workers, by rank, on every one.

        Raises a NodeError if a worker disconnected, or sent nothing for COLLECTIVE_S.
        """
        if self.rank:
            self._send(0, pickle.dumps(value))
            found: list[Any] = pickle.loads(self._receive(0))
            return found
        values = {0: value, **self._receive_all()}
        found = [values[rank] for rank in range(self.world_size)]
        message = pickle.dumps(found)
        for rank in self._peers:
            self._send(rank, message)
        return found

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _accept(self, address: tuple[str, int], deadline: float) -> None:
        guests: dict[socket.socket, _Guest] = {}  # the oldest first
        server = listen(*address)
        with server, selectors.DefaultSelector() as selector, ExitStack() as stack:
            stack.callback(lambda: [*map(socket.socket.close, guests)])
            server.setblocking(False)
            selector.register(server, selectors.EVENT_READ)

            def dismiss(peer: socket.socket) -> None:
                selector.unregister(peer)
                del guests[peer]
                peer.close()

            while len(self._peers) < self.world_size - 1:
                now = time.monotonic()
                late = [peer for peer, guest in guests.items() if guest.deadline <= now]
                for peer in late or list(guests)[:-_MAX_GUESTS]:
                    dismiss(peer)
                until = min([deadline, *(guest.deadline for guest in guests.values())])
                ready = selector.select(max(0.0, until - now))
                if now > deadline:
                    missing = sorted(set(range(1, self.world_size)) - self._peers.keys())
                    raise NodeError(
                        f"Timed out waiting for {len(missing)} of {self.world_size} workers "
                        f"after {RENDEZVOUS_S:.0f} s: ranks {missing[:8]} …"
                    )
                for key, _ in ready:
                    found = key.fileobj
                    assert isinstance(found, socket.socket)
                    if found is server:
                        with suppress(OSError):
                            peer, _ = server.accept()
                            peer.setblocking(False)
                            guests[peer] = guest = _Guest(
                                now + _GREETING_S, token_bytes(_CHALLENGE)
                            )
                            selector.register(peer, selectors.EVENT_READ)
                            peer.send(guest.challenge)
                    elif found not in guests:  # no worker sends before all are connected
                        raise _disconnected(key.data)
                    else:
                        try:
                            rank = self._greet(found, guests[found])
                        except OSError:
                            dismiss(found)
                            continue
                        if rank is not None:
                            del guests[found]
                            self._peers[rank] = found
                            selector.modify(found, selectors.EVENT_READ, rank)
        for rank in self._peers:
            self._send(rank, b"")

    def _greet(self, peer: socket.socket, guest: _Guest) -> int | None:
        """Return the rank of a worker, None before its greeting is complete.

        Raises an OSError if it is no worker of this run.
        """
        part = peer.recv(_GREETING - len(guest.greeting))
        guest.greeting += part
        if part and len(guest.greeting) < _GREETING:
            return None
        claim, proof = guest.greeting[:-_PROOF], guest.greeting[-_PROOF:]
        if not hmac.compare_digest(proof, self._proof(b"worker", guest.challenge + claim)):
            raise ConnectionRefusedError("wrong proof")
        rank, world_size = map(int, _CLAIM.unpack_from(claim))
        if not 0 < rank < self.world_size == world_size or rank in self._peers:
            raise ConnectionRefusedError(f"rank {rank} of {world_size}")
        peer.setblocking(True)
        peer.sendall(self._proof(b"rank 0", guest.challenge + claim))
        return rank

    def _introduce(self, peer: socket.socket, deadline: float) -> None:
        """Prove to rank 0 that this is a worker, and have it prove that it is rank 0."""
        challenge = _read(peer, _CHALLENGE, 0)
        claim = _CLAIM.pack(self.rank, self.world_size) + token_bytes(_CHALLENGE)
        peer.sendall(claim + self._proof(b"worker", challenge + claim))
        peer.settimeout(max(1.0, deadline - time.monotonic()))
        proof = _read(peer, _PROOF, 0)
        if not hmac.compare_digest(proof, self._proof(b"rank 0", challenge + claim)):
            raise ConnectionRefusedError("it does not know the secret of this run")

    def _proof(self, role: bytes, text: bytes) -> bytes:
        return hmac.digest(self._secret, role + text, "sha256")

    def _connect(self, address: tuple[str, int], deadline: float) -> None:
        while True:
            peer: socket.socket | None = None
            try:
                peer = _connect(address)
                self._introduce(peer, deadline)
            except (OSError, NodeError) as error:  # rank 0 may start later
                if peer is not None:
                    peer.close()
                if time.monotonic() > deadline:
                    host, port = address
                    raise NodeError(
                        f"Timed out waiting for rank 0 at {host}:{port} after "
                        f"{RENDEZVOUS_S:.0f} s: {error}"
                    ) from error
                time.sleep(RETRY_S)
                continue
            self._peers[0] = peer
            break
        self._receive(0)

    def _receive_all(self) -> dict[int, Any]:
        """Receive a value from each other worker, in any order."""
        found: dict[int, Any] = {}
        with selectors.DefaultSelector() as selector:
            for rank, peer in self._peers.items():
                selector.register(peer, selectors.EVENT_READ, rank)
            while len(found) < len(self._peers):
                ready = selector.select(COLLECTIVE_S)
                if not ready:
                    missing = sorted(self._peers.keys() - found.keys())
                    raise NodeError(
                        f"Timed out waiting for ranks {missing[:8]} … after {COLLECTIVE_S:.0f} s"
                    )
                for key, _ in ready:
                    if key.data in found:  # it waits for the answer, so the connection was closed
                        raise _disconnected(key.data)
                    found[key.data] = pickle.loads(self._receive(key.data))
        return found

    def _send(self, rank: int, message: bytes) -> None:
        try:
            self._peers[rank].sendall(_LENGTH.pack(len(message)) + message)
        except OSError as error:
            raise _disconnected(rank) from error

    def _receive(self, rank: int) -> bytes:
        peer = self._peers[rank]
        (length,) = _LENGTH.unpack(_read(peer, _LENGTH.size, rank))
        if length > _MAX_MESSAGE_BYTES:
            raise NodeError(f"rank {rank} sent a message of {length} bytes, which no worker does")
        return _read(peer, length, rank)


def _connect(address: tuple[str, int]) -> socket.socket:
    peer = socket.create_connection(address, timeout=5.0)
    # If rank 0 does not listen yet and the port is an ephemeral one, TCP may connect a socket to
    # itself; rank 0 could then never listen there.
    if peer.getsockname() == peer.getpeername():
        peer.close()
        raise ConnectionRefusedError("connected to itself")
    return peer


def _read(peer: socket.socket, length: int, rank: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        try:
            part = peer.recv(min(length - len(parts), 1 << 20))
        except TimeoutError as error:
            raise NodeError(
                f"Timed out waiting for rank {rank} after {peer.gettimeout():.0f} s"
            ) from error
        except OSError as error:
            raise _disconnected(rank) from error
        if not part:
            raise _disconnected(rank)
        parts += part
    return bytes(parts)


def _disconnected(rank: int) -> NodeError:
    return NodeError(f"Connection closed by peer: rank {rank}")
