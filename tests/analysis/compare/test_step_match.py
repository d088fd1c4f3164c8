"""Steps counted from 0 or 1, losses averaged over intervals, and curves on other axes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import call
from numpy.typing import NDArray

from slurmllm.analysis.compare.alignment import Alignment
from slurmllm.analysis.compare.compare import compare
from slurmllm.core.errors import RunError
from slurmllm.core.metrics.curves import Curve, Floats, Ints, Setting
from slurmllm.core.metrics.source import read_curve

Values = NDArray[np.float64]
Settings = Mapping[str, Setting]


def curve_of(tmp_path: Path, name: str, losses: Values, first: int, lines: str = "{}") -> Curve:
    """A curve of an unknown format; `lines` is the text of a line."""
    path = tmp_path / name
    rows = enumerate(losses.tolist(), start=first)
    if lines != "{}":
        path.write_text("".join(lines.format(step=step, loss=loss) + "\n" for step, loss in rows))
    else:
        text = (json.dumps({"it": step, "nll": loss}) for step, loss in rows)
        path.write_text("\n".join(text))
        return read_curve(path, {"step": "it", "loss": "nll"})
    return read_curve(path)


def noisy(count: int = 120, seed: int = 0) -> Values:
    steps = np.arange(count)
    noise = np.random.default_rng(seed).normal(0, 0.05, count)
    losses: Values = 3.0 + 5 * np.exp(-steps / 30) + noise
    return losses


NANOGPT = "iter {step}: loss {loss:.12f}"
TITAN = "step:  {step}  loss:  {loss:.12f}"


def test_known_formats_are_shifted_by_convention_or_by_values(tmp_path: Path) -> None:
    a = curve_of(tmp_path, "a.log", noisy(), 0, NANOGPT)
    b = curve_of(tmp_path, "b.log", noisy(), 1, TITAN)
    for first, second, shifts in ((a, b, (1, 0)), (b, a, (0, 1)), (a, a, (0, 0))):
        comparison = compare(first, second)
        assert (comparison.verdict, comparison.steps_compared) == ("identical", 120)
        assert (comparison.a.shift, comparison.b.shift) == shifts
    comparison = compare(a, b)
    assert comparison.a.shift_reason == "nanoGPT counts steps from 0"
    assert (comparison.a.first_step, comparison.b.first_step) == (1, 1)
    # The values overrule the convention: a user's loop that counts from 1
    a = curve_of(tmp_path, "a.log", noisy(), 1, NANOGPT)
    comparison = compare(a, b)
    assert (comparison.verdict, comparison.a.shift, comparison.b.shift) == ("identical", 0, 0)
    # So does its first step, also where the curves are too smooth to show a shift.
    smooth = 3.0 + 5 * np.exp(-np.arange(120) / 30)
    a, b = (curve_of(tmp_path, "a.log", smooth, 1, line) for line in (NANOGPT, TITAN))
    comparison = compare(a, b)
    assert (comparison.verdict, comparison.a.shift, comparison.b.shift) == ("identical", 0, 0)


def test_a_validation_before_the_first_step_is_no_step(tmp_path: Path) -> None:
    line = "step:{step}/120 train_loss:{loss:.6f}"
    a, b = (curve_of(tmp_path, name, noisy(), 1, line) for name in ("a.log", "b.log"))
    text = (tmp_path / "a.log").read_text()
    (tmp_path / "a.log").write_text("step:0/120 val_loss:11.0\n" + text)
    comparison = compare(read_curve(tmp_path / "a.log"), b)
    assert (comparison.verdict, comparison.a.shift, comparison.b.shift) == ("identical", 0, 0)
    assert a.convention is not None


def test_batches_that_are_some_steps_ahead_are_no_count_of_steps(tmp_path: Path) -> None:
    """Losses of a flat training follow its batches: those of step 8 alike, and not the same."""
    batches = np.random.default_rng(5).normal(0, 0.05, 400)
    own = np.random.default_rng(6).normal(0, 0.002, (2, 300))
    a, b = (
        curve_of(tmp_path, f"{i}.jsonl", 3.0 + batches[8 * i : 8 * i + 300] + own[i], 1)
        for i in (0, 1)
    )
    comparison = compare(a, b)
    assert (comparison.a.shift, comparison.b.shift) == (0, 0)


@pytest.mark.parametrize(("change", "shift"), [(0.0, 1), (2e-4, 1), (0.0, 5), (0.0, 60)])
def test_unknown_formats_are_shifted_by_equal_values(
    tmp_path: Path, change: float, shift: int
) -> None:
    losses = noisy()
    a, b = (curve_of(tmp_path, f"{i}.jsonl", losses * (1 + i * change), i * shift) for i in (0, 1))
    assert a.convention is None
    for first, second, shifts in ((a, b, (shift, 0)), (b, a, (0, shift))):
        comparison = compare(first, second)
        assert comparison.verdict == ("match" if change else "identical")
        assert (comparison.a.shift, comparison.b.shift) == shifts
        assert comparison.steps_compared == 120


@pytest.mark.parametrize(
    "shape",
    [
        lambda t: 2 + np.exp(-t / 100),
        lambda t: np.round(2 + np.exp(-t / 100), 3),
        lambda t: 3 + 0 * t,
        lambda t: np.exp(-t / 3),
    ],
)
def test_smooth_curves_are_never_shifted(tmp_path: Path, shape: Any) -> None:
    steps = np.arange(150.0)
    a = curve_of(tmp_path, "a.jsonl", shape(steps), 0)
    b = curve_of(tmp_path, "b.jsonl", shape(steps + 1), 0)  # as a shift, or as another training
    comparison = compare(a, b)
    assert (comparison.a.shift, comparison.b.shift) == (0, 0)


def test_micro_iterations_and_samples_are_no_steps(tmp_path: Path) -> None:
    steps = curve_of(tmp_path, "a.log", noisy(), 0, NANOGPT)
    path = tmp_path / "litgpt.csv"
    rows = [f"{i},{loss},9" for i, loss in enumerate(noisy())]
    path.write_text("\n".join(["step,loss,remaining_time", *rows]))
    micro = read_curve(path)
    (warning,) = (w for w in compare(steps, micro).warnings if "--by samples" in w)
    assert warning.startswith("A counts steps, B counts micro-iterations: compare them by what")
    assert "--shift" in warning
    assert not [w for w in compare(micro, micro).warnings if "--by" in w]


def test_batches_one_ahead_and_other_noise_are_no_shift(tmp_path: Path) -> None:
    losses = noisy()
    curves = []
    for ahead in (0, 1):
        path = tmp_path / f"{ahead}.csv"
        rows = (f"{t},{losses[t + ahead]},{1e-4 * t}" for t in range(100))
        path.write_text("n,nll,lr\n" + "\n".join(rows))
        curves.append(read_curve(path, {"step": "n", "loss": "nll"}))
    comparison = compare(curves[0], curves[1])
    assert (comparison.verdict, comparison.a.shift, comparison.b.shift) == ("differ", 0, 0)
    a = curve_of(tmp_path, "a.jsonl", noisy(seed=0), 0)
    for seed in range(1, 9):
        comparison = compare(a, curve_of(tmp_path, "b.jsonl", noisy(seed=seed), 0))
        assert (comparison.a.shift, comparison.b.shift) == (0, 0)


def interval_means(losses: Values, every: int) -> list[tuple[int, float]]:
    return [
        (last, float(np.mean(losses[last - every : last])))
        for last in range(every, len(losses) + 1, every)
    ]


def write_state(tmp_path: Path, rows: list[tuple[int, float]], name: str) -> Curve:
    path = tmp_path / name
    history = [{"loss": loss, "grad_norm": 1.5, "epoch": 0.1, "step": step} for step, loss in rows]
    path.write_text(json.dumps({"log_history": history}))
    return read_curve(path)


@pytest.mark.parametrize("name", ["trainer_state.json", "other.json"])
def test_means_over_the_logging_interval(tmp_path: Path, name: str) -> None:
    losses = noisy(200)
    fine = curve_of(tmp_path, "a.log", losses, 1, TITAN)
    coarse = write_state(tmp_path, interval_means(losses, 10), name)
    for a, b, averaged in ((fine, coarse, (10, None)), (coarse, fine, (None, 10))):
        comparison = compare(a, b)
        assert comparison.verdict in ("identical", "match")
        assert (comparison.a.averaged, comparison.b.averaged) == averaged
        assert comparison.steps_compared == 20
    assert comparison.b.steps == 200


@pytest.mark.parametrize(("begin", "first"), [(1, 10), (11, 20), (13, 30), (20, 30)])
def test_a_mean_that_lacks_steps_is_not_compared(tmp_path: Path, begin: int, first: int) -> None:
    losses = noisy(200)
    coarse = write_state(tmp_path, interval_means(losses, 10), "trainer_state.json")
    fine = curve_of(tmp_path, "a.log", losses[begin - 1 :], begin, TITAN)
    comparison = compare(fine, coarse)
    assert comparison.verdict in ("identical", "match")
    assert (comparison.first_step, comparison.steps_compared) == (first, 21 - first // 10)


def test_single_steps_of_a_coarser_log_are_not_averaged(tmp_path: Path) -> None:
    losses = noisy(200)
    fine = curve_of(tmp_path, "a.log", losses, 1, TITAN)
    points = [(step, float(losses[step - 1])) for step in range(10, 201, 10)]
    for name in ("other.json", "trainer_state.json"):  # the values overrule the format
        comparison = compare(fine, write_state(tmp_path, points, name))
        assert (comparison.verdict, comparison.a.averaged) in (("identical", None), ("match", None))
    steps = np.arange(200.0)
    smooth = 2 + np.exp(-steps / 50)
    fine = curve_of(tmp_path, "a.log", smooth, 1, TITAN)
    rows = [(step, float(smooth[step - 1] * 1.02)) for step in range(10, 201, 10)]
    assert compare(fine, write_state(tmp_path, rows, "other.json")).a.averaged is None


def run(*arguments: str) -> tuple[int, str]:
    result = call("compare", *arguments, "--no-plot")
    return result.exit_code, result.output


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    curve_of(tmp_path, "a.log", noisy(), 0, NANOGPT)
    rows = list(enumerate(noisy()))
    lines = [f"u {step + 5} nll={loss:.12f}" for step, loss in rows]
    (tmp_path / "b.log").write_text("\n".join(lines))
    table = ["n,nll", *(f"{step + 1},{loss:.12f}" for step, loss in rows)]
    (tmp_path / "c.csv").write_text("\n".join(table))
    pattern = r"B:u (?P<step>\d+) nll=(?P<loss>\S+)"
    tags = ("--tag", "C:step=n", "--tag", "C:loss=nll")
    code, output = run("a.log", "b.log", "--pattern", pattern, "--shift", "B=-5", "--json")
    assert code == 0, output
    document = json.loads(output)
    assert (document["verdict"], document["b"]["shift"]) == ("identical", -5)
    code, output = run("a.log", "b.log", "c.csv", "--pattern", pattern, *tags, "--shift", "B=-5")
    assert code == 0, output
    assert "B  b: steps 0–119; -5 to its steps: --shift" in output
    code, output = run("a.log", "c.csv", "--tag", "B:step=n", "--tag", "B:loss=nll")
    assert "A  a: steps 1–120; +1 to its steps" in output
    for arguments, message in (
        (("--shift", "B=500"), "no step in common"),
        (("--shift", "C=1"), "the sources are A to B"),
        (("--shift", "A=x"), "give a source and a number of steps"),
        (("--tag", "C:loss=x"), "there is no C; the sources are A to B"),
        (("--pattern", "B:("), "is not a regular expression"),
        (("--pattern", "(?P<loss>1)"), "has no group (?P<step>…)"),
        (("--pattern", r"z(?P<step>\d)(?P<loss>\d)"), "no line of a.log matches"),
    ):
        code, output = run("a.log", "a.log", *arguments)
        assert (code, message in output) == (2, True), output


def test_our_own_runs_refuse_what_does_nothing(tmp_path: Path) -> None:
    for name in ("a", "b"):
        folder = tmp_path / name / "metrics"
        folder.mkdir(parents=True)
        rows = ({"step": s, "attempt": 1, "loss": 3.0, "grad_norm": 1.0} for s in range(1, 20))
        (folder / "attempt_001.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    for option, value in (
        ("--tag", "loss=x"),
        ("--tag", "B:loss=x"),
        ("--pattern", r"(?P<step>1)(?P<loss>2)"),
    ):
        code, output = run(str(tmp_path / "a"), str(tmp_path / "b"), option, value)
        assert (code, "does nothing" in output) == (2, True), output


def curve(
    name: str, steps: Ints, settings: Mapping[str, Setting] = {}, **columns: NDArray[Any]
) -> Curve:
    attempts = np.zeros(len(steps), dtype=np.int64)
    return Curve(name, Path(name), steps, attempts, columns, settings=settings)


def smooth(steps: Ints, scale: float = 1.0) -> Floats:
    return np.asarray(scale * (3 + 5 * np.exp(-steps / 200)))


def every(interval: int, last: int = 1000, first: int | None = None) -> Ints:
    return np.arange(first or interval, last + 1, interval)


@pytest.mark.parametrize(("interval", "other"), [(10, 7), (7, 10)])
def test_intervals_that_do_not_are_interpolated_at_the_sparser(interval: int, other: int) -> None:
    a, b = (curve(str(i), every(i), loss=smooth(every(i))) for i in (interval, other))
    result = compare(a, b)
    assert result.alignment.method == "interpolated"
    assert result.alignment.points == 99  # from 10 to 990
    assert result.match, result.reason
    assert any("interpolated at the 99 points" in warning for warning in result.warnings)
    higher = curve("h", every(other), loss=smooth(every(other), 1.02))
    differ = compare(a, higher)
    assert not differ.match
    assert differ.diagnosis
    assert differ.diagnosis.kind == "unknown"


def test_gaps_counters_set_back_and_axes_that_are_not_known() -> None:
    steps = np.concatenate((every(7, 301), every(7, 1000, 700)))
    a = curve("a", every(10), loss=smooth(every(10)))
    result = Alignment(a, curve("b", steps, loss=smooth(steps)), "step", None, None)
    points = result.points_of("loss")
    assert not ((points.steps > 301) & (points.steps < 700)).any()
    np.testing.assert_allclose(points.a, points.b, rtol=1e-3)
    a = curve("a", every(1, 9), loss=smooth(every(1, 9)), tokens=every(1, 9) * 8.0)
    b = curve("b", every(1, 9), loss=smooth(every(1, 9)))
    with pytest.raises(RunError, match=r"B \(b\) has no number of tokens .*--tag tokens="):
        Alignment(a, b, "tokens", None, None)
    steps = every(1, 100)
    tokens = steps * 10.0
    tokens[50] = 20.0
    a, b = (curve(n, steps, loss=smooth(steps), tokens=tokens) for n in "ab")
    result = Alignment(a, b, "tokens", None, None)
    assert len(result.positions) == 99
    assert (np.diff(result.positions) > 0).all()


@pytest.mark.parametrize("axis", ["tokens", "samples"])
def test_other_batches_are_aligned_by_what_they_have_seen(axis: str) -> None:
    steps = every(1, 400)
    small = curve("small", steps, {axis: 1}, loss=smooth(steps), tokens=steps * 1024.0)
    large = curve("large", steps, loss=smooth(2 * steps), tokens=steps * 2048.0)
    settings = {"model.seq_len": 128}
    a, b = (curve(c.name, steps, settings, **c.columns) for c in (small, large))
    result = compare(a, b, axis=axis)  # type: ignore[arg-type]
    assert (result.match, result.alignment.axis, result.alignment.method) == (True, axis, "exact")
    assert (result.first_step, result.last_step, result.steps_compared) == (2, 400, 200)
    assert result.settings == ("tokens per step differ (1,024 and 2,048)",)
    by_step = compare(a, b)
    assert not by_step.match
    assert any("compare --by tokens" in warning for warning in by_step.warnings)
    assert by_step.diagnosis
    assert by_step.diagnosis.kind == "batches"
