"""Shards are written while training goes on, and hold what was there before."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmllm.train.backends.native import dcp
from slurmllm.train.backends.native.dcp import DcpSave
from slurmllm.train.backends.native.runtime import NativeBackend
from slurmllm.train.model.init import local_part
from train.backends.conftest import LABELS, NewBackend, batch, micro_batches, train

ASYNCHRONOUS = "checkpoint.asynchronous=true"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Files are written when it is set."""
    event = threading.Event()
    write = DcpSave.write

    def waiting(self: DcpSave) -> None:
        assert event.wait(30)
        write(self)

    monkeypatch.setattr(DcpSave, "write", waiting)
    return event


def test_steps_meanwhile_are_not_in_it(
    new_backend: NewBackend, tmp_path: Path, gate: threading.Event
) -> None:
    backend = new_backend(ASYNCHRONOUS)
    assert isinstance(backend, NativeBackend)
    train(backend, 3)
    for first, folder in ((3, tmp_path / "a"), (6, tmp_path / "b")):
        folder.mkdir()
        saving = backend.save_shards(folder)
        random_numbers = torch.rand(3)
        weights = {
            name: local_part(p).detach().clone() for name, p in backend.model.named_parameters()
        }
        expected = train(backend, 3, first=first)
        now = dict(backend.model.named_parameters())
        assert all(not torch.equal(local_part(now[name]), was) for name, was in weights.items())
        assert list(folder.iterdir()) == [], "nothing is written yet"
        gate.set()
        names = saving.wait()
        gate.clear()
        assert sorted(names + saving.finish()) == sorted(p.name for p in folder.iterdir())
        for name in names:
            assert saving.sha256(name) == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    resumed = new_backend()
    resumed.load_shards(folder)
    assert torch.equal(torch.rand(3), random_numbers)
    assert train(resumed, 3, first=6) == expected, "bit for bit"


def test_the_optimizer_waits_for_the_copy(
    new_backend: NewBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = new_backend(ASYNCHRONOUS)
    train(backend, 1)
    copy = DcpSave.copy_and_write

    go = threading.Event()

    def slow(self: Any, *arguments: Any) -> None:
        assert go.wait(30)
        copy(self, *arguments)

    monkeypatch.setattr(DcpSave, "copy_and_write", slow)
    saving = backend.save_shards(tmp_path)
    backend.forward_backward(micro_batches(batch(seed=1), 2), LABELS)
    assert saving.waited_s == 0
    threading.Timer(0.1, go.set).start()
    backend.optimizer_step(1e-2)
    assert saving.waited_s > 0.05
    saving.wait()
    saving.finish()
    expected = train(new_backend(), 2)
    resumed = new_backend()
    resumed.load_shards(tmp_path)
    assert train(resumed, 1, first=1) == expected[3:]


def test_the_second_save_uses_the_memory_of_the_first(
    new_backend: NewBackend, tmp_path: Path
) -> None:
    backend = new_backend(ASYNCHRONOUS)
    assert isinstance(backend, NativeBackend)
    addresses = []
    for step in range(2):
        train(backend, 1, first=step)
        folder = tmp_path / str(step)
        folder.mkdir()
        saving = backend.save_shards(folder)
        saving.wait()
        saving.finish()
        addresses.append({i: t.data_ptr() for i, t in backend.shards._copies.items()})
    assert addresses[0] == addresses[1]


def test_several_files_of_one_worker(
    new_backend: NewBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp, "_SPLIT_BYTES", 0)
    backend = new_backend()
    train(backend, 2)
    saving = backend.save_shards(tmp_path)
    assert saving.wait() == ["__0_0.distcp", "__0_1.distcp"]
    assert saving.finish() == [".metadata"]
    expected = train(backend, 2, first=2)
    resumed = new_backend()
    resumed.load_shards(tmp_path)
    assert train(resumed, 2, first=2) == expected
