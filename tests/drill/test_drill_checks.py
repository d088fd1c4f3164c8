"""The result of a drill, on run directories with one fault each, and its recovery times."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm

from slurmllm.compare.comparison import Tolerances
from slurmllm.config.resolve import resolve
from slurmllm.drill.checks import DrillResult, check_recovery
from slurmllm.drill.drill import LocalRunner, Runner, SlurmRunner
from slurmllm.drill.injector import Injection
from slurmllm.errors import DataError, RunError
from slurmllm.run.artifact_records import CheckpointFile, CheckpointManifest
from slurmllm.run.records import AttemptRecord, WorkerRecord
from slurmllm.run.rundir import RunDir, write_atomic

STEPS, SAVED, BROKEN = 9, 3, 5


def write_rows(run: RunDir, attempt: int, first: int, last: int, began: float) -> None:
    run.metrics(attempt).parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "step": s,
            "attempt": attempt,
            "time": began + s - first,
            "loss": 1 / s,
            "grad_norm": s**2,
            "step_time_s": 2.0 if s == first else 1.0,
        }
        for s in range(first, last + 1)
    ]
    run.metrics(attempt).write_text("".join(json.dumps(row) + "\n" for row in rows))


def record(attempt: int, **fields: object) -> AttemptRecord:
    return AttemptRecord.model_validate(
        {
            "attempt": attempt,
            "stage": "train",
            "job_id": None,
            "nodes": ("local0",),
            "world_size": 1,
            "master_addr": "",
            "master_port": 1,
            **fields,
        }
    )


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
    record(
        0,
        started_at=90.0,
        ended_at=110.0,
        ending="node_failure",
        last_step=BROKEN,
        checkpoint_after=SAVED,
    ).save(run.attempt("train", 0).record)
    record(
        1,
        started_at=111.0,
        ended_at=140.0,
        ending="done",
        phases_s={"preflight": 0.5, "cache": 0.25, "start_up": 99.0},
    ).save(run.attempt("train", 1).record)
    WorkerRecord(
        rank=0, node="local0", start_up_s=8.0, first_step_s=2.0, cache_hits=0, cache_misses=0
    ).save(run.attempt("train", 1).worker(0))
    target = run.checkpoint(STEPS)
    target.mkdir(parents=True)
    (target / "shard").write_bytes(b"weights")
    CheckpointManifest(
        step=STEPS,
        tokens=0,
        world_size=1,
        attempt=1,
        recipe="",
        saved_at=0.0,
        save_s=0.0,
        fingerprint="",
        files=(
            CheckpointFile(path="shard", bytes=7, sha256=hashlib.sha256(b"weights").hexdigest()),
        ),
    ).save(target / "manifest.json")
    return run


def verdict(
    run: RunDir, reference: Path, state: str = "done", missed: str = "", exact: bool = True
) -> DrillResult:
    done = Injection(
        kind="worker", attempt=0, node="local0", step=BROKEN, time=105.0, missed=missed
    )
    tolerances = Tolerances(exact=True) if exact else Tolerances(loss=1e-3, grad_norm=1e-3)
    return check_recovery(run, "worker", done, reference, STEPS, tolerances, state)


def test_a_run_that_recovered_exactly(run: RunDir, reference: Path) -> None:
    found = verdict(run, reference)
    assert found.passed, found.faults
    assert (found.ending, found.attempts, found.at_step) == ("node_failure", 2, BROKEN)
    assert found.steps_lost == found.steps_recomputed == BROKEN - SAVED


def test_the_seconds_add_up(run: RunDir, reference: Path) -> None:
    took = verdict(run, reference).recovery
    assert took is not None
    parts = took.model_dump(exclude={"total_s"})
    assert parts == {
        "detection_s": 5.0,
        "requeue_s": 1.0,
        "preflight_s": 0.5,
        "cache_s": 0.25,
        "launch_s": 3.25,
        "start_up_s": 8.0,
        "first_step_s": 2.0,
    }
    assert sum(parts.values()) == took.total_s == 20.0


def _change(run: RunDir, attempt: int, step: int, factor: float) -> None:
    lines = run.metrics(attempt).read_text().splitlines(keepends=True)
    for index, line in enumerate(lines):
        row = json.loads(line)
        if row["step"] == step:
            lines[index] = json.dumps({**row, "loss": row["loss"] * factor}) + "\n"
    run.metrics(attempt).write_text("".join(lines))


def _drop(run: RunDir, attempt: int, step: int) -> None:
    lines = run.metrics(attempt).read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] != step]
    run.metrics(attempt).write_text("".join(kept))


def _ending(run: RunDir, ending: str) -> None:
    path = run.attempt("train", 0).record
    AttemptRecord.load(path).model_copy(update={"ending": ending}).save(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: _change(run, 1, 7, 1 + 1e-12), "loss diverges at step 7"),
        (lambda run: _change(run, 0, 5, 1 + 1e-12), "2 recomputed steps differ"),
        (lambda run: _drop(run, 1, 6), "steps 6 are missing"),
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
    found = verdict(run, reference)
    assert not found.passed
    assert message in "; ".join(found.faults)


def test_a_run_that_was_not_hit_or_did_not_end(run: RunDir, reference: Path) -> None:
    assert verdict(run, reference, missed="too late").faults == (
        "the fault was not injected: too late",
    )
    assert "did not finish: stopped" in verdict(run, reference, "stopped").faults[0]


def test_a_tolerance_lets_small_differences_pass(run: RunDir, reference: Path) -> None:
    _change(run, 1, 7, 1 + 1e-6)
    _change(run, 0, 5, 1 + 1e-6)
    assert verdict(run, reference, exact=False).passed
    _change(run, 1, 7, 1.1)
    assert not verdict(run, reference, exact=False).passed


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
        (("r", "--nodes", "0"), "--nodes 0"),
        (("r", "--steps", "2"), "--steps 2"),
        (("r", "--tolerance", "-1"), "--tolerance -1"),
        (("r", "--nodes", "3"), "the mesh does not fit"),
    ],
)
def test_invalid_input(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    write_atomic(RunDir(tmp_path / "r").config, resolve("tiny_neox", "local").to_yaml())
    done = subprocess.run(
        [sys.executable, "-m", "slurmllm", "drill", *arguments, f"--runs-dir={tmp_path}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert message in done.stderr
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["r"]
