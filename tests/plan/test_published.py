"""The planner against what others measured and chose; the bounds are the issue's."""

from __future__ import annotations

import statistics

import planner
import planner_meshes
import pytest
from published_rows import zero_stage

from slurmllm.plan.evidence import published_runs


@pytest.mark.parametrize("group", ["trn1", "gpu", "gpu-2026"])
def test_the_shipped_table_is_of_the_shipped_model(group: str) -> None:
    """Rows and constants are those that `planner.py --write` saw, and none is near a bound."""
    answer = [case for case in planner.all_cases(group) if planner.is_evidence(case)]
    remaining = {run.name: run for run in published_runs()}
    for case in answer:
        assert remaining[case.row.name].seq_per_s == pytest.approx(case.row.measured, rel=1e-3)
    # The table's errors are of constants fitted without the model: close to those of all rows.
    off = [abs(case.ratio() - remaining[case.row.name].left_out) for case in answer]
    assert statistics.median(off) < (0.03 if group == "gpu-2026" else 0.02)  # two models, or six
    for constant, value in zip(
        planner.CONSTANTS[group], planner.shipped(group, answer), strict=True
    ):
        assert constant.bounds[0] <= value <= constant.bounds[1]


@pytest.mark.parametrize("kind", ["A100", "H100", "H200"])
def test_models_left_out_are_predicted(kind: str) -> None:
    profiles = {"A100": ("p4d", "p4de"), "H100": ("p5",), "H200": ("p5e",)}[kind]
    runs = [run for run in published_runs() if run.profile in profiles]
    assert statistics.mean(abs(run.left_out - 1) for run in runs) <= planner.GOALS[kind]
    for nodes in planner.BIAS_NODES:
        off = [run.left_out - 1 for run in runs if run.nodes == nodes and kind == "H100"]
        assert not off or abs(statistics.mean(off)) <= planner.BIAS


@pytest.mark.long
def test_layouts_of_trn1_left_out_are_predicted() -> None:
    answer = [case for case in planner.all_cases("trn1") if planner.is_evidence(case)]
    results = planner.leave_out("trn1", planner.layouts(answer), planner.layouts(answer))
    assert len(results) == 17
    off = statistics.mean(abs(result.left_out - 1) for result in results)
    assert off <= planner.GOALS["trn1 layouts"]
    assert off < statistics.mean(abs(result.constant - 1) for result in results) / 2


@pytest.mark.parametrize(
    ("cell", "stage"),
    [("", 0), ("1", 1), ("FSDP FULL_SHARD", 3), ("SHARD_GRAD_OP", 2), ("fsdp NO_SHARD", 0)],
)
def test_stages_as_pytorch_names_them(cell: str, stage: int) -> None:
    assert zero_stage(cell) == stage


def test_meshes_that_aws_chose() -> None:
    answer = planner_meshes.judged()
    assert sum("skipped" not in item for item in answer) > 20
    assert [item["name"] for item in answer if item.get("wrong")] == []
