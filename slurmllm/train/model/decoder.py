"""The decoder: embedding, blocks, final norm, head.

Families differ only in values of `ModelConfig`, set by the family (`config/families/`) or the
recipe.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from slurmllm.core.config.families import FAMILIES
from slurmllm.core.config.recipe import ModelConfig
from slurmllm.train.model.attention import document_mask, rotary_table, rotate
from slurmllm.train.model.output import Output

# Of `document_mask` or `document_blocks`; None for plain causal attention.
Mask = Tensor | BlockMask | None

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


class Attention(nn.Module):
    """Causal self-attention with queries, keys and values from one matrix.

    The rows of `qkv` are grouped by key-value head: the group's queries, its key, its value. A
    contiguous part of the rows then consists of whole groups, as tensor parallelism needs.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_width
        self.group = config.num_heads // config.kv_heads
        rows = config.kv_heads * (self.group + 2) * self.head_dim
        self.qkv = nn.Linear(config.hidden_size, rows, bias=config.attention_bias)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if config.qk_norm:
            # One weight for all heads; before the rotation (Qwen3).
            self.q_norm = nn.RMSNorm(self.head_dim, eps=config.norm_eps)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=config.norm_eps)
        self.core = CausalCore(use_rotary=config.rotary_pct > 0, grouped=self.group > 1)
        self.out = nn.Linear(
            config.num_heads * self.head_dim, config.hidden_size, bias=config.attention_bias
        )

    def forward(self, x: Tensor, rotary: Tensor, mask: Mask = None) -> Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]; rotary and mask as for `CausalCore`."""
        qkv = self.qkv(x).unflatten(-1, (-1, self.group + 2, self.head_dim))
        q, k, v = qkv.split([self.group, 1, 1], dim=-2)
        q = q.flatten(2, 3)
        k = k.squeeze(-2)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        out: Tensor = self.out(self.core(q, k, v.squeeze(-2), rotary, mask))
        return out


class CausalCore(nn.Module):
    """The part of attention without weights, which selective checkpointing recomputes."""

    def __init__(self, *, use_rotary: bool, grouped: bool) -> None:
        super().__init__()
        self.use_rotary = use_rotary
        self.grouped = grouped

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rotary: Tensor, mask: Mask = None) -> Tensor:
        """[batch, seq, heads, head_dim] → [batch, seq, heads · head_dim]; k and v may have fewer
        heads.

        `rotary` is [2, at least seq, head_dim / 2], or [2, batch, …] if sequences differ.
        """
        if self.use_rotary:
            rotary = rotary[..., : q.shape[1], :]
            q = rotate(q, rotary)
            k = rotate(k, rotary)
        grouped = self.grouped
        if isinstance(mask, BlockMask):
            q = q.transpose(1, 2)
            k = k.transpose(1, 2)
            v = v.transpose(1, 2)
            attended = flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped)
            return attended.transpose(1, 2).flatten(2)
        if grouped and mask is not None and not q.is_cpu:
            # CUDA's flash kernel takes no mask, its memory-efficient one no groups: with both,
            # torch may compute all scores as a tensor (2.9 to 2.13, sdp_utils.cpp).
            copies = q.shape[2] // k.shape[2]
            grouped = False
            k = k.repeat_interleave(copies, dim=2)
            v = v.repeat_interleave(copies, dim=2)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=grouped,
        )
        return attended.transpose(1, 2).flatten(2)


class FeedForward(nn.Module):
    """Two matrices with an activation between them; keeps the shape [batch, seq, hidden]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.up = nn.Linear(config.hidden_size, config.ffn_hidden_size, bias=config.mlp_bias)
        self.down = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(self.up(x)))
        return out


class GatedFeedForward(nn.Module):
    """A feed-forward layer with a gate (Shazeer 2020, arXiv 2002.05202), gate and up in one matrix.

    The rows of `gate_up` alternate: `gate_block` of the gate, as many of up, and so on. A
    contiguous part of them then has matching gates and ups, as tensor parallelism needs.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.block = config.gate_block
        self.gate_up = nn.Linear(
            config.hidden_size, 2 * config.ffn_hidden_size, bias=config.mlp_bias
        )
        self.down = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).unflatten(-1, (-1, 2, self.block)).unbind(-2)
        out: Tensor = self.down((self.activation(gate) * up).flatten(-2))
        return out


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.parallel_residual = config.parallel_residual
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = GatedFeedForward(config) if config.gated else FeedForward(config)

    def forward(self, x: Tensor, rotary: Tensor, mask: Mask = None) -> Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]; rotary and mask as for `CausalCore`."""
        attended = self.attention(self.attention_norm(x), rotary, mask)
        if self.parallel_residual:
            out: Tensor = x + attended + self.mlp(self.mlp_norm(x))
        else:
            x = x + attended
            out = x + self.mlp(self.mlp_norm(x))
        return out


