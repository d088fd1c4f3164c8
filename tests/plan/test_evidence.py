"""Intervals, and how far a prediction is from published runs."""

import math
from pathlib import Path

import pytest
from present import present

from slurmllm.core.config.resolve import resolve
from slurmllm.plan.evidence import (
    evidence,
    evidence_text,
    half_width,
    network_range,
    outside,
    published_runs,
)
from slurmllm.plan.mesh import make_mesh
from slurmllm.plan.recipe_plan import RecipePlan, plan_recipe, plan_warnings
from slurmllm.plan.search import LayoutEstimate, predict

pytestmark = pytest.mark.usefixtures("layouts_searched_once")


def layout(recipe: str, nodes: int, *overrides: str, cluster: str | None = None) -> LayoutEstimate:
    config = resolve(recipe, cluster, overrides)
    return predict(config, make_mesh(config, nodes))


def test_how_near_a_layout_is_to_published_ones() -> None:
    item = layout("neox_20b", 16, "train.global_batch=16384")
    result = evidence(item)
    assert (result.status, result.reasons) == ("interpolated", [])
    assert (present(result.nearest).model, present(result.nearest).nodes) == ("GPT-NeoX-20B", 16)
    lower, upper = present(result.interval)
    assert lower < 54.3 < upper, "as AWS published"
    assert lower * upper == pytest.approx(item.seq_per_s**2)
    fast = layout("neox_20b", 4, "train.global_batch=16384", "cluster.hardware.memory_gb_s=2000")
    result = evidence(fast)
    assert result.status == "beyond"
    assert "is above the highest published on this hardware for such a model" in result.reasons[0]
    other = evidence(layout("gpt3_1.3b", 2, cluster="p6-b200"))
    assert (other.status, other.nearest, other.generations) == ("beyond", None, "")
    assert other.reasons == ["no published run on p6-b200"]
    none = evidence(layout("tiny_neox", 1, cluster="local"))
    assert (none.status, none.interval) == ("beyond", None)


def test_the_interval_is_wider_the_farther_away() -> None:
    def width(nodes: int) -> float:
        result = evidence(layout("neox_20b", nodes, f"train.global_batch={1024 * nodes}"))
        return math.log(present(result.interval)[1] / present(result.interval)[0])

    assert width(4) == pytest.approx(width(16))
    assert width(128) == pytest.approx(1.5 * width(64)), "an octave more than any row"
    far = evidence(layout("neox_20b", 256, "train.global_batch=262144"))
    assert far.status == "beyond"
    assert far.reasons == ["nodes 256 is a factor of 4 outside the published runs"]
    near = evidence(layout("neox_20b", 128, "train.global_batch=131072"))
    assert near.status == "extrapolated"


def test_a_network_slower_than_published_ones_is_outside() -> None:
    # MosaicML's A100 had 1,600 Gbit/s, p4d has 400; on one node neither is used.
    fast, half, slow = (
        evidence(layout("gpt3_1.3b", 2, f"cluster.hardware.network_gb_s={speed}", cluster="p4d"))
        for speed in (400, 100, 50)
    )
    assert not any("network" in reason for reason in fast.reasons)
    assert "network_gb_s 100 is a factor of 2 outside the published runs" in half.reasons
    assert (half.status, slow.status) == ("extrapolated", "beyond")
    widths = [
        math.log(present(result.interval)[1] / present(result.interval)[0])
        for result in (fast, half, slow)
    ]
    assert widths[1:] == pytest.approx([1.5 * widths[0], 2 * widths[0]])
    assert not any("network" in reason for reason in evidence(layout("gpt3_1.3b", 1)).reasons)


def test_evidence_goes_by_the_devices_not_by_the_profile(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: p5\nname: mine\n")
    of_p5 = evidence(layout("gpt3_1.3b", 2, cluster="p5"))
    assert present(of_p5.nearest).profile == "p5"
    for profile in ("h100_ib", str(tmp_path / "mine.yaml")):
        other = evidence(layout("gpt3_1.3b", 2, cluster=profile))
        assert (other.status, other.nearest) == (of_p5.status, of_p5.nearest)
    # As `calibrate` measures p5: the devices are the same.
    measured = ("cluster.hardware.bf16_tflops=1000", "cluster.hardware.memory_gib=79.2")
    assert evidence(layout("gpt3_1.3b", 2, *measured, cluster="p5")).nearest == of_p5.nearest
    assert present(evidence(layout("gpt3_1.3b", 2, cluster="a100_ib")).nearest).profile == "p4de"


def test_the_generation_of_the_software_is_named() -> None:
    old = evidence_text(evidence(layout("gpt3_1.3b", 1, cluster="p5")))
    assert "(90 % interval); interpolated between published runs; software of 2023-24" in old
    one_gpu = ("cluster.devices_per_node=1", "train.global_batch=8", "train.micro_batch=8")
    for profile in ("p5e", "p5en"):
        new = layout("gpt3_1.3b", 1, *one_gpu, "train.precision=bf16_mixed", cluster=profile)
        text = evidence_text(evidence(new))
        assert "; software of 2026" in text
        assert "nearest run h200-gpt3-1.3b-loop: " in text
        assert new.seq_per_s == pytest.approx(8 / 0.2709, rel=0.05), "as measured on an H200"


def test_nine_of_ten_left_out_rows_are_inside() -> None:
    runs, hits = published_runs(), []
    for run in runs:
        others = [item for item in runs if item.model != run.model and item.profile == run.profile]
        octaves = sum(outside(run.point, others).values())
        hits.append(abs(math.log(run.left_out)) <= half_width(others, octaves))
    assert 0.85 <= sum(hits) / len(hits) <= 0.95


def test_assumed_networks_and_software_of_different_years() -> None:
    batch = "train.global_batch=1024"
    span = network_range(layout("llama2_7b", 16, batch))
    assert present(span)[0] < layout("llama2_7b", 16, batch).seq_per_s < present(span)[1]
    assert network_range(layout("llama2_7b", 1, batch)) is None, "no network"
    assert network_range(layout("gpt3_1.3b", 2, cluster="p5")) is None, "not assumed"

    def plans(*profiles: str) -> list[RecipePlan]:
        configs = [resolve("gpt3_1.3b", profile) for profile in profiles]
        return [plan_recipe(config, [], lambda _: [], None, None) for config in configs]

    assert plan_warnings(plans("p4d", "p5", "h100_ib")) == []
    assert plan_warnings(plans("p4d", "p5", "p5en", "p6-b200")) == [
        "these profiles were fitted to software of different years, and newer software is faster, "
        "so that their speeds cannot be compared: p4d, p5: 2023-24; p5en: 2026"
    ]
