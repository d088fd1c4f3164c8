"""What a report is made of, before it is HTML or Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from slurmllm.records import TimePart
from slurmllm.report.facts import RunFacts

_NUMBER = re.compile(r"^(-|[-+]?[\d.,]+(e[-+]?\d+)?( ?(%|[kMGT]?B|[KMBT]))?( ± [\d.e-]+)?)$")


@dataclass(frozen=True)
class Paragraph:
    """A paragraph; `strong`: what it begins with, in bold."""

    words: str
    strong: str = ""


@dataclass(frozen=True)
class Bullets:
    """A list."""

    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table with a heading a column."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers alone, and stand at the right."""
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(self.headings)
        return [
            i > 0 and all(_NUMBER.match(cell.partition("  ")[0]) for cell in column)
            for i, column in enumerate(columns)
        ]


@dataclass(frozen=True)
class Plot:
    """A plot of the page; its data are `figures.page_data`'s, under this name."""

    name: str
    title: str
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """What stands for plots where nothing can be drawn: a PNG beside the Markdown."""

    name: str
    title: str


Block = Paragraph | Bullets | Table | Plot | Picture


@dataclass(frozen=True)
class ReportSection:
    """A part of the report, with a heading that the table of contents lists."""

    name: str
    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)


# The Markdown's pictures
CURVES, SCALING, UTILIZATION = "curves", "scaling", "utilization"
_MOST_NAMES = 4
_LONGEST = 40


def default_path(runs: Sequence[RunFacts]) -> Path:
    """`reports/report.html` of the first that is a run, else in this folder.

    Of several runs it is `report-<A>-<B>.html`.
    """
    own = "report"
    if len(runs) > 1:
        parts = [_file_part(facts.name) for facts in runs[:_MOST_NAMES]]
        more = len(runs) - _MOST_NAMES
        own = "-".join([own, *parts, *([f"and-{more}-more"] if more > 0 else [])])
    for facts in runs:
        if facts.kind == "run":
            return facts.path / "reports" / f"{own}.html"
    return Path(f"{own}.html")


def pictures_folder(page: Path) -> Path:
    """Of the Markdown's pictures, beside it."""
    return page.with_name(f"{page.stem}_files")


def scores_name(run: int, suite: str) -> str:
    """Of the picture of what a run scored in a suite; `run` is its place in the report."""
    return f"scores-{run}-{_file_part(suite)}"


def _file_part(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:_LONGEST]


Json = dict[str, Any]

# Okabe and Ito's, without black and yellow: told apart by most eyes.
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


@dataclass(frozen=True)
class PlotData:
    """A plot.

    Attributes:
        name: Of the plot, within the page.
        title: For people.
        section: That it stands in.
        content: What `report.js` draws.
        note: Below it.
    """

    name: str
    title: str
    section: Literal["curves", "throughput", "utilization", "evaluation"]
    content: Json
    note: str = ""
