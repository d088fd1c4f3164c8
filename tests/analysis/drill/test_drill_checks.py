"""The result of a drill, on run directories with one fault each, and its recovery times."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import training_rows
from command_line import call, refused
from fake_slurm import FakeSlurm
from made_records import save_attempt, save_manifest
from present import present

from slurmllm.analysis.compare.result import Tolerances
from slurmllm.analysis.drill.checks import DrillReport, DrillResult, check_recovery
from slurmllm.analysis.drill.drill import LocalRunner, Runner, SlurmRunner
from slurmllm.analysis.drill.injector import Injection
from slurmllm.core.config.resolve import resolve
from slurmllm.core.errors import DataError, RunError
from slurmllm.core.run.records import AttemptRecord, WorkerRecord
from slurmllm.core.run.rundir import RunDir, write_atomic
from slurmllm.train.checkpoint.folder import describe

STEPS, SAVED, BROKEN = 9, 3, 5


def write_rows(run: RunDir, attempt: int, first: int, last: int, began: float) -> None:
    rows = []
    for step in range(first, last + 1):
        row = {"step": step, "attempt": attempt, "time": began + step - first}
        row |= {"loss": 1 / step, "grad_norm": step**2}
        rows.append(row | {"step_time_s": 2.0 if step == first else 1.0})
    training_rows.write_rows(run.metrics(attempt), rows)


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    run = RunDir(tmp_path / "reference")
    write_rows(run, 0, 1, STEPS, 0.0)
    return run.path


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Fault after step 5, resumed from step 3: closed after 5 s, the next attempt 1 s later."""
    run = RunDir(tmp_path / "broken")
    write_rows(run, 0, 1, BROKEN, 100.0)
    write_rows(run, 1, SAVED + 1, STEPS, 125.0)
    times: dict[str, Any] = {"started_at": 90.0, "ended_at": 110.0}
    steps = {"last_step": BROKEN, "checkpoint_after": SAVED}
    save_attempt(run, nodes=("local0",), ending="node_failure", **times, **steps)
    times = {"started_at": 111.0, "ended_at": 140.0}
    phases_s = {"preflight": 0.5, "cache": 0.25, "start_up": 99.0}
    save_attempt(run, 1, nodes=("local0",), ending="done", phases_s=phases_s, **times)
    seconds = {"start_up_s": 8.0, "first_step_s": 2.0}
    worker = WorkerRecord(rank=0, node="local0", cache_hits=0, cache_misses=0, **seconds)
    worker.save(run.attempt("train", 1).worker(0))
    target = run.checkpoint(STEPS)
    target.mkdir(parents=True)
    (target / "shard").write_bytes(b"weights")
    save_manifest(run, STEPS, files=(describe(target, "shard"),))
    return run


def verdict(
    run: RunDir, reference: Path, state: str = "done", missed: str = "", exact: bool = True
) -> DrillResult:
    hit = {"kind": "worker", "attempt": 0, "node": "local0", "step": BROKEN, "time": 105.0}
    done = Injection.model_validate({**hit, "missed": missed})
    tolerances = Tolerances(exact=True) if exact else Tolerances(loss=1e-3, grad_norm=1e-3)
    return check_recovery(run, "worker", done, reference, STEPS, tolerances, state)


def test_a_run_that_recovered_exactly(run: RunDir, reference: Path) -> None:
    result = verdict(run, reference)
    assert result.passed, result.faults
    assert (result.ending, result.attempts, result.at_step) == ("node_failure", 2, BROKEN)
    assert result.steps_lost == result.steps_recomputed == BROKEN - SAVED
    parts = present(result.recovery).model_dump()
    assert sum(parts.values()) == 2 * parts.pop("total_s") == 40.0
    assert list(parts.values()) == [1.0, 5.0, 0.5, 0.25, 3.25, 8.0, 2.0]


def _change(run: RunDir, attempt: int, step: int, factor: float | None) -> None:
    """Multiply the loss of a step, or leave it out."""
    lines = run.metrics(attempt).read_text().splitlines()
    rows = {row["step"]: row for row in map(json.loads, lines)}
    row = rows.pop(step)
    if factor is not None:
        rows[step] = row | {"loss": row["loss"] * factor}
    training_rows.write_rows(run.metrics(attempt), (rows[step] for step in sorted(rows)))


