"""Tables for people, in one style."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

# Where nobody looks at a terminal (a pipe, a log) there is no width to fit into.
_PIPED_WIDTH = 240


def console() -> Console:
    """Standard output, with lines as wide as the terminal, or wide where there is none."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=_PIPED_WIDTH)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], fold: str = "") -> None:
    """Print a table without lines; the column `fold` takes what room there is, others all theirs.

    Args:
        headings: A heading a column; they must differ.
        rows: The cells.
        fold: Heading of the column whose cells may be broken into several lines.
    """
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading != fold)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    console().print(table)
