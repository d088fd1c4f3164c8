"""One worker of a measurement: `python -m slurmllm.analysis.calibrate.worker TASK`.

`slurmllm.analysis.calibrate.node` sets torchrun's variables.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch.distributed as dist

from slurmllm.analysis.calibrate import measuring
from slurmllm.analysis.calibrate.measuring import Item, Scale, measure, scale_of
from slurmllm.analysis.calibrate.node import (
    GPU_LIMIT_S,
    STEP_LAYERS,
    Sample,
    Task,
    product_grid,
    step_config,
)
from slurmllm.core.errors import ConfigError
from slurmllm.plan.mesh import make_mesh
from slurmllm.train.backends.base import MicroBatch, Worker
from slurmllm.train.backends.native.device import KINDS, Accelerator, Device
from slurmllm.train.backends.native.runtime import NativeBackend
from slurmllm.train.backends.process_group import init_process_group

Measurements = dict[str, Callable[[], Iterable[Item]]]
# Of a collective, instead of torch's 10 (NCCL) or 30 minutes (Gloo).
_LIMIT = timedelta(seconds=120)
# The median ignores the first steps, which allocate and compile.
_STEPS = 8
_MIN_STEPS = 5
# Part → most seconds of it on a GPU, of which the parts that are left share what the limit leaves.
PARTS_S = {
    "steps": 12.0,
    "matrix products": 8.0,
    "attention": 2.0,
    "memory": 1.0,
    "collectives": 6.0,
}


def main(task_json: str) -> None:
    task = Task.model_validate_json(task_json)
    local_rank = int(os.environ["LOCAL_RANK"])
    rank = int(os.environ["RANK"])
    try:
        kind = KINDS[task.device](local_rank)
    except ConfigError as error:
        sys.exit(str(error))  # the last line of its output is the reason of the failure
    device = kind.torch
    steps: list[Sample] = []
    scale = scale_of(task)
    measurements = _measurements(task, scale)
    count = len(measurements) + (not task.products_only)
    if not task.products_only:
        model = "a wide model" if kind.asynchronous else "a tiny model"
        _progress(f"1 of {count}: {model}, for the overhead of steps and libraries")
        # First, as each worker's backend starts a process group of its own.
        for layers in STEP_LAYERS[task.device]:
            steps += time_steps(task, layers, local_rank)
    init_process_group(kind.process_group, rank, task.nodes * task.workers, _LIMIT)
    _write_mean(Sample(kind="reserved", value=_reserved(kind)))
    _write_mean(Sample(kind="memory", value=kind.total_memory(task.sharing)))
    for sample in steps:
        _write_mean(sample)
    for index, (name, items) in enumerate(measurements.items()):
        _progress(f"{count - len(measurements) + index + 1} of {count}: {name}")
        limit_s = math.inf
        if kind.asynchronous:
            left_s = task.begun + GPU_LIMIT_S - time.monotonic()
            remaining_s = sum(PARTS_S[measurement] for measurement in [*measurements][index:])
            limit_s = PARTS_S[name] * min(1.0, max(0.0, left_s) / remaining_s)
        with device:
            made = list(items())
        measure(made, device, scale.budget_s, scale.rounds, limit_s)
        del made  # else its tensors would use memory during the next measurement
        kind.release()
    dist.barrier()
    dist.destroy_process_group()


def _measurements(task: Task, scale: Scale) -> Measurements:
    """Return name → measurements, created lazily: their tensors would not fit all at once."""
    model = scale.model
    precision = task.precision
    batch = scale.batch
    widths = scale.widths
    feed_forward = [(tokens, 4 * width, width) for tokens in scale.tokens for width in widths]
    head = (scale.tokens[0], model.padded_vocab_size, widths[len(widths) // 2])
    sizes = {"fp32": [*feed_forward, head], "bf16": [*feed_forward, head]}
    if task.products_only:
        grid = product_grid(scale.tokens, widths)
        sizes = {"fp32": grid, "bf16": grid}
        return {"matrix products": lambda: measuring.products(sizes)}
    if task.device == "cuda":  # of the other precision only the peak is needed
        sizes["fp32" if precision == "bf16" else "bf16"] = [feed_forward[-1]]
    measurements: Measurements = {
        "matrix products": lambda: measuring.products(sizes),
        "attention": lambda: [measuring.attention(model, precision, batch)],
        "memory": lambda: [measuring.copy(scale.copied_bytes)],
    }
    if task.device == "cpu":  # on GPUs steps show it, in whose graphs it is fused
        measurements["elementwise work"] = lambda: measuring.elementwise(
            model, precision, batch, task.compiled
        )
    if task.nodes * task.workers > 1:
        measurements["collectives"] = lambda: measuring.collectives(
            task.nodes, task.workers, scale.collective_bytes
        )
    return measurements


def _reserved(kind: Device) -> int:
    """Return bytes of the device that are in use without a model."""
    gc.collect()
    if isinstance(kind, Accelerator):
        return kind.unavailable_memory()
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


def _progress(message: str) -> None:
    if os.environ["RANK"] == "0":
        Sample(kind="progress", of=message).write()


def time_steps(task: Task, layers: int, local_rank: int) -> list[Sample]:
    """Return the median duration of a step of `layers` layers: the host's, and a GPU's."""
    config = step_config(task, layers)
    # A process group of one: this worker must not wait for others.
    backend = NativeBackend(config, make_mesh(config, 1), Worker(0, 1, local_rank, "node"))
    backend.start()
    until = time.monotonic() + PARTS_S["steps"] / 2 if task.device == "cuda" else math.inf
    try:
        backend.build()
        mesh = backend.mesh
        tokens = np.zeros((mesh.micro_batch, config.recipe.model.seq_len), dtype=np.int64)
        batches = [MicroBatch(tokens, tokens)] * mesh.accumulation
        host_s = list[float]()
        marks = [backend.mark()]
        norms = []
        while len(host_s) < _STEPS and (len(host_s) < _MIN_STEPS or time.monotonic() < until):
            begun = time.perf_counter()
            backend.forward_backward(batches, mesh.accumulation * tokens.size)
            backend.optimizer_step(1e-4)
            norms.append(backend.param_norm())
            host_s.append(time.perf_counter() - begun)
            marks.append(backend.mark())
            float(norms[len(norms) - 1 - backend.deferred_metrics])  # waits for the device
        device_s = [end - begin for begin, end in itertools.pairwise(marks)]
    finally:
        backend.stop()
    sizes = layers, mesh.accumulation
    samples = [Sample(kind="step", sizes=sizes, value=statistics.median(host_s))]
    if task.device == "cuda":
        samples.append(Sample(kind="gpu_step", sizes=sizes, value=statistics.median(device_s)))
    return samples


if __name__ == "__main__":
    main(sys.argv[1])
