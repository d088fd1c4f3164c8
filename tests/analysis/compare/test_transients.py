"""Differences that pass, values that are not finite, printed digits and resumes, as causes."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from departures.answers import curve as curve_of

from slurmllm.analysis.compare.alignment import Points
from slurmllm.analysis.compare.compare import compare
from slurmllm.analysis.compare.result import Comparison, Tolerances
from slurmllm.core.metrics.curves import Floats, SourceKind
from slurmllm.core.metrics.source import read_curve

N, K = 120, 61
Rows = list[tuple[float, float]]  # loss and gradient norm of each step
Write = Callable[..., Path]


def trained(factor: Callable[[int], float] = lambda step: 1.0, scatter: float = 0.0) -> Rows:
    """Return the rows of a training whose loss is multiplied, and its norm twice as much."""
    random, noise = np.random.default_rng(7), np.random.default_rng(8)
    rows = []
    for step in range(1, N + 1):
        loss = 2 + 6 * np.exp(-step / 30) + 0.05 * random.standard_normal()
        norm = 1 + 2 * np.exp(-step / 20) + 0.1 * random.standard_normal()
        by = factor(step) * (1 + scatter * noise.standard_normal())
        rows.append((float(loss * by), float(norm * (2 * by - 1))))
    return rows


def jsonl(path: Path, rows: Rows, steps: Iterable[int] = range(1, N + 1)) -> Path:
    lines = [
        json.dumps({"step": step, "loss": loss, "grad_norm": norm})
        for step, (loss, norm) in zip(steps, rows, strict=True)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def megatron(path: Path, rows: Rows, steps: Iterable[int] = range(1, N + 1)) -> Path:
    lines = [
        f" iteration {step:8d}/ {N:8d} | consumed samples: {step * 16:12d} "
        f"| learning rate: 3.0E-04 | global batch size: 16 | lm loss: {loss:.4E} "
        f"| loss scale: 1.0 | grad norm: {norm:.3f} |"
        for step, (loss, norm) in zip(steps, rows, strict=True)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def of_files(a: Path, b: Path, **tolerances: bool) -> Comparison:
    return compare(read_curve(a), read_curve(b), Tolerances.model_validate(tolerances))


def causes(comparison: Comparison) -> list[tuple[str, str, int]]:
    return [(cause.kind, cause.confidence, cause.step) for cause in comparison.causes]


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "a.jsonl", trained())


def jump(*steps: int, by: float = 1.25) -> Callable[[int], float]:
    return lambda step: by if step in steps else 1.0


@pytest.mark.parametrize("write", [jsonl, megatron])
@pytest.mark.parametrize(("steps", "at"), [((25,), "step 25"), ((40, 41, 60), "steps 40–41, 60")])
def test_differences_after_which_values_are_the_same_again(
    a: Path, tmp_path: Path, write: Write, steps: tuple[int, ...], at: str
) -> None:
    other = write(tmp_path / f"b.{'log' if write is megatron else 'jsonl'}", trained(jump(*steps)))
    result = of_files(a, other)
    assert result.verdict == "differ"
    assert causes(result) == [("transient", "certain", steps[0])]
    assert f"loss and grad_norm differ at {at} only" in result.reason
    assert f"(from step {steps[-1] + 1})" in result.reason
    assert f"up to step {steps[0] - 1}" in result.reason


def test_differences_under_roundings_or_with_few_values_after_them(a: Path, tmp_path: Path) -> None:
    b = jsonl(tmp_path / "b.jsonl", trained(jump(70, 71), scatter=1e-6))
    result = of_files(a, b)
    assert causes(result) == [("transient", "likely", 70)]
    assert "at steps 70–71 only and then no more than before (from step 72)" in result.reason
    for step, cause in ((N - 4, "likely"), (N - 1, "possible")):
        result = of_files(a, jsonl(tmp_path / "b.jsonl", trained(jump(step))))
        assert causes(result)[0] == ("transient", cause, step)
    assert "unknown" in [cause.kind for cause in result.causes]
    result = of_files(a, jsonl(tmp_path / "b.jsonl", trained(jump(N))))
    assert result.causes[0].kind == "model"


@pytest.mark.parametrize(
    "factor",
    [
        lambda step: 1.25 if step >= K else 1.0,
        lambda step: 1.25 if step >= 5 else 1 + 1e-6 * (step % 3),
        lambda step: (1.25 if step >= K else 1.0) + 1e-6 * (step % 3),
    ],
    ids=["from-identical", "early-in-roundings", "late-in-roundings"],
)
def test_a_jump_is_no_rounding(a: Path, tmp_path: Path, factor: Callable[[int], float]) -> None:
    kinds = [
        cause.kind for cause in of_files(a, jsonl(tmp_path / "b.jsonl", trained(factor))).causes
    ]
    assert "model" in kinds
    assert not {"rounding", "precision", "transient"} & set(kinds)


def test_roundings_are_named_only_if_the_largest_difference_is_one(a: Path, tmp_path: Path) -> None:
    small = of_files(a, jsonl(tmp_path / "b.jsonl", trained(scatter=1e-6)), exact=True)
    assert causes(small)[0] == ("rounding", "likely", 1)
    rows = trained(jump(N), scatter=1e-6)
    with_jump = of_files(a, jsonl(tmp_path / "c.jsonl", rows), exact=True)
    assert "rounding" not in [cause.kind for cause in with_jump.causes]
    few = [read_curve(tmp_path / f"{name}.jsonl").take(np.arange(4)) for name in "ab"]
    assert compare(few[0], few[1], Tolerances(exact=True)).causes[0].confidence == "possible"


NAN = float("nan")


@pytest.mark.parametrize(
    ("write", "scatter", "same"),
    [
        (megatron, 0.0, "; the same as printed up to step 60"),
        (jsonl, 0.0, "; bit-identical up to step 60"),
        (jsonl, 1e-6, "; the first difference is at step 1"),
    ],
)
def test_a_run_that_is_not_finite_to_its_end(
    a: Path, tmp_path: Path, write: Write, scatter: float, same: str
) -> None:
    rows = trained(scatter=scatter)[: K - 1] + [(NAN, NAN)] * (N - K + 1)
    other = write(tmp_path / f"b.{'log' if write is megatron else 'jsonl'}", rows)
    result = of_files(a, other)
    assert causes(result)[:2] == [("not_finite", "certain", K), ("gradient", "possible", K)]
    assert [(kind, step) for kind, _, step in causes(result)[2:]] == [("unknown", K)]
    assert result.causes[0].evidence == f"loss is not a finite number in B from step {K} on"
    assert result.reason == (
        f"loss is not a finite number in B at step {K}; grad_norm is not a finite number in B at "
        f"step {K}{same}"
    )


@pytest.mark.parametrize(("norm", "kind"), [(1.0, "logging"), (NAN, "gradient")])
def test_finite_gradient_norms_rule_out_weights_that_are_not(
    tmp_path: Path, norm: float, kind: str
) -> None:
    rows = trained()
    bad = [(NAN, of_step * norm) for _, of_step in rows[K - 1 :]]
    result = of_files(
        jsonl(tmp_path / "a.jsonl", rows), jsonl(tmp_path / "b.jsonl", [*rows[: K - 1], *bad])
    )
    assert [cause[0] for cause in causes(result)] == ["not_finite", kind, "unknown"]


SHORT = (8.34, 8.07, 7.68, 7.26, 6.9, 6.8, 6.7, 6.6, 6.5, 6.45, 6.4, 6.35)
APART = (8.34, 8.10, 7.88, 7.66, 7.2, 7.0, 6.95, 6.9, 6.8, 6.7, 6.65, 6.6)


@pytest.mark.parametrize("begin", [0, 1])
@pytest.mark.parametrize("same", [1, 2, 3, 4])
def test_the_onset_is_an_unequal_point_and_its_figure_is_of_there(
    tmp_path: Path, begin: int, same: int
) -> None:
    other = [*SHORT[:same], *APART[same:]]
    for name, losses in (("a", SHORT), ("b", other)):
        rows = ({"step": begin + i, "loss": loss} for i, loss in enumerate(losses))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = of_files(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    loss, at = result.metrics["loss"], begin + same
    size = abs(other[same] - SHORT[same]) / other[same]
    assert (loss.first_difference_step, loss.onset_step) == (at, at)
    assert loss.lasting_departure_step == at
    assert loss.onset_rel_diff == pytest.approx(size)
    mantissa, exponent = f"{size:.2e}".split("e")
    text = f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    assert f"diverges at step {at}: {text} relative" in result.reason
    assert f"the same in the 3 digits logged up to step {at - 1}" in result.reason
    assert {cause.step for cause in result.causes} == {at}


def test_the_onset_is_a_point_whose_printed_digits_differ(a: Path, tmp_path: Path) -> None:
    b = megatron(tmp_path / "b.log", trained(lambda step: 1 + 5e-4 * max(0, step - 30)))
    result = of_files(a, b)
    onset = min(metric.onset_step or N for metric in result.metrics.values())
    visible = min(metric.first_visible_step or N for metric in result.metrics.values())
    assert 31 <= visible <= onset <= 34
    assert result.bit_identical_to_step is None
    assert f"the same as printed up to step {visible - 1}" in result.reason


RESUMED = (*range(1, 61), *range(51, N + 1))  # from the checkpoint of step 50


def resumed(first: int, size: float, scatter: float = 0.0) -> Rows:
    rows = trained(scatter=scatter)
    later = trained(lambda step: 1 + size * max(0, step + 1 - first), scatter)
    return rows[:60] + later[50:]


@pytest.mark.parametrize("write", [jsonl, megatron])
@pytest.mark.parametrize("first", [51, 52])
def test_a_log_that_was_resumed_where_the_curves_part(
    a: Path, tmp_path: Path, write: Write, first: int
) -> None:
    other = write(
        tmp_path / ("b.log" if write is megatron else "b.jsonl"), resumed(first, 3e-3), RESUMED
    )
    result = of_files(a, other)
    assert result.b.restarts == (51,)
    assert causes(result)[0] == ("resume", "likely", 51)
    assert (
        "likely cause: B was resumed at step 51, where the curves begin to differ" in result.reason
    )
    assert {"optimizer", "data", "unknown"} <= {cause.kind for cause in result.causes}


def test_a_resume_under_roundings_is_possible_and_one_long_before_is_none(
    a: Path, tmp_path: Path
) -> None:
    noisy = resumed(53, 2e-3, scatter=1e-6)
    assert causes(of_files(a, jsonl(tmp_path / "b.jsonl", noisy, RESUMED)))[0][0] == "resume"
    late = of_files(a, jsonl(tmp_path / "c.jsonl", resumed(80, 3e-3), RESUMED))
    assert "resume" not in [cause.kind for cause in late.causes]
    # Whether a run's records are known changes nothing; an overlap with the same values does.
    for changes in ({"settings": {"train.seed": 1}}, {"kind": "run"}):
        recorded = replace(read_curve(tmp_path / "b.jsonl"), **changes)
        kinds = [cause.kind for cause in compare(read_curve(a), recorded).causes]
        assert "resume" in kinds
    exact = replace(recorded, overlap_identical=True)
    assert "resume" not in [cause.kind for cause in compare(read_curve(a), exact).causes]


def values(*numbers: float | np.float32) -> Floats:
    return np.array(numbers, dtype=np.float64)


@pytest.mark.parametrize(
    ("a", "b", "kind", "same"),
    [
        # Four significant digits, and the log of fewer decides
        (values(12.3449, 1.23449, 0.123456), values(12.34, 1.234, 0.1235), "text", [1, 1, 1]),
        (values(12.3451, 1.23456, 0.123444), values(12.34, 1.234, 0.1235), "text", [0, 0, 0]),
        # Two decimals
        (values(12.3449, 1.23, 0.124), values(12.34, 1.23, 0.12), "text", [1, 1, 1]),
        # Constants, and values of all digits
        (values(1e-3, 1e-3, 1e-3), values(1.2e-3, 1.2e-3, 1.2e-3), "jsonl", [0, 0, 0]),
        (values(1.0, 2.0, 3.0), values(1.0, 2.0, 3.1), "jsonl", [1, 1, 0]),
        (values(2.345, 1.234, np.inf), values(2.345, np.nan, 1.0), "text", [1, 0, 0]),
        (values(0.1, 0.7, np.nan), values(np.float32(0.1), 0.7, 1.0), "tensorboard", [1, 1, 0]),
    ],
)
def test_values_are_compared_by_the_digits_that_are_printed(
    a: Floats, b: Floats, kind: SourceKind, same: list[int]
) -> None:
    curve = replace(curve_of("x", {"loss": np.zeros(1)}), kind="jsonl")
    points = Points(np.arange(3), np.arange(3.0), a, b)
    printed = points.as_printed(curve, replace(curve, kind=kind))
    assert (printed.a == printed.b).tolist() == [bool(flag) for flag in same]
    assert np.array_equal(printed.a, a, equal_nan=True)


def test_norms_of_few_digits_that_are_the_same_as_printed_match(a: Path, tmp_path: Path) -> None:
    rows = [(loss, round(norm, 1)) for loss, norm in trained()]
    (tmp_path / "b.csv").write_text(
        "step,loss,grad_norm\n" + "".join(f"{i},{x!r},{y}\n" for i, (x, y) in enumerate(rows, 1))
    )
    result = of_files(a, tmp_path / "b.csv")
    assert result.verdict in ("differ", "equivalent")  # two digits are no precision of a log
    text = tmp_path / "b.log"
    megatron(text, rows)
    result = of_files(a, text)
    assert result.verdict == "match"
    assert "grad_norm the same as printed (" in result.reason
