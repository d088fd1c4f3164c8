"""torch.compile for the blocks of the model, and what its cache did.

One compiled function serves all blocks: weights are inputs of the graph, so equal blocks share it.
It is compiled inside FSDP's hooks, which gather whole weights before it runs; the graph therefore
does not depend on the number of workers, and one node's precompilation serves any number.
"""

from __future__ import annotations

import functools
import operator
import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor, fx, nn
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from slurmllm.model.decoder import Block
from slurmllm.model.output import Output

Forward = Callable[..., Tensor]
Recompute = Literal["none", "selective", "full"]


def missing_compiler() -> list[str]:
    """What torch.compile lacks on this machine, as a line for a ConfigError.

    Also with a full cache: Inductor asks the compiler for its version before it looks there.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is not None:
        return []
    return [
        f"train.compile: true, but there is no C++ compiler {compiler!r} on this node; install "
        "one, name one in $CXX, or --set train.compile=false"
    ]


def wrap_blocks(blocks: Sequence[Block], *, compiled: bool, recompute: Recompute) -> None:
    """Compile the forward function of equal blocks, and make backward compute it again if asked.

    Only `forward` is replaced: modules keep their names, and hooks stay outside.

    Args:
        blocks: All decoder layers of this worker.
        compiled: Whether to compile.
        recompute: What backward computes again: none, selective (attention's core), full.
    """
    if recompute == "selective":
        for block in blocks:
            core = block.attention.core
            _replace_forward(core, functools.partial(_recomputed, core.forward))
    forward: Forward = type(blocks[0]).forward
    if compiled:
        # Here and not above: Inductor takes 0.7 s to import.

        changes: Any = GraphPass(wide=slow_bf16())
        options = {"post_grad_custom_post_pass": changes}
        forward = torch.compile(forward, fullgraph=True, dynamic=False, options=options)
    for block in blocks:
        bound = functools.partial(forward, block)
        _replace_forward(
            block, functools.partial(_recomputed, bound) if recompute == "full" else bound
        )


def _replace_forward(module: nn.Module, forward: Forward) -> None:
    module.forward = forward


def wrap_output(output: Output) -> None:
    """Compile the passes over the logits, and choose how the head's products are computed."""

    output.wide = slow_bf16()
    output.statistics = torch.compile(output.statistics, fullgraph=True, dynamic=False)
    output.softmax_ = torch.compile(output.softmax_, fullgraph=True, dynamic=False)


def _recomputed(forward: Forward, *inputs: Tensor | None) -> Tensor:
    # No dropout in the blocks, so no random state to restore.
    out: Tensor = checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)
    return out


def cache_counts() -> tuple[int, int]:
    """Graphs found in inductor's cache and graphs that had to be compiled, so far."""
    if "torch._dynamo" not in sys.modules:
        return (0, 0)
    counters: Any = torch._dynamo.utils.counters
    inductor = counters["inductor"]
    return inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"]


if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName
else:
    GroupName = str  # what it is to type checkers alone; torch 2.9 has not got it


class _AlikeMesh(DeviceMesh):
    """A mesh of which only axes and sizes are pickled: for cache keys, and not to be read back."""

    def __getstate__(self) -> dict[str, Any]:
        return {"axes": self.mesh_dim_names, "sizes": tuple(self.shape)}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def alike_everywhere(mesh: DeviceMesh, name: str) -> None:
    """Let graphs that are compiled with a mesh be equal on all workers, at any world size.

    Args:
        mesh: One-dimensional, a slice of its own; changed in place. Its group is the same one.
        name: What graphs call the group: on each worker the one that this worker is in.
    """
    if not hasattr(mesh, "_get_root_mesh"):
        return  # torch 2.9 keeps groups elsewhere: there, tensor-parallel graphs are compiled anew
    group = mesh.get_group()
    _unregister_process_group(GroupName(name))
    _register_process_group(GroupName(name), group)
    mesh._get_root_mesh()._pg_registry[name] = group
    mesh._dim_group_names = [GroupName(name)]
    mesh.__class__ = _AlikeMesh


_aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default
_PRODUCTS = (_aten.mm.default, _aten.addmm.default)
_VIEWS = (_aten.permute.default, _aten.transpose.int, _aten.view.default)
_ATTENTION = (
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


def slow_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine's processor multiplies bf16 matrices more slowly than fp32 ones.

    So it is on Intel's without matrix units (AMX): 2048³ on two cores of such a Xeon reach
    210 GFLOP/s in fp32 and 110 in bf16; and where bf16 is emulated. AMX and AMD's avx512_bf16 are
    taken to be faster, not measured. By what the processor is, not by a measurement: all attempts
    of a run must decide alike.
    """
    if platform.machine() != "x86_64" or not cpuinfo.is_file():
        return False
    lines = (line.partition(":") for line in cpuinfo.read_text().splitlines())
    told = {key.strip(): value.split() for key, _, value in lines}
    flags = told.get("flags", [])
    by_pairs = "avx512_bf16" in flags and told.get("vendor_id") == ["AuthenticAMD"]
    return not ("amx_bf16" in flags or by_pairs)


class GraphPass(CustomGraphPass):
    """All changes, in order.

    Args:
        wide: Whether products of bf16 matrices are computed by fp32 units: the same numbers are
            multiplied, sums are kept in fp32 and rounded once.
    """

    def __init__(self, *, wide: bool) -> None:
        self.wide = wide

    def __call__(self, graph: fx.Graph) -> None:
        """Change the graph in place."""
        merge_equal_sums(graph)
        if self.wide:
            widen_products(graph)

    def uuid(self) -> str:
        """Part of the compiled graphs' cache key; to be changed with the passes."""
        return f"slurmllm passes 2, wide {self.wide}"


def merge_equal_sums(graph: fx.Graph) -> None:
    """Compute a sum that a graph holds twice only once.

    CAUTION: Inductor's C++ for two equal sums in bf16 does not compile (torch 2.13, store_reduction
    declares a variable twice). A block with parallel residual has them: the gradients of the biases
    of attention.out and mlp.down.
    """
    first: dict[Any, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=_aten.sum.dim_IntList):
        earlier = first.setdefault((node.args[0], repr(node.args), repr(node.kwargs)), node)
        if earlier is node:
            continue
        # A copy, not the same tensor: gradients are changed in place later.
        with graph.inserting_before(node):
            copy = graph.call_function(_aten.clone.default, (earlier,))
        copy.meta.update(node.meta)
        node.replace_all_uses_with(copy)
        graph.erase_node(node)


def widen_products(graph: fx.Graph) -> None:
    """Convert the factors of the CPU's bf16 products and attention to fp32, results back.

    Inductor makes the conversions part of the kernels before and after.
    """
    wide: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (*_PRODUCTS, *_ATTENTION):
            continue
        if not any(_is_bf16(argument) for argument in node.args):
            continue
        with graph.inserting_before(node):
            args = [_widened(graph, argument, wide) for argument in node.args]
            if node.target is _aten.addmm.default:
                # The bias apart, so that the kernel which reads the product adds it.
                product = graph.call_function(_aten.mm.default, tuple(args[1:]))
                result = graph.call_function(_aten.add.Tensor, (product, args[0]))
            else:
                # Attention's mask, already a number to be added, is a keyword.
                more = {name: _widened(graph, value, wide) for name, value in node.kwargs.items()}
                result = graph.call_function(node.target, tuple(args), more)
        # Attention has several results, each taken out by a node of its own.
        parts = [(node, result)]
        if node.target in _ATTENTION:
            with graph.inserting_before(node):
                parts = [
                    (user, graph.call_function(operator.getitem, (result, user.args[1])))
                    for user in node.users
                ]
        for old, new in parts:
            if _is_bf16(old):
                with graph.inserting_before(node):
                    new = graph.call_function(_CONVERT, (new, torch.bfloat16))
            old.replace_all_uses_with(new)
            if old is not node:
                graph.erase_node(old)
        graph.erase_node(node)


def _is_bf16(argument: Any) -> bool:
    if not isinstance(argument, fx.Node):
        return False
    value = argument.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 and value.is_cpu


def _widened(graph: fx.Graph, argument: Any, wide: dict[fx.Node, fx.Node]) -> Any:
    """The argument in fp32; converted once for all who read it, before it is transposed."""
    if not _is_bf16(argument):
        return argument
    if argument not in wide:
        if argument.target in _VIEWS:
            inner = _widened(graph, argument.args[0], wide)
            wide[argument] = graph.call_function(argument.target, (inner, *argument.args[1:]))
        else:
            wide[argument] = graph.call_function(_CONVERT, (argument, torch.float32))
    return wide[argument]
