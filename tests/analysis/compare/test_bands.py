"""The band of two precisions, on trainings of both.

`precision_runs.npz` has loss, gradient norm and parameter norm of 160 steps [steps, 3] of tiny_neox
with three layers of width 64, 128 and 256 and two seeds each, trained on a GPU in each precision
and, in bf16_sr, with a departure. Keys: width-seed-precision+departure.
"""

import json
import math
from itertools import accumulate, combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from slurmllm.analysis.compare.alignment import Points
from slurmllm.analysis.compare.bands import BandResult, compare_with_band, precision_limits
from slurmllm.analysis.compare.compare import compare
from slurmllm.analysis.compare.result import (
    Comparison,
    Statistics,
    Tolerances,
    running_mean,
    statistics,
)
from slurmllm.cli.compare import compare as command
from slurmllm.core.errors import RunError, UserError
from slurmllm.core.metrics.curves import Curve, Floats, signed_difference

COLUMNS = ("loss", "grad_norm", "param_norm")
MODELS = [f"{width}-{seed}" for width in ("w64", "w128", "w256") for seed in (1, 2)]
STEPS = 160


@pytest.fixture(scope="module")
def runs() -> dict[str, Floats]:
    with np.load(Path(__file__).with_name("precision_runs.npz")) as archive:
        return {name: archive[name].astype(np.float64) for name in archive.files}


def rates(peak: float = 2e-3) -> Floats:
    """Ten steps of warm-up and a cosine to a tenth, as the runs had."""
    step = np.arange(1, STEPS + 1)
    share = np.clip((step - 10) / (STEPS - 10), 0, 1)
    falling = peak * (0.1 + 0.9 * (1 + np.cos(np.pi * share)) / 2)
    return np.where(step <= 10, peak * step / 10, falling)


def make_curve(values: Floats, name: str = "run", **settings: Any) -> Curve:
    columns = {metric: values[:, place] for place, metric in enumerate(COLUMNS)}
    return Curve(
        name=name,
        path=Path("/logs") / name,
        steps=np.arange(1, len(values) + 1),
        attempts=np.zeros(len(values), dtype=np.int64),
        columns=columns | {"lr": rates()[: len(values)]},
        settings={key.replace("__", "."): value for key, value in settings.items()},
    )


def as_precision(a: Floats, b: Floats, *precisions: str) -> Comparison:
    curves = make_curve(a, "a"), make_curve(b, "b")
    return compare(*curves, basis="precision", precisions=(precisions[0], precisions[1]))


@pytest.mark.parametrize("model", MODELS[::2])
@pytest.mark.parametrize("pair", list(combinations(("fp32", "bf16_mixed", "bf16_sr"), 2)))
def test_precisions_match(runs: dict[str, Floats], model: str, pair: tuple[str, str]) -> None:
    a, b = (runs[f"{model}-{precision}"] for precision in pair)
    comparison = as_precision(a, b, *pair)
    assert comparison.verdict == "match", comparison.reason
    assert comparison.basis.precisions == pair
    assert set(comparison.metrics) == set(COLUMNS)
    assert comparison.reason.startswith(f"as {pair[0]} and {pair[1]}, loss within ")
    # The limits still decide something.
    assert comparison.power["loss"] < 5e-3
    assert comparison.power["param_norm"] < 4e-3


def test_departures_are_still_found(runs: dict[str, Floats]) -> None:
    verdicts: dict[str, list[str]] = {}
    for name, values in runs.items():
        model, _, rest = name.rpartition("-")
        if "+" not in rest and rest != "bf16":
            continue
        precision, _, departure = rest.partition("+")
        comparison = as_precision(runs[f"{model}-bf16_mixed"], values, "bf16_mixed", precision)
        verdicts.setdefault(departure or rest, []).append(comparison.verdict)
    always = {"bf16", "lr1.02", "lr0.98", "wd0.1", "beta2_0.99"}
    assert always | {"noclip"} == verdicts.keys()
    for departure in always:
        assert set(verdicts[departure]) == {"differ"}, departure
        assert len(verdicts[departure]) >= 5
    # Without clipping a training of width 64 is hardly another one.
    assert verdicts["noclip"].count("differ") >= len(verdicts["noclip"]) - 1


def limits_of(curve: Curve, *precisions: str) -> dict[str, Any]:
    from slurmllm.analysis.compare.alignment import Alignment

    alignment = Alignment(curve, curve, "step", None, None)
    nothing = np.zeros(len(curve.steps))
    points = {name: (alignment.points_of(name), nothing) for name in COLUMNS}
    return precision_limits(curve, precisions, points, Tolerances(loss=0, grad_norm=0))


