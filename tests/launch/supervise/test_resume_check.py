"""The loss after a resume: what sends a run back one checkpoint, and what must not."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from made_records import make_attempt, make_run, save_attempt, save_manifest, save_submission

from slurmllm.core.config.load import load
from slurmllm.core.run.records import RejectedCheckpoint, SkipsRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.supervise.attempts import close_attempt
from slurmllm.launch.supervise.classify import Ending
from slurmllm.launch.supervise.resume_check import (
    ResumeCheck,
    judge_resume,
    loss_fault,
    resume_check_of,
)
from slurmllm.train.checkpoint.catalogue import invalidation_reason


def curve(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Return losses with correlated, heavy-tailed noise, and spikes that last up to 30 rows."""
    steps = np.arange(rows)
    losses = rng.uniform(1.5, 4) + rng.uniform(1, 8) * np.exp(-steps / rng.uniform(30, 400))
    shocks = rng.standard_t(3, rows) * rng.uniform(0.005, 0.15)
    noise, correlation = np.zeros(rows), rng.uniform(0, 0.9)
    for row in range(1, rows):
        noise[row] = correlation * noise[row - 1] + shocks[row]
    for begin in rng.integers(0, rows, rng.poisson(rows / 150)):
        length = rng.integers(1, 30)
        height = rng.uniform(0.1, 3) * np.exp(-np.arange(length) / (length / 3))
        noise[begin : begin + length] += height[: rows - begin]
    return np.asarray(losses + noise)


def test_noise_and_spikes_are_no_fault() -> None:
    rng, resumes, alarms = np.random.default_rng(46), 0, 0
    for _ in range(60):
        losses = curve(rng, 900).tolist()
        for end in rng.integers(70, 880, 25):
            resumes += 1
            before = [*losses[:5], *losses[max(end - 500, 5) : end]]
            alarms += bool(loss_fault(before, losses[end : end + 10]))
    print(f"{alarms} false alarms in {resumes} resumes")
    assert alarms / resumes <= 0.002


@pytest.mark.parametrize("share", [0.6, 0.8, 1.0])
def test_a_loss_on_its_way_back_to_the_start_is_a_fault(share: float) -> None:
    rng, missed = np.random.default_rng(7), 0
    for _ in range(40):
        losses = curve(rng, 900).tolist()
        first, level = float(np.median(losses[:5])), float(np.median(losses[-40:]))
        after = [loss + share * (first - level) for loss in losses[-10:]]
        missed += not loss_fault(losses[:-10], after)
    print(f"{missed} of 40 missed at {share}")
    assert missed <= (40 if share < 1 else 12)


NAN, FLAT = math.nan, [2.0 + 0.01 * (n % 3) for n in range(100)]


@pytest.mark.parametrize(
    ("after", "fault"),
    [
        ([2.0, NAN, NAN], "the loss is not finite"),
        ([2.0, NAN, 2.0, NAN, 2.0, 2.0], ""),  # a trainer that prints one without a loss
        ([2.0] * 10 + [NAN, NAN], ""),  # later: by the training
        ([9.0] * 4, ""),  # may be a spike
        ([9.0] * 4 + [2.0] * 3, ""),
        (
            [9.0] * 5,
            "the loss is at least 9 in 5 rows; before the resume it was 2.01 (limit 2.512)",
        ),
        ([2.3] * 9, ""),  # other data
    ],
)
def test_rows_after_a_resume(after: Sequence[float], fault: str) -> None:
    assert loss_fault(FLAT, after) == fault


def write_rows(run: RunDir, attempt: int, first: int, losses: Sequence[float]) -> None:
    run.metrics(attempt).parent.mkdir(exist_ok=True)
    rows = [
        {"step": step, "loss": None if math.isnan(loss) else loss}
        for step, loss in enumerate(losses, first)
    ]
    run.metrics(attempt).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_goes_back_once_and_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    save_submission(run)
    write_rows(run, 0, 1, FLAT)
    save_attempt(run, 0, ended_at=1.0, ending="node_failure")
    record = make_attempt(1, checkpoint_before=90, started_at=time.time() - 9)
    record.save(run.attempt("train", 1).record)
    write_rows(run, 1, 91, [2.0, NAN, NAN])
    killed = Ending("node_failure", ("rank 0 was ended by SIGKILL",), ("n1",))
    assert resume_check_of(run, load(run.config), record) is None  # without an older checkpoint
    save_manifest(run, 80)
    check = resume_check_of(run, load(run.config), record)
    assert check is not None
    assert check.look()
    ending = judge_resume(run, record, killed, check)
    assert ending.blamed_nodes == ()
    closed = close_attempt(run, record, ending)
    assert (closed.ending, closed.action) == ("divergence", "requeue")
    assert closed.evidence[0].startswith("after the resume from step 90: the loss is not finite")
    invalidations = SkipsRecord.of(run).invalidations
    assert invalidation_reason(90, 0, invalidations) is not None
    assert invalidation_reason(80, 0, invalidations) is None
    assert invalidation_reason(90, 2, invalidations) is None  # saved again
    # The next one has the same loss: it is the training's, and judged no more.
    save_manifest(run, 70)
    assert resume_check_of(run, load(run.config), make_attempt(2, checkpoint_before=80)) is None


def test_rows_without_a_loss_leave_the_others_at_their_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.metrics(0).parent.mkdir(exist_ok=True)
    rows = [
        {"step": n, "val_loss": 9.0} if n % 2 else {"step": n, "loss": float(n)} for n in range(200)
    ]
    run.metrics(0).write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_rows(run, 1, 101, [2.0] * 10)
    check = ResumeCheck(run, make_attempt(1, checkpoint_before=100))
    assert check._before == [float(n) for n in range(0, 101, 2)]


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        ("RuntimeError: Unexpected result nan at iteration #93", "divergence"),
        ("AttributeError: `np.NaN` was removed in NumPy 2.0. Use `np.nan`", "code_error"),
        ("ImportError: cannot import name 'NaN' from 'numpy'", "code_error"),
    ],
)
def test_a_trainer_that_stops_by_itself(error: str, ending: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_rows(run, 0, 1, FLAT)
    record = make_attempt(1, checkpoint_before=90)
    crash = Ending("code_error", (f"rank 0: {error}",))
    assert judge_resume(run, record, crash, ResumeCheck(run, record)).ending == ending
    rejected = [type(entry) for entry in SkipsRecord.of(run).rejected]
    assert rejected == ([RejectedCheckpoint] if ending == "divergence" else [])
    write_rows(run, 1, 1, [9.0] * 10)  # it did not resume: no fault of the checkpoint
    assert judge_resume(run, record, crash, ResumeCheck(run, record)) == crash
