"""Slurm's time formats, the rules' helpers, and the rules on families and meshes."""

import pytest

from slurmllm.core.config.resolve import resolve
from slurmllm.core.config.rules import choose, divisors, minutes_of
from slurmllm.core.errors import ConfigError


def test_helpers() -> None:
    times = {"90": 90, "90:30": 90.5, "1:30:00": 90, "2-0": 2880, "1-12:30": 2190}
    times["1-00:00:30"] = 1440.5
    assert {text: minutes_of(text) for text in times} == times
    assert (divisors(12), divisors(9)) == ([1, 2, 3, 4, 6, 12], [1, 3, 9])
    assert choose([1, 2, 4]) == "choose 1, 2 or 4"
    assert choose([3]) == "choose 3"


def faults(recipe: str, *overrides: str) -> list[str]:
    try:
        resolve(recipe, overrides=overrides)
    except ConfigError as error:
        return list(error.faults)
    return []


# tiny_*: 4 layers, hidden 192, 6 heads (llama: 2 for keys and values), vocabulary 4096, sequence
# 128, feed-forward 768 (llama: 512). ROPE is a valid scaling.
BROKEN = """
tiny_gpt3  | model.rotary_pct=0.5 | 0.5 does not go with model.family gpt3; set 0.0, or leave it out
tiny_neox  | model.qk_norm=true | true does not go with model.family neox; set false, or leave
tiny_neox  | model.activation=silu | does not go with model.family neox; set gelu or gelu_tanh, or
tiny_neox  | model.head_dim=64 | 64 times 6 heads is not model.hidden_size 192, as model.family neox
tiny_llama | model.head_dim=33 | 33 is odd, but rotary positions need pairs of dimensions; choose 32
tiny_neox  | model.hidden_size=198 | 6 heads of 198 give 33 dimensions a head, but rotary positions
tiny_neox  | model.hidden_size=193 | 6 does not divide model.hidden_size 193; choose
tiny_llama | ROPE kind=su | (--set model.rope_scaling.kind=su): must be 'llama3', 'yarn', 'linear'
tiny_llama | ROPE kind=yarn | low_freq_factor is not a field of the scaling yarn, which has factor,
tiny_llama | ROPE beta_fast=32 | beta_fast is not a field of the scaling llama3, which has factor, l
tiny_llama | ROPE low_freq_factor=null | low_freq_factor must be set with kind llama3
tiny_llama | YARN beta_slow=33 | beta_slow 33 is greater than beta_fast 32; choose a smaller one
tiny_llama | YARN mscale=1 | mscale and mscale_all_dim must be set together, or left out
tiny_llama | YARN model.rotary_base=1 | 1 does not go with the scaling yarn; choose a base above 1
tiny_llama | ROPE factor=0.5 | factor=0.5): must be greater than or equal to 1
tiny_llama | ROPE low_freq_factor=4 | low_freq_factor: 4 is not less than high_freq_factor 4; choose
tiny_gpt3  | ROPE | gpt3 has no scaled positions; leave it out, or choose model.family llama, qwen3
tiny_llama | model.attention_softcap=2.0 | model.attention_softcap: model.family llama has none; le
tiny_llama | model.attention_pattern=[{"window":7}] | model.family llama has none; leave it out, or
tiny_llama | GEMMA model.attention_pattern=[{"window":0}] | window: 0: must be greater than 0
tiny_llama | GEMMA model.attention_pattern=[{"rope":0}] | rope: 0: must be none, or a base above
tiny_llama | model.query_pre_attn_scalar=0 | must be greater than 0
tiny_llama | model.query_pre_attn_scalar=30.5 | 30.5 (--set model.query_pre_attn_scalar=30.5): must
tiny_mistral | PATTERN[{"window":4},{}] | has layers with and without a window; give all the same
tiny_smollm3 | PATTERN[{"window":4},{"window":5}] | has windows of several lengths; choose one
tiny_smollm3 | PATTERN[{"rope":"all"}] | attention_pattern.rope: 'all': must be none, or a base
tiny_smollm3 | PATTERN[{"rope":9.5}] | has layers with another base; set model.rotary_base for all
tiny_olmo3 | PATTERN[{"window":4},{"rope":"none"}] | has layers without rotary positions; leave rop
tiny_gemma3 | PATTERN[{"rope":9.5},{"rope":8.5}] | has several rotary bases for layers with the sam
tiny_llama | train.fp8_recipe=rowwise | rowwise is for train.precision fp8_mixed, and train.preci
tiny_llama | train.fp8_recipe=rowwise | leave it out (of a run: --set train.fp8_recipe=tensorwise),
tiny_llama | optim.adamw_lr=1 | leave it out (of a run: --set optim.adamw_lr=null), or set optim.nam
tiny_gpt3  | model.num_kv_heads=2 | gpt3 has as many key and value heads as attention heads; set 6
tiny_llama | model.num_kv_heads=4 | 4 does not divide model.num_heads 6; choose 1, 2, 3 or 6
tiny_llama | model.output_init_std=0.01 | 0.01 and model.scaled_init both set the standard deviation
tiny_llama | parallel.tensor=3 FFN=576 PAD=3 | 3 neither divides model.num_kv_heads 2 nor is a multi
tiny_llama | parallel.tensor=6 model.vocab_size=4098 | the 32 blocks of 16 gates of model.ffn_hidden
tiny_neox  | parallel.tensor=2 FFN=513 | 2 does not divide model.ffn_hidden_size 513; choose 1 or 3
tiny_neox  | parallel.tensor=3 | padded vocabulary 4096; set model.vocab_pad_multiple to a multiple
tiny_gpt3  | parallel.tensor=3 PAD=3 | 3 does not divide model.seq_len 128, the rows of the table of
tiny_neox  | parallel.pipeline=3 | parallel.pipeline: 3 does not divide 4 layers; choose 1, 2 or 4
tiny_neox  | parallel.pipeline=2 parallel.virtual_pipeline=4 | 4 does not divide the 2 layers of eac
tiny_neox  | parallel.virtual_pipeline=2 | 2 chunks a stage need more stages than one; set
tiny_neox  | parallel.sequence=true parallel.tensor=2 model.seq_len=127 | 127 is not a multiple of p
tiny_neox  | parallel.shard_nodes=1 parallel.zero=0 | parallel.zero 0 shards nothing; set parallel.z
tiny_neox  | train.micro_batch=3 | 3 does not divide train.global_batch 8; choose 1, 2, 4 or 8
tiny_neox  | profile.steps=[12,10] | the first step 12 is after the last, 10; swap them
tiny_neox  | profile.steps=[10,5000] | step 5000 is after the last of train.steps 120; choose steps
tiny_neox  | train.steps=200 profile.steps=[10,110] | [10, 110] are 101 steps, and traces grow with
tiny_neox  | eval.every_steps=5 | eval.every_steps: 5, but no text is held out; set data.validation
"""
ROPE = {"kind": "llama3", "factor": "8", "low_freq_factor": "1", "high_freq_factor": "4"}
ROPE["original_max_position_embeddings"] = "64"
YARN = {"kind": "yarn", "factor": "8", "original_max_position_embeddings": "64"}


