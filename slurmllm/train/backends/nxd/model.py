"""The decoder in neuronx-distributed's layers, by the family's sharding plan.

NxD's tracer for pipeline stages needs a straight-line forward, and no tensor that several stages
use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from neuronx_distributed.parallel_layers import mappings
from neuronx_distributed.parallel_layers.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)
from neuronx_distributed.parallel_layers.loss_functions import parallel_cross_entropy
from neuronx_distributed.parallel_layers.parallel_state import get_tensor_model_parallel_rank
from torch import Tensor, nn

from slurmllm.core.config.families import sharding_plan
from slurmllm.core.config.recipe import ModelConfig, RopeScaling
from slurmllm.plan.parameters import kv_copies
from slurmllm.train.backends.nxd.arguments import SEQUENCE_DIMENSION
from slurmllm.train.model import IGNORED
from slurmllm.train.model.attention import document_starts, rotary_table, rotate
from slurmllm.train.model.decoder import Block, CausalCore, Decoder, embedding_scale


class Layers:
    """NxD's layers of one worker, with weights and activations of type `dtype`.

    `tensor` is the degree; with `sequence`, activations between matrices are sharded by sequence.
    """

    def __init__(
        self, config: ModelConfig, tensor: int, dtype: torch.dtype, *, sequence: bool
    ) -> None:
        self.config = config
        self.tensor = tensor
        self.dtype = dtype
        self._sequence = sequence and tensor > 1
        self._options: dict[str, Any] = {
            "dtype": dtype,
            # NxD's default of fp32 drops the reduced gradient of a bf16 layer (issue in the source
            # since 0.11: `LinearWithAsyncCommunication.backward` reduces a copy).
            "reduce_dtype": dtype,
            "sequence_parallel_enabled": self._sequence,
            "sequence_dimension": SEQUENCE_DIMENSION if self._sequence else None,
        }

    def column(self, linear: nn.Linear, rows: int | None = None) -> Any:
        """Make a layer sharded by output features; `rows` of all workers with replicated heads."""
        return ColumnParallelLinear(
            linear.in_features,
            rows or linear.out_features,
            bias=linear.bias is not None,
            gather_output=False,
            **self._options,
        )

    def row(self, linear: nn.Linear) -> Any:
        return RowParallelLinear(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            input_is_parallel=True,
            **self._options,
        )

    def vocabulary(self, embedding: nn.Embedding, kind: type[VocabularyEmbedding]) -> nn.Module:
        return kind(
            embedding.num_embeddings,
            embedding.embedding_dim,
            dtype=self.dtype,
            sequence_parallel_enabled=self._sequence,
            sequence_dimension=SEQUENCE_DIMENSION,
        )


class VocabularyEmbedding(ParallelEmbedding):  # type: ignore[misc]
    """An embedding of which each worker has a shard of the entries."""

    def forward(self, entries: Tensor) -> Tensor:
        """[batch, seq] → [batch, seq or a shard of it, hidden]."""
        rows: Tensor = super().forward(entries)
        if self.sequence_parallel_enabled:
            # NxD reduces only if the sequence is the first dimension.
            rows = mappings.reduce_scatter_to_sequence_parallel_region(rows, SEQUENCE_DIMENSION)
        return rows


class Positions(VocabularyEmbedding):
    """The table of learned positions."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Tokens [batch, seq] → [batch, or 1 without positions, seq or a shard of it, hidden]."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        return super().forward(positions)


def _rotary_table(
    c: ModelConfig, base: float, scaling: RopeScaling | None, device: torch.device
) -> Tensor:
    return rotary_table(c.seq_len, c.head_width, c.rotary_pct, base, scaling).to(device)


class CoreAttention(CausalCore):
    """Attention without weights, in the operations that neuronx-cc fuses (NEURON_FUSE_SOFTMAX).

    Selective checkpointing recomputes modules of this class.
    """

    def __init__(self, core: CausalCore, group: int, window: int | None) -> None:
        super().__init__(use_rotary=core.use_rotary, scale=core.scale, softcap=core.softcap)
        self.group = group
        self.window = window

    def forward(  # type: ignore[override]
        self, q: Tensor, k: Tensor, v: Tensor, rotary: Tensor, positions: Tensor | None = None
    ) -> Tensor:
        """[batch, seq, heads, head_dim] → [batch, seq, heads · head_dim], k and v with fewer heads.

        The softmax is computed in fp32. Without gathered rows, `rotary` rotates by positions in the
        sequence: attention depends only on their differences. `positions` are the decoder's.
        """
        if self.use_rotary:
            q = rotate(q, rotary)
            k = rotate(k, rotary)
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        if self.group > 1:
            k = k.repeat_interleave(self.group, 1)
            v = v.repeat_interleave(self.group, 1)
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores = scores / math.sqrt(q.shape[-1]) if self.scale is None else scores * self.scale
        if self.softcap is not None:
            scores = self._capped(scores)
        length = q.shape[-2]
        pairs = torch.ones(length, length, dtype=torch.bool, device=q.device)
        unseen = pairs.triu(1)
        if self.window is not None:
            unseen = unseen | pairs.tril(-self.window)
        if positions is not None:
            begin = document_starts(positions)
            unseen = unseen | (begin.unsqueeze(2) != begin.unsqueeze(1)).unsqueeze(1)
        # Not -inf: a compiler may multiply by a mask, and 0 · inf is NaN.
        scores = scores.float().masked_fill(unseen, torch.finfo(torch.float32).min / 2)
        attended = torch.matmul(scores.softmax(-1).to(v.dtype), v)
        return attended.transpose(1, 2).flatten(2)


