"""Tables fit any width, and no number of theirs is cut, broken or lost; progress of counts."""

import io
import sys

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from slurmllm.core.display.progress import count_progress
from slurmllm.core.display.tables import PROSE, Column, fitted, print_table

NUMBERS = st.floats(1, 1e12).map(lambda value: f"{value:,.2f}")
WORDS = st.lists(st.text("ab", min_size=1, max_size=8), min_size=1, max_size=9).map(" ".join)
WORDS |= st.just("运行 a b c d e f g h 运行 i j k l")


@given(
    st.lists(st.tuples(WORDS, st.lists(NUMBERS, min_size=9, max_size=9), WORDS), max_size=4),
    st.integers(40, 300),
)
def test_numbers_are_never_truncated_and_lines_fit_if_they_can(
    rows: list[tuple[str, list[str], str]], room: int
) -> None:
    columns = [
        Column("run", 16),
        *(Column(f"n{i}", drop=i == 8) for i in range(9)),
        Column("reason", PROSE),
    ]
    cells = [(f"{i}{name}", *numbers, why) for i, (name, numbers, why) in enumerate(rows)]
    table = fitted(columns, cells, room)
    shown = 8 if table.left_out else 9
    needed = 16 + PROSE + 2 * (shown + 1)
    needed += sum(max(2, *(len(row[1][at]) for row in rows), 2) for at in range(shown))
    assert all(cell_len(line) <= max(room, needed) for line in table.lines)
    words = [word for line in table.lines for word in line.split()]
    for numbers in (numbers for _, numbers, _ in rows):
        assert all(
            words.count(number) >= numbers[:shown].count(number) for number in numbers[:shown]
        )
    assert {word for *_, why in rows for word in why.split()} <= set(words)


@pytest.mark.parametrize(
    ("cell", "lines"),
    [
        ("node_failure requeue", ["node_fail", "ure", "requeue"]),
        ("lost 1,234,567 of", ["lost", "1,234,567", "of"]),
        ("at -1.5e-05 or 2026", ["at", "-1.5e-05", "or 2026"]),
        ("a\n  b", ["a", "  b"]),
        ("运行运行运", ["运行运行", "运"]),
        ("[bold]", ["[bold]"]),
        ("a\tb", ["a b"]),
    ],
)
def test_where_prose_is_broken(cell: str, lines: list[str]) -> None:
    """After a blank; a word only if it is longer than the column."""
    table = fitted([Column("k"), Column("why", 8)], [("1", cell)], 12)
    assert [line[3:] for line in table.lines[1:]] == lines


def test_a_row_of_one_line_ends_in_an_ellipsis() -> None:
    columns = [Column("k"), Column("why", 8)]
    assert fitted(columns, [("1", "some words")], 11, one_line=True).lines[1] == "1  some wo…"


def test_a_table_without_room_is_broken_by_the_terminal_not_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [("a", "1", "1,234.5678", "some words that are long"), ("a", "2", "0.25", "few")]
    wide = (
        "run  nodes  tokens/s    what it is\n"
        "a    1      1,234.5678  some words that are long\n"
        "a    2      0.25        few\n"
    )

    def shown(fold: str = "") -> str:
        print_table(("run", "nodes", "tokens/s", "what it is"), rows, fold)
        return click.unstyle(capsys.readouterr().out)

    monkeypatch.setenv("COLUMNS", "47")
    assert shown("what it is") == wide  # a pipe
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert shown() == wide
    rows.append(("b", "64", "7", "folded: " + "word " * 9))
    assert shown("what it is").splitlines()[-3:] == [
        "b    64     7           folded: word word word",
        "                        word word word word word",
        "                        word",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Terminal(), True), (io.StringIO(), False)])
def test_parts_are_counted_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, shown: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "__stderr__", stream)
    with count_progress("planning node counts", 10) as on_done:
        for _ in range(3):
            on_done()
    assert ("planning node counts" in stream.getvalue()) is shown
    assert ("3/10" in stream.getvalue()) is shown