def test_limits_grow_with_the_walk_of_the_weights(runs: dict[str, Floats]) -> None:
    values = runs["w128-1-bf16_mixed"]
    curve = make_curve(values, model__init_std=0.02)
    limits = limits_of(curve, "bf16_mixed", "bf16_sr")
    # By hand: the median over the steps of the gradient norm over the loss times the walk
    walk = np.sqrt(2**-8 * 0.02 * np.cumsum(rates()))
    assert limits["loss"].bias == pytest.approx(3 * np.median(values[:, 1] / values[:, 0] * walk))
    assert limits["param_norm"].bias == pytest.approx(0.6 * np.median(walk))
    quadruple = make_curve(values, model__init_std=0.08)
    assert limits_of(quadruple, "fp32", "bf16_sr")["loss"].bias == pytest.approx(
        2 * limits["loss"].bias
    )
    # fp32 rounds 2^15 times as finely; plain bf16 is biased, so that no noise excuses it.
    fine = limits_of(curve, "fp32", "fp32")["loss"].bias
    assert fine == pytest.approx(limits["loss"].bias / math.sqrt(2**15))
    assert limits_of(curve, "bf16", "bf16_sr")["loss"] == (0, 0, False)


def test_amplified_roundings_are_equivalent(runs: dict[str, Floats]) -> None:
    """The gradient norm of an unstable training scatters by more than roundings do."""
    random = np.random.default_rng(3)
    a = runs["w64-1-bf16_mixed"].copy()
    a[:, 1] *= np.exp(0.1 * random.standard_normal(STEPS))  # what the batches make of it
    b = a.copy()
    b[:, 1] *= np.exp(np.linspace(0.02, 0.08, STEPS) * random.standard_normal(STEPS))
    unstable = as_precision(a, b, "bf16_mixed", "bf16_sr")
    assert unstable.verdict == "equivalent", unstable.reason
    assert unstable.match
    assert compare(make_curve(a), make_curve(b, "b"), basis="tolerance").verdict == "differ"
    # The loss has no such excuse: a quarter of its own noise is of other batches.
    b = a.copy()
    b[:, 0] *= np.exp(np.linspace(0, 0.03, STEPS) * random.standard_normal(STEPS))
    assert as_precision(a, b, "bf16_mixed", "bf16_sr").verdict == "differ"


def test_chosen_if_nothing_else_that_is_recorded_differs(runs: dict[str, Floats]) -> None:
    a, b = runs["w128-1-bf16_mixed"], runs["w128-1-bf16_sr"]
    mixed = make_curve(a, "a", train__precision="bf16_mixed", optim__weight_decay=0.01)
    stochastic = make_curve(b, "b", train__precision="bf16_sr", optim__weight_decay=0.01)
    chosen = compare(mixed, stochastic)
    assert chosen.basis.kind == "precision"
    assert chosen.basis.reason == "selected because only the precision differs"
    assert not [warning for warning in chosen.warnings if "although" in warning]
    assert chosen.settings, "it stays on record"
    assert compare(mixed, stochastic, basis="tolerance").basis.kind == "tolerance"
    exact = compare(mixed, stochastic, Tolerances(exact=True))
    assert (exact.basis.kind, exact.verdict) == ("exact", "differ")
    decayed = make_curve(b, "b", train__precision="bf16_sr", optim__weight_decay=0.1)
    assert compare(mixed, decayed).basis.kind == "tolerance"
    assert compare(mixed, make_curve(b, "b")).basis.kind == "tolerance", "not recorded"
    nearest = make_curve(b, "b", train__precision="bf16", optim__weight_decay=0.01)
    assert compare(mixed, nearest).basis.kind == "tolerance", "no band allows for a bias"
    asked = compare(mixed, decayed, basis="precision")
    assert asked.basis.precisions == ("bf16_mixed", "bf16_sr")
    assert any("optimizers differ" in warning for warning in asked.warnings)
    # Of a difference the band allows for the precision: the rest is the cause.
    far = make_curve(b * 1.05, "far", train__precision="bf16_sr", optim__weight_decay=0.1)
    named = compare(mixed, far, basis="precision")
    assert named.verdict == "differ"
    assert "precision differs" not in named.reason


@pytest.fixture
def logs(runs: dict[str, Floats], tmp_path: Path) -> dict[str, Path]:
    """Logs of another framework, which record no setting."""
    paths = {}
    for name in ("bf16_mixed", "bf16_sr", "bf16_sr+lr1.02"):
        rows = np.column_stack([np.arange(1, STEPS + 1), runs[f"w64-1-{name}"], rates()])
        path = paths[name] = tmp_path / f"{name}.csv"
        lines = [
            ",".join(["step", *COLUMNS, "lr"]),
            *(",".join(map(repr, row)) for row in rows.tolist()),
        ]
        path.write_text("\n".join(lines) + "\n")
    return paths


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(command, [*map(str, arguments), "--no-plot"])
    assert result.exception is None or isinstance(
        result.exception, SystemExit | UserError | RunError
    ), result.exception
    return result


