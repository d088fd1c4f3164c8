"""The trainers: slurmllm's native backend, a plain loop over transformers' models, torchtitan's.

Each is a function task → step; a step takes tokens and labels, int64 [batch, seq], and returns its
loss, which may still be computing.

A plain loop reads no number in the timed steps; ours reads the loss and both norms of every step,
one step late, as the training loop does.
"""

from __future__ import annotations

import importlib
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat
from unittest.mock import patch

import torch
from contestants.ours import start_backend
from torch import Tensor
from torch.nn import functional as F
from transformers_loop import Tokens, make_step, step_of

from _gpu.kernels import profiled
from _gpu.task import HEAD_CHUNKS, LR, Measured, Task
from slurmllm.train.backends.base import MicroBatch
from slurmllm.train.backends.native.runtime import NativeBackend

Step = Callable[..., SupportsFloat]


def timed(step: Callable[[], SupportsFloat], steps: int, device: str) -> Measured:
    """Time some steps; returns fields of `child.train`."""
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(steps):
        loss = step()
    value = float(loss)
    if on_gpu:
        torch.cuda.synchronize()
    step_s = (time.perf_counter() - began) / steps
    process_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # getrusage(2): KiB
    return {
        "step_s": step_s,
        "loss": value,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else process_bytes,
        "reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else process_bytes,
    }


class Ours:
    """The native backend, called as the training loop calls it."""

    def __init__(self, task: Task) -> None:
        self.backend: Any = start_backend(task.config())
        self.unread: list[Sequence[SupportsFloat]] = []

    def __call__(self, tokens: Tokens, labels: Tokens) -> SupportsFloat:
        parts = [MicroBatch(tokens, labels)]
        loss: SupportsFloat = self.backend.forward_backward(parts, labels.size)
        self.unread.append((loss, self.backend.optimizer_step(LR), self.backend.param_norm()))
        if len(self.unread) > 1:
            for number in self.unread.pop(0):
                float(number)
        return loss

    def head(self, step: Callable[[], SupportsFloat]) -> dict[str, Measured]:
        """Time sizes of the head's chunks in turn, the better of two rounds: clocks drift."""
        output, device = self.backend.chunks[-1].output, self.backend.device.type
        results: dict[str, Measured] = {}
        for power in HEAD_CHUNKS[device] * 2:
            output.logits_at_a_time = 2**power
            step()  # compiles
            result, name = timed(step, 5, device), f"2**{power}"
            if name not in results or result["step_s"] < results[name]["step_s"]:
                results[name] = result
        output.logits_at_a_time = self.backend.worker_device.logits_at_a_time
        return results

    def profile(self, step: Callable[[], SupportsFloat]) -> Measured:
        return profiled(step, self.backend)


def make_ours_of_torch(task: Task) -> Step:
    """Ours with torch's fused AdamW in place of the one-pass update."""
    with patch.object(NativeBackend, "_has_mixed_adamw", return_value=False):
        return Ours(task)


def make_torchtitan(task: Task) -> Step:
    """torchtitan 0.2's Llama, its blocks compiled one by one as torchtitan does, and its loss.

    On one GPU torchtitan computes under autocast too, as there is nothing to shard.
    """
    args = importlib.import_module("torchtitan.models.llama3.model.args")
    llama = importlib.import_module("torchtitan.models.llama3.model.model")
    config = task.config()
    model = config.recipe.model
    arguments = args.TransformerModelArgs(
        dim=model.hidden_size,
        n_layers=model.num_layers,
        n_heads=model.num_heads,
        n_kv_heads=model.kv_heads,
        vocab_size=model.padded_vocab_size,
        multiple_of=256,  # 8/3 of the width, rounded up to it: both models have such layers
        norm_eps=model.norm_eps,
        rope_theta=model.rotary_base,
        max_seq_len=model.seq_len,
    )
    compiler = "inductor" if task.compiled else "eager"
    with torch.device(task.device):
        transformer: Any = llama.Transformer(arguments)
        with torch.no_grad():
            transformer.init_weights()
    for block in transformer.layers.values():
        assert block.feed_forward.w1.out_features == model.ffn_hidden_size
        block.compile(fullgraph=True, backend=compiler)

    @torch.compile(backend=compiler)
    def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(transformer(tokens), labels)

    return step_of(config, task.device, transformer.train(), loss_of)


TRAINERS: dict[str, Callable[[Task], Step]] = {
    "ours": Ours,
    "torch_adamw": make_ours_of_torch,
    "loop": lambda task: make_step(task.config(), task.device),
    "torchtitan": make_torchtitan,
}
