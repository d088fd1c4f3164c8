"""States of Slurm's jobs, of runs on other machines and in local sweeps, and on full disks."""

import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from command_line import call, refused
from fake_slurm import FakeSlurm
from made_records import make_run, save_attempt, save_submission
from present import present

from slurmllm.analysis.status.runs import run_state, run_states
from slurmllm.core.errors import RunError
from slurmllm.core.run.records import (
    ExcludedNode,
    ExcludedNodes,
    SweepRecord,
    UnrecordedEnding,
    comment_with,
)
from slurmllm.core.run.rundir import RunDir, SweepDir
from slurmllm.core.slurm.client import QueuedJob
from slurmllm.launch.submit.resume import require_ended
from slurmllm.launch.supervise.attempts import process_identity

LOCAL: dict[str, Any] = {"local": True, "pid": 7, "process": "boot 1", "host": "login2"}


def make(folder: Path, name: str = "r", **sent: Any) -> RunDir:
    run = make_run(folder / name)
    if sent:
        save_submission(run, **sent)
    return run


class OneState(FakeSlurm):
    """Has every job in one state."""

    def __init__(self, state: str, comment: str = "") -> None:
        super().__init__()
        state, _, reason = state.partition(":")
        self.row = (state, reason or "None", "n1", "", "", comment)

    def queue(self, job_ids: Sequence[str]) -> dict[str, QueuedJob]:
        return {job: QueuedJob(job, *self.row) for job in job_ids}


@pytest.mark.parametrize(
    ("slurm", "state", "text"),
    [
        ("SUSPENDED", "training", "scontrol resume 7"),
        ("STOPPED", "training", "scancel --signal=CONT 7"),
        ("SIGNALING", "training", "signal"),
        ("RESIZING", "training", "number of nodes"),
        ("COMPLETING", "training", "last processes"),
        ("STAGE_OUT", "training", "staged out"),
        ("REVOKED", "training", "federation"),
        ("A_STATE_OF_2030", "training", ""),
        ("CONFIGURING", "requeued", "starting"),
        ("POWER_UP_NODE", "requeued", "starting"),
        ("REQUEUE_FED", "requeued", ""),
        ("SPECIAL_EXIT", "requeued", "scontrol release 7"),
        ("LAUNCH_FAILED", "requeued", "scontrol release 7"),
        ("RESV_DEL_HOLD", "requeued", "scontrol release 7"),
        ("NODE_FAIL", "interrupted", "NODE_FAIL"),
    ],
)
def test_a_state_of_a_job(slurm: str, state: str, text: str, tmp_path: Path) -> None:
    run = make(tmp_path, train_job="7")
    save_attempt(run, job_id="7")
    shown = run_state(run, OneState(slurm))
    assert (shown.state, text in shown.reason) == (state, True)


@pytest.mark.parametrize("silent", [False, True])
def test_a_local_run_of_another_machine(silent: bool, tmp_path: Path) -> None:
    run = make(tmp_path, **LOCAL)
    if silent:
        os.utime(run.jobs, (1.0, 1.0))
    shown = run_state(run, FakeSlurm())
    assert shown.state == ("unknown" if silent else "precompiling")
    assert "on login2, process 7" in shown.reason
    with pytest.raises(RunError, match=r"process 7 on login2 .* --force"):
        require_ended(run, FakeSlurm())
    assert require_ended(run, FakeSlurm(), force=True) is not None
    assert "process 7 on login2 may run it" in refused(call("cancel", "r", "--runs-dir", tmp_path))


@pytest.mark.parametrize(
    ("allocation", "ended_at", "state"),
    [
        ("RUNNING", None, "precompiling"),
        ("COMPLETED", None, "interrupted"),
        ("TIMEOUT:TimeLimit", None, "interrupted"),
        ("", 5.0, "interrupted"),
    ],
)
def test_a_process_of_another_machine_that_has_ended(
    allocation: str, ended_at: float | None, state: str, tmp_path: Path
) -> None:
    run = make(tmp_path, **LOCAL, ended_at=ended_at, allocation="9" if allocation else None)
    assert run_state(run, OneState(allocation)).state == state


@contextmanager
def living() -> Iterator[dict[str, Any]]:
    """The fields of a record that name a living process."""
    with subprocess.Popen(["sh", "-c", "read line", "slurmllm"], stdin=subprocess.PIPE) as process:
        yield {"pid": process.pid, "process": process_identity(process.pid)}
        process.kill()


def test_the_same_process_under_another_name_of_the_machine(tmp_path: Path) -> None:
    with living() as fields:
        shown = run_state(make(tmp_path, **{**LOCAL, **fields}), FakeSlurm())
        assert (shown.state, shown.reason) == ("precompiling", f"process {fields['pid']}")


