"""Tables on the terminal, in one style; numbers are never truncated, whatever the width."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import click

from slurmllm.core.errors import UserError
from slurmllm.core.format import Values, printable

if TYPE_CHECKING:
    import pandas
    from rich.console import Console
    from rich.text import Text

PROSE = 24  # least cells of a column of prose
_GAP = 2  # cells between two columns
Cells = Sequence[str]  # of a row
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

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            raise  # the error that it handles; rich would exit with 1, a failed check

    return Piped(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)


def print_line(line: str | Text = "") -> None:
    """Print text as it is; the terminal breaks long lines, so that they are copied unbroken."""
    console().print(line, soft_wrap=True, markup=False)


def print_table(headings: Cells, rows: Iterable[Cells], fold: str = "") -> None:
    """Print a table without rules; cells of the column with the heading `fold` may be folded."""
    columns = [Column(name, PROSE if fold and name == fold else 0) for name in headings]
    heading, *lines = fitted(columns, list(rows), width()).lines
    click.echo(click.style(heading, bold=True))
    for line in lines:
        click.echo(line)


def fitted(
    columns: Sequence[Column], rows: Sequence[Cells], room: int, one_line: bool = False
) -> Fitted:
    """Fit a table into a width: drop columns, then fold those that may be.

    A table that needs more than `room` cells is wider: the terminal breaks its lines. With
    `one_line` each row takes one line, and prose is truncated instead of folded.
    """
    from rich.cells import cell_len, set_cell_size

    cells = [[column.heading for column in columns]]
    # A tab has no width of its own.
    cells += [[printable(cell).replace("\t", " ") for cell in row] for row in rows]
    widest = [
        max(cell_len(line) for cell in column for line in cell.split("\n"))
        for column in zip(*cells, strict=True)
    ]
    narrowest = [
        min(size, column.room or size) for size, column in zip(widest, columns, strict=True)
    ]
    visible = list(range(len(columns)))
    left_out = []
    for index in sorted(visible, key=lambda index: -columns[index].drop):
        needed = sum(narrowest[index] + _GAP for index in visible) - _GAP
        if needed > room and columns[index].drop:
            visible.remove(index)
            left_out.append(columns[index].heading)
    # If the columns do not fit, the widest of those that may be folded are narrowed.
    widths = {index: max(min(widest[index], room), narrowest[index]) for index in visible}
    foldable = [index for index in visible if widths[index] > narrowest[index]]
    while foldable and sum(widths.values()) + _GAP * (len(widths) - 1) > room:
        index = max(foldable, key=lambda index: (widths[index], index))
        widths[index] -= 1
        if widths[index] == narrowest[index]:
            foldable.remove(index)
    lines = []
    for row in cells:
        folded = [_cell_lines(row[index], size, one_line) for index, size in widths.items()]
        for line in zip_longest(*folded, fillvalue=""):
            lines.append((" " * _GAP).join(map(set_cell_size, line, widths.values())).rstrip())
    return Fitted(lines, left_out)


def _cell_lines(cell: str, room: int, one_line: bool) -> list[str]:
    """Return the lines of a cell; rich, which takes 0.1 ms for each, folds only wide ones."""
    from rich.cells import cell_len, set_cell_size
    from rich.console import Console
    from rich.text import Text

    lines = []
    for line in cell.split("\n"):
        if cell_len(line) <= room:
            lines.append(line)
        elif one_line:
            lines.append(f"{set_cell_size(line, room - 1)}…")
        else:
            lines += [piece.plain for piece in Text(line).wrap(Console(), room, overflow="fold")]
    return lines


def markdown_table(headings: Cells, rows: Iterable[Cells]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    cells = ([printable(cell).replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def csv_text(rows: Sequence[Values]) -> str:
    """Return rows as CSV, with a column for every key of any row; None is an empty cell."""
    import csv
    import io

    stream = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(stream, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def data_frame(values: Values | Sequence[Values], columns: Cells | None = None) -> pandas.DataFrame:
    """Return a data frame of columns by name, or of rows; raise UserError without pandas."""
    try:
        import pandas
    except ImportError as error:
        fix = "`pip install pandas`, or use `to_dict()`"
        raise UserError(f"to_pandas() needs pandas, which is not installed here; {fix}") from error
    return pandas.DataFrame(values, columns=columns)
