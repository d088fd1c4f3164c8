"""The control plane's relay: a thread in every launcher, between its workers and the other nodes.

The relays of all other nodes connect to that of node 0, the root. Each relay waits for one
contribution to an operation from every worker of its node, and the root from every other relay;
it combines them (`wire.combine`). The result goes down the same way. Operations are numbered and
every worker calls them in the same order, so several may be under way at a time.

When a connection closes before its worker has left, or a contribution does not come in time, every
worker gets a fault that names the worker or the node, and fails with it.
"""

from __future__ import annotations

import logging
import resource
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from slurmllm.core.errors import NodeError
from slurmllm.train.control.rendezvous import listen_for_nodes
from slurmllm.train.control.wire import (
    FAULTS,
    MAX_PENDING,
    Authenticator,
    Connection,
    Frame,
    Kind,
    Peer,
    Role,
    authenticate,
    combine,
    shares,
)

RENDEZVOUS_S = 600.0  # until all have connected: nodes start minutes apart
OPERATION_S = 7200.0  # for all contributions to an operation: peers may compile meanwhile
RETRY_S = 0.1  # between attempts to connect to the root
_ROOT_MARGIN_S = 5.0  # longer at the root: the relay that knows whom it misses reports it first
_CONNECT_S = 5.0
_AUTHENTICATE_S = 60.0  # for the root to answer: it may be busy
_LEAVE_S = 5.0  # for the last messages to be sent at the end
_PAUSE_S = 0.01
_OTHER_FILES = 512  # of the root's launcher, apart from the connections of other nodes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Position:
    """A node's place in the attempt."""

    index: int  # of this node; node 0 is the root
    names: Sequence[str]  # of all nodes
    per_node: int  # workers on a node

    @property
    def world_size(self) -> int:
        return len(self.names) * self.per_node

    @property
    def name(self) -> str:
        return self.names[self.index]

    def workers(self) -> range:
        return range(self.index * self.per_node, (self.index + 1) * self.per_node)


@dataclass
class _Operation:
    """Contributions to an operation so far."""

    kind: Kind
    begun: float = field(default_factory=time.monotonic)
    parts: dict[Peer, bytes] = field(default_factory=dict)


