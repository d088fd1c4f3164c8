"""Between whole parameters and a worker's parts of them: initial weights, names, attributes."""

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
    """Where this worker's parameters lie in the whole model.

    Args:
        config: The whole model's.
        tensor: Tensor-parallel degree.
    """

    def __init__(self, config: ModelConfig, tensor: int) -> None:
        self.config, self.tensor = config, tensor
        self.shapes: dict[str, Shape] = parameter_shapes(config)
        self.rank = parallel_state.get_tensor_model_parallel_rank()

    def label(self, model: nn.Module) -> None:
        """Write each module's name on it: NxD cuts the model up and names the parts anew."""
        for name, module in model.named_modules():
            setattr(module, _NAME, name)

    def named_parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """This worker's parameters under their names in the whole model; tied ones once."""
        found: dict[str, nn.Parameter] = {}
        for module in model.modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:  # those of other stages are frozen by NxD
                    found.setdefault(self.name(module, leaf), parameter)
        return found

    def name(self, module: nn.Module, leaf: str) -> str:
        """A parameter's name in the whole model."""
        name = f"{getattr(module, _NAME)}.{leaf}".replace(_WRAPPED, "")
        tied = self.config.tied_embeddings and name == "head.weight"
        return "embed.weight" if tied else name

    def share(self, name: str) -> Share:
        """This worker's part of a parameter."""
        return share_of(name, self.shapes[name], self.config, self.tensor, self.rank)

    def read(self, name: str, read: WeightReader) -> Tensor:
        """This worker's part of a parameter, put together from a reader's pieces."""
        share, shape = self.share(name), self.shapes[name]
        whole = tuple(slice(0, size) for size in shape)
        if share.dim is None:
            return read(name, whole)
        before, after = whole[: share.dim], whole[share.dim + 1 :]
        pieces = [read(name, (*before, piece, *after)) for piece in share.pieces]
        return torch.cat(pieces, share.dim) if len(pieces) > 1 else pieces[0]

    def initializer(self, seed: int) -> Callable[[nn.Module, torch.device], None]:
        """NxD's `param_init_fn`: sets the parameters of one module, not of those below it."""

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

    def mark(self, parameters: dict[str, nn.Parameter], *, sequence: bool) -> None:
        """Set the attributes by which NxD tells parameters apart, whatever was lost of them.

        Args:
            parameters: By name in the whole model.
            sequence: Under sequence parallelism, gradients of whole parameters are partial sums
                that NxD's optimizer adds up.
        """
        for name, parameter in parameters.items():
            dim = self.share(name).dim
            if dim is None:
                parameter.sequence_parallel_enabled = sequence  # type: ignore[attr-defined]
            elif not hasattr(parameter, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(parameter, True, dim, 1, self.tensor)

    def counted(self, name: str, stages: int) -> CopyCounts:
        """How often a parameter's elements lie on the workers of a replica.

        Args:
            name: In the whole model.
            stages: Of the pipeline.
        """
        share = self.share(name)
        if share.dim is None:
            return CopyCounts(self.tensor)
        row = self.first_key(name)
        if row is not None:
            return CopyCounts(1, row, kv_copies(self.config, self.tensor))
        tied = self.config.tied_embeddings and stages > 1 and name == "embed.weight"
        return CopyCounts(2 if tied else 1)

    def first_key(self, name: str) -> int | None:
        """The first row of the key in a coalesced matrix or bias whose keys are repeated."""
        if ".attention.qkv." not in name or kv_copies(self.config, self.tensor) == 1:
            return None
        queries = self.share(name).pieces[0]
        rows: int = queries.stop - queries.start
        return rows
