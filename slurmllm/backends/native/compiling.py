"""torch.compile for the blocks of the model, and what its cache did.

One compiled function serves all blocks: weights are inputs of the graph, so equal blocks share it.
It is compiled inside FSDP's hooks, which gather whole weights before it runs; the graph therefore
does not depend on the number of workers, and one node's precompilation serves any number.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Forward = Callable[..., Tensor]


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


def wrap_blocks(blocks: Sequence[nn.Module], *, compiled: bool, recompute: bool) -> None:
    """Compile the forward function of equal blocks, and make backward compute it again if asked.

    Only `forward` is replaced: modules keep their names, and hooks stay outside.
    """
    forward: Forward = type(blocks[0]).forward
    if compiled:
        forward = torch.compile(forward, fullgraph=True, dynamic=False)
    for block in blocks:
        bound = functools.partial(forward, block)
        block.forward = functools.partial(_recomputed, bound) if recompute else bound


def _recomputed(forward: Forward, *inputs: Tensor) -> Tensor:
    # No dropout in the blocks, so no random state to restore.
    out: Tensor = checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)
    return out


def cache_counts() -> tuple[int, int]:
    """Graphs found in inductor's cache and graphs that had to be compiled, so far."""
    counters: Any = torch._dynamo.utils.counters
    inductor = counters["inductor"]
    return inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"]
