"""What all contestants train: shape, batches, optimizer settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

LR = 3e-4
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1
GRAD_CLIP = 1.0


@dataclass(frozen=True)
class Shape:
    """A model with an untied head and no dropout.

    neox: rotary share 0.25, parallel residual, LayerNorm, biases. llama: full rotation, RMSNorm,
    gated feed-forward layer, grouped keys and values, no biases.
    """

    family: Literal["neox", "llama"]
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int


@dataclass(frozen=True)
class Task:
    """One measurement's settings."""

    shape: Shape
    seq: int
    batch: int
    precision: str  # fp32, or bf16: products in bf16, weights and optimizer state in fp32
    threads: int
    tokens: str  # a .npy file, int64 [rows, seq + 1]

    @classmethod
    def from_json(cls, text: str) -> Task:
        values: dict[str, Any] = json.loads(text)
        return cls(shape=Shape(**values.pop("shape")), **values)

    def rows(self) -> npt.NDArray[np.int64]:
        rows: npt.NDArray[np.int64] = np.load(Path(self.tokens))
        return rows

    def batches(self) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Tokens and labels, [batch, seq] each, without end; the same for all contestants."""
        rows = self.rows()
        while True:
            for start in range(0, len(rows) - self.batch + 1, self.batch):
                part = rows[start : start + self.batch]
                yield part[:, :-1].copy(), part[:, 1:].copy()


def decay_groups(model: Any, weight_decay: float = WEIGHT_DECAY) -> list[dict[str, Any]]:
    """For AdamW: matrices decay, norms and biases do not."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = (matrices, weight_decay), (others, 0.0)
    return [{"params": params, "weight_decay": decay} for params, decay in groups]
