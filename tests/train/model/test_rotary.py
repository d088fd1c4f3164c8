"""One full-width rotation with zero frequencies equals slicing, turning and concatenating."""

from typing import Any

import mesh_pool
import pytest
import torch
from amounts import amount
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mesh_pool import small_run
from rounding import assert_rounded, forward_terms
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from slurmllm.core.config.families import FAMILIES
from slurmllm.core.config.recipe import RopeScaling
from slurmllm.train.model.attention import (
    document_blocks,
    document_mask,
    rotary_table,
    rotate,
    slice_order,
)
from slurmllm.train.model.decoder import CausalCore, build_model
from slurmllm.train.model.init import initialize
from train.model.test_against_transformers import rope_scalings

transformers = pytest.importorskip("transformers")

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


@settings(max_examples=amount(100, of=3000), derandomize=True)
@given(
    scaling=rope_scalings(),
    head_dim=st.sampled_from([4, 6, 10, 24, 80, 128]),
    pct=st.sampled_from([0.5, 1.0]),
    base=st.sampled_from([10.0, 5e5, 1234567.8]),
    seq_len=st.sampled_from([7, 100, 8191]),
)
def test_scaled_frequencies_are_transformers_(
    scaling: dict[str, Any], head_dim: int, pct: float, base: float, seq_len: int
) -> None:
    rotated = int(head_dim * pct) // 2 * 2
    config = transformers.GPTNeoXConfig(
        max_position_embeddings=seq_len,
        rope_parameters={
            **{"rope_type": scaling["kind"], "rope_theta": base},
            **{"partial_rotary_factor": rotated / head_dim},
            **{name: value for name, value in scaling.items() if name != "kind"},
        },
    )
    config.head_dim = head_dim
    assume(rotated > 2)  # transformers divides by rotated - 2
    compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[scaling["kind"]]
    frequencies, factor = compute(config)
    angles = torch.outer(torch.arange(seq_len).float(), frequencies)
    parsed = RopeScaling.model_validate(scaling)
    table = rotary_table(seq_len, head_dim, rotated / head_dim, base, parsed)
    half = rotated // 2
    assert torch.equal(table[..., :half], torch.stack([angles.cos(), angles.sin()]) * factor)
    assert torch.equal(table[0, :, half:], torch.ones(seq_len, head_dim // 2 - half))


def test_precision_of_the_input_is_kept() -> None:
    x = torch.randn(1, 5, 2, 8, dtype=torch.bfloat16)
    assert rotate(x, rotary_table(5, 8, 1.0, 10000.0)).dtype == torch.bfloat16


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() & mesh_pool.FAMILIES))
@settings(max_examples=amount(3, of=20), derandomize=True)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=9))
def test_packed_documents_equal_single_ones(family: str, lengths: list[int]) -> None:
    config = small_run(family, 1, 1, 1, "model.seq_len=108", "model.init_std=0.3").recipe.model
    decoder, terms = build_model(config), forward_terms(config)
    initialize(decoder, config, seed=1)
    text = torch.randint(0, 61, (sum(lengths),), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(length) for length in lengths])
    # The second row is one document over all.
    packed = decoder(
        text.expand(2, -1), positions=torch.stack([positions, torch.arange(len(text))])
    )
    single = [decoder(document.unsqueeze(0)) for document in text.split(lengths)]
    assert_rounded(packed[:1], torch.cat(single, dim=1), terms)
    assert_rounded(packed[1:], decoder(text.unsqueeze(0)), terms)


def test_mask() -> None:
    mask = document_mask(torch.tensor([[0, 1, 0, 1, 0]]), torch.bfloat16)
    assert mask.dtype == torch.bfloat16
    assert mask[0, 0].exp().int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]


def packed(length: int, longest: int, seed: int) -> Tensor:
    """Positions in random documents, of which the last one is cut."""
    generator = torch.Generator().manual_seed(seed)
    pieces, total = [], 0
    while total < length:
        pieces.append(torch.arange(int(torch.randint(1, longest + 1, (), generator=generator))))
        total += len(pieces[-1])
    return torch.cat(pieces)[:length]


@pytest.mark.parametrize("documents", [False, True])
def test_a_window_masks_what_is_farther_away(documents: bool) -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]]) if documents else torch.arange(7).expand(1, 7)
    mask = document_mask(positions, torch.float32, 3)[0, 0] == 0
    for query in range(7):
        for key in range(7):
            same = not documents or (query < 3) == (key < 3)
            assert mask[query, key] == (same and query - 3 < key <= query)
    whole = document_mask(positions, torch.float32, 7)
    assert torch.equal(whole, document_mask(positions, torch.float32))


@pytest.mark.parametrize("length", [1, 127, 128, 129, 300, 768])
@pytest.mark.parametrize(
    ("longest", "window"),
    [(3, None), (140, None), (400, None), (2000, None), (2000, 1), (2000, 128), (400, 130)],
)
def test_blocks_are_those_that_torch_finds_token_by_token(
    length: int, longest: int, window: int | None
) -> None:
    positions = torch.stack([packed(length, longest, seed) for seed in range(3)])
    mask = document_blocks(positions, None if window is None else torch.tensor(window))
    rows, columns = torch.arange(length).unsqueeze(1), torch.arange(length)
    for row in range(3):
        visible = mask.mask_mod(torch.tensor(row), torch.tensor(0), rows, columns)
        assert torch.equal(visible, document_mask(positions, torch.float32, window)[row, 0] == 0)
    expected = create_block_mask(mask.mask_mod, 3, None, length, length, device="cpu")
    assert mask.shape == expected.shape
    for name in BlockMask._TENSOR_ATTRS:
        tensor, other = getattr(mask, name), getattr(expected, name)
        assert other is None if tensor is None else torch.equal(tensor, other), name


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # Inductor's own
@pytest.mark.parametrize(
    ("compiler", "length", "queries", "keys", "window", "special"),
    [
        ("eager", 128, 4, 4, None, {}),
        ("eager", 301, 4, 4, None, {}),
        ("eager", 301, 6, 2, 140, {"scale": 0.3, "softcap": 1.5}),
        pytest.param("inductor", 301, 6, 2, 140, {}, marks=pytest.mark.long),
        pytest.param("inductor", 301, 6, 2, 140, {"softcap": 1.5}, marks=pytest.mark.long),
    ],
)
def test_attention_by_blocks_equals_the_dense_mask(
    compiler: str, length: int, queries: int, keys: int, window: int | None, special: dict[str, Any]
) -> None:
    positions = torch.stack([packed(length, longest, 5) for longest in (9, 150, 2000)])
    torch.compiler.reset()  # Dynamo has at most eight graphs of a function
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(3, length, n, 16, generator=generator) for n in (queries, keys, keys))
    core, none = CausalCore(use_rotary=False, **special), torch.empty(0)
    compiled = torch.compile(core, fullgraph=True, dynamic=False, backend=compiler)
    make_mask = torch.compile(document_blocks, fullgraph=True, dynamic=False, backend=compiler)
    mask = make_mask(positions, None if window is None else torch.tensor(window))
    with torch.no_grad():  # torch has no backward pass of it on CPUs
        expected = core(q, k, v, none, document_mask(positions, torch.float32, window))
        for dtype, tolerance in ((torch.float32, 3e-6), (torch.bfloat16, 2e-2)):
            inputs = (x.to(dtype) for x in (q, k, v))
            out = compiled(*inputs, none, mask)
            assert torch.allclose(out.float(), expected, rtol=tolerance, atol=tolerance)
