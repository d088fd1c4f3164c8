"""The workers' network: a star of TCP connections around rank 0.

When a worker ends, its connection closes and all workers that wait fail at once: rank 0 watches all
connections while it waits for one of them, and the others watch their connection to rank 0.
"""

from __future__ import annotations

import pickle
import selectors
import socket
import struct
import time
from contextlib import suppress
from typing import Any

from slurmllm.errors import NodeError

RENDEZVOUS_S = 600.0  # until the last worker connects; nodes start minutes apart
COLLECTIVE_S = 1800.0  # longer than the save of a peer
RETRY_S = 0.1
_LENGTH = struct.Struct("!Q")
_HELLO = struct.Struct("!8sII")  # magic, rank, workers
_MAGIC = b"slurmllm"
# A machine that loses power closes no connection: keep-alive detects it after half a minute.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class Star:
    """The connections of one worker: to rank 0, or on rank 0 to all others.

    Args:
        address: Host and port of rank 0.

    Raises:
        NodeError: Not all workers connected, or one disconnected.
        OSError: The port of rank 0 is in use.
    """

    def __init__(self, rank: int, world_size: int, address: tuple[str, int]) -> None:
        self.rank, self.world_size = rank, world_size
        self._peers: dict[int, socket.socket] = {}
        deadline = time.monotonic() + RENDEZVOUS_S
        try:
            if rank == 0:
                self._accept(address[1], deadline)
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

    def _accept(self, port: int, deadline: float) -> None:
        server = socket.create_server(("", port), backlog=self.world_size)
        with server, selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            while len(self._peers) < self.world_size - 1:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    missing = sorted(set(range(1, self.world_size)) - self._peers.keys())
                    raise NodeError(
                        f"Timed out waiting for {len(missing)} of {self.world_size} workers "
                        f"after {RENDEZVOUS_S:.0f} s: ranks {missing[:8]} …"
                    )
                for key, _ in ready:
                    if key.fileobj is not server:  # no worker sends before all are connected
                        raise _disconnected(key.data)
                    self._accept_one(server, selector)
        for rank in self._peers:
            self._send(rank, b"")

    def _accept_one(self, server: socket.socket, selector: selectors.BaseSelector) -> None:
        peer, _ = server.accept()
        peer.settimeout(5.0)
        with suppress(OSError, NodeError, struct.error):
            magic, rank, world_size = _HELLO.unpack(_read(peer, _HELLO.size, -1))
            fits = 0 < rank < self.world_size == world_size
            if magic == _MAGIC and fits and rank not in self._peers:
                self._peers[rank] = peer
                selector.register(peer, selectors.EVENT_READ, rank)
                return
        peer.close()  # not a worker of this run

    def _connect(self, address: tuple[str, int], deadline: float) -> None:
        while True:
            try:
                peer = _connect(address)
                peer.sendall(_HELLO.pack(_MAGIC, self.rank, self.world_size))
            except OSError as error:  # rank 0 may start later
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
        peer.settimeout(max(1.0, deadline - time.monotonic()))
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
