"""Progress on a terminal, and none where nobody looks."""

from __future__ import annotations

import io
import sys

import pytest

from slurmllm.display.progress import count_progress


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
