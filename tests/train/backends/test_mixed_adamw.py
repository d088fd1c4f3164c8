"""The one-pass AdamW of an accelerator, on CPUs by a device of an accelerator's properties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slurmllm.train.backends.native.device import KINDS
from slurmllm.train.backends.native.runtime import NativeBackend
from slurmllm.train.backends.native.unsharded import MixedAdamW
from train.backends.conftest import AcceleratorOfCpus, NewBackend, train, whole

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
SETTINGS = ("train.precision=bf16_mixed", "train.compile=true", "optim.grad_clip=0.5")


class EagerAccelerator(AcceleratorOfCpus):
    """Its compiler captures graphs and runs them operation by operation."""

    @classmethod
    def compile(cls, function: Any, *, dynamic: bool = False, **_: Any) -> Any:
        return torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "cpu", EagerAccelerator)


def make(new_backend: NewBackend, size: int, *overrides: str) -> NativeBackend:
    backend = new_backend(*SETTINGS, f"train.micro_batch={size}", *overrides)
    assert isinstance(backend, NativeBackend)
    return backend


@pytest.mark.parametrize("size", [8, 2])  # gradients in bf16, and sums of four in fp32
def test_it_is_clipping_and_then_adamw(
    new_backend: NewBackend, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    curves, weights = [], []
    for kind in (MixedAdamW, torch.optim.AdamW):
        if kind is torch.optim.AdamW:
            monkeypatch.setattr(NativeBackend, "_has_mixed_adamw", lambda self: False)
        backend = make(new_backend, size)
        assert isinstance(backend.optimizer, kind)
        curves.append(train(backend, 1, size=size))
        weights.append([whole(p).clone() for p in backend.model.parameters()])
        curves[-1] += train(backend, 3, first=1, size=size)
    # From equal gradients: the update's operations have another order.
    for parameter, expected in zip(*weights, strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-6, atol=1e-7)
    assert curves[0][:2] == curves[1][:2]
    # Later some weights have the other neighbour in bf16, 0.4 % away.
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)


def test_the_copies_are_of_the_stored_weights(new_backend: NewBackend, tmp_path: Path) -> None:
    backend = make(new_backend, 8)
    assert backend.weights is not None
    train(backend, 2, size=8)
    directory = tmp_path / "shards"
    directory.mkdir()
    saving = backend.save_shards(directory)
    saving.wait()
    saving.finish()
    whole_run = train(backend, 2, first=2, size=8)
    for stored, copy in backend.weights.copies.items():
        assert torch.equal(stored.to(torch.bfloat16), copy)
    # What is loaded replaces the copies too, of a run with steps behind it as of a new one.
    backend.load_shards(directory)
    assert train(backend, 2, first=2, size=8) == whole_run
    backend = make(new_backend, 8, "train.seed=7")
    backend.load_shards(directory)
    assert train(backend, 2, first=2, size=8) == whole_run
