import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from training_rows import MakeFile, MakeRun, Row, make_row, make_rows

from slurmllm.analysis.compare.compare import compare
from slurmllm.analysis.compare.result import Comparison, Tolerances
from slurmllm.core.config.recipe import OptimConfig
from slurmllm.core.errors import RunError
from slurmllm.core.metrics.curves import Curve
from slurmllm.core.metrics.source import read_curve
from slurmllm.core.run.artifact_records import DataRecord
from slurmllm.core.run.records import JobsRecord, SkippedBatches, SkipsRecord, Submission
from slurmllm.train.schedules import learning_rate

Compared = Callable[..., Comparison]


def scaled(rows: list[Row], metric: str, share: float, first: int) -> list[Row]:
    return [
        row | {metric: row[metric] * (1 + share)} if row["step"] >= first else row for row in rows
    ]


def departed(rows: list[Row], share: float, first: int) -> list[Row]:
    return scaled(scaled(rows, "loss", share, first), "grad_norm", 2 * share, first)


@pytest.fixture
def compared(make_file: MakeFile) -> Compared:
    def run(a: list[Row], b: list[Row], **options: Any) -> Comparison:
        tolerances = Tolerances(**options.pop("tolerances", {}))
        curves = (read_curve(make_file("a", a)), read_curve(make_file("b", b)))
        return compare(*curves, tolerances, **options)

    return run


def test_a_restarted_run_is_the_unbroken_one(make_run: MakeRun) -> None:
    a = read_curve(make_run("a", make_rows(1, 50)).path)
    b = read_curve(make_run("b", make_rows(1, 30), make_rows(21, 50, 1)).path)
    result = compare(a, b, Tolerances(exact=True))
    assert result.match
    assert result.steps_compared == 50
    assert result.overlaps["a"].rows == 0
    assert (result.overlaps["b"].rows, result.overlaps["b"].identical) == (10, True)
    assert result.b.restarts == (21,)
    assert not result.warnings
    second = scaled(make_rows(21, 50, 1), "loss", 1e-4, 21)
    result = compare(a, read_curve(make_run("c", make_rows(1, 30), second).path))
    assert result.match
    assert result.warnings == (
        "B (c): 10 rows recomputed after a restart differ by up to 1e-4 relative from the first "
        "ones; its resume was not bit-exact",
    )


def test_a_schedule_changed_at_a_resume_is_not_the_fault_of_the_resume(make_run: MakeRun) -> None:
    a = read_curve(make_run("a", make_rows(1, 50)).path)
    second = scaled(make_rows(21, 50, 1), "lr", -0.5, 26)
    run = make_run("b", make_rows(1, 30), departed(second, 0.1, 27))
    old = read_curve(run.path)  # its jobs.json does not have the change
    assert (old.overlap_rows, old.overlap_identical) == (5, True)
    changes = {"optim.decay_start": (None, 25), "train.log_every": (10, 5)}
    common = {"nodes": 1, "local": True, "submitted_at": 1.0}
    first = Submission.model_validate({**common, "first_attempt": 0})
    resumed = Submission.model_validate({**common, "first_attempt": 1, "changes": changes})
    JobsRecord(submissions=(first, resumed)).save(run.jobs)
    result = compare(a, read_curve(run.path))
    text = "the schedule was changed at the resume of attempt 1 (optim.decay_start none → 25)"
    (warning,) = result.warnings
    assert warning.startswith("B (b): steps from 26 were computed again with another learning rate")
    assert f"{text} (certain)" in warning
    assert "bit-exact" not in warning
    cause = result.causes[0]
    assert (cause.kind, cause.confidence, cause.step) == ("lr", "certain", 26)
    assert text.replace("schedule", "schedule of B") in cause.evidence
    (unrecorded,) = compare(a, old).warnings
    assert "at the resume of attempt 1 or before (certain)" in unrecorded


