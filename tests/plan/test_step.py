"""A step's parts follow from the layout as they should."""

from __future__ import annotations

import pytest

from slurmllm.config.resolve import resolve
from slurmllm.plan.estimate import predict
from slurmllm.plan.mesh import make_mesh
from slurmllm.plan.step import StepTime, step_time


def step(recipe: str, nodes: int, *overrides: str, cluster: str | None = None) -> StepTime:
    config = resolve(recipe, cluster, overrides)
    return step_time(config, make_mesh(config, nodes))


def test_the_parts_are_the_step() -> None:
    result = step("neox_20b", 4)
    assert result.total == pytest.approx(sum(result.parts().values()))
    assert all(seconds >= 0 for seconds in result.parts().values())
    assert result.bubble > 0, "four stages"
    config = resolve("neox_20b")
    candidate = predict(config, make_mesh(config, 4))
    assert candidate.seq_per_s == pytest.approx(256 / result.total)
    assert 0.2 < candidate.mfu < 0.4, "as published runs are on trn1"


def test_the_bubble_is_stages_less_one_over_micro_batches() -> None:
    # Narayanan et al. 2021, section 2.2: (p - 1) / m of the time that a stage works.
    free = ("cluster.hardware.network_gb_s=1e9", "cluster.hardware.network_latency_us=0")
    result = step("llama2_70b", 64, *free)
    work = result.compute + result.recompute + result.tensor
    # Head and loss, which the last stage alone has, are in the turns and not in the bubble.
    assert result.bubble / work == pytest.approx(7 / 128, rel=0.06)
    second = step("llama2_70b", 64, *free, "parallel.virtual_pipeline=2")
    assert second.bubble == pytest.approx(result.bubble / 2)
    assert step("llama2_70b", 64, "parallel.pipeline=1").bubble == 0


def test_checkpointing_computes_again() -> None:
    none, selective, parts, all_parts, full = (
        step("neox_20b", 4, f"train.activation_checkpointing={mode}")
        for mode in ("none", "selective", "[core, mlp]", "[core, mlp, norm]", "full")
    )
    assert none.recompute == 0 < selective.recompute < parts.recompute < all_parts.recompute
    assert all_parts.recompute < full.recompute
    assert selective.tensor == none.tensor < parts.tensor < full.tensor, (
        "the layer's input, gathered"
    )
    # One more forward pass beside one forward and two backward ones, but not of the head, nor of
    # the sums of gradients.
    assert 0.25 * full.compute < full.recompute < full.compute / 3


def test_a_gpu_waits_only_for_a_host_that_is_slower() -> None:
    def overheads(*overrides: str) -> tuple[StepTime, StepTime]:
        host = ("cluster.hardware.operator_us=20", "cluster.hardware.step_overhead_s=0.005")
        host += ("train.global_batch=8", "train.micro_batch=1")
        cpu, gpu = (
            step("gpt3_1.3b", 1, f"cluster.device={device}", *host, *overrides, cluster="p5")
            for device in ("cpu", "cuda")
        )
        return cpu, gpu

    cpu, gpu = overheads()
    assert (cpu.overhead, gpu.overhead) == (pytest.approx(0.005 + 24 * 3 * 20e-6), 0)
    cpu, gpu = overheads("cluster.hardware.step_overhead_s=0.5")
    assert gpu.total == pytest.approx(cpu.overhead), "the host's time alone"


def test_a_dense_mask_has_all_pairs_computed() -> None:
    masks, one = ("data.mask=none", "data.mask=document"), ("parallel.tensor=1",)
    for compiled, pairs in (("true", 1), ("false", 2)):
        options = ("train.activation_checkpointing=selective", f"train.compile={compiled}", *one)
        plain, masked = (step("llama3_8b", 2, *options, mask, cluster="p5") for mask in masks)
        # Recomputed is attention alone.
        assert masked.recompute == pytest.approx(pairs * plain.recompute)
        assert (masked.compute > plain.compute) == (pairs == 2)


def test_sequence_parallelism_shares_the_elementwise_work() -> None:
    shared = step("neox_20b", 4)
    alone = step("neox_20b", 4, "parallel.sequence=false")
    assert shared.compute < alone.compute


def test_data_parallel_traffic() -> None:
    batch = ("train.global_batch=512", "train.micro_batch=4", "train.precision=bf16_mixed")
    item, two, three = (
        step("gpt3_1.3b", 4, f"parallel.zero={stage}", *batch, cluster="p4d") for stage in (1, 2, 3)
    )
    assert item.data < two.data < three.data, "once a step, and with each micro batch"
    assert step("pythia_6.9b", 1).data < step("pythia_6.9b", 4).data, "beyond the node"
    hidden = step("pythia_6.9b", 4, "cluster.hardware.overlap=1")
    assert 0 < hidden.data < step("pythia_6.9b", 4).data, "in the last micro batch's layers"


def test_what_a_layer_computes_for_is_the_most_that_is_hidden() -> None:
    batch = ("train.micro_batch=1", "train.precision=bf16_mixed", "parallel.zero=3")
    slow = (*batch, "cluster.hardware.network_gb_s=1", "train.global_batch=64")
    shown = step("gpt3_1.3b", 4, *slow, "cluster.hardware.overlap=0", cluster="p4d")
    hidden = step("gpt3_1.3b", 4, *slow, "cluster.hardware.overlap=1", cluster="p4d")
    # 23 of the 24 layers compute for as long as they can hide; head and loss hide nothing.
    layers = hidden.compute + hidden.recompute
    assert 0.6 * layers < shown.data - hidden.data < layers


def test_a_node_gives_less_the_more_there_are() -> None:
    batch = ("train.precision=bf16_mixed", "parallel.zero=3", "train.micro_batch=4")
    free = "cluster.hardware.network_latency_us=0"

    def data_s(nodes: int, *overrides: str) -> float:
        share = f"train.global_batch={32 * nodes}"
        return step("gpt3_13b", nodes, *batch, free, share, *overrides, cluster="p5").data

    flat = [data_s(nodes, "cluster.hardware.network_half=null") for nodes in (16, 64)]
    assert flat[1] == pytest.approx(flat[0], rel=0.01)
    assert 1.2 < data_s(64) / data_s(16) < 2
    # At `network_half` nodes, half of the rate.
    half = "cluster.hardware.network_half=16"
    assert data_s(16, half, "cluster.hardware.overlap=0") == pytest.approx(
        2 * data_s(16, "cluster.hardware.network_half=null", "cluster.hardware.overlap=0"), rel=0.01
    )


def test_twice_the_speed_is_half_the_time() -> None:
    slow = step("llama2_7b", 16)
    hardware = resolve("llama2_7b").cluster.hardware
    assert hardware is not None
    doubled = [
        f"cluster.hardware.{name}={2 * getattr(hardware, name)}"
        for name in ("bf16_tflops", "memory_gb_s", "node_link_gb_s", "network_gb_s")
    ]
    halved = [
        f"cluster.hardware.{name}={getattr(hardware, name) / 2}"
        for name in ("node_link_latency_us", "network_latency_us")
    ]
    assert step("llama2_7b", 16, *doubled, *halved).total == pytest.approx(slow.total / 2)
