"""Plans and checks of tools/chaos, without a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(autouse=True)
def _tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))


def test_a_seed_is_a_plan_and_seeds_cover_every_failure_at_every_moment() -> None:
    from _chaos.plan import KINDS, LATER_MOMENTS, make_plan

    plans = [make_plan(seed, 60) for seed in range(200)]
    assert plans == [make_plan(seed, 60) for seed in range(200)]
    failures = [failure for plan in plans for failure in plan]
    assert set(Counter(map(len, plans))) == {1, 2, 3}
    assert {f.kind for f in failures} == set(KINDS)
    assert {f.moment for f in failures} == set(LATER_MOMENTS)
    assert len({(f.kind, f.moment) for f in failures}) > 40  # of 55
    assert all(plan[0].moment in ("starting", "stepping", "saving") for plan in plans)
    assert all(0 < f.step < 60 and 0 <= f.victim < 1 for f in failures)


def test_what_a_seed_means_can_be_asked() -> None:
    command = [sys.executable, str(TOOLS / "chaos"), "--plans", "--runs=2", "--seed=7"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split()[:2] for line in shown.splitlines()] == [["seed", "7"], ["seed", "8"]]
    assert "@" in shown


def row(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "loss": loss, "grad_norm": 1, "param_norm": 1, "lr": 1, "tokens": step}


def test_figures_that_do_not_repeat_themselves_are_found(tmp_path: Path) -> None:
    from _chaos.checks import figures

    from slurmllm.core.run.rundir import RunDir

    run = RunDir(tmp_path)
    for attempt, rows in enumerate(([row(1, 4.0), row(2, 3.0)], [row(2, 3.5), row(3, 2.0)])):
        run.metrics(attempt).parent.mkdir(exist_ok=True)
        run.metrics(attempt).write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"step":')
    numbers, odd = figures(run)
    assert [numbers[step][0] for step in (1, 2, 3)] == [4.0, 3.5, 2.0]
    assert odd == ["step 2 of attempt_001.jsonl differs from an earlier attempt's"]


def test_partial_files_and_processes_left_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from _chaos import checks

    from slurmllm.core.run.rundir import RunDir

    run = RunDir(tmp_path / "a-run-of-this-test")
    checkpoint = run.checkpoint(10)
    checkpoint.mkdir(parents=True)
    (run.path / "checkpoints" / ".step_00000020.tmp").mkdir()
    run.attempt("train", 0).path.mkdir(parents=True)
    run.attempt("train", 0).record.write_text('{"attempt": 0, "ended_at"')
    message = checks._partial_files(run)
    assert ".step_00000020.tmp" in message
    assert "attempt.json is no JSON" in message
    assert "step_00000010" in message
    monkeypatch.setattr(checks, "GONE_S", 0.0)
    assert checks._processes(run) == ""
    with subprocess.Popen(
        [sys.executable, "-c", "input()", str(run.path)], stdin=subprocess.PIPE
    ) as left:
        while f"{left.pid}: " not in checks._processes(run):
            os.sched_yield()


def test_a_failure_that_cannot_happen_ends_no_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    from _chaos import injections
    from _chaos.plan import KINDS, make_plan
    from _devcluster.errors import Fault

    assert set(injections.INJECTIONS) == set(KINDS)
    failure = make_plan(1, 60)[0]
    nothing: Any = None
    for code, expected in ((1, injections.Impossible), (2, injections.Unsupported)):

        def refuse(target: object, code: int = code) -> Any:
            raise Fault("frozen already", code)

        monkeypatch.setattr(injections, "INJECTIONS", {failure.kind: refuse})
        with pytest.raises(expected, match="frozen already") as raised:
            injections.inject(nothing, nothing, "1", failure)
        assert type(raised.value) is expected