def test_a_departure_is_found_at_its_step_by_the_tolerance(compared: Compared) -> None:
    result = compared(make_rows(1, 50), scaled(make_rows(1, 50), "loss", -0.012, 37))
    assert (result.verdict, result.match) == ("differ", False)
    assert result.reason.startswith("loss diverges at step 37: 1.2e-2 relative, tolerance 1e-3")
    assert "; bit-identical up to step 36" in result.reason
    assert result.bit_identical_to_step == 36
    loss, norm = result.metrics["loss"], result.metrics["grad_norm"]
    assert loss.first_departure_step == 37
    assert loss.first_departure_rel_diff == pytest.approx(0.012)
    assert loss.departures == 14
    assert loss.max_rel_diff == pytest.approx(0.012)
    assert loss.mean_rel_diff == pytest.approx(0.012 * 14 / 50)
    assert not loss.bit_identical
    assert norm.bit_identical
    a, b = make_rows(1, 50), scaled(make_rows(1, 50), "loss", 5e-4, 11)
    within = compared(a, b)
    assert within.verdict == "match"
    assert within.reason.endswith(
        "a lasting bias of 1e-3 in loss or 1e-2 in grad_norm would have been found; "
        "bit-identical up to step 10"
    )
    assert within.reason.startswith("loss within 1e-3 (5e-4 at most) and grad_norm within 1e-2")
    beyond = compared(a, b, tolerances={"loss": 4e-4})
    assert beyond.reason.startswith("loss diverges at step 11: 5e-4 relative, tolerance 4e-4")
    other = scaled(make_rows(1, 50), "grad_norm", 5e-3, 11)
    assert compared(a, other).match
    assert not compared(a, other, tolerances={"grad_norm": 4e-3}).match


def test_exact_tells_one_bit_and_zero_from_minus_zero(compared: Compared) -> None:
    a, b = [make_row(1, grad_norm=0.0)], [make_row(1, grad_norm=-0.0)]
    assert compared(a, b, tolerances={"grad_norm": 0.0}).match
    assert not compared(a, b, tolerances={"exact": True}).match
    rows = make_rows(1, 50)
    rows[24]["loss"] = math.nextafter(rows[24]["loss"], 0)
    assert compared(make_rows(1, 50), rows, tolerances={"loss": 1e-12}).match
    result = compared(make_rows(1, 50), rows, tolerances={"exact": True})
    assert not result.match
    assert result.metrics["loss"].first_departure_step == 25
    assert result.reason.startswith("loss diverges at step 25: ")
    assert "relative, bit-identical values required" in result.reason
    assert "; bit-identical up to step 24" in result.reason


def with_rates(rates: Sequence[float]) -> list[Row]:
    return [row | {"lr": lr} for row, lr in zip(make_rows(1, 50), rates, strict=True)]


