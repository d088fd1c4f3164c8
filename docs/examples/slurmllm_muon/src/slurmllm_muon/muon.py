"""Muon on the matrices of the decoder layers, AdamW on everything else, sharded as slurmllm shards.

Muon: K. Jordan, kellerjordan.github.io/posts/muon (2024); J. Liu et al., Muon is Scalable for LLM
Training (2025, arXiv 2502.16982).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from slurmllm.core.config.recipe import Recipe
from slurmllm.train.backends.native.precision import make_adamw


class ShardedMuon(torch.optim.Muon):
    """torch.optim.Muon over shards of matrices.

    Each worker keeps the momentum of its own shards. Only the update is gathered, because it is
    computed from the singular vectors of the whole matrix: every worker that has a shard of one
    computes it, and keeps its own shard of the result. For plain tensors the results have the bits
    of torch.optim.Muon's.

    Args:
        parameters: Matrices, plain tensors or DTensors.
        fp32: Whether the Newton-Schulz iterations are computed in fp32, not in bf16 as in PyTorch.
            bf16 rounds a gradient that differs in the last bit to another number now and then, so
            that meshes agree to four digits of the loss only; fp32 makes them agree to six.
        options: Of torch.optim.Muon.
    """

    def __init__(self, parameters: Sequence[Tensor], *, fp32: bool, **options: Any) -> None:
        super().__init__(parameters, **options)
        self._orthogonalize = _newton_schulz_fp32 if fp32 else _zeropower_via_newtonschulz

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "the loss is computed before"
        for group in self.param_groups:
            matrices: list[Tensor] = []
            gradients: list[Tensor] = []
            momenta: list[Tensor] = []
            self._init_group(group, matrices, gradients, momenta)
            for matrix, gradient, momentum in zip(matrices, gradients, momenta, strict=True):
                momentum.lerp_(gradient, 1 - group["momentum"])
                update = momentum
                if group["nesterov"]:
                    update = gradient.lerp(momentum, group["momentum"])
                whole = update.full_tensor() if isinstance(update, DTensor) else update
                orthogonal = self._orthogonalize(
                    whole, group["ns_coefficients"], group["ns_steps"], group["eps"]
                )
                lr = _adjust_lr(group["lr"], group["adjust_lr_fn"], matrix.shape)
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(_shard_like(orthogonal, matrix), alpha=-lr)


def _newton_schulz_fp32(
    matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """torch.optim.Muon's iteration in fp32 (quintic, by K. Jordan)."""
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.float().T if tall else matrix.float()
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def _shard_like(whole: Tensor, matrix: Tensor) -> Tensor:
    """Return this worker's shard of a tensor that all workers have, without communication."""
    if not isinstance(matrix, DTensor):
        return whole
    everywhere = [Replicate()] * matrix.device_mesh.ndim
    replica = DTensor.from_local(whole, matrix.device_mesh, everywhere, run_check=False)
    return replica.redistribute(placements=matrix.placements)


class MuonAdamW(torch.optim.Optimizer):
    """The optimizer `muon`.

    `optim.lr` and its schedule are Muon's; AdamW, made as by `optim.name: adamw`, uses `adamw_lr`
    in proportion. Matrices that slurmllm keeps as one (queries, keys and values; gate and up) are
    orthogonalized as one.

    Args:
        parameters: Name in the whole model and this worker's shard, of all parameters.
        recipe: The recipe; of `optim`, betas and eps are AdamW's, weight_decay is both's.
        adamw_lr: Highest learning rate of AdamW; by default `optim.lr`.
        momentum: Muon's momentum.
        nesterov: Whether the momentum is Nesterov's.
        ns_steps: Newton-Schulz iterations.
        ns_precision: Format of these iterations.
        adjust_lr: How Muon's learning rate depends on the shape of a matrix: `original` as Jordan
            has it, `match_rms_adamw` as Liu et al., with which AdamW's learning rate fits Muon too.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        recipe: Recipe,
        *,
        adamw_lr: float | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_precision: Literal["bf16", "fp32"] = "bf16",
        adjust_lr: Literal["original", "match_rms_adamw"] = "original",
    ) -> None:
        optim = recipe.optim
        matrices, others = [], []
        for name, parameter in parameters:
            hidden = name.startswith("layers.") and parameter.ndim == 2
            (matrices if hidden else others).append((name, parameter))
        self._adamw = make_adamw(others, optim, recipe.train) if others else None
        # A pipeline stage may have none of a kind.
        self._muon = None
        if matrices:
            self._muon = ShardedMuon(
                [tensor for _, tensor in matrices], lr=optim.lr, weight_decay=optim.weight_decay,
                momentum=momentum, nesterov=nesterov, ns_steps=ns_steps, adjust_lr_fn=adjust_lr,
                fp32=ns_precision == "fp32",
            )  # fmt: skip
        groups = [group for one in self._both() for group in one.param_groups]
        for group in self._adamw.param_groups if self._adamw else ():
            # slurmllm sets lr to the schedule's times this factor before each step.
            group["lr_scale"] = (adamw_lr or optim.lr) / optim.lr
        super().__init__(groups, {})

    def _both(self) -> list[torch.optim.Optimizer]:
        return [one for one in (self._muon, self._adamw) if one is not None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "the loss is computed before"
        for one in self._both():
            # State and groups are this optimizer's; a loaded checkpoint replaces them.
            one.state = self.state
            one.param_groups = [
                group for group in self.param_groups if ("momentum" in group) == (one is self._muon)
            ]
            one.step()
