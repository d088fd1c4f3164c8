"""What all contestants train: shape, batches, optimizer settings; and what it costs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
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

    @property
    def block_matrices(self) -> int:
        """Weights of the matrices of one layer."""
        keys_and_values = 2 * self.hidden**2 * self.kv_heads // self.heads
        feed_forward = (3 if self.family == "llama" else 2) * self.hidden * self.ffn
        return 2 * self.hidden**2 + keys_and_values + feed_forward


@dataclass(frozen=True)
class Task:
    """One measurement's settings.

    Attributes:
        precision: fp32, or bf16: products in bf16, weights and optimizer state in fp32.
        tokens: A .npy file, int64 [rows, seq + 1].
    """

    shape: Shape
    seq: int
    batch: int
    precision: str
    threads: int
    tokens: str

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        """What `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        return cls(shape=Shape(**values.pop("shape")), **values)

    def rows(self) -> npt.NDArray[np.int64]:
        """All sequences, each with the token after it."""
        found: npt.NDArray[np.int64] = np.load(Path(self.tokens))
        return found

    def batches(self) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Tokens and labels, [batch, seq] each, without end; the same for all contestants."""
        rows = self.rows()
        while True:
            for start in range(0, len(rows) - self.batch + 1, self.batch):
                part = rows[start : start + self.batch]
                yield part[:, :-1].copy(), part[:, 1:].copy()

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step."""
        return self.batch * self.seq

    @property
    def parameters(self) -> int:
        """Weights and biases."""
        s = self.shape
        # Norms, and neox's biases.
        vectors = 2 * s.hidden if s.family == "llama" else 9 * s.hidden + s.ffn
        final_norm = s.hidden if s.family == "llama" else 2 * s.hidden
        return s.layers * (s.block_matrices + vectors) + 2 * s.vocab * s.hidden + final_norm

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations of the model for one token, forward and backward.

        6N + 6·layers·hidden·seq, where N counts the weights in matrix products: those of the
        blocks and the head, not the embedding. The second term is attention's two products under
        the causal mask (Chowdhery et al. 2022, arXiv 2204.02311, appendix B, count 12: the whole
        square).
        """
        s = self.shape
        multiplied = s.layers * s.block_matrices + s.vocab * s.hidden
        return 6 * multiplied + 6 * s.layers * s.hidden * self.seq


def decay_groups(model: Any) -> list[dict[str, Any]]:
    """For AdamW: matrices decay, norms and biases do not."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
