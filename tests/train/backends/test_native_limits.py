"""Settings that the native backend refuses, all at once, on the login node and in the worker."""

from __future__ import annotations

import pytest

from slurmllm.core.errors import ConfigError
from slurmllm.plan.mesh import make_mesh
from slurmllm.train.backends.base import Worker, load_backend
from slurmllm.train.backends.native.environment import unsupported
from slurmllm.train.control.plane import ControlPlane
from train.gang import small_config

TOO_MUCH = (
    "model.family=llama",
    "model.num_kv_heads=2",
    "model.vocab_pad_multiple=8",
    "parallel.tensor=4",
    "cluster.device=neuron",
    "cluster.instance_type=trn1.32xlarge",
    "cluster.devices_per_node=4",
    "backend=native",
)


def test_every_reason_has_value_and_remedy() -> None:
    faults = unsupported(small_config(*TOO_MUCH))
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
    config = small_config(*TOO_MUCH)
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
