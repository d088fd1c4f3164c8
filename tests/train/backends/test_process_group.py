"""torch's rendezvous and object collectives between two workers, with a stranger at the port."""

import os
import pickle
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from slurmllm.core.errors import NodeError
from slurmllm.launch.diagnose.login_node import private_names_finding
from slurmllm.train.backends import process_group
from slurmllm.train.backends.process_group import SignedStore
from slurmllm.train.control.rendezvous import SECRET, new_secret
from slurmllm.train.model.private_names import SIGNED_OBJECTS, PrivateNames, missing_names

# Starts as training does, and gathers as neuronx-distributed's pipelines do.
WORKER = """
    import os, sys
    import torch.distributed as dist
    from slurmllm.train.backends.base import Worker
    from slurmllm.train.backends.native.runtime import NativeBackend
    from slurmllm.train.control.plane import ControlPlane
    from slurmllm.plan.mesh import make_mesh
    from train.gang import small_config

    config, rank = small_config("cluster.devices_per_node=1"), int(os.environ["RANK"])
    worker = Worker(rank, 2, rank, "node")
    backend = NativeBackend(config, make_mesh(config, nodes=2), worker, ControlPlane(rank, 2))
    backend.start()
    print("started", flush=True)
    sys.stdin.readline()
    found = [None] * 2
    dist.all_gather_object(found, {"rank": rank})
    print(found, flush=True)
    backend.stop()
"""
# Takes the place of rank 1, with a pickle that runs code.
STRANGER = """
    import os, sys
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from train.backends.test_process_group import Planted

    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2)
    dist.init_process_group("gloo", store=store, rank=1, world_size=2)
    init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("pipeline", "data", "tensor"))
    dist.all_gather_object([None] * 2, Planted(os.environ["PLANTED"]))
"""
Process = subprocess.Popen[str]
Start = Callable[..., Process]
REFUSED = "not written by a worker of this attempt"


class Planted:
    """Executes code where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.path,)


@pytest.fixture
def start(port: int) -> Iterator[Start]:
    """(rank, environment, program) → a process that knows where the rendezvous is."""
    started = []

    def run(rank: int, env: Mapping[str, str], program: str = WORKER) -> Process:
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(program)],
                text=True,
                env={**os.environ, **env, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def finish(*workers: Process) -> list[tuple[int, str, str]]:
    """Exit code, output and errors by rank."""
    for worker in workers:  # all, as they wait for each other
        worker.stdin.write("\n")
        worker.stdin.flush()
    texts = [worker.communicate(timeout=200) for worker in workers]
    return [(worker.returncode, *text) for worker, text in zip(workers, texts, strict=True)]


def test_workers_of_one_start_meet_where_nobody_else_looks(port: int, start: Start) -> None:
    secret = new_secret()
    workers = [start(rank, secret) for rank in range(2)]
    assert workers[0].stdout.readline() == "started\n"
    sockets = [Path(f"/proc/net/{kind}").read_text() for kind in ("tcp", "tcp6")]
    arguments = [Path(f"/proc/{worker.pid}/cmdline").read_text() for worker in workers]
    ended = finish(*workers)
    assert [code for code, *_ in ended] == [0, 0], ended
    assert all(output.endswith("[{'rank': 0}, {'rank': 1}]\n") for _, output, _ in ended)
    rows = [line.split() for line in "".join(sockets).splitlines()]
    listening = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")]
    assert listening == [f"0100007F:{port:04X}"]  # 127.0.0.1, in the machine's byte order
    assert secret[SECRET] not in "".join(arguments)


def test_a_stranger_in_the_place_of_a_worker_runs_no_code(start: Start, tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    worker = start(0, new_secret())
    start(1, {"PLANTED": str(planted)}, STRANGER)
    ((code, output, errors),) = finish(worker)
    assert not planted.exists(), "rank 0 has run what the stranger sent"
    assert (code, output) == (1, ""), "the stranger is a worker"
    assert REFUSED in errors


def test_pickles_that_no_worker_signed_are_not_read(tmp_path: Path) -> None:
    payload = pickle.dumps(Planted(str(tmp_path / "planted")))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_pickler", "_unpickler"):
            patch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
        assert process_group.sign_objects(b"secret") is None
        signed, length = distributed_c10d._object_to_tensor({"a": (1, None)}, "cpu", None)
        assert distributed_c10d._tensor_to_object(signed, length, None) == {"a": (1, None)}
        for data in (payload, b"x" * 32 + payload, bytes(signed.numpy())[:32] + payload, b""):
            tensor = torch.frombuffer(bytearray(data or b"x"), dtype=torch.uint8)
            with pytest.raises(NodeError, match=REFUSED):
                distributed_c10d._tensor_to_object(tensor, len(data), None)
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("name", [None, "_pickler", "_unpickler", "_tensor_to_object"])
def test_a_torch_that_cannot_sign_trains_with_a_warning(
    name: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if name is None:  # the names exist, and torch does not use them
        monkeypatch.setattr(distributed_c10d, "_tensor_to_object", lambda *_: None)
    else:
        monkeypatch.delattr(distributed_c10d, name)
    before = [getattr(distributed_c10d, n, None) for n in ("_pickler", "_unpickler")]
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(process_group, "TCPStore", lambda *_, **__: dist.HashStore())
    monkeypatch.setattr(process_group, "listen", lambda *_: socket.socket())
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(process_group, "own_secret", lambda: b"secret")
    for rank, world_size in ((0, 1), (1, 2), (0, 2)):
        process_group.init_process_group("gloo", rank, world_size, timedelta(minutes=1))
    (message,) = caplog.messages
    assert message.endswith("are not signed (docs/developing/security.md)")
    assert before == [getattr(distributed_c10d, n, None) for n in ("_pickler", "_unpickler")]


def test_a_value_counts_for_its_key_and_secret_only() -> None:
    inner = dist.HashStore()
    store = SignedStore(inner, b"secret")
    outer = dist.PrefixStore("group", store)  # as torch uses it: through its C++ code
    outer.set("a", "1")
    assert outer.get("a") == b"1"
    assert store.add("counter", 2) == 2
    assert store.check(["group/a"])
    inner.set("group/b", inner.get("group/a"))
    inner.set("group/c", "1")
    with_other = SignedStore(inner, b"another")
    for read in (lambda: outer.get("b"), lambda: outer.get("c"), lambda: with_other.get("group/a")):
        with pytest.raises(NodeError, match=REFUSED):
            read()
    assert outer.delete_key("a")
    assert not store.check(["group/a"])


def test_this_torch_has_all() -> None:
    assert missing_names() == []
    assert private_names_finding().status == "ok"


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(distributed_c10d, "_pickler")
    reason = SIGNED_OBJECTS.missing() or ""
    assert reason.startswith("no _pickler in torch.distributed.distributed_c10d: the objects")
    assert PrivateNames("torch.gone", (), "nothing").missing() == "no module torch.gone: nothing"


def test_doctor_prints_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 0, "no _pickler in torch: no signature\n")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: done)
    finding = private_names_finding()
    assert (finding.status, finding.value) == ("warn", "no _pickler in torch: no signature")


def test_doctor_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert private_names_finding().status == "skipped"
