"""A worker's shards of the model's parameters: names, regions, initial weights, attributes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.utils import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from slurmllm.backends.nxd.gradients import CopyCounts
from slurmllm.checkpoint.shards import WeightReader
from slurmllm.config.recipe import ModelConfig
from slurmllm.model.init import normal, standard_deviation
from slurmllm.plan.parameters import Shape, Share, kv_copies, parameter_shapes, share_of

_NAME = "slurmllm_name"
_WRAPPED = "_checkpoint_wrapped_module."


class ParameterShards:
    """Maps this worker's parameters to the whole model.

    Args:
        config: Of the whole model.
        tensor: Tensor-parallel degree.
    """

    def __init__(self, config: ModelConfig, tensor: int) -> None:
        self.config, self.tensor = config, tensor
        self.shapes: dict[str, Shape] = parameter_shapes(config)
        self.rank = parallel_state.get_tensor_model_parallel_rank()

    def store_names(self, model: nn.Module) -> None:
        """Store each module's name in it: NxD partitions the model and renames the parts."""
        for name, module in model.named_modules():
            setattr(module, _NAME, name)

    def named_parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return this worker's parameters by name in the whole model; tied ones once."""
        found: dict[str, nn.Parameter] = {}
        for module in model.modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:  # NxD freezes those of other stages
                    found.setdefault(self.name(module, leaf), parameter)
        return found

    def name(self, module: nn.Module, leaf: str) -> str:
        """Return a parameter's name in the whole model."""
        name = f"{getattr(module, _NAME)}.{leaf}".replace(_WRAPPED, "")
        tied = self.config.tied_embeddings and name == "head.weight"
        return "embed.weight" if tied else name

    def share(self, name: str) -> Share:
        return share_of(name, self.shapes[name], self.config, self.tensor, self.rank)

    def read(self, name: str, read: WeightReader) -> Tensor:
        """Read this worker's shard of a parameter, which may be several regions."""
        share, shape = self.share(name), self.shapes[name]
        whole = tuple(slice(0, size) for size in shape)
        if share.dim is None:
            return read(name, whole)
        before, after = whole[: share.dim], whole[share.dim + 1 :]
        pieces = [read(name, (*before, piece, *after)) for piece in share.pieces]
        return torch.cat(pieces, share.dim) if len(pieces) > 1 else pieces[0]

    def initializer(self, seed: int) -> Callable[[nn.Module, torch.device], None]:
        """Return NxD's `param_init_fn`, which sets the parameters of one module alone."""

        def initialize(module: nn.Module, device: torch.device) -> None:
            with torch.no_grad():
                for leaf, parameter in module.named_parameters(recurse=False):
                    name = self.name(module, leaf)
                    parameter.copy_(self.read(name, lambda n, r: self._initial(n, r, seed)))

        return initialize

    def _initial(self, name: str, region: tuple[slice, ...], seed: int) -> Tensor:
        size = [part.stop - part.start for part in region]
        if name.endswith(".bias"):
            return torch.zeros(size)
        if len(size) == 1:  # of a norm
            return torch.ones(size)
        offset = [part.start for part in region]
        std = standard_deviation(self.config, name)
        return normal(self.shapes[name], std, seed, name, offset, size)

    def set_attributes(self, parameters: dict[str, nn.Parameter], *, sequence: bool) -> None:
        """Set the attributes by which NxD distinguishes parameters; NxD itself loses some.

        Args:
            parameters: By name in the whole model.
            sequence: With sequence parallelism, gradients of whole parameters are partial sums,
                which NxD's optimizer reduces.
        """
        for name, parameter in parameters.items():
            dim = self.share(name).dim
            if dim is None:
                parameter.sequence_parallel_enabled = sequence  # type: ignore[attr-defined]
            elif not hasattr(parameter, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(parameter, True, dim, 1, self.tensor)

    def copy_counts(self, name: str, stages: int) -> CopyCounts:
        """Count a parameter's copies on the workers of a replica of `stages` pipeline stages."""
        share = self.share(name)
        if share.dim is None:
            return CopyCounts(self.tensor)
        row = self.first_replicated_row(name)
        if row is not None:
            return CopyCounts(1, row, kv_copies(self.config, self.tensor))
        tied = self.config.tied_embeddings and stages > 1 and name == "embed.weight"
        return CopyCounts(2 if tied else 1)

    def first_replicated_row(self, name: str) -> int | None:
        """Return the first row of the keys in a fused matrix or bias with replicated keys."""
        if ".attention.qkv." not in name or kv_copies(self.config, self.tensor) == 1:
            return None
        queries = self.share(name).pieces[0]
        rows: int = queries.stop - queries.start
        return rows
