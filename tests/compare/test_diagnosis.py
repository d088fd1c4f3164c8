"""Each departure with its cause, in runs of which only the curves and the settings are made up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from training_rows import MakeFile, Row, make_rows

from slurmllm.compare.alignment import Alignment
from slurmllm.compare.causes import find_differences
from slurmllm.compare.compare import compare
from slurmllm.compare.comparison import Comparison, Tolerances
from slurmllm.metrics.curves import Setting
from slurmllm.metrics.source import read_curve

K = 61
RECIPE: dict[str, Setting] = {
    "train.seed": 1, "train.precision": "fp32", "train.steps": 120, "train.micro_batch": 2,
    "optim.lr": 1e-3, "optim.grad_clip": 1.0, "model.num_layers": 2, "parallel.tensor": 1,
    "train.log_every": 10, "slurm.time": "1:00:00", "checkpoint.keep": 3, "name": "a",
}  # fmt: skip


def changed(**factors: Any) -> list[Row]:
    """Rows whose metrics are multiplied: metric → (first step, function of steps since)."""
    rows = make_rows(1, 120)
    for metric, (first, factor) in factors.items():
        for row in rows:
            if row["step"] >= first:
                row[metric] *= factor(row["step"] - first)
    return rows


@pytest.fixture
def compared(make_file: MakeFile):  # type: ignore[no-untyped-def]
    def run(
        b: list[Row],
        settings: Mapping[str, Setting] | None = None,
        nodes: Mapping[int, tuple[str, ...]] | None = None,
    ) -> Comparison:
        one = read_curve(make_file("a", make_rows(1, 120)))
        other = read_curve(make_file("b", b))
        if settings is not None:
            one = replace(one, settings=RECIPE)
            other = replace(other, settings=RECIPE | dict(settings))
        return compare(one, replace(other, nodes=nodes or {}))

    return run


def drift(size: float):  # type: ignore[no-untyped-def]
    return lambda since: 1 + size * (since + 1) / 60


def scattered(size: float, mean: float = 0.0):  # type: ignore[no-untyped-def]
    random = np.random.default_rng(0)
    return lambda since: 1 + mean + size * random.standard_normal()


def diagnosed(found: Comparison) -> tuple[str, int]:
    assert not found.match
    first = found.causes[0]
    assert found.diagnosis is not None
    assert (found.diagnosis.kind, found.diagnosis.step) == (first.kind, first.step)
    assert (first.evidence in found.reason) == (first.confidence != "possible")
    return first.kind, first.step


def kinds(found: Comparison) -> list[str]:
    return [cause.kind for cause in found.causes]


def test_a_rank_that_is_bad_from_the_first_step(compared) -> None:
    rows = changed(grad_norm=(1, lambda _: 1.06), loss=(2, drift(1e-5)))
    assert diagnosed(compared(rows)) == ("gradient", 1)


def test_single_losses_that_are_off_say_nothing_of_the_gradients(compared) -> None:
    noise = scattered(1e-6)
    rows = changed(grad_norm=(1, noise), loss=(119, lambda _: 1.5))
    found = compared(rows)
    assert diagnosed(found)[1] == 119
    assert "batches" in kinds(found)
    assert "likely" not in {cause.confidence for cause in found.causes}


def test_roundings_where_the_same_bits_were_asked_for(make_file: MakeFile) -> None:
    other = changed(loss=(1, scattered(2e-5)), grad_norm=(1, scattered(5e-4)))
    a, b = (
        read_curve(make_file(name, rows)) for name, rows in (("a", make_rows(1, 120)), ("b", other))
    )
    assert compare(a, b).match
    assert diagnosed(compare(a, b, Tolerances(exact=True))) == ("rounding", 1)


def test_the_corner_of_a_warm_up_between_logged_points_is_no_cause(make_file: MakeFile) -> None:
    a = read_curve(make_file("a", make_rows(1, 700)[9::10]))
    b = read_curve(make_file("b", make_rows(1, 700)[6::7]))
    found = find_differences(a, b, Alignment(a, b, "step", None, None))
    assert "lr" not in {cause.kind for cause in found}
    faster = [row | {"lr": 1.2 * row["lr"]} for row in make_rows(1, 700)[6::7]]
    b = read_curve(make_file("c", faster))
    (lr,) = (
        c for c in find_differences(a, b, Alignment(a, b, "step", None, None)) if c.kind == "lr"
    )
    assert lr.step == 20  # of 10 it is the corner that makes up for it


def test_a_bad_rank(compared) -> None:
    rows = changed(
        grad_norm=(K, lambda _: 1.03), loss=(K + 1, drift(2e-3)), param_norm=(K, drift(1e-4))
    )
    for row in rows:
        row["attempt"] = int(row["step"] >= K)
    found = compared(rows, {"parallel.tensor": 2}, {0: ("n1", "n2"), 1: ("n1", "n9")})
    assert diagnosed(found) == ("gradient", K)
    assert "attempt 1 of B on n1, n9 took over at step 61" in found.reason
    assert "slurmllm health" in found.reason


def test_another_batch_or_forward_pass_at_one_step(compared) -> None:
    rows = changed(grad_norm=(K, drift(0.5)), loss=(K, drift(0.3)), param_norm=(K, drift(1e-4)))
    found = compared(rows)
    assert diagnosed(found) == ("model", K)
    assert {"batches", "data", "mesh"} < set(kinds(found))
    assert not {"optimizer", "lr"} & set(kinds(found))
    assert "no column before" in found.causes[0].evidence


def test_another_update(compared) -> None:
    rows = changed(
        param_norm=(K, drift(1e-2)), loss=(K + 1, drift(0.1)), grad_norm=(K + 1, drift(0.2))
    )
    assert diagnosed(compared(rows)) == ("optimizer", K)
    for row in rows:
        del row["lr"]
    assert diagnosed(compared(rows)) == ("lr", K)


def test_a_learning_rate_and_nothing_that_cannot_matter(compared) -> None:
    rows = changed(lr=(K, lambda _: 2.0), loss=(K + 1, drift(0.1)), grad_norm=(K + 1, drift(0.2)))
    others = {"optim.lr": 2e-3, "name": "b", "slurm.time": "2:00:00", "train.log_every": 1}
    found = compared(rows, others | {"checkpoint.keep": 9})
    assert diagnosed(found) == ("lr", K)
    assert found.settings == (f"learning rates differ from step {K} (0.001 and 0.002)",)


def test_data_in_another_order(compared) -> None:
    rows = changed(loss=(1, scattered(0.1, 0.06)), grad_norm=(1, scattered(0.3)))
    assert diagnosed(compared(rows)) == ("batches", 1)
    assert diagnosed(compared(rows, {"train.seed": 2})) == ("seed", 1)


def test_another_seed_of_the_weights(compared) -> None:
    rows = changed(
        loss=(1, scattered(0.02, 0.02)),
        grad_norm=(1, scattered(0.1)),
        param_norm=(1, lambda _: 1.001),
    )
    assert diagnosed(compared(rows)) == ("seed", 1)


@pytest.mark.parametrize(
    ("setting", "value", "kind", "message"),
    [
        ("train.precision", "bf16", "precision", "precision differs (fp32 and bf16)"),
        ("model.num_layers", 4, "model", "models differ (num_layers 2 and 4)"),
        ("optim.grad_clip", 0.5, "optimizer", "optimizers differ (grad_clip 1 and 0.5)"),
        ("train.micro_batch", 4, "mesh", "meshes differ (micro_batch 2 and 4)"),
    ],
)
def test_settings_that_change_the_curves(
    compared, setting: str, value: Setting, kind: str, message: str
) -> None:
    first = 2 if kind == "optimizer" else 1  # another update shows in the next step's loss
    rows = changed(
        loss=(first, drift(0.02)), grad_norm=(first, drift(0.05)), param_norm=(1, drift(1e-3))
    )
    found = compared(rows, {setting: value})
    confidence = "likely" if kind == "mesh" else "certain"
    assert found.causes[0].confidence == confidence
    assert diagnosed(found)[0] == kind
    assert found.settings == (message,)


def test_settings_are_no_cause_of_curves_that_were_bit_identical_until_late(compared) -> None:
    rows = changed(grad_norm=(K, drift(0.1)), loss=(K, drift(0.1)), param_norm=(K, drift(1e-4)))
    assert "precision differs" not in compared(rows, {"train.precision": "bf16"}).reason
    for row in rows:
        row["attempt"] = int(row["step"] >= K)
    assert diagnosed(compared(rows, {"train.precision": "bf16"}))[0] == "precision"


def test_roundings_drift(compared) -> None:
    random = np.random.default_rng(1)

    def apart(since: int) -> float:
        return 1 + 2e-5 * 1.07**since * (1 + 0.2 * random.standard_normal())

    found = compared(changed(loss=(1, apart), grad_norm=(1, apart)))
    assert {"rounding", "precision"} < set(kinds(found))
    assert diagnosed(found)[1] == 1


def test_roundings_begin_before_they_leave_the_tolerance(compared) -> None:
    rows = changed(loss=(1, drift(0.02)), grad_norm=(1, drift(0.05)), param_norm=(1, drift(1e-3)))
    found = compared(rows, {"train.precision": "bf16"})
    assert found.metrics["loss"].first_difference_step == 1
    onset = min(metric.onset_step or 0 for metric in found.metrics.values())
    assert onset > 1
    assert diagnosed(found) == ("precision", 1)
    assert f"differ from step 1 on, beyond the tolerance from step {onset}" in found.reason
    later = changed(loss=(K, drift(0.02)), grad_norm=(K, drift(0.05)))
    for row in later:
        row["attempt"] = int(row["step"] >= K)
    assert diagnosed(compared(later, {"train.precision": "bf16"})) == ("precision", K)


def test_values_that_differ_within_the_tolerance_match(compared) -> None:
    found = compared(changed(loss=(5, scattered(1e-6))))
    assert found.match
    assert found.metrics["loss"].first_difference_step == 5
    assert found.metrics["grad_norm"].first_difference_step is None


def test_a_match_has_no_diagnosis(compared) -> None:
    found = compared(make_rows(1, 120), {"train.precision": "bf16", "parallel.tensor": 2})
    assert found.match
    assert found.diagnosis is None
    assert found.warnings == ("the curves match although precision differs (fp32 and bf16)",)


def test_a_metric_that_differs_alone_is_no_other_training(compared) -> None:
    found = compared(changed(loss=(K, lambda _: 1.02)))
    assert diagnosed(found) == ("logging", K)
    assert found.causes[0].confidence == "certain"
    assert "the training is the same" in found.reason
