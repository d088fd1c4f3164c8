"""Initial weights: by seed and name, whatever the order, device or mesh."""

from __future__ import annotations

import math

import torch
from train.gang import small_config

from slurmllm.model.decoder import build_model
from slurmllm.model.init import initialize, normal

CONFIG = small_config("model.hidden_size=128", "model.ffn_hidden_size=512").recipe.model


def test_values() -> None:
    model = build_model(CONFIG)
    initialize(model, CONFIG, seed=5)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.eq(0).all(), name
        elif "norm" in name:
            assert parameter.eq(1).all(), name
        else:
            off = parameter.std().item() / CONFIG.init_std - 1
            assert abs(off) < 4 / math.sqrt(2 * parameter.numel()), name
            assert abs(parameter.mean().item()) < 4 * CONFIG.init_std / parameter.numel() ** 0.5


def test_every_parameter_has_its_own_stream() -> None:
    shape = torch.Size([4, 4])
    first = normal(shape, 1.0, 5, "a.weight")
    assert torch.equal(first, normal(shape, 1.0, 5, "a.weight"))
    assert not torch.equal(first, normal(shape, 1.0, 5, "b.weight"))
    assert not torch.equal(first, normal(shape, 1.0, 6, "a.weight"))


def test_meta_construction_gives_the_same_weights() -> None:
    plain = build_model(CONFIG)
    initialize(plain, CONFIG, seed=5)
    with torch.device("meta"):
        late = build_model(CONFIG)
    late.to_empty(device="cpu")
    initialize(late, CONFIG, seed=5)
    for (name, ours), (_, theirs) in zip(
        plain.named_parameters(), late.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    tokens = torch.randint(0, CONFIG.vocab_size, (1, 8))
    assert torch.equal(plain(tokens), late(tokens)), "buffers too"


def test_vocabulary_is_padded() -> None:
    config = CONFIG.model_copy(update={"vocab_size": 509, "vocab_pad_multiple": 128})
    model = build_model(config)
    assert model.get_parameter("embed.weight").shape[0] == 512
    assert model(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 512)
