"""The picture of a plan: the panels that apply, and bars that are the figures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from slurmllm.display.pictures import write_picture
from slurmllm.plan.estimate import MemoryUse
from slurmllm.plan.plot import PlanCurve, picture

GIB = 2**30
PARTS = {f"part_{number}": number * GIB for number in range(10)}  # more than there are colours
LAYOUTS = {
    "TP 8 $x$": MemoryUse(PARTS, 40 * GIB),
    "TP 1": MemoryUse({"part_3": 50 * GIB}, 40 * GIB),
}
PRICED = PlanCurve("a_$1", [1, 2, 4], [1e3, 1.9e3, 3.5e3], [10.0, 11.0, 12.0], [8.0, 4.2, 2.3])
UNPRICED = PlanCurve("b", [2, 4], [5e2, 9e2], None)
SINGLE = PlanCurve("c", [4], [1e3], [10.0])


@pytest.mark.parametrize(
    ("curves", "layouts", "panels"),
    [
        ([PRICED, UNPRICED], LAYOUTS, ["tokens/s", "time to the end", "dollars to the end", ""]),
        ([UNPRICED], {}, ["tokens/s"]),
        ([SINGLE], LAYOUTS, [""]),
    ],
)
def test_panels_that_apply(
    curves: list[PlanCurve], layouts: dict[str, MemoryUse], panels: list[str], tmp_path: Path
) -> None:
    figure = picture(curves, layouts)
    assert [axes.get_ylabel() for axes in figure.axes] == panels
    write_picture(figure, tmp_path / "plan.png", "")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_bars_add_up_and_the_limit_is_drawn() -> None:
    (axes,) = picture([], LAYOUTS).axes
    ends: dict[float, float] = {}
    bars = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
    for bar in bars:
        ends[bar.get_y()] = max(ends.get(bar.get_y(), 0.0), bar.get_x() + bar.get_width())
    assert list(ends.values()) == pytest.approx([45.0, 50.0])
    assert set(np.asarray(axes.lines[0].get_xdata())) == {40.0}
    looks = {(bar.get_facecolor(), bar.get_hatch()) for bar in bars}
    assert len(looks) == 9  # a part that is nothing has no bar


def test_the_dashed_line_has_no_loss() -> None:
    figure = picture([PRICED], {})
    measured, ideal = figure.axes[0].lines[:2]
    np.testing.assert_allclose(np.asarray(measured.get_ydata()), PRICED.tokens_per_s)
    np.testing.assert_allclose(np.asarray(ideal.get_ydata()), [1e3, 2e3, 4e3])
    time, ideal = figure.axes[1].lines[:2]
    np.testing.assert_allclose(np.asarray(time.get_ydata()), [8.0, 4.2, 2.3])
    np.testing.assert_allclose(np.asarray(ideal.get_ydata()), [8.0, 4.0, 2.0])
    assert [text.get_text() for text in figure.axes[1].get_yticklabels()] == ["2 h", "4 h", "8 h"]
