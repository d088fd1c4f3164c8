"""The decoder: embedding, blocks, final norm, head.

Families differ only in values of `ModelConfig`, set by the family (`config/families/`) or the
recipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from slurmllm.core.config.families import BLOCK_NORMS, FAMILIES
from slurmllm.core.config.recipe import FULL_ATTENTION, LayerAttention, ModelConfig
from slurmllm.train.model.attention import document_mask, rotary_table, rotate
from slurmllm.train.model.output import Output

# Of `document_mask` or `document_blocks`; None for plain causal attention.
Mask = Tensor | BlockMask | None

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
}


class OnePlusNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight, in fp32 (Gemma)."""

    def forward(self, x: Tensor) -> Tensor:
        weight = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, weight, self.eps).type_as(x)


class VectorNorm(nn.RMSNorm):
    """RMSNorm over all heads together, in fp32 (OLMo 2): [batch, seq, heads, head_dim]."""

    def forward(self, x: Tensor) -> Tensor:
        values = x.float()
        assert self.eps is not None
        total = values.square().sum((-2, -1), keepdim=True)
        if isinstance(total, DTensor):  # of the worker's heads: a partial sum
            total = total.redistribute(placements=[Replicate()])
        scale = torch.rsqrt(total / self.weight.numel() + self.eps)
        return (self.weight.view(x.shape[-2:]) * (values * scale)).type_as(x)


