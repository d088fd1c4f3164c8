"""One command at a time changes a run: simultaneous commands, and locks that were left behind."""

import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import gethostname

import pytest
from fake_slurm import FakeSlurm
from launch.supervise.starts import attempt_record, start_of
from made_records import make_run, save_submission

from slurmllm.core.errors import EXIT_NEGATIVE, RunError
from slurmllm.core.run.records import (
    AttemptRecord,
    Heartbeat,
    JobsRecord,
    LockRecord,
    UnrecordedEnding,
    comment_with,
)
from slurmllm.core.run.rundir import STAGES, RunDir, Stage
from slurmllm.launch.supervise import run_lock
from slurmllm.launch.supervise.attempts import process_identity
from slurmllm.launch.supervise.run_lock import locked, not_recorded, other_supervisor, still_runs
from slurmllm.launch.supervise.supervisor import Supervisor

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


def test_the_second_command_is_refused(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_reused_process_id_holds_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
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


Lost = tuple[RunDir, FakeSlurm]


def one_node_record(**fields: object) -> AttemptRecord:
    return attempt_record(**{"nodes": ("n1",), "world_size": 1, **fields})


@contextmanager
def living() -> Iterator[subprocess.Popen[bytes]]:
    """A process that passes for a supervisor."""
    command = [sys.executable, "-c", "input()", "supervise"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process
        process.communicate(b"\n")


def identity(process: subprocess.Popen[bytes]) -> dict[str, object]:
    pid = process.pid
    return {"host": gethostname(), "pid": pid, "process": process_identity(pid)}


def test_an_earlier_start_of_a_job_on_this_node_may_still_run(tmp_path: Path) -> None:
    run, allocation = RunDir(tmp_path), start_of(FakeSlurm(), "7", ("n2",), 1)
    with living() as first:
        record = one_node_record(**identity(first))
        reason = f"process {first.pid} on {gethostname()} is its supervisor"
        assert still_runs(run, record, allocation) == reason
        restarted = record.model_copy(update={"process": "boot 1"})  # its id is used again
        assert still_runs(run, restarted, allocation) is None
    assert still_runs(run, record, allocation) is None


def test_a_second_supervisor_leaves(lost: Lost, monkeypatch: pytest.MonkeyPatch) -> None:
    run, cluster = lost
    monkeypatch.setattr("slurmllm.launch.supervise.supervisor.lost_start", lambda _: None)
    path = run.attempt("train", 0).record
    with living() as first:
        one_node_record(job_id="2", **identity(first)).save(path)
        second = supervisor(run, cluster, "train", "2")
        before = path.read_bytes()
        reason = f"attempt 0 of job 2 is supervised by {first.pid}; this supervisor leaves"
        assert other_supervisor(run, "train", second.allocation) == reason
        assert second.main() == EXIT_NEGATIVE
        assert (len(run.attempts("train")), path.read_bytes()) == (1, before)
        # A start that Slurm made after it takes over.
        second.allocation.restart_count = 1
        assert other_supervisor(run, "train", second.allocation) is None


@contextmanager
def beating(path: Path) -> Iterator[None]:
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.05):
            Heartbeat(node="n1", written_at=time.time(), ranks={}).save(path)

    Heartbeat(node="n1", written_at=time.time(), ranks={}).save(path)
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_an_earlier_start_of_a_job_on_another_node_shows_by_its_heartbeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "HEARTBEAT_S", 1.0)
    run, allocation = RunDir(tmp_path), start_of(FakeSlurm(), "7", ("n2",), 1)
    record = one_node_record(host="n1", pid=1, process="boot 1")
    path = run.attempt("train", 0).heartbeat("n1")
    assert still_runs(run, record, allocation) is None  # it never wrote one
    with beating(path):
        assert still_runs(run, record, allocation) == "n1 still writes heartbeats"
    assert still_runs(run, record, allocation) is None
    path.write_text("{")
    assert still_runs(run, record, allocation) is None


@pytest.fixture
def lost(tmp_path: Path) -> Lost:
    """Two jobs that slurmctld shows as pending; each excludes other nodes."""
    run, cluster = make_run(tmp_path / "r"), FakeSlurm()
    run.script("train").parent.mkdir(parents=True)
    for stage in STAGES:
        run.script(stage).write_text(f"#!/bin/bash\n# {stage}\n")
    precompile = cluster.submit(run.script("precompile").read_text(), exclude=["n3"])
    train = cluster.submit(run.script("train").read_text(), after_ok=precompile)
    cluster.exclude(train, ["n1", "n4"])
    save_submission(run, precompile_job=precompile, train_job=train)
    return run, cluster


