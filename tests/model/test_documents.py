"""Documents that are packed into one sequence do not see each other."""

from __future__ import annotations

import pytest
import torch
from amounts import amount
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import assert_rounded, forward_terms

from slurmllm.config.families import FAMILIES
from slurmllm.config.recipe import ModelConfig
from slurmllm.model.attention import document_mask
from slurmllm.model.decoder import build_model
from slurmllm.model.init import initialize

pytestmark = pytest.mark.numerics


def model_config(family: str) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "family": family,
            "num_layers": 2,
            "hidden_size": 32,
            "num_heads": 4,
            "ffn_hidden_size": 64,
            "vocab_size": 61,
            "seq_len": 108,
            "init_std": 0.3,
        }
    )


@pytest.mark.parametrize("family", sorted(FAMILIES))
@settings(max_examples=amount(5, of=20), derandomize=True)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=9))
def test_packed_documents_equal_single_ones(family: str, lengths: list[int]) -> None:
    config = model_config(family)
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
