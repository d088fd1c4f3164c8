"""The work of a decoder in numbers: matrix products, attention, elementwise traffic; torch-free.

All of one worker, for the tokens of one micro batch, forward. The backward pass is twice the
forward pass: each product's two gradients are products of the same size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from slurmllm.config.recipe import ModelConfig
from slurmllm.plan.parameters import kv_copies


@dataclass(frozen=True)
class Product:
    """A matrix product [m, k] × [k, n]."""

    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def numbers(self) -> int:
        """That it reads and writes."""
        return self.m * self.k + self.k * self.n + self.m * self.n

    @property
    def smallest(self) -> int:
        """The dimension that limits how well a device's matrix units are filled."""
        return min(self.m, self.n, self.k)


@lru_cache(maxsize=4096)
def block_products(model: ModelConfig, tokens: int, tensor: int) -> tuple[Product, ...]:
    """The products of a block's four matrices on one of `tensor` workers."""
    hidden = model.hidden_size
    queries, keys = _heads(model, tensor)
    return (
        Product(tokens, queries + 2 * keys, hidden),
        Product(tokens, hidden, queries),
        Product(tokens, up_width(model) // tensor, hidden),
        Product(tokens, hidden, model.ffn_hidden_size // tensor),
    )


def head_product(model: ModelConfig, tokens: int, tensor: int) -> Product:
    """The logits of one of `tensor` workers."""
    return Product(tokens, model.padded_vocab_size // tensor, model.hidden_size)


def attention_flops(model: ModelConfig, tokens: int, tensor: int) -> int:
    """Scores and weighted values of a block, without the half that causality masks."""
    queries, _ = _heads(model, tensor)
    return 2 * 2 * tokens * (model.seq_len // 2) * queries


@lru_cache(maxsize=4096)
def block_elements(model: ModelConfig, tokens: int, tensor: int, sequence: bool) -> int:
    """Numbers that a block's elementwise work reads and writes.

    Both norms (in, out) and both residual sums (two in, one out) work on the whole stream, or on
    a worker's share of the sequence under sequence parallelism; rotary positions, norms of
    queries and keys and the activation on the worker's heads and features.
    """
    stream = tokens * model.hidden_size // (tensor if sequence else 1)
    queries, keys = _heads(model, tensor)
    turned = 2 * (queries + keys) if model.rotary_pct > 0 else 0
    if model.qk_norm:
        turned += 2 * (queries + keys)
    activated = (up_width(model) + model.ffn_hidden_size) // tensor
    return 10 * stream + tokens * (turned + activated)


def up_width(model: ModelConfig) -> int:
    """Features of the feed-forward layer's first matrix, gate included."""
    return model.ffn_hidden_size * (2 if model.gated else 1)


def _heads(model: ModelConfig, tensor: int) -> tuple[int, int]:
    """Width of a worker's queries and of its keys; a head is copied if there are too few."""
    keys = model.kv_heads * kv_copies(model, tensor) // tensor
    return model.num_heads * model.head_width // tensor, keys * model.head_width


def model_flops(model: ModelConfig, sequences: int) -> float:
    """Of training on so many sequences, as model-FLOPs utilization counts them.

    6 for each weight of a matrix and token, and 12 · layers · hidden · length² a sequence for
    attention, whose masked half counts too (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).
    """
    tokens = sequences * model.seq_len
    block = sum(product.flops for product in block_products(model, 1, 1))
    vocabulary = 2 * model.vocab_size * model.hidden_size  # padding is no work of the model
    attention = 4 * model.seq_len * model.num_heads * model.head_width
    return 3.0 * tokens * (model.num_layers * (block + attention) + vocabulary)