class Attention(nn.Module):
    """Causal self-attention with queries, keys and values from one matrix.

    The rows of `qkv` are grouped by key-value head: the group's queries, its key, its value. A
    contiguous part of the rows then consists of whole groups, as tensor parallelism needs.
    """

    def __init__(self, config: ModelConfig, kind: LayerAttention = FULL_ATTENTION) -> None:
        super().__init__()
        family = FAMILIES[config.family]
        self.head_dim = config.head_width
        self.group = config.num_heads // config.kv_heads
        rows = config.kv_heads * (self.group + 2) * self.head_dim
        self.qkv = nn.Linear(config.hidden_size, rows, bias=config.attention_bias)
        self.q_norm = make_head_norm(config, config.num_heads)
        self.k_norm = make_head_norm(config, config.kv_heads)
        use_rotary = config.rotary_pct > 0 and kind.rope != "none"
        self.rotates_first = use_rotary and config.qk_norm and family.qk_norm_after_rotation
        scalar = config.query_pre_attn_scalar
        self.core = CausalCore(
            use_rotary=use_rotary and not self.rotates_first,
            scale=None if scalar is None else scalar**-0.5,
            softcap=config.attention_softcap,
        )
        self.out = nn.Linear(
            config.num_heads * self.head_dim, config.hidden_size, bias=config.attention_bias
        )

    def forward(self, x: Tensor, rotary: Tensor, mask: Mask = None) -> Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]; rotary and mask as for `CausalCore`."""
        qkv = self.qkv(x).unflatten(-1, (-1, self.group + 2, self.head_dim))
        q, k, v = qkv.split([self.group, 1, 1], dim=-2)
        q = q.flatten(2, 3)
        k = k.squeeze(-2)
        if self.rotates_first:
            q = rotate(q, rotary)
            k = rotate(k, rotary)
        q = _normed(self.q_norm, q)
        k = _normed(self.k_norm, k)
        out: Tensor = self.out(self.core(q, k, v.squeeze(-2), rotary, mask))
        return out


class CausalCore(nn.Module):
    """The part of attention without weights, which selective checkpointing recomputes.

    Scores are multiplied by `scale`, by default the inverse root of head_dim, and then become
    softcap · tanh(score / softcap), which needs a mask.
    """

    def __init__(
        self,
        *,
        use_rotary: bool,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.use_rotary = use_rotary
        self.scale = scale
        self.softcap = softcap

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rotary: Tensor, mask: Mask = None) -> Tensor:
        """[batch, seq, heads, head_dim] → [batch, seq, heads · head_dim]; k and v may have fewer
        heads.

        `rotary` is [2, at least seq, head_dim / 2], or [2, batch, …] if sequences differ.
        """
        if self.use_rotary:
            q = rotate(q, rotary)
            k = rotate(k, rotary)
        copies = q.shape[2] // k.shape[2]
        if isinstance(mask, Tensor) and (self.softcap is not None or not q.is_cpu) and copies > 1:
            # CUDA's flash kernel takes no mask, its memory-efficient one no groups: with both,
            # torch may compute all scores as a tensor (2.9 to 2.13, sdp_utils.cpp).
            k = k.repeat_interleave(copies, dim=2)
            v = v.repeat_interleave(copies, dim=2)
            copies = 1
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        if isinstance(mask, BlockMask):
            attended = flex_attention(
                q,
                k,
                v,
                None if self.softcap is None else self._capped,
                block_mask=mask,
                scale=self.scale,
                enable_gqa=copies > 1,
            )
        elif self.softcap is not None:
            assert mask is not None
            scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
            scores = self._capped(torch.matmul(q, k.transpose(-1, -2)) * scale) + mask
            attended = torch.matmul(scores.softmax(-1, dtype=torch.float32).to(v.dtype), v)
        else:
            attended = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=self.scale,
                enable_gqa=copies > 1,
            )
        return attended.transpose(1, 2).flatten(2)

    def _capped(self, score: Tensor, *indices: Tensor) -> Tensor:
        assert self.softcap is not None
        return self.softcap * torch.tanh(score / self.softcap)


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

    def __init__(self, config: ModelConfig, kind: LayerAttention = FULL_ATTENTION) -> None:
        super().__init__()

        def norm(name: str) -> nn.Module | None:
            places = BLOCK_NORMS[FAMILIES[config.family].norm_places]
            return make_norm(config) if name in places else None

        self.parallel_residual = config.parallel_residual
        self.attention_norm = norm("attention_norm")
        self.attention = Attention(config, kind)
        self.attention_out_norm = norm("attention_out_norm")
        self.mlp_norm = norm("mlp_norm")
        self.mlp = GatedFeedForward(config) if config.gated else FeedForward(config)
        self.mlp_out_norm = norm("mlp_out_norm")

    def forward(self, x: Tensor, rotary: Tensor, mask: Mask = None) -> Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]; rotary and mask as for `CausalCore`."""
        attended = self.attention(_normed(self.attention_norm, x), rotary, mask)
        attended = _normed(self.attention_out_norm, attended)
        if self.parallel_residual:
            return x + attended + self._feed_forward(x)
        x = x + attended
        return x + self._feed_forward(x)

    def _feed_forward(self, x: Tensor) -> Tensor:
        return _normed(self.mlp_out_norm, self.mlp(_normed(self.mlp_norm, x)))


def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


