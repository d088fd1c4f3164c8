"""`slurmllm drill` on this machine: two launchers, broken and compared, and a drill that fails."""

from __future__ import annotations

import json
import signal

import pytest
from end_to_end.bench import Bench, processes_with


def copies(bench: Bench, run: str) -> list[str]:
    return sorted(entry.name for entry in bench.runs.glob(f"{run}-drill-*"))


def test_broken_copies_go_on_exactly(bench: Bench, rehearsed: str) -> None:
    text = bench.call("drill", rehearsed, "--kinds=time_limit,save", "--json", "--seed=3")
    report = json.loads(text[text.index("{") :])
    assert report["passed"]
    assert report["own_reference"]
    by_kind = {drill["kind"]: drill for drill in report["drills"]}
    endings = {kind: drill["ending"] for kind, drill in by_kind.items()}
    assert endings == {"time_limit": "advance_signal", "save": "node_failure"}
    assert by_kind["time_limit"]["steps_lost"] == 0
    assert by_kind["save"]["at_step"] == 2 * report["every_steps"]
    # None if the kill comes after the rename, which ends a save.
    assert by_kind["save"]["steps_recomputed"] in (0, report["every_steps"])
    for drill in report["drills"]:
        took = dict(drill["recovery"])
        assert took.pop("total_s") == pytest.approx(sum(took.values()), abs=0.1)
        assert took["start_up_s"] > 0 < took["first_step_s"]
    assert report["kept"] == copies(bench, rehearsed) == []


def test_a_run_that_would_not_survive_is_named_and_kept(bench: Bench, rehearsed: str) -> None:
    slow = "--set=env.SLURMLLM_REHEARSAL_STEP_S=1"  # the fault must come before the end
    arguments = ("--kinds=worker", "--steps=9", "--set=slurm.failure_budget=0", slow)
    text = bench.call("drill", rehearsed, *arguments, code=1)
    assert "because --set changes values" in text
    assert "worker: did not finish: stopped" in text, text
    assert "kept: rehearsed-drill-2-reference, rehearsed-drill-2-worker" in text
    assert copies(bench, rehearsed) == ["rehearsed-drill-2-reference", "rehearsed-drill-2-worker"]


def test_ctrl_c_leaves_nothing_running(bench: Bench, rehearsed: str) -> None:
    process = bench.start("drill", rehearsed, "--kinds=worker")
    name = "rehearsed-drill-3-worker"
    bench.until(lambda: bool(processes_with(str(bench.runs / name))), "no start")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 130, output
    assert f"not removed: {name}" in output
    bench.until(lambda: not processes_with(str(bench.runs / name)), "left running", 20)
