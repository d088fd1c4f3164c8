"""Which part of a parameter a tensor-parallel worker holds; torch-free.

The family's sharding plan in numbers: what the NxD backend builds, initializes, saves and converts.
(The native backend's DTensors hold the same parts as long as there are as many key and value heads
as tensor-parallel workers; it has no more workers than that.)

Beyond the key and value heads, each head lies on several workers ("kv replication"): of T workers
and K heads, workers k, k + K, k + 2K, … hold head k, and share its queries among them. That is the
order in which NxD arranges its kv groups on trn1.
"""

from __future__ import annotations

from typing import NamedTuple

from slurmllm.config.families import Sharding, sharding_plan
from slurmllm.config.recipe import ModelConfig

_QKV = "attention.qkv"


class Share(NamedTuple):
    """A worker's part of a parameter.

    Attributes:
        dim: The dimension that is shared out; None where every worker has the whole.
        pieces: Of that dimension, in the order in which they lie on the worker.
    """

    dim: int | None
    pieces: tuple[slice, ...]

    @property
    def size(self) -> int:
        """Length of the part along `dim`."""
        return sum(piece.stop - piece.start for piece in self.pieces)


WHOLE = Share(None, ())


def kv_copies(model: ModelConfig, tensor: int) -> int:
    """On how many of the tensor-parallel workers each key and value head lies."""
    return max(1, tensor // model.kv_heads)


def sharding(name: str, model: ModelConfig) -> Sharding:
    """How the plan shares a parameter's module.

    Args:
        name: The parameter's in the whole model, `layers.3.mlp.down.weight`.
        model: The whole model's configuration.
    """
    plan = sharding_plan(model.family, model.tied_embeddings)
    module = name.rpartition(".")[0]
    if module.startswith("layers."):
        return plan.block[module.split(".", 2)[2]]
    return plan.rest[module]


def share_of(
    name: str, shape: tuple[int, ...], model: ModelConfig, tensor: int, rank: int
) -> Share:
    """A tensor-parallel worker's part of a parameter.

    Args:
        name: The parameter's in the whole model.
        shape: Its whole shape.
        model: The whole model's configuration.
        tensor: Tensor-parallel degree.
        rank: Of the worker in its tensor-parallel group.
    """
    how = sharding(name, model)
    bias = name.endswith(".bias")
    if how == "sequence" or (how == "row" and bias):
        return WHOLE
    dim = 1 if how == "row" else 0
    if kv_copies(model, tensor) > 1 and ".attention." in name:
        queries, key_and_value = _replicated(model, tensor, rank)
        pieces = (queries, key_and_value) if _QKV in name else (_heads(model, tensor, rank),)
        return Share(dim, pieces)
    size = shape[dim] // tensor
    return Share(dim, (slice(rank * size, (rank + 1) * size),))


def _place(model: ModelConfig, tensor: int, rank: int) -> tuple[int, int, int]:
    """The worker's key-value head, its number among those that hold it, and its queries' count."""
    copies = kv_copies(model, tensor)
    queries = model.num_heads // model.kv_heads // copies
    return rank % model.kv_heads, rank // model.kv_heads, queries


def _replicated(model: ModelConfig, tensor: int, rank: int) -> tuple[slice, slice]:
    """Rows of the coalesced matrix: the worker's queries, then its key and its value."""
    head, number, queries = _place(model, tensor, rank)
    group, width = model.num_heads // model.kv_heads, model.head_dim
    first = head * (group + 2)
    start = (first + number * queries) * width
    key = (first + group) * width
    return slice(start, start + queries * width), slice(key, key + 2 * width)


def _heads(model: ModelConfig, tensor: int, rank: int) -> slice:
    """The attention heads that the worker computes, as a range of the heads' dimensions."""
    head, number, queries = _place(model, tensor, rank)
    group, width = model.num_heads // model.kv_heads, model.head_dim
    start = (head * group + number * queries) * width
    return slice(start, start + queries * width)
