"""Fewer points, and nothing of a curve's extremes lost."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmllm.metrics.curves import piece_means, thin_rows

_VALUES = st.lists(
    st.floats(-1e9, 1e9) | st.sampled_from([math.nan, math.inf]), min_size=1, max_size=300
).map(np.array)


@given(_VALUES, st.integers(4, 60))
def test_extremes_are_kept(values: np.ndarray, most: int) -> None:
    rows = thin_rows(values, most)
    assert np.all(np.diff(rows) > 0)
    assert rows[0] == 0
    assert rows[-1] == len(values) - 1
    finite = np.isfinite(values)
    assert np.count_nonzero(np.isfinite(values[rows])) <= most + 1
    if finite.any():
        thinned = values[rows][np.isfinite(values[rows])]
        assert (thinned.min(), thinned.max()) == (values[finite].min(), values[finite].max())
    assert (~np.isfinite(values[rows])).any() == (~finite).any()


@given(_VALUES, st.integers(1, 60))
def test_means_are_of_all_rows(values: np.ndarray, most: int) -> None:
    means = piece_means(values, most)
    assert len(means) <= max(most, 1) or len(means) == len(values)
    finite = values[np.isfinite(values)]
    if len(finite) == len(values) and len(values) % len(means) == 0:
        assert means.mean() == pytest.approx(values.mean(), abs=1e-3)
    assert np.isfinite(means).any() == (len(finite) > 0)
    if len(finite):
        inside = means[np.isfinite(means)]
        assert finite.min() - 1e-3 <= inside.min() <= inside.max() <= finite.max() + 1e-3
