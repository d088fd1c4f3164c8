"""What fits a NeuronCore, against what AWS ran on trn1; the arithmetic of memory."""

import math
from types import SimpleNamespace

import pytest
from amounts import amount
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from present import present

from slurmllm.core.config.resolve import RunConfig, resolve
from slurmllm.plan.choose_layout import check_fit
from slurmllm.plan.memory import StepMemory, dense_mask_warning, memory_moments, worker_memory
from slurmllm.plan.mesh import Mesh, make_mesh
from slurmllm.plan.neuron_memory import neuron_memory
from slurmllm.plan.parameters import parameter_shapes, parameters, share_of

_CORES = 32
# Which no recipe has.
_LARGER = {"gpt3_175b": "num_layers=96 hidden_size=12288 num_heads=96 ffn_hidden_size=49152"}

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


def run(name: str, *settings: str) -> RunConfig:
    shape = [f"model.{setting}" for setting in _LARGER.get(name, "").split()]
    recipe = "gpt3_46b" if name in _LARGER else name
    return resolve(recipe, "trn1", ["parallel=auto", *shape, *settings])


def layout(row: str) -> tuple[RunConfig, Mesh]:
    name, nodes, tensor, pipeline, micro, precision, mode, zero, *rest = row.split()
    n, t, p, m = int(nodes), int(tensor), int(pipeline), int(micro)
    mesh = Mesh(n, _CORES, t, p, n * _CORES // (t * p), 1024 * n, m)
    how = f"[{mode.replace('+', ',')}]" if "+" in mode else mode
    settings = [f"train.precision={precision}", f"train.activation_checkpointing={how}"]
    settings += [f"parallel.tensor={t}", f"parallel.pipeline={p}", f"parallel.zero={zero}"]
    return run(name, *settings, f"parallel.sequence={str(not rest).lower()}"), mesh


@pytest.mark.parametrize("row", [*_RAN.strip().splitlines(), *_DID_NOT.strip().splitlines()])
def test_what_ran_fits_and_what_did_not_does_not(row: str) -> None:
    config, mesh = layout(row)
    stage = mesh.tensor * mesh.data
    peaks = [sum(neuron_memory(config, mesh, stage * p).values()) for p in range(mesh.pipeline)]
    assert (max(peaks) <= present(config.cluster.hardware).usable_bytes) == (row in _RAN)


def test_activations_as_korthikanti_without_dropout() -> None:
    # Table 2's 34 s b h + 5 a s² b: no dropout masks, and the softmax in fp32 beside its bf16 copy.
    mesh, tokens, square = Mesh(1, _CORES, 1, 1, _CORES, 64, 2), 2 * 2048, 2 * 32 * 2048**2
    for mode, size in (("none", 32 * tokens * 4096 + 6 * square), ("full", 2 * tokens * 4096)):
        settings = (f"train.activation_checkpointing={mode}", "train.precision=bf16_mixed")
        config = run("gpt3_6.7b", *settings, "parallel.sequence=false")
        assert neuron_memory(config, mesh)["activations"] == 32 * size


def test_a_recomputed_feed_forward_layer_is_held_beside_its_gradients() -> None:
    mesh, tokens = Mesh(1, _CORES, 1, 2, _CORES // 2, 1024, 64), 64 * 256

    def buffers(mode: str) -> int:
        settings = (f"train.activation_checkpointing={mode}", "parallel.zero=0")
        return neuron_memory(run("gpt3_6.7b", *settings, "model.seq_len=256"), mesh)["buffers"]

    assert buffers("[mlp]") - buffers("none") == tokens * 2 * 16384 * 2


def test_masks() -> None:
    square = 4096**2

    def masks(mode: str, mask: str, pipeline: int) -> int:
        mesh = Mesh(4, _CORES, 8, pipeline, 16 // pipeline, 256, 2)
        settings = (f"train.activation_checkpointing={mode}", f"data.mask={mask}")
        return neuron_memory(run("llama2_13b", *settings), mesh)["masks"]

    assert masks("none", "none", 1) == masks("selective", "none", 4) == square
    assert masks("none", "document", 1) == 2 * square, "one for each sequence"
    # Of four micro batches, in two copies.
    assert masks("none", "document", 4) == 2 * 2 * 4 * square


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
    config = resolve(name, "trn1", ["parallel=auto", f"parallel.zero={int(zero)}"])
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


def memory(recipe: str, nodes: int, *overrides: str, rank: int = 0) -> SimpleNamespace:
    config = resolve(recipe, overrides=overrides)
    mesh = make_mesh(config, nodes)
    resting, within, after = memory_moments(config, mesh, rank)
    return SimpleNamespace(
        weights=resting["weights"],
        optimizer=resting["optimizer"],
        batch=resting["batch"],
        whole_weights=within["whole weights"],
        whole_gradients=within["gradients"],
        activations=within["activations"],
        masks=within["masks"],
        output=StepMemory(config, mesh, rank).output(),
        gradients=after["gradients"],
        peak=sum(worker_memory(config, mesh, rank).values()),
    )


def test_one_worker_has_everything() -> None:
    result = memory("tiny_neox", 1, "train.micro_batch=8")
    count = parameters(resolve("tiny_neox").recipe.model)
    assert (result.weights, result.optimizer) == (4 * count, 8 * count)
    assert (result.gradients, result.whole_weights) == (4 * count, 0)
    mixed = memory("tiny_neox", 1, "train.micro_batch=8", "train.precision=bf16_mixed")
    assert (mixed.gradients, mixed.whole_weights) == (4 * count, 2 * count)
    assert result.whole_gradients == 0, "one micro batch carries none on"


def test_zero_stages() -> None:
    both = ("cluster.devices_per_node=4", "train.global_batch=32")
    item, two, three = (memory("tiny_neox", 1, *both, f"parallel.zero={z}") for z in (1, 2, 3))
    assert item.optimizer == two.optimizer == three.optimizer
    assert item.whole_gradients > two.whole_gradients
    assert two.whole_weights > three.whole_weights


def test_masks_between_documents() -> None:
    plain, masked = (
        memory("tiny_neox", 1, "train.micro_batch=4", f"data.mask={mask}")
        for mask in ("none", "document")
    )
    model = resolve("tiny_neox").recipe.model
    assert plain.masks == 0
    assert masked.masks == 4 * 4 * model.seq_len * (model.seq_len + model.head_width)
    assert (plain.batch, masked.batch) == tuple(
        3 * arrays * 4 * 8 * model.seq_len
        for arrays in (2, 3)  # two of the stream, one a pass
    )
    assert masked.peak - plain.peak == masked.masks + masked.batch - plain.batch
    # Each micro batch in flight has its own.
    stages = ("cluster.devices_per_node=4", "parallel.pipeline=4", "data.mask=document")
    result = [memory("tiny_neox", 1, *stages, rank=rank).masks for rank in range(4)]
    assert result == [masked.masks // 2 * count for count in (4, 3, 2, 1)]
    # On GPUs, grouped keys and values are copied for a kernel that takes masks.
    masks = ("data.mask=none", "data.mask=document")
    plain, masked = (memory("qwen3_8b", 1, mask, "train.compile=false") for mask in masks)
    assert masked.activations > plain.activations
    # Compiled blocks have neither copies nor a dense mask, but lists of blocks.
    plain, blocks = (memory("qwen3_8b", 1, mask, "train.compile=true") for mask in masks)
    assert blocks.activations == plain.activations
    assert 0 < blocks.masks < masked.masks / 10


LONG = ("data.mask=document", "model.seq_len=131072", "train.global_batch=16")


def test_a_dense_mask_that_is_large() -> None:
    for overrides in ((), ("model.seq_len=8192", "train.compile=false"), ("data.mask=none",)):
        config = resolve("llama3_8b", "p5", [*LONG, *overrides])
        assert dense_mask_warning(config) == [], overrides
    uncompiled = resolve("llama3_8b", "p5", [*LONG, "train.compile=false"])
    (warning,) = dense_mask_warning(uncompiled)
    assert "131,072 tokens takes 32.00 of 77.60 GiB" in warning  # 34 GB
    assert warning.endswith("--set train.compile=true, which needs no such mask")
    (warning,) = dense_mask_warning(resolve("llama3_8b", "local", LONG))
    assert "32.00 of 7.50 GiB" in warning
    assert warning.endswith("--set data.mask=none, or choose a smaller model.seq_len")
    layout = ["parallel={tensor: 4}", "train.micro_batch=1"]
    layout += ["train.activation_checkpointing=selective", "train.compile=false"]
    config = resolve("llama3_8b", "p5", [*LONG, *layout])
    for force in (False, True):
        fit = check_fit(config, 2, lambda _: [], force=force)
        assert fit is not None
        assert dense_mask_warning(config)[0] in (fit.warnings if force else fit.refusals)


def test_tokens_that_are_held() -> None:
    """Of a micro batch; in a pipeline of the step; on CPUs, what the data's stream gave besides."""
    size = 2 * 8 * 2 * 128  # tokens and labels: two sequences
    for degree, device, micro_batches in (
        ("tensor", "cuda", 1),
        ("pipeline", "cuda", 4),
        ("tensor", "cpu", 5),
        ("pipeline", "cpu", 8),
    ):
        layout = (f"cluster.device={device}", f"parallel.{degree}=2", "train.micro_batch=2")
        result = memory("tiny_neox", 1, "cluster.devices_per_node=2", *layout)
        assert result.batch == micro_batches * size


def test_earlier_stages_hold_more_in_flight() -> None:
    stages = ("cluster.devices_per_node=4", "parallel.pipeline=4")
    result = [memory("tiny_neox", 1, *stages, rank=rank) for rank in range(4)]
    blocks = [stage.activations for stage in result[:3]]
    assert blocks == sorted(blocks, reverse=True)
    assert blocks[0] == 4 * blocks[2] // 2
    assert [stage.output > 0 for stage in result] == [False, False, False, True]
    tied = [memory("tiny_gpt3", 1, *stages, rank=rank).weights for rank in (0, 1, 3)]
    assert tied[0] > tied[1] < tied[2], "both ends have the embedding"
