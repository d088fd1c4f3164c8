"""The rehearsal backend: figures that depend on everything, a network that notices who is gone."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from slurmllm.backends.rehearsal.network import Star
from train.gang import small_config

from slurmllm.backends.base import MicroBatch, Worker, load_backend
from slurmllm.backends.environment import load_environment
from slurmllm.backends.rehearsal import network
from slurmllm.backends.rehearsal.runtime import RehearsalBackend
from slurmllm.control.rendezvous import listen
from slurmllm.errors import ConfigError, NodeError, StorageError
from slurmllm.plan.mesh import make_mesh

T = TypeVar("T")
SECRET = b"known to the workers"
STEPS, LABELS = 6, 8 * 32
TOKENS = np.random.default_rng(0).integers(0, 512, (STEPS, 8, 33))


def gang(size: int, work: Callable[[int, tuple[str, int]], T]) -> list[T]:
    """Workers as threads: rank and address of rank 0 → a result each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = ("127.0.0.1", int(probe.getsockname()[1]))
    with ThreadPoolExecutor(size) as pool:
        return [f.result(20) for f in [pool.submit(work, rank, address) for rank in range(size)]]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMLLM_REHEARSAL_STEP_S", "0")
    monkeypatch.setenv("SLURMLLM_REHEARSAL_BYTES", "8024")  # 1003 numbers: uneven shares


def trained(
    nodes: int,
    tokens: np.ndarray,
    *options: str,
    load: Path | None = None,
    save: Path | None = None,
) -> list[tuple[float, float, float]]:
    """The figures of each step, which all workers must agree on."""
    config = small_config("backend=rehearsal", "train.micro_batch=1", *options)
    mesh = make_mesh(config, nodes)

    def work(rank: int, address: tuple[str, int]) -> list[tuple[float, float, float]]:
        backend = RehearsalBackend(config, mesh, Worker(rank, nodes, 0, f"n{rank}"))
        backend.star = Star(rank, nodes, address, SECRET)
        backend._step_s = 0.0
        backend.build(lambda: pytest.fail("a model was built"))
        backend.build_optimizer()
        if load is not None:
            backend.load_shards(load)
        found = []
        for number, step in enumerate(tokens):
            rows = np.split(step, mesh.data)[mesh.data_rank(rank)]
            batches = [MicroBatch(row[None, :-1], row[None, 1:]) for row in rows]
            loss = backend.forward_backward(batches, LABELS)
            found.append((loss, backend.optimizer_step(1e-3 * number), backend.param_norm()))
        if save is not None:
            saving = backend.save_shards(save)
            backend.optimizer_step(1.0)  # goes on, and is not in the save
            assert saving.wait() == [backend.state.file_name]
            backend.gather(None)
        backend.stop()
        return found

    first, *others = gang(nodes, work)
    assert all(other == first for other in others)
    return first


def test_figures_are_the_same_on_any_mesh_and_differ_after_any_other_history() -> None:
    right = trained(1, TOKENS)
    assert right == trained(4, TOKENS)
    assert right == trained(8, TOKENS, "parallel.tensor=2", "parallel.pipeline=2")
    assert len({figure for step in right for figure in step}) == 3 * STEPS
    changed = TOKENS.copy()
    changed[1, 5, 7] += 1
    swapped, doubled = TOKENS[[0, 2, 1, 3, 4, 5]], TOKENS[[0, 0, 1, 2, 3, 4]]
    for wrong in (changed, swapped, doubled, TOKENS[[0, 2, 3, 4, 5]]):
        found = trained(2, wrong)
        assert found[0] == right[0]
        assert not {step[0] for step in found[1:]} & {step[0] for step in right[1:]}


def test_a_resume_on_another_mesh_is_exact(tmp_path: Path) -> None:
    right = trained(2, TOKENS)
    trained(4, TOKENS[:3], save=tmp_path)
    # lr is numbered within a call; the first step after the resume has that of step 0 there too.
    again = trained(2, TOKENS[3:], load=tmp_path)
    assert again[0][0] == right[3][0]
    assert trained(8, TOKENS[3:], load=tmp_path) == again
    (tmp_path / "state_00001_of_00004.npy").unlink()
    with pytest.raises(StorageError, match="3 shards"):
        trained(1, TOKENS, load=tmp_path)


def test_a_peer_that_goes_is_noticed_at_once_by_everybody() -> None:
    gone = threading.Event()

    def work(rank: int, address: tuple[str, int]) -> str:
        star = Star(rank, 4, address, SECRET)
        assert star.gather(rank * rank) == [0, 1, 4, 9]
        if rank == 2:
            star.close()
            gone.set()
            return ""
        if rank == 3:  # has not come to the collective yet
            gone.wait(10)
        with pytest.raises(NodeError) as caught:
            star.gather(None)
        star.close()
        return str(caught.value)

    messages = gang(4, work)
    assert messages[0] == "Connection closed by peer: rank 2"
    # Worded as gloo's, so that the supervisor classifies them as a lost peer.
    assert messages[1] == messages[3] == "Connection closed by peer: rank 0"


def dial(address: tuple[str, int]) -> socket.socket:
    """A connection to rank 0, as soon as it listens."""
    while True:
        try:
            return socket.create_connection(address, timeout=5)
        except ConnectionRefusedError:
            time.sleep(0.01)


