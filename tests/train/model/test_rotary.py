"""One full-width rotation with zero frequencies equals slicing, turning and concatenating."""

from __future__ import annotations

import pytest
import torch
from rounding import assert_rounded
from torch import Tensor

from slurmllm.train.model.attention import rotary_table, rotate, slice_order

pytestmark = pytest.mark.numerics


def sliced(x: Tensor, turned: int, base: float) -> Tensor:
    """The published way (gpt-neox, transformers): only the first `turned` dimensions turn."""
    frequencies = 1.0 / base ** (torch.arange(0, turned, 2).float() / turned)
    angles = torch.outer(torch.arange(x.shape[1]).float(), frequencies)
    cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
    head, rest = x[..., :turned], x[..., turned:]
    first, second = head.chunk(2, -1)
    swapped = torch.cat([-second, first], -1)
    return torch.cat([head * cos[:, None] + swapped * sin[:, None], rest], -1)


@pytest.mark.parametrize(("head_dim", "pct"), [(16, 0.25), (16, 1.0), (12, 0.5), (32, 0.375)])
def test_equals_slice_and_concatenate(head_dim: int, pct: float) -> None:
    x = torch.randn(2, 9, 3, head_dim)
    order = slice_order(head_dim, pct)
    assert sorted(order) == list(range(head_dim))
    ours = rotate(x[..., order], rotary_table(9, head_dim, pct, 10000.0))
    expected = sliced(x, int(head_dim * pct), 10000.0)[..., order]
    # A power and an angle of up to 8, whose error turns: 8 each; sine or cosine, and two products.
    assert_rounded(ours, expected, 8 + 8 + 4)


def test_unturned_pairs_pass_unchanged() -> None:
    table = rotary_table(5, 8, 0.5, 10000.0)
    assert table.shape == (2, 5, 4)
    assert torch.equal(table[0, :, 2:], torch.ones(5, 2))
    assert torch.equal(table[1, :, 2:], torch.zeros(5, 2))
    x = torch.randn(1, 5, 2, 8)
    assert torch.equal(rotate(x, table)[..., [2, 3, 6, 7]], x[..., [2, 3, 6, 7]])


def test_precision_of_the_input_is_kept() -> None:
    x = torch.randn(1, 5, 2, 8, dtype=torch.bfloat16)
    assert rotate(x, rotary_table(5, 8, 1.0, 10000.0)).dtype == torch.bfloat16
