"""Slurm's time formats, the rules' helpers, and the rules on families and meshes."""

from __future__ import annotations

import pytest

from slurmllm.config.resolve import resolve
from slurmllm.config.rules import choose, divisors, minutes_of
from slurmllm.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("90", 90),
        ("90:30", 90.5),
        ("1:30:00", 90),
        ("2-0", 2880),
        ("1-12:30", 2190),
        ("1-00:00:30", 1440.5),
    ],
)
def test_minutes_of_slurm_times(text: str, minutes: float) -> None:
    assert minutes_of(text) == minutes


def test_remedies_read_as_words() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert choose([1, 2, 4]) == "choose 1, 2 or 4"
    assert choose([3]) == "choose 3"


def faults(recipe: str, *overrides: str) -> list[str]:
    try:
        resolve(recipe, overrides=overrides)
    except ConfigError as error:
        return list(error.faults)
    return []


SCALING = (
    "model.rope_scaling.low_freq_factor=1 model.rope_scaling.high_freq_factor=4 "
    "model.rope_scaling.original_max_position_embeddings=64"
)


# tiny_*: 4 layers, hidden 192, 6 heads (llama: 2 for keys and values), vocabulary 4096, sequence
# 128, feed-forward 768 (llama: 512).
@pytest.mark.parametrize(
    ("recipe", "overrides", "fault"),
    [
        (
            "tiny_gpt3",
            "model.rotary_pct=0.5",
            "model.rotary_pct: 0.5 does not go with model.family gpt3; set 0.0, or leave it out",
        ),
        (
            "tiny_llama",
            "model.rotary_pct=0.5",
            "model.rotary_pct: 0.5 does not go with model.family llama; set 1.0, or leave it out",
        ),
        (
            "tiny_neox",
            "model.qk_norm=true",
            "model.qk_norm: true does not go with model.family neox; set false, or leave it out",
        ),
        (
            "tiny_neox",
            "model.head_dim=64",
            "model.head_dim: 64 times 6 heads is not model.hidden_size 192, as model.family neox "
            "needs; leave it out, or choose model.family llama or qwen3",
        ),
        (
            "tiny_llama",
            "model.head_dim=33",
            "model.head_dim: 33 is odd, but rotary positions need pairs of dimensions; choose 32 "
            "or 34",
        ),
        (
            "tiny_llama",
            "model.rope_scaling.kind=yarn model.rope_scaling.factor=4 " + SCALING,
            "model.rope_scaling.kind: 'yarn' (--set model.rope_scaling.kind=yarn): must be llama3, "
            "the scaling of Llama 3.1 and 3.2; leave model.rope_scaling out for positions that are "
            "not scaled",
        ),
        (
            "tiny_llama",
            "model.rope_scaling.kind=llama3 model.rope_scaling.factor=0.5 " + SCALING,
            "model.rope_scaling.factor: 0.5 is less than 1, which would shorten the context; "
            "choose 1 or more (Llama 3.1 has 8), or leave model.rope_scaling out",
        ),
        (
            "tiny_llama",
            "model.rope_scaling.kind=llama3 model.rope_scaling.factor=8 "
            + SCALING.replace("low_freq_factor=1", "low_freq_factor=4"),
            "model.rope_scaling.low_freq_factor: 4 is not less than high_freq_factor 4; "
            "choose a smaller low_freq_factor, such as 1 and 4 (Llama 3.1)",
        ),
        (
            "tiny_gpt3",
            "model.rope_scaling.kind=llama3 model.rope_scaling.factor=8 " + SCALING,
            "model.rope_scaling: model.family gpt3 has no scaled positions; leave it out, or "
            "choose model.family llama or qwen3",
        ),
        (
            "tiny_llama",
            "model.activation=gelu",
            "model.activation: gelu does not go with model.family llama; set silu, or leave it out",
        ),
        (
            "tiny_neox",
            "model.activation=silu",
            "model.activation: silu does not go with model.family neox; "
            "set gelu or gelu_tanh, or leave it out",
        ),
        (
            "tiny_gpt3",
            "model.activation=silu",
            "model.activation: silu does not go with model.family gpt3; "
            "set gelu or gelu_tanh, or leave it out",
        ),
        (
            "tiny_gpt3",
            "model.parallel_residual=true",
            "model.parallel_residual: true does not go with model.family gpt3; "
            "set false, or leave it out",
        ),
        (
            "tiny_llama",
            "model.parallel_residual=true",
            "model.parallel_residual: true does not go with model.family llama; "
            "set false, or leave it out",
        ),
        (
            "tiny_gpt3",
            "model.num_kv_heads=2",
            "model.num_kv_heads: 2: model.family gpt3 has as many key and value heads as "
            "attention heads; set 6 or leave it out",
        ),
        (
            "tiny_llama",
            "model.num_kv_heads=4",
            "model.num_kv_heads: 4 does not divide model.num_heads 6; choose 1, 2, 3 or 6",
        ),
        (
            "tiny_llama",
            "model.output_init_std=0.01",
            "model.output_init_std: 0.01 and model.scaled_init both set the standard deviation of "
            "the output matrices; leave one of them out",
        ),
        (
            "tiny_neox",
            "model.hidden_size=198 model.num_heads=6",
            "model.num_heads: 6 heads of 198 give 33 dimensions a head, but rotary positions need "
            "pairs; choose an even head width",
        ),
        (
            "tiny_llama",
            "parallel.tensor=3 model.ffn_hidden_size=576 model.vocab_pad_multiple=3",
            "parallel.tensor: 3 neither divides model.num_kv_heads 2 nor is a multiple of it; "
            "choose 1, 2 or 6",
        ),
        (
            "tiny_llama",
            "parallel.tensor=6 model.vocab_size=4098",
            "parallel.tensor: 6 does not divide the 32 blocks of 16 gates of "
            "model.ffn_hidden_size 512; choose 1 or 2",
        ),
        (
            "tiny_llama",
            "parallel.tensor=2 model.ffn_hidden_size=528",
            "parallel.tensor: 2 does not divide the 33 blocks of 16 gates of "
            "model.ffn_hidden_size 528; choose 1 or 3",
        ),
        (
            "tiny_neox",
            "parallel.tensor=2 model.ffn_hidden_size=513",
            "parallel.tensor: 2 does not divide model.ffn_hidden_size 513; choose 1 or 3",
        ),
        (
            "tiny_neox",
            "parallel.tensor=3",
            "parallel.tensor: 3 does not divide the padded vocabulary 4096; "
            "set model.vocab_pad_multiple to a multiple of 3",
        ),
        (
            "tiny_gpt3",
            "parallel.tensor=3 model.vocab_pad_multiple=3",
            "parallel.tensor: 3 does not divide model.seq_len 128, the rows of the table of "
            "positions; choose 1, 2 or 4",
        ),
        (
            "tiny_neox",
            "parallel.pipeline=3",
            "parallel.pipeline: 3 does not divide 4 layers; choose 1, 2 or 4",
        ),
        (
            "tiny_neox",
            "parallel.pipeline=2 parallel.virtual_pipeline=4",
            "parallel.virtual_pipeline: 4 does not divide the 2 layers of each of 2 pipeline "
            "stages; choose 1 or 2",
        ),
        (
            "tiny_neox",
            "parallel.virtual_pipeline=2",
            "parallel.virtual_pipeline: 2 chunks a stage need more stages than one; set "
            "parallel.pipeline, or leave it out",
        ),
        (
            "tiny_neox",
            "parallel.sequence=true parallel.tensor=2 model.seq_len=127",
            "parallel.sequence: model.seq_len 127 is not a multiple of parallel.tensor 2; change "
            "one of them or set parallel.sequence=false",
        ),
        (
            "tiny_neox",
            "train.micro_batch=3",
            "train.micro_batch: 3 does not divide train.global_batch 8; choose 1, 2, 4 or 8",
        ),
    ],
)
def test_one_fault_with_value_rule_and_remedy(recipe: str, overrides: str, fault: str) -> None:
    assert faults(recipe, *overrides.split()) == [fault]


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("tiny_neox", "model.activation=gelu_tanh model.parallel_residual=false"),
        ("tiny_neox", "model.rotary_pct=1 model.tied_embeddings=true model.num_kv_heads=6"),
        ("tiny_neox", "model.family=llama"),
        ("tiny_neox", "model.family=gpt3 model.mlp_bias=false"),
        ("tiny_gpt3", "model.hidden_size=198"),  # 33 dimensions a head, none of which turns
        ("tiny_gpt3", "model.activation=gelu model.tied_embeddings=false"),
        ("tiny_llama", "model.attention_bias=true model.mlp_bias=true model.num_kv_heads=1"),
        ("tiny_llama", "parallel.tensor=6 model.ffn_hidden_size=576 model.vocab_pad_multiple=6"),
        ("tiny_llama", "model.scaled_init=false model.output_init_std=0.01"),
        (
            "tiny_llama",
            "model.family=qwen3 model.head_dim=64 model.num_heads=5 model.num_kv_heads=1",
        ),
        ("tiny_neox", "model.head_dim=32"),
        ("tiny_neox", "parallel.pipeline=2 parallel.virtual_pipeline=2"),
        ("tiny_neox", "train.micro_batch=auto"),
    ],
)
def test_what_is_allowed(recipe: str, overrides: str) -> None:
    assert faults(recipe, *overrides.split()) == []


