"""`cancel` of a local run: only the process that was recorded gets the signal."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_records import save_submission
from submit.commands import call

from slurmllm.config.resolve import resolve
from slurmllm.run.records import Submission
from slurmllm.run.rundir import RunDir
from slurmllm.status.run_state import is_process_alive
from slurmllm.supervise.attempts import process_identity


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that only names the run: `tail -f slurmllm/runs/r/logs/train.log` would."""
    command = [sys.executable, "-c", "import time; time.sleep(60)", "slurmllm/runs/r"]
    with subprocess.Popen(command) as process:
        yield process
        process.kill()


def submitted(folder: Path, pid: int, identity: str | None) -> Submission:
    run = RunDir(folder / "r")
    run.path.mkdir()
    run.config.write_text(resolve("tiny_neox").to_yaml())
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


def test_the_recorded_process_gets_the_signal(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    assert is_process_alive(submitted(tmp_path, other.pid, process_identity(other.pid)))
    assert call("cancel", "r", "--runs-dir", str(tmp_path)).exit_code == 0
    assert other.wait(20) == -signal.SIGTERM


def test_a_zombie_does_not_run() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process_identity(process.pid) is None
