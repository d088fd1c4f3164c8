"""A two-layer transformer whose parameters are views of one flat vector.

So an optimizer is a few vector operations, and a rank's gradient is one vector. The weights of the
normalization layers are stored twice, as on two sequence-parallel ranks: each copy processes half
of the sequence, and the copies stay equal only if their gradients are all-reduced.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from departures.corpus import VOCABULARY, Pass
from departures.settings import Number, Settings

LAYERS, HIDDEN, HEADS, FFN = 2, 32, 2, 96
NORM_COPIES = 2
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Layout:
    """Names and places of the weights in the vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        parts = torch.split(vector, list(self.sizes))
        shaped = zip(self.names, parts, self.shapes, strict=True)
        return {name: part.view(shape) for name, part, shape in shaped}


@lru_cache(maxsize=1)
def layout() -> Layout:
    shapes: dict[str, tuple[int, ...]] = {"embedding": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {
            f"{layer}.norm1": (NORM_COPIES, HIDDEN),
            f"{layer}.qkv": (3 * HIDDEN, HIDDEN),
            f"{layer}.qkv.bias": (3 * HIDDEN,),
            f"{layer}.out": (HIDDEN, HIDDEN),
            f"{layer}.out.bias": (HIDDEN,),
            f"{layer}.norm2": (NORM_COPIES, HIDDEN),
            f"{layer}.up": (FFN, HIDDEN),
            f"{layer}.up.bias": (FFN,),
            f"{layer}.down": (HIDDEN, FFN),
            f"{layer}.down.bias": (HIDDEN,),
        }
    shapes |= {"norm": (NORM_COPIES, HIDDEN), "head": (VOCABULARY, HIDDEN)}
    return Layout(tuple(shapes), tuple(shapes.values()), tuple(map(math.prod, shapes.values())))


@cache
def mask(*parts: str) -> Tensor:
    """Returns 1.0 for weights whose name has one of the parts, else 0.0. [weights]"""
    flags = [
        torch.full((size,), float(any(part in name for part in parts)))
        for name, size in zip(layout().names, layout().sizes, strict=True)
    ]
    return torch.cat(flags)


def initial_weights(settings: Settings) -> Tensor:
    """Returns the weights before the first step. [weights]"""
    seed = settings.seed if settings.init_seed is None else settings.init_seed
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for name, size in zip(layout().names, layout().sizes, strict=True):
        scale = 0.05 * settings.init_scale
        if name.endswith((".out", ".down")):
            scale /= math.sqrt(2 * LAYERS)
        drawn = scale * torch.randn(size, generator=generator)
        if "norm" in name:
            drawn = torch.ones(size)
        elif name.endswith("bias"):
            drawn = torch.zeros(size)
        parts.append(drawn)
    return torch.cat(parts)


def loss_sum(vector: Tensor, batch: Pass, settings: Settings, generator: torch.Generator) -> Tensor:
    """Returns the sum of the losses of the target tokens, in fp32.

    Args:
        vector: Weights, which the result can be differentiated by. [weights]
        batch: Sequences.
        settings: Model, precision and kernels.
        generator: Source of the dropout.
    """
    number = settings.compute
    logits = _logits(layout().views(_cast(vector, number)), batch, settings, generator)
    logits = logits.to(torch.bfloat16).float() if settings.loss_in_bf16 else logits.float()
    if settings.fused:
        labels = batch.labels.reshape(-1)
        each = F.cross_entropy(logits.reshape(-1, VOCABULARY), labels, reduction="none")
        return (each * batch.counts.reshape(-1)).sum()
    chosen = logits.gather(-1, batch.labels.unsqueeze(-1)).squeeze(-1)
    each = torch.logsumexp(logits, dim=-1) - chosen
    if settings.loss_in_bf16:
        each = each + (each.to(torch.bfloat16).float() - each).detach()
    return (each * batch.counts).sum()


def round_to_tf32(values: Tensor) -> Tensor:
    """Round to a mantissa of 10 bits, as tensor cores read fp32; gradients pass unchanged."""
    bits = values.detach().contiguous().view(torch.int32)
    rounded = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return values + (rounded - values).detach()


def _cast(values: Tensor, number: Number) -> Tensor:
    if number == "tf32":
        return round_to_tf32(values)
    return values if number == "fp32" else values.to(_DTYPES[number])


def _logits(
    weights: dict[str, Tensor], batch: Pass, settings: Settings, generator: torch.Generator
) -> Tensor:
    """Logits of all positions. [sequences, seq_len, vocabulary]"""

    def read(values: Tensor) -> Tensor:
        return round_to_tf32(values) if settings.compute == "tf32" else values

    def drop(values: Tensor) -> Tensor:
        if not settings.dropout:
            return values
        kept = torch.rand(values.shape, generator=generator) >= settings.dropout
        return values * kept.to(values.dtype) / (1 - settings.dropout)

    bias_copies = 2 if settings.forward_fault == "bias_by_rank" else 1
    x = drop(weights["embedding"][batch.tokens])
    allowed = _allowed(batch.documents)
    cos, sin = _rotation(settings.seq_len, settings.rope_base)
    for layer in range(LAYERS):
        own = {name: weights[f"{layer}.{name}"] for name in _LAYER_NAMES}
        y = read(_norm(x, own["norm1"], settings))
        qkv = F.linear(y, own["qkv"], own["qkv.bias"])
        y = _attention(qkv, allowed, cos.to(x.dtype), sin.to(x.dtype), settings)
        y = F.linear(read(y), own["out"]) + bias_copies * own["out.bias"]
        x = x + settings.residual_scale * drop(y)
        y = read(_norm(x, own["norm2"], settings))
        y = _activation(F.linear(y, own["up"], own["up.bias"]), settings)
        if settings.forward_fault == "half_of_ffn_zero":
            y = torch.cat((y[..., : FFN // 2], torch.zeros_like(y[..., FFN // 2 :])), dim=-1)
        y = F.linear(read(y), own["down"]) + bias_copies * own["down.bias"]
        x = x + settings.residual_scale * drop(y)
    x = read(_norm(x, weights["norm"], settings))
    return F.linear(x, weights["embedding" if settings.tied else "head"])


_LAYER_NAMES = (
    "norm1", "qkv", "qkv.bias", "out", "out.bias", "norm2", "up", "up.bias", "down", "down.bias",
)  # fmt: skip


def _norm(x: Tensor, weight: Tensor, settings: Settings) -> Tensor:
    half = x.shape[1] // NORM_COPIES
    if settings.fused:
        normed = F.rms_norm(x, (HIDDEN,), eps=settings.norm_eps)
    else:
        normed = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + settings.norm_eps)
    return torch.cat((normed[:, :half] * weight[0], normed[:, half:] * weight[1]), dim=1)


def _activation(x: Tensor, settings: Settings) -> Tensor:
    match settings.activation:
        case "relu":
            return F.relu(x)
        case "silu":
            return F.silu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
    return F.gelu(x) if settings.fused else x * 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))


def _attention(
    qkv: Tensor, allowed: Tensor, cos: Tensor, sin: Tensor, settings: Settings
) -> Tensor:
    count, length, _ = qkv.shape
    q, k, v = qkv.view(count, length, 3, HEADS, HIDDEN // HEADS).permute(2, 0, 3, 1, 4)
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    scale = settings.attention_scale / math.sqrt(HIDDEN // HEADS)
    if settings.fused:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale)
    else:
        scores = (q @ k.transpose(-1, -2)) * scale
        y = scores.masked_fill(~allowed, -1e4).softmax(dim=-1) @ v
    if settings.forward_fault == "heads_dropped":
        y = torch.cat((y[:, : HEADS // 2], torch.zeros_like(y[:, HEADS // 2 :])), dim=1)
    return y.transpose(1, 2).reshape(count, length, HIDDEN)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def _allowed(documents: Tensor) -> Tensor:
    """Which tokens attend to which: earlier ones of their document. [sequences, 1, to, from]"""
    length = documents.shape[1]
    same = documents.unsqueeze(2) == documents.unsqueeze(1)
    return (same & torch.ones(length, length, dtype=torch.bool).tril()).unsqueeze(1)


@lru_cache(maxsize=16)
def _rotation(length: int, base: float) -> tuple[Tensor, Tensor]:
    size = HIDDEN // HEADS // 2
    angles = torch.outer(torch.arange(length), base ** (-torch.arange(size) / size))
    return torch.cat((angles.cos(),) * 2, dim=-1), torch.cat((angles.sin(),) * 2, dim=-1)
