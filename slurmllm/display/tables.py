"""Tables on the terminal, in one style; numbers are never truncated, whatever the width.

rich.Table would cut or fold every column that does not fit. Here columns are dropped, folded or
moved below in an order that each table chooses.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from rich.cells import cell_len, set_cell_size

from slurmllm.format import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

PROSE = 24  # least cells of a column of prose
_TIGHT = 12  # least cells of prose that is repeated in every part of a table
_GAP = 2  # cells between two columns
_NARROWEST = 8  # cells of a column if nothing else helps
# Where a cell may be broken: after spaces, and in long words after / - _ or a comma, but not
# within a number (1,234, 1e-5, 44/100) or before an option (--set). CJK text has no spaces.
_BREAK = re.compile(
    r"(?<=\s)(?=\S)|(?<=\w[-,/_])(?=[^\W\d_])|(?<=[^\W\d][/_])(?=\d)"
    "|(?<=[\u2e80-\uffdc])(?=[\u2e80-\uffdc])"
)
_PIPED_WIDTH = 1_000_000  # a pipe or a log file has no width to fit into


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        heading: Its heading.
        room: Least cells if it may be folded; 0: the width of its widest cell.
        drop: Columns with the highest number are dropped first; 0: never.
    """

    heading: str
    room: int = 0
    drop: int = 0


class Fitted(NamedTuple):
    """A table fitted into a width.

    Attributes:
        parts: Tables as lines, headings first. Columns that do not fit next to each other follow in
            further tables, which repeat the columns that identify the rows.
        left_out: Headings of the dropped columns.
    """

    parts: list[list[str]]
    left_out: list[str]


def width() -> int:
    """Cells per line of the terminal, or $COLUMNS; without limit in a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPED_WIDTH


def console() -> Console:
    """Standard output with lines as wide as `width`; on a terminal it follows the window."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)


def print_line(text: str | Text = "") -> None:
    """Print text as it is; the terminal breaks long lines, so that they are copied unbroken."""
    console().print(text, soft_wrap=True, markup=False)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], fold: str = "") -> None:
    """Print a table without rules; cells of the column with the heading `fold` may be folded."""
    columns = [Column(name, PROSE if fold and name == fold else 0) for name in headings]
    for number, (heading, *lines) in enumerate(fitted(columns, list(rows), width()).parts):
        if number:
            click.echo("")
        click.echo(click.style(heading, bold=True))
        for line in lines:
            click.echo(line)


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in GitHub's Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    cells = ([printable(cell).replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV, with a column for every key of any row; None is an empty cell."""
    import csv
    import io

    stream = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(stream, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def fitted(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], room: int, one_line: bool = False
) -> Fitted:
    """Fit a table into a width: columns are dropped, folded, and moved below, in this order.

    Args:
        columns: Its columns.
        rows: Their cells.
        room: Cells per line.
        one_line: Whether each row takes one line; a last column of prose is then truncated.
    """
    heads = [column.heading for column in columns]
    rows = [[printable(cell) for cell in row] for row in rows]
    widest = [
        max(cell_len(line) for row in (heads, *rows) for line in row[at].split("\n"))
        for at in range(len(columns))
    ]
    longest = [  # piece of a column
        max(
            cell_len(p.rstrip())
            for p in (head, *(p for row in rows for p in _BREAK.split(row[at])))
        )
        for at, head in enumerate(heads)
    ]
    least = [
        min(most, max(column.room, piece)) if column.room else most
        for column, most, piece in zip(columns, widest, longest, strict=True)
    ]
    used, left_out = list(range(len(columns))), []
    for at in sorted((at for at in used if columns[at].drop), key=lambda at: -columns[at].drop):
        if _total(least, used) <= room:
            break
        used.remove(at)
        left_out.append(columns[at].heading)
    last, taken = used[-1], _total(widest, used[:-1]) + _GAP
    if one_line and columns[last].room:
        own_room = max(room - taken, columns[last].room)
        rows = [[*row[:last], _truncate(row[last], own_room), *row[last + 1 :]] for row in rows]
        widest[last] = min(widest[last], own_room)
    tight = [
        min(own, max(_TIGHT, piece)) if column.room else own
        for column, own, piece in zip(columns, least, longest, strict=True)
    ]
    parts = []
    for keys, others in _split_columns(rows, used, least, tight, room):
        needed = {at: tight[at] for at in keys} | {at: least[at] for at in others}
        widths = _choose_widths(needed, widest, longest, room)
        parts.append([line for row in (heads, *rows) for line in _row_lines(row, widths)])
    return Fitted(parts, left_out)


