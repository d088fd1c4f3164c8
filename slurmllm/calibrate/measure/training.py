"""What training costs beside its work: a model too small to compute anything, on one worker."""

from __future__ import annotations

import os
import statistics
import time

import numpy as np

from slurmllm.backends.base import MicroBatch, Worker
from slurmllm.backends.native.runtime import NativeBackend
from slurmllm.calibrate.sample import Task
from slurmllm.config.resolve import resolve
from slurmllm.model.decoder import build_model
from slurmllm.plan.mesh import make_mesh
from slurmllm.supervise.allocation import free_port

LAYERS, MICRO_BATCHES = (2, 8), 4
_STEPS = 8
_TINY = (
    "model.hidden_size=64", "model.num_heads=2", "model.ffn_hidden_size=128",
    "model.vocab_size=256", "model.seq_len=32", "train.micro_batch=1",
    f"train.global_batch={MICRO_BATCHES}", "cluster.devices_per_node=1", "parallel.zero=1",
)  # fmt: skip


def step_seconds(task: Task, layers: int, local_rank: int) -> float:
    """Median seconds of a step of so many layers and MICRO_BATCHES micro batches."""
    precision = "fp32" if task.precision == "fp32" else "bf16_mixed"
    config = resolve(
        "tiny_neox", "local",
        [*_TINY, f"model.num_layers={layers}", f"cluster.device={task.device}",
         f"train.precision={precision}", f"train.compile={str(task.compiled).lower()}"],
    )  # fmt: skip
    # A world of its own: nobody waits for another worker.
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    before = {name: os.environ[name] for name in world}
    os.environ.update(world)
    backend = NativeBackend(config, make_mesh(config, 1), Worker(0, 1, local_rank, "node"))
    backend.start()
    try:
        backend.build(lambda: build_model(config.recipe.model))
        backend.build_optimizer()
        return statistics.median(_step(backend) for _ in range(_STEPS))
    finally:
        backend.stop()
        os.environ.update(before)


def _step(backend: NativeBackend) -> float:
    tokens = np.zeros((1, backend.config.recipe.model.seq_len), dtype=np.int64)
    batches = [MicroBatch(tokens, tokens)] * MICRO_BATCHES
    begun = time.perf_counter()
    backend.forward_backward(batches, MICRO_BATCHES * tokens.size)
    backend.optimizer_step(1e-4)
    backend.param_norm()
    return time.perf_counter() - begun
