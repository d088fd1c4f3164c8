"""Changes of a compiled graph before Inductor generates kernels from it.

Imported only for compilation: Inductor takes 0.7 s to import.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn

_aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default
_PRODUCTS = (_aten.mm.default, _aten.addmm.default)
_VIEWS = (_aten.permute.default, _aten.transpose.int, _aten.view.default)
_ATTENTION = (
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


class GraphPass(CustomGraphPass):
    """All changes, in order; if `wide`, products of bf16 matrices are computed in fp32 units.

    The same numbers are multiplied then, sums are accumulated in fp32 and rounded once.
    """

    def __init__(self, *, wide: bool) -> None:
        self.wide = wide

    def __call__(self, graph: fx.Graph) -> None:
        merge_equal_sums(graph)
        if self.wide:
            widen_products(graph)

    def uuid(self) -> str:
        """Return this pass's part of the cache key; change it with the passes."""
        return f"slurmllm passes 2, wide {self.wide}"


class Partitioner(CustomPartitionerFn):
    """The default partitioner, for blocks without random numbers.

    CAUTION: torch 2.13 saves a random state for each recomputed operator that is tagged as random,
    as fused attention is even without dropout, and puts it after the DeviceMesh that a
    tensor-parallel block saves, which is then taken for a tensor (`functionalize_rng_ops`).
    """

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        operators: dict[Any, Any] = {}  # by the untagged function in the operator's place
        for node in gm.graph.nodes:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                untagged = _untagged(node.target)
                operators[untagged] = node.target
                node.target = untagged
        halves = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        for half in halves:
            for node in half.graph.nodes:
                node.target = operators.get(node.target, node.target)
            half.recompile()
        return halves

    def uuid(self) -> str:
        return "slurmllm partitioner 1"


def _untagged(operator: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return operator(*args, **kwargs)

    return call


def merge_equal_sums(graph: fx.Graph) -> None:
    """Compute equal sums of a graph once.

    CAUTION: Inductor's C++ for two equal sums in bf16 does not compile (torch 2.13, store_reduction
    declares a variable twice). A block with parallel residual has such sums: the gradients of the
    biases of attention.out and mlp.down.
    """
    first: dict[Any, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=_aten.sum.dim_IntList):
        earlier = first.setdefault((node.args[0], repr(node.args), repr(node.kwargs)), node)
        if earlier is node:
            continue
        # A copy, not the same tensor: gradients are modified in place later.
        with graph.inserting_before(node):
            copy = graph.call_function(_aten.clone.default, (earlier,))
        copy.meta.update(node.meta)
        node.replace_all_uses_with(copy)
        graph.erase_node(node)


def widen_products(graph: fx.Graph) -> None:
    """Convert the inputs of bf16 products and attention on CPUs to fp32, and the results back.

    Inductor fuses the conversions into the kernels before and after.
    """
    wide: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (*_PRODUCTS, *_ATTENTION):
            continue
        if not any(_is_bf16(argument) for argument in node.args):
            continue
        with graph.inserting_before(node):
            args = [_widen(graph, argument, wide) for argument in node.args]
            if node.target is _aten.addmm.default:
                # Without the bias, which the kernel that reads the product adds.
                product = graph.call_function(_aten.mm.default, tuple(args[1:]))
                result = graph.call_function(_aten.add.Tensor, (product, args[0]))
            else:
                # The mask of attention, an additive one, is a keyword argument.
                more = {name: _widen(graph, value, wide) for name, value in node.kwargs.items()}
                result = graph.call_function(node.target, tuple(args), more)
        # Attention has several results, each read by a getitem node.
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


def _widen(graph: fx.Graph, argument: Any, wide: dict[fx.Node, fx.Node]) -> Any:
    """Return the argument in fp32, converted once for all readers, before any transposition."""
    if not _is_bf16(argument):
        return argument
    if argument not in wide:
        if argument.target in _VIEWS:
            inner = _widen(graph, argument.args[0], wide)
            wide[argument] = graph.call_function(argument.target, (inner, *argument.args[1:]))
        else:
            wide[argument] = graph.call_function(_CONVERT, (argument, torch.float32))
    return wide[argument]
