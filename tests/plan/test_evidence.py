"""Intervals, and how far a prediction is from published runs."""

import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from present import present

from slurmllm.core.config.resolve import resolve
from slurmllm.plan.evidence import (
    FAR,
    MeasuredRun,
    RunEvidence,
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
    faster = ("cluster.hardware.memory_gb_s=2000", "cluster.hardware.matrix_efficiency=1")
    fast = layout("neox_20b", 4, "train.global_batch=16384", *faster)
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
    # The slowest that fms-fsdp had between H100s was 800 Gbit/s; on one node it is not used.
    fast, half, slow = (
        evidence(layout("gpt3_1.3b", 2, f"cluster.hardware.network_gb_s={speed}", cluster="p5"))
        for speed in (400, 50, 25)
    )
    assert not any("network" in reason for reason in fast.reasons)
    assert "network_gb_s 50 is a factor of 2 outside the published runs" in half.reasons
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
    assert present(of_p5.nearest).profile in {"p5", "p5e"}
    for profile in ("h100_ib", str(tmp_path / "mine.yaml")):
        other = evidence(layout("gpt3_1.3b", 2, cluster=profile))
        assert (other.status, other.nearest) == (of_p5.status, of_p5.nearest)
    # As `calibrate` measures p5: the devices are the same.
    measured = ("cluster.hardware.bf16_tflops=1000", "cluster.hardware.memory_gib=79.2")
    assert evidence(layout("gpt3_1.3b", 2, *measured, cluster="p5")).nearest == of_p5.nearest
    assert present(evidence(layout("gpt3_1.3b", 2, cluster="a100_ib")).nearest).profile == "p4d"


def test_the_generation_of_the_software_is_named() -> None:
    old = evidence_text(evidence(layout("gpt3_1.3b", 1, cluster="p5")))
    assert "interpolated between published runs; for software of 2023-26; nearest run" in old
    one_gpu = ("cluster.devices_per_node=1", "train.global_batch=8", "train.micro_batch=8")
    for profile in ("p5e", "p5en"):
        new = layout("gpt3_1.3b", 1, *one_gpu, "train.precision=bf16_mixed", cluster=profile)
        text = evidence_text(evidence(new))
        assert "; for software of 2023-26" in text
        assert "nearest run h200-gpt3-1.3b-loop: " in text
        assert new.seq_per_s == pytest.approx(8 / 0.2709, rel=0.06), "as measured on an H200"


def test_software_without_published_runs_is_beyond_them() -> None:
    def of(years: str, cluster: str) -> RunEvidence:
        software = f"cluster.hardware.software='{years}'"
        return evidence(layout("llama2_7b", 8, software, "parallel.zero=3", cluster=cluster))

    today, earlier, unknown = of("2023-26", "p5"), of("2022-23", "p5"), of("2019", "p5")
    assert (today.generations, earlier.generations) == ("2023-26", "2022-23")
    assert today.status == "interpolated"
    assert (unknown.status, unknown.nearest) == ("beyond", None)
    assert unknown.reasons[0] == (
        "no published run on p5 has software of 2019, only of 2022-23, 2023-26"
    )
    low, high = present(unknown.interval)
    assert high / low > present(today.interval)[1] / present(today.interval)[0]
    assert of("2022", "p5").status == "beyond", "those rows are of A100"
    assert of("2022", "p4de").status != "beyond"


def test_the_interval_is_of_publishers_that_were_left_out() -> None:
    def runs(*errors: tuple[str, float]) -> list[MeasuredRun]:
        first = published_runs()[0]
        return [replace(first, publisher=name, left_out=math.exp(e)) for name, e in errors]

    few = runs(("a", 0.1), ("b", -0.1))
    assert half_width(few, 0) == pytest.approx(2.92 * 0.1, rel=1e-3)  # Student's t, 2 degrees
    assert half_width(few, 1) == pytest.approx(1.5 * half_width(few, 0))
    # More rows of a publisher do not make it weigh more, or others' deviations better known.
    assert half_width(runs(*[("a", 0.1)] * 50, ("b", -0.1)), 0) == pytest.approx(half_width(few, 0))
    more = runs(*[(name, 0.1) for name in "abcdefgh"])
    assert half_width(more, 0) == pytest.approx(1.86 * 0.1, rel=1e-3)


def test_nine_of_ten_left_out_rows_are_inside() -> None:
    runs, hits = published_runs(), defaultdict(list)
    for run in runs:
        others = [r for r in runs if r.generation == run.generation]
        others = [r for r in others if r.publisher != run.publisher]
        device = [r for r in others if r.bf16_tflops == pytest.approx(run.bf16_tflops, rel=0.15)]
        octaves = sum(outside(run.point, device).values()) if device else FAR
        inside = abs(math.log(run.left_out)) <= half_width(others, octaves)
        hits[run.generation].append(inside)
    assert all(sum(of) / len(of) >= 0.85 for of in hits.values())


def test_assumed_networks_and_software_of_different_years() -> None:
    batch = "train.global_batch=1024"
    span = network_range(layout("llama2_7b", 16, batch))
    assert present(span)[0] < layout("llama2_7b", 16, batch).seq_per_s < present(span)[1]
    assert network_range(layout("llama2_7b", 1, batch)) is None, "no network"
    assert network_range(layout("gpt3_1.3b", 2, cluster="p5")) is None, "not assumed"

    def plans(*profiles: str, software: str = "2023-26") -> list[RecipePlan]:
        override = [f"cluster.hardware.software='{software}'"]
        configs = [resolve("gpt3_1.3b", profile, override) for profile in profiles]
        return [plan_recipe(config, [], lambda _: [], None, None) for config in configs]

    assert plan_warnings(plans("p4d", "p5", "h100_ib", "p6-b200")) == []
    assert plan_warnings(plans("p4d", "p5") + plans("p5en", software="2022")) == [
        "these profiles were fitted to software of different years, and newer software is faster, "
        "so that their speeds cannot be compared: p5en: 2022; p4d, p5: 2023-26"
    ]


def test_fp8_is_beyond_published_runs() -> None:
    in_bf16, in_fp8 = (
        evidence(layout("llama3_8b", 2, f"train.precision={precision}", cluster="p5"))
        for precision in ("bf16_mixed", "fp8_mixed")
    )
    assert in_bf16.status == "interpolated"
    assert in_fp8.status == "beyond"
    assert in_fp8.reasons.count("no run in fp8_mixed is among the published ones") == 1
    assert sum("fp8" in reason for reason in in_fp8.reasons) == 1
