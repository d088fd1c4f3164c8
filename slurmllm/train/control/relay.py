"""The control plane's relay: a thread in every launcher, between its workers and the other nodes.

The relays of all other nodes connect to that of node 0, the root. Each relay waits for one
contribution to an operation from every worker of its node, and the root from every other relay;
it combines them (`wire.combine`). The result goes down the same way. Operations are numbered and
every worker calls them in the same order, so several may be under way at a time.

When a connection closes before its worker has left, or a contribution does not come in time, every
worker gets a fault that names the worker or the node, and fails with it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmllm.core.errors import NodeError
from slurmllm.core.format import format_names
from slurmllm.train.control.rendezvous import listen_for_nodes
from slurmllm.train.control.wire import (
    FAULTS,
    Connection,
    Frame,
    Kind,
    Peer,
    Role,
    combine,
    prove,
    read_claim,
)

RENDEZVOUS_S = 600.0  # until all have connected: nodes start minutes apart
OPERATION_S = 7200.0  # for all contributions to an operation: peers may compile meanwhile
RETRY_S = 0.1  # between attempts to connect to the root
# Any program that reaches the root's port can connect: none may delay a worker, fill the log or use
# up the launcher's descriptors. A node that gives way connects again.
STRANGER_S = 5.0  # for a connection from another machine to prove itself
MAX_PENDING = 256  # such connections; the oldest gives way
_ROOT_MARGIN_S = 5.0  # longer at the root: the relay that knows whom it misses reports it first
_CONNECT_S = 5.0
_PROVE_S = 60.0  # for the root to answer: it may be busy
_LEAVE_S = 5.0  # for the last messages to be sent at the end
_PAUSE_S = 0.01
_OTHER_FILES = 512  # of the root's launcher, apart from the connections of other nodes
_ROOT = Peer(Role.NODE, 0)

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
    deadline: asyncio.TimerHandle
    parts: dict[Peer, bytes] = field(default_factory=dict)


class Relay:
    """One node's relay; `start` opens its sockets, `close` ends it.

    Args:
        path: Of the Unix socket for this node's workers, in a folder that only this user may enter.
        root: Host and port of the relay of node 0.
        secret: What only this attempt's launchers and workers know.
    """

    _first = 0  # number of the oldest operation
    _fault: Frame | None = None
    _has_warned = False
    _num_reads = 0

    def __init__(
        self, position: Position, path: Path, root: tuple[str, int], secret: bytes
    ) -> None:
        self.position = position
        self.path = path
        self._root = root
        self._secret = secret
        workers = [Peer(Role.WORKER, rank) for rank in position.workers()]
        nodes = [Peer(Role.NODE, node) for node in range(1, len(position.names))]
        if position.index:
            nodes = []  # all connect to the root
        # In this order contributions are combined, whatever the order in which they arrive.
        self._expected = (*workers, *nodes)
        self._operation_s = OPERATION_S + (_ROOT_MARGIN_S if nodes else 0.0)
        self._connections: dict[Peer, Connection] = {}  # to those expected, and to the root
        self._strangers: dict[socket.socket, asyncio.Task[None]] = {}  # the oldest first
        self._missing = {*self._expected}  # that have not connected yet
        self._left: set[Peer] = set()
        self._counts = dict.fromkeys(self._expected, 0)  # contributions so far
        self._operations: deque[_Operation] = deque()
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._closing = asyncio.Event()
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
            raise NodeError(
                f"the control plane cannot make its socket {self.path}: {error.strerror or error}; "
                "free space in the memory disk of the node"
            ) from error
        if self.position.index == 0 and len(self.position.names) > 1:
            allow_open_files(len(self.position.names) + MAX_PENDING + _OTHER_FILES)
            self._servers.append(listen_for_nodes(*self._root, self.position.name))
        self._loop = self._runner.get_loop()
        self._loop.set_exception_handler(self._on_error)
        self._thread.start()

    def close(self) -> None:
        """End the relay; workers and nodes that are still connected get an error."""
        if self._thread.ident is None:
            self._release()
            return
        with suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(_LEAVE_S + _CONNECT_S + 5.0)

    def _run(self) -> None:
        try:
            with self._runner:
                self._runner.run(self._relay())
        finally:
            self._release()

    def _on_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # Its workers and the other nodes must not wait for a relay that has failed.
        error = context.get("exception")
        log.error("control plane: the relay has failed", exc_info=error)
        self._fail(f"the launcher of {self.position.name}: {error!r}", Kind.MISUSE)

    async def _relay(self) -> None:
        """Serve all connections until the relay is closed and its last messages are sent."""
        closing = asyncio.create_task(self._closing.wait())
        if self.position.index:
            # The root's launcher may start later; the workers wait meanwhile.
            connecting = asyncio.create_task(self._connect_to_root())
            await asyncio.wait({connecting, closing}, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                return
            connecting.result()
        for server in self._servers:
            server.setblocking(False)
            self._loop.add_reader(server, self._accept, server)
        rendezvous = self._loop.call_later(RENDEZVOUS_S, self._require_all)
        await closing
        rendezvous.cancel()
        deadline = time.monotonic() + _LEAVE_S
        num_reads = -1
        while time.monotonic() < deadline:
            unsent = any(connection.unsent for connection in self._connections.values())
            if num_reads == self._num_reads and not unsent:
                return
            num_reads = self._num_reads
            await asyncio.sleep(_PAUSE_S)

    async def _connect_to_root(self) -> None:
        deadline = time.monotonic() + RENDEZVOUS_S
        while _ROOT not in self._connections:
            peer: socket.socket | None = None
            try:
                peer = socket.socket()
                peer.setblocking(False)
                async with asyncio.timeout(_CONNECT_S):
                    await self._loop.sock_connect(peer, self._root)
                # If nobody listens yet on an ephemeral port, TCP may connect a socket to itself;
                # the root could then never listen there.
                if peer.getsockname() == peer.getpeername():
                    raise ConnectionRefusedError("connected to itself")
                claim = Peer(Role.NODE, self.position.index)
                async with asyncio.timeout(_PROVE_S):
                    await prove(peer, claim, self.position.world_size, self._secret)
                self._connections[_ROOT] = Connection(peer)
                self._loop.add_reader(peer, self._read, _ROOT)
            except OSError as error:
                if time.monotonic() > deadline:
                    host, port = self._root
                    self._fail(
                        f"Timed out waiting for the launcher of {self.position.names[0]} at "
                        f"{host}:{port} after {RENDEZVOUS_S:.0f} s: {error or 'no answer'}; a "
                        "firewall may block connections between the nodes"
                    )
                    return
                await asyncio.sleep(RETRY_S)
            finally:
                if _ROOT not in self._connections and peer is not None:
                    peer.close()

    def _release(self) -> None:
        for connection in self._connections.values():
            connection.socket.close()
        for opened in (*self._servers, *self._strangers):
            opened.close()
        self.path.unlink(missing_ok=True)

    def _require_all(self) -> None:
        if self._missing:
            self._fail(
                f"Timed out waiting for {self._describe(self._missing)}: not connected after "
                f"{RENDEZVOUS_S:.0f} s; a firewall may block connections between the nodes"
            )

    def _describe(self, peers: Collection[Peer]) -> str:
        names = [
            f"rank {number} on {self.position.name}"
            if role is Role.WORKER
            else f"the launcher of {self.position.names[number]}"
            for role, number in sorted(peers)
        ]
        return format_names(names, 4)

    def _accept(self, server: socket.socket) -> None:
        self._num_reads += 1
        limit = MAX_PENDING
        try:
            peer, _ = server.accept()
            peer.setblocking(False)
            self._strangers[peer] = self._loop.create_task(self._admit(peer))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                return
            self._warn("too many open files in the launcher: raise `ulimit -n`")
            limit = 0
            time.sleep(10 * _PAUSE_S)  # the waiting connection is reported at once again
        remote = [stranger for stranger in self._strangers if stranger.family != socket.AF_UNIX]
        if len(remote) > limit:
            self._strangers[remote[0]].cancel()

    async def _admit(self, peer: socket.socket) -> None:
        """Serve a connection that proves to be one of those missing; close any other."""
        is_admitted = False
        try:
            async with asyncio.timeout(None if peer.family == socket.AF_UNIX else STRANGER_S):
                claim, world_size, answer = await read_claim(peer, self._secret)
            if world_size != self.position.world_size or claim not in self._missing:
                raise ConnectionRefusedError(
                    f"{claim.role.name.lower()} {claim.number} of a run of {world_size}: unexpected"
                )
            self._missing.remove(claim)
            with suppress(OSError):  # noticed when the connection is read
                await self._loop.sock_sendall(peer, answer)
            self._connections[claim] = Connection(peer)
            is_admitted = True
            self._loop.add_reader(peer, self._read, claim)
            if self._fault is not None:
                self._send(claim, self._fault.encode())
        except ConnectionRefusedError as error:
            self._warn(f"refused a connection: {error}")
        except OSError:
            pass  # closed, or it has not greeted in time
        finally:
            del self._strangers[peer]
            if not is_admitted:
                peer.close()

    def _warn(self, message: str) -> None:
        """Log it, the first time as a warning: a port scan must not fill the log."""
        log.log(
            logging.DEBUG if self._has_warned else logging.WARNING, "control plane: %s", message
        )
        self._has_warned = True

    def _read(self, peer: Peer) -> None:
        self._num_reads += 1
        try:
            frames = self._connections[peer].receive()
        except BlockingIOError:
            return
        except (OSError, NodeError, ValueError) as error:
            self._lost(peer, error)
            return
        for frame in frames:
            has_left = peer not in self._connections
            if frame.kind in FAULTS:
                self._fail(frame.payload.decode(), frame.kind)
            elif peer == _ROOT:
                self._deliver(frame)
            elif frame.kind is Kind.LEAVE and not has_left:
                self._leave(peer)
            elif self._fault is None and not has_left:
                self._contribute(peer, frame)

    def _contribute(self, peer: Peer, frame: Frame) -> None:
        number = self._counts[peer]
        self._counts[peer] = number + 1
        index = number - self._first
        if index == len(self._operations):
            deadline = self._loop.call_later(self._operation_s, self._time_out)
            self._operations.append(_Operation(frame.kind, deadline))
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

    def _time_out(self) -> None:
        """Report who is late in the oldest operation, whose time is over."""
        late = {*self._expected} - self._operations[0].parts.keys()
        self._fail(f"Timed out waiting for {self._describe(late)} after {OPERATION_S:.0f} s")

    def _complete(self, operation: _Operation) -> None:
        operation.deadline.cancel()
        kind = operation.kind
        parts = operation.parts
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
        whole = result.encode()
        empty = result._replace(payload=b"").encode()
        for peer in self._connections.keys() - {_ROOT}:
            # Nobody but rank 0 reads the values that are gathered.
            is_read = result.kind is not Kind.GATHER or peer == (Role.WORKER, 0)
            self._send(peer, whole if is_read else empty)

    def _leave(self, peer: Peer) -> None:
        self._drop(peer)
        self._fail_if_left()
        if len(self._left) == len(self._expected) and self.position.index:
            self._up(Frame(Kind.LEAVE, 0, b""))

    def _fail_if_left(self) -> None:
        """Some have left, and others wait for them in an operation."""
        gone = self._left - self._operations[0].parts.keys() if self._operations else ()
        if gone:
            self._fail(f"Connection closed by peer: {self._describe(gone)} has ended")

    def _lost(self, peer: Peer, error: Exception) -> None:
        self._drop(peer)
        reason = "" if isinstance(error, ConnectionResetError) else f" ({error})"
        self._fail(f"Connection closed by peer: {self._describe([peer])}{reason}")

    def _drop(self, peer: Peer) -> None:
        connection = self._connections.pop(peer)
        self._loop.remove_reader(connection.socket)
        self._loop.remove_writer(connection.socket)
        connection.socket.close()
        self._left.add(peer)

    def _fail(self, reason: str, kind: Kind = Kind.FAULT) -> None:
        """Pass on why no operation can complete any more; the first reason counts."""
        if self._fault is not None:
            return
        self._fault = Frame(kind, 0, reason.encode())
        for operation in self._operations:
            operation.deadline.cancel()
        self._operations.clear()
        log.debug("control plane: %s", reason)
        for peer in self._connections:
            self._send(peer, self._fault.encode())

    def _up(self, frame: Frame) -> None:
        if _ROOT in self._connections:
            self._send(_ROOT, frame.encode())

    def _send(self, peer: Peer, frame: bytes) -> None:
        connection = self._connections[peer]
        with suppress(OSError):  # noticed when the connection is read
            connection.queue(frame)
            if connection.unsent:
                self._loop.add_writer(connection.socket, self._flush, peer)

    def _flush(self, peer: Peer) -> None:
        connection = self._connections[peer]
        try:
            connection.flush()
            if not connection.unsent:
                self._loop.remove_writer(connection.socket)
        except OSError as error:
            self._lost(peer, error)


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files, mostly 1,024, as far as that is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft not in (resource.RLIM_INFINITY, hard) and soft < limit:
        with suppress(OSError, ValueError):  # a connection beyond the limit is warned of
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
