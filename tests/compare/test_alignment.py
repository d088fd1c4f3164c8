from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from slurmllm.compare.alignment import Alignment
from slurmllm.compare.compare import compare
from slurmllm.errors import RunError
from slurmllm.metrics.curves import Curve, Floats, Ints, Setting


def curve(name: str, steps: Ints, settings: Mapping[str, Setting] = {}, **columns: Floats) -> Curve:
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
    assert differ.diagnosis is not None
    assert differ.diagnosis.kind == "unknown"


def test_gaps_counters_set_back_and_axes_that_are_not_known() -> None:
    steps = np.concatenate((every(7, 301), every(7, 1000, 700)))
    a = curve("a", every(10), loss=smooth(every(10)))
    result = Alignment(a, curve("b", steps, loss=smooth(steps)), "step", None, None)
    points = result.of("loss")
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
    assert by_step.diagnosis is not None
    assert by_step.diagnosis.kind == "batches"
