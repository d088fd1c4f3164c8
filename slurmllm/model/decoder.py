"""The decoder: embedding, blocks, final norm, head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slurmllm.config.recipe import ModelConfig
from slurmllm.model.families import FAMILIES, Family
from slurmllm.model.rotary import rotary_table, rotate


class Attention(nn.Module):
    """Causal self-attention with queries, keys and values from one matrix.

    The rows of `qkv` are grouped by key-value head: the group's queries, its key, its value.
    A contiguous share of the rows therefore holds whole groups, as tensor parallelism needs.
    """

    def __init__(self, config: ModelConfig, family: Family) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.group = config.num_heads // config.kv_heads
        rows = config.kv_heads * (self.group + 2) * self.head_dim
        self.qkv = nn.Linear(config.hidden_size, rows, bias=family.bias)
        self.out = nn.Linear(config.num_heads * self.head_dim, config.hidden_size, bias=family.bias)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]."""
        qkv = self.qkv(x).unflatten(-1, (-1, self.group + 2, self.head_dim))
        q, k, v = qkv.split([self.group, 1, 1], dim=-2)
        q, k, v = q.flatten(2, 3), k.squeeze(-2), v.squeeze(-2)
        attended = F.scaled_dot_product_attention(
            rotate(q, rotary).transpose(1, 2),
            rotate(k, rotary).transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.group > 1,
        )
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """Two matrices with an activation between them."""

    def __init__(self, config: ModelConfig, family: Family) -> None:
        super().__init__()
        self.activation = family.activation
        self.up = nn.Linear(config.hidden_size, config.ffn_hidden_size, bias=family.bias)
        self.down = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=family.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]."""
        out: Tensor = self.down(self.activation(self.up(x)))
        return out


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig, family: Family) -> None:
        super().__init__()
        self.parallel_residual = family.parallel_residual
        self.attention_norm = family.norm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config, family)
        self.mlp_norm = family.norm(config.hidden_size, config.norm_eps)
        self.mlp = FeedForward(config, family)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]."""
        attended = self.attention(self.attention_norm(x), rotary)
        if self.parallel_residual:
            out: Tensor = x + attended + self.mlp(self.mlp_norm(x))
        else:
            x = x + attended
            out = x + self.mlp(self.mlp_norm(x))
        return out


class Decoder(nn.Module):
    """Tokens to logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        family = FAMILIES[config.family]
        self.config = config
        self.embed = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, family) for _ in range(config.num_layers))
        self.final_norm = family.norm(config.hidden_size, config.norm_eps)
        self.head = nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)
        self.rotary: Tensor
        self.register_buffer(
            "rotary", torch.empty(2, config.seq_len, config.head_dim // 2), persistent=False
        )
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Fill what is computed and not trained; needed again after leaving the meta device."""
        c = self.config
        if not self.rotary.is_meta:
            table = rotary_table(c.seq_len, c.head_dim, c.rotary_pct, c.rotary_base)
            self.rotary.copy_(table)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, seq] → logits [batch, seq, padded vocabulary]."""
        x = self.embed(tokens)
        rotary = self.rotary[:, : tokens.shape[1]]
        for block in self.layers:
            x = block(x, rotary)
        logits: Tensor = self.head(self.final_norm(x))
        return logits


def build_model(config: ModelConfig) -> nn.Module:
    """The model of a recipe, its weights not yet set (`init.initialize` sets them).

    Under `torch.device("meta")` no memory is taken.
    """
    return Decoder(config)
