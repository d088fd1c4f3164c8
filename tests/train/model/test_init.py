"""Initial weights: by seed and name, whatever the order, device or mesh."""

import math

import pytest
import torch
from amounts import amount
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmllm.core.config.recipe import ModelConfig
from slurmllm.core.config.resolve import resolve
from slurmllm.train.model.decoder import build_model
from slurmllm.train.model.init import initialize, normal, standard_deviation
from train.gang import small_config

pytestmark = pytest.mark.numerics

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
    shape, region = (4, 4), (slice(0, 4), slice(0, 4))
    first = normal(shape, 1.0, 5, "a.weight", region)
    assert torch.equal(first, normal(shape, 1.0, 5, "a.weight", region))
    assert not torch.equal(first, normal(shape, 1.0, 5, "b.weight", region))
    assert not torch.equal(first, normal(shape, 1.0, 6, "a.weight", region))


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


def relative_std(config: ModelConfig) -> dict[str, float]:
    """Parameter → its standard deviation, measured, in units of the recipe's."""
    model = build_model(config)
    initialize(model, config, seed=5)
    return {
        name: parameter.std().item() / config.init_std
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2
    }


@pytest.mark.parametrize("family", ["llama", "neox"])  # with a gate and without
@pytest.mark.parametrize(
    ("how", "factor"),
    [({}, 1.0), ({"scaled_init": True}, 1 / math.sqrt(4)), ({"output_init_std": 0.005}, 0.25)],
)
def test_output_matrices_may_be_smaller(family: str, how: dict[str, object], factor: float) -> None:
    config = ModelConfig.model_validate(
        {
            "family": family,
            "num_layers": 2,
            "hidden_size": 128,
            "num_heads": 4,
            "ffn_hidden_size": 512,
            "vocab_size": 512,
            "seq_len": 128,
            **how,
        }
    )
    for name, measured in relative_std(config).items():
        scaled = name.endswith(("attention.out.weight", "mlp.down.weight"))
        assert measured == pytest.approx(factor if scaled else 1.0, rel=0.03), name


@settings(max_examples=amount(8, of=60), derandomize=True)
@given(st.data())
def test_any_rectangle_is_a_slice_of_the_whole(data: st.DataObject) -> None:
    """Drawn across the edges of tiles, which are 64 by 1024."""
    draw = data.draw
    shape = draw(st.tuples(st.integers(1, 200), st.sampled_from([1, 30, 1023, 1024, 2500])))
    top, left = (draw(st.integers(0, size - 1)) for size in shape)
    height = draw(st.integers(0, shape[0] - top))
    width = draw(st.integers(0, shape[1] - left))
    whole = normal(shape, 0.5, 5, "a.weight", tuple(slice(0, size) for size in shape))
    region = slice(top, top + height), slice(left, left + width)
    assert torch.equal(normal(shape, 0.5, 5, "a.weight", region), whole[region])


def expected_norm(config: ModelConfig) -> float:
    """The parameter norm at step 0: norms' weights are 1, biases 0, matrices sqrt(size) · std."""
    with torch.device("meta"):
        named = list(build_model(config).named_parameters())
    squares = 0.0
    for name, parameter in named:
        matrix = parameter.dim() > 1
        std = standard_deviation(config, name) if matrix else float(name.endswith("norm.weight"))
        squares += parameter.numel() * std**2
    return math.sqrt(squares)


def test_initial_parameter_norm_of_hlat() -> None:
    """AWS's post on HLAT reports an initial parameter norm of around 1,600."""
    config = resolve("llama2_7b").recipe.model
    elements = 32 * (3 * 4096**2 + 2 * 4096 * 11008) + 2 * 32000 * 4096
    scaled = 32 * (4096**2 + 4096 * 11008) / (2 * 32)
    by_hand = math.sqrt((elements + scaled) * 0.021**2 + (2 * 32 + 1) * 4096)
    assert expected_norm(config) == pytest.approx(by_hand, rel=1e-12)
    assert by_hand == pytest.approx(1542, abs=0.5)
    paper = expected_norm(config.model_copy(update={"init_std": 0.02}))
    assert paper == pytest.approx(1477, abs=0.5)

    small = config.model_copy(
        update={
            "num_layers": 3,
            "hidden_size": 256,
            "num_heads": 4,
            "num_kv_heads": 4,
            "ffn_hidden_size": 688,
            "vocab_size": 2000,
        }
    )
    model = build_model(small)
    initialize(model, small, seed=1234)
    norm = math.sqrt(sum(float(p.detach().double().pow(2).sum()) for p in model.parameters()))
    # 3 million normal numbers: the norm's relative standard error is 1 / sqrt(2 · 3e6) = 4e-4.
    assert norm == pytest.approx(expected_norm(small), rel=2e-3)
