"""Hooks of the training loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmllm.run.records import MetricsRow
from slurmllm.run.rundir import RunDir
from slurmllm.train.hooks import StepEnd
from slurmllm.train.hooks.monitoring import MetricsHook, ProgressHook

from .gang import small_config


def moment(step: int, *, last: bool = False, saving: bool = False) -> StepEnd:
    row = MetricsRow(
        step=step,
        attempt=0,
        loss=5.0,
        grad_norm=1.5,
        param_norm=9.0,
        lr=1e-3,
        tokens=step * 256,
        seq_per_s=16.0,
        tokens_per_s=512.0,
        step_time_s=0.5,
        forward_backward_s=0.4,
        optimizer_s=0.1,
        time=1e9 + step,
    )
    return StepEnd(row, last=last, saving=saving, leaving=last)


@pytest.fixture
def job_at(tmp_path: Path) -> Callable[[int], Any]:
    """A job at a step, as far as hooks need it."""
    config = small_config("train.steps=40", "train.log_every=10")
    return lambda step: SimpleNamespace(
        run=RunDir(tmp_path), attempt=0, step=step, last_step=40, config=config
    )


def test_metrics_rows_are_there_at_once(job_at: Callable[[int], Any]) -> None:
    job = job_at(0)
    hook = MetricsHook(job)
    for step in (1, 2):
        hook.after_step(moment(step, saving=step == 2))
        lines = job.run.metrics(0).read_text().splitlines()
        assert MetricsRow.model_validate_json(lines[-1]) == moment(step).row
    hook.close()
    assert len(lines) == 2


def test_progress_lines(job_at: Callable[[int], Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "slurmllm")
    hook = ProgressHook(job_at(14))
    for step in range(15, 38):  # a last step that no multiple shows
        hook.after_step(moment(step, last=step == 37))
    lines = caplog.messages
    assert [line.split()[1] for line in lines] == [
        f"{step}/40" for step in (15, 16, 17, 20, 30, 37)
    ]
    assert lines[0].endswith("eta ?"), "the first step compiles"
    assert lines[1] == (
        "step 16/40  loss 5.0000  grad norm 1.500  lr 1.00e-03  16.0 seq/s  512 tokens/s  "
        "eta 0:00:12"
    )
