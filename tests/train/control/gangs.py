"""Control planes for tests: relays and workers in threads, or both in processes of their own."""

import multiprocessing as mp
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from slurmllm.core.errors import SlurmllmError
from slurmllm.train.control import relay as relays
from slurmllm.train.control import wire
from slurmllm.train.control.plane import ControlPlane
from slurmllm.train.control.relay import Position, Relay
from slurmllm.train.control.rendezvous import die_with_parent, free_port

T = TypeVar("T")
SECRET = b"known to this attempt"


class CountedConnection(wire.Connection):
    """A connection that counts its frames and their bytes, sent and received."""

    traffic: list[int]

    def queue(self, frame: bytes) -> None:
        self.traffic.append(len(frame))
        super().queue(frame)

    def receive(self) -> list[wire.Frame]:
        frames = super().receive()
        self.traffic += [len(frame.encode()) for frame in frames]
        return frames


def count_traffic(plane: ControlPlane) -> list[int]:
    """Return the bytes of each frame from now on, headers included; a list that grows."""
    connection = plane._connection
    if connection is None:
        return []
    connection.__class__ = CountedConnection
    assert isinstance(connection, CountedConnection)
    connection.traffic = []
    return connection.traffic


class Gang:
    """Relays of several nodes in threads of this process, and workers in others."""

    def __init__(self, folder: Path, nodes: int, per_node: int, port: int) -> None:
        names = tuple(f"n{index}" for index in range(nodes))
        self.root = "127.0.0.1", port
        self.positions = [Position(index, names, per_node) for index in range(nodes)]
        self.relays = [
            Relay(position, folder / f"control-{position.index}", self.root, SECRET)
            for position in self.positions
        ]
        self.planes: list[ControlPlane] = []

    @property
    def world_size(self) -> int:
        return self.positions[0].world_size

    def start(self) -> None:
        # The root last: the others try until it listens.
        for relay in reversed(self.relays):
            relay.start()

    def connect(self, rank: int, secret: bytes = SECRET) -> ControlPlane:
        path = self.relays[rank // self.positions[0].per_node].path
        plane = ControlPlane(rank, self.world_size, str(path), secret)
        self.planes.append(plane)
        return plane

    def run(self, work: Callable[[ControlPlane], T], timeout_s: float = 60) -> list[T]:
        """Call a function with each worker's control plane; its results by rank."""
        ranks = range(self.world_size)
        with ThreadPoolExecutor(self.world_size) as pool:
            results = [pool.submit(lambda rank=rank: work(self.connect(rank))) for rank in ranks]
            return [result.result(timeout_s) for result in results]

    def close(self) -> None:
        for plane in self.planes:
            plane.close()
        for relay in self.relays:
            relay.close()


@contextmanager
def gang(nodes: int, per_node: int) -> Iterator[Gang]:
    # In a short folder: the path of a Unix socket has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="control-") as folder:
        made = Gang(Path(folder), nodes, per_node, free_port())
        made.start()
        try:
            yield made
        finally:
            made.close()


def failure(work: Callable[[], Any]) -> str:
    """The message with which a call fails."""
    try:
        work()
    except SlurmllmError as error:
        return str(error)
    return "did not fail"


class Nodes:
    """Launchers with a relay each, as processes, and their workers; all beat until one fails."""

    def __init__(self, folder: Path, nodes: int, per_node: int, operation_s: float) -> None:
        context = mp.get_context("spawn")
        names = tuple(f"n{index}" for index in range(nodes))
        root = "127.0.0.1", free_port()
        self.launchers, self._pipes = [], []
        for index in range(nodes):
            pipe, theirs = context.Pipe()
            arguments = (Position(index, names, per_node), folder, root, operation_s, theirs)
            self.launchers.append(context.Process(target=_launch, args=arguments))
            self.launchers[-1].start()
            theirs.close()
            self._pipes.append(pipe)
        self.pids = [self._receive(index) for index in range(nodes)]  # of the workers, by node

    def wait_until_all_beat(self) -> None:
        for index in range(len(self.launchers)):
            assert self._receive(index) == "beats"

    def failures(self, node: int) -> list[str]:
        """The messages of a node's workers, which fail some time."""
        return [self._receive(node) for _ in self.pids[node]]

    def send(self, node: int, number: signal.Signals, launcher: bool = True) -> None:
        """Signal a node's workers, and its launcher."""
        for pid in self.pids[node]:
            os.kill(pid, number)
        if launcher:
            self.kill_launcher(node, number)

    def kill_launcher(self, node: int, number: signal.Signals = signal.SIGKILL) -> None:
        pid = self.launchers[node].pid
        assert pid is not None
        os.kill(pid, number)

    def close(self) -> None:
        for process, pipe in zip(self.launchers, self._pipes, strict=True):
            process.kill()
            process.join()
            process.close()
            pipe.close()

    def _receive(self, node: int) -> Any:
        assert self._pipes[node].poll(300), f"node {node} does not answer"
        return self._pipes[node].recv()


def _launch(
    position: Position, folder: Path, root: tuple[str, int], operation_s: float, answers: Connection
) -> None:
    die_with_parent()
    relays.OPERATION_S, relays._ROOT_MARGIN_S = operation_s, operation_s / 4
    path, context = folder / f"control-{position.index}", mp.get_context("spawn")
    lock = context.Lock()
    Relay(position, path, root, SECRET).start()
    workers = []
    for rank in position.workers():
        first = rank == position.workers()[0]
        arguments = (rank, position.world_size, first, str(path), answers, lock)
        workers.append(context.Process(target=_beat, args=arguments))
    with lock:
        for worker in workers:
            worker.start()
        answers.send([worker.pid for worker in workers])
    for worker in workers:
        worker.join()
    time.sleep(60)  # until the test ends it


def _beat(
    rank: int, world_size: int, first: bool, path: str, answers: Connection, lock: Any
) -> None:
    die_with_parent()
    plane = ControlPlane(rank, world_size, path, SECRET)
    try:
        plane.barrier()
        if first:
            with lock:
                answers.send("beats")
        while True:
            plane.barrier()
            time.sleep(0.02)
    except SlurmllmError as error:
        with lock:
            answers.send(str(error))
