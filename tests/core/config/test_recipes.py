"""The shipped recipes have their sources' figures."""

import math
from collections import Counter

import pytest

from slurmllm.core.config.profiles import available
from slurmllm.core.config.recipe import Recipe
from slurmllm.core.config.resolve import recipes_dir, resolve


def recipe(name: str) -> Recipe:
    return resolve(name).recipe


# Layers, hidden size, heads, key and value heads, feed-forward size, sequence length; learning
# rate, its end, steps of warm-up, steps in all, weight decay; global batch, TP, PP, micro batch:
# those of trn1; on GPUs the planner chooses.
FIGURES = """
neox_20b           44 6144 64 64 24576 2048  9.7e-5 1e-5   100  10000 0.01   256  8 4 1
neox_20b_finetune  44 6144 64 64 24576 2048  9.7e-5 1e-5   100   2000 0.01   256  8 4 2
pythia_6.9b        32 4096 32 32 16384 2048  1.2e-4 1.2e-5 100  10000 0.01   256  8 1 2
pythia_70m          6  512  8  8  2048 2048  1e-3   1e-4  1430 143000 0.1   1024  1 1 auto
pythia_160m        12  768 12 12  3072 2048  6e-4   6e-5  1430 143000 0.1   1024  1 1 auto
pythia_410m        24 1024 16 16  4096 2048  3e-4   3e-5  1430 143000 0.1   1024  1 1 auto
pythia_1b          16 2048  8  8  8192 2048  2.5e-4 2.5e-5 1430 143000 0.1  1024  1 1 auto
pythia_1.4b        24 2048 16 16  8192 2048  2e-4   2e-5  1430 143000 0.1   1024  1 1 auto
pythia_2.8b        32 2560 32 32 10240 2048  1.6e-4 1.6e-5 1430 143000 0.1  1024  1 1 auto
llama2_7b          32 4096 32 32 11008 4096  3e-4   3e-5  2000 500000 0.1   1024  8 1 1
llama2_7b_nemo     32 4096 32 32 11008 4096  3e-4   3e-5  2000  10000 0.1    256  8 1 1
llama2_7b_finetune 32 4096 32 32 11008 4096  5e-5   0       20    100 0       32  8 1 1
llama2_13b         40 5120 40 40 13824 4096  3e-4   3e-5  2000 400000 0.1   1024  8 4 1
llama2_70b         80 8192 64  8 28672 4096  1.5e-4 1e-5  2000  30000 0.1   1024 32 8 1
llama3_8b          32 4096 32  8 14336 8192  1.5e-4 0      100  10000 0.01  1024 32 1 1
llama3.1_8b        32 4096 32  8 14336 8192  1.5e-5 1e-6  2000  30000 0.1   1024 32 1 1
llama3_70b         80 8192 64  8 28672 8192  1.5e-5 1e-6  2000  30000 0.1   1024 32 8 1
llama3.2_1b        16 2048 32  8  8192 8192  3e-4   3e-5  2000 1168251 0.1   512  1 1 auto
qwen3_0.6b         28 1024 16  8  3072 4096  3e-4   3e-5   500 300000 0.1     32  1 1 auto
qwen3_8b           36 4096 32  8 12288 4096  3e-4   3e-5   500 300000 0.1     32  1 1 auto
smollm3_3b         36 2048 16  4 11008 4096  2e-4   0     2000 4720000 0.1   576  1 1 auto
olmo3_7b           32 4096 32 32 11008 8192  3e-4   3e-5  2000 1192092 0.1   512  1 1 auto
gemma3_1b          26 1152  4  1  6912 32768 3e-4   3e-5  2000 1168251 0.1   512  1 1 auto
mistral_7b         32 4096 32  8 14336 8192  3e-4   3e-5  2000 480000 0.1    256  1 1 auto
nanochat_d20       20 1280 10 10  5120 2048  3.1e-3 0        0  21400 0      256  1 1 auto
llama2_7b_yarn64k  32 4096 32 32 11008 65536 2e-5   0       20    400 0       64  1 1 auto
gpt3_125m          12  768 12 12  3072 2048  6e-4   6e-5   715 572205 0.1    256  1 1 auto
gpt3_350m          24 1024 16 16  4096 2048  3e-4   3e-5   715 572205 0.1    256  1 1 auto
gpt3_760m          24 1536 16 16  6144 2048  2.5e-4 2.5e-5 715 572205 0.1    256  1 1 auto
gpt3_1.3b          24 2048 16 16  8192 2048  2e-4   2e-5   358 286102 0.1    512  1 1 auto
gpt3_2.7b          32 2560 20 20 10240 2048  1.6e-4 1.6e-5 358 286102 0.1    512  1 1 auto
gpt3_6.7b          32 4096 32 32 16384 2048  1.2e-4 1.2e-5 179 143051 0.1   1024  1 1 auto
gpt3_13b           40 5120 40 40 20480 2048  1e-4   1e-5   179 143051 0.1   1024  1 1 auto
gpt3_23b           28 8192 64 64 32768 2048  1.5e-4 1e-5   750 300000 0.01  1024  8 4 1
gpt3_46b           56 8192 64 64 32768 2048  1.5e-4 1e-5   750 300000 0.01  1024  8 8 1
"""


