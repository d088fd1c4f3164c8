"""The control plane's relay: a thread in every launcher, between its workers and the other nodes.

The relays form a tree with that of node 0 at its root; node i is below node (i - 1) // FAN_OUT.
Each relay waits for one contribution to an operation from all that are directly below it, combines
them (`operations`) and passes one message up; the result comes down the same way. Operations are
numbered and every worker calls them in the same order, so several may be under way at a time.

A relay finds the one above it by the root, whose address all launchers know: it connects to the
root, reports the port on which it listens, and is told the address of the relay above it.

When a connection closes before its worker has left, or a contribution does not come in time, every
worker gets a fault that names the worker or the node, and fails with it.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from slurmllm.control.operations import combine, share
from slurmllm.control.rendezvous import listen
from slurmllm.control.wire import Claim, Connection, Frame, Guest, Kind, Role, introduce
from slurmllm.errors import NodeError

FAN_OUT = 16  # nodes below a node: two levels for 272 nodes
RENDEZVOUS_S = 600.0  # until all below have connected: nodes start minutes apart
OPERATION_S = 7200.0  # for all contributions to an operation: peers may compile meanwhile
RETRY_S = 0.1
_GREETING_S = 5.0  # for a peer to prove that it is of this attempt
_INTRODUCTION_S = 60.0  # for the relay above to answer: it may be busy
_MAX_GUESTS = 1024  # connections that have not proved it yet; the oldest gives way
_PORT_S = 10.0  # for a port that an ending process still holds
_LEAVE_S = 5.0  # for the last messages to be sent at the end

log = logging.getLogger(__name__)


class _Peer(NamedTuple):
    """A worker of this node, or the relay of another one."""

    role: Role
    number: int  # rank of a worker, or place of a node in the attempt

    def describe(self, names: Sequence[str], own: str) -> str:
        if self.role is Role.WORKER:
            return f"rank {self.number} on {own}"
        return f"the launcher of {names[self.number]}"


@dataclass
class _Operation:
    """Contributions to an operation so far."""

    kind: Kind
    begun: float = field(default_factory=time.monotonic)
    parts: dict[_Peer, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Position:
    """A relay's place in the tree.

    Attributes:
        index: Of this node in the attempt.
        names: Of all nodes of the attempt.
        per_node: Workers on a node.
    """

    index: int
    names: Sequence[str]
    per_node: int

    @property
    def world_size(self) -> int:
        return len(self.names) * self.per_node

    @property
    def parent(self) -> int | None:
        return (self.index - 1) // FAN_OUT if self.index else None

    def workers(self) -> range:
        """Ranks of this node's workers."""
        return range(self.index * self.per_node, (self.index + 1) * self.per_node)

    def below(self) -> range:
        """Indices of the nodes directly below this one."""
        first = self.index * FAN_OUT + 1
        return range(first, max(first, min(first + FAN_OUT, len(self.names))))

    def ranks_below(self, node: int) -> frozenset[int]:
        """Ranks of all workers on a node and on those below it."""
        found, waiting = set(range(node * self.per_node, (node + 1) * self.per_node)), [node]
        while waiting:
            at = Position(waiting.pop(), self.names, self.per_node)
            for child in at.below():
                waiting.append(child)
                found |= {*range(child * self.per_node, (child + 1) * self.per_node)}
        return frozenset(found)


