"""Tables fit any width, and no number of theirs is cut, broken or lost."""

from __future__ import annotations

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from slurmllm.display.tables import PROSE, Column, fitted, print_table

NUMBERS = st.floats(1, 1e12).map(lambda value: f"{value:,.2f}")
WORDS = st.lists(st.text("ab", min_size=1, max_size=8), min_size=1, max_size=9).map(" ".join)
WORDS |= st.just("运行 a b c d e f g h 运行 i j k l")


@given(
    st.lists(st.tuples(WORDS, st.lists(NUMBERS, min_size=9, max_size=9), WORDS), max_size=4),
    st.integers(40, 300),
)
def test_numbers_are_never_truncated_and_lines_fit(
    rows: list[tuple[str, list[str], str]], room: int
) -> None:
    columns = [
        Column("run", 16),
        *(Column(f"n{i}", drop=i == 8) for i in range(9)),
        Column("reason", PROSE),
    ]
    cells = [(f"{i}{name}", *numbers, why) for i, (name, numbers, why) in enumerate(rows)]
    widths = fitted(columns, cells, room)
    lines = [line for part in widths.parts for line in part]
    assert all(cell_len(line) <= room for line in lines)
    words = [word for line in lines for word in line.split()]
    shown = 8 if widths.left_out else 9
    for numbers in (numbers for _, numbers, _ in rows):
        assert all(
            words.count(number) >= numbers[:shown].count(number) for number in numbers[:shown]
        )
    assert {word for *_, why in rows for word in why.split()} <= set(words)


@pytest.mark.parametrize(
    ("cell", "lines"),
    [
        ("/fsx/shared_runs/a-70b/step_1", ["/fsx/", "shared_", "runs/", "a-70b/", "step_1"]),
        ("node_failure,requeue", ["node_", "failure,", "requeue"]),
        ("lost 1,234,567 of", ["lost", "1,234,567", "of"]),
        ("at -1.5e-05 or 2026-11-23", ["at", "-1.5e-05", "or", "2026-11-23"]),
        ("--set optim.lr=1", ["--set", "optim.lr=1"]),
        ("unbreakable", ["unbreakable"]),
        ("a\n  b", ["a", "  b"]),
        ("运行运行运", ["运行运行", "运"]),
    ],
)
def test_where_a_cell_is_broken(cell: str, lines: list[str]) -> None:
    """After a blank, / - _ or a comma; never within a number, an option or another word."""
    column = Column("why", 8)
    (part,) = fitted([Column("k"), column], [("1", cell)], 11).parts
    assert [line[3:] for line in part[1:]] == lines


ROWS = [("a", "1", "1,234.5678", "some words that are long"), ("a", "2", "0.25", "few")]


def shown(capsys: pytest.CaptureFixture[str], fold: str = "", *more: tuple[str, ...]) -> str:
    print_table(("run", "nodes", "tokens/s", "what it is"), [*ROWS, *more], fold)
    return click.unstyle(capsys.readouterr().out)


def test_columns_without_room_follow_below_with_the_keys_of_the_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = (
        "run  nodes  tokens/s    what it is\n"
        "a    1      1,234.5678  some words that are long\n"
        "a    2      0.25        few\n"
    )
    monkeypatch.setenv("COLUMNS", "47")
    assert shown(capsys) == wide  # a pipe
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "48")
    assert shown(capsys) == wide
    monkeypatch.setenv("COLUMNS", "47")
    assert shown(capsys) == (
        "run  nodes  tokens/s\na    1      1,234.5678\na    2      0.25\n\n"
        "run  nodes  what it is\na    1      some words that are long\na    2      few\n"
    )
    monkeypatch.setenv("COLUMNS", "36")
    more = ("b", "64", "7", "folded: " + "word " * 9)
    assert shown(capsys, "what it is", more).splitlines()[-3:] == [
        "b    64     folded: word word word",
        "            word word word word word",
        "            word",
    ]


def test_a_blank_cell_repeats_the_one_above_it() -> None:
    rows = [("a", "one", "1"), ("", "two", "2"), ("b", "one", "3"), ("", "two", "4")]
    columns = [Column("group"), Column("task"), Column("step 100"), Column("step 200")]
    widths = fitted(columns, [(*row, "0.5") for row in rows], 21)
    assert [part[1:3] for part in widths.parts] == [
        ["a      one   1", "       two   2"],
        ["a      one   0.5", "       two   0.5"],
    ]
