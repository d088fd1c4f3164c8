"""Ctrl-C and `cancel` while `submit --local` starts a script."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slurmllm.errors import EXIT_INTERRUPTED
from slurmllm.run.rundir import RunDir
from slurmllm.submit.launch import LocalJob


@pytest.fixture
def job(tmp_path: Path) -> LocalJob:
    run = RunDir(tmp_path / "r")
    return LocalJob(run, "train", f"sleep 1; touch {tmp_path}/trained\n", 1, quiet=True)


def test_a_signal_before_the_script(job: LocalJob, tmp_path: Path) -> None:
    job.on_interrupt(signal.SIGINT, None)
    assert job.run_to_end() == EXIT_INTERRUPTED
    assert not (tmp_path / "trained").exists()


def test_a_signal_while_the_script_starts(
    job: LocalJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = subprocess.Popen

    def interrupted(*arguments: Any, **more: Any) -> subprocess.Popen[str]:
        job.on_interrupt(signal.SIGINT, None)
        return start(*arguments, **more)

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    assert job.run_to_end() == EXIT_INTERRUPTED
    assert not (tmp_path / "trained").exists()
