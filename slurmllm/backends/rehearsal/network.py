"""The workers' network: a star of TCP connections around rank 0.

A worker that ends takes its connection with it, and whoever waits for anything hears of it at
once: rank 0 watches all connections while it waits for one, and everybody else watches rank 0's.
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

RENDEZVOUS_S = 600.0  # until the last worker has come; nodes start minutes apart
COLLECTIVE_S = 1800.0  # longer than a save of a peer may take
RETRY_S = 0.1
_LENGTH = struct.Struct("!Q")
_HELLO = struct.Struct("!8sII")  # magic, rank, workers
_MAGIC = b"slurmllm"
# A machine that loses its power closes nothing: silence is noticed after about half a minute.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class Star:
    """One worker's end of it.

    Args:
        rank: This worker's.
        world_size: Workers.
        address: Where rank 0 is: host and port.

    Raises:
        NodeError: not all workers came, or one has gone again.
        OSError: rank 0's port is taken.
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
        """Every worker's picklable value, by rank, on all workers.

        Raises:
            NodeError: a worker is gone, or silent for COLLECTIVE_S.
        """
        if self.rank:
            self._send(0, pickle.dumps(value))
            found: list[Any] = pickle.loads(self._receive(0))
            return found
        values = {0: value, **self._from_all()}
        found = [values[rank] for rank in range(self.world_size)]
        message = pickle.dumps(found)
        for rank in self._peers:
            self._send(rank, message)
        return found

    def close(self) -> None:
        """Leave."""
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
                    if key.fileobj is not server:  # nobody speaks before all have come
                        raise _gone(key.data)
                    self._welcome(server, selector)
        for rank in self._peers:
            self._send(rank, b"")

    def _welcome(self, server: socket.socket, selector: selectors.BaseSelector) -> None:
        peer, _ = server.accept()
        peer.settimeout(5.0)
        with suppress(OSError, NodeError, struct.error):
            magic, rank, world_size = _HELLO.unpack(_read(peer, _HELLO.size, -1))
            fits = 0 < rank < self.world_size == world_size
            if magic == _MAGIC and fits and rank not in self._peers:
                self._peers[rank] = peer
                selector.register(peer, selectors.EVENT_READ, rank)
                return
        peer.close()  # somebody else's

    def _connect(self, address: tuple[str, int], deadline: float) -> None:
        while True:
            try:
                peer = _call(address)
                peer.sendall(_HELLO.pack(_MAGIC, self.rank, self.world_size))
            except OSError as error:  # rank 0 may come later
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

    def _from_all(self) -> dict[int, Any]:
        """What the other workers send, in whatever order they do."""
        found: dict[int, Any] = {}
        with selectors.DefaultSelector() as selector:
            for rank, peer in self._peers.items():
                selector.register(peer, selectors.EVENT_READ, rank)
            while len(found) < len(self._peers):
                ready = selector.select(COLLECTIVE_S)
                if not ready:
                    silent = sorted(self._peers.keys() - found.keys())
                    raise NodeError(
                        f"Timed out waiting for ranks {silent[:8]} … after {COLLECTIVE_S:.0f} s"
                    )
                for key, _ in ready:
                    if key.data in found:  # it waits for the answer: this is its end
                        raise _gone(key.data)
                    found[key.data] = pickle.loads(self._receive(key.data))
        return found

    def _send(self, rank: int, message: bytes) -> None:
        try:
            self._peers[rank].sendall(_LENGTH.pack(len(message)) + message)
        except OSError as error:
            raise _gone(rank) from error

    def _receive(self, rank: int) -> bytes:
        peer = self._peers[rank]
        (length,) = _LENGTH.unpack(_read(peer, _LENGTH.size, rank))
        return _read(peer, length, rank)


def _call(address: tuple[str, int]) -> socket.socket:
    peer = socket.create_connection(address, timeout=5.0)
    # Where nobody listens yet, TCP may connect a socket to itself, if the port is one that the
    # kernel hands out; rank 0 could then never listen there.
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
            words = f"Timed out waiting for rank {rank} after {peer.gettimeout():.0f} s"
            raise NodeError(words) from error
        except OSError as error:
            raise _gone(rank) from error
        if not part:
            raise _gone(rank)
        parts += part
    return bytes(parts)


def _gone(rank: int) -> NodeError:
    return NodeError(f"Connection closed by peer: rank {rank}")