class Relay:
    """One node's relay; `start` opens its sockets, `close` ends it.

    Args:
        path: Of the Unix socket for this node's workers, in a folder that only this user may enter.
        root: Host and port of the relay of node 0.
        secret: What only this attempt's launchers and workers know.
        port: Port for the nodes below this one, 0 for any; the root's is that of `root`.
    """

    def __init__(
        self, position: Position, path: Path, root: tuple[str, int], secret: bytes, port: int = 0
    ) -> None:
        self.position, self.path = position, path
        self._root, self._secret, self._port = root, secret, port
        self._expected = {_Peer(Role.WORKER, rank) for rank in position.workers()}
        self._expected |= {_Peer(Role.NODE, node) for node in position.below()}
        self._ranks: dict[_Peer, Callable[[int], bool]] = {
            peer: self._selects(peer) for peer in self._expected
        }
        self._below: dict[_Peer, Connection] = {}
        self._peers: dict[Connection, _Peer] = {}
        self._left: set[_Peer] = set()
        self._counts = dict.fromkeys(self._expected, 0)  # contributions so far
        self._above: Connection | None = None
        self._held: list[Frame] = []  # for the relay above, until it is connected
        self._operations: deque[_Operation] = deque()
        self._first = 0  # number of the oldest of them
        self._fault: str | None = None
        self._refused = False  # whether a refused connection has been logged
        self._addresses: dict[int, tuple[str, int]] = {}  # root: node → where it listens
        self._asking: dict[Connection, int] = {}  # root: nodes that wait for their parent's address
        self._guests: dict[socket.socket, Guest] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._found: deque[Connection | str] = deque()  # from the connecting thread
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._servers: list[socket.socket] = []

    def start(self) -> None:
        """Listen, and relay in a thread from now on; NodeError if a port or the path is refused."""
        self._wake.setblocking(False)
        server = socket.socket(socket.AF_UNIX)
        try:
            server.bind(str(self.path))
            server.listen(socket.SOMAXCONN)
        except OSError as error:
            server.close()
            raise NodeError(
                f"the control plane cannot make its socket {self.path}: {error.strerror}; free "
                "space in the memory disk of the node"
            ) from error
        self._servers.append(server)
        if self.position.index == 0 and len(self.position.names) > 1:
            self._servers.append(self._listen(*self._root))
        elif self.position.below():
            self._servers.append(self._listen("", self._port))
        for one in (*self._servers, self._wake):
            one.setblocking(False)
            self._selector.register(one, selectors.EVENT_READ)
        if self.position.index:
            threading.Thread(target=self._connect, name="control-up", daemon=True).start()
        self._thread.start()

    def close(self) -> None:
        """End the relay; what is below it and has not left fails."""
        if self._thread.ident is None:
            self._release()
            return
        self._closing.set()
        with suppress(OSError):  # it has noticed already
            self._waker.send(b"x")
        self._thread.join(_LEAVE_S + 1.0)

    def _listen(self, address: str, port: int) -> socket.socket:
        deadline = time.monotonic() + _PORT_S
        while True:
            try:
                return listen(address, port)
            except OSError as error:
                if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                    time.sleep(RETRY_S)
                    continue
                name = self.position.names[self.position.index]
                raise NodeError(
                    f"the control plane cannot listen on port {port} of {name}: {error.strerror}; "
                    "end the program that uses it, or set another cluster.master_port (the control "
                    "plane uses the port after it)"
                ) from error

    def _run(self) -> None:
        begun, leave_at = time.monotonic(), float("inf")
        try:
            while True:
                now = time.monotonic()
                if self._closing.is_set():
                    leave_at = min(leave_at, now + _LEAVE_S)
                    busy = any(c.unsent for c in self._connections())
                    if not busy or now >= leave_at:
                        return
                self._check_time(begun, now)
                for key, mask in self._selector.select(self._patience(begun, now)):
                    self._serve(key, mask)
        finally:
            self._release()

    def _release(self) -> None:
        for connection in self._connections():
            connection.socket.close()
        for one in (*self._servers, *self._guests, self._wake, self._waker):
            one.close()
        self._selector.close()
        self.path.unlink(missing_ok=True)

    def _connections(self) -> list[Connection]:
        above = [] if self._above is None else [self._above]
        return [*self._below.values(), *above, *self._asking]

    def _patience(self, begun: float, now: float) -> float:
        """Seconds until a time limit may have passed."""
        deadlines = [guest.deadline for guest in self._guests.values()]
        if self._missing():
            deadlines.append(begun + RENDEZVOUS_S)
        if self._operations:
            deadlines.append(self._operations[0].begun + OPERATION_S)
        if self._closing.is_set():
            deadlines.append(now + RETRY_S)
        return max(0.0, min(deadlines, default=now + 60.0) - now)

    def _missing(self) -> Collection[_Peer]:
        return self._expected - self._below.keys() - self._left

    def _check_time(self, begun: float, now: float) -> None:
        late = [peer for peer, guest in self._guests.items() if guest.deadline <= now]
        for peer in late or list(self._guests)[:-_MAX_GUESTS]:
            self._dismiss(peer)
        if self._fault is not None:
            return
        missing = self._missing()
        if missing and now - begun >= RENDEZVOUS_S:
            self._fail(
                f"Timed out waiting for {self._describe(missing)}: not connected after "
                f"{RENDEZVOUS_S:.0f} s; a firewall may block connections between the nodes"
            )
        elif self._operations and now - self._operations[0].begun >= OPERATION_S:
            late_peers = self._expected - self._operations[0].parts.keys()
            self._fail(
                f"Timed out waiting for {self._describe(late_peers)} after {OPERATION_S:.0f} s"
            )

    def _describe(self, peers: Collection[_Peer]) -> str:
        own = self.position.names[self.position.index]
        names = [peer.describe(self.position.names, own) for peer in sorted(peers)]
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

    def _serve(self, key: selectors.SelectorKey, mask: int) -> None:
        found = key.fileobj
        assert isinstance(found, socket.socket)
        if found in self._servers:
            self._accept(found)
        elif found is self._wake:
            with suppress(BlockingIOError):
                found.recv(64)
            while self._found:
                self._set_above(self._found.popleft())
        elif found in self._guests:
            self._greet(found)
        else:
            connection: Connection = key.data
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

    def _accept(self, server: socket.socket) -> None:
        with suppress(OSError):
            peer, _ = server.accept()
            self._guests[peer] = Guest(peer, time.monotonic() + _GREETING_S)
            self._selector.register(peer, selectors.EVENT_READ)

    def _dismiss(self, peer: socket.socket) -> None:
        self._selector.unregister(peer)
        del self._guests[peer]
        peer.close()

    def _greet(self, peer: socket.socket) -> None:
        try:
            claim = self._guests[peer].greet(self._secret, self.position.world_size)
            if claim is None:
                return
            found = _Peer(claim.role, claim.number)
            node = claim.role is Role.NODE
            asks = node and self.position.index == 0 and found not in self._expected
            if not asks and (found not in self._missing()):
                raise ConnectionRefusedError(f"{found} is not expected")
        except (OSError, ValueError) as error:
            if not isinstance(error, BlockingIOError):
                # Once: a port scan must not fill the log.
                level = logging.DEBUG if self._refused else logging.WARNING
                self._refused = self._refused or isinstance(error, ConnectionRefusedError)
                log.log(level, "control plane: refused a connection: %s", error)
                self._dismiss(peer)
            return
        del self._guests[peer]
        connection = Connection(peer)
        self._selector.modify(peer, selectors.EVENT_READ, connection)
        if asks:
            self._asking[connection] = claim.number
        else:
            self._below[found], self._peers[connection] = connection, found
        if self._fault is not None:
            self._send(connection, Frame(Kind.FAULT, 0, self._fault.encode()))

    def _handle(self, connection: Connection, frame: Frame) -> None:
        if connection is self._above:
            if frame.kind is Kind.FAULT:
                self._fail(frame.payload.decode())
            else:
                self._deliver(frame)
            return
        if frame.kind is Kind.LISTENS:
            self._register(connection, int(frame.payload or b"0"))
            return
        peer = self._peers.get(connection)
        if peer is None:
            return
        if frame.kind is Kind.FAULT:
            self._fail(frame.payload.decode())
        elif frame.kind is Kind.LEAVE:
            self._leave(peer)
        else:
            self._contribute(peer, frame)

    def _contribute(self, peer: _Peer, frame: Frame) -> None:
        number = self._counts[peer]
        self._counts[peer] = number + 1
        place = number - self._first
        if place == len(self._operations):
            self._operations.append(_Operation(frame.kind))
        operation = self._operations[place]
        if operation.kind is not frame.kind or frame.number != number:
            self._fail(
                f"{self._describe([peer])} called {frame.kind.name} {frame.number} where others "
                f"called {operation.kind.name} {number}: the workers run different code"
            )
            return
        operation.parts[peer] = frame.payload
        while self._operations and len(self._operations[0].parts) == len(self._expected):
            first = self._operations.popleft()
            combined = combine(first.kind, first.parts.values())
            result = Frame(first.kind, self._first, combined)
            self._first += 1
            if self.position.index == 0:
                self._deliver(result)
            else:
                self._up(result)
        if self._left:
            self._fail_if_left()

    def _deliver(self, result: Frame) -> None:
        for peer, connection in self._below.items():
            payload = share(result.kind, result.payload, self._ranks[peer])
            self._send(connection, result._replace(payload=payload))

    def _leave(self, peer: _Peer) -> None:
        """A worker, or all workers of the nodes below one, ended as planned."""
        self._left.add(peer)
        connection = self._below.pop(peer)
        del self._peers[connection]
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._fail_if_left()
        if self._left == self._expected and self.position.index:
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
        if self._asking.pop(connection, None) is not None:
            return
        reason = "" if isinstance(error, ConnectionResetError) else f" ({error})"
        if connection is self._above:
            self._above = None
            parent = self.position.parent or 0
            name = f"the launcher of {self.position.names[parent]}"
            self._fail(f"Connection closed by peer: {name}{reason}")
            return
        peer = self._peers.pop(connection, None)
        if peer is not None:
            del self._below[peer]
            self._left.add(peer)
            self._fail(f"Connection closed by peer: {self._describe([peer])}{reason}")

    def _fail(self, text: str) -> None:
        """Pass on why no operation can complete any more; the first reason counts."""
        if self._fault is not None:
            return
        self._fault = text
        log.debug("control plane: %s", text)
        frame = Frame(Kind.FAULT, 0, text.encode())
        for connection in [*self._below.values(), *self._asking]:
            self._send(connection, frame)
        if self.position.index:
            self._up(frame)

    def _up(self, frame: Frame) -> None:
        if self._above is None:
            self._held.append(frame)
        else:
            self._send(self._above, frame)

    def _send(self, connection: Connection, frame: Frame) -> None:
        with suppress(OSError):  # noticed when the connection is read
            connection.queue(frame)
            self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        """Wait for the connection to be writable too while something is unsent."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        with suppress(KeyError, ValueError):
            if self._selector.get_key(connection.socket).events != events:
                self._selector.modify(connection.socket, events, connection)

    def _selects(self, peer: _Peer) -> Callable[[int], bool]:
        if peer.role is Role.WORKER:
            return peer.number.__eq__
        return self.position.ranks_below(peer.number).__contains__

    # The connection to the relay above, in a thread of its own until it is made.

    def _connect(self) -> None:
        try:
            found: Connection | str = self._find_parent(time.monotonic() + RENDEZVOUS_S)
        except (OSError, NodeError) as error:
            found = (
                f"Timed out waiting for the launcher of {self.position.names[0]} at "
                f"{self._root[0]}:{self._root[1]} after {RENDEZVOUS_S:.0f} s: {error}; a firewall "
                "may block connections between the nodes"
            )
        self._found.append(found)
        with suppress(OSError):  # closed meanwhile
            self._waker.send(b"x")

    def _find_parent(self, deadline: float) -> Connection:
        """Connect to the relay above, whose address the root knows."""
        while True:
            try:
                connection = self._dial(self._root, deadline)
                port = self._servers[-1].getsockname()[1] if self.position.below() else 0
                connection.queue(Frame(Kind.LISTENS, 0, b"%d" % port))
                if not self.position.parent:
                    return connection
                connection.socket.settimeout(max(1.0, deadline - time.monotonic()))
                host, _, number = self._answer(connection).rpartition(":")
                connection.socket.close()
                return self._dial((host, int(number)), deadline)
            except OSError:
                # The root or the relay above starts later, or an earlier attempt's still ends.
                if time.monotonic() > deadline or self._closing.is_set():
                    raise
                time.sleep(RETRY_S)

    def _answer(self, connection: Connection) -> str:
        while True:
            for frame in connection.receive():
                if frame.kind is Kind.FAULT:
                    raise NodeError(frame.payload.decode())
                return frame.payload.decode()

    def _dial(self, address: tuple[str, int], deadline: float) -> Connection:
        peer = socket.create_connection(address, timeout=5.0)
        try:
            # If nobody listens yet on an ephemeral port, TCP may connect a socket to itself; the
            # root could then never listen there.
            if peer.getsockname() == peer.getpeername():
                raise ConnectionRefusedError("connected to itself")
            peer.settimeout(_INTRODUCTION_S)
            introduce(
                peer, Claim(Role.NODE, self.position.index, self.position.world_size), self._secret
            )
        except BaseException:
            peer.close()
            raise
        return Connection(peer)

    def _set_above(self, found: Connection | str) -> None:
        if isinstance(found, str):
            self._fail(found)
            return
        found.socket.setblocking(False)
        self._above = found
        self._selector.register(found.socket, selectors.EVENT_READ, found)
        for frame in self._held:
            self._send(found, frame)
        self._held.clear()

    def _register(self, connection: Connection, port: int) -> None:
        """Root: note where a node listens; answer those that wait for an address."""
        node = self._asking.get(connection)
        if node is None:  # directly below the root
            node = self._peers[connection].number
        self._addresses[node] = (connection.socket.getpeername()[0], port)
        for waiting, index in [*self._asking.items()]:
            parent = Position(index, self.position.names, self.position.per_node).parent
            if parent in self._addresses:
                host, number = self._addresses[parent]
                self._send(waiting, Frame(Kind.PARENT, 0, f"{host}:{number}".encode()))
                del self._asking[waiting]
                # The other end closes it.
                self._selector.unregister(waiting.socket)
                waiting.socket.close()
