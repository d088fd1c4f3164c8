"""FSDP's formats of weights and gradients for one data-parallel worker, without its copies.

`MixedAdamW` is its optimizer on an accelerator that computes in bf16.

FSDP would copy weights and gradients into buffers and back, a twentieth of a small model's step on
CPUs, and compute with DTensors, whose dispatch costs the host a tenth of a GPU's step. Here the
parameters are plain tensors, which only mixed precision converts, once a step. All results have the
same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slurmllm.core.config.recipe import OptimConfig
from slurmllm.train.backends.native.device import Device
from slurmllm.train.backends.native.precision import (
    NamedParameters,
    adamw_groups,
    adamw_step,
    coefficients,
    initial_state,
    specialize_on_alignment,
)


@dataclass(slots=True)
class _Weight:
    module: nn.Module
    name: str
    stored: nn.Parameter  # the optimizer's and the checkpoints'
    used: nn.Parameter  # that of forward and backward: the same, or a converted copy
    sum: Tensor | None = None  # of gradients over the micro batches, fp32
    waits: bool = False  # whether the gradient of a micro batch waits to be added


class UnshardedWeights:
    """The parameters of a model that one worker holds whole.

    Inside `whole()` they are of the type `dtype`; their gradients are summed in fp32.

    Args:
        waiting_bytes: Bytes of gradients that are collected and then added in one call; 0: each is
            added at once, while it is in a CPU's cache.
        lasting: Whether the optimizer takes gradients of `dtype`, which need no sum, and writes
            `copies`.

    Attributes:
        copies: Stored parameter → its copy of `dtype`.
    """

    _bytes = 0
    _summing = False
    _versions: list[int] | None = None  # of the originals that the copies are equal to

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, waiting_bytes: int, *, lasting: bool = False
    ) -> None:
        self._lasting = lasting
        self._weights: list[_Weight] = []
        self._waiting: list[tuple[_Weight, Tensor]] = []
        self._limit = waiting_bytes
        for module in model.modules():
            for name, stored in [*module.named_parameters(recurse=False)]:
                if stored.dtype == dtype == torch.float32:
                    continue  # autograd sums its gradients
                used = stored
                if stored.dtype != dtype:
                    used = nn.Parameter(stored.detach().to(dtype))
                    used.untyped_storage().resize_(0)
                weight = _Weight(module, name, stored, used)
                used.register_post_accumulate_grad_hook(self._collector(weight))
                self._weights.append(weight)
        self._converted = [w for w in self._weights if w.used is not w.stored]
        self.copies = {weight.stored: weight.used.detach() for weight in self._converted}
        self._originals = [weight.stored.detach() for weight in self._converted]
        for stored in self.copies if lasting else ():
            stored.grad_dtype = None  # any

    @contextmanager
    def whole(self, micro_batches: int = 1) -> Iterator[None]:
        """Have parameters of `dtype` in the model; afterwards the stored ones get their gradients.

        `micro_batches` is the number of gradients of each.
        """
        # A single gradient of the format that the optimizer takes is its sum.
        self._summing = (bool(self._converted) and not self._lasting) or micro_batches > 1
        if self.copies and self._versions != [tensor._version for tensor in self._originals]:
            for copy in self.copies.values():
                copy.untyped_storage().resize_(copy.nbytes)
            torch._foreach_copy_([*self.copies.values()], self._originals)
            if self._lasting:
                self.copies_are_current()
        for weight in self._converted:
            weight.module._parameters[weight.name] = weight.used
        try:
            yield
        finally:
            for weight in self._converted:
                weight.module._parameters[weight.name] = weight.stored
            self._add()
            self._finish()
            for copy in () if self._lasting else self.copies.values():  # no memory between steps
                copy.untyped_storage().resize_(0)

    def copies_are_current(self) -> None:
        """Take the copies for equal to the stored parameters until these change again."""
        self._versions = [tensor._version for tensor in self._originals]

    def _collector(self, weight: _Weight) -> Callable[[Tensor], None]:
        def collect(used: Tensor) -> None:
            if not self._summing:
                return
            assert used.grad is not None
            if weight.waits:
                self._add()
            self._waiting.append((weight, used.grad))
            used.grad = None
            weight.waits = True
            self._bytes += used.nbytes
            if self._bytes > self._limit:
                self._add()

        return collect

    @torch.no_grad()
    def _add(self) -> None:
        first = [(weight, g) for weight, g in self._waiting if weight.sum is None]
        later = [(weight.sum, g) for weight, g in self._waiting if weight.sum is not None]
        for (weight, _), total in zip(first, _converted([g for _, g in first]), strict=True):
            weight.sum = total
        if later:
            gradients = [gradient for _, gradient in later]
            # Lists of one format are one launch.
            addends = _converted(gradients) if self._limit else gradients
            torch._foreach_add_([total for total, _ in later], addends)
        for weight, _ in self._waiting:
            weight.waits = False
        self._waiting.clear()
        self._bytes = 0

    @torch.no_grad()
    def _finish(self) -> None:
        """Give the sums to the stored parameters, in a format that the optimizer takes."""
        for weight in () if self._summing else self._converted:
            weight.stored.grad = weight.used.grad
            weight.used.grad = None
        summed = [weight for weight in self._weights if weight.sum is not None]
        sums = [weight.sum for weight in summed if weight.sum is not None]
        if sums and summed[0].stored.dtype != torch.float32:
            sums = _converted(sums, summed[0].stored.dtype)
        for weight, total in zip(summed, sums, strict=True):
            weight.stored.grad = total
            weight.sum = None


def _converted(tensors: list[Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, tensors)
    return copies


class MixedAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW that also clips the gradients and writes the bf16 weights of the next step.

    torch's fused AdamW takes fp32 gradients, which a pass has converted from bf16 and another
    clipped, and a third converts the new weights for the next step. Here the compiled update does
    all of it: 30 bytes of an accelerator's memory are moved for each parameter instead of 54. Each
    matrix is a call; vectors, which are many and small, are joined. The state has the names and
    shapes of AdamW's. Gradients are bf16 or fp32.

    Attributes:
        factor: What gradients are multiplied by, fp64 without dimensions; set before each step.
    """

    factor: Tensor

    def __init__(
        self,
        named_parameters: NamedParameters,
        optim: OptimConfig,
        weights: UnshardedWeights,
        device: Device,
    ) -> None:
        super().__init__(adamw_groups(named_parameters, optim), {})
        self._weights, self._update = weights, device.compile(update_mixed_, dynamic=True)
        for parameter in weights.copies:
            self.state[parameter] = initial_state(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "the loss is computed before"
        steps = [state["step"] for state in self.state.values()]
        torch._foreach_add_(steps, 1)
        step = int(steps[0].item())
        factor = self.factor.float()
        for group in self.param_groups:
            row = coefficients(group, step, factor.device)
            vectors: list[list[Tensor]] = []
            for parameter in group["params"]:
                assert parameter.grad is not None
                state = self.state[parameter]
                copy = self._weights.copies[parameter]
                moments = state["exp_avg"], state["exp_avg_sq"]
                tensors = [parameter.detach(), *moments, copy, parameter.grad.contiguous()]
                if parameter.ndim == 1:
                    vectors.append(tensors)
                else:
                    self._update([tensor.view(-1) for tensor in tensors], row, factor)
            if vectors:
                by_kind = [list(tensors) for tensors in zip(*vectors, strict=True)]
                joined = [torch.cat(tensors) for tensors in by_kind]
                self._update(joined, row, factor)
                for tensors, values in zip(by_kind[:-1], joined, strict=False):
                    torch._foreach_copy_(tensors, torch.split(values, [len(t) for t in tensors]))
        self._weights.copies_are_current()


def update_mixed_(tensors: Sequence[Tensor], row: Tensor, factor: Tensor) -> None:
    """Make a step of AdamW in place.

    Args:
        tensors: Weight and both moments in fp32, the copy that gets the weight in its own format,
            and the gradient, of one dimension each.
        row: `coefficients`.
        factor: Of the gradient, fp32 without dimensions.
    """
    weight, exp_avg, exp_avg_sq, copy, gradient = tensors
    specialize_on_alignment(len(weight))
    w, m, v = adamw_step(weight, gradient.float() * factor, exp_avg, exp_avg_sq, row)
    weight.copy_(w)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    copy.copy_(w)
