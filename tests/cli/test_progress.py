"""The line for work that takes longer than a second."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from slurmllm.cli.progress import Progress


def printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], step_s: float,
    terminal: bool = True,
) -> str:  # fmt: skip
    """What ten parts of a length print."""

    def clock() -> Iterator[float]:
        now = 0.0
        while True:
            yield now
            now += step_s

    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    times = clock()
    progress = Progress(10, "node counts planned", lambda: next(times))
    for _ in range(10):
        progress()
    return capsys.readouterr().err


def test_one_line_for_long_work_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "3 of 10 node counts planned in 1.2 s; about 3 s left\n"
    assert printed(monkeypatch, capsys, 0.4) == line
    assert printed(monkeypatch, capsys, 0.4, terminal=False) == ""
    assert printed(monkeypatch, capsys, 0.1) == ""
