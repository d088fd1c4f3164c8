from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmllm.compare.alignment import Points
from slurmllm.compare.statistics import Statistics, running_mean, statistics
from slurmllm.metrics.curves import Floats, signed_difference, thin_rows


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


@given(
    st.lists(st.floats(-9, 9) | st.just(float("nan")), min_size=1, max_size=400),
    st.integers(4, 40),
)
def test_thinned_lines_keep_their_extremes(values: list[float], most: int) -> None:
    y = np.array(values)
    rows = thin_rows(y, most, keep_short_gaps=False)
    assert len(rows) <= 2 * most
    assert (np.diff(rows) > 0).all()
    if not np.isnan(y).all():
        assert (np.nanmin(y[rows]), np.nanmax(y[rows])) == (np.nanmin(y), np.nanmax(y))
