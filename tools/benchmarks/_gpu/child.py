"""One process of `gpu.py`: `python -m _gpu.child train TRAINER TASK` or `… describe DEVICE`.

A process each, so that one that fails takes nothing with it and all find the memory free. The last
line of the output is the result, JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from _gpu.task import Measured, Task

_WARM_UP = 3  # steps after the first one, before the timed ones


def train(trainer: str, task: Task) -> Measured:
    """Train and measure; returns `missing`, a reason, if this trainer cannot run here.

    `first_step_s` includes compilation, `step_s` is the mean of the timed steps, `loss` of the last
    one. `peak_bytes` and `reserved_bytes` are the most that tensors needed and torch's allocator
    held in the timed steps; on a CPU, the process's memory.
    """
    from _gpu.trainers import TRAINERS, Ours

    on_gpu = task.device == "cuda"
    torch.manual_seed(0)
    try:
        step = TRAINERS[trainer](task)
    except ImportError as error:
        return {"missing": str(error)}
    batches = _batches(task)
    began = time.perf_counter()
    float(step(*next(batches)))
    first_step_s = time.perf_counter() - began
    for _ in range(_WARM_UP):
        step(*next(batches))
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(task.steps):
        loss = step(*next(batches))
    value = float(loss)
    if on_gpu:
        torch.cuda.synchronize()
    step_s = (time.perf_counter() - began) / task.steps
    process_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # getrusage(2): KiB
    return {
        "first_step_s": first_step_s,
        "step_s": step_s,
        "loss": value,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else process_bytes,
        "reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else process_bytes,
        "save": step.save(lambda: step(*next(batches))) if isinstance(step, Ours) else None,
    }


def _batches(task: Task) -> Iterator[tuple[Any, ...]]:
    """Random tokens and labels, [batch, seq] each: speed does not depend on them.

    With a document mask also positions, of four documents of equal length in a sequence.
    """
    recipe = task.config().recipe
    random = np.random.default_rng(0)
    shape = (recipe.train.global_batch, recipe.model.seq_len + 1)
    rows = [random.integers(0, recipe.model.vocab_size, shape) for _ in range(4)]
    positions: tuple[Any, ...] = ()
    if recipe.data.mask == "document":
        of_sequence = np.arange(recipe.model.seq_len) % (recipe.model.seq_len // 4)
        positions = (np.tile(of_sequence, (recipe.train.global_batch, 1)),)
    while True:
        for row in rows:
            yield row[:, :-1].copy(), row[:, 1:].copy(), *positions


def describe(device: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"torch": torch.__version__, "attention": attention_kernels(device)}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {"name": properties.name, "memory_bytes": properties.total_memory}
    else:
        facts |= {"name": "CPU", "memory_bytes": None}
    return facts


def attention_kernels(device: str) -> dict[str, list[str]]:
    """Return which of torch's fused kernels accept the model's attention, by case, in bf16."""
    cuda = torch.backends.cuda
    accept = {
        "flash": cuda.can_use_flash_attention,
        "memory-efficient": cuda.can_use_efficient_attention,
        "cuDNN": cuda.can_use_cudnn_attention,
    }
    cases = {
        "causal": (32, None),
        "causal, grouped queries": (8, None),
        "document mask": (32, True),
        "document mask, grouped queries (not used: keys are repeated)": (8, True),
    }
    kernels_of = {}
    for name, (kv_heads, masked) in cases.items():
        query, key = (
            torch.zeros(1, heads, 256, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
            for heads in (32, kv_heads)
        )
        mask = query.new_zeros(1, 1, 256, 256).detach() if masked else None
        params = cuda.SDPAParams(query, key, key, mask, 0.0, mask is None, kv_heads < 32)
        kernels_of[name] = [kernel for kernel, accepts in accept.items() if accepts(params)]
    return kernels_of


def main() -> None:
    verb, *rest = sys.argv[1:]
    result = describe(*rest) if verb == "describe" else train(rest[0], Task(**json.loads(rest[1])))
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
