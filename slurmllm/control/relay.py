"""The control plane's relay: a thread in every launcher, between its workers and the other nodes.

The relays form a tree with that of node 0 at its root; node i is below node (i - 1) // FAN_OUT.
Each relay waits for one contribution to an operation from all that are directly below it, combines
them (`operations`) and passes one message up; the result comes down the same way. Operations are
numbered and every worker calls them in the same order, so several may be under way at a time.

When a connection closes before its worker has left, or a contribution does not come in time, every
worker gets a fault that names the worker or the node, and fails with it.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from slurmllm.control.operations import combine, shares
from slurmllm.control.parent import ParentSearch
from slurmllm.control.position import Peer, Position
from slurmllm.control.reception import Reception
from slurmllm.control.rendezvous import listen_for_nodes, source_address
from slurmllm.control.wire import FAULTS, Claim, Connection, Frame, Kind, Role
from slurmllm.errors import NodeError

__all__ = ["OPERATION_S", "Position", "Relay"]

RENDEZVOUS_S = 600.0  # until all below have connected: nodes start minutes apart
OPERATION_S = 7200.0  # for all contributions to an operation: peers may compile meanwhile
_LEVEL_S = 5.0  # longer for each level below a relay: the one that knows whom it misses is first
_LEAVE_S = 5.0  # for the last messages to be sent at the end
_PAUSE_S = 0.1

log = logging.getLogger(__name__)


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
        port: Port for the nodes below this one, 0 for any; the root's is that of `root`.
    """

    def __init__(
        self, position: Position, path: Path, root: tuple[str, int], secret: bytes, port: int = 0
    ) -> None:
        self.position, self.path = position, path
        self._root, self._secret, self._port = root, secret, port
        workers = [Peer(Role.WORKER, rank) for rank in position.workers()]
        nodes = [Peer(Role.NODE, node) for node in position.below()]
        # In this order contributions are combined, whatever the order in which they arrive.
        self._expected = (*workers, *nodes)
        self._owners = {worker.number: worker for worker in workers}
        for node in nodes:
            self._owners |= dict.fromkeys(position.ranks_below(node.number), node)
        self._below: dict[Peer, Connection] = {}
        self._peers: dict[Connection, Peer] = {}
        self._missing = {*self._expected}  # that have not connected yet
        self._left: set[Peer] = set()
        self._levels = position.levels_below()
        self._counts = dict.fromkeys(self._expected, 0)  # contributions so far
        self._above: Connection | None = None
        self._held: list[Frame] = []  # for the relay above, until it is connected
        self._operations: deque[_Operation] = deque()
        self._first = 0  # number of the oldest of them
        self._fault: Frame | None = None
        self._addresses: dict[int, tuple[str, int]] = {}  # root: node → where it listens
        self._asking: dict[Connection, int] = {}  # root: nodes that ask for their parent's address
        self._selector = selectors.DefaultSelector()
        self._reception = Reception(self._selector, secret, position.world_size)
        self._search: ParentSearch | None = None
        self._wake, self._waker = socket.socketpair()
        self._found: deque[Connection | Frame] = deque()  # from the search
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
        name = self.position.names[self.position.index]
        if self.position.index == 0 and len(self.position.names) > 1:
            self._servers.append(listen_for_nodes(*self._root, name))
        elif self.position.below():
            address = source_address(self._root[0])
            self._servers.append(listen_for_nodes(address, self._port, name))
        for one in (*self._servers, self._wake):
            one.setblocking(False)
            self._selector.register(one, selectors.EVENT_READ)
        if self.position.index:
            self._search = self._search_parent()
            self._search.start()
        self._thread.start()

    def _search_parent(self) -> ParentSearch:
        place = self.position
        port = self._servers[-1].getsockname()[1] if place.below() else 0
        claim = Claim(Role.NODE, place.index, place.world_size)
        names = place.names[0], place.names[place.parent or 0]

        def found(connection: Connection | Frame) -> None:
            self._found.append(connection)
            with suppress(OSError):  # closed meanwhile
                self._waker.send(b"x")

        return ParentSearch(claim, self._root, self._secret, port, names, RENDEZVOUS_S, found)

    def close(self) -> None:
        """End the relay; what is below it and has not left fails."""
        if self._thread.ident is None:
            self._release()
            return
        self._closing.set()
        with suppress(OSError):  # it has noticed already
            self._waker.send(b"x")
        self._thread.join(2 * _LEAVE_S + 5.0)  # the search may wait for a connection

    def _run(self) -> None:
        begun, leave_at = time.monotonic(), float("inf")
        try:
            while True:
                now = time.monotonic()
                closing = self._closing.is_set()
                self._check_time(begun, now)
                events = self._selector.select(0.0 if closing else self._patience(begun, now))
                for key, mask in events:
                    self._serve(key, mask)
                if closing:
                    leave_at = min(leave_at, now + _LEAVE_S)
                    unsent = any(connection.unsent for connection in self._connections())
                    if now >= leave_at or not (events or unsent):
                        return
                    if not events:
                        time.sleep(_PAUSE_S / 10)
        except Exception as error:
            # Its workers and the other nodes must not wait for a relay that is gone.
            log.exception("control plane: the relay has failed")
            name = self.position.names[self.position.index]
            self._fail(f"the launcher of {name}: {error!r}", Kind.MISUSE)
        finally:
            self._release()

    def _release(self) -> None:
        if self._search is not None:
            self._search.close()
        for connection in self._connections():
            connection.socket.close()
        for found in self._found:
            if isinstance(found, Connection):
                found.socket.close()
        self._reception.close()
        for one in (*self._servers, self._wake, self._waker):
            one.close()
        self._selector.close()
        self.path.unlink(missing_ok=True)

    def _connections(self) -> list[Connection]:
        above = [] if self._above is None else [self._above]
        return [*self._below.values(), *above, *self._asking]

    def _patience(self, begun: float, now: float) -> float:
        """Seconds until a time limit may have passed."""
        deadline = min(self._reception.next_deadline(), now + 60.0)
        if self._missing:
            deadline = min(deadline, begun + RENDEZVOUS_S)
        if self._operations:
            deadline = min(deadline, self._operations[0].begun + self._operation_s())
        return max(0.0, deadline - now)

    def _operation_s(self) -> float:
        return OPERATION_S + _LEVEL_S * self._levels

    def _check_time(self, begun: float, now: float) -> None:
        self._reception.dismiss_late(now)
        if self._fault is not None:
            return
        if self._missing and now - begun >= RENDEZVOUS_S:
            self._fail(
                f"Timed out waiting for {self._describe(self._missing)}: not connected after "
                f"{RENDEZVOUS_S:.0f} s; a firewall may block connections between the nodes"
            )
        elif self._operations and now - self._operations[0].begun >= self._operation_s():
            late = {*self._expected} - self._operations[0].parts.keys()
            self._fail(f"Timed out waiting for {self._describe(late)} after {OPERATION_S:.0f} s")

    def _describe(self, peers: Collection[Peer]) -> str:
        own = self.position.names[self.position.index]
        names = [peer.describe(self.position.names, own) for peer in sorted(peers)]
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

    def _serve(self, key: selectors.SelectorKey, mask: int) -> None:
        found = key.fileobj
        assert isinstance(found, socket.socket)
        if found in self._servers:
            self._reception.accept(found)
        elif found is self._wake:
            with suppress(BlockingIOError):
                found.recv(64)
            while self._found:
                self._set_above(self._found.popleft())
        elif found in self._reception:
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

    def _greet(self, peer: socket.socket) -> None:
        claim = self._reception.greet(peer, self._refuse)
        if claim is None:
            return
        found, connection = Peer(claim.role, claim.number), Connection(peer)
        self._selector.modify(peer, selectors.EVENT_READ, connection)
        if found in self._missing:
            self._missing.remove(found)
            self._below[found], self._peers[connection] = connection, found
        else:
            self._asking[connection] = claim.number
        if self._fault is not None:
            self._send(connection, self._fault)

    def _refuse(self, claim: Claim) -> str | None:
        """Why a peer of this attempt is refused."""
        found = Peer(claim.role, claim.number)
        asks = claim.role is Role.NODE and self.position.index == 0 and found not in self._expected
        return None if asks or found in self._missing else f"{self._describe([found])}: unexpected"

    def _handle(self, connection: Connection, frame: Frame) -> None:
        peer = self._peers.get(connection)
        if frame.kind in FAULTS:
            self._fail(frame.payload.decode(), frame.kind)
        elif connection is self._above:
            self._deliver(frame)
        elif frame.kind is Kind.LISTENS:
            self._register(connection, int(frame.payload))
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
        place = number - self._first
        if place == len(self._operations):
            self._operations.append(_Operation(frame.kind))
        operation = self._operations[place]
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
        same = result.encode() if parts is None else ()
        for peer, connection in self._below.items():
            own = None if parts is None else result._replace(payload=parts.get(peer, b""))
            self._send_encoded(connection, same if own is None else own.encode())

    def _leave(self, peer: Peer) -> None:
        """A worker, or all workers of the nodes below one, ended as planned."""
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

    def _fail(self, text: str, kind: Kind = Kind.FAULT) -> None:
        """Pass on why no operation can complete any more; the first reason counts."""
        if self._fault is not None:
            return
        self._fault = Frame(kind, 0, text.encode())
        self._operations.clear()
        log.debug("control plane: %s", text)
        for connection in [*self._below.values(), *self._asking]:
            self._send(connection, self._fault)
        if self.position.index:
            self._up(self._fault)

    def _up(self, frame: Frame) -> None:
        if self._above is None:
            self._held.append(frame)
        else:
            self._send(self._above, frame)

    def _send(self, connection: Connection, frame: Frame) -> None:
        self._send_encoded(connection, frame.encode())

    def _send_encoded(self, connection: Connection, parts: tuple[bytes, ...]) -> None:
        with suppress(OSError):  # noticed when the connection is read
            waits = connection.unsent
            connection.queue_encoded(parts)
            if connection.unsent != waits:
                self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        """Wait for the connection to be writable too while something is unsent."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        with suppress(KeyError, ValueError):
            if self._selector.get_key(connection.socket).events != events:
                self._selector.modify(connection.socket, events, connection)

    def _set_above(self, found: Connection | Frame) -> None:
        if isinstance(found, Frame):
            self._fail(found.payload.decode(), found.kind)
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
            # Not before it has reported where it listens itself: it closes after the answer.
            if index in self._addresses and parent in self._addresses:
                host, number = self._addresses[parent]
                self._send(waiting, Frame(Kind.PARENT, 0, f"{host}:{number}".encode()))
                del self._asking[waiting]
                self._selector.unregister(waiting.socket)
                waiting.socket.close()
