"""What a step asks of a device, beside its compiled graphs, with the code for accelerators.

It runs on CPUs: by a description of a device that has an accelerator's properties, and on meta.
Compiled functions are traced as ever; the count does not see what their graphs compute.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from backends.conftest import AcceleratorOfCpus, NewBackend, batch, micro_batches
from slurmllm.backends.native import runtime
from slurmllm.backends.native.device import KINDS
from slurmllm.backends.native.runtime import NativeBackend

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
# As many parameters as gpt3_1.3b, in small matrices.
DEEP = ("model.family=gpt3", "model.num_layers=24", "train.compile=true")
_ALLOCATIONS = ("empty", "new_empty", "profiler", "_local_scalar_dense", "lift_fresh")


class Count(TorchDispatchMode):
    """Operations outside graphs; views and allocations launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # or Dynamo would not use its graphs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.name().split("::")[1]
        if not func.is_view and name != "detach" and not name.startswith(_ALLOCATIONS):
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


def hidden(graph: fx.GraphModule, _: Any) -> Any:
    """Run a graph where no mode sees its operations."""

    def run(*args: Any) -> Any:
        with _disable_current_modes():
            return graph(*args)

    return make_boxed_func(run)


class TracedAccelerator(AcceleratorOfCpus):
    """Its compiler takes the graphs as they are."""

    @classmethod
    def compile(cls, function: Any, *, dynamic: bool = False, **_: Any) -> Any:
        compiler = aot_autograd(
            fw_compiler=hidden, bw_compiler=hidden, keep_inference_input_mutations=True
        )
        return torch.compile(function, backend=compiler, fullgraph=True, dynamic=dynamic)


def operations(backend: NativeBackend) -> Counter[str]:
    """Those of a step after the first two, which compile."""
    parts = micro_batches(batch(), 8)
    for _ in range(3):
        with Count() as count:
            backend.forward_backward(parts, 8 * 32)
            backend.optimizer_step(1e-3)
            backend.param_norm()
    return count.names


@pytest.mark.parametrize("precision", ["bf16_mixed", "bf16_sr", "fp32"])
def test_operations_do_not_grow_with_the_parameters(
    new_backend: NewBackend, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.setitem(KINDS, "cpu", TracedAccelerator)
    settings = (f"train.precision={precision}", "train.micro_batch=8", *DEEP)
    counts = {}
    for layers in (2, 24):
        backend = new_backend(*settings, f"model.num_layers={layers}")
        assert isinstance(backend, NativeBackend)
        counts[layers] = operations(backend)
    assert counts[2] == counts[24]
    assert counts[24].total() <= 100, counts[24]
    assert len([*backend.model.parameters()]) == 292


def test_fsdp_adds_a_number_for_each_block(
    new_backend: NewBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "cpu", TracedAccelerator)
    monkeypatch.setattr(runtime, "fsdp_disabled", lambda config, mesh: False)
    backend = new_backend("train.precision=bf16_sr", "train.micro_batch=8", *DEEP)
    assert isinstance(backend, NativeBackend)
    assert isinstance(backend.chunks[0], FSDPModule)
    counts = operations(backend)
    print(counts)
    assert counts.total() <= 24 * 20, counts
