"""Rotary positions by one full-width rotation, and masks of windows and between documents.

Dimension j of a head is paired with j + head_dim / 2 (Su et al. 2021, arXiv 2104.09864). If only a
fraction of the dimensions rotates, the other pairs have frequency zero (cos 1, sin 0) and pass
unchanged through the same rotation: nothing is sliced and concatenated, and a compiler sees one
shape at any fraction (as in the AWS GPT-NeoX runs).

CAUTION: transformers' GPT-NeoX slices the rotated dimensions off and pairs them among themselves.
Both are the same function up to a fixed order of each head's query and key dimensions, which is
`slice_order`; a conversion of weights must apply it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

if TYPE_CHECKING:
    from slurmllm.core.config.recipe import RopeScaling
    from slurmllm.core.format import Values


def rotary_dims(head_dim: int, pct: float) -> int:
    """Return the number of a head's dimensions that rotate with the position; even."""
    return int(head_dim * pct)


def rotary_table(
    seq_len: int, head_dim: int, pct: float, base: float, scaling: RopeScaling | None = None
) -> Tensor:
    """Return cosines and sines of every position, fp32 [2, seq, head_dim / 2], on the CPU."""
    # Always on the CPU: devices round cos and sin differently.
    rotated = rotary_dims(head_dim, pct)
    turning, attention_factor = _frequencies(seq_len, rotated, base, scaling)
    frequencies = torch.zeros(head_dim // 2, dtype=torch.float32, device="cpu")
    frequencies[: rotated // 2] = turning
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32, device="cpu"), frequencies)
    table = torch.stack([angles.cos(), angles.sin()])
    # Not of dimensions that do not rotate.
    table[..., : rotated // 2] *= attention_factor
    return table


def _frequencies(
    seq_len: int, rotated: int, base: float, scaling: RopeScaling | None
) -> tuple[Tensor, float]:
    """Return the frequencies, [rotated / 2], and the factor of cosines and sines.

    Rounded as by transformers 5.24, modeling_rope_utils.py.
    """
    if scaling is not None and scaling.kind == "dynamic" and rotated > 2:
        # Only longer texts get another base; the growth is 1 but for rounding.
        growth = scaling.factor * seq_len / seq_len - (scaling.factor - 1)
        base = base * growth ** (rotated / (rotated - 2))
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32, device="cpu") / max(rotated, 1)
    lengths = base**exponents
    frequencies = 1.0 / lengths
    if scaling is None or scaling.kind == "dynamic":
        return frequencies, 1.0
    if scaling.kind == "linear":
        return frequencies / scaling.factor, 1.0
    fields = scaling.model_dump()
    if scaling.kind == "llama3":
        return _llama3_frequencies(frequencies, fields), 1.0
    divided = 1.0 / (scaling.factor * lengths)
    share = 1 - _yarn_ramp(rotated, base, fields)
    return divided * (1 - share) + frequencies * share, _yarn_attention_factor(fields)


def _llama3_frequencies(frequencies: Tensor, fields: Values) -> Tensor:
    low = fields["low_freq_factor"]
    high = fields["high_freq_factor"]
    original = fields["original_max_position_embeddings"]
    factor = fields["factor"]
    lengths = 2 * math.pi / frequencies  # of one turn, tokens
    divided = torch.where(lengths > original / low, frequencies / factor, frequencies)
    share = (original / lengths - low) / (high - low)
    blended = (1 - share) * divided / factor + share * divided
    between = (lengths >= original / high) & (lengths <= original / low)
    return torch.where(between, blended, divided)


