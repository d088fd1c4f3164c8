"""Each departure with its cause, in runs of which only the curves and the settings are made up."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_rows import MakeFile, Row, make_rows

from slurmllm.analysis import compare as package
from slurmllm.analysis.compare.alignment import Alignment
from slurmllm.analysis.compare.columns import clue_table
from slurmllm.analysis.compare.compare import compare
from slurmllm.analysis.compare.recorded import find_differences
from slurmllm.analysis.compare.result import Comparison
from slurmllm.core.metrics.curves import Setting
from slurmllm.core.metrics.source import read_curve

K = 61
Compared = Callable[..., Comparison]
RECIPE: dict[str, Setting] = {
    **{"train.seed": 1, "train.precision": "fp32", "train.steps": 120, "train.micro_batch": 2},
    **{"optim.lr": 1e-3, "optim.grad_clip": 1.0, "model.num_layers": 2, "parallel.tensor": 1},
    **{"train.log_every": 10, "slurm.time": "1:00:00", "checkpoint.keep": 3, "name": "a"},
}


def changed(**factors: Any) -> list[Row]:
    """Rows whose metrics are multiplied: metric → (first step, function of steps since)."""
    rows = make_rows(1, 120)
    for metric, (first, factor) in factors.items():
        for row in rows:
            if row["step"] >= first:
                row[metric] *= factor(row["step"] - first)
    return rows


@pytest.fixture
def compared(make_file: MakeFile) -> Compared:
    def run(
        b: list[Row],
        settings: Mapping[str, Setting] | None = None,
        nodes: Mapping[int, tuple[str, ...]] | None = None,
        reference: list[Row] | None = None,
    ) -> Comparison:
        curve = read_curve(make_file("a", reference or make_rows(1, 120)))
        other = read_curve(make_file("b", b))
        if settings is not None:
            curve = replace(curve, settings=RECIPE)
            other = replace(other, settings=RECIPE | dict(settings))
        return compare(curve, replace(other, nodes=nodes or {}))

    return run


def drift(size: float) -> Callable[[int], float]:
    return lambda since: 1 + size * (since + 1) / 60


def scattered(size: float, mean: float = 0.0) -> Callable[[int], float]:
    random = np.random.default_rng(0)
    return lambda since: 1 + mean + size * random.standard_normal()


def diagnosed(comparison: Comparison) -> tuple[str, int]:
    assert not comparison.match
    first = comparison.causes[0]
    diagnosis = comparison.diagnosis
    assert diagnosis
    assert (diagnosis.kind, diagnosis.step) == (first.kind, first.step)
    assert (first.evidence in comparison.reason) == (first.confidence != "possible")
    return first.kind, first.step


def kinds(comparison: Comparison) -> list[str]:
    return [cause.kind for cause in comparison.causes]


def test_the_corner_of_a_warm_up_between_logged_points_is_no_cause(make_file: MakeFile) -> None:
    a = read_curve(make_file("a", make_rows(1, 700)[9::10]))
    b = read_curve(make_file("b", make_rows(1, 700)[6::7]))
    comparison = find_differences(a, b, Alignment(a, b, "step", None, None))
    assert "lr" not in {cause.kind for cause in comparison}
    faster = [row | {"lr": 1.2 * row["lr"]} for row in make_rows(1, 700)[6::7]]
    b = read_curve(make_file("c", faster))
    (lr,) = (
        c for c in find_differences(a, b, Alignment(a, b, "step", None, None)) if c.kind == "lr"
    )
    assert lr.step == 20  # of 10 it is the corner that makes up for it


def test_a_bad_rank(compared: Compared) -> None:
    rows = changed(
        grad_norm=(K, lambda _: 1.03), loss=(K + 1, drift(2e-3)), param_norm=(K, drift(1e-4))
    )
    for row in rows:
        row["attempt"] = int(row["step"] >= K)
    comparison = compared(rows, {"parallel.tensor": 2}, {0: ("n1", "n2"), 1: ("n1", "n9")})
    assert diagnosed(comparison) == ("gradient", K)
    assert "attempt 1 of B on n1, n9 made it" in comparison.reason
    assert "slurmllm health" in comparison.reason


@pytest.mark.parametrize(
    ("size", "growth", "digits", "later", "kind"),
    [
        (1e-5, 1.0, None, 2.0, "optimizer"),  # small, and it grows: weights that differ a little
        (1e-3, 1.0, None, 2.0, "gradient"),  # it grows, but the loss would show such weights
        (1e-3, 0.0, None, 0.0, "gradient"),  # at once, whatever a loss of zero long after
        (1e-3, 0.0, None, math.nan, "gradient"),
        (1e-3, 0.0, 2, 2.0, "gradient"),  # few digits show no weights: possible only
        (0.5, 0.0, 2, 2.0, "gradient"),
    ],
)
def test_a_gradient_norm_before_the_loss(
    compared: Compared, size: float, growth: float, digits: int | None, later: float, kind: str
) -> None:
    rows = changed(grad_norm=(K, lambda s: 1 + size * (1 + growth * s)), loss=(K + 2, drift(2e-2)))
    reference = make_rows(1, 120)
    for row in rows + reference:
        del row["param_norm"]
        row["loss"] = later if row["step"] == 110 else row["loss"]
        if digits is not None:
            row["loss"] = round(row["loss"], digits)
    comparison = compared(rows, reference=reference)
    first = next(cause for cause in comparison.causes if cause.kind != "not_finite")
    assert first.kind == kind
    assert ("health" in comparison.reason) == (kind == "gradient" and first.confidence == "likely")
    if digits == 2:
        assert (first.confidence == "likely") == (size > 0.25)


@pytest.mark.parametrize(
    ("factors", "begin", "kind", "sentence"),
    [
        ((2, 2), 1, "logging", "is about 2 times that of A"),
        ((2, 2), 0, "logging", "is about 2 times that of A"),
        ((1.5, 1.0), 1, "model", "is 1.44 times that of A"),
        ((1.5, 1.0), 0, "model", "is 1.44 times that of A"),
        ((2, 2), 1000, "seed", "nothing in common"),  # a log that begins later shows no start
    ],
)
def test_a_seed_explains_no_factor(
    make_file: MakeFile, factors: tuple[float, float], begin: int, kind: str, sentence: str
) -> None:
    """Losses of another seed that are twice as large, or only at the first step half as large."""
    a, b = make_rows(1, 120), make_rows(1, 120)
    noise = np.random.default_rng(3)
    for row in a + b:
        row["loss"] *= 1 + 0.02 * noise.standard_normal()
        row["grad_norm"] *= 1 + 0.1 * noise.standard_normal()
        del row["param_norm"]
    for row in b:
        row["loss"] *= factors[row["step"] > 1]
    for row in a + b:
        row["step"] += begin - 1
    comparison = compare(read_curve(make_file("a", a)), read_curve(make_file("b", b)))
    assert comparison.causes[0].kind == kind
    assert sentence in comparison.causes[0].evidence


def test_another_seed_than_that_of_losses_that_end_at_0(compared: Compared) -> None:
    reference = make_rows(1, 120)
    for row in reference[40:]:
        row["loss"] = 0.0
    rows = changed(loss=(1, drift(0.5)), grad_norm=(1, drift(0.5)), param_norm=(1, drift(0.1)))
    comparison = compared(rows, {"train.seed": 2}, reference=reference)
    assert diagnosed(comparison) == ("seed", 1)
    assert "times that of A" not in comparison.reason


def test_another_batch_or_update_at_one_step(compared: Compared) -> None:
    rows = changed(grad_norm=(K, drift(0.5)), loss=(K, drift(0.3)), param_norm=(K, drift(1e-4)))
    comparison = compared(rows)
    assert diagnosed(comparison) == ("model", K)
    assert {"batches", "data", "mesh"} < set(kinds(comparison))
    assert not {"optimizer", "lr"} & set(kinds(comparison))
    assert "no column before" in comparison.causes[0].evidence
    rows = changed(
        param_norm=(K, drift(1e-2)), loss=(K + 1, drift(0.1)), grad_norm=(K + 1, drift(0.2))
    )
    assert diagnosed(compared(rows)) == ("optimizer", K)
    for row in rows:
        del row["lr"]
    assert diagnosed(compared(rows)) == ("lr", K)


def test_a_learning_rate_or_one_metric_alone(compared: Compared) -> None:
    rows = changed(lr=(K, lambda _: 2.0), loss=(K + 1, drift(0.1)), grad_norm=(K + 1, drift(0.2)))
    others = {"optim.lr": 2e-3, "name": "b", "slurm.time": "2:00:00", "train.log_every": 1}
    comparison = compared(rows, others | {"checkpoint.keep": 9})
    assert diagnosed(comparison) == ("lr", K)
    assert comparison.settings == (f"learning rates differ from step {K} (0.001 and 0.002)",)
    comparison = compared(changed(loss=(K, lambda _: 1.02)))
    assert diagnosed(comparison) == ("logging", K)
    assert comparison.causes[0].confidence == "certain"
    assert "the training is the same" in comparison.reason


def test_data_in_another_order_and_other_weights(compared: Compared) -> None:
    rows = changed(loss=(1, scattered(0.1, 0.06)), grad_norm=(1, scattered(0.3)))
    assert diagnosed(compared(rows)) == ("batches", 1)
    assert diagnosed(compared(rows, {"train.seed": 2})) == ("seed", 1)
    norms = {"grad_norm": (1, scattered(0.1)), "param_norm": (1, lambda _: 1.001)}
    rows = changed(loss=(1, scattered(0.02, 0.02)), **norms)
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
def test_settings_of_runs(
    compared: Compared, setting: str, value: Setting, kind: str, message: str
) -> None:
    first = 2 if kind == "optimizer" else 1  # another update shows in the next step's loss
    rows = changed(
        loss=(first, drift(0.02)), grad_norm=(first, drift(0.05)), param_norm=(1, drift(1e-3))
    )
    comparison = compared(rows, {setting: value})
    confidence = "likely" if kind == "mesh" else "certain"
    assert comparison.causes[0].confidence == confidence
    assert diagnosed(comparison)[0] == kind
    assert comparison.settings == (message,)


def test_settings_and_curves_that_were_bit_identical_until_late(compared: Compared) -> None:
    rows = changed(grad_norm=(K, drift(0.1)), loss=(K, drift(0.1)), param_norm=(K, drift(1e-4)))
    assert "precision differs" not in compared(rows, {"train.precision": "bf16"}).reason
    for row in rows:
        row["attempt"] = int(row["step"] >= K)
    assert diagnosed(compared(rows, {"train.precision": "bf16"}))[0] == "precision"
    rows = changed(loss=(1, drift(0.02)), grad_norm=(1, drift(0.05)), param_norm=(1, drift(1e-3)))
    comparison = compared(rows, {"train.precision": "bf16"})
    assert comparison.metrics["loss"].first_difference_step == 1
    onset = min(metric.onset_step or 0 for metric in comparison.metrics.values())
    assert onset > 1
    assert diagnosed(comparison) == ("precision", 1)
    assert f"diverges at step {onset}" in comparison.reason
    assert comparison.reason.count("step 1;") == 1
    assert "; the first difference is at step 1; cause (certain): precision" in comparison.reason


WITHOUT = {"three": ("param_norm",), "loss": ("param_norm", "grad_norm", "lr")}


def noisy(rows: list[Row], seed: int = 0) -> list[Row]:
    """Rows whose losses and gradient norms scatter as those of batches do."""
    random = np.random.default_rng(seed)
    for row in rows:
        row["loss"] *= 1 + 0.03 * random.standard_normal()
        row["grad_norm"] *= 1 + 0.1 * random.standard_normal()
    return rows


def without(rows: list[Row], *columns: str) -> list[Row]:
    return [{name: row[name] for name in row if name not in columns} for row in rows]


@pytest.fixture
def asked(make_file: MakeFile) -> Compared:
    def run(a: list[Row], b: list[Row], columns: str = "four", every: int = 1) -> Comparison:
        left_out = (*WITHOUT.get(columns, ()), "tokens")
        curves = []
        for name, rows in (("a", a), ("b", b)):
            rows = [row for row in rows if row["step"] % every == 0]
            curves.append(read_curve(make_file(name, without(rows, *left_out))))
        return compare(curves[0], curves[1])

    return run


def first(comparison: Comparison) -> tuple[str, str, int]:
    cause = comparison.causes[0]
    return cause.kind, cause.confidence, cause.step


def test_a_rank_dropped_from_step_1_is_no_other_data(asked: Compared) -> None:
    b = changed(
        grad_norm=(1, lambda since: 0.6 + 0.1 * np.sin(since)),
        loss=(2, drift(0.02)),
        param_norm=(1, drift(1e-4)),
    )
    for columns in ("four", "three"):
        comparison = asked(make_rows(1, 120), b, columns)
        assert first(comparison) == ("gradient", "likely", 1)
        assert {"mesh", "batches"} < set(kinds(comparison))
        assert kinds(comparison)[-1] == "unknown"
    comparison = asked(make_rows(1, 120), b, every=10)
    assert first(comparison)[1] != "certain"
    assert "gradient" in kinds(comparison)
    assert "by step 10" in comparison.causes[-1].evidence


@pytest.mark.parametrize("columns", ["four", "three"])
def test_a_norm_logged_after_clipping_is_another_log(asked: Compared, columns: str) -> None:
    b = [row | {"grad_norm": min(row["grad_norm"], 0.85)} for row in make_rows(1, 120)]
    assert first(asked(make_rows(1, 120), b, columns)) == ("logging", "certain", 1)


@pytest.mark.parametrize(
    ("digits", "cause"), [(5, ("logging", "certain")), (1, ("model", "possible"))]
)
def test_norms_of_few_digits_prove_that_losses_far_apart_are_logged(
    asked: Compared, digits: int, cause: tuple[str, str]
) -> None:
    a = [row | {"grad_norm": round(row["grad_norm"], digits)} for row in make_rows(1, 120)]
    b = [row | {"loss": row["loss"] * (1.002 + 1e-4 * (i % 3))} for i, row in enumerate(a)]
    assert first(asked(a, b, "three"))[:2] == cause


def test_a_factor_of_the_norm_and_weight_decay_off_from_the_start(asked: Compared) -> None:
    comparison = asked(make_rows(1, 120), changed(grad_norm=(1, lambda _: 2.0)))
    assert first(comparison)[:2] == ("logging", "likely")
    assert {"gradient", "mesh", "batches"} < set(kinds(comparison))
    b = changed(param_norm=(1, drift(0.02)), loss=(2, drift(-5e-3)), grad_norm=(2, drift(0.1)))
    assert first(asked(make_rows(1, 120), b)) == ("optimizer", "likely", 1)
    later = changed(loss=(3, drift(-5e-3)), grad_norm=(3, drift(0.1)))
    assert first(asked(make_rows(1, 120), b, "three")) == ("optimizer", "likely", 2)
    assert first(asked(make_rows(1, 120), later, "three"))[1] == "possible"


def test_factors_of_a_noisy_loss(asked: Compared) -> None:
    a = noisy(make_rows(1, 120))
    b = noisy(make_rows(1, 120), 1)
    for row in b:
        row["loss"] *= 1.85
    for columns in ("four", "three", "loss"):
        comparison = asked(a, b, columns)
        assert not {"rounding", "precision"} & set(kinds(comparison))
        assert "data" in kinds(comparison)
    a, b = noisy(make_rows(1, 120)), noisy(make_rows(1, 120))
    for row in b:
        row["loss"] *= 1.005
    assert first(asked(a, b)) == ("logging", "certain", 1)
    assert first(asked(a, b, "loss")) == ("logging", "likely", 1)


def test_points_ten_steps_apart_and_the_loss_by_itself_name_nothing(asked: Compared) -> None:
    b = changed(grad_norm=(K, drift(0.5)), loss=(K + 1, drift(0.3)), param_norm=(K, drift(1e-3)))
    comparison = asked(make_rows(1, 120), b, every=10)
    assert {cause.confidence for cause in comparison.causes} == {"possible"}
    assert {"gradient", "model", "mesh", "optimizer", "unknown"} < set(kinds(comparison))
    assert "between steps 60 and 70" in comparison.causes[0].evidence
    assert "10 steps apart" in comparison.causes[0].evidence
    comparison = asked(make_rows(1, 120), changed(loss=(K, drift(0.3))), "loss")
    assert first(comparison) == ("unknown", "possible", K)
    assert {"lr", "gradient", "logging"} < set(kinds(comparison))


def test_weights_rounded_after_each_update(asked: Compared) -> None:
    random = np.random.default_rng(2)
    b = changed(
        param_norm=(1, lambda _: 1 + 2e-4 * random.standard_normal()),
        loss=(2, lambda since: 1 + 1e-3 * since / 30),
        grad_norm=(2, drift(0.02)),
    )
    assert first(asked(make_rows(1, 120), b))[0] == "precision"


@pytest.mark.parametrize("count", [lambda s: s + 30, lambda s: 4 * s, lambda s: s + s // 7])
def test_the_same_losses_at_other_steps_are_another_count(
    asked: Compared, count: Callable[[int], int]
) -> None:
    rows = noisy(make_rows(1, 120))
    moved = [row | {"step": count(row["step"])} for row in rows[10:100]]
    comparison = asked(rows, moved)
    assert first(comparison)[:2] == ("logging", "certain")
    assert len(comparison.causes) == 1
    assert f"step {count(11)} of B is step 11 of A" in comparison.reason


@pytest.mark.parametrize("spike", [math.inf, 1e9, 1.2e4])
def test_a_first_loss_that_is_huge_proves_no_other_count(asked: Compared, spike: float) -> None:
    """The digits of one value say nothing of the others."""
    rows, moved = noisy(make_rows(1, 120)), noisy(make_rows(1, 120))
    rows[0]["loss"] = spike
    for row, number in zip(moved, range(120), strict=True):
        row["loss"] *= 1.1 + 0.05 * math.sin(number)
        row["grad_norm"] *= 1.2
    moved[1]["loss"] = spike
    assert "logging" not in {
        cause.kind for cause in asked(rows, moved).causes if cause.confidence == "certain"
    }


def test_a_step_that_a_resume_counts_twice(asked: Compared) -> None:
    rows = noisy(make_rows(1, 120))
    moved = rows[:60] + [row | {"step": row["step"] + 1} for row in rows[59:119]]
    assert first(asked(rows, moved))[:2] == ("logging", "certain")


def test_every_clue_is_used_and_named_once() -> None:
    folder = Path(package.__file__).parent
    source = "".join(path.read_text() for path in folder.glob("*.py"))
    for name, clue in clue_table().items():
        assert f'"{name}"' in source, name
        texts = dict.fromkeys(
            ["columns", "steps", "letter", "other", "before", "ratio", "step_a", "step_b"], ""
        )
        assert clue.text.format(at="at step 1", gap=10, step=1, limit=1.0, **texts)
        assert all(points > 0 for points in clue.points.values())


@pytest.mark.parametrize(("command", "kind"), [("torchrun train.py", "likely"), (None, "possible")])
def test_another_number_of_processes(make_file: MakeFile, command: str | None, kind: str) -> None:
    """Its batch may be another one with another project's trainer, and is not with ours."""
    factors: dict[str, Any] = {"loss": (1, drift(0.1)), "grad_norm": (1, drift(-0.2))}
    one, two = (
        replace(
            read_curve(make_file(f"{num}", rows)),
            settings={"command.run": command, "cluster.devices_per_node": num},
        )
        for num, rows in ((1, make_rows(1, 120)), (2, changed(**factors)))
    )
    causes = {cause.kind: cause for cause in compare(one, two).causes}
    assert causes["mesh"].confidence == kind
    assert "devices_per_node 1 and 2" in causes["mesh"].evidence
