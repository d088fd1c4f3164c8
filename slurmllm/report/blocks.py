"""The content of a report, independent of HTML and Markdown: sections of blocks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from slurmllm.records import TimePart
from slurmllm.report.facts import RunFacts

Json = dict[str, Any]
_NUMBER = re.compile(r"^(-|[-+]?[\d.,]+(e[-+]?\d+)?( ?(%|[kMGT]?B|[KMBT]))?( ± [\d.e-]+)?)$")


@dataclass(frozen=True)
class Paragraph:
    """A paragraph; `strong` is its beginning, in bold."""

    text: str
    strong: str = ""


@dataclass(frozen=True)
class Bullets:
    """A list."""

    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table with one heading per column."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold only numbers and are right-aligned."""
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(self.headings)
        return [
            i > 0 and all(_NUMBER.match(cell.partition("  ")[0]) for cell in column)
            for i, column in enumerate(columns)
        ]


@dataclass(frozen=True)
class Plot:
    """A plot of the HTML page; its data have the same name in `figures.page_data`."""

    name: str
    title: str
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """A PNG file, which replaces plots in the Markdown."""

    name: str
    title: str


Block = Paragraph | Bullets | Table | Plot | Picture


@dataclass(frozen=True)
class ReportSection:
    """A section with a heading, listed in the table of contents."""

    name: str
    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)


@dataclass(frozen=True)
class PlotData:
    """The data of a plot."""

    name: str  # unique in the page
    title: str
    section: Literal["curves", "throughput", "utilization", "evaluation"]
    content: Json  # input of `report.js`
    note: str = ""


# Names of the Markdown's pictures
CURVES, SCALING, UTILIZATION = "curves", "scaling", "utilization"
# Okabe and Ito's palette for colour-blind readers, without black and yellow.
RUN_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
# The productive part is pale, so that losses stand out; neighbours differ in lightness.
PART_COLORS: dict[TimePart, str] = {
    "productive": "#cfd8dc",
    "recomputation": "#7a1f5c",
    "saving": "#f2a65a",
    "first_step": "#2a8c6e",
    "start_up": "#12466b",
    "preflight": "#7fb3d5",
    "cache": "#a04000",
    "precompile": "#8e7cc3",
    "idle": "#333333",
}
_MOST_NAMES = 4
_LONGEST = 40  # characters of a name within a file's name


def default_path(runs: Sequence[RunFacts]) -> Path:
    """`reports/report.html` in the first run's directory, else `report.html`.

    The report of several runs is `report-<A>-<B>.html`.
    """
    name = "report"
    if len(runs) > 1:
        parts = [_file_part(facts.name) for facts in runs[:_MOST_NAMES]]
        more = len(runs) - _MOST_NAMES
        name = "-".join([name, *parts, *([f"and-{more}-more"] if more > 0 else [])])
    for facts in runs:
        if facts.kind == "run":
            return facts.path / "reports" / f"{name}.html"
    return Path(f"{name}.html")


def pictures_folder(page: Path) -> Path:
    """The folder of the Markdown's pictures."""
    return page.with_name(f"{page.stem}_files")


def scores_name(run: int, suite: str) -> str:
    """Name of the picture of a suite's scores; `run` is the index of the run in the report."""
    return f"scores-{run}-{_file_part(suite)}"


def _file_part(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:_LONGEST]
