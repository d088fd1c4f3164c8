"""Ctrl-C and `cancel` of a local run: only the process that was recorded gets the signal."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import call, fails
from fake_slurm import FakeSlurm
from launch.submit.commands import Inputs, submitted_run
from made_records import make_run, save_submission

from slurmllm.core.errors import EXIT_INTERRUPTED
from slurmllm.core.run.records import Submission
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.submit.launch import LocalJob
from slurmllm.launch.supervise.attempts import process_identity
from slurmllm.launch.supervise.run_state import is_process_alive


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that only names the run: `tail -f slurmllm/runs/r/logs/train.log` would."""
    command = [sys.executable, "-c", "import time; time.sleep(60)", "slurmllm/runs/r"]
    with subprocess.Popen(command) as process:
        yield process
        process.kill()


def submitted(folder: Path, pid: int, identity: str | None) -> Submission:
    run = make_run(folder / "r")
    process = {"pid": pid, "process": identity, "host": socket.gethostname()}
    return save_submission(run, local=True, **process)


@pytest.mark.parametrize("identity", [process_identity(os.getpid()), None])
def test_a_process_that_has_got_the_id_is_left_alone(
    tmp_path: Path, other: subprocess.Popen[bytes], identity: str | None
) -> None:
    assert not is_process_alive(submitted(tmp_path, other.pid, identity))
    result = call("cancel", "r", "--runs-dir", str(tmp_path))
    assert (result.exit_code, "nothing to cancel" in result.output) == (0, True)
    assert other.poll() is None


def test_the_recorded_process_is_signalled(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    assert is_process_alive(submitted(tmp_path, other.pid, process_identity(other.pid)))
    assert call("cancel", "r", "--runs-dir", str(tmp_path)).exit_code == 0
    assert other.wait(20) == -signal.SIGTERM


def test_a_zombie_does_not_run() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process_identity(process.pid) is None


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


def test_a_signal_before_the_supervisor_has_a_handler(job: LocalJob) -> None:
    wait = "for _ in {1..80}; do sleep 0.1; done"
    job.script = f"trap '' USR1; sleep 1.5; trap 'exit 75' USR1; {wait}"
    threading.Timer(0.5, job.on_interrupt, (signal.SIGINT, None)).start()
    assert job.run_to_end() == EXIT_INTERRUPTED
    assert job.interrupts == 1


def test_several_runs_are_cancelled(fake: FakeSlurm, inputs: Inputs) -> None:
    runs = [submitted_run(inputs, "--name", name) for name in ("a", "b", "c")]
    assert "no run 'nosuch'" in fails(2, "cancel", "a", "nosuch")
    assert {job.state for job in fake.jobs.values()} == {"PENDING"}
    runs[1].jobs.write_text("{")
    result = call("cancel", "a", "b", "c", "a")
    assert result.exit_code == 4
    assert "jobs.json" in result.stderr
    assert result.stdout.count("cancelled ") == 2
    states = {name: fake.jobs[name].state for name in ("2", "4", "6")}
    assert states == {"2": "CANCELLED", "4": "PENDING", "6": "CANCELLED"}
