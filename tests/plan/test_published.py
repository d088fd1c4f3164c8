"""The planner against what others measured and chose; the bounds are the issue's."""

from __future__ import annotations

import planner
import planner_meshes
import pytest


@pytest.mark.parametrize("hardware", ["trn1", "p4d", "p5"])
def test_models_that_nothing_was_fitted_to(hardware: str) -> None:
    found = planner.cases(hardware)
    checked = [case for case in found if case.row.model not in planner.FITTED[hardware]]
    verdict = planner.judge("checked", checked, None)
    assert verdict.tuned >= 12
    assert verdict.tuned_mean <= planner.MEAN[hardware]


def test_no_tuned_row_on_trn1_is_far_off() -> None:
    verdict = planner.judge("all", planner.cases("trn1"), None)
    assert verdict.tuned > verdict.count / 2
    assert verdict.tuned_largest <= planner.LARGEST


@pytest.mark.parametrize("hardware", ["trn1", "p4d", "p5"])
def test_constants_are_physical(hardware: str) -> None:
    figures = planner.cases(hardware)[0].row.config.cluster.hardware
    assert figures is not None
    for name, (low, high) in planner.SEARCHED[hardware].items():
        assert low <= getattr(figures, name) <= high


def test_meshes_that_aws_chose() -> None:
    found = planner_meshes.judged()
    assert sum("skipped" not in one for one in found) > 20
    assert [one["name"] for one in found if one.get("wrong")] == []
