"""A worker's end of the control plane.

All operations are collective: every worker calls the same ones in the same order. `reduce` begins
one and returns at once, so that a step does not wait for it; the others wait for their result.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BytesIO
from typing import Any, Literal, TypeVar

from slurmllm.core.errors import CodeError, ConfigError, NodeError, SlurmllmError
from slurmllm.train.control.relay import OPERATION_S
from slurmllm.train.control.rendezvous import own_secret
from slurmllm.train.control.wire import (
    FAULTS,
    Connection,
    Frame,
    Kind,
    Peer,
    Role,
    combine,
    encode_numbers,
    prove,
)

SOCKET = "SLURMLLM_CONTROL"  # path of the relay's Unix socket
Reduction = Literal["sum", "max", "min"]
Pending = Callable[
    [], list[Any]
]  # called once, waits for the numbers; NodeError if a worker failed
_MARGIN_S = 60.0  # the relay, which knows whom it waits for, reports a time-out first
T = TypeVar("T")


class ControlPlane:
    """One worker's connection to the relay of its node; a single worker needs none.

    Args:
        path: Of the relay's Unix socket; None for a single worker.

    Raises:
        NodeError: The relay does not respond or refuses this worker.
    """

    _connection: Connection | None = None
    _started = 0  # operations
    _fault: NodeError | CodeError | None = None

    def __init__(
        self, rank: int = 0, world_size: int = 1, path: str | None = None, secret: bytes = b""
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._results: dict[int, Frame] = {}
        if path is not None:
            self._connection = Connection(_connect(path, rank, world_size, secret))

    def reduce(self, values: Sequence[float], by: Reduction) -> Pending:
        """Begin to reduce the workers' lists of numbers, element by element."""
        number = self._start(Kind[by.upper()], encode_numbers(values))
        return lambda: list(json.loads(self._receive(number)))

    def all_reduce(self, values: Sequence[float], by: Reduction) -> list[Any]:
        """Reduce the workers' lists of numbers, element by element; integers stay integers."""
        return self.reduce(values, by)()

    def barrier(self) -> None:
        self.all_reduce((), "max")

    def first(self, value: T | None) -> T | None:
        """Return the value of the lowest rank that has one, on every worker; None if none has.

        Values are picklable; if no worker has one, no value is sent.
        """
        sender = self.world_size if value is None else self.rank
        (first,) = self.all_reduce([sender], "min")
        if first == self.world_size:
            return None
        return self.broadcast(value, first)

    def agree(self, work: Callable[[], T]) -> T:
        """Call `work` on every worker and return its result there; raise the first error on all."""
        results: list[T] = []
        fault: SlurmllmError | None = None
        try:
            results.append(work())
        except SlurmllmError as error:
            fault = error
        # A collective, which every worker has to reach: without it the others would wait.
        if first := self.first(fault):
            raise first
        return results[0]

    def from_first(self, work: Callable[[], T]) -> T:
        """Return the result of rank 0's `work` on all workers, or raise its error on all."""
        return self.broadcast(self.agree(lambda: work() if self.rank == 0 else None))

    def gather(self, value: T) -> list[T] | None:
        """Return the picklable values of all workers, by rank, on rank 0; None on the others."""
        values = BytesIO(self._wait(Kind.GATHER, pickle.dumps(value)))
        if self.rank:
            return None
        return [pickle.load(values) for _ in range(self.world_size)]  # noqa: S301

    def broadcast(self, value: T | None, rank: int = 0) -> T:
        """Return the picklable value of one worker on every worker."""
        payload = pickle.dumps(value) if self.rank == rank else b""
        received: T = pickle.loads(self._wait(Kind.BROADCAST, payload))  # noqa: S301 (this attempt)
        return received

    def close(self) -> None:
        """Leave as planned; operations in which others still wait for this worker fail."""
        if self._connection is not None:
            with suppress(OSError):
                self._connection.queue(Frame(Kind.LEAVE, 0, b"").encode())
            self._connection.socket.close()
            self._connection = None

    def _start(self, kind: Kind, payload: bytes) -> int:
        number = self._started
        self._started += 1
        frame = Frame(kind, number, payload)
        if self._connection is None:
            self._results[number] = frame._replace(payload=combine(kind, [payload]))
            return number
        try:
            self._connection.queue(frame.encode())
        except OSError:
            # The relay may have sent the reason before it closed.
            self._receive(number)
        return number

    def _wait(self, kind: Kind, payload: bytes) -> bytes:
        return self._receive(self._start(kind, payload))

    def _receive(self, number: int) -> bytes:
        while number not in self._results:
            if self._fault is not None:
                raise type(self._fault)(*self._fault.args)
            assert self._connection is not None
            try:
                frames = self._connection.receive()
            except TimeoutError as error:
                raise NodeError(
                    f"Timed out waiting for the launcher after {OPERATION_S + _MARGIN_S:.0f} s"
                ) from error
            except OSError as error:
                raise NodeError("Connection closed by peer: this node's launcher") from error
            for frame in frames:
                if frame.kind in FAULTS:
                    fault = CodeError if frame.kind is Kind.MISUSE else NodeError
                    self._fault = self._fault or fault(frame.payload.decode())
                else:
                    self._results[frame.number] = frame
        return self._results.pop(number).payload


def open_control(rank: int, world_size: int) -> ControlPlane:
    """Connect this worker by the launcher's variables, once its relay has reached the root."""
    if world_size == 1:
        return ControlPlane()
    path = os.environ.get(SOCKET)
    if path is None:
        raise ConfigError(f"{SOCKET} is not set: several workers are started by the launcher")
    return ControlPlane(rank, world_size, path, own_secret())


def _connect(path: str, rank: int, world_size: int, secret: bytes) -> socket.socket:
    limit_s = OPERATION_S + _MARGIN_S
    peer = socket.socket(socket.AF_UNIX)
    try:
        peer.connect(path)
        peer.setblocking(False)
        proof = prove(peer, Peer(Role.WORKER, rank), world_size, secret)
        asyncio.run(asyncio.wait_for(proof, limit_s))
    except OSError as error:
        peer.close()
        raise NodeError(
            f"Connection refused by this node's launcher at {path}: {error.strerror or error}"
        ) from error
    peer.settimeout(limit_s)
    return peer