def test_rates_that_are_the_same_one_step_apart_are_never_certain(compared: Compared) -> None:
    """Some log the rate of the step, others that of the next one, with five digits."""
    optim = OptimConfig.model_validate({"lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 10})
    rates = [float(f"{learning_rate(optim, 100, step):.5g}") for step in range(1, 52)]
    a, b = with_rates(rates[:-1]), with_rates(rates[1:])
    for first, second in ((a, b), (b, a)):
        assert compared(first, second).warnings == ()
        changed = without(departed(second, 0.05, 2), "param_norm")
        result = compared(without(first, "param_norm"), changed)
        assert "the same one step apart" in result.settings[0]
        assert {c.confidence for c in result.causes if c.kind == "lr"} == {"likely"}
    slower = with_rates([0.99 * rate for rate in rates[1:]])
    result = compared(a, departed(slower, 0.05, 21))
    assert "apart" not in result.settings[0]


@pytest.mark.parametrize(("every", "digits"), [(1, 4), (10, 9)])
def test_rates_of_other_schedules_are_not_one_step_apart(
    compared: Compared, every: int, digits: int
) -> None:
    """Rates that print alike, or whose points are ten steps apart, show no step."""
    peaks = (3e-4, 4e-4) if every == 1 else (1e-3, 1e-3)
    rates = [[round(peak * min(1, (n + 1) / 30), digits) for n in range(51)] for peak in peaks]
    a, b = with_rates(rates[0][:50]), with_rates(rates[1][every // 10 :][:50])
    for row in a + b:
        row["step"] *= every
    assert "apart" not in compared(a, departed(b, 0.05, 4 * every)).settings[0]


def test_another_batch_or_skipped_tokens_are_the_cause(compared: Compared) -> None:
    rows = departed(scaled(make_rows(1, 50), "tokens", 1.0, 1), 0.05, 1)
    result = compared(make_rows(1, 50), rows)
    assert result.reason.endswith("cause (certain): tokens per step differ (4,096 and 8,192)")
    single = compared(make_rows(1, 1), rows[:1])
    assert single.settings == ("tokens per step differ (4,096 and 8,192)",)
    rows = [row | {"tokens": row["tokens"] + 4096 * (row["step"] > 30)} for row in make_rows(1, 50)]
    result = compared(make_rows(1, 50), rows)
    assert result.settings == ("tokens trained on differ from step 31 (126,976 and 131,072)",)
    assert result.warnings == (f"the curves match although {result.settings[0]}",)


def test_different_lengths_compare_the_common_steps(compared: Compared) -> None:
    result = compared(make_rows(1, 50), make_rows(11, 60))
    assert result.match
    assert (result.steps_compared, result.first_step, result.last_step) == (40, 11, 50)
    assert result.only_in_a == ((1, 10),)
    assert result.only_in_b == ((51, 60),)
    assert result.warnings == (
        "only A (a) has steps 1–10; they are not compared",
        "only B (b) has steps 51–60; they are not compared",
    )
    rows = [row for row in make_rows(1, 50) if row["step"] not in (7, 20, 21)]
    result = compared(make_rows(1, 50), rows)
    assert result.only_in_a == result.b.missing == ((7, 7), (20, 21))
    assert "B (b) lacks steps 7, 20–21" in result.warnings
    rows = scaled(make_rows(1, 50), "loss", 0.1, 31)
    result = compared(make_rows(1, 50), rows, from_step=5, to_step=30)
    assert result.match
    assert (result.first_step, result.last_step, result.steps_compared) == (5, 30, 26)
    assert not result.only_in_a
    assert compared(make_rows(1, 50), rows, from_step=40).metrics["loss"].departures == 11


def test_no_common_step_is_unusable(compared: Compared) -> None:
    with pytest.raises(RunError, match="no step in common: a has 1–5, b has 6–9"):
        compared(make_rows(1, 5), make_rows(6, 9))
    with pytest.raises(RunError, match="no common step from 10 to the last"):
        compared(make_rows(1, 5), make_rows(1, 9), from_step=10)
    with pytest.raises(RunError, match="no common step from 4 to 2"):
        compared(make_rows(1, 5), make_rows(1, 9), from_step=4, to_step=2)


def without(rows: list[Row], metric: str) -> list[Row]:
    return [{name: value for name, value in row.items() if name != metric} for row in rows]


def test_no_loss_is_unusable_and_no_gradient_norm_a_warning(compared: Compared) -> None:
    with pytest.raises(RunError, match="no loss in"):
        compared(make_rows(1, 5), without(make_rows(1, 5), "loss"))
    odd, even = make_rows(1, 6), make_rows(1, 6)
    for row in odd[::2] + even[1::2]:
        del row["loss"]
    with pytest.raises(RunError, match="a loss at different steps only"):
        compared(odd, even)
    result = compared(make_rows(1, 5), without(make_rows(1, 5), "grad_norm"))
    assert result.match
    assert list(result.metrics) == ["loss"]
    assert result.reason == "loss is bit-identical at all 5 steps compared"
    assert result.warnings == ("grad_norm is missing at 5 of 5 common steps",)


@pytest.mark.parametrize(("value", "exact"), [(math.nan, True), (math.inf, False)])
def test_values_that_are_no_finite_number_differ(
    compared: Compared, value: float, exact: bool
) -> None:
    rows = make_rows(1, 50)
    rows[9]["loss"] = value
    result = compared(make_rows(1, 50), rows, tolerances={"exact": exact})
    same = "; bit-identical up to step 9; cause (certain): loss differs at step 10 only and then"
    assert result.reason.startswith(f"loss is not a finite number in B at step 10{same} no more")
    assert [cause.kind for cause in result.causes] == ["not_finite", "transient"]
    loss = result.metrics["loss"]
    assert (loss.first_departure_step, loss.first_departure_rel_diff) == (10, None)
    assert (loss.max_rel_diff, loss.departures) == (0, 1)
    assert (loss.non_finite_a, loss.non_finite_b) == (0, 1)
    both = compared(rows, rows, tolerances={"exact": exact})
    assert both.metrics["loss"].bit_identical
    assert both.reason == (
        "loss is not a finite number in A at step 10 and in B at step 10; "
        "bit-identical up to step 50"
    )
    nowhere = compared(*[[make_row(1, loss=value)]] * 2)
    assert nowhere.metrics["loss"].max_rel_diff is None
    assert json.dumps(nowhere.to_dict(), allow_nan=False)
    early = compared(make_rows(1, 50), scaled(rows, "loss", 0.5, 5))
    assert early.reason == (
        "loss diverges at step 5: 3.33e-1 relative, tolerance 1e-3, "
        "and is not a finite number in B at step 10; bit-identical up to step 4"
    )


def test_the_verdict_does_not_depend_on_the_order(compared: Compared) -> None:
    a, b = make_rows(1, 50), scaled(make_rows(1, 45), "loss", 2e-3, 8)
    result, other = compared(a, b), compared(b, a)
    assert (result.verdict, result.reason) == (other.verdict, other.reason)
    for metric, mirrored in zip(result.metrics.values(), other.metrics.values(), strict=True):
        assert metric == mirrored.model_copy(update={"bias": -mirrored.bias})
    assert (result.only_in_a, result.only_in_b) == (other.only_in_b, other.only_in_a)


def data_record(**changed: object) -> DataRecord:
    corpus = {"path": "/data/a.arrow", "fingerprint": "12ab", "documents": 9, "weight": 1.0}
    fields = {"corpora": [corpus], "tokenizer": "77", "mask": "none", "validation": 0.0}
    sizes = {"seed": 1, "seq_len": 8, "global_batch": 4}
    return DataRecord.model_validate(fields | sizes | changed)


def test_runs_that_saw_other_data(make_run: MakeRun) -> None:
    def curve(name: str, scale: float, **changed: object) -> Curve:
        run = make_run(name, departed(make_rows(1, 50), scale, 1))
        data_record(**changed).save(run.data)
        return read_curve(run.path)

    a = curve("a", 0)
    other = {"path": "b.arrow", "fingerprint": "34cd", "documents": 9, "weight": 1.0}
    result = compare(a, curve("b", 0.05, corpora=[other], seed=2))
    differences = ("corpora a.arrow (12ab) and b.arrow (34cd)", "seed 1 and 2")
    assert result.data
    assert (result.data.same, result.data.differences) == (False, differences)
    cause = f"they did not see the same data: {', '.join(differences)}"
    assert result.reason.endswith(f"; cause (certain): {cause}")
    moved = {"path": "/elsewhere/a.arrow", "fingerprint": "12ab", "documents": 9, "weight": 7.0}
    result = compare(a, curve("c", 0, corpora=[moved]))
    assert result.data
    assert result.data.same
    assert not result.settings


def test_runs_that_skipped_data_after_a_divergence(make_run: MakeRun) -> None:
    def curve(name: str, *skips: SkippedBatches) -> Curve:
        recomputed = departed(make_rows(21, 50, 1), 0.2 if skips else 0, 26)
        run = make_run(name, make_rows(1, 30), recomputed)
        data_record().save(run.data)
        if skips:
            SkipsRecord(skips=skips).save(run.skips)
        return read_curve(run.path)

    skip = SkippedBatches(first=26, last=30, roll_back_to=20, onset=26, attempt=0, reason="nan")
    result = compare(curve("a"), curve("b", skip))
    assert result.reason.endswith("; cause (certain): B skipped batches 26–30")
    assert result.overlaps["b"].rows == 0, "rows that were undone are not made again"
    assert not result.warnings
    assert result.data
    assert result.data.differences == ("B skipped batches 26–30",)
    assert compare(curve("c", skip), curve("d", skip)).match
    third = compare(curve("e"), curve("f", skip), letter="C")
    assert third.reason.endswith("; cause (certain): C skipped batches 26–30")
    assert third.data
    assert third.data.differences == ("C skipped batches 26–30",)


def test_a_departure_in_independent_scatter_is_dated_at_its_step(compared: Compared) -> None:
    def rows(seed: int, departed: bool) -> list[Row]:
        random = np.random.default_rng(seed)
        noisy = make_rows(1, 1500)
        for row in noisy:
            row["loss"] = (2 + 6 * math.exp(-row["step"] / 300)) * random.normal(1, 2e-3)
            row["loss"] *= 1.02 if departed and row["step"] >= 900 else 1
        return noisy

    assert compared(rows(1, False), rows(2, False)).verdict == "equivalent"
    result = compared(rows(1, False), rows(2, True))
    assert result.verdict == "differ"
    onset = result.metrics["loss"].onset_step
    assert onset == pytest.approx(900, abs=5)
    assert [cause.step for cause in result.causes] == [onset]
