"""AdamW of fp32 weights in one pass, for one worker of an accelerator that computes in bf16.

torch's fused AdamW takes fp32 gradients, which a pass has converted from bf16 and another clipped,
and a third converts the new weights for the next step. Here the compiled update does all of it:
30 bytes of an accelerator's memory are moved for each parameter instead of 54.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from slurmllm.backends.native.device import Device
from slurmllm.backends.native.precision import adamw_groups, adamw_step, coefficients
from slurmllm.backends.native.unsharded import UnshardedWeights
from slurmllm.config.recipe import OptimConfig

_BLOCK = re.compile(r"\D*\.\d+\.")  # the start of the names of a block's parameters


class MixedAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW with the clipping of gradients, and with a copy of the weights in bf16.

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
        names, groups = adamw_groups(named_parameters, optim)
        super().__init__(
            groups, {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "weight_decay": 0.0}
        )
        self._weights, self._update = weights, device.compile(update_)
        # Name of a block, "" outside → its parameters and their groups: blocks share a graph.
        self._batches: dict[str, list[tuple[Tensor, int]]] = {}
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                block = _BLOCK.match(names[parameter])
                batch = self._batches.setdefault(block[0] if block else "", [])
                batch.append((parameter, index))
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
        step, device = int(steps[0].item()), self.factor.device
        rows = [coefficients(group, step, device) for group in self.param_groups]
        for batch in self._batches.values():
            tensors: list[list[Tensor]] = []
            for parameter, _ in batch:
                assert parameter.grad is not None
                state, copy = self.state[parameter], self._weights.copies[parameter]
                moments = state["exp_avg"], state["exp_avg_sq"]
                tensors.append([parameter.detach(), parameter.grad, *moments, copy])
            self._update(tensors, [rows[group] for _, group in batch], self.factor)
        self._weights.copies_are_current()


def update_(tensors: Sequence[Sequence[Tensor]], rows: Sequence[Tensor], factor: Tensor) -> None:
    """Make a step of AdamW in place.

    Args:
        tensors: For each parameter its fp32 weight, its gradient, both moments in fp32, and the
            copy of the weight that is written as well, all of one shape.
        rows: `coefficients` of each.
        factor: Of the gradients.
    """
    factor = factor.float()
    for (weight, gradient, exp_avg, exp_avg_sq, copy), row in zip(tensors, rows, strict=True):
        w, m, v = adamw_step(weight, gradient.float() * factor, exp_avg, exp_avg_sq, row)
        weight.copy_(w)
        exp_avg.copy_(m)
        exp_avg_sq.copy_(v)
        copy.copy_(w)
