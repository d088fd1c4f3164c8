"""Timing of a piece of work that all workers do at the same time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from slurmllm.calibrate.sample import Kind, Sample, Task
from slurmllm.config.recipe import ModelConfig
from slurmllm.config.resolve import resolve

Work = Callable[[], object]


@dataclass(frozen=True)
class Item:
    """A measurement; `kind`, `of` and `sizes` as in `Sample`.

    Attributes:
        work: The function to time.
        together: Whether all workers must call it equally often, as with collectives.
    """

    kind: Kind
    of: str
    sizes: tuple[int, ...]
    work: Work
    together: bool = False


def measure(items: Sequence[Item], device: torch.device, budget_s: float, rounds: int) -> None:
    """Time all items in turn, several times; rank 0 writes the results.

    In turn, so that a disturbance of the machine affects one round of some items only. Workers
    start each item simultaneously and the result is the mean over them: they share a node's
    memory, CPUs and links as in training.

    Args:
        items: The same on all workers.
        device: The device to synchronize with.
        budget_s: Time for each item and round, s.
        rounds: Rounds, whose median is taken.
    """
    seconds = [[_seconds(item, device, budget_s) for item in items] for _ in range(rounds)]
    own = [statistics.median(of_item) for of_item in zip(*seconds, strict=True)]
    everyone: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own)
    if dist.get_rank() == 0:
        for item, values in zip(items, zip(*everyone, strict=True), strict=True):
            value = statistics.fmean(values)
            Sample(kind=item.kind, of=item.of, sizes=item.sizes, value=value).write()


def _seconds(item: Item, device: torch.device, budget_s: float) -> float:
    item.work()
    wait(device)
    dist.barrier()
    if not item.together:
        return _repeated(item.work, device, budget_s)
    once = torch.tensor(_counted(item.work, device, 1), device=device)
    dist.all_reduce(once, dist.ReduceOp.MAX)
    count = max(2, min(1000, round(budget_s / float(once))))
    return _counted(item.work, device, count) / count


def _repeated(work: Work, device: torch.device, budget_s: float) -> float:
    """Mean duration of as many calls as fit into the budget, s."""
    begun, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - begun < budget_s:
        work()
        count += 1
        if device.type == "cuda" and count % 10 == 0:
            wait(device)
    wait(device)
    return (time.perf_counter() - begun) / count


def _counted(work: Work, device: torch.device, count: int) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        work()
    wait(device)
    return time.perf_counter() - begun


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_MIB = 1 << 20


@dataclass(frozen=True)
class Scale:
    """Sizes and durations of the measurements.

    Attributes:
        model: Model of attention and elementwise work.
        batch: Its sequences in a micro batch.
        tokens: Tokens of the matrix products.
        widths: Hidden sizes of the matrix products.
        copied_bytes: Size of a copy, far larger than the caches.
        collective_bytes: Sizes of the collectives, smallest first.
        budget_s: Time for each measurement and round, s.
        rounds: Rounds of all measurements.
    """

    model: ModelConfig
    batch: int
    tokens: tuple[int, ...]
    widths: tuple[int, ...]
    copied_bytes: int
    collective_bytes: tuple[int, ...]
    budget_s: float
    rounds: int


def scale_of(task: Task) -> Scale:
    if task.quick:
        return Scale(
            _model(64, 2, 1024, 64), 2, (128,), (64, 128, 256), 8 * _MIB, (1024, _MIB), 0.02, 1
        )  # fmt: skip
    if task.device == "cuda":
        return Scale(
            _model(4096, 32, 50304, 2048), 4, (2048, 8192),
            (256, 512, 1024, 2048, 4096, 8192), 1024 * _MIB,
            (8 * 1024, 16 * _MIB, 256 * _MIB), 0.15, 3,
        )  # fmt: skip
    return Scale(
        _model(512, 8, 16384, 512), 4, (512, 2048), (64, 128, 256, 512, 1024), 256 * _MIB,
        (1024, _MIB, 16 * _MIB), 0.15, 3,
    )  # fmt: skip


def _model(hidden: int, heads: int, vocabulary: int, length: int) -> ModelConfig:
    given = {
        "hidden_size": hidden, "num_heads": heads, "ffn_hidden_size": 4 * hidden,
        "vocab_size": vocabulary, "seq_len": length,
    }  # fmt: skip
    overrides = [f"model.{name}={value}" for name, value in given.items()]
    return resolve("tiny_neox", "local", overrides).recipe.model
