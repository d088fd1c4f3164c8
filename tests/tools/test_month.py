"""tools/benchmarks/month.py: the table and the check run."""

import sys

import month
import pytest


def test_a_short_month(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--days", "2", "--seeds", "2", "--rates", "llama3"]
    monkeypatch.setattr(sys, "argv", ["month.py", *arguments])
    month.main()
    output = capsys.readouterr().out
    best, *others = (row.split() for row in output.splitlines() if row.startswith("llama3 "))
    assert best[1:4] == ["auto", "auto", "async"]
    of_wall = {row[1]: float(row[7].rstrip("%")) for row in others}
    assert float(best[7].rstrip("%")) > of_wall["by_hand"]
    assert "98.81%" in output
