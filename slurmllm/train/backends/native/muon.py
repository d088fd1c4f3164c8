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
from slurmllm.train.checkpoint.shards import Region, sizes_of
from slurmllm.train.checkpoint.state import MOMENTUM
from slurmllm.train.model.init import local_part, local_region
from slurmllm.train.model.private_names import MUON_UPDATE


class Matrix(NamedTuple):
    """A matrix that is orthogonalized on its own: all rows of a parameter, or some.

    Attributes:
        regions: Region of the matrix that each worker of the pipeline stage has, by rank.
        here: Its rows in this worker's shard of the parameter.
    """

    parameter: Tensor
    shape: torch.Size
    regions: Sequence[Region]
    here: Tensor


class MuonAdamW(torch.optim.Optimizer):
    """The optimizer `muon`.

    Args:
        named_parameters: Name in the whole model and this worker's shard, of a pipeline stage.
        group: The workers of the stage; None: all workers.
        copies: Copies of the parameters that these workers hold together.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        recipe: Recipe,
        group: dist.ProcessGroup | None,
        copies: int,
    ) -> None:
        if fault := MUON_UPDATE.missing():
            raise ConfigError(f"optim.name: muon: torch {torch.__version__} has {fault}")
        self._newton_schulz, self._adjusted_lr = MUON_UPDATE.get()
        self._group = group
        self._rank = dist.get_rank(group)
        self._workers = range(dist.get_world_size(group))
        each = len(self._workers) // copies
        first = self._rank // each * each
        self._copy = range(first, first + each)  # the workers of this worker's copy
        optim = recipe.optim
        others = dict(named_parameters)
        inside = [name for name, p in others.items() if name.startswith("layers.") and p.ndim == 2]
        by_muon = {name: others.pop(name) for name in inside}
        muon = torch.optim.Muon(
            by_muon.values(),
            optim.lr,
            optim.weight_decay,
            optim.momentum,
            optim.nesterov,
            ns_steps=optim.ns_steps,
            adjust_lr_fn=optim.adjust_lr_fn,
        )
        self._adamw = make_adamw(others.items(), optim, recipe.train)
        for options in self._adamw.param_groups:
            options["lr_scale"] = (optim.adamw_lr or optim.lr) / optim.lr
        super().__init__([*muon.param_groups, *self._adamw.param_groups], {})
        self._device = local_part(by_muon[inside[0]]).device
        matrices = dict(_matrices(by_muon, recipe.model, group))
        flops = {name: newton_schulz_product(m.shape).flops for name, m in matrices.items()}
        shares = share_out(flops, len(self._workers))  # the largest first
        # Of each round, owner → matrix.
        self._rounds = [
            {owner: matrices[name] for owner, name in enumerate(names) if name}
            for names in zip_longest(*shares)
        ]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "the loss is computed before"
        muon, *others = self.param_groups
        # State and groups are this optimizer's; a loaded checkpoint replaces them.
        self._adamw.state = self.state
        self._adamw.param_groups = others
        self._adamw.step()
        for parameter in muon["params"]:
            state = self.state[parameter]
            if not state:
                state[MOMENTUM] = torch.zeros_like(parameter)
            gradient = local_part(parameter.grad)
            local_part(state[MOMENTUM]).lerp_(gradient, 1 - muon["momentum"])
        for owned in self._rounds:
            for owner, result in self._orthogonalize(owned, muon).items():
                parameter, shape, _, here = owned[owner]
                lr = self._adjusted_lr(muon["lr"], muon["adjust_lr_fn"], shape)
                shard = local_part(parameter)
                rows = shard[here].float().mul_(1 - muon["lr"] * muon["weight_decay"])
                shard[here] = rows.add_(result, alpha=-lr).to(shard.dtype)

    def _orthogonalize(self, owned: Mapping[int, Matrix], muon: Options) -> dict[int, Tensor]:
        """Return this worker's part of each result of a round by owner, bf16."""
        directions: dict[int, Tensor] = {}
        for owner, (parameter, _, _, here) in owned.items():
            if owner in self._copy:
                direction = local_part(self.state[parameter][MOMENTUM])[here]
                if muon["nesterov"]:
                    assert parameter.grad is not None
                    direction = local_part(parameter.grad)[here].lerp(direction, muon["momentum"])
                directions[owner] = direction.bfloat16()
        regions: dict[int, Region] = {}
        results: dict[int, Tensor] = {}
        mine = owned.get(self._rank)
        if mine is not None:
            regions = dict(enumerate(mine.regions))
        collected = self._exchange(directions, {w: regions[w] for w in regions if w in self._copy})
        if mine is not None:
            whole = collected[self._rank].new_empty(mine.shape)
            for worker, part in collected.items():
                whole[regions[worker]] = part
            whole = self._newton_schulz(
                whole, muon["ns_coefficients"], muon["ns_steps"], muon["eps"]
            )
            results = {worker: whole[region] for worker, region in regions.items()}
        return self._exchange(results, {o: m.regions[self._rank] for o, m in owned.items()})

    def _exchange(
        self, outgoing: Mapping[int, Tensor], regions: Mapping[int, Region]
    ) -> dict[int, Tensor]:
        """Send a tensor to each of some workers; return those from others, of regions' sizes.

        The workers ascend in both.
        """
        nothing = torch.empty(0, dtype=torch.bfloat16, device=self._device)
        sent = torch.cat([nothing, *(part.flatten() for part in outgoing.values())])
        sizes = {worker: sizes_of(region) for worker, region in regions.items()}
        received = sent
        if len(self._workers) > 1:
            counts = [math.prod(sizes.get(worker, [0])) for worker in self._workers]
            received = sent.new_empty(sum(counts))
            sent_counts = [outgoing.get(worker, nothing).numel() for worker in self._workers]
            dist.all_to_all_single(received, sent, counts, sent_counts, self._group)
        parts = received.split([math.prod(size) for size in sizes.values()])
        return {w: part.view(sizes[w]) for w, part in zip(sizes, parts, strict=True)}


def _matrices(
    parameters: Mapping[str, Tensor], model: ModelConfig, group: dist.ProcessGroup | None
) -> Iterator[tuple[str, Matrix]]:
    """Yield each matrix of the parameters after a name of its own (collective)."""
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, [*map(local_region, parameters.values())], group)
    for number, (name, parameter) in enumerate(parameters.items()):
        layout: Layout = "same"
        if name.endswith(".qkv.weight"):
            layout = "qkv"  # ours, of every family
        elif name.endswith(".gate_up.weight"):
            layout = "gate_up"
        height, width = parameter.shape
        for part, rows in enumerate(LAYOUTS[layout].split(model, torch.arange(height))):
            regions = []
            for worker in everywhere:
                within, across = worker[number]
                # The rows ascend, so that a worker's are neighbours in the matrix.
                ends = torch.searchsorted(rows, torch.tensor([within.start, within.stop]))
                regions.append((slice(*ends.tolist()), across))
            here = rows[regions[dist.get_rank(group)][0]] - local_region(parameter)[0].start
            here = here.to(local_part(parameter).device)
            yield f"{name} {part}", Matrix(parameter, torch.Size([len(rows), width]), regions, here)
