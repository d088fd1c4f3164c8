"""Tables on the terminal, in one style; numbers are never truncated, whatever the width.

rich.Table would cut or fold every column that does not fit. Here columns are dropped, folded or
moved below in an order that each table chooses.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import click
from rich.cells import cell_len, set_cell_size

if TYPE_CHECKING:
    from rich.console import Console

PROSE = 24  # least cells of a column of prose
_TIGHT = 12  # least cells of prose that is repeated in every part of a table
_GAP = 2  # cells between two columns
_NARROWEST = 8  # cells of a column if nothing else helps
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


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], fold: str = "") -> None:
    """Print a table without rules; cells of the column with the heading `fold` may be folded."""
    columns = [Column(name, PROSE if fold and name == fold else 0) for name in headings]
    for number, (heading, *lines) in enumerate(fitted(columns, list(rows), width()).parts):
        if number:
            click.echo("")
        click.echo(click.style(heading, bold=True))
        for line in lines:
            click.echo(line)


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
    cells = zip(*rows, strict=True) if rows else [()] * len(columns)
    widest = [
        max(cell_len(line) for cell in (column.heading, *own) for line in cell.split("\n"))
        for column, own in zip(columns, cells, strict=True)
    ]
    least = [
        min(most, max(column.room, cell_len(column.heading))) if column.room else most
        for column, most in zip(columns, widest, strict=True)
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
        rows = [(*row[:last], _truncate(row[last], own_room), *row[last + 1 :]) for row in rows]
        widest[last] = min(widest[last], own_room)
    tight = [
        min(own, max(_TIGHT, cell_len(column.heading))) if column.room else own
        for column, own in zip(columns, least, strict=True)
    ]
    parts = []
    for keys, others in _split_columns(rows, used, least, tight, room):
        needed = {at: tight[at] for at in keys} | {at: least[at] for at in others}
        widths = _choose_widths(needed, widest, room)
        shown = [[column.heading for column in columns], *rows]
        parts.append([line for row in shown for line in _row_lines(row, widths)])
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


def _choose_widths(needed: dict[int, int], widest: Sequence[int], room: int) -> dict[int, int]:
    """Column → its width; spare cells go to the columns that would be folded."""
    widths = dict(needed)
    spare = room - sum(widths.values()) - _GAP * (len(widths) - 1)
    for at in sorted(widths, key=lambda at: widest[at] - needed[at]):
        if spare > 0:
            more = min(widest[at] - needed[at], spare)
            widths[at], spare = widths[at] + more, spare - more
    while spare < 0 and max(widths.values()) > _NARROWEST:
        at = max(widths, key=lambda at: widths[at])
        less = min(widths[at] - _NARROWEST, -spare)
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
    """The lines of a cell, broken between words."""
    if cell_len(cell) <= own and "\n" not in cell:
        return [cell]
    from rich.console import Console
    from rich.text import Text

    return [str(line).rstrip() for line in Text(cell).wrap(Console(), own, overflow="fold")]


def _truncate(text: str, room: int) -> str:
    return text if cell_len(text) <= room else f"{set_cell_size(text, room - 1)}…"


def _total(widths: Sequence[int], part: Sequence[int]) -> int:
    return sum(widths[at] for at in part) + _GAP * (len(part) - 1)