def supervisor(run: RunDir, cluster: FakeSlurm, stage: Stage, job: str) -> Supervisor:
    return Supervisor(run, stage, start_of(cluster, job, ("n2",)))


def test_a_lost_precompile_job_is_replaced_with_the_train_job_after_it(lost: Lost) -> None:
    run, cluster = lost
    assert supervisor(run, cluster, "precompile", "1").main() == 75
    (sent,) = JobsRecord.load(run.jobs).submissions
    assert (sent.precompile_job, sent.train_job) == ("3", "4")
    assert cluster.jobs["4"].after_ok == "3"
    assert [cluster.jobs[job].state for job in "1234"] == [*["CANCELLED"] * 2, *["PENDING"] * 2]
    assert "# train" in cluster.jobs["4"].script
    # Nodes that were excluded since the submission stay excluded.
    assert (cluster.jobs["3"].excluded, cluster.jobs["4"].excluded) == (("n3",), ("n1", "n4"))
    assert run.attempts("precompile") == []
    assert not run.lock.exists()


@pytest.mark.parametrize(
    ("restarts", "evidence", "blamed"),
    [(0, "slurmctld lost this start of job 2", ()), (1, "Slurm: NODE_FAIL", ("n1",))],
)
def test_an_open_attempt_of_the_same_job(
    lost: Lost, restarts: int, evidence: str, blamed: tuple[str, ...]
) -> None:
    run, cluster = lost
    cluster.finish("1")
    cluster.start("2")
    cluster.fail_node(cluster.jobs["2"].nodes[0])
    cluster.start("2")
    one_node_record(job_id="2").save(run.attempt("train", 0).record)
    second = supervisor(run, cluster, "train", "2")
    second.allocation.restart_count = restarts
    assert second._close_orphaned() is None
    closed = AttemptRecord.load(run.attempt("train", 0).record)
    assert closed.evidence[0].startswith(evidence)
    assert (closed.ending, closed.blamed_nodes) == ("node_failure", blamed)


def test_a_lost_job_is_not_replaced_while_another_command_changes_the_run(
    lost: Lost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, cluster = lost
    monkeypatch.setattr(run_lock, "WAIT_S", 0.2)
    before = run.jobs.read_bytes()
    with run_lock.locked(run, "cancel"):
        assert supervisor(run, cluster, "train", "2").main() == 75
    assert (run.jobs.read_bytes(), len(cluster.jobs)) == (before, 2)
    assert "`slurmllm cancel`" in caplog.text
    assert "`slurmllm resume r`" in caplog.text


def test_a_job_that_its_submit_did_not_live_to_record_ends_at_once(
    lost: Lost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, cluster = lost
    monkeypatch.setattr(run_lock, "RECORDED_S", 0.0)
    unknown = cluster.submit(run.script("train").read_text(), exclude=["n1"])
    cluster.start(unknown)
    assert supervisor(run, cluster, "train", unknown).main() == 1
    assert run.attempts("train") == []
    assert f"job {unknown} is not of the last submission in {run.jobs}" in caplog.text
    # It is waited for while `sbatch` returns.
    monkeypatch.setattr(run_lock, "RECORDED_S", 60.0)
    (sent,) = JobsRecord.load(run.jobs).submissions
    late = JobsRecord(submissions=(sent, sent.model_copy(update={"train_job": unknown})))
    threading.Timer(0.3, late.save, [run.jobs]).start()
    assert not_recorded(run, start_of(cluster, unknown, ("n2",))) is None


def test_a_run_whose_end_is_only_in_the_comment_of_its_job_is_not_trained_again(
    tmp_path: Path,
) -> None:
    run, cluster = make_run(tmp_path), FakeSlurm()
    run.script("train").parent.mkdir()
    run.script("train").write_text("#!/bin/bash\n")
    job = cluster.submit("#!/bin/bash\n")
    save_submission(run, train_job=job)
    cluster.start(job)
    record = one_node_record(job_id=job, started_at=time.time() - 99)
    record.save(run.attempt("train", 0).record)
    fields = {"stage": "train", "attempt": 0, "ended_at": time.time(), "ending": "done"}
    ending = UnrecordedEnding.model_validate({**fields, "evidence": ("all workers finished",)})
    cluster.comment(job, comment_with(ending, ""))
    closed = Supervisor(run, "train", start_of(cluster, job, ("n1",), 1))._close_orphaned()
    assert (closed.ending, closed.action) == ("done", "finish")
