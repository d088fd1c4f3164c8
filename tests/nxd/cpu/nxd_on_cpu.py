"""What the real neuronx-distributed needs of its surroundings to train on a CPU over gloo.

Stand-ins for the closed wheels that it imports and never calls there, and replacements of torch_xla
functions that only exist for devices. NxD's own files are not touched; where one of its functions
assumes a device, it is replaced at run time and the reason stands beside it. Tested with NxD 0.17
and torch-xla 2.9.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import os
import sys
import textwrap
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock

_CLOSED = ("torch_neuronx", "neuronxcc", "libneuronxla", "nki")


def prepare() -> None:
    """Make `import neuronx_distributed` work here, and what it does."""
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    import torch_xla  # noqa: F401  before the stand-ins, or it takes this for a Neuron host

    sys.meta_path.insert(0, _Closed())
    for part in (ranks, device, rendezvous, recomputation, collectives, zero1, strides, saving):
        part()
    if os.environ.get("STANDIN_CONTROL"):
        graphs()


class _StandIn(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        result = (lambda: "trn1") if name == "get_platform_target" else MagicMock(name=name)
        setattr(self, name, result)
        return result


class _Closed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in _CLOSED or name.startswith("neuronx_distributed.trace"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def ranks() -> None:
    """Ranks as the launcher says; torch_xla asks its device."""
    import torch_xla.core.xla_env_vars as names
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    def number(name: str, default: int) -> Callable[[], int]:
        return lambda: int(os.environ.get(name) or default)

    names.HOST_WORLD_SIZE = "HOST_WORLD_SIZE"  # gone from torch_xla 2.9, asked for by NxD
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    world = int(os.environ.get("WORLD_SIZE") or 1)
    os.environ["HOST_WORLD_SIZE"] = str(max(1, world // local))
    xr.world_size = xr.global_device_count = _world_size
    xr.global_ordinal = number("RANK", 0)
    xr.local_ordinal = number("LOCAL_RANK", 0)
    xr.local_process_count = number("LOCAL_WORLD_SIZE", 1)
    xm.is_master_ordinal = lambda local=True: (
        (xr.local_ordinal() if local else xr.global_ordinal()) == 0
    )


def _world_size() -> int:
    import torch.distributed as dist

    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE") or 1)


def device() -> None:
    """The device is the CPU, where operations run at once and no step is marked."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    xm.xla_device = lambda *_, **__: torch.device("cpu")
    xm.mark_step = torch_xla.sync = lambda *_, **__: None
    xm.unlazy = lambda tensors: None
    torch_xla._XLAC._xla_sync_multi = lambda *_, **__: None


def rendezvous() -> None:
    """A barrier; torch_xla's lets one process a client pass at once."""
    import torch.distributed as dist
    import torch_xla.core.xla_model as xm

    def meet(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
        if dist.is_initialized():
            dist.barrier()
        return [payload]

    xm.rendezvous = meet


def recomputation() -> None:
    """Activation checkpointing saves the device's random state and puts barriers into graphs."""
    import torch_xla.core.xla_model as xm

    xm.get_rng_state = lambda device=None: 0
    xm.set_rng_state = lambda seed, device=None: None
    xm.optimization_barrier_ = lambda tensors: None


_groups: dict[tuple[tuple[int, ...], ...], Any] = {}


def _group(ranks: Any) -> Any:
    """The process group of this worker among lists of ranks, made by all workers together."""
    import torch.distributed as dist

    if ranks is None:
        return dist.group.WORLD
    if isinstance(ranks, dist.ProcessGroup):
        return ranks
    key = tuple(tuple(part) for part in ranks)
    if key not in _groups:
        made = [(part, dist.new_group(list(part), backend="gloo")) for part in key]
        _groups[key] = next(group for part, group in made if dist.get_rank() in part)
    return _groups[key]


def collectives() -> None:
    """torch_xla's collectives, which ZeRO-1 calls by lists of ranks."""
    import torch
    import torch.distributed as dist
    import torch_xla.core.xla_model as xm

    kinds = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

    def all_reduce(
        kind: str, inputs: Any, scale: float = 1.0, groups: Any = None, pin_layout: bool = True
    ) -> Any:
        is_single = isinstance(inputs, torch.Tensor)
        tensors = [inputs.clone()] if is_single else inputs  # lists are reduced in place
        for tensor in tensors:
            dist.all_reduce(tensor, kinds[kind], group=_group(groups))
            tensor.mul_(scale)
        return tensors[0] if is_single else tensors

    def each(function: Callable[[Any], Any], value: Any, output: Any) -> Any:
        result = [function(v) for v in value] if isinstance(value, list) else function(value)
        if output is None:
            return result
        pairs = zip(output, result, strict=True) if isinstance(output, list) else [(output, result)]
        for target, values in pairs:
            target.copy_(values)
        return output

    def all_gather(
        value: Any, dim: int = 0, groups: Any = None, output: Any = None, **_: Any
    ) -> Any:
        group = _group(groups)

        def gather(tensor: torch.Tensor) -> torch.Tensor:
            parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, tensor.contiguous(), group=group)
            return torch.cat(parts, dim)

        return each(gather, value, output)

    def reduce_scatter(
        kind: str,
        input: Any,
        scale: float,
        scatter_dim: int,
        shard_count: int,
        groups: Any = None,
        output: Any = None,
        **_: Any,
    ) -> Any:
        group = _group(groups)

        def scatter(tensor: torch.Tensor) -> torch.Tensor:
            summed = tensor.clone().contiguous()
            dist.all_reduce(summed, kinds[kind], group=group)
            part = summed.chunk(dist.get_world_size(group), scatter_dim)[dist.get_rank(group)]
            return part.contiguous() * scale

        return each(scatter, input, output)

    xm.all_reduce, xm.all_gather, xm.reduce_scatter = all_reduce, all_gather, reduce_scatter
    xm.all_gather_bucketized = lambda input_list, dim=0, groups=None, output=None, **_: all_gather(
        input_list, dim, groups, output
    )
    xm.reduce_scatter_bucketized = (
        lambda kind, input_list, scale=1.0, scatter_dim=0, shard_count=1, groups=None, output=None, **_: (  # noqa: E501
            reduce_scatter(kind, input_list, scale, scatter_dim, shard_count, groups, output)
        )
    )


