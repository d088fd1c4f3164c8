"""Muon on the matrices of the decoder layers, and AdamW on everything else, over sharded weights.

Muon: K. Jordan, kellerjordan.github.io/posts/muon (2024); the learning rate that fits AdamW's:
J. Liu et al. 2025 (arXiv 2502.16982). The arithmetic is torch.optim.Muon's. Queries, keys, values,
gate and up are matrices of their own, although a layer has them in two parameters.

The momentum is sharded as its parameter is. An update needs a whole matrix: each has an owner among
all workers of the pipeline stage, those of other copies (HSDP) included, which alone
orthogonalizes it; the FLOPs are shared out evenly. In each round an all-to-all collects a matrix
for every owner, and another distributes the results. Both are in bf16, the format of the
iterations, so that they round nothing: for the same gradient the bits are one process's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slurmllm.core.config.families.family import Layout
from slurmllm.core.config.recipe import ModelConfig, Recipe
from slurmllm.core.errors import ConfigError
from slurmllm.plan.parameters import newton_schulz_product
from slurmllm.train.backends.native.dcp import share_out
from slurmllm.train.backends.native.precision import NamedParameters, Options, make_adamw
from slurmllm.train.checkpoint.formats.huggingface import LAYOUTS
from slurmllm.train.checkpoint.state import MOMENTUM
from slurmllm.train.model.init import local_part, local_region
from slurmllm.train.model.private_names import MUON_UPDATE
from slurmllm.train.model.regions import Region, sizes_of

# Layout of our own parameters, by module.
_LAYOUTS: dict[str, Layout] = {"qkv": "qkv", "gate_up": "gate_up"}


class Matrix(NamedTuple):
    """A matrix that is orthogonalized separately: all rows of a parameter, or some.

    Attributes:
        regions: Region of the matrix that each worker of the pipeline stage has, by rank.
        local_rows: Its rows in this worker's shard of the parameter.
    """

    parameter: Tensor
    shape: torch.Size
    regions: Sequence[Region]
    local_rows: Tensor


class MuonAdamW(torch.optim.Optimizer):
    """The optimizer `muon`.

    Args:
        named_parameters: Name in the whole model and this worker's shard, of a pipeline stage.
        group: The workers of the stage.
        copies: Copies of the parameters that these workers hold together.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        recipe: Recipe,
        group: dist.ProcessGroup,
        copies: int,
    ) -> None:
        if fault := MUON_UPDATE.missing():
            raise ConfigError(f"optim.name: muon: torch {torch.__version__} has {fault}")
        self._newton_schulz, self._adjusted_lr = MUON_UPDATE.get()
        optim = recipe.optim
        by_adamw = dict(named_parameters)
        by_muon = {
            name: by_adamw.pop(name)
            for name, parameter in [*by_adamw.items()]
            if name.startswith("layers.") and parameter.ndim == 2
        }
        muon = torch.optim.Muon(
            by_muon.values(),
            optim.lr,
            optim.weight_decay,
            optim.momentum,
            optim.nesterov,
            ns_steps=optim.ns_steps,
            adjust_lr_fn=optim.adjust_lr_fn,
        )
        self._adamw = make_adamw(by_adamw.items(), optim, recipe.train)
        for options in self._adamw.param_groups:
            options["lr_scale"] = (optim.adamw_lr or optim.lr) / optim.lr
        super().__init__([*muon.param_groups, *self._adamw.param_groups], {})
        self._group = group
        self._rank = dist.get_rank(group)
        world = dist.get_world_size(group)
        each = world // copies
        first = self._rank // each * each
        self._copy = range(first, first + each)  # the workers of this worker's copy
        matrices = dict(_matrices(by_muon, recipe.model, group))
        flops = {
            name: newton_schulz_product(matrix.shape).flops
            for name, matrix in matrices.items()
            if matrix.shape.numel()
        }
        # Of each round, a matrix by owner: the largest first, at the end some without rows.
        rounds = zip_longest(*share_out(flops, world), fillvalue=next(iter(matrices)))
        self._rounds = [[matrices[name] for name in names] for names in rounds]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "the loss is computed before"
        muon, *adamw = self.param_groups
        # State and groups are this optimizer's; a loaded checkpoint replaces them.
        self._adamw.state = self.state
        self._adamw.param_groups = adamw
        self._adamw.step()
        for parameter in muon["params"]:
            state = self.state[parameter]
            if not state:
                state[MOMENTUM] = torch.zeros_like(parameter)
            gradient = local_part(parameter.grad)
            local_part(state[MOMENTUM]).lerp_(gradient, 1 - muon["momentum"])
        for owned in self._rounds:
            for matrix, result in zip(owned, self._orthogonalize(owned, muon), strict=True):
                lr = self._adjusted_lr(muon["lr"], muon["adjust_lr_fn"], matrix.shape)
                shard = local_part(matrix.parameter)
                rows = shard[matrix.local_rows].float().mul_(1 - muon["lr"] * muon["weight_decay"])
                shard[matrix.local_rows] = rows.add_(result, alpha=-lr).to(shard.dtype)

    def _orthogonalize(self, owned: Sequence[Matrix], muon: Options) -> list[Tensor]:
        """Return this worker's part of the result for each matrix of a round, bf16."""
        mine = owned[self._rank]
        nothing = mine.local_rows.new_empty(0, dtype=torch.bfloat16)
        directions = [nothing] * len(owned)
        sizes = [[0]] * len(owned)
        for worker in self._copy:
            parameter, _, _, local_rows = owned[worker]
            direction = local_part(self.state[parameter][MOMENTUM])[local_rows]
            if muon["nesterov"]:
                assert parameter.grad is not None
                direction = local_part(parameter.grad)[local_rows].lerp(direction, muon["momentum"])
            directions[worker] = direction.bfloat16()
            sizes[worker] = sizes_of(mine.regions[worker])
        collected = self._exchange(directions, sizes)
        whole = nothing.new_empty(mine.shape)
        for worker in self._copy:
            whole[mine.regions[worker]] = collected[worker]
        if whole.numel():
            options = muon["ns_coefficients"], muon["ns_steps"], muon["eps"]
            whole = self._newton_schulz(whole, *options)
        sizes = [sizes_of(matrix.regions[self._rank]) for matrix in owned]
        return self._exchange([whole[region] for region in mine.regions], sizes)

    def _exchange(self, outgoing: Sequence[Tensor], sizes: Sequence[list[int]]) -> list[Tensor]:
        """Send a tensor to each worker; return one from each, of the given sizes."""
        received = flat = torch.cat([tensor.flatten() for tensor in outgoing])
        counts = [math.prod(size) for size in sizes]
        if len(counts) > 1:
            received = flat.new_empty(sum(counts))
            lengths = [tensor.numel() for tensor in outgoing]
            dist.all_to_all_single(received, flat, counts, lengths, self._group)
        return [*map(Tensor.view, received.split(counts), sizes)]


def _matrices(
    parameters: Mapping[str, Tensor], model: ModelConfig, group: dist.ProcessGroup
) -> Iterator[tuple[str, Matrix]]:
    """Yield (name, matrix) of each matrix in the parameters; all workers of the group call this.

    The first matrix of each parameter is empty.
    """
    everywhere: list[Any] = [None for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everywhere, [*map(local_region, parameters.values())], group)
    for number, (name, parameter) in enumerate(parameters.items()):
        start = local_region(parameter)[0].start
        layout = LAYOUTS[_LAYOUTS.get(name.split(".")[-2], "same")]
        every = torch.arange(len(parameter))
        for index, rows in enumerate([every[:0], *layout.split(model, every)]):
            regions = []
            for down, across in (worker[number] for worker in everywhere):
                # The rows ascend, so that a worker's are neighbours in the matrix.
                ends = torch.searchsorted(rows, torch.tensor([down.start, down.stop]))
                regions.append((slice(*ends.tolist()), across))
            local_rows = rows[regions[dist.get_rank(group)][0]] - start
            shape = torch.Size([len(rows), parameter.shape[1]])
            yield (
                f"{name} {index}",
                Matrix(parameter, shape, regions, local_rows.to(parameter.device)),
            )
