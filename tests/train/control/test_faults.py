"""What the workers learn when one of them, a launcher or a node fails."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from train.control.gangs import SECRET, Gang, Nodes, failure, gang

from slurmllm.core.errors import CodeError, NodeError
from slurmllm.core.run.error_patterns import meaning_of
from slurmllm.train.control import relay as relays
from slurmllm.train.control import rendezvous
from slurmllm.train.control.plane import ControlPlane
from slurmllm.train.control.relay import Position, Relay, allow_open_files
from slurmllm.train.control.rendezvous import free_port


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="control-") as made:
        yield Path(made)


@pytest.fixture
def nodes(folder: Path) -> Iterator[Callable[..., Nodes]]:
    """(nodes, workers a node, time limit of an operation) → launchers and workers that beat."""
    made: list[Nodes] = []

    def start(count: int, per_node: int, operation_s: float = 60.0) -> Nodes:
        made.append(Nodes(folder, count, per_node, operation_s))
        made[0].wait_until_all_beat()
        return made[0]

    yield start
    for launchers in made:
        launchers.close()


def lost(message: str) -> bool:
    """Whether the supervisor takes the failure for an echo of another one."""
    return meaning_of(f"NodeError {message}") == "lost_peer"


# Processes.


@pytest.mark.parametrize("node", [0, 1])  # the root, and a node below it
def test_a_killed_launcher_takes_its_workers_along_and_is_named(
    nodes: Callable[..., Nodes], node: int
) -> None:
    workers = nodes(2, 2)
    workers.kill_launcher(node)
    messages = workers.failures(1 - node)
    # Whose end arrives first: the kernel ends launcher and workers together.
    names = ("the launcher of", f"rank {2 * node} on", f"rank {2 * node + 1} on")
    assert set(messages) <= {f"Connection closed by peer: {name} n{node}" for name in names}
    assert len(set(messages)) == 1
    assert lost(messages[0])
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}/maps").exists() and running(pid) for pid in workers.pids[node]):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("node", [False, True])
def test_what_is_frozen_is_named_within_the_limit(nodes: Callable[..., Nodes], node: bool) -> None:
    workers = nodes(2, 2, operation_s=6.0)
    if node:  # its connections stay
        workers.send(1, signal.SIGSTOP)
    else:
        os.kill(workers.pids[1][0], signal.SIGSTOP)
    messages = set(workers.failures(0))
    missing = "the launcher of n1" if node else "rank 2 on n1"
    assert messages == {f"Timed out waiting for {missing} after 6 s"}
    assert all(map(lost, messages))


# Threads.


def break_off(plane: ControlPlane) -> None:
    assert plane._connection is not None
    plane._connection.socket.close()
    plane._connection = None


def test_a_fault_of_the_last_node_reaches_everybody() -> None:
    def work(plane: ControlPlane) -> str:
        plane.barrier()
        if plane.rank == 7:
            break_off(plane)
            return ""
        pending = plane.reduce([1], "sum")
        with pytest.raises(NodeError) as caught:
            pending()
        assert failure(plane.barrier) == str(caught.value)  # the same reason from then on
        return str(caught.value)

    with gang(4, 2) as workers:
        results = workers.run(work)
    assert set(results[:7]) == {"Connection closed by peer: rank 7 on n3"}


def test_a_worker_that_leaves_early_is_named() -> None:
    def work(plane: ControlPlane) -> str:
        plane.barrier()
        if plane.rank == 1:
            plane.close()
            return ""
        return failure(plane.barrier)

    with gang(2, 2) as workers:
        results = workers.run(work)
    assert {results[0], *results[2:]} == {"Connection closed by peer: rank 1 on n0 has ended"}


def test_results_before_a_fault_still_count() -> None:
    def work(plane: ControlPlane) -> list[object]:
        pending = plane.reduce([plane.rank], "max")
        if plane.rank == 0:
            # Its launcher has all contributions before it loses this worker.
            assert pending() == [3]
            break_off(plane)
            return []
        time.sleep(0.5)
        return [*pending(), failure(plane.barrier)]

    with gang(2, 2) as workers:
        results = workers.run(work)
    assert results[1:] == [[3, "Connection closed by peer: rank 0 on n0"]] * 3


def code_error(nodes: int, call: Callable[[ControlPlane], object]) -> str:
    """The error of all workers, of which two are on a node."""

    def work(plane: ControlPlane) -> str:
        with pytest.raises(CodeError) as caught:
            call(plane)
        return str(caught.value)

    with gang(nodes, 2) as workers:
        (message,) = set(workers.run(work))
    return message


def test_workers_that_run_different_code_are_no_lost_peers() -> None:
    message = code_error(2, lambda p: p.gather(1) if p.rank == 2 else p.all_reduce([1], "sum"))
    assert "the workers run different code; install the same version on all nodes" in message
    assert re.search(r"called \w+ as operation 0, others \w+ as operation 0", message)
    assert not lost(message)
    message = code_error(1, lambda plane: plane.all_reduce([1] * (plane.rank + 1), "sum"))
    assert message == "SUM 0 of lists of different lengths"


def test_a_worker_that_never_connects_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "RENDEZVOUS_S", 1.0)
    with gang(2, 2) as workers:
        planes = [workers.connect(rank) for rank in (0, 1, 2)]
        messages = {failure(plane.barrier) for plane in planes}
    (message,) = messages
    assert message.startswith("Timed out waiting for rank 3 on n1: not connected after 1 s")
    assert lost(message)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_node_that_never_listens_or_connects_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    monkeypatch.setattr(relays, "RENDEZVOUS_S", 1.0)
    workers = Gang(folder, 2, 1, free_port())
    workers.relays[1 - missing].start()
    message = failure(workers.connect(1 - missing).barrier)
    workers.close()
    assert message.startswith(f"Timed out waiting for the launcher of n{missing}")
    assert "a firewall may block connections" in message
    assert lost(message)


def test_a_port_that_is_taken_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_PORT_S", 0.3)
    other = socket.create_server(("127.0.0.1", 0))
    port = other.getsockname()[1]
    workers = Gang(folder, 2, 1, port)
    with pytest.raises(NodeError) as caught:
        workers.relays[0].start()
    workers.close()
    monkeypatch.undo()
    waiting = Gang(folder, 2, 1, port)
    timer = threading.Timer(0.5, other.close)
    timer.start()
    waiting.start()  # uses the port once it is free
    waiting.run(ControlPlane.barrier)
    waiting.close()
    timer.join()
    message = str(caught.value)
    assert message.startswith(f"the control plane cannot listen on port {port} of n0: Address")
    assert "set another cluster.master_port" in message
    assert meaning_of(message) == "port"  # no node is to blame
    assert list(folder.iterdir()) == []


def test_a_folder_without_space_is_named(folder: Path) -> None:
    position = Position(0, ("n0",), 2)
    refused = Relay(position, folder / "missing" / "control", ("127.0.0.1", 0), SECRET)
    with pytest.raises(NodeError, match=r"cannot make its socket .* free space in the memory disk"):
        refused.start()
    refused.close()


def test_a_relay_that_fails_ends_its_workers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> bytes:
        raise RuntimeError("a bug")

    def work(plane: ControlPlane) -> str:
        plane.barrier()
        monkeypatch.setattr(relays, "combine", broken)
        return failure(plane.barrier)

    with gang(2, 2) as workers:
        messages = workers.run(work)
    assert all("a bug" in message for message in messages)
    assert "the relay has failed" in caplog.text


@pytest.mark.parametrize("method", ["accept", "__init__"])
def test_a_launcher_without_descriptors_serves_when_one_is_free(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    call, refusals = getattr(socket.socket, method), [None] * 3

    def full(*arguments: object, **options: object) -> object:
        alone = len(arguments) == 1 and not options
        if refusals and alone and threading.current_thread().name == "control":
            refusals.pop()
            raise OSError(errno.EMFILE, "Too many open files")
        return call(*arguments, **options)

    monkeypatch.setattr(socket.socket, method, full)
    with gang(2, 1) as workers:
        workers.run(ControlPlane.barrier)
    assert refusals == []
    assert method != "accept" or "too many open files in the launcher" in caplog.text


def test_the_root_may_hold_a_connection_to_each_node() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        with gang(2, 1):
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 512
        most = resource.getrlimit(resource.RLIMIT_NOFILE)
        allow_open_files(100)  # it is never lowered
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
