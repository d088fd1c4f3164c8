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