def test_precisions_of_foreign_logs_are_named(logs: dict[str, Path]) -> None:
    a, b, other = logs.values()
    unnamed = run(a, b, "--as", "precision")
    assert isinstance(unnamed.exception, UserError)
    assert "give those of A, B, … by --precision P,P with P one of fp32" in str(unnamed.exception)
    result = run(a, b, "--precision", "bf16_mixed,bf16_sr", "--json")
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["verdict"]) == (0, "match"), answer["reason"]
    assert answer["basis"] == {
        "kind": "precision",
        "reason": "requested",
        "precisions": ["bf16_mixed", "bf16_sr"],
    }
    shown = run(a, b, other, "--as", "precision", "--precision", "bf16_mixed,bf16_sr,bf16_sr")
    assert shown.exit_code == 1
    assert (
        "tolerance: expected noise of bf16_mixed against bf16_sr (requested): loss " in shown.stdout
    )
    assert "A and B match: as bf16_mixed and bf16_sr, " in shown.stdout
    assert "A and C differ: " in shown.stdout
    assert json.loads(run(a, b, "--json").stdout)["basis"]["kind"] == "tolerance"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--precision", "bf16_mixed"],
            "give 2, one for each of A, B, …, such as bf16_mixed,bf16_sr",
        ),
        (["--precision", "bf16_mixed,fp8"], "fp8 of B (bf16_sr) is no known precision"),
        (["--precision", ",bf16_sr"], "that of A (bf16_mixed) is no known precision"),
        (["--precision", "fp32,fp32", "--as", "tolerance"], "leave out --as tolerance"),
        (["--as", "precision", "--exact"], "--as precision excludes --exact and --seed"),
    ],
)
def test_refusals(logs: dict[str, Path], options: list[str], message: str) -> None:
    result = run(logs["bf16_mixed"], logs["bf16_sr"], *options)
    assert isinstance(result.exception, UserError)
    assert result.exception.exit_code == 2
    assert message in str(result.exception)


def test_a_log_without_learning_rate_is_refused(logs: dict[str, Path], tmp_path: Path) -> None:
    bare = tmp_path / "bare.csv"
    lines = logs["bf16_mixed"].read_text().splitlines()
    bare.write_text("".join(line.rpartition(",")[0] + "\n" for line in lines))
    result = run(bare, logs["bf16_sr"], "--precision", "bf16_mixed,bf16_sr")
    assert isinstance(result.exception, RunError)
    assert "needs lr, which A (bare) lacks" in str(result.exception)
    assert "--tag A:lr=…" in str(result.exception)


def test_recorded_precisions_are_not_overruled(runs: dict[str, Floats], make_run: Any) -> None:
    paths = []
    for name in ("bf16_mixed", "bf16_sr"):
        values = runs[f"w128-2-{name}"].tolist()
        rows = [
            {"step": step, "attempt": 0, "lr": lr} | dict(zip(COLUMNS, row, strict=True))
            for step, (row, lr) in enumerate(zip(values, rates().tolist(), strict=True), 1)
        ]
        directory = make_run(name, rows)
        paths.append(directory.path)
        directory.config.write_text(yaml.safe_dump({"train": {"precision": name}}))
    result = run(*paths, "--json")
    assert result.stdout, result.exception
    answer = json.loads(result.stdout)
    assert (answer["basis"]["kind"], answer["verdict"]) == ("precision", "match")
    result = run(*paths, "--json", "--tolerance", "1e-3")
    assert result.stdout, result.exception
    assert json.loads(result.stdout)["basis"]["kind"] == "tolerance"
    wrong = run(*paths, "--precision", "fp32,bf16_sr")
    assert "A (bf16_mixed) was trained in bf16_mixed" in str(wrong.exception)


def seed(
    random: np.random.Generator, points: int, white: float, slow: float, degrees: float = 1e6
) -> Floats:
    loss = 2 + 6 * np.exp(-5 * np.arange(points) / points)
    shocks = random.standard_t(degrees, (2, points)) / np.sqrt(degrees / (degrees - 2))
    walk = accumulate(shocks[0].tolist(), lambda last, new: 0.97 * last + new)
    steady = np.fromiter(walk, float, points) * np.sqrt(1 - 0.97**2)
    return np.asarray(loss * (1 + white * shocks[1] + slow * steady))


