"""A worker's shards of the model's parameters, and norms and clipping of their gradients.

NxD's `clip_grad_norm` counts replicated attention keys and values once for each copy, and its
ZeRO-1 always clips at 1. The functions here run in a hook of the inner optimizer, after gradients
have been reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.utils import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from slurmllm.core.config.recipe import ModelConfig
from slurmllm.plan.mesh import Mesh
from slurmllm.plan.parameters import Shape, Share, kv_copies, parameter_shapes, sharding, share_of
from slurmllm.train.checkpoint.shards import WeightReader
from slurmllm.train.model.init import initial_values
from slurmllm.train.model.regions import Region

Parameters = dict[str, nn.Parameter]  # by name in the whole model
NAME = "slurmllm_name"  # attribute of a module: NxD partitions the model and renames the parts
_WRAPPED = "_checkpoint_wrapped_module."


class ParameterShards:
    """The place of a worker's parameters in the whole model's; `tensor` is the parallel degree."""

    def __init__(self, config: ModelConfig, tensor: int) -> None:
        self.config = config
        self.tensor = tensor
        self.shapes: dict[str, Shape] = parameter_shapes(config)
        self.rank = parallel_state.get_tensor_model_parallel_rank()

    def named_parameters(self, model: nn.Module) -> Parameters:
        """Return this worker's parameters by name; tied parameters appear once."""
        parameters: Parameters = {}
        for module in model.modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:  # NxD freezes those of other stages
                    parameters.setdefault(self.name(module, leaf), parameter)
        return parameters

    def name(self, module: nn.Module, leaf: str) -> str:
        name = f"{getattr(module, NAME)}.{leaf}".replace(_WRAPPED, "")
        tied = self.config.tied_embeddings and name == "head.weight"
        return "embed.weight" if tied else name

    def share(self, name: str) -> Share:
        return share_of(name, self.shapes[name], self.config, self.tensor, self.rank)

    def read(self, name: str, read: WeightReader) -> Tensor:
        share = self.share(name)
        pieces = [read(name, region) for region in share.regions(self.shapes[name])]
        return torch.cat(pieces, share.dim or 0) if len(pieces) > 1 else pieces[0]

    def initializer(self, seed: int) -> Callable[[nn.Module, torch.device], None]:
        """Return NxD's `param_init_fn`: it sets one module's parameters, without its children."""

        def initial(name: str, region: Region) -> Tensor:
            return initial_values(self.config, name, self.shapes[name], region, seed)

        @torch.no_grad()
        def initialize(module: nn.Module, device: torch.device) -> None:
            for leaf, parameter in module.named_parameters(recurse=False):
                parameter.copy_(self.read(self.name(module, leaf), initial))

        return initialize

    def set_attributes(self, parameters: Parameters, *, sequence: bool) -> None:
        """Set NxD's attributes of parameters; some are lost when NxD partitions the model.

        With sequence parallelism NxD reduces gradients of unsharded parameters, except those of
        single heads, which `sum_` reduces on every mesh.
        """
        for name, parameter in parameters.items():
            dim = self.share(name).dim
            if dim is None:
                partial = sequence and sharding(name, self.config) != "head"
                parameter.sequence_parallel_enabled = partial  # type: ignore[attr-defined]
            elif not hasattr(parameter, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(parameter, True, dim, 1, self.tensor)

    def copy_weights(self, name: str, stages: int) -> float | Tensor:
        """Return 1 / copies of a parameter on the workers of a replica of `stages` stages.

        A scalar, or a tensor with one weight for each of this worker's rows.
        """
        share = self.share(name)
        if share.dim is None:
            return 1 / self.tensor
        row = self.first_replicated_row(name)
        if row is not None:
            weights = torch.full((share.size,), 1 / kv_copies(self.config, self.tensor))
            weights[:row] = 1
            return weights
        tied = self.config.tied_embeddings and stages > 1 and name == "embed.weight"
        return 1 / 2 if tied else 1.0

    def first_replicated_row(self, name: str) -> int | None:
        """Return the first row of the keys in a fused matrix or bias with replicated keys."""
        if ".attention.qkv." not in name or kv_copies(self.config, self.tensor) == 1:
            return None
        queries = self.share(name).pieces[0]
        return int(queries.stop - queries.start)


class Norm:
    """The 2-norm over a model's parameters, or over their gradients.

    The graph is the same on all workers; per-worker values are tensors. Args: `copy_weights` of
    each parameter in the optimizer's order, and whether ZeRO-1 shards it.
    """

    def __init__(
        self,
        weights: Iterable[float | Tensor],
        mesh: Mesh,
        device: torch.device,
        *,
        sharded: bool,
    ) -> None:
        self._mesh = mesh
        self._sharded = sharded
        self._weights = [self._local(weight, device) for weight in weights]

    def _local(self, weight: float | Tensor, device: torch.device) -> float | Tensor:
        """Return the weights of this worker's shard."""
        if not isinstance(weight, Tensor):
            return weight
        shard = weight
        if self._sharded:  # ZeRO-1 pads the rows to a multiple of the workers
            rows = len(weight)
            each = -(-rows // self._mesh.data)
            padded = torch.cat([weight, weight.new_zeros(each * self._mesh.data - rows)])
            shard = torch.split(padded, each)[parallel_state.get_data_parallel_rank()]
        return shard.to(device)

    def compute(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return the norm, fp32 [] on the device (collective over all workers).

        `tensors` has one for each parameter, with ZeRO-1 this worker's shard; None counts 0.
        """
        pairs = zip(tensors, self._weights, strict=True)
        total = torch.stack([_squares(t.detach(), w) for t, w in pairs if t is not None]).sum()
        if self._mesh.tensor > 1:
            dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
        if self._mesh.pipeline > 1:
            dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
        if self._sharded and self._mesh.data > 1:
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return total.sqrt()


def _squares(tensor: Tensor, weight: float | Tensor) -> Tensor:
    squares = tensor.to(torch.float32).square()
    if isinstance(weight, Tensor) and squares.ndim > 1:
        squares = squares.flatten(1).sum(1)
    return (squares * weight).sum() if isinstance(weight, Tensor) else squares.sum() * weight


def clip_(gradients: Sequence[Tensor], norm: Tensor, limit: float) -> None:
    """Scale gradients down to a norm of `limit` if theirs is larger; 0 disables clipping."""
    if limit > 0:
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))


def sum_(parts: Sequence[Tensor], group: Callable[[], dist.ProcessGroup]) -> None:
    """Sum gradients, or views of them, over the workers of a group, in place, in one all-reduce.

    For copies of a parameter whose gradient on each worker is of that worker's heads only. `group`
    returns the group, which may exist only if there are parts.
    """
    if not parts:
        return
    message = torch.cat([tensor.flatten() for tensor in parts])
    dist.all_reduce(message, group=group())
    sizes = [tensor.numel() for tensor in parts]
    for tensor, values in zip(parts, torch.split(message, sizes), strict=True):
        tensor.copy_(values.view_as(tensor))
