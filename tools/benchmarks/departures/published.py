"""Published curves of real trainings, read from folders that the user fetched.

`--golden DIR`: golden values of Megatron-LM's functional tests, a folder per test case, as in
`tests/functional_tests/test_cases/gpt` of github.com/NVIDIA/Megatron-LM. Each A100 file of a case
is compared with each H100 one; a file that names no device was made on an A100.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from departures.answers import TOLERANCES, Floats, curve, visible_verdicts
from slurmllm.analysis.compare.compare import compare
from slurmllm.core.display.tables import markdown_table
from slurmllm.core.metrics.curves import Curve, signed_difference

_LOSS = "lm loss"


@dataclass(frozen=True)
class Published:
    """A comparison of two published curves."""

    a: str
    b: str
    points: int
    beyond: int  # points whose losses differ by more than the tolerance
    above: int  # points at which the second loss is the higher one
    expected: tuple[str, ...]  # right verdicts, by what the log shows
    verdict: str
    causes: tuple[str, ...]

    @property
    def right(self) -> bool:
        return self.verdict in self.expected


def compare_golden(folder: Path) -> list[Published]:
    comparisons = []
    for case in sorted({path.parent for path in folder.rglob("golden_values*.json")}):
        files = sorted(case.glob("golden_values*.json"))
        later = [path for path in files if "h100" in path.name]
        for first in (path for path in files if not _is_later(path)):
            for second in later:
                a, b = _read_golden(first), _read_golden(second)
                if a is not None and b is not None:
                    comparisons.append(_compare(a, b))
    return comparisons


def show(comparisons: Sequence[Published]) -> str:
    figures = ("points", "beyond the tolerance", "B above A")
    headings = ("A100 and H100", *figures, "right verdicts", "verdict", "causes", "")
    rows = [
        (
            f"{pair.a} and {pair.b}",
            *map(str, (pair.points, pair.beyond, pair.above)),
            " or ".join(pair.expected),
            pair.verdict,
            ", ".join(pair.causes),
            "right" if pair.right else "WRONG",
        )
        for pair in comparisons
    ]
    right = sum(pair.right for pair in comparisons)
    return f"{markdown_table(headings, rows)}\n{right} of {len(rows)} verdicts right"


def _is_later(path: Path) -> bool:
    return any(device in path.name for device in ("h100", "b200", "gb200", "gb300"))


def _read_golden(path: Path) -> Curve | None:
    """Returns the loss by step; None of a test that trains nothing."""
    held = json.loads(path.read_text()).get(_LOSS)
    if not held:
        return None
    values = held["values"]
    if isinstance(values, list):  # the format until 2024: points of a fixed interval
        steps = np.arange(len(values)) * held["step_interval"] + 1
    else:
        steps = np.array([int(step) for step in values])
        values = list(values.values())
    places = [place for place, value in enumerate(values) if isinstance(value, int | float)]
    loss: Floats = np.array([float(values[place]) for place in places])
    return curve(f"{path.parent.name}/{path.stem}", {"loss": loss}, steps[places])


def _compare(a: Curve, b: Curve) -> Published:
    """Compare two curves.

    `equivalent` is right too if the mean difference over all points is within the tolerance.
    """
    answer = compare(a, b)
    (steps_a, loss_a), (steps_b, loss_b) = a.series("loss"), b.series("loss")
    steps, at_a, at_b = np.intersect1d(steps_a, steps_b, assume_unique=True, return_indices=True)
    x, y = loss_a[at_a], loss_b[at_b]
    expected = visible_verdicts({"loss": x}, {"loss": y})
    r = signed_difference(x, y) / TOLERANCES["loss"]
    if "identical" not in expected and abs(r.mean()) <= 1:
        expected |= {"equivalent"}
    return Published(
        a=a.name,
        b=b.name,
        points=len(steps),
        beyond=int((np.abs(r) > 1).sum()),
        above=int((y > x).sum()),
        expected=tuple(sorted(expected)),
        verdict=answer.verdict,
        causes=tuple(f"{cause.kind} ({cause.confidence})" for cause in answer.causes),
    )
