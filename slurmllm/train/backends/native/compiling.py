"""torch.compile for the blocks of the model.

One compiled function serves all blocks: weights are inputs of the graph, so equal blocks share it.
It is compiled inside FSDP's hooks, which gather whole weights before it runs; the graph therefore
does not depend on the number of workers, and one node's precompilation serves any number.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import sys
import types
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from slurmllm.train.backends.native.device import Device
from slurmllm.train.backends.native.environment import CPUINFO, cpu_fields, processor
from slurmllm.train.model.decoder import Block
from slurmllm.train.model.output import Output

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName
else:
    GroupName = str  # exists for type checkers only; torch 2.9 does not have it

Forward = Callable[..., Any]


def missing_compiler() -> str | None:
    """Return a fault if torch.compile finds no C++ compiler, which a full cache needs too."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is not None:
        return None
    return (
        f"train.compile: true, but there is no C++ compiler {compiler!r} on this node; install "
        "one, name one in $CXX, or --set train.compile=false"
    )


def slow_bf16(cpuinfo: Path = CPUINFO) -> bool:
    """Return whether this processor multiplies bf16 matrices more slowly than fp32 ones.

    Intel's without matrix units (AMX) take twice as long. AMX and AMD's avx512_bf16 are assumed to
    be faster. Decided by flags, because all attempts of a run must decide alike.
    """
    fields = cpu_fields(cpuinfo)
    if platform.machine() != "x86_64" or not fields:
        return False
    flags = fields.get("flags", [])
    amd_bf16 = "avx512_bf16" in flags and fields.get("vendor_id") == ["AuthenticAMD"]
    return not ("amx_bf16" in flags or amd_bf16)


def tag_cache_keys() -> None:
    """Add this machine's processor to the keys of Inductor's cache, which lack it."""
    config: Any = torch.compiler.config
    made_for = "; ".join(processor("cpu", os.environ).values())
    config.cache_key_tag = f"{os.environ.get('TORCH_COMPILE_CACHE_KEY_TAG', '')} {made_for}"


def wrap_blocks(
    blocks: Sequence[Block], device: Device, *, compiled: bool, recompute: Collection[str]
) -> None:
    """Compile the forward function of equal blocks, this worker's decoder layers.

    Backward recomputes what `TrainConfig.recomputed` names. Only `forward` is replaced: modules
    keep their names, and hooks stay outside.
    """
    for block in blocks:
        parts: dict[str, list[nn.Module]] = {
            "core": [block.attention.core],
            "mlp": [block.mlp],
            "norm": [m for m in block.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm)],
        }
        for module in [module for name in parts if name in recompute for module in parts[name]]:
            # A method, which torch.compile guards by its function: equal blocks share a graph.
            module.forward = types.MethodType(_recomputed, module)
    forward: Forward = type(blocks[0]).forward
    if compiled:
        # Imports Inductor: 0.7 s.
        from slurmllm.train.backends.native.graph_passes import GraphPass, Partitioner

        options: dict[str, Any] = {"post_grad_custom_post_pass": GraphPass(wide=slow_bf16())}
        if any(isinstance(p, DTensor) for p in blocks[0].parameters()) and "core" in recompute:
            options["custom_partitioner_fn"] = Partitioner()
        forward = device.compile(forward, **options)
    for block in blocks:
        bound: Forward = functools.partial(forward, block)
        block.forward = (  # type: ignore[method-assign]
            functools.partial(_checkpointed, bound) if "block" in recompute else bound
        )


def wrap_output(output: Output, device: Device, *, shared: bool) -> None:
    """Compile the passes over the logits, and choose how the head's products are computed.

    `shared`: the vocabulary is sharded, and workers exchange sums between the passes.
    """
    output.wide = slow_bf16()
    output.one_pass = device.asynchronous
    if device.asynchronous and not shared:
        output.softmax_gradient_ = device.compile(output.softmax_gradient_)
    else:
        output.statistics = device.compile(output.statistics)
        output.softmax_ = device.compile(output.softmax_)


def _recomputed(module: nn.Module, *inputs: Any) -> Any:
    return _checkpointed(functools.partial(type(module).forward, module), *inputs)


def _checkpointed(forward: Forward, *inputs: Any) -> Any:
    # The blocks have no dropout, so there is no random state to restore.
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)


def cache_counts() -> tuple[int, int]:
    if "torch._dynamo" not in sys.modules:
        return (0, 0)
    counters: Any = torch._dynamo.utils.counters
    inductor = counters["inductor"]
    return inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"]


class _PortableMesh(DeviceMesh):
    """A mesh that pickles as its axes and sizes, for cache keys; it cannot be unpickled."""

    def __getstate__(self) -> dict[str, Any]:
        return {"axes": self.mesh_dim_names, "sizes": tuple(self.shape)}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def make_portable(mesh: DeviceMesh, name: str) -> None:
    """Make graphs that are compiled with a mesh equal on all workers, at any world size.

    `mesh` is one-dimensional and changed in place; `name` names this worker's group in graphs.
    """
    if not hasattr(mesh, "_get_root_mesh"):
        return  # torch 2.9 keeps groups elsewhere: there each worker compiles such graphs itself
    group = mesh.get_group()
    _unregister_process_group(GroupName(name))
    _register_process_group(GroupName(name), group)
    mesh._get_root_mesh()._pg_registry[name] = group
    mesh._dim_group_names = [GroupName(name)]
    mesh.__class__ = _PortableMesh
