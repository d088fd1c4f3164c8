"""How large the work is that is measured: as in training on such a device, and within the time."""

from __future__ import annotations

from dataclasses import dataclass

from slurmllm.calibrate.sample import Task
from slurmllm.config.recipe import ModelConfig
from slurmllm.config.resolve import resolve

_MIB = 1 << 20


@dataclass(frozen=True)
class Scale:
    """Sizes and times.

    Attributes:
        model: Of attention and elementwise work.
        batch: Sequences of it in a micro batch.
        tokens: Of the matrix products.
        widths: Hidden sizes of the matrix products.
        copied_bytes: Of a copy; far beyond the caches.
        collective_bytes: Smallest first.
        budget_s: For each measurement and round.
        rounds: Of all measurements.
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
    """What suits the task's device."""
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
