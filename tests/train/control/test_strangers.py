"""Programs that are not of the attempt at the sockets of its relays: they delay and run nothing."""

import asyncio
import logging
import os
import pickle
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from train.control.gangs import SECRET, Gang, failure

from slurmllm.core.errors import NodeError
from slurmllm.train.control import relay as relays
from slurmllm.train.control.plane import ControlPlane
from slurmllm.train.control.rendezvous import free_port, listen
from slurmllm.train.control.wire import GREETING_BYTES, Peer, Role, prove


class Planted:
    """Executes code where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def attacked() -> Iterator[Gang]:
    """Two nodes, of which only the root has started."""
    with tempfile.TemporaryDirectory(prefix="control-") as folder:
        made = Gang(Path(folder), 2, 1, free_port())
        made.relays[0].start()
        try:
            yield made
        finally:
            made.close()


def rendezvous(gang: Gang) -> None:
    """Start the other node, and exchange something."""
    gang.relays[1].start()
    assert gang.run(lambda plane: plane.broadcast(plane.rank)) == [0, 0]


def authenticate(peer: socket.socket, claim: Peer) -> None:
    peer.setblocking(False)
    asyncio.run(asyncio.wait_for(prove(peer, claim, 2, SECRET), 20))


def dial(gang: Gang) -> socket.socket:
    return socket.create_connection(gang.root, timeout=5)


def test_text_and_pickles_of_strangers_are_not_read(attacked: Gang, tmp_path: Path) -> None:
    payload = pickle.dumps(Planted(tmp_path / "planted"))
    framed = struct.pack("!BQQ", 6, 0, len(payload)) + payload
    texts = (
        b"GET / HTTP/1.1\r\n" * 6,
        payload,
        framed,
        # As a node that greets, without a proof: what follows is not read either.
        struct.pack("!BII", Role.NODE, 1, 2) + bytes(64) + framed,
    )
    for text in texts:
        with dial(attacked) as stranger, suppress(OSError):  # refused already
            stranger.sendall(text)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(64):
                pass
    rendezvous(attacked)
    assert not (tmp_path / "planted").exists()


def test_idle_strangers_delay_nobody_and_are_closed(
    attacked: Gang, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "STRANGER_S", 0.5)
    strangers = [dial(attacked) for _ in range(20)]
    for stranger in strangers:
        request.addfinalizer(stranger.close)
        stranger.sendall(b"x" * 10)
    rendezvous(attacked)
    for stranger in strangers:
        assert len(stranger.recv(33)) == 32
        with suppress(ConnectionResetError):  # what it has sent was not read
            assert stranger.recv(1) == b""


def test_many_strangers_keep_no_node_and_no_worker_out(
    attacked: Gang, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "MAX_PENDING", 4)
    # A worker that has connected and not greeted yet is no stranger, and does not give way.
    slow = socket.socket(socket.AF_UNIX)
    request.addfinalizer(slow.close)
    slow.connect(str(attacked.relays[0].path))
    strangers = [dial(attacked) for _ in range(30)]
    for stranger in strangers:
        request.addfinalizer(stranger.close)
        stranger.recv(32)
    assert strangers[0].recv(1) == b""  # the oldest gave way
    authenticate(slow, Peer(Role.WORKER, 0))
    attacked.relays[1].start()
    plane = attacked.connect(1)
    plane.reduce([1], "sum")
    assert plane._connection is not None


def test_a_late_worker_of_an_earlier_attempt_is_refused(
    attacked: Gang, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        message = failure(lambda: attacked.connect(0, b"the secret of the attempt before"))
        assert message.startswith("Connection refused by this node's launcher at ")
    rendezvous(attacked)
    warnings = [log.message for log in caplog.records if log.levelno >= logging.WARNING]
    assert warnings == [
        "control plane: refused a connection: it does not know the secret of this attempt"
    ]


def test_a_second_worker_of_a_rank_and_an_endless_message_are_refused(attacked: Gang) -> None:
    first = attacked.connect(0)
    assert "Connection refused" in failure(lambda: attacked.connect(0))
    attacked.relays[1].start()
    second = attacked.connect(1)
    pending = [plane.reduce([plane.rank], "sum") for plane in (first, second)]
    assert [reduction() for reduction in pending] == [[1], [1]]
    # A message longer than any ends the connection.
    connection = first._connection
    connection.socket.sendall(struct.pack("!BQQ", 1, 0, 1 << 40))
    assert "Connection closed by peer: rank 0 on n0" in failure(second.barrier)


def test_a_worker_of_a_run_of_another_size_is_refused(
    attacked: Gang, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(attacked.relays[0].path)
    assert "Connection refused" in failure(lambda: ControlPlane(0, 4, path, SECRET))
    rendezvous(attacked)
    assert "worker 0 of a run of 4: unexpected" in caplog.text


def test_a_recorded_greeting_lets_nobody_in(attacked: Gang) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tap, socket.socket() as node:
        node.connect(tap.getsockname())
        recorded: list[bytes] = []
        # Gives the node the root's challenge, and keeps its greeting.
        thread = threading.Thread(target=pass_on_once, args=(tap, attacked, recorded))
        thread.start()
        with suppress(OSError):
            authenticate(node, Peer(Role.NODE, 1))
        thread.join()
    assert len(recorded[0]) == GREETING_BYTES
    with dial(attacked) as stranger:
        stranger.sendall(recorded[0])
        stranger.recv(32)
        with suppress(ConnectionResetError):
            assert stranger.recv(32) == b"", "the root answered a replayed greeting"
    rendezvous(attacked)


def pass_on_once(tap: socket.socket, gang: Gang, recorded: list[bytes]) -> None:
    node, _ = tap.accept()
    with node, dial(gang) as root:
        node.sendall(root.recv(32))
        recorded.append(node.recv(GREETING_BYTES))


def test_nothing_from_a_false_relay_is_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "RENDEZVOUS_S", 1.0)
    payload = pickle.dumps(Planted(tmp_path / "planted"))
    # A challenge, a proof that is none, and the result of a broadcast.
    answer = b"c" * 32 + b"p" * 32 + struct.pack("!BQQ", 6, 0, len(payload)) + payload
    peers: list[socket.socket] = []

    def serve(server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                peers.append(server.accept()[0])
                with suppress(OSError):
                    peers[-1].sendall(answer)

    with tempfile.TemporaryDirectory(prefix="control-") as name:
        folder = Path(name)
        with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
            unix.bind(str(folder / "false"))
            unix.listen()
            threads = [threading.Thread(target=serve, args=(server,)) for server in (tcp, unix)]
            for thread in threads:
                thread.start()
            # To a worker, and to the relay of another node.
            with pytest.raises(NodeError, match="Connection refused by this node's launcher"):
                ControlPlane(1, 2, str(folder / "false"), SECRET)
            gang = Gang(folder, 2, 1, tcp.getsockname()[1])
            gang.relays[1].start()
            message = failure(lambda: gang.connect(1).broadcast(None))
            gang.close()
            for server in (tcp, unix):
                server.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
    for peer in peers:
        peer.close()
    assert "it does not know the secret of this attempt" in message
    assert not (tmp_path / "planted").exists()


def test_only_the_root_listens_for_other_nodes(attacked: Gang) -> None:
    attacked.relays[1].start()
    families = [[server.family for server in relay._servers] for relay in attacked.relays]
    assert families == [[socket.AF_UNIX, socket.AF_INET], [socket.AF_UNIX]]
    # Only where its workers connect.
    with listen("127.0.0.1", 0) as server:
        assert server.getsockname()[0] == "127.0.0.1"
    for foreign in ("192.0.2.1", "localhost"):  # behind a translated address; a name
        with listen(foreign, 0) as server:
            assert server.getsockname()[0] == "0.0.0.0"