def zero1() -> None:
    """ZeRO-1 insists on an XLA device, and copies to the host and back to make a shard its own."""
    from neuronx_distributed.parallel_layers import grads
    from torch_xla.distributed import zero_redundancy_optimizer as zero

    source = textwrap.dedent(inspect.getsource(zero.ZeroRedundancyOptimizer._shard_parameters))
    changed = source.replace("assert self.device.type == 'xla'", "pass").replace(
        "shard = nn.Parameter(shard_data,", "shard = nn.Parameter(shard_data.clone(),"
    )
    assert changed.count("clone()") == 1
    assert "assert self.device.type" not in changed
    scope = dict(vars(zero))
    exec(compile(changed, "<ZeroRedundancyOptimizer on a CPU>", "exec"), scope)
    zero.ZeroRedundancyOptimizer._shard_parameters = scope["_shard_parameters"]
    reduce = grads.all_reduce  # hands torch.distributed a list of ranks in CPU mode
    grads.all_reduce = lambda kind, bucket, groups, pin_layout=True: reduce(
        kind, bucket, _group(groups), pin_layout
    )


def strides() -> None:
    """XLA tensors have no strides; a CPU's must be contiguous for .view() and for sending."""
    import torch
    from neuronx_distributed.parallel_layers import layers
    from neuronx_distributed.pipeline import model as pipeline

    def flat(value: Any) -> Any:
        return value.contiguous() if isinstance(value, torch.Tensor) else value

    inputs = layers._linear_autograd_base_setup_bwd
    layers._linear_autograd_base_setup_bwd = lambda *args, **more: tuple(
        flat(value) for value in inputs(*args, **more)
    )
    backward = layers.LinearWithAsyncCommunication.backward
    layers.LinearWithAsyncCommunication.backward = staticmethod(
        lambda ctx, *grads: backward(ctx, *(flat(grad) for grad in grads))
    )
    send = pipeline.send
    pipeline.send = lambda tensor, *args, **more: send(tensor.contiguous(), *args, **more)


def saving() -> None:
    """An asynchronous save copies tensors off the device: on a CPU that copy must be made."""
    import torch
    from neuronx_distributed.trainer.checkpoint import CheckpointIOState
    from torch.utils._pytree import tree_map

    add = CheckpointIOState.add_save_task

    def copied(self: Any, obj: Any, filename: str) -> Any:
        if self._async_save:
            obj = tree_map(lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t, obj)
        return add(self, obj, filename)

    CheckpointIOState.add_save_task = copied


def graphs() -> None:
    """Where a step would be marked, its graph is asked for, of the stand-in for the runtime."""
    import neuronx_distributed.utils as utils
    import torch_xla.debug.metrics as metrics

    sys.path.append(str(Path(__file__).resolve().parent.parent / "standins"))
    import fake_runtime

    def mark_step() -> None:
        fake_runtime.load_graph(sys._getframe(1).f_code.co_name)

    def metric_data(name: str) -> tuple[int, float, list[Any]]:
        return (fake_runtime.counts["hits"] + fake_runtime.counts["compiled"], 0.0, [])

    utils.mark_step, metrics.metric_data = mark_step, metric_data
