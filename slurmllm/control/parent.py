"""How a relay finds the relay above it, whose address only the root knows.

All launchers know the root's address. A relay connects to it and reports the port on which it
listens itself; if the relay above it is another one, the root answers with that one's address as
soon as it is known.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from slurmllm.control.wire import FAULTS, Claim, Connection, Frame, Kind, introduce

RETRY_S = 0.1
_CONNECT_S = 5.0
_INTRODUCTION_S = 60.0  # for the other relay to answer: it may be busy


class ParentSearch:
    """A thread that connects to the relay above; `found` gets the connection, or a fault.

    Args:
        port: On which this relay listens for the nodes below it, 0 if there are none.
        names: Of the root's node and of the node above, which may be the same.
        limit_s: Until it gives up.
    """

    def __init__(
        self,
        claim: Claim,
        root: tuple[str, int],
        secret: bytes,
        port: int,
        names: tuple[str, str],
        limit_s: float,
        found: Callable[[Connection | Frame], None],
    ) -> None:
        self._claim, self._root, self._secret, self._port = claim, root, secret, port
        self._root_name, self._parent_name = names
        self._limit_s, self._found = limit_s, found
        self._waits_for = f"the launcher of {self._root_name} at {root[0]}:{root[1]}"
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._socket: socket.socket | None = None  # the one in use, which `close` shuts down
        self._thread = threading.Thread(target=self._run, name="control-parent", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the search; `found` is not called any more."""
        with self._lock:
            self._closed.set()
            if self._socket is not None:
                with suppress(OSError):  # not connected any more
                    self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(_CONNECT_S + 1.0)

    def _run(self) -> None:
        try:
            found = self._search(time.monotonic() + self._limit_s)
        except OSError as error:
            text = (
                f"Timed out waiting for {self._waits_for} after {self._limit_s:.0f} s: {error}; a "
                "firewall may block connections between the nodes"
            )
            found = Frame(Kind.FAULT, 0, text.encode())
        with self._lock:
            self._socket = None
            if not self._closed.is_set():
                self._found(found)
            elif isinstance(found, Connection):
                found.socket.close()

    def _search(self, deadline: float) -> Connection | Frame:
        """Return the connection, or the fault that the root answers; OSError after the deadline."""
        while True:
            try:
                connection = self._dial(self._root, self._root_name)
                connection.queue(Frame(Kind.LISTENS, 0, b"%d" % self._port))
                if self._parent_name == self._root_name:
                    return connection
                with connection.socket:
                    self._waits_for = f"the launcher of {self._parent_name} to report its address"
                    connection.socket.settimeout(max(1.0, deadline - time.monotonic()))
                    answer = connection.receive_one()
                if answer.kind in FAULTS:
                    return answer
                host, _, port = answer.payload.decode().rpartition(":")
                return self._dial((host, int(port)), self._parent_name)
            except OSError:
                # The root or the relay above starts later, or an earlier attempt's still ends.
                if time.monotonic() > deadline or self._closed.wait(RETRY_S):
                    raise

    def _dial(self, address: tuple[str, int], name: str) -> Connection:
        self._waits_for = f"the launcher of {name} at {address[0]}:{address[1]}"
        peer = socket.create_connection(address, timeout=_CONNECT_S)
        try:
            with self._lock:
                if self._closed.is_set():
                    raise ConnectionAbortedError("closed meanwhile")
                self._socket = peer
            # If nobody listens yet on an ephemeral port, TCP may connect a socket to itself; the
            # root could then never listen there.
            if peer.getsockname() == peer.getpeername():
                raise ConnectionRefusedError("connected to itself")
            peer.settimeout(_INTRODUCTION_S)
            introduce(peer, self._claim, self._secret)
        except BaseException:
            peer.close()
            raise
        return Connection(peer)
