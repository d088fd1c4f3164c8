"""FSDP's states of a model, sharded and whole, for one data-parallel worker, without its copies.

FSDP would copy weights and gradients into buffers and back, a twentieth of a small model's step on
CPUs. Here only mixed precision converts, once a step. All results have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from slurmllm.model.init import local_part


@dataclass(slots=True)
class _Weight:
    module: nn.Module
    name: str
    sharded: nn.Parameter  # the optimizer's and the checkpoints'; a DTensor
    whole: nn.Parameter  # that of forward and backward: the same memory, or a converted copy
    gradient: Tensor | None = None  # summed over micro batches in the type of `sharded`

    def add_gradient(self, whole: Tensor) -> None:
        """Add the gradient of `whole`, of one micro batch, in the type of `sharded`."""
        assert whole.grad is not None
        if self.gradient is None:
            self.gradient = whole.grad.to(self.sharded.dtype)
        else:
            self.gradient += whole.grad
        whole.grad = None


class UnshardedWeights:
    """A model's parameters as DTensors, as FSDP has them, which are whole tensors in `whole()`.

    The data-parallel mesh has one worker; forward and backward use `dtype`.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> None:
        self._mesh = mesh
        self._weights: list[_Weight] = []
        self._converted: list[_Weight] = []
        for module in model.modules():
            for name, parameter in [*module.named_parameters(recurse=False)]:
                values = parameter.detach()
                weight = _Weight(
                    module, name, nn.Parameter(self._shard(values)), nn.Parameter(values.to(dtype))
                )
                self._weights.append(weight)
                if values.dtype != dtype:
                    weight.whole.register_post_accumulate_grad_hook(weight.add_gradient)  # type: ignore[no-untyped-call]
                    weight.whole.untyped_storage().resize_(0)
                    self._converted.append(weight)
                module.register_parameter(name, weight.sharded)

    def _shard(self, whole: Tensor) -> DTensor:
        return DTensor.from_local(whole, self._mesh, [Shard(0)], run_check=False)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Have whole parameters in the model; afterwards the sharded ones get their gradients."""
        copies = [weight.whole.detach() for weight in self._converted]
        if copies:
            for copy in copies:
                copy.untyped_storage().resize_(copy.nbytes)
            torch._foreach_copy_(copies, [local_part(w.sharded.detach()) for w in self._converted])
        for weight in self._weights:
            weight.module.register_parameter(weight.name, weight.whole)
        try:
            yield
        finally:
            for weight in self._weights:
                weight.module.register_parameter(weight.name, weight.sharded)
                gradient = weight.whole.grad if weight.gradient is None else weight.gradient
                if gradient is not None:
                    weight.sharded.grad = self._shard(gradient)
                weight.whole.grad = weight.gradient = None
            for copy in copies:  # no memory between steps
                copy.untyped_storage().resize_(0)
