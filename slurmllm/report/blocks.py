"""What a report is made of, before it is HTML or Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from slurmllm.report.facts import RunFacts

_NUMBER = re.compile(r"^(-|[-+]?[\d.,]+(e[-+]?\d+)?( ?(%|[kMGT]?B|[KMBT]))?( ± [\d.e-]+)?)$")


@dataclass(frozen=True)
class Text:
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


Block = Text | Bullets | Table | Plot | Picture


@dataclass(frozen=True)
class Section:
    """A part of the report, with a heading that the table of contents lists."""

    name: str
    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)


ABSENT = "-"


def hours(value: float | None) -> str:
    """`0.0639`, `14.20`, `1,234.5`."""
    if value is None:
        return ABSENT
    return f"{value:,.1f}" if value >= 100 else f"{value:.4f}" if value < 1 else f"{value:.2f}"


def percent(share: float | None) -> str:
    """`35.70 %`."""
    return ABSENT if share is None else f"{100 * share:.2f} %"


def seconds(value: float | None) -> str:
    """`26.8`."""
    return ABSENT if value is None else f"{value:,.1f}"


def dollars(usd: float | None) -> str:
    """`1,234.50`."""
    return ABSENT if usd is None else f"{usd:,.2f}"


def whole(number: int | None) -> str:
    """`500,000`."""
    return ABSENT if number is None else f"{number:,}"


def figure(value: float | None) -> str:
    """`0.0213`, `14.2`, `1,234`: three or four digits that count."""
    if value is None or not math.isfinite(value):
        return ABSENT if value is None else str(value)
    size = abs(value)
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}" if size >= 1 else f"{value:.3g}"


def count(number: float | None) -> str:
    """`1.23B`."""
    if number is None:
        return ABSENT
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.3g}{letter}"
    return f"{number:.3g}"


def size(num_bytes: int | None) -> str:
    """`1.25 GB`, of 10^9 bytes."""
    if num_bytes is None:
        return ABSENT
    for unit, letters in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {letters}"
    return f"{num_bytes} B"


def moment(unix_s: float | None) -> str:
    """`2026-11-22 01:20:50 UTC`."""
    if unix_s is None:
        return ABSENT
    try:
        return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, OSError, ValueError):
        return f"{unix_s:g}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """`n1, n2 and 126 more`."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def several(number: int, noun: str) -> str:
    """`1 restart`, `2 restarts`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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


@dataclass(frozen=True)
class Figure:
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
