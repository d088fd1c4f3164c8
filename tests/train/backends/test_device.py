"""The description of a device: a third kind, and one whose package is missing."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from amounts import sample

from slurmllm.core.errors import ConfigError
from slurmllm.core.run.host_memory import host_memory
from slurmllm.train.backends.native import device, environment
from slurmllm.train.backends.native.device import KINDS
from train.backends.conftest import AcceleratorOfCpus, NewBackend, train


@pytest.mark.parametrize("precision", sample(1, ["bf16_mixed", "fp32"]))
def test_a_third_kind_trains_saves_and_resumes(
    new_backend: NewBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, precision: str
) -> None:
    settings = (f"train.precision={precision}", "model.vocab_pad_multiple=2")
    expected = train(new_backend(*settings), 4)
    monkeypatch.setitem(KINDS, "neuron", AcceleratorOfCpus)
    monkeypatch.setattr(environment, "missing_torch_neuron", lambda: None)
    on_device = (*settings, "cluster.device=neuron")
    backend = new_backend(*on_device)
    assert backend.deferred_metrics
    # Norms are summed in fp64, and padded products have other blocks.
    assert train(backend, 4) == pytest.approx(expected, rel=1e-6 if precision == "fp32" else 1e-3)
    saving = backend.save_shards(tmp_path)
    saving.wait()
    saving.finish()
    following = train(backend, 4, first=4)
    resumed = new_backend(*on_device)
    resumed.load_shards(tmp_path)
    assert train(resumed, 4, first=4) == following


def test_neuron_without_its_package(new_backend: NewBackend) -> None:
    with pytest.raises(ConfigError) as caught:
        new_backend("cluster.device=neuron")
    (fault,) = caught.value.faults
    assert re.search(r"pip install 'torch-neuronx==\d+\.\d+\.\*'", fault)


def test_neuron_with_its_package_for_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "missing_torch_neuron", lambda: None)
    monkeypatch.setitem(sys.modules, "torch_neuronx", ModuleType("torch_neuronx"))
    assert "in its older form, for XLA; install" in (KINDS["neuron"].missing(0) or "")


def test_without_cuda_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    for version, count, remedy in (
        (None, 0, "is built without CUDA; install a build for CUDA"),
        ("12.8", 0, "finds no GPU on"),
        ("12.8", 1, "--set cluster.devices_per_node=1"),
    ):
        monkeypatch.setattr(torch.version, "cuda", version)
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert remedy in (KINDS["cuda"].missing(1) or "")


SIZE = 2**27


def test_the_peak_is_counted_anew() -> None:
    before = host_memory(1)
    torch.ones(SIZE, dtype=torch.uint8).sum()
    peak = host_memory(1).peak_bytes
    assert peak > before.peak_bytes - SIZE / 8
    after = host_memory(1).peak_bytes
    assert peak - after > SIZE / 2, "freed, and not counted any more"


def test_workers_share_the_machine() -> None:
    alone, among_four = host_memory(1), host_memory(4)
    assert 0 < among_four.peak_bytes < among_four.limit_bytes <= alone.limit_bytes / 2
