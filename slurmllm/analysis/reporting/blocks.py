"""What a report is made of, before it is HTML or Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

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