def test_runs_of_a_local_sweep_wait(tmp_path: Path) -> None:
    sweep = SweepDir(tmp_path / "s")
    run = make(sweep.path, "s-a")
    with living() as fields:
        case = {"run": "s-a", "values": {}}
        values = {"recipe": "r", "created_at": 1.0, "cases": [case], "host": socket.gethostname()}
        SweepRecord.model_validate(values | fields).save(sweep.record)
        shown = run_state(run, FakeSlurm())
        assert (shown.state, shown.active) == ("waiting", True)
        with pytest.raises(RunError, match=f"process {fields['pid']} runs it or its sweep"):
            require_ended(run, FakeSlurm())
    assert run_state(run, FakeSlurm()).state == "interrupted"


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root to mount a small file system")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> Path:
    path = disk / "fill"
    with path.open("wb", buffering=0) as stream, suppress(OSError):
        while stream.write(bytes(4096)):
            pass
    return path


def test_status_and_cancel_on_a_full_disk(full_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm()
    job = slurm.submit("#SBATCH --nodes=1\n")
    slurm.start(job)
    run = make(full_disk, train_job=job)
    filling = fill(full_disk)
    shown = run_state(run, slurm)
    assert shown.state == "training"
    assert shown.reason.startswith("storage full, nothing is written: ")
    assert "No space left on device" in shown.reason
    monkeypatch.setattr("slurmllm.core.slurm.client.SlurmClient", lambda: slurm)
    result = call("cancel", "r", "--runs-dir", full_disk)
    assert result.exit_code == 0, result.output
    assert slurm.jobs[job].state == "CANCELLED"
    assert "cancelling without the lock" in result.output
    assert "warning: the cancellation is not recorded" in result.output
    filling.unlink()
    assert "storage full" not in run_state(run, slurm).reason


def test_a_read_only_file_system_is_named(full_disk: Path) -> None:
    slurm = FakeSlurm()
    job = slurm.submit("#!/bin/bash\n")
    slurm.start(job)
    run = make(full_disk, train_job=job)
    subprocess.run(["mount", "-o", "remount,ro", str(full_disk)], check=True)
    reason = run_state(run, slurm).reason
    assert reason.startswith("nothing is written: ")
    assert reason.endswith("Read-only file system")


@pytest.mark.parametrize(
    ("job_state", "action", "state"),
    [
        ("COMPLETED", "finish", "done"),
        ("FAILED", "stop", "stopped"),
        ("UNKNOWN", "finish", "done"),
        ("RUNNING", "finish", "training"),
    ],
)
@pytest.mark.parametrize("of_many", [False, True])
def test_a_run_that_ends_while_slurm_answers(
    job_state: str, action: str, state: str, of_many: bool, tmp_path: Path
) -> None:
    run = make(tmp_path, train_job="7")

    class Ending(OneState):
        def queue(self, job_ids: Sequence[str]) -> dict[str, QueuedJob]:
            ending = "done" if action == "finish" else "code_error"
            save_attempt(run, job_id="7", ended_at=9.0, ending=ending, action=action)
            rows = super().queue(job_ids)
            return {} if job_state == "UNKNOWN" else rows

    slurm = Ending(job_state)
    shown = run_states([run], slurm)[0] if of_many else run_state(run, slurm)
    assert shown.state == state


@pytest.mark.parametrize(("nodes", "shown"), [(("n1", "n2"), "n3 until"), (("n3",), "n3: not ex")])
def test_a_failed_node_that_trains_is_not_excluded(
    nodes: tuple[str, ...], shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(tmp_path, train_job="7")
    save_attempt(run, job_id="7", nodes=nodes, started_at=50.0)
    failed = ExcludedNode(node="n3", reason="SIGKILL", since=40.0, until=4e9)
    ExcludedNodes(nodes=(failed,)).save(run.excluded)
    slurm = OneState("RUNNING")
    monkeypatch.setattr("slurmllm.core.slurm.client.SlurmClient", lambda: slurm)
    assert f"excluded       {shown}" in call("status", "r", "--runs-dir", tmp_path).stdout
    details = present(run_state(run, slurm).details)
    assert (details.excluded, details.not_excluded).index((failed,)) == (nodes == ("n3",))


def test_an_ending_in_a_job_s_comment(tmp_path: Path) -> None:
    fields = {"stage": "train", "attempt": 0, "ended_at": 5.0, "ending": "storage_failure"}
    ending = UnrecordedEnding.model_validate({**fields, "evidence": ["full|disk"]})
    comment = comment_with(ending, comment_with(ending, "mine"))
    assert comment.count("slurmllm") == 1
    assert UnrecordedEnding.of_comment(comment) == ending
    assert comment_with(None, comment) == "mine"
    assert UnrecordedEnding.of_comment("mine") is None
    run = make(tmp_path, train_job="7")
    save_attempt(run, job_id="7")
    shown = run_state(run, OneState("PENDING", comment))
    assert "not recorded yet: storage_failure: full|disk" in shown.reason
    shown = run_state(run, OneState("FAILED", comment))
    assert (shown.state, shown.reason) == ("stopped", "storage_failure: full|disk")
