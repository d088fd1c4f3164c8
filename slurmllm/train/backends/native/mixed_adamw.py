"""AdamW of fp32 weights in one pass, for one worker of an accelerator that computes in bf16.

torch's fused AdamW takes fp32 gradients, which a pass has converted from bf16 and another clipped,
and a third converts the new weights for the next step. Here the compiled update does all of it:
30 bytes of an accelerator's memory are moved for each parameter instead of 54. Each matrix is a
call; vectors, which are many and small, are joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from slurmllm.core.config.recipe import OptimConfig
from slurmllm.train.backends.native.device import Device
from slurmllm.train.backends.native.precision import adamw_groups, adamw_step, coefficients
from slurmllm.train.backends.native.unsharded import UnshardedWeights


class MixedAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW that also clips the gradients and writes the bf16 weights of the next step.

    The state has the names and shapes of AdamW's. Gradients are bf16 or fp32.

    Attributes:
        factor: What gradients are multiplied by, fp64 without dimensions; set before each step.
    """

    factor: Tensor

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        optim: OptimConfig,
        weights: UnshardedWeights,
        device: Device,
    ) -> None:
        _, groups = adamw_groups(named_parameters, optim)
        super().__init__(
            groups, {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "weight_decay": 0.0}
        )
        self._weights, self._update = weights, device.compile(update_, dynamic=True)
        for parameter in weights.copies:
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),  # on the CPU: read below
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "the loss is computed before"
        steps = [state["step"] for state in self.state.values()]
        torch._foreach_add_(steps, 1)
        step, factor = int(steps[0].item()), self.factor.float()
        for group in self.param_groups:
            row = coefficients(group, step, factor.device)
            vectors: list[list[Tensor]] = []
            for parameter in group["params"]:
                assert parameter.grad is not None
                state, copy = self.state[parameter], self._weights.copies[parameter]
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


def update_(tensors: Sequence[Tensor], row: Tensor, factor: Tensor) -> None:
    """Make a step of AdamW in place.

    Args:
        tensors: Weight and both moments in fp32, the copy that gets the weight in its own format,
            and the gradient, of one dimension each.
        row: `coefficients`.
        factor: Of the gradient, fp32 without dimensions.
    """
    weight, exp_avg, exp_avg_sq, copy, gradient = tensors
    w, m, v = adamw_step(weight, gradient.float() * factor, exp_avg, exp_avg_sq, row)
    weight.copy_(w)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    copy.copy_(w)