class Planted:
    """Executes code where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def attacked(attack: Callable[[tuple[str, int]], None]) -> float:
    """Attack rank 0 of two workers before the other one starts; the rendezvous's duration, s."""

    def work(rank: int, address: tuple[str, int]) -> float:
        begun = time.monotonic()
        if rank == 1:
            attack(address)
        star = Star(rank, 2, address, SECRET)
        took = time.monotonic() - begun
        try:
            assert star.gather(rank) == [0, 1]
        finally:
            star.close()
        return took

    return max(gang(2, work))


def test_a_stranger_is_sent_away_and_nothing_of_it_is_unpickled(tmp_path: Path) -> None:
    payload = pickle.dumps(Planted(tmp_path / "planted"))
    framed = struct.pack("!Q", len(payload)) + payload

    def attack(address: tuple[str, int]) -> None:
        # The second as the workers of earlier versions greeted: the pickle was executed.
        for text in (b"GET / HTTP/1.1\r\n" * 6, struct.pack("!8sII", b"slurmllm", 1, 2) + framed):
            with dial(address) as stranger:
                stranger.sendall(text)
                with suppress(ConnectionResetError):
                    while stranger.recv(64):
                        pass

    assert attacked(attack) < 10
    assert not (tmp_path / "planted").exists()


def test_idle_strangers_delay_nobody(request: pytest.FixtureRequest) -> None:
    def attack(address: tuple[str, int]) -> None:
        for _ in range(20):
            stranger = dial(address)
            request.addfinalizer(stranger.close)
            stranger.sendall(b"x" * 10)

    assert attacked(attack) < 4  # each delayed it by 5 s


def test_many_strangers_keep_no_worker_out(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(network, "_MAX_GUESTS", 4)

    def attack(address: tuple[str, int]) -> None:
        for _ in range(30):
            request.addfinalizer(dial(address).close)

    assert attacked(attack) < 4


def test_a_worker_without_the_secret_does_not_get_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "RENDEZVOUS_S", 1.0)

    def work(rank: int, address: tuple[str, int]) -> str:
        with pytest.raises(NodeError) as caught:
            Star(rank, 2, address, b"a guess" if rank else SECRET)
        return str(caught.value)

    first, second = gang(2, work)
    assert "waiting for 1 of 2 workers" in first
    assert "waiting for rank 0" in second


def test_a_recorded_greeting_lets_nobody_in() -> None:
    greetings: list[bytes] = []

    def attack(address: tuple[str, int]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as tap:
            thread = threading.Thread(target=pass_on_once, args=(tap, address, greetings))
            thread.start()
            host, port = tap.getsockname()
            with suppress(NodeError), pytest.MonkeyPatch.context() as patch:
                patch.setattr(Star, "_receive", lambda *_: pytest.fail("let in"))
                patch.setattr(network, "RENDEZVOUS_S", 0.2)
                Star(1, 2, (host, port), SECRET)
            thread.join()
        with dial(address) as stranger:
            stranger.sendall(greetings[0])
            stranger.recv(32)
            with suppress(ConnectionResetError):
                assert stranger.recv(32) == b"", "rank 0 answered a replayed greeting"

    attacked(attack)
    assert len(greetings[0]) == 72


def pass_on_once(tap: socket.socket, address: tuple[str, int], greetings: list[bytes]) -> None:
    """Give a worker rank 0's challenge, and record its greeting instead of handing it over."""
    worker, _ = tap.accept()
    tap.close()
    with worker, dial(address) as server:
        worker.sendall(server.recv(32))
        greetings.append(worker.recv(72))


def test_nothing_from_a_false_rank_0_is_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "RENDEZVOUS_S", 1.0)
    payload = pickle.dumps(Planted(tmp_path / "planted"))
    framed = struct.pack("!Q", 0) + struct.pack("!Q", len(payload)) + payload
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    peers.append(server.accept()[0])
                    with suppress(OSError):
                        peers[-1].sendall(framed + b"p" * 64)  # values, to earlier versions

        peers: list[socket.socket] = []
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(NodeError, match="does not know the secret"):
            Star(1, 2, server.getsockname(), SECRET).gather(None)
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for peer in peers:
        peer.close()
    assert not (tmp_path / "planted").exists()


def test_rank_0_listens_only_where_its_workers_connect() -> None:
    with listen("127.0.0.1", 0) as server:
        assert server.getsockname()[0] == "127.0.0.1"
    for foreign in ("192.0.2.1", "localhost"):  # behind a translated address; a name
        with listen(foreign, 0) as server:
            assert server.getsockname()[0] == "0.0.0.0"


def test_what_it_cannot_do_is_said_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config("backend=rehearsal", "train.init_from=/a", "train.micro_batch=auto")
    faults = load_environment("rehearsal").unsupported(config)
    assert [fault.partition(":")[0] for fault in faults] == ["train.init_from", "train.micro_batch"]
    config = small_config("backend=rehearsal")
    monkeypatch.setenv("SLURMLLM_REHEARSAL_STEP_S", "soon")
    backend = load_backend("rehearsal")(config, make_mesh(config, 1), Worker(0, 1, 0, "n"))
    with pytest.raises(ConfigError, match=r"STEP_S: 'soon' is not a number"):
        backend.start()


def test_its_worker_loads_no_torch() -> None:
    code = (
        "import sys, slurmllm.train.worker, slurmllm.train.loop, slurmllm.train.hooks\n"
        "from slurmllm.backends.base import load_backend; load_backend('rehearsal')\n"
        "print(*({'torch', 'pyarrow', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("", "")
