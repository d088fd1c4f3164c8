"""Spikes of loss and gradient norm, against a slow definition and against planted ones."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amounts import amount
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from present import present

from slurmllm.analysis.spikes.analysis import SpikeAnalysis
from slurmllm.analysis.spikes.detection import analyze, select_steps
from slurmllm.analysis.spikes.plot import binned, draw
from slurmllm.core.errors import RunError, UserError
from slurmllm.core.metrics.curves import Curve
from slurmllm.core.run.records import SkippedBatches


def make_curve(losses: object, **columns: object) -> Curve:
    values = {"loss": losses, **columns}
    arrays = {name: np.asarray(column, dtype=np.float64) for name, column in values.items()}
    steps = np.arange(1, len(arrays["loss"]) + 1)
    return Curve("r", Path("r"), steps, np.zeros_like(steps), arrays)


def find_spikes(curve: Curve, *settings: float, **options: Any) -> SpikeAnalysis:
    return analyze(curve, *settings, **{"metric": "loss", **options})  # type: ignore[arg-type]


def slowly(losses: list[float], window: int, threshold: float) -> list[tuple[object, ...]]:
    """(step, duration, height, peak step, returned after) of each spike, by the definition."""
    means: list[float] = []
    for i in range(len(losses)):
        before = [x for x in losses[max(0, i - window) : i] if math.isfinite(x)]
        means.append(sum(before) / len(before) if i >= window and before else math.nan)
    analysis: list[tuple[object, ...]] = []
    i = 0
    while i < len(losses):
        j = i
        while j < len(losses) and math.isfinite(losses[j]) and losses[j] - means[j] > threshold:
            j += 1
        if j > i:
            heights = [losses[k] - means[k] for k in range(i, j)]
            back = [k - i for k in range(i, len(losses)) if losses[k] <= means[i]]
            peak = i + heights.index(max(heights))
            analysis.append((i + 1, j - i, max(heights), peak + 1, back[0] if back else None))
        i = max(j, i + 1)
    return analysis


# Multiples of 1/8 add up exactly in any order.
eighths = st.integers(0, 40).map(lambda n: n / 8)
bad = st.sampled_from([math.nan, math.inf, -math.inf])


@settings(max_examples=amount(25, of=100))
@given(
    st.lists(st.one_of(eighths, eighths, eighths, bad), min_size=1, max_size=60),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_equals_the_slow_definition(losses: list[float], window: int, threshold: float) -> None:
    analysis = find_spikes(make_curve(losses), window, threshold)
    assert [
        (s.step, s.duration, s.height, s.peak_step, s.returned_after) for s in analysis.spikes
    ] == slowly(losses, window, threshold)
    assert analysis.count == len(analysis.spikes) == sum(analysis.durations.values())
    assert analysis.inside == sum(s.duration for s in analysis.spikes)
    assert analysis.not_finite_steps == sum(not math.isfinite(x) for x in losses)
    assert SpikeAnalysis.model_validate_json(analysis.model_dump_json()) == analysis


def noisy(count: int, sigma: float = 0.02, seed: int = 0) -> np.ndarray:
    falling = 2 + 8 * np.exp(-np.arange(count) / 200)
    return np.asarray(falling + np.random.default_rng(seed).normal(0, sigma, count))


def test_planted_spikes() -> None:
    losses, grads = noisy(5000), np.full(5000, 1.5)
    for place in range(1000, 5000, 400):
        losses[place - 1] += 1.0
        grads[place - 1] = 6.0
    losses[2199:2203] += 2.0
    analysis = find_spikes(make_curve(losses, grad_norm=grads))
    assert analysis.state == "passing"
    assert (analysis.count, analysis.one_step, analysis.longest) == (10, 9, 4)
    assert analysis.durations == {1: 9, 4: 1}
    assert analysis.one_step_share == 0.9
    assert analysis.per_1000_steps == pytest.approx(1000 * 10 / 4980)
    headings, rows = analysis.highest_spikes()
    assert len(rows) == 10
    assert (rows[0][0], rows[0][headings.index("grad norm")]) == ("2200", "× 4")
    assert analysis.spikes[0].height == pytest.approx(1.0, abs=0.1)
    assert analysis.spikes[0].returned_after is not None
    norm = present(analysis.grad_norm)
    assert (norm.ratio_median, norm.doubled) == (4.0, 10)
    assert "10 spikes in 4,980 steps (2.01 per 1,000); 9 of them (90%) last one step" in (
        analysis.verdict
    )
    losses = np.full(60, 2.0)
    losses[[30, 32, 36]] = 4.0
    curve = make_curve(losses)
    assert [(s.step, s.duration) for s in find_spikes(curve).spikes] == [(31, 1), (33, 1), (37, 1)]
    joined = find_spikes(curve, min_gap=3)
    assert [(s.step, s.last_step, s.duration) for s in joined.spikes] == [(31, 33, 3), (37, 37, 1)]


def test_calm_short_and_not_finite() -> None:
    calm = find_spikes(make_curve(noisy(3000)))
    assert (calm.state, calm.count, calm.one_step_share) == ("calm", 0, None)
    assert calm.verdict.startswith("no spike in 2,980 steps; the running mean never rose more")
    short = find_spikes(make_curve(noisy(20)))
    assert (short.state, short.judged, short.growth) == ("too_short", 0, None)
    assert find_spikes(make_curve(noisy(21))).judged == 1
    losses = noisy(300)
    losses[99:102] = math.nan
    losses[200] = math.inf
    analysis = find_spikes(make_curve(losses))
    assert (analysis.state, analysis.count, analysis.not_finite_steps) == ("not_finite", 0, 4)
    assert [(n.step, n.duration) for n in analysis.not_finite] == [(100, 3), (201, 1)]
    assert analysis.judged == 300 - 20 - 4
    assert "not a finite number at 4 steps, first at step 100" in analysis.verdict
    assert find_spikes(make_curve([math.nan] * 50)).judged == 0


def test_a_loss_that_stays_after_a_jump_and_spikes_beside_restarts() -> None:
    losses = noisy(1000)
    losses[700:] += 3.0
    analysis = find_spikes(make_curve(losses))
    assert analysis.state == "rising"
    assert analysis.unreturned == 1
    assert present(analysis.growth).longest_from == pytest.approx(701, abs=3)
    assert "slow divergence" in analysis.verdict
    assert "it did not come back to the mean" in analysis.verdict
    losses = noisy(1000, sigma=0.001)
    losses[[402, 600, 800]] += 1.0
    curve = make_curve(losses)
    curve.attempts[400:] = 1
    curve.attempts[590:] = 2
    skip = SkippedBatches(
        first=801, last=803, roll_back_to=700, onset=801, attempt=1, reason="divergence"
    )
    analysis = find_spikes(Curve(**{**vars(curve), "skips": (skip,)}))
    assert analysis.restarts == (401, 591)
    assert [s.restart for s in analysis.spikes] == [401, None, None]
    assert [s.skipped for s in analysis.spikes] == [None, None, (801, 803)]
    assert (analysis.at_restarts, analysis.at_skips) == (1, 1)
    assert "1 coincides with a restart; 1 coincides with skipped batches" in analysis.verdict


@pytest.mark.parametrize("sigma", [0.01, 0.3])
def test_slow_divergence_and_noise_are_told_apart(sigma: float) -> None:
    flat = np.random.default_rng(1).normal(3.0, sigma, 20_000)
    assert find_spikes(make_curve(flat)).state != "rising"
    slope = np.concatenate([np.zeros(15_000), np.linspace(0, 4, 5000)])
    risen = find_spikes(make_curve(flat + slope))
    assert risen.state == "rising"
    assert present(risen.growth).at_end > 3.5


def test_gradient_norm() -> None:
    """Planted in the gradient norm alone; the published reference is only with this metric."""
    grads = 1.5 + np.random.default_rng(2).normal(0, 0.005, 3000)
    grads[[500, 1500, 1501, 2500]] += 0.2
    curve = make_curve(noisy(3000, sigma=0.01), grad_norm=grads)
    both = analyze(curve)
    norms = present(both.grad_norm_spikes)
    assert (both.metric, both.count, both.reference) == ("loss", 0, None)
    assert (norms.metric, norms.count, norms.one_step) == ("grad_norm", 3, 2)
    assert norms.state == "passing"
    assert norms.definition.startswith("a step whose gradient norm is more than 0.1 above the mean")
    assert norms.reference == "AWS, HLAT (Llama 2 7B on trn1), 2024: over 86%"
    spike = norms.spikes[0]
    assert (spike.peak_step, spike.value) == (501, grads[500])
    assert spike.loss == curve.columns["loss"][500]
    assert analyze(curve, metric="grad_norm").model_copy(update={"grad_norm_spikes": None}) == norms
    assert analyze(curve, metric="loss").grad_norm_spikes is None
    grads = np.full(100, 1.0)
    grads[60] = 2.0
    curve = Curve(**{**vars(make_curve(noisy(100))), "columns": {"grad_norm": grads}})
    analysis = analyze(curve)
    assert (analysis.metric, analysis.count, analysis.grad_norm_spikes) == ("grad_norm", 1, None)
    assert (analysis.spikes[0].value, analysis.spikes[0].loss) == (2.0, None)
    with pytest.raises(RunError, match="r has no loss, but grad_norm"):
        analyze(curve, metric="loss")


@pytest.mark.parametrize(("factor", "warned"), [(2.8, False), (3.4, True)])
def test_a_gradient_norm_that_grows(factor: float, warned: bool) -> None:
    """Growth over three times the lowest running mean is a warning, less of it is not."""
    grads = np.concatenate([np.full(500, 1.0), np.linspace(1, factor, 500), np.full(200, factor)])
    analysis = find_spikes(make_curve(noisy(1200), grad_norm=grads), metric="grad_norm")
    assert [f"grew to {factor} times its lowest" in text for text in analysis.warnings] == [
        True
    ] * warned
    assert (analysis.state == "rising") is warned


def test_param_norm_trend() -> None:
    steps = np.arange(1, 4001)
    norms = 100 + np.where(steps < 2000, steps * 0.1, 200 + (steps - 2000) * 0.002)
    norms[3000] = 1e6
    analysis = present(find_spikes(make_curve(noisy(4000), param_norm=norms)).param_norm)
    assert analysis.slope == pytest.approx(2.0, rel=1e-3)
    assert analysis.direction == "rising"
    assert analysis.ratio == pytest.approx(304 / 100.1)


def test_what_cannot_be_looked_at() -> None:
    curve = make_curve(noisy(100))
    for arguments in ({"window": 0}, {"threshold": -0.1}, {"threshold": math.nan}, {"min_gap": 0}):
        with pytest.raises(UserError):
            find_spikes(curve, **arguments)
    assert select_steps(curve, 41, 50).steps.tolist() == list(range(41, 51))
    with pytest.raises(RunError, match="no steps from 101: its own are 1 to 100"):
        select_steps(curve, 101, None)


def test_binned() -> None:
    assert binned([{}]) == []
    counts = {"1": [9, 0], "2": [0, 3], "3": [0, 0], "4–5": [1, 0]}
    assert dict(binned([{1: 9, 4: 1}, {2: 3}])) == counts
    assert sum(number for _, (number,) in binned([{1: 2, 7: 3, 500: 4}])) == 9


@pytest.mark.parametrize(
    "losses",
    [noisy(9000), [math.nan], [2.0] * 30 + [1.7e308, -1.7e308]],
    ids=["long", "no number", "huge"],
)
def test_picture(losses: object, tmp_path: Path) -> None:
    curve = make_curve(losses, grad_norm=losses, param_norm=losses)
    draw([(curve, analyze(curve))], tmp_path / "p.png")
    with Image.open(tmp_path / "p.png") as image:
        assert image.size == (1200, 1260)
        assert np.asarray(image).std() > 5