def _yarn_ramp(rotated: int, base: float, fields: Values) -> Tensor:
    """Return the share of the factor that each frequency is divided by, [rotated / 2].

    Peng et al. 2023 (arXiv 2309.00071), equations 17 and 18.
    """

    original = fields["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        return (rotated * math.log(original / (turns * 2 * math.pi))) / (2 * math.log(base))

    first = dimension(fields["beta_fast"])
    last = dimension(fields["beta_slow"])
    if fields["truncate"]:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, rotated - 1)
    if first == last:
        last += 0.001
    dimensions = torch.arange(rotated // 2, dtype=torch.float32, device="cpu")
    return ((dimensions - first) / (last - first)).clamp(0, 1)


def _yarn_attention_factor(fields: Values) -> float:
    if "attention_factor" in fields:
        return float(fields["attention_factor"])
    log = math.log(fields["factor"])
    scale = 0.1 * fields.get("mscale", 1.0) * log + 1.0
    return float(scale / (0.1 * fields.get("mscale_all_dim", 0.0) * log + 1.0))


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate queries or keys, [batch, seq, heads, head_dim], in the precision of the table.

    `table` is [2, at least seq, head_dim / 2] of `rotary_table`, or [2, batch, …].
    """
    table = table[..., : x.shape[-3], :].unsqueeze(-2)
    cos = table[0]
    sin = table[1]
    # Halves and one concatenation: 4.1 ms compiled on two CPU cores for [4, 512, 12, 64], forward
    # and backward, where a swap by flip takes 47 ms and by roll 5.7 ms.
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)


def slice_order(head_dim: int, pct: float) -> list[int]:
    """Return for each of a head's dimensions its index in transformers' layout."""
    half = head_dim // 2
    pairs = rotary_dims(head_dim, pct) // 2
    fixed = list(range(2 * pairs, head_dim))
    first = [*range(pairs), *fixed[: half - pairs]]
    return [*first, *range(pairs, 2 * pairs), *fixed[half - pairs :]]


BLOCK = 128  # queries, and keys, of a block of flex_attention's mask: torch's default


def document_starts(positions: Tensor) -> Tensor:
    """Return the index in the sequence at which each token's document begins, [batch, seq].

    `positions` [batch, seq] count from the document's begin, in the first one from the sequence's.
    """
    return torch.arange(positions.shape[1], device=positions.device) - positions


def first_keys(positions: Tensor, window: int | Tensor | None = None) -> Tensor:
    """Return the index of the first token that each token attends to, [batch, seq].

    That is its document's first, or the first of the `window` tokens that end with itself.
    """
    start = document_starts(positions)
    if window is None:
        return start
    return start.maximum(torch.arange(1, start.shape[1] + 1, device=start.device) - window)


def document_mask(positions: Tensor, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """Return the additive mask of causal attention within documents, [batch, 1, seq, seq].

    0 if the token of a row attends to that of a column, else -inf, in the type of queries and keys.
    """
    # Not booleans: torch's attention would convert them in every layer, and keep each result for
    # the backward pass.
    first = first_keys(positions, window)
    keys = torch.arange(first.shape[1], device=first.device)
    visible = (keys >= first.unsqueeze(2)).tril().unsqueeze(1)
    zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return zeros.masked_fill_(~visible, -math.inf)


def document_blocks(positions: Tensor, window: Tensor | None = None) -> BlockMask:
    """Return the mask of `document_mask` for flex_attention, which computes only what it allows.

    The blocks follow from the first keys: torch's `create_block_mask` looks at all pairs of
    tokens. The host waits for nothing. A `window` is a tensor: one graph serves all windows.
    """
    first = first_keys(positions, window).int()
    length = first.shape[1]
    # Documents follow each other, so `first` never decreases along the sequence.
    earliest = first[:, ::BLOCK].unsqueeze(-1)
    # Beyond the sequence nothing is visible, so its incomplete last block is never a full one.
    latest = F.pad(first, (0, -length % BLOCK), value=length)[:, BLOCK - 1 :: BLOCK].unsqueeze(-1)
    keys = torch.arange(0, length, BLOCK, device=first.device)
    queries = keys.unsqueeze(-1)
    full = (keys < queries) & (keys >= latest)
    partial = (keys <= queries) & (keys + BLOCK > earliest) & ~full

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first[batch, query])

    return BlockMask.from_kv_blocks(
        *_indices(partial),
        *_indices(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(length, length),
    )


def _indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each row of blocks how many are set, and their columns, then all others."""
    blocks = blocks.int().unsqueeze(1)  # one mask for all heads
    columns = blocks.argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(dim=-1, dtype=torch.int32), columns.int()
