"""tools/benchmarks/departures: noise, right verdicts, published curves."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from departures.answers import visible_verdicts
from departures.noise import differs, noise
from departures.published import compare_golden
from departures.trainings import DEPARTURES, answer, judge


@pytest.mark.parametrize("degrees", [None, 0, 5])
@pytest.mark.parametrize("slowness", [0.0, 0.9])
def test_noise_has_standard_deviation_1(degrees: int | None, slowness: float) -> None:
    random = np.random.default_rng(3)
    assert noise(random, 50_000, degrees, slowness).std() == pytest.approx(1, abs=0.05)
    assert not differs(np.zeros(200))
    assert differs(np.full(200, 2.0))


@pytest.mark.parametrize("number", range(len(DEPARTURES)))
def test_departures_of_a_training(number: int, tmp_path: Path) -> None:
    columns = ("loss", "grad_norm", "lr", "tokens")
    comparison = answer(
        DEPARTURES[number], ("log", "command", "ours")[number % 3], columns, tmp_path
    )
    assert judge(DEPARTURES[number], comparison)[1] == "right", (
        comparison.reason,
        DEPARTURES[number],
    )


def log(loss: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    return {"loss": loss, "grad_norm": np.ones(len(loss))}


def test_verdicts_by_what_a_log_shows() -> None:
    a = np.full(40, 3.0)
    wave = 1 + 1.5e-3 * np.resize([1.0, -1.0], 40)
    assert visible_verdicts(log(a), log(a)) == {"identical"}
    assert visible_verdicts(log(a), log(a * 1.0005)) == {"match"}
    assert visible_verdicts(log(a), log(a * wave)) == {"match", "equivalent", "differ"}
    assert visible_verdicts(log(a), log(a * 1.002)) == {"differ"}
    assert visible_verdicts(log(a), log(a * np.nan)) == {"differ"}


def test_published_curves(tmp_path: Path) -> None:
    losses = {str(step): 10 - step / 50 for step in range(5, 105, 5)}
    for device, factor in (("a100", 1.0), ("h100", 1.002)):
        values = {step: loss * factor for step, loss in losses.items()}
        golden = tmp_path / "case" / f"golden_values_dev_dgx_{device}.json"
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(json.dumps({"lm loss": {"step_interval": 5, "values": values}}))
    (comparison,) = compare_golden(tmp_path)
    assert (comparison.points, comparison.beyond, comparison.above) == (20, 20, 20)
    assert comparison.expected == ("differ",)
    for device in ("a100", "h100"):  # the format until 2024
        golden = tmp_path / "old" / f"golden_values_dev_dgx_{device}.json"
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(
            json.dumps({"lm loss": {"step_interval": 5, "values": [9.0, "nan", 8.0]}})
        )
    comparison = next(row for row in compare_golden(tmp_path) if row.a.startswith("old"))
    assert (comparison.points, comparison.expected) == (2, ("identical",))