class ParallelBlock(Block):
    """A decoder layer in NxD's layers; takes over the modules of the given block.

    `rotary` returns the table of rotary positions on a device.
    """

    def __init__(
        self,
        block: Block,
        layers: Layers,
        rotary: Callable[[torch.device], Tensor],
        window: int | None,
    ) -> None:
        vars(self).update(vars(block))
        config = layers.config
        self._rotary = rotary
        plan = sharding_plan(config.family, config.tied_embeddings, config.qk_norm).block
        for name, how in plan.items():
            module = block.get_submodule(name)
            if how in ("column", "row"):
                assert isinstance(module, nn.Linear)
                copies = kv_copies(config, layers.tensor) if name == "attention.qkv" else 1
                rows = None
                if copies > 1:
                    # Each worker has one key and value head and its part of that head's queries.
                    self.attention.group //= copies
                    rows = layers.tensor * (self.attention.group + 2) * self.attention.head_dim
                new = layers.row(module) if how == "row" else layers.column(module, rows)
                parent, _, leaf = name.rpartition(".")
                setattr(self.get_submodule(parent), leaf, new)
        self.attention.core = CoreAttention(self.attention.core, self.attention.group, window)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """[batch, seq or a shard of it, hidden] → the same; positions as for the decoder."""
        # Positions in place of the mask, which each layer's core computes from them: an input of
        # the model may go to all stages of a pipeline, a tensor computed by one of them may not.
        return super().forward(x, self._rotary(x.device), positions)


class ParallelLoss(nn.Module):
    """The mean cross entropy over logits of which each worker has a shard of the entries."""

    def __init__(self, vocab_size: int, padded: int, softcap: float | None = None) -> None:
        super().__init__()
        self.softcap = softcap
        self.vocab_size, self.padded = vocab_size, padded  # `padded` rows of the head
        # Factor of the loss, [1], on the device; data, so that all steps have one graph.
        self.weight: Tensor | None = None
        # Coefficient of the z-loss (PaLM, arXiv 2204.02311, section 5), z_loss · log²Z. It adds its
        # gradient, not its value: the result is the cross entropy.
        self.z_loss = 0.0

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Logits [batch, seq, this worker's entries] and labels [batch, seq] → nats, fp32.

        The mean over all labels, IGNORED ones counting as 0, times the weight.
        """
        # A copy: NxD's function overwrites its input.
        logits = logits.to(torch.float32, copy=True)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        first = get_tensor_model_parallel_rank() * logits.shape[-1]
        entries, padding = _entries(first, logits.shape[-1], self.vocab_size, logits.device)
        if self.padded > self.vocab_size:  # exclude padding from the softmax
            logits = logits.masked_fill(padding, torch.finfo(torch.float32).min / 2)
        targets = (labels != IGNORED).to(torch.float32)
        if self.z_loss:
            is_label = labels.unsqueeze(-1) == entries
            hits = mappings.reduce_from_tensor_model_parallel_region(
                torch.where(is_label, logits, 0).sum(-1)
            )
        losses = parallel_cross_entropy(logits, torch.where(labels == IGNORED, 0, labels))
        if self.z_loss:
            log_z = losses + hits  # the loss is log Z - the label's logit
            added = self.z_loss * log_z * log_z
            losses = losses + (added - added.detach())
        loss: Tensor = (losses * targets).mean()
        return loss if self.weight is None else loss * self.weight.squeeze()


@cache
def _entries(
    first: int, count: int, vocab_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return a worker's entries of the vocabulary, and which of them are padding.

    Data, not a branch of the graph, so that all workers have one graph.
    """
    entries = torch.arange(first, first + count)
    return entries.to(device), (entries >= vocab_size).to(device)


class ParallelDecoder(nn.Module):
    """A decoder in NxD's layers, from tokens and labels to the loss; it takes its modules."""

    def __init__(self, decoder: Decoder, layers: Layers) -> None:
        super().__init__()
        self.config = config = decoder.config
        assert decoder.embed is not None
        schemes = dict.fromkeys(map(config.rotary_scheme, config.layer_kinds))
        # One table of each for all layers. Not a buffer: NxD's tracer cannot partition a tensor
        # that several pipeline stages use.
        rotary = {scheme: cache(partial(_rotary_table, config, *scheme)) for scheme in schemes}
        self.embed = layers.vocabulary(decoder.embed, VocabularyEmbedding)
        self.positions: nn.Module | None = None
        if decoder.positions is not None:
            self.positions = layers.vocabulary(decoder.positions, Positions)
        self.scale = embedding_scale(config, layers.dtype)
        self.embedding_norm = decoder.embedding_norm
        self.layers = nn.ModuleDict()
        for name, block in zip(decoder.layers, decoder.blocks(), strict=True):
            kind = config.layer_kinds[int(name)]
            scheme = config.rotary_scheme(kind)
            self.layers[name] = ParallelBlock(block, layers, rotary[scheme], kind.window)
        self.final_norm = decoder.final_norm
        width = decoder.embed.embedding_dim
        entries = decoder.embed.num_embeddings
        # A tied head's weight is replaced.
        head = decoder.head or nn.Linear(width, entries, bias=False, device="meta")
        self.head = layers.column(head)
        self.tie()
        self.loss = ParallelLoss(config.vocab_size, config.padded_vocab_size, config.logits_softcap)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.to(layers.dtype)

    def tie(self) -> None:
        if self.config.tied_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor, positions: Tensor | None = None) -> Tensor:
        """Tokens and labels, [batch, seq], to the mean loss in nats; positions as `Decoder`'s."""
        assert self.final_norm is not None
        x = self.embed(tokens)
        if self.scale != 1:
            x = x * self.scale
        if self.positions is not None:
            x = x + self.positions(tokens, positions)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        for block in self.layers.values():
            x = block(x, positions)
        loss: Tensor = self.loss(self.head(self.final_norm(x)), labels)
        return loss