def overrides_of(text: str) -> list[str]:
    words = text.replace("FFN", "model.ffn_hidden_size").replace("PAD", "model.vocab_pad_multiple")
    words = words.replace("GEMMA", "model.family=gemma3 model.activation=gelu_tanh")
    words = words.replace("PATTERN", "model.attention_pattern=")
    first, *others = words.split()
    if first not in ("ROPE", "YARN"):
        return [first, *others]
    changes = dict(other.split("=") for other in others)
    scaling = (ROPE if first == "ROPE" else YARN) | changes
    names = {name: name if "." in name else f"model.rope_scaling.{name}" for name in scaling}
    return [f"{names[name]}={value}" for name, value in scaling.items()]


@pytest.mark.parametrize("case", BROKEN.strip().splitlines())
def test_one_fault_with_value_rule_and_remedy(case: str) -> None:
    recipe, overrides, text = (part.strip() for part in case.split("|"))
    (fault,) = faults(recipe, *overrides_of(overrides))
    assert text in fault


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("tiny_neox", "model.activation=gelu_tanh model.parallel_residual=false"),
        ("tiny_neox", "model.rotary_pct=1 model.tied_embeddings=true model.num_kv_heads=6"),
        ("tiny_gpt3", "model.hidden_size=198"),  # 33 dimensions a head, none of which turns
        ("tiny_llama", "parallel.tensor=6 FFN=576 PAD=6"),
        ("tiny_llama", "model.scaled_init=false model.output_init_std=0.01"),
        ("tiny_llama", "ROPE"),
        ("tiny_llama", "YARN mscale=0.7 mscale_all_dim=1 truncate=false"),
        ("tiny_llama", "YARN low_freq_factor=null high_freq_factor=null"),
        (
            "tiny_llama",
            "model.family=qwen3 model.head_dim=64 model.num_heads=5 model.num_kv_heads=1",
        ),
        ("tiny_neox", "model.head_dim=32"),
        ("tiny_neox", "parallel.pipeline=2 parallel.virtual_pipeline=2"),
        ("tiny_neox", "train.micro_batch=auto"),
        ("tiny_neox", "train.steps=200 profile.steps=[101,200]"),
        ("tiny_neox", "eval.every_steps=5 eval.corpora.x=a.arrow"),
        ("tiny_neox", "eval.every_steps=5 data.validation=0.1"),
    ],
)
def test_what_is_allowed(recipe: str, overrides: str) -> None:
    assert faults(recipe, *overrides_of(overrides)) == []


def test_layers_without_rotary_positions_need_a_model_with_them() -> None:
    pct, rope = faults("tiny_smollm3", "model.rotary_pct=0")  # has layers with rope: none
    assert pct.startswith("model.rotary_pct: 0")
    assert "rope is only for rotary positions, which the model does not have" in rope
    assert faults("tiny_smollm3", "model.rotary_pct=0", "model.attention_pattern=[{}]") == [pct]


def test_the_share_of_rotary_dimensions_that_is_proposed_is_valid() -> None:
    heads = ("model.num_heads=4", "model.hidden_size=48")
    (fault,) = faults("tiny_neox", *heads)
    proposed = fault.rpartition(" ")[2]
    assert faults("tiny_neox", *heads, f"model.rotary_pct={proposed}") == []