def judge(seeds: Floats, other: Floats) -> BandResult:
    return compare_with_band(np.arange(len(other)), seeds, other)


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("slow", [0.0, 0.003])
@pytest.mark.parametrize("degrees", [5, 1e6])
def test_another_seed_stays_within(count: int, slow: float, degrees: float) -> None:
    random = np.random.default_rng(11)
    alarms = 0
    for _ in range(50):
        runs = np.stack([seed(random, 300, 0.01, slow, degrees) for _ in range(count + 1)])
        alarms += judge(runs[:-1], runs[-1]).record.excess > 1
    assert alarms <= 1


@pytest.mark.parametrize("count", [2, 8])
def test_a_loss_that_is_one_percent_higher_leaves_it(count: int) -> None:
    random = np.random.default_rng(12)
    for _ in range(5):
        runs = np.stack([seed(random, 3000, 0.01, 0.0) for _ in range(count + 1)])
        result = judge(runs[:-1], runs[-1] * 1.01)
        assert result.record.excess > 1
        assert result.record.width > 1
        assert result.record.first_outside_step is not None


def test_a_curve_that_turns_away_late_is_found_there() -> None:
    random = np.random.default_rng(13)
    runs = np.stack([seed(random, 2000, 0.005, 0.001) for _ in range(5)])
    runs[-1, 1200:] *= 1.03
    result = judge(runs[:-1], runs[-1])
    assert result.record.excess > 1
    assert 1100 <= (result.record.first_outside_step or 0) <= 1300
    random = np.random.default_rng(14)
    runs = np.stack([seed(random, 500, 0.005, 0.0) for _ in range(5)])
    runs[-1, 250] *= 2
    result = judge(runs[:-1], runs[-1])
    assert (result.record.width, result.record.first_outside_step is not None) == (1, True)


def test_an_excursion_of_one_seed_widens_the_band_only_there() -> None:
    random = np.random.default_rng(15)
    for _ in range(4):
        runs = np.stack([seed(random, 1000, 0.005, 0.002) for _ in range(4)])
        calm = judge(runs, runs[0])
        runs[1, 800:860] *= 1.5
        result = judge(runs, runs[0])
        assert result.half_width[:700].max() < 2 * calm.half_width[:700].max()
        assert result.half_width[830] > 5 * calm.half_width[830]
        higher = judge(runs, 1.1 * seed(random, 1000, 0.005, 0.002))
        assert higher.record.excess > 1
        assert judge(runs, seed(random, 1000, 0.005, 0.002)).record.excess <= 1


def described(a: Floats, b: Floats, *, shape: bool = True) -> Statistics:
    steps = np.arange(1, len(a) + 1)
    points = Points(steps, steps.astype(float), a, b)
    return statistics(points, signed_difference(a, b), shape=shape)


def test_figures_of_a_constant_offset_and_figures_that_do_not_exist() -> None:
    a = 3 + np.sin(np.arange(200.0))
    figures = described(a, a * 1.25)
    for value in (figures.max_rel_diff, figures.mean_rel_diff, figures.median_rel_diff):
        assert value == pytest.approx(0.2)
    assert figures.p99_rel_diff == pytest.approx(0.2)
    assert figures.correlation == pytest.approx(1)
    assert figures.correlation_detrended == pytest.approx(1)
    assert figures.area_between == pytest.approx(0.25)
    assert figures.ratio == pytest.approx(1.25)
    assert len(figures.windows) == 10
    assert sum(window.points for window in figures.windows) == 200
    assert figures.windows[3].mean_signed_rel_diff == pytest.approx(0.2)
    assert described(a * 1.25, a).windows[3].mean_signed_rel_diff == pytest.approx(-0.2)
    constant = np.full(30, 0.1)
    assert described(constant, constant).correlation is None
    nothing = described(np.full(4, np.nan), np.ones(4))
    assert (nothing.points, nothing.max_rel_diff, nothing.windows) == (4, None, ())
    single = described(np.array([2.0]), np.array([3.0]))
    assert (single.correlation, single.area_between, len(single.windows)) == (None, 0.5, 1)
    gap = described(np.array([1.0, np.inf, 1.0]), np.ones(3))
    assert gap.windows[1].mean_rel_diff is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.integers(1, 70))
def test_running_mean_is_the_mean_of_the_neighbours(values: list[float], width: int) -> None:
    means = running_mean(np.array(values), width)
    for i, mean in enumerate(means):
        near = (
            values[max(0, i - (width - 1) // 2) : i + width // 2 + 1] if width > 1 else [values[i]]
        )
        assert mean == pytest.approx(np.mean(near), abs=1e-6)
