"""Connections to a relay that have not proved yet that they are of its attempt.

Any program that reaches the relay's port can connect: none of them may delay a worker, fill the log
or use up the launcher's descriptors.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import time
from collections.abc import Callable

from slurmllm.control.wire import Claim, Guest

MAX_GUESTS = 256  # connections from other machines; the oldest gives way and connects again
_GREETING_S = 5.0  # for another node's relay, which connects again if it was too slow
_WORKER_GREETING_S = 600.0  # through the Unix socket, which no other user reaches
_PAUSE_S = 0.1

log = logging.getLogger(__name__)


class Reception:
    """The guests of a relay, whose selector wakes it when one of them sends its greeting."""

    def __init__(self, selector: selectors.BaseSelector, secret: bytes, world_size: int) -> None:
        self._selector, self._secret, self._world_size = selector, secret, world_size
        self._guests: dict[socket.socket, Guest] = {}  # the oldest first
        self._warned = False  # once: a port scan must not fill the log

    def __contains__(self, peer: object) -> bool:
        return peer in self._guests

    def accept(self, server: socket.socket) -> None:
        try:
            peer, _ = server.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._make_room()
            return
        local = peer.family == socket.AF_UNIX
        limit_s = _WORKER_GREETING_S if local else _GREETING_S
        try:
            self._guests[peer] = Guest(peer, time.monotonic() + limit_s)
        except OSError:
            peer.close()
            return
        self._selector.register(peer, selectors.EVENT_READ)
        strangers = [] if local else self._strangers()
        if len(strangers) > MAX_GUESTS:
            self._dismiss(strangers[0])

    def greet(self, peer: socket.socket, refuse: Callable[[Claim], str | None]) -> Claim | None:
        """Read a guest's greeting; returns its claim once it is proved.

        The caller has the connection from then on. `refuse` returns why a claim is refused, None
        if it is not.
        """
        try:
            claim = self._guests[peer].greet(self._secret, self._world_size, refuse)
        except BlockingIOError:
            return None
        except (OSError, ValueError) as error:
            if isinstance(error, ConnectionRefusedError):
                level = logging.DEBUG if self._warned else logging.WARNING
                self._warned = True
                log.log(level, "control plane: refused a connection: %s", error)
            self._dismiss(peer)
            return None
        if claim is not None:
            del self._guests[peer]
        return claim

    def next_deadline(self) -> float:
        return min((guest.deadline for guest in self._guests.values()), default=float("inf"))

    def dismiss_late(self, now: float) -> None:
        if self._guests:
            for peer in [peer for peer, guest in self._guests.items() if guest.deadline <= now]:
                self._dismiss(peer)

    def close(self) -> None:
        for peer in self._guests:
            peer.close()
        self._guests.clear()

    def _strangers(self) -> list[socket.socket]:
        return [peer for peer in self._guests if peer.family != socket.AF_UNIX]

    def _make_room(self) -> None:
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
        del self._guests[peer]
        peer.close()
