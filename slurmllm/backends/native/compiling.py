"""torch.compile for the blocks of the model, and what its cache did.

One compiled function serves all blocks: weights are inputs of the graph, so equal blocks share it.
It is compiled inside FSDP's hooks, which gather whole weights before it runs; the graph therefore
does not depend on the number of workers, and one node's precompilation serves any number.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
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
        from slurmllm.backends.native.graph_passes import GraphPass, slow_bf16

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
    from slurmllm.backends.native.graph_passes import slow_bf16

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
