"""What the native backend refuses: all reasons at once, told by the login node and the worker."""

from __future__ import annotations

import subprocess
import sys

import pytest
from train.gang import small_config

from slurmllm.backends.base import Worker, load_backend
from slurmllm.backends.native.limits import unsupported
from slurmllm.errors import ConfigError
from slurmllm.plan.mesh import make_mesh

TOO_MUCH = (
    "parallel.tensor=2", "parallel.pipeline=2", "train.precision=bf16_sr",
    "train.activation_checkpointing=selective", "cluster.devices_per_node=4",
)  # fmt: skip


def test_every_reason_has_value_and_remedy() -> None:
    faults = unsupported(small_config(*TOO_MUCH))
    assert [fault.split(":")[:2] for fault in faults] == [
        ["parallel.tensor", " 2"],
        ["parallel.pipeline", " 2"],
        ["train.precision", " bf16_sr"],
        ["train.activation_checkpointing", " selective"],
    ]
    assert all("--set " in fault for fault in faults)


def test_supported_settings() -> None:
    settings = ("train.precision=bf16_mixed", "train.activation_checkpointing=full")
    assert unsupported(small_config(*settings, "parallel.zero=3")) == []


def test_worker_refuses_too() -> None:
    config = small_config(*TOO_MUCH)
    backend = load_backend("native")(config, make_mesh(config, 1), Worker(0, 4, 0, "node"))
    with pytest.raises(ConfigError) as caught:
        backend.start()
    assert len(caught.value.faults) == 4


def test_compiling_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    config = small_config("train.compile=true")
    backend = load_backend("native")(config, make_mesh(config, 1), Worker(0, 1, 0, "node"))
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler 'no-such-compiler'.*compile=false"):
        backend.start()


def test_no_torch_on_the_login_node() -> None:
    code = (
        "import sys, slurmllm.backends.native.limits, slurmllm.checkpoint.save, "
        "slurmllm.checkpoint.resume, slurmllm.train.schedule; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
