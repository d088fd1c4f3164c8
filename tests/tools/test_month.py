"""tools/benchmarks/month.py: the table and the check run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import month
import pytest


def test_a_short_month(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    arguments = ["--days", "2", "--seeds", "2", "--rates", "llama3", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["month.py", *arguments])
    month.main()
    rows = json.loads(out.read_text())
    best, *others = (row for row in rows if "effective" in row)
    assert best["recovery"] == best["interval"] == "auto"
    assert sum(best["parts"].values()) == pytest.approx(1)
    assert best["of_wall"] > max(row["of_wall"] for row in others if row["recovery"] == "by_hand")
    assert "98.81%" in capsys.readouterr().out
