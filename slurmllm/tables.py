"""Output for people: tables in one style, of which no number is ever cut, whatever the width."""

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

PROSE = 24  # cells below which prose is no joy
_TIGHT = 12  # likewise of prose that is repeated
_GAP = 2  # cells between two columns
_NARROWEST = 8  # cells that are left to a column where nothing else helps
# Where nobody looks at a terminal (a pipe, a log) there is no width to fit into.
_PIPED_WIDTH = 1_000_000


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        heading: Of it.
        room: Cells that it needs at least where it may be folded; 0: all of its widest cell's.
        drop: Those with the highest number are left out first; 0: never.
    """

    heading: str
    room: int = 0
    drop: int = 0


class Fitted(NamedTuple):
    """A table as wide as there is room for.

    Attributes:
        parts: Tables, each as its lines with the headings first: where not all columns stand side
            by side, the others follow below, behind those that tell the rows apart.
        left_out: Headings of the columns that were dropped.
    """

    parts: list[list[str]]
    left_out: list[str]


def width() -> int:
    """Cells of a line: the terminal's, or what $COLUMNS says of it; in a pipe as many as wanted."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPED_WIDTH


def console() -> Console:
    """Standard output, with lines as wide as `width` says; a terminal's follows its window."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], fold: str = "") -> None:
    """Print a table without lines.

    Args:
        headings: A heading a column.
        rows: The cells.
        fold: Heading of the column whose cells may be broken into several lines.
    """
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
        room: Cells of a line.
        one_line: Whether a row has one line alone; then a last column of prose is cut.
    """
    widest = [
        max(cell_len(line) for cell in (column.heading, *cells) for line in cell.split("\n"))
        for column, cells in zip(columns, _transposed(rows, len(columns)), strict=True)
    ]
    least = [
        min(of_all, max(column.room, cell_len(column.heading))) if column.room else of_all
        for column, of_all in zip(columns, widest, strict=True)
    ]
    used, left_out = list(range(len(columns))), []
    for at in sorted((at for at in used if columns[at].drop), key=lambda at: -columns[at].drop):
        if _total(least, used) <= room:
            break
        used.remove(at)
        left_out.append(columns[at].heading)
    last, taken = used[-1], _total(widest, used[:-1]) + _GAP
    if one_line and columns[last].room:
        own = max(room - taken, columns[last].room)
        rows = [(*row[:last], _cut(row[last], own), *row[last + 1 :]) for row in rows]
        widest[last] = min(widest[last], own)
    tight = [
        min(own, max(_TIGHT, cell_len(column.heading))) if column.room else own
        for column, own in zip(columns, least, strict=True)
    ]
    parts = []
    for keys, others in _parts(rows, used, least, tight, room):
        needed = {at: tight[at] for at in keys} | {at: least[at] for at in others}
        widths = _widths(needed, widest, room)
        shown = [[column.heading for column in columns], *rows]
        parts.append([line for row in shown for line in _lines(row, widths)])
    return Fitted(parts, left_out)


def _parts(
    rows: Sequence[Sequence[str]],
    used: list[int],
    least: Sequence[int],
    tight: Sequence[int],
    room: int,
) -> list[tuple[list[int], list[int]]]:
    """The columns of each table, those that are in all of them apart.

    Where one table is too wide these are the first columns: as many as tell the rows apart and
    leave room for any other.
    """
    if _total(least, used) <= room:
        return [([], used)]
    keys, most = used[:1], 0
    named = _filled(rows)
    for count in range(1, len(used)):
        first, others = used[:count], used[count:]
        told = len({tuple(row[at] for at in first) for row in named})
        taken = _total(tight, first) + _GAP
        if told > most and (count == 1 or taken + max(least[at] for at in others) <= room):
            keys, most = first, told
    rest = room - _total(tight, keys) - _GAP
    parts: list[tuple[list[int], list[int]]] = []
    for at in used[len(keys) :]:
        if not parts or _total(least, [*parts[-1][1], at]) > rest:
            parts.append((keys, []))
        parts[-1][1].append(at)
    return parts or [([], keys)]


def _filled(rows: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """The rows, with what a blank cell leaves to the one above it."""
    found: list[Sequence[str]] = []
    for row in rows:
        above = found[-1] if found else row
        found.append([cell or before for cell, before in zip(row, above, strict=True)])
    return found


def _widths(needed: dict[int, int], widest: Sequence[int], room: int) -> dict[int, int]:
    """Column → its width: what there is to spare goes to those that are folded."""
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


def _lines(row: Sequence[str], widths: dict[int, int]) -> Iterator[str]:
    """The lines of a row."""
    cells = [_folded(row[at], own) for at, own in widths.items()]
    for line in zip_longest(*cells, fillvalue=""):
        padded = (
            set_cell_size(text, max(own, cell_len(text)))
            for text, own in zip(line, widths.values(), strict=True)
        )
        yield (" " * _GAP).join(padded).rstrip()


def _folded(cell: str, own: int) -> list[str]:
    """The lines of a cell, broken between words."""
    if cell_len(cell) <= own and "\n" not in cell:
        return [cell]
    from rich.console import Console
    from rich.text import Text

    return [str(line).rstrip() for line in Text(cell).wrap(Console(), own, overflow="fold")]


def _cut(words: str, room: int) -> str:
    return words if cell_len(words) <= room else f"{set_cell_size(words, room - 1)}…"


def _total(widths: Sequence[int], part: Sequence[int]) -> int:
    return sum(widths[at] for at in part) + _GAP * (len(part) - 1)


def _transposed(rows: Sequence[Sequence[str]], columns: int) -> Iterable[Sequence[str]]:
    return zip(*rows, strict=True) if rows else [()] * columns
