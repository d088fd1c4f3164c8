"""Tables on the terminal, in one style; numbers are never truncated, whatever the width."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from slurmllm.format import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

PROSE = 24  # least cells of a column of prose
_GAP = 2  # cells between two columns
_PIPED_WIDTH = 1_000_000  # a pipe or a log file has no width to fit into


class Column(NamedTuple):
    """A column of a table."""

    heading: str
    room: int = 0  # least cells if it may be folded; 0: the width of its widest cell
    drop: int = 0  # columns with the highest number are dropped first; 0: never


class Fitted(NamedTuple):
    """A table fitted into a width: its lines, the heading first, and the dropped columns."""

    lines: list[str]
    left_out: list[str]


def width() -> int:
    """Return the cells per line of the terminal, or $COLUMNS; without limit in a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPED_WIDTH


def console() -> Console:
    """Return standard output with lines as wide as `width`; a terminal's follow its window."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)


def print_line(text: str | Text = "") -> None:
    """Print text as it is; the terminal breaks long lines, so that they are copied unbroken."""
    console().print(text, soft_wrap=True, markup=False)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], fold: str = "") -> None:
    """Print a table without rules; cells of the column with the heading `fold` may be folded."""
    columns = [Column(name, PROSE if fold and name == fold else 0) for name in headings]
    heading, *lines = fitted(columns, list(rows), width()).lines
    click.echo(click.style(heading, bold=True))
    for line in lines:
        click.echo(line)


def fitted(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], room: int, one_line: bool = False
) -> Fitted:
    """Fit a table into a width: drop columns, then fold those that may be.

    A table that needs more than `room` cells is wider: the terminal breaks its lines. With
    `one_line` each row takes one line, and prose is truncated instead of folded.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [[column.heading for column in columns]]
    cells += [[printable(cell) for cell in row] for row in rows]
    widest = [
        max(cell_len(line) for cell in column for line in cell.split("\n"))
        for column in zip(*cells, strict=True)
    ]
    least = [
        min(widest[at], column.room) if column.room else widest[at]
        for at, column in enumerate(columns)
    ]
    shown = list(range(len(columns)))

    def needed() -> int:
        return sum(least[at] for at in shown) + _GAP * (len(shown) - 1)

    left_out = []
    for at in sorted((at for at in shown if columns[at].drop), key=lambda at: -columns[at].drop):
        if needed() <= room:
            break
        shown.remove(at)
        left_out.append(columns[at].heading)
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, show_header=False)
    for at in shown:
        table.add_column(no_wrap=not columns[at].room, overflow="fold")
    for row in cells:
        texts = (Text(row[at]) for at in shown)
        if one_line:
            texts = (Text(row[at], no_wrap=True, overflow="ellipsis") for at in shown)
        table.add_row(*texts)
    writer = Console(width=max(room, needed()), color_system=None)
    with writer.capture() as capture:
        writer.print(table)
    return Fitted([line.rstrip() for line in capture.get().splitlines()], left_out)


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in GitHub's Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    cells = ([printable(cell).replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV, with a column for every key of any row; None is an empty cell."""
    import csv
    import io

    stream = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(stream, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()