class Relay:
    """One node's relay; `start` opens its sockets, `close` ends it.

    Args:
        path: Of the Unix socket for this node's workers, in a folder that only this user may enter.
        root: Host and port of the relay of node 0.
        secret: What only this attempt's launchers and workers know.
    """

    def __init__(
        self, position: Position, path: Path, root: tuple[str, int], secret: bytes
    ) -> None:
        self.position, self.path = position, path
        self._root, self._secret = root, secret
        workers = [Peer(Role.WORKER, rank) for rank in position.workers()]
        other_nodes = range(1, len(position.names)) if position.index == 0 else ()
        nodes = [Peer(Role.NODE, node) for node in other_nodes]
        # In this order contributions are combined, whatever the order in which they arrive.
        self._expected = (*workers, *nodes)
        self._owners = {worker.number: worker for worker in workers}
        for node in nodes:
            ranks = Position(node.number, position.names, position.per_node).workers()
            self._owners |= dict.fromkeys(ranks, node)
        self._operation_s = OPERATION_S + (_ROOT_MARGIN_S if nodes else 0.0)
        self._below: dict[Peer, Connection] = {}
        self._peers: dict[Connection, Peer] = {}
        self._missing = {*self._expected}  # that have not connected yet
        self._left: set[Peer] = set()
        self._counts = dict.fromkeys(self._expected, 0)  # contributions so far
        self._above: Connection | None = None
        self._connecting: socket.socket | None = None  # to the root; `close` shuts it down
        self._operations: deque[_Operation] = deque()
        self._first = 0  # number of the oldest of them
        self._fault: Frame | None = None
        self._selector = selectors.DefaultSelector()
        self._authenticator = Authenticator(self._selector, secret, position.world_size)
        self._wake, self._waker = socket.socketpair()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._servers: list[socket.socket] = []

    def start(self) -> None:
        """Listen, and relay in a thread from now on; NodeError if a port or the path is refused."""
        server = socket.socket(socket.AF_UNIX)
        self._servers.append(server)
        try:
            server.bind(str(self.path))
            server.listen(socket.SOMAXCONN)
        except OSError as error:
            fault = f"cannot make its socket {self.path}: {error.strerror or error}"
            raise NodeError(
                f"the control plane {fault}; free space in the memory disk of the node"
            ) from error
        if self.position.index == 0 and len(self.position.names) > 1:
            allow_open_files(len(self.position.names) + MAX_PENDING + _OTHER_FILES)
            self._servers.append(listen_for_nodes(*self._root, self.position.name))
        for listener in (*self._servers, self._wake):
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        self._thread.start()

    def close(self) -> None:
        """End the relay; workers and nodes that are still connected get an error."""
        self._closing.set()
        if self._thread.ident is None:
            self._release()
            return
        with suppress(OSError):  # it has noticed already, or is not connected any more
            self._waker.send(b"x")
            if (connecting := self._connecting) is not None:
                connecting.shutdown(socket.SHUT_RDWR)
        self._thread.join(_LEAVE_S + _CONNECT_S + 5.0)

    def _run(self) -> None:
        try:
            if self.position.index:
                self._connect_to_root()
            self._relay()
        except Exception as error:
            # Its workers and the other nodes must not wait for a relay that is gone.
            log.exception("control plane: the relay has failed")
            self._fail(f"the launcher of {self.position.name}: {error!r}", Kind.MISUSE)
        finally:
            self._release()

    def _connect_to_root(self) -> None:
        """Connect to the root, whose launcher may start later; its workers wait meanwhile."""
        deadline = time.monotonic() + RENDEZVOUS_S
        while True:
            try:
                self._above = self._connection_to_root()
            except OSError as error:
                if time.monotonic() <= deadline and not self._closing.wait(RETRY_S):
                    continue
                host, port = self._root
                self._fail(
                    f"Timed out waiting for the launcher of {self.position.names[0]} at "
                    f"{host}:{port} after {RENDEZVOUS_S:.0f} s: {error}; a firewall may block "
                    "connections between the nodes"
                )
            else:
                self._above.socket.setblocking(False)
                self._selector.register(self._above.socket, selectors.EVENT_READ, self._above)
            return

    def _connection_to_root(self) -> Connection:
        peer = socket.create_connection(self._root, timeout=_CONNECT_S)
        try:
            self._connecting = peer
            if self._closing.is_set():
                raise ConnectionAbortedError("closed meanwhile")
            # If nobody listens yet on an ephemeral port, TCP may connect a socket to itself; the
            # root could then never listen there.
            if peer.getsockname() == peer.getpeername():
                raise ConnectionRefusedError("connected to itself")
            peer.settimeout(_AUTHENTICATE_S)
            claim = Peer(Role.NODE, self.position.index)
            authenticate(peer, claim, self.position.world_size, self._secret)
        except BaseException:
            peer.close()
            raise
        finally:
            self._connecting = None
        return Connection(peer)

    def _relay(self) -> None:
        """Serve all connections until the relay is closed and its last messages are sent."""
        begun, leave_at = time.monotonic(), float("inf")
        while True:
            now = time.monotonic()
            closing = self._closing.is_set()
            patience_s = self._check_time(begun, now)
            events = self._selector.select(0.0 if closing else patience_s)
            for key, mask in events:
                self._serve(key, mask)
            if closing:
                leave_at = min(leave_at, now + _LEAVE_S)
                unsent = any(connection.unsent for connection in self._connections())
                if now >= leave_at or not (events or unsent):
                    return
                if not events:
                    time.sleep(_PAUSE_S)

    def _release(self) -> None:
        for connection in self._connections():
            connection.socket.close()
        self._authenticator.close()
        for opened in (*self._servers, self._wake, self._waker):
            opened.close()
        self._selector.close()
        self.path.unlink(missing_ok=True)

    def _connections(self) -> list[Connection]:
        return [*self._below.values(), *([] if self._above is None else [self._above])]

    def _check_time(self, begun: float, now: float) -> float:
        """Report what is late; returns the seconds until a time limit may have passed."""
        deadline = now + 60.0
        if self._fault is not None:
            return max(0.0, deadline - now)
        if self._missing and now - begun >= RENDEZVOUS_S:
            self._fail(
                f"Timed out waiting for {self._describe(self._missing)}: not connected after "
                f"{RENDEZVOUS_S:.0f} s; a firewall may block connections between the nodes"
            )
        elif self._operations and now - self._operations[0].begun >= self._operation_s:
            late = {*self._expected} - self._operations[0].parts.keys()
            self._fail(f"Timed out waiting for {self._describe(late)} after {OPERATION_S:.0f} s")
        elif self._missing:
            deadline = min(deadline, begun + RENDEZVOUS_S)
        if self._operations:
            deadline = min(deadline, self._operations[0].begun + self._operation_s)
        return max(0.0, deadline - now)

    def _describe(self, peers: Collection[Peer]) -> str:
        names = []
        for role, number in sorted(peers)[:4]:
            if role is Role.WORKER:
                names.append(f"rank {number} on {self.position.name}")
            else:
                names.append(f"the launcher of {self.position.names[number]}")
        more = f" and {len(peers) - 4} more" if len(peers) > 4 else ""
        return ", ".join(names) + more

    def _serve(self, key: selectors.SelectorKey, mask: int) -> None:
        ready = key.fileobj
        assert isinstance(ready, socket.socket)
        if ready in self._servers:
            self._authenticator.accept(ready)
        elif ready is self._wake:
            with suppress(BlockingIOError):
                ready.recv(64)
        elif ready in self._authenticator:
            self._authenticate(ready)
        else:
            connection: Connection | None = key.data
            if connection is None:  # it gave way to another since the selector reported it
                return
            try:
                if mask & selectors.EVENT_WRITE:
                    connection.flush()
                    self._watch(connection)
                frames = connection.receive() if mask & selectors.EVENT_READ else []
            except BlockingIOError:
                return
            except (OSError, NodeError, ValueError) as error:
                self._lost(connection, error)
                return
            for frame in frames:
                self._handle(connection, frame)

    def _authenticate(self, socket_: socket.socket) -> None:
        peer = self._authenticator.authenticate(socket_, self._missing)
        if peer is None:
            return
        connection = Connection(socket_)
        self._selector.modify(socket_, selectors.EVENT_READ, connection)
        self._missing.remove(peer)
        self._below[peer], self._peers[connection] = connection, peer
        if self._fault is not None:
            self._send(connection, self._fault.encode())

    def _handle(self, connection: Connection, frame: Frame) -> None:
        peer = self._peers.get(connection)
        if frame.kind in FAULTS:
            self._fail(frame.payload.decode(), frame.kind)
        elif connection is self._above:
            self._deliver(frame)
        elif peer is None:
            return
        elif frame.kind is Kind.LEAVE:
            self._leave(peer)
        else:
            self._contribute(peer, frame)

    def _contribute(self, peer: Peer, frame: Frame) -> None:
        if self._fault is not None:
            return
        number = self._counts[peer]
        self._counts[peer] = number + 1
        index = number - self._first
        if index == len(self._operations):
            self._operations.append(_Operation(frame.kind))
        operation = self._operations[index]
        if operation.kind is not frame.kind or frame.number != number:
            self._fail(
                f"{self._describe([peer])} called {frame.kind.name} as operation {frame.number}, "
                f"others {operation.kind.name} as operation {number}: the workers run different "
                "code; install the same version on all nodes",
                Kind.MISUSE,
            )
            return
        operation.parts[peer] = frame.payload
        while self._operations and len(self._operations[0].parts) == len(self._expected):
            self._complete(self._operations.popleft())
        if self._left:
            self._fail_if_left()

    def _complete(self, operation: _Operation) -> None:
        kind, parts = operation.kind, operation.parts
        try:
            combined = combine(kind, [parts[peer] for peer in self._expected])
        except ValueError:
            self._fail(f"{kind.name} {self._first} of lists of different lengths", Kind.MISUSE)
            return
        result = Frame(kind, self._first, combined)
        self._first += 1
        if self.position.index:
            self._up(result)
        else:
            self._deliver(result)

    def _deliver(self, result: Frame) -> None:
        parts = shares(result.kind, result.payload, self._owners)
        encoded = result.encode() if parts is None else b""
        for peer, connection in self._below.items():
            if parts is not None:
                encoded = result._replace(payload=parts.get(peer, b"")).encode()
            self._send(connection, encoded)

    def _leave(self, peer: Peer) -> None:
        self._left.add(peer)
        connection = self._below.pop(peer)
        del self._peers[connection]
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._fail_if_left()
        if len(self._left) == len(self._expected) and self.position.index:
            self._up(Frame(Kind.LEAVE, 0, b""))

    def _fail_if_left(self) -> None:
        """Some have left, and others wait for them in an operation."""
        gone = self._left - self._operations[0].parts.keys() if self._operations else ()
        if gone:
            self._fail(f"Connection closed by peer: {self._describe(gone)} has ended")

    def _lost(self, connection: Connection, error: Exception) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection is self._above:
            self._above, name = None, f"the launcher of {self.position.names[0]}"
        elif (peer := self._peers.pop(connection, None)) is not None:
            del self._below[peer]
            self._left.add(peer)
            name = self._describe([peer])
        else:
            return
        reason = "" if isinstance(error, ConnectionResetError) else f" ({error})"
        self._fail(f"Connection closed by peer: {name}{reason}")

    def _fail(self, reason: str, kind: Kind = Kind.FAULT) -> None:
        """Pass on why no operation can complete any more; the first reason counts."""
        if self._fault is not None:
            return
        self._fault = Frame(kind, 0, reason.encode())
        self._operations.clear()
        log.debug("control plane: %s", reason)
        for connection in self._below.values():
            self._send(connection, self._fault.encode())
        self._up(self._fault)

    def _up(self, frame: Frame) -> None:
        if self._above is not None:
            self._send(self._above, frame.encode())

    def _send(self, connection: Connection, frame: bytes) -> None:
        with suppress(OSError):  # noticed when the connection is read
            connection.queue(frame)
            self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        """Wait for the connection to be writable too while something is unsent."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        with suppress(KeyError, ValueError):
            if self._selector.get_key(connection.socket).events != events:
                self._selector.modify(connection.socket, events, connection)


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files, mostly 1,024, as far as that is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft not in (resource.RLIM_INFINITY, hard) and soft < limit:
        with suppress(OSError, ValueError):  # a connection beyond the limit is warned of
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
