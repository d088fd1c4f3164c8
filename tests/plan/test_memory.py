"""The arithmetic of memory; against what lies there: tests/backends/test_memory.py."""

from __future__ import annotations

from slurmllm.config.resolve import resolve
from slurmllm.plan.fit_check import check_fit
from slurmllm.plan.memory import WorkerMemory, dense_mask_warning, worker_memory
from slurmllm.plan.mesh import make_mesh
from slurmllm.plan.parameters import parameters


def memory(recipe: str, nodes: int, *overrides: str, rank: int = 0) -> WorkerMemory:
    config = resolve(recipe, overrides=overrides)
    return worker_memory(config, make_mesh(config, nodes), rank)


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
    for settings in ((), ("model.seq_len=8192", "train.compile=false"), ("data.mask=none",)):
        config = resolve("llama3_8b", "p5", [*LONG, *settings])
        assert dense_mask_warning(config) == [], settings
    uncompiled = resolve("llama3_8b", "p5", [*LONG, "train.compile=false"])
    (warning,) = dense_mask_warning(uncompiled)
    assert "131,072 tokens takes 32.00 of 77.60 GiB" in warning  # 34 GB
    assert warning.endswith("--set train.compile=true, which needs no such mask")
    (warning,) = dense_mask_warning(resolve("llama3_8b", "local", LONG))
    assert "32.00 of 7.50 GiB" in warning
    assert warning.endswith("--set data.mask=none, or a smaller model.seq_len")
    layout = ("parallel={tensor: 4}", "train.micro_batch=1")
    layout += ("train.activation_checkpointing=selective", "train.compile=false")
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
