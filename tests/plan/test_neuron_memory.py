"""What fits a NeuronCore, against what AWS ran on trn1, and the arithmetic against plain sums."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from amounts import amount
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slurmllm.config.recipe import ModelConfig
from slurmllm.config.resolve import RunConfig, resolve
from slurmllm.plan.mesh import Mesh
from slurmllm.plan.neuron_memory import neuron_memory
from slurmllm.plan.parameters import parameter_shapes, share_of

_CORES = 32
_SIZES: dict[str, tuple[Any, ...]] = {  # family, layers, hidden, heads, kv heads, ffn, vocabulary
    "pythia_6.9b": ("neox", 32, 4096, 32, None, 16384, 50432, 2048),
    "neox_20b": ("neox", 44, 6144, 64, None, 24576, 50432, 2048),
    "gpt3_6.7b": ("gpt3", 32, 4096, 32, None, 16384, 50432, 2048),
    "gpt3_23b": ("gpt3", 28, 8192, 64, None, 32768, 50432, 2048),
    "gpt3_46b": ("gpt3", 56, 8192, 64, None, 32768, 50432, 2048),
    "gpt3_175b": ("gpt3", 96, 12288, 96, None, 49152, 50432, 2048),
    "llama2_7b": ("llama", 32, 4096, 32, None, 11008, 32000, 4096),
    "llama2_13b": ("llama", 40, 5120, 40, None, 13824, 32000, 4096),
    "llama2_70b": ("llama", 80, 8192, 64, 8, 28672, 32000, 4096),
    "llama3_8b": ("llama", 32, 4096, 32, 8, 14336, 128256, 8192),
    "llama3_70b": ("llama", 80, 8192, 64, 8, 28672, 128256, 8192),
}
_NAMES = ("family", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_hidden_size")
_BASE = resolve("llama2_70b", cluster="trn1")

# Where it ran: neuronx-nemo-megatron's scripts (bf16_sr without ZeRO) with the AWS posts and logs
# that measured them; the Megatron-LM port (gpt3_6.7b without checkpointing); neuronx-distributed's
# examples and neuronx-distributed-training's configurations (bf16_mixed with ZeRO-1); HLAT. Left
# out: Mixtral, context parallelism, Llama 3.1 405B (its 126 layers are not cut into 32 stages
# here). Llama 3 70B computed the feed-forward layers again too, which is less than `full`.
# Where it did not: Neuron SDK 2.19, introducing-pytorch-2-1.rst (Llama 2 70B on 8 nodes), and
# what 16 GiB cannot hold by weights, gradients and optimizer alone.
_RAN = """
pythia_6.9b  1   8 1  2 bf16_sr    full      0
pythia_6.9b  4   8 1  2 bf16_sr    full      0
pythia_6.9b  4   8 1  1 bf16_mixed full      1 whole-sequence
neox_20b     4   8 4  1 bf16_sr    full      0
neox_20b     64  8 4  1 bf16_sr    full      0
neox_20b     4  32 1  1 bf16_mixed full      1
gpt3_6.7b    1   8 1  1 bf16_sr    none      0 whole-sequence
gpt3_6.7b    16  8 1  1 bf16_sr    none      0 whole-sequence
gpt3_23b     4   8 4  1 bf16_sr    selective 0
gpt3_46b     8   8 8  1 bf16_sr    full      0
gpt3_175b    8  32 8  1 bf16_sr    selective 0
gpt3_175b    32 32 8  1 bf16_sr    selective 0
llama2_7b    4   8 1  1 bf16_sr    full      0
llama2_7b    32  8 4  1 bf16_sr    full      0
llama2_7b    32  8 1  1 bf16_sr    selective 0
llama2_7b    4   8 1  1 bf16_mixed selective 1
llama2_7b    16  8 1  1 bf16_mixed selective 1
llama2_13b   4   8 4  1 bf16_sr    full      0
llama2_13b   32  8 4  1 bf16_mixed selective 1
llama2_13b   32  8 8  1 bf16_mixed selective 1
llama2_70b   8   8 16 1 bf16_sr    full      0
llama2_70b   8   8 16 1 bf16_mixed full      1
llama2_70b   32 32 4  1 bf16_mixed selective 1
llama2_70b   32 32 8  1 bf16_mixed selective 1
llama2_70b   16 32 8  1 bf16_mixed selective 1
llama3_8b    4  32 1  1 bf16_mixed selective 1
llama3_8b    8  32 1  1 bf16_sr    selective 1
llama3_8b    32 32 1  1 bf16_mixed selective 1
llama3_70b   16 32 8  1 bf16_mixed core+mlp  1
llama3_70b   32 32 8  1 bf16_mixed core+mlp  1
"""
_DID_NOT = """
llama2_70b   8  32 1  1 bf16_mixed selective 1
llama2_70b   8  32 2  1 bf16_mixed selective 1
llama2_70b   8  32 4  1 bf16_mixed selective 1
llama2_70b   8  32 8  1 bf16_mixed selective 1
llama2_70b   32  8 8  1 bf16_mixed selective 1
llama2_7b    16  2 1  1 bf16_mixed full      1
llama2_7b    16  2 1  1 bf16_sr    full      0
neox_20b     4   8 1  1 bf16_sr    full      0
neox_20b     4   8 1  1 bf16_mixed full      1
"""


def sized(name: str) -> ModelConfig:
    *shape, vocabulary, seq_len = _SIZES[name]
    fields = {key: value for key, value in zip(_NAMES, shape, strict=True) if value is not None}
    return ModelConfig(**fields, vocab_size=vocabulary, seq_len=seq_len, vocab_pad_multiple=128)


def run(model: ModelConfig, mesh: Mesh, **changes: Any) -> RunConfig:
    recipe = _BASE.recipe
    train = {"precision", "activation_checkpointing"}
    return replace(
        _BASE,
        recipe=recipe.model_copy(
            update={
                "model": model,
                "train": recipe.train.model_copy(
                    update={"micro_batch": mesh.micro_batch}
                    | {name: changes[name] for name in train & changes.keys()}
                ),
                "parallel": recipe.parallel.model_copy(
                    update={name: changes[name] for name in changes.keys() - train}
                ),
            }
        ),
    )


def layout(row: str) -> tuple[RunConfig, Mesh]:
    name, nodes, tensor, pipeline, micro, precision, mode, zero, *rest = row.split()
    n, t, p, m = int(nodes), int(tensor), int(pipeline), int(micro)
    mesh = Mesh(n, _CORES, t, p, n * _CORES // (t * p), 1024 * n, m)
    how = tuple(mode.split("+")) if "+" in mode else mode
    config = run(
        sized(name),
        mesh,
        precision=precision,
        activation_checkpointing=how,
        zero=int(zero),
        tensor=t,
        pipeline=p,
        sequence=not rest,
    )
    return config, mesh


def fits(row: str) -> bool:
    config, mesh = layout(row)
    assert config.cluster.hardware is not None
    stage = mesh.tensor * mesh.data
    peaks = [sum(neuron_memory(config, mesh, stage * p).values()) for p in range(mesh.pipeline)]
    return max(peaks) <= config.cluster.hardware.usable_bytes


@pytest.mark.parametrize("row", _RAN.strip().splitlines())
def test_what_ran_fits(row: str) -> None:
    assert fits(row)


@pytest.mark.parametrize("row", _DID_NOT.strip().splitlines())
def test_what_did_not_run_does_not_fit(row: str) -> None:
    assert not fits(row)


def test_activations_as_korthikanti_without_dropout() -> None:
    # Table 2's 34 s b h + 5 a s² b: no dropout masks, and the softmax in fp32 beside its bf16 copy.
    model, mesh = sized("gpt3_6.7b"), Mesh(1, _CORES, 1, 1, _CORES, 64, 2)
    none = neuron_memory(run(model, mesh, activation_checkpointing="none", sequence=False), mesh)
    tokens, square = 2 * 2048, 2 * 32 * 2048**2
    assert none["activations"] == 32 * (32 * tokens * 4096 + 6 * square)
    full = neuron_memory(run(model, mesh, activation_checkpointing="full", sequence=False), mesh)
    assert full["activations"] == 32 * 2 * tokens * 4096


def test_masks() -> None:
    model, square = sized("llama2_13b"), 4096**2

    def masks(mode: str, mask: str, pipeline: int) -> int:
        mesh = Mesh(4, _CORES, 8, pipeline, 16 // pipeline, 256, 2)
        config = run(model, mesh, activation_checkpointing=mode, sequence=True, zero=1)
        data = config.recipe.data.model_copy(update={"mask": mask})
        changed = replace(config, recipe=config.recipe.model_copy(update={"data": data}))
        return neuron_memory(changed, mesh)["masks"]

    assert masks("none", "none", 1) == masks("selective", "none", 4) == square
    assert masks("none", "document", 1) == 2 * square, "one for each sequence"
    assert masks("none", "document", 4) == 2 * 2 * 4 * square, (
        "of four micro batches, in two copies"
    )


@settings(max_examples=amount(6, of=60))
@given(
    name=st.sampled_from(["tiny_neox", "tiny_llama", "tiny_gpt3"]),
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2, 4]),
    data=st.integers(1, 5),
    zero=st.booleans(),
)
def test_weights_and_moments_are_the_sum_of_the_shards(
    name: str, tensor: int, pipeline: int, data: int, zero: bool
) -> None:
    model = resolve(name).recipe.model
    assume(model.num_layers % pipeline == 0)
    mesh = Mesh(1, tensor * pipeline * data, tensor, pipeline, data, 8 * data, 1)
    config = run(model, mesh, precision="fp32", zero=int(zero))
    weights = moments = 0
    for parameter, shape in parameter_shapes(model).items():
        share = share_of(parameter, shape, model, tensor, tensor - 1)
        part = list(shape)
        if share.dim is not None:
            part[share.dim] = share.size
        # The embedding's copy in the last stage, where the head is the embedding.
        copies = 2 if parameter == "embed.weight" and model.tied_embeddings and pipeline > 1 else 1
        rows = math.ceil(part[0] / data) if zero else part[0]
        weights += copies * 4 * math.prod(part)
        moments += copies * 8 * rows * math.prod(part[1:])
    result = [neuron_memory(config, mesh, stage * tensor * data) for stage in range(pipeline)]
    assert sum(parts["weights"] for parts in result) == weights
    assert sum(parts["optimizer"] for parts in result) == moments