@pytest.mark.parametrize(
    ("steps", "fault"),
    [
        ("[12, 10]", "profile.steps: the first step 12 is after the last, 10; swap them"),
        (
            "[10, 5000]",
            "profile.steps: [10, 5000]: step 5000 is after the last of train.steps 200; choose "
            "steps up to 200",
        ),
        (
            "[10, 110]",
            "profile.steps: [10, 110] are 101 steps, and traces grow with each; choose 100 or "
            "fewer, such as [10, 12]",
        ),
    ],
)
def test_profiled_steps(steps: str, fault: str) -> None:
    assert faults("tiny_neox", "train.steps=200", f"profile.steps={steps}") == [fault]
    assert faults("tiny_neox", "train.steps=200", "profile.steps=[101, 200]") == []
    assert faults("tiny_neox", "profile.steps=[3, 4]", "profile.ranks=[]") != []
    assert faults("tiny_neox", "profile.steps=[0, 4]") != []


def test_evaluations_need_a_text() -> None:
    (fault,) = faults("tiny_neox", "eval.every_steps=5")
    assert fault.startswith("eval.every_steps: 5, but no text is held out; set data.validation")
    assert faults("tiny_neox", "eval.every_steps=5", "eval.corpora={x: a.arrow}") == []
    assert faults("tiny_neox", "eval.every_steps=5", "eval.corpora.x=a.arrow") == []
    assert faults("tiny_neox", "eval.every_steps=5", "data.validation=0.1") == []


def test_the_share_of_rotary_dimensions_that_is_proposed_is_valid() -> None:
    heads = ("model.num_heads=4", "model.hidden_size=48")
    (fault,) = faults("tiny_neox", *heads)
    proposed = fault.rpartition(" ")[2]
    assert faults("tiny_neox", *heads, f"model.rotary_pct={proposed}") == []
