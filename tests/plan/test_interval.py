"""How long to train between two checkpoints."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmllm.plan.lost_time import best_interval_s, mtbf_s


def wasted(interval_s: float, cost_s: float, mtbf: float) -> float:
    """Wall time over useful time by Daly's model, restarts left out."""
    return mtbf * math.expm1((interval_s + cost_s) / mtbf) / interval_s


@given(st.floats(0.01, 3600), st.floats(1.0, 4.0))
def test_close_to_the_optimum_of_the_model(cost_s: float, log10_ratio: float) -> None:
    mtbf = cost_s * 10**log10_ratio
    best = best_interval_s(cost_s, mtbf)
    least = min(wasted(best * 1.01**power, cost_s, mtbf) for power in range(-100, 101))
    assert wasted(best, cost_s, mtbf) <= least * 1.001
    assert best == pytest.approx(math.sqrt(2 * cost_s * mtbf), rel=0.25), "Young's, roughly"


def test_extremes() -> None:
    assert best_interval_s(100, 50) == 50
    assert best_interval_s(1e9, 50) == 50
    assert best_interval_s(0, 3600) == 0
    assert best_interval_s(1, math.inf) == math.inf
    with pytest.raises(ValueError, match="above 0"):
        best_interval_s(1, 0)


def test_the_profile_s_figure_gives_way_to_the_run_s() -> None:
    hour = 3600.0
    assert mtbf_s(128, 0, 0.0, 3300) == pytest.approx(3300 * hour / 128)
    month = 30 * 24 * 128 * hour
    assert mtbf_s(128, 59, month, 3300) == pytest.approx((3300 + 30 * 24 * 128) * hour / 60 / 128)
    assert mtbf_s(128, 0, month, 3300) > mtbf_s(128, 0, 0.0, 3300)
