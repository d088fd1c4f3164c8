import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from training_rows import MakeFile, MakeRun, Row, make_row, make_rows

from slurmllm.analysis.compare.compare import compare
from slurmllm.analysis.compare.plot import draw
from slurmllm.analysis.compare.result import Tolerances
from slurmllm.core.errors import StorageError
from slurmllm.core.metrics.source import read_curve, run_report

COLOR_A, COLOR_B = (0xF2, 0xA6, 0x5A), (0x12, 0x46, 0x6B)


def drawn(a: Path, b: Path, path: Path, **tolerances: Any) -> np.ndarray:
    """The pixels of the picture of a comparison. [height, width, 3]"""
    curve, other = read_curve(a), read_curve(b)
    comparison = compare(curve, other, Tolerances(**tolerances))
    draw(curve, [other], [comparison], path)
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def count(pixels: np.ndarray, color: tuple[int, int, int]) -> int:
    return int(np.count_nonzero((pixels == color).all(axis=-1)))


@pytest.mark.filterwarnings("ignore:Glyph")
def test_both_curves_are_seen_though_they_coincide(make_run: MakeRun, tmp_path: Path) -> None:
    a = make_run("$x_1^$ \\frac", make_rows(1, 60)).path  # no formula
    b = make_run("_运行", make_rows(1, 30), make_rows(21, 60, 1)).path
    pixels = drawn(a, b, tmp_path / "new" / "p.png", exact=True)
    assert pixels.shape == (735, 1200, 3)
    # Curves, and not only the samples of the legend: about 100 pixels each.
    assert count(pixels, COLOR_A) > 1500
    assert count(pixels, COLOR_B) > 1500
    assert (pixels == COLOR_B).all(axis=-1).sum(axis=0).max() > 150  # the line at the restart
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["p.png"]


def nan_rows() -> list[Row]:
    return [make_row(step, loss=math.nan, grad_norm=math.inf) for step in range(1, 4)]


@pytest.mark.parametrize(
    "rows",
    [
        make_rows(1, 1),
        nan_rows(),
        [{"step": 10**9 + step, "loss": 1e300 * (-1) ** step} for step in range(1, 9)],
    ],
    ids=["one step", "no number", "huge, late, no gradient norm"],
)
def test_odd_curves_are_drawn(make_file: MakeFile, tmp_path: Path, rows: list[Row]) -> None:
    a = make_file("a", rows)
    b = make_file("b", [row | {"loss": row["loss"] * 1.1 + 1e-9} for row in rows])
    assert drawn(a, b, tmp_path / "p.png").std() > 5


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are written, laid out."""
    pictures: list[Figure] = []

    def lay_out(picture: Figure, path: Path, fix: str) -> None:
        picture.canvas.draw()
        pictures.append(picture)

    monkeypatch.setattr("slurmllm.analysis.compare.plot.write_picture", lay_out)
    return pictures


def test_reasons_are_whole_and_the_legend_is_free(
    make_file: MakeFile, tmp_path: Path, figures: list[Figure]
) -> None:
    a, *others = (
        read_curve(make_file(name, [make_row(step, loss=loss) for step in range(1, 99)]))
        for name, loss in (("a", 2.0), ("b", 3.0), ("c", 4.0))
    )
    reason = " ".join(f"word{i}" for i in range(60))
    results = [compare(a, b).model_copy(update={"reason": reason}) for b in others]
    draw(a, others, results, tmp_path / "p.png")
    (picture,) = figures
    panels = [axes for axes in picture.axes if axes.get_visible()]
    title = panels[0].title if panels[0].get_title() else panels[0]._left_title  # type: ignore[attr-defined]
    assert title.get_text().split().count("word59") == 2
    extent = title.get_window_extent()
    assert extent.x1 <= picture.bbox.x1
    assert extent.y1 <= picture.bbox.y1
    legend = panels[-1].get_legend()
    assert legend
    assert not any(legend.get_window_extent().overlaps(axes.bbox) for axes in panels)


def test_shifts_are_drawn(make_file: MakeFile, tmp_path: Path, figures: list[Figure]) -> None:
    a = read_curve(make_file("a", make_rows(1, 30)))
    b = replace(a, steps=a.steps + 100)
    draw(a, [b], [compare(a, b, shifts=(0, -100))], tmp_path / "p.png")
    line, other = figures[0].axes[0].get_lines()[:2]
    assert np.array_equal(line.get_xdata(), other.get_xdata())
    assert np.size(line.get_xdata()) == 30


def test_a_long_run_is_its_means_over_pale_values(
    make_file: MakeFile, tmp_path: Path, figures: list[Figure]
) -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, 4000)
    rows = [make_row(i + 1, loss=2 + 8 * math.exp(-i / 20) + noise[i]) for i in range(4000)]
    a = read_curve(make_file("a", rows))
    draw(a, [a], [compare(a, a)], tmp_path / "p.png")
    panel = figures[0].axes[0]
    pale, means = panel.get_lines()[:2]
    assert (pale.get_alpha(), means.get_alpha()) == (0.35, None)
    assert np.size(means.get_xdata()) <= 300
    late = np.asarray(means.get_ydata())[20:]
    assert late.std() < 0.05  # of noise of 0.1, over 14 steps each
    low, high = panel.get_ylim()
    assert high < 4  # the first steps, up to 10, are cut off
    assert low < 2 - 3 * 0.1 < 2 + 3 * 0.1 < high
    # At most the first fiftieth of a shorter curve beside it may be cut off.
    diverging = [make_row(step, loss=2 + step / 400) for step in range(10, 4001, 10)]
    b = read_curve(make_file("b", diverging))
    draw(a, [b], [compare(a, b)], tmp_path / "p.png")
    assert figures[1].axes[0].get_ylim()[1] > 12


def test_where_the_picture_goes_and_that_it_cannot_be_written(
    make_run: MakeRun, make_file: MakeFile, tmp_path: Path
) -> None:
    run = read_curve(make_run("r", make_rows(1, 5)).path)
    file = read_curve(make_file("odd name", make_rows(1, 5)))
    assert run_report("compare", (file, run)) == run.path / "reports" / "compare-odd_name-r.png"
    assert run_report("compare", (file, file)) is None
    a = make_file("a", make_rows(1, 5))
    with pytest.raises(StorageError, match=r"cannot write the picture .*--no-plot"):
        drawn(a, a, a / "below" / "a-file.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(StorageError, match="cannot write the picture"):
        drawn(a, a, tmp_path / "folder.png")
    assert not list(tmp_path.glob(".compare*"))