def _ending(run: RunDir, ending: str) -> None:
    path = run.attempt("train", 0).record
    AttemptRecord.load(path).model_copy(update={"ending": ending}).save(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: _change(run, 1, 7, 1 + 1e-12), "loss diverges at step 7"),
        (lambda run: _change(run, 0, 5, 1 + 1e-12), "2 recomputed steps differ"),
        (lambda run: _change(run, 1, 6, None), "steps 6 are missing"),
        (lambda run: write_rows(run, 1, SAVED + 1, STEPS + 1, 0.0), "up to 10"),
        (lambda run: _ending(run, "code_error"), "classified as code_error, not node_failure"),
        (lambda run: (run.checkpoints / ".step_00000006.tmp").mkdir(), "an incomplete checkpoint"),
        (lambda run: run.checkpoint(STEPS).rename(run.checkpoint(6)), "newest checkpoint is of"),
        (lambda run: (run.checkpoint(STEPS) / "shard").write_bytes(b"Weights"), "shard"),
    ],
)
def test_each_fault_is_found(
    run: RunDir, reference: Path, damage: Callable[[RunDir], object], message: str
) -> None:
    damage(run)
    result = verdict(run, reference)
    assert not result.passed
    assert message in "; ".join(result.faults)


def test_a_run_that_was_not_hit_or_differs_slightly(run: RunDir, reference: Path) -> None:
    missed = verdict(run, reference, missed="too late")
    assert (missed.tested, missed.passed) == (False, False)
    assert missed.faults == ("no fault was injected; use more --steps (too late)",)
    assert "did not finish: stopped" in verdict(run, reference, "stopped").faults[0]
    # A tolerance lets small differences pass.
    _change(run, 1, 7, 1 + 1e-6)
    _change(run, 0, 5, 1 + 1e-6)
    assert verdict(run, reference, exact=False).passed
    _change(run, 1, 7, 1.1)
    assert not verdict(run, reference, exact=False).passed


def test_a_fault_after_the_last_step_tests_nothing(run: RunDir, reference: Path) -> None:
    write_rows(run, 0, 1, STEPS, 100.0)
    run.metrics(1).unlink()
    late = verdict(run, reference)
    assert not late.tested
    assert late.faults == ("the fault came after the last step; use more --steps",)


@pytest.mark.parametrize(
    ("outcomes", "code", "line"),
    [
        ([(True, True)], 0, "recovers from 1 of 1: curves match"),
        ([(True, True), (False, False)], 5, "not tested: save"),
        ([(False, False)], 5, "not tested: worker"),
        ([(True, False), (False, False)], 1, "failed: see `slurmllm status r-worker`"),
    ],
)
def test_a_drill_without_a_fault_has_its_own_exit_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outcomes: list[tuple[bool, bool]],
    code: int,
    line: str,
) -> None:
    results = [
        DrillResult(kind=kind, run=f"r-{kind}", passed=passed, faults=(), tested=tested)
        for kind, (tested, passed) in zip(("worker", "save"), outcomes, strict=False)
    ]
    settings = {"nodes": 1, "local": True, "steps": 9, "every_steps": 3, "seed": 0, "kept": ()}
    names = {"run": "r", "reference": "r", "own_reference": True}
    report = DrillReport.model_validate({**settings, **names, "drills": results})
    monkeypatch.setattr("slurmllm.cli.drill._run", lambda *_: report)
    write_atomic(RunDir(tmp_path / "r").config, resolve("tiny_neox", "local").to_yaml())
    result = call("drill", "r", "--nodes=1", f"--runs-dir={tmp_path}")
    assert (result.exit_code, line in result.output) == (code, True), result.output


@pytest.mark.parametrize("runner", [SlurmRunner(FakeSlurm()), LocalRunner()])
def test_a_refused_start_raises_the_error_of_resume(tmp_path: Path, runner: Runner) -> None:
    run = RunDir(tmp_path / "r")
    overrides = ["data.corpus=/gone.arrow", "data.tokenizer=/gone.json"]
    write_atomic(run.config, resolve("tiny_neox", "local", overrides).to_yaml())

    def run_to_end() -> None:
        runner.start(run, 2)
        while runner.active(run):
            time.sleep(0.05)

    # Of another process only the exit code is known, which both have in common.
    with pytest.raises((DataError, RunError), match=r"^cannot read [^:]*/gone\."):
        run_to_end()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nobody",), "no run 'nobody'"),
        (("r", "--kinds", "meteor"), "--kinds 'meteor'"),
        (("r", "--kinds", "node"), "takes 2 nodes and the run has 1"),
        (("r", "--nodes", "0"), "'--nodes': 0 is not in the range"),
        (("r", "--steps", "2"), "--steps 2"),
        (("r", "--tolerance", "-1"), "--tolerance -1"),
        (("r", "--nodes", "3"), "the mesh does not fit"),
    ],
)
def test_invalid_input(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    write_atomic(RunDir(tmp_path / "r").config, resolve("tiny_neox", "local").to_yaml())
    assert message in refused(call("drill", *arguments, f"--runs-dir={tmp_path}"))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["r"]
