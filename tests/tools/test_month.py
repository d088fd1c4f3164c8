"""tools/benchmarks/month.py: the table and the check run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import month
import pytest
from _month.failures import Scripted, ScriptedFailures
from _month.scenario import DAY_S, Scenario
from _month.simulation import simulate

from slurmllm.config.resolve import resolve
from slurmllm.plan.lost_time import Durations, SaveCost
from slurmllm.run.rundir import RunDir


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


def test_a_run_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = resolve("tiny_llama", overrides=["checkpoint.every_steps=20"])
    history = simulate(
        Scenario(
            config.recipe, 4, 0.5, DAY_S, Durations((6.0,), (1.0,), (0.0,), (5.0,), (2.0,)),
            SaveCost(0.0, 0.0), ScriptedFailures([Scripted("network", 29.7, training=True)]),
            steps=100,
        ),
        seed=0,
    )  # fmt: skip
    run = RunDir(tmp_path / "r")
    run.path.mkdir()
    run.config.write_text(config.to_yaml())
    for attempt in history.attempts:
        attempt.save(run.attempt("train", attempt.attempt).record)
        made = history.steps[attempt.attempt]
        run.metrics(attempt.attempt).parent.mkdir(exist_ok=True)
        lines = zip(made.numbers, made.seconds, made.ends, strict=True)
        run.metrics(attempt.attempt).write_text(
            "".join(f'{{"step": {n}, "step_time_s": {s}, "time": {end}}}\n' for n, s, end in lines)
        )
    monkeypatch.setattr(sys, "argv", ["month.py", "--check", str(run.path), "--seeds", "2"])
    month.main()
    lines = {row.split()[0]: row.split() for row in capsys.readouterr().out.splitlines()[2:]}
    assert lines["steps_lost"][1:] == ["19.00000", "19.00000", "+0.0%"]
    assert abs(float(lines["effective"][3].rstrip("%"))) < 1