def _split_columns(
    rows: Sequence[Sequence[str]],
    used: list[int],
    least: Sequence[int],
    tight: Sequence[int],
    room: int,
) -> list[tuple[list[int], list[int]]]:
    """The columns of each table: the keys, which all tables repeat, and the others.

    The keys are the first columns, as many as identify the rows and leave room for any other.
    """
    if _total(least, used) <= room:
        return [([], used)]
    filled: list[Sequence[str]] = []  # a blank cell repeats the one above it
    for row in rows:
        above = filled[-1] if filled else row
        filled.append([cell or before for cell, before in zip(row, above, strict=True)])
    keys, most = used[:1], 0
    for count in range(1, len(used)):
        first, others = used[:count], used[count:]
        distinct = len({tuple(row[at] for at in first) for row in filled})
        taken = _total(tight, first) + _GAP
        if distinct > most and (count == 1 or taken + max(least[at] for at in others) <= room):
            keys, most = first, distinct
    rest = room - _total(tight, keys) - _GAP
    parts: list[tuple[list[int], list[int]]] = []
    for at in used[len(keys) :]:
        if not parts or _total(least, [*parts[-1][1], at]) > rest:
            parts.append((keys, []))
        parts[-1][1].append(at)
    return parts or [([], keys)]


def _choose_widths(
    needed: dict[int, int], widest: Sequence[int], longest: Sequence[int], room: int
) -> dict[int, int]:
    """Column → its width; spare cells go to the columns that would be folded."""
    widths = dict(needed)
    spare = room - sum(widths.values()) - _GAP * (len(widths) - 1)
    for at in sorted(widths, key=lambda at: widest[at] - needed[at]):
        if spare > 0:
            more = min(widest[at] - needed[at], spare)
            widths[at], spare = widths[at] + more, spare - more
    narrowest = {at: min(own, max(_NARROWEST, longest[at])) for at, own in widths.items()}
    while spare < 0 and (wide := [at for at in widths if widths[at] > narrowest[at]]):
        at = max(wide, key=lambda at: widths[at])
        less = min(widths[at] - narrowest[at], -spare)
        widths[at], spare = widths[at] - less, spare + less
    return widths


def _row_lines(row: Sequence[str], widths: dict[int, int]) -> Iterator[str]:
    cells = [_fold(row[at], own) for at, own in widths.items()]
    for line in zip_longest(*cells, fillvalue=""):
        padded = (
            set_cell_size(text, max(own, cell_len(text)))
            for text, own in zip(line, widths.values(), strict=True)
        )
        yield (" " * _GAP).join(padded).rstrip()


def _fold(cell: str, own: int) -> list[str]:
    """The lines of a cell; a piece that is longer than its column is not cut."""
    lines = []
    for text in cell.split("\n"):
        line = ""
        for piece in _BREAK.split(text):
            if line and cell_len((line + piece).rstrip()) > own:
                lines.append(line.rstrip())
                line = ""
            line += piece
        lines.append(line.rstrip())
    return lines


def _truncate(text: str, room: int) -> str:
    return text if cell_len(text) <= room else f"{set_cell_size(text, room - 1)}…"


def _total(widths: Sequence[int], part: Sequence[int]) -> int:
    return sum(widths[at] for at in part) + _GAP * (len(part) - 1)