class Decoder(nn.Module):
    """Tokens to logits, or tokens and labels to the loss.

    A pipeline stage is a decoder reduced by `keep`; the names of its parameters do not change.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        family = FAMILIES[config.family]
        vocabulary = config.padded_vocab_size
        width = config.hidden_size
        self.embed: nn.Embedding | None = nn.Embedding(vocabulary, width)
        learned = family.positions == "learned"
        self.positions = nn.Embedding(config.seq_len, width) if learned else None
        self.embedding_norm = make_norm(config) if family.embedding_norm else None
        # A dict, so that the layers of a stage keep their numbers.
        self.layers = nn.ModuleDict(
            {str(i): Block(config, kind) for i, kind in enumerate(config.layer_kinds)}
        )
        self.final_norm: nn.Module | None = make_norm(config)
        self.head = None if config.tied_embeddings else nn.Linear(width, vocabulary, bias=False)
        self.first = self.last = True
        self.output = Output(config.vocab_size, config.logits_softcap)
        # Makes masks of blocks from positions and a window, for compiled blocks; None: masks are
        # dense.
        self.document_blocks: Callable[[Tensor, Tensor | None], BlockMask] | None = None
        schemes = dict.fromkeys(map(config.rotary_scheme, config.layer_kinds))
        # Base and scaling of rotary positions → name of their table.
        self.rotary_names = {scheme: f"rotary_{number}" for number, scheme in enumerate(schemes)}
        for name in self.rotary_names.values():
            # Not persistent: computed from the configuration, so not part of checkpoints.
            table = torch.empty(2, config.seq_len, config.head_width // 2)
            self.register_buffer(name, table, persistent=False)
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
            self.positions = self.embedding_norm = None
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
        for (base, scaling), name in self.rotary_names.items():
            table = self.get_buffer(name)
            if not table.is_meta:
                table.copy_(rotary_table(c.seq_len, c.head_width, c.rotary_pct, base, scaling))

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
        # A later stage has a shard of the sequence under sequence parallelism.
        length = x.shape[1] if self.first else self.config.seq_len
        if self.first:
            x = self._embed(x, positions)
        # Computed once for all layers.
        tables = {
            name: table if positions is None else table[:, positions]
            for name, table in self.named_buffers(recurse=False)
        }
        masks: dict[int, Mask] = {}
        for name, block in self.layers.items():
            kind = self.config.layer_kinds[int(name)]
            window = min(kind.window or length, length)
            if window not in masks:
                masks[window] = self._mask(window, positions, length, x)
            table = tables[self.rotary_names[self.config.rotary_scheme(kind)]]
            x = block(x, table, masks[window])
        if not self.last:
            return x
        assert self.final_norm is not None
        head = self.embed if self.head is None else self.head
        assert head is not None
        out: Tensor = self.output(self.final_norm(x), head.weight, labels)
        return out

    def _embed(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        assert self.embed is not None
        x: Tensor = self.embed(tokens)
        if (scale := embedding_scale(self.config, x.dtype)) != 1:
            x = x * scale
        if self.positions is not None:
            if positions is None:
                positions = torch.arange(tokens.shape[1], device=x.device).unsqueeze(0)
            x = x + self.positions(positions)
        return _normed(self.embedding_norm, x)

    def _mask(self, window: int, positions: Tensor | None, length: int, x: Tensor) -> Mask:
        """Return the mask of layers with a window; None for plain causal attention."""
        is_full = window == length
        if positions is None:
            if is_full and self.config.attention_softcap is None:
                return None
            positions = torch.arange(length, device=x.device).unsqueeze(0)
        if self.document_blocks is None:
            return document_mask(positions, x.dtype, None if is_full else window)
        tokens = None if is_full else torch.full((), window, device=x.device)
        return self.document_blocks(positions.expand(x.shape[0], -1), tokens)


def embedding_scale(config: ModelConfig, dtype: torch.dtype) -> float:
    """Return the factor of the embedding, rounded as the embedding is (Gemma)."""
    if not FAMILIES[config.family].scaled_embedding:
        return 1.0
    return torch.tensor(math.sqrt(config.hidden_size), device="cpu").to(dtype).item()


def make_norm(config: ModelConfig) -> nn.Module:
    family = FAMILIES[config.family]
    if family.norm == "rms":
        return make_rms_norm(config, config.hidden_size)
    has_weight = family.norm_weight != "none"
    return nn.LayerNorm(config.hidden_size, config.norm_eps, elementwise_affine=has_weight)


def make_head_norm(config: ModelConfig, heads: int) -> nn.RMSNorm | None:
    """Return the norm of so many heads' queries or keys, None without one."""
    if not config.qk_norm:
        return None
    if FAMILIES[config.family].qk_norm_over == "vector":
        return VectorNorm(heads * config.head_width, config.norm_eps)
    return make_rms_norm(config, config.head_width)  # one weight for all heads


def make_rms_norm(config: ModelConfig, width: int) -> nn.RMSNorm:
    weight = FAMILIES[config.family].norm_weight
    if weight == "one_plus":
        return OnePlusNorm(width, config.norm_eps)
    return nn.RMSNorm(width, config.norm_eps, elementwise_affine=weight == "plain")


def build_model(config: ModelConfig) -> Decoder:
    """Return the model of a recipe with uninitialized weights, which take no memory on meta."""
    return Decoder(config)
