"""One command at a time changes a run: simultaneous commands, and locks that were left behind."""

from __future__ import annotations

import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurmllm.core.errors import RunError
from slurmllm.core.run.records import JobsRecord, LockRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.supervise import run_lock
from slurmllm.launch.supervise.attempts import process_identity
from slurmllm.launch.supervise.run_lock import locked

SLURMLLM = (sys.executable, "-m", "slurmllm")
# A Slurm that only counts: a job is pending until `ended` has its number.
COMMANDS = {
    "sbatch": "exec 9>>$JOB_BOX/jobs; flock 9; echo job >&9; sleep 0.2; wc -l <$JOB_BOX/jobs",
    "squeue": "seq $(wc -l <$JOB_BOX/jobs) | grep -vxf $JOB_BOX/ended "
    "| sed 's/$/|PENDING|Priority||||/'",
    "sacct": "exit 1",
    "sinfo": "echo 'main*|up|n1|idle|4|1000|(null)|(null)|none'",
}
HOLD = """
import sys, time
from pathlib import Path
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.supervise.run_lock import locked
from slurmllm.launch.supervise.attempts import process_identity
with locked(RunDir(Path(sys.argv[1])), "cancel"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The counting Slurm, on the PATH."""
    box = tmp_path / "box"
    box.mkdir()
    (box / "jobs").touch()
    (box / "ended").write_text("none\n")
    for name, script in COMMANDS.items():
        (box / name).write_text(f"#!/bin/bash\n{script}\n")
        (box / name).chmod(0o755)
    monkeypatch.setenv("JOB_BOX", str(box))
    monkeypatch.setenv("PATH", f"{box}:{os.environ['PATH']}")
    return box


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "r")
    run.path.mkdir(parents=True)
    return run


def at_once(count: int, *arguments: str) -> list[tuple[int, str]]:
    """Exit code and output of as many simultaneous commands."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = [*SLURMLLM, *arguments]
    started = [subprocess.Popen(command, **pipes, text=True) for _ in range(count)]
    outputs = [process.communicate(timeout=300)[0] for process in started]
    return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


def test_two_submits_or_resumes_at_once_make_one_submission(box: Path, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "r")
    options = ("--name=r", f"--runs-dir={run.path.parent}", "--set=backend=rehearsal")
    done = at_once(2, "submit", "tiny_neox", *options)
    assert sorted(code for code, _ in done) == [0, 2], done
    assert len(JobsRecord.load(run.jobs).submissions) == 1
    submitted = len((box / "jobs").read_text().splitlines())
    (box / "ended").write_text("\n".join(map(str, range(1, submitted + 1))) + "\n")
    done = at_once(2, "resume", "r", f"--runs-dir={run.path.parent}")
    assert sorted(code for code, _ in done) == [0, 2], done
    for code, output in done:
        assert code == 0 or "pending or running" in output or "being changed" in output
    submissions = JobsRecord.load(run.jobs).submissions
    assert len(submissions) == 2
    # The jobs of the second submission, all recorded.
    ids = [job for job in (submissions[1].precompile_job, submissions[1].train_job) if job]
    jobs = len((box / "jobs").read_text().splitlines())
    assert [int(job) for job in ids] == list(range(submitted + 1, jobs + 1))
    assert not run.lock.exists()


def test_the_second_command_is_refused_with_the_first(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "WAIT_S", 0.2)
    with locked(run, "resume"):
        with pytest.raises(RunError) as refusal, locked(run, "cancel"):
            pass
        text = str(refusal.value)
    assert f"`slurmllm resume` of {pwd.getpwuid(os.geteuid()).pw_name}" in text
    assert f"process {os.getpid()} on {socket.gethostname()}" in text
    assert " s; repeat `slurmllm cancel r`" in text
    assert not run.lock.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_command_that_is_ended_blocks_nobody(run: RunDir, number: signal.Signals) -> None:
    command = [sys.executable, "-c", HOLD, str(run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        holder.send_signal(number)
        holder.wait()
    assert run.lock.exists() == (number == signal.SIGKILL)
    began = time.monotonic()
    with locked(run, "resume"):
        assert LockRecord.model_validate_json(run.lock.read_bytes()).verb == "resume"
    assert time.monotonic() - began < 8


def lock_of(run: RunDir, age_s: float, **fields: object) -> None:
    values = {"verb": "resume", "host": "elsewhere", "pid": 1, "process": "x", "since": time.time()}
    run.lock.write_text(json.dumps(values | fields))
    os.utime(run.lock, (time.time() - age_s,) * 2)


def test_a_lock_of_another_machine_ends_when_it_is_not_renewed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "WAIT_S", 0.5)
    monkeypatch.setattr(run_lock, "RENEW_S", 0.1)
    lock_of(run, age_s=run_lock.EXPIRES_S - 20)
    with pytest.raises(RunError, match=r"on elsewhere.* expires 120 s after"), locked(run, "x"):
        pass
    lock_of(run, age_s=run_lock.EXPIRES_S + 20)
    with locked(run, "resume"):
        assert b"elsewhere" not in run.lock.read_bytes()


def test_a_process_id_that_is_used_again_holds_nothing(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = socket.gethostname()
    lock_of(run, 0, host=host, pid=os.getpid(), process=process_identity(1))
    with locked(run, "resume"):
        pass
    assert not run.lock.exists()
    # It is renewed while it is held.
    monkeypatch.setattr(run_lock, "RENEW_S", 0.05)
    with locked(run, "resume"):
        os.utime(run.lock, (0, 0))
        time.sleep(0.5)
        assert time.time() - run.lock.stat().st_mtime < 60


def test_a_planted_lock_is_neither_followed_nor_waited_for(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "WAIT_S", 0.2)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for plant in (
        lambda: run.lock.symlink_to(victim),
        lambda: run.lock.symlink_to(tmp_path / "new"),
        lambda: os.mkfifo(run.lock),
        lambda: run.lock.write_text("{"),
        lambda: lock_of(run, 0, verb="\x1b[31m"),
    ):
        plant()
        with pytest.raises(RunError, match=rf"holds no record.*`rm {run.lock}`"), locked(run, "x"):
            pass
        run.lock.unlink()
    assert victim.read_text() == "precious"
    assert not (tmp_path / "new").exists()