def test_figures() -> None:
    shape = ["num_layers", "hidden_size", "num_heads", "kv_heads", "ffn_hidden_size", "seq_len"]
    schedule = ["lr", "min_lr", "warmup_steps"]
    for line in FIGURES.strip().splitlines():
        name, *figures = line.split()
        result = recipe(name)
        train, optim, parallel = result.train, result.optim, result.parallel
        assert [figure if figure == "auto" else float(figure) for figure in figures] == [
            *(getattr(result.model, field) for field in shape),
            *(getattr(optim, field) for field in schedule),
            *(train.steps, optim.weight_decay, train.global_batch),
            *(parallel.tensor, parallel.pipeline, train.micro_batch),
        ], name
    listed = {line.split()[0] for line in FIGURES.strip().splitlines()}
    tiny = {"tiny_neox", "tiny_neox_finetune", "tiny_llama", "tiny_gpt3", "tiny_mistral"}
    tiny |= {"tiny_smollm3", "tiny_olmo3", "tiny_gemma3", "tiny_nanochat"}
    assert listed | tiny == set(available(recipes_dir()))


@pytest.mark.parametrize(
    ("name", "tokenizer", "divisible_by", "rows"),
    [
        # make_vocab_size_divisible_by as the scripts pass it, or as their configuration files have
        # it (128 of megatron_gpt_config.yaml, 8 of megatron_llama_config.yaml).
        ("neox_20b", 50257, 8, 50304),
        ("neox_20b_finetune", 50277, 256 // 8, 50432),
        ("gpt3_23b", 50257, 128, 51200),
        ("llama2_13b", 32000, 8, 32000),
    ],
)
def test_nemo_pads_to_a_multiple_of_the_tensor_degree_as_well(
    name: str, tokenizer: int, divisible_by: int, rows: int
) -> None:
    """As `_vocab_size_with_padding` of NeMo's megatron_base_model.py."""
    result = recipe(name)
    padded = tokenizer
    while padded % (divisible_by * result.parallel.tensor):
        padded += 1
    assert result.model.padded_vocab_size == padded == rows


def test_schedules_count_steps_as_their_source() -> None:
    counts = {name: recipe(name).optim.step_count for name in available(recipes_dir())}
    nemo = "neox_20b neox_20b_finetune pythia_6.9b llama2_7b_nemo llama2_13b llama2_70b llama3_70b"
    nemo += " llama3.1_8b gpt3_23b gpt3_46b"
    assert {name for name, count in counts.items() if count == "nemo"} == {*nemo.split()}
    # HLAT's scheduler.py and transformers' get_linear_schedule_with_warmup, as YaRN's finetune.py
    theirs = {"llama2_7b", "llama2_7b_finetune", "llama3_8b", "llama2_7b_yarn64k"}
    assert {name for name, count in counts.items() if count == "transformers"} == theirs


@pytest.mark.parametrize("size", ["70m", "2.8b"])
def test_pythia_begins_as_gpt_neox_does(size: str) -> None:
    model = recipe(f"pythia_{size}").model
    assert model.init_std == pytest.approx(math.sqrt(2 / (5 * model.hidden_size)), rel=1e-3)
    wang = 2 / (model.num_layers * math.sqrt(model.hidden_size))
    assert model.output_init_std == pytest.approx(wang, rel=1e-3)


@pytest.mark.parametrize("size", ["125m", "13b"])
def test_gpt3_counts_its_schedule_in_tokens(size: str) -> None:
    result = recipe(f"gpt3_{size}")
    a_step = result.train.global_batch * result.model.seq_len
    assert result.optim.decay_steps is not None
    for steps, tokens in (
        (result.optim.warmup_steps, 375e6),
        (result.optim.decay_steps, 260e9),
        (result.train.steps, 300e9),
    ):
        assert steps == pytest.approx(tokens / a_step, abs=1)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("smollm3_3b", {("none", None): 9, (None, None): 27}),
        ("olmo3_7b", {(None, 4096): 24, (None, None): 8}),
        ("gemma3_1b", {(10000.0, 512): 22, (None, None): 4}),
        ("mistral_7b", {(None, 4096): 32}),
    ],
)
def test_attention_of_the_layers(name: str, kinds: dict[tuple[object, int | None], int]) -> None:
    layers = recipe(name).model.layer_kinds
    assert Counter((kind.rope, kind.window) for kind in layers) == kinds
