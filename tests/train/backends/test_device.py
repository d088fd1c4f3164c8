"""The description of a device, one that is missing, and settings that the backend refuses."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from amounts import sample

from slurmllm.core.errors import ConfigError
from slurmllm.core.run.host_memory import host_memory
from slurmllm.plan.mesh import make_mesh
from slurmllm.train.backends.base import Worker, load_backend
from slurmllm.train.backends.native import device, environment
from slurmllm.train.backends.native.device import KINDS
from slurmllm.train.backends.native.environment import unsupported
from slurmllm.train.control.plane import ControlPlane
from train.backends.conftest import AcceleratorOfCpus, NewBackend, save, train
from train.gang import small_config


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
    save(backend, tmp_path)
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


TOO_MUCH = """
model.family=llama model.num_kv_heads=2 model.vocab_pad_multiple=8 parallel.tensor=4
cluster.device=neuron cluster.instance_type=trn1.32xlarge cluster.devices_per_node=4
backend=native
"""


def test_every_reason_has_value_and_remedy() -> None:
    faults = unsupported(small_config(*TOO_MUCH.split()))
    assert [fault.split(":")[0] for fault in faults] == ["parallel.tensor", "backend"]
    assert "4 does not divide 2 key and value heads" in faults[0]
    assert "choose 1 or 2 with --set parallel.tensor" in faults[0]
    assert "another --cluster" in faults[1]


def test_supported_settings() -> None:
    settings = ("train.precision=bf16_sr", "train.activation_checkpointing=[core, mlp, norm]")
    assert unsupported(small_config(*settings, "parallel.tensor=2", "parallel.pipeline=2")) == []


def test_tensor_parallelism_of_padding() -> None:
    vocabulary = ("model.vocab_size=300", "model.vocab_pad_multiple=256")
    (fault,) = unsupported(small_config("parallel.tensor=4", *vocabulary))
    assert fault.startswith("model.vocab_pad_multiple")
    assert "300 entries to 512" in fault
    assert "set a smaller multiple of 4" in fault
    assert unsupported(small_config("parallel.tensor=2", *vocabulary)) == []


def test_worker_refuses_too() -> None:
    config = small_config(*TOO_MUCH.split())
    backend = load_backend("native")(
        config, make_mesh(config, 1), Worker(0, 4, 0, "node"), ControlPlane(0, 4)
    )
    with pytest.raises(ConfigError) as caught:
        backend.start()
    assert len(caught.value.faults) == 2


def test_compiling_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    config = small_config("train.compile=true")
    backend = load_backend("native")(config, make_mesh(config, 1), Worker(0, 1, 0, "node"))
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler 'no-such-compiler'.*compile=false"):
        backend.start()
