"""One worker of a measurement: `python -m slurmllm.calibrate.worker TASK`.

`slurmllm.calibrate.node` sets torchrun's variables.
"""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from slurmllm.backends.base import MicroBatch, Worker
from slurmllm.backends.native.runtime import NativeBackend
from slurmllm.backends.process_group import init_process_group
from slurmllm.calibrate import measuring
from slurmllm.calibrate.measuring import Item, Scale, measure, scale_of
from slurmllm.calibrate.node import Sample, Task, product_grid
from slurmllm.config.resolve import resolve
from slurmllm.model.decoder import build_model
from slurmllm.plan.mesh import make_mesh
from slurmllm.run.host_memory import host_memory

# Of a collective, instead of torch's 10 (NCCL) or 30 minutes (Gloo).
_LIMIT = timedelta(seconds=120)
LAYERS, MICRO_BATCHES = (2, 8), 4
# The median ignores the first steps, which allocate and compile.
_STEPS = 8
_MODEL = ("hidden_size=64", "num_heads=2", "ffn_hidden_size=128", "vocab_size=256", "seq_len=32")
_TINY = (
    *(f"model.{setting}" for setting in _MODEL),
    "train.micro_batch=1",
    f"train.global_batch={MICRO_BATCHES}",
    "cluster.devices_per_node=1",
    "parallel.zero=1",
)


def main(text: str) -> None:
    """Run all measurements; rank 0 writes the results."""
    task = Task.model_validate_json(text)
    local_rank, rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
    first = rank == 0
    device = torch.device(task.device)
    if device.type == "cuda":
        if fault := _missing_gpu(task, local_rank):
            sys.exit(fault)  # the last line of its output is the reason of the failure
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    tiny = {}
    if not task.products_only:
        _progress("a tiny model, for the overhead of steps and libraries", first)
        # First, as each worker's backend starts a process group of its own.
        tiny = {layers: step_seconds(task, layers, local_rank) for layers in LAYERS}
    backend = "nccl" if device.type == "cuda" else "gloo"
    init_process_group(backend, rank, task.nodes * task.workers, _LIMIT)
    _write_mean(Sample(kind="reserved", value=_reserved(device)))
    # Bytes of the device, or a worker's share of the host's memory.
    on_gpu = device.type == "cuda"
    memory = torch.cuda.mem_get_info(device)[1] if on_gpu else host_memory(task.sharing).limit_bytes
    _write_mean(Sample(kind="memory", value=memory))
    for layers, seconds in tiny.items():
        _write_mean(Sample(kind="step", sizes=(layers, MICRO_BATCHES), value=seconds))
    scale = scale_of(task)
    for name, items in _measurements(task, scale, device).items():
        _progress(name, first)
        measure(list(items()), device, scale.budget_s, scale.rounds)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


def _missing_gpu(task: Task, local_rank: int) -> str | None:
    """Return why this worker has no GPU, with the fix; None if it has one."""
    count, host = torch.cuda.device_count(), socket.gethostname()
    if count > local_rank:
        return None
    if torch.version.cuda is None:
        return (
            f"cluster.device: cuda: PyTorch {torch.__version__} on {host} is built without CUDA; "
            "install a build for CUDA, or calibrate a profile of CPUs, such as --cluster local"
        )
    if count == 0:
        return (
            f"cluster.device: cuda: PyTorch {torch.__version__} finds no GPU on {host}; calibrate "
            "on a node that has some (without --local, in a job), and see `nvidia-smi` there"
        )
    return (
        f"cluster.devices_per_node: {task.workers}: {host} has {count} GPU{'s' * (count > 1)}; "
        f"--set cluster.devices_per_node={count}"
    )


def _measurements(
    task: Task, scale: Scale, device: torch.device
) -> dict[str, Callable[[], Iterable[Item]]]:
    """Return name → measurements, created lazily: their tensors would not fit all at once."""
    model, precision, batch = scale.model, task.precision, scale.batch
    widths = scale.widths
    feed_forward = [(tokens, 4 * width, width) for tokens in scale.tokens for width in widths]
    head = (scale.tokens[0], model.padded_vocab_size, widths[len(widths) // 2])
    measurements: dict[str, Callable[[], Iterable[Item]]] = {
        "matrix products": lambda: measuring.products(device, [*feed_forward, head]),
        "attention": lambda: [measuring.attention(model, precision, device, batch)],
        "memory": lambda: [measuring.copy(device, scale.copied_bytes)],
        "elementwise work": lambda: measuring.elementwise(
            model, precision, device, batch, task.compiled
        ),
    }
    if task.products_only:
        grid = product_grid(scale.tokens, widths)
        return {"matrix products": lambda: measuring.products(device, grid)}
    if task.nodes * task.workers > 1:
        measurements["collectives"] = lambda: measuring.collectives(
            task.nodes, task.workers, device, scale.collective_bytes
        )
    return measurements


def _reserved(device: torch.device) -> int:
    """Return bytes of the device that are in use without a model."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return total - free - torch.cuda.memory_reserved(device)
    with suppress(OSError):
        # glibc keeps freed memory resident until it is trimmed.
        ctypes.CDLL(None).malloc_trim(0)
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]  # proc(5): resident
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _write_mean(sample: Sample) -> None:
    values = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, sample.value)
    if dist.get_rank() == 0:
        sample.model_copy(update={"value": statistics.fmean(values)}).write()


def _progress(text: str, first: bool) -> None:
    if first:
        Sample(kind="progress", of=text).write()


def step_seconds(task: Task, layers: int, local_rank: int) -> float:
    """Return the median duration of a step of `layers` layers, s."""
    precision = "fp32" if task.precision == "fp32" else "bf16_mixed"
    settings = [*_TINY, f"model.num_layers={layers}", f"cluster.device={task.device}"]
    settings += [f"train.precision={precision}", f"train.compile={str(task.compiled).lower()}"]
    config = resolve("tiny_neox", "local", settings)
    # A process group of one: this worker must not wait for others.
    backend = NativeBackend(config, make_mesh(config, 1), Worker(0, 1, local_rank, "node"))
    backend.start()
    try:
        backend.build(lambda: build_model(config.recipe.model))
        backend.build_optimizer()
        seconds = []
        tokens = np.zeros((1, config.recipe.model.seq_len), dtype=np.int64)
        for _ in range(_STEPS):
            batches = [MicroBatch(tokens, tokens)] * MICRO_BATCHES
            begun = time.perf_counter()
            backend.forward_backward(batches, MICRO_BATCHES * tokens.size)
            backend.optimizer_step(1e-4)
            float(backend.param_norm())  # waits for the device
            seconds.append(time.perf_counter() - begun)
        return statistics.median(seconds)
    finally:
        backend.stop()


if __name__ == "__main__":
    main(sys.argv[1])