class Decoder(nn.Module):
    """Tokens to logits, or tokens and labels to the loss.

    A pipeline stage is a decoder reduced by `keep`; the names of its parameters do not change.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        learned = FAMILIES[config.family].positions == "learned"
        vocabulary = config.padded_vocab_size
        width = config.hidden_size
        self.embed: nn.Embedding | None = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(config.seq_len, width) if learned else None
        # A dict, so that the layers of a stage keep their numbers.
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.num_layers)})
        self.final_norm: nn.Module | None = make_norm(config)
        self.head = None if config.tied_embeddings else nn.Linear(width, vocabulary, bias=False)
        self.first = self.last = True
        self.output = Output(config.vocab_size)
        # Makes masks of blocks from positions, for compiled blocks; None: masks are dense.
        self.document_blocks: Callable[[Tensor], BlockMask] | None = None
        self.rotary: Tensor
        # Not persistent: computed from the configuration, so not part of checkpoints.
        self.register_buffer(
            "rotary", torch.empty(2, config.seq_len, config.head_width // 2), persistent=False
        )
        self.reset_buffers()

    def keep(self, layers: range, *, first: bool, last: bool) -> None:
        """Reduce the decoder to a pipeline stage with these layers.

        The first embeds tokens, the last computes logits or loss; stages exchange hidden states.
        """
        self.first = first
        self.last = last
        # Deleted, not skipped: a stage must not allocate the other layers.
        for name in [name for name in self.layers if int(name) not in layers]:
            del self.layers[name]
        if not first:
            self.positions = None
            # With tied embeddings the last stage uses the embedding as its head.
            if not (last and self.config.tied_embeddings):
                self.embed = None
        if not last:
            self.final_norm = self.head = None

    def blocks(self) -> list[Block]:
        return [block for block in self.layers.values() if isinstance(block, Block)]

    def reset_buffers(self) -> None:
        """Compute the buffers; needed again after materializing from the meta device."""
        c = self.config
        if not self.rotary.is_meta:
            self.rotary.copy_(
                rotary_table(c.seq_len, c.head_width, c.rotary_pct, c.rotary_base, c.rope_scaling)
            )

    def forward(
        self, x: Tensor, labels: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Compute this stage: tokens [batch, seq] or hidden states [batch, seq, hidden] to the
        next.

        The last stage returns logits [batch, seq, padded vocabulary], or, with labels [batch, seq],
        the fp32 cross-entropy in nats: the mean over all labels, IGNORED ones as 0. With
        `positions` as for `document_starts`, which every stage uses, attention stays within
        documents.
        """
        if self.first:
            assert self.embed is not None
            length = x.shape[1]
            x = self.embed(x)
            if self.positions is not None:
                indices = positions
                if indices is None:
                    indices = torch.arange(length, device=x.device).unsqueeze(0)
                x = x + self.positions(indices)
        rotary: Tensor = self.rotary
        mask: Mask = None
        if positions is not None:  # computed once for all layers
            rotary = self.rotary[:, positions]
            blocks = self.document_blocks
            mask = document_mask(positions, x.dtype) if blocks is None else blocks(positions)
        for block in self.blocks():
            x = block(x, rotary, mask)
        if not self.last:
            return x
        assert self.final_norm is not None
        head = self.embed if self.head is None else self.head
        assert head is not None
        out: Tensor = self.output(self.final_norm(x), head.weight, labels)
        return out


def make_norm(config: ModelConfig) -> nn.Module:
    if FAMILIES[config.family].norm == "rms":
        return nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)


def build_model(config: ModelConfig) -> Decoder:
    """Return the model of a recipe with uninitialized weights, which take no memory on meta."""
    return Decoder(config)
