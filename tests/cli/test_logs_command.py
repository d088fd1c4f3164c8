"""`logs`: several ranks as one, the first that failed, and files of any content."""

import shutil
import threading
import time
from pathlib import Path

import pytest
from click.testing import Result
from command_line import call
from made_records import make_run, save_attempt

from slurmllm.analysis.status.logs import node_log_command
from slurmllm.cli import logs as module
from slurmllm.core.run.records import AttemptRecord, FailureRecord, NodeRecord
from slurmllm.core.run.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs" / "r")
    write(run.stage_log("precompile"), b"precompile attempt 0: 1 node(s): a\n")
    write(run.stage_log("train"), b"train attempt 0: 2 node(s): a b\nzero\n")
    write(run.worker_log("train", 0, 1), b"one\nlast\xff\x00\n")
    evidence = ("rank 1 on b: KeyError: 'x'",)
    end = {"ended_at": 9.0, "ending": "code_error", "action": "stop", "evidence": evidence}
    save_attempt(run, nodes=("a", "b"), **end)
    return run


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as stream:
        stream.write(data)


def logs(*arguments: str) -> Result:
    result = call("logs", "r", *arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def test_lines_of_all_ranks_have_a_prefix(run: RunDir) -> None:
    assert logs("--all-ranks").stdout.splitlines() == [
        "── precompile attempt 0",
        "[rank 0] precompile attempt 0: 1 node(s): a",
        "── train attempt 0",
        "[rank 0 a] train attempt 0: 2 node(s): a b",
        "[rank 0 a] zero",
        "[rank 1 b] one",
        "[rank 1 b] last\ufffd",
    ]
    assert logs("--ranks", "1", "-n", "1").stdout == "── train attempt 0\n[rank 1 b] last\ufffd\n"
    assert logs("--rank", "1").stdout == "one\nlast\ufffd\n"
    assert logs("--attempt", "0", "-n", "1").stdout == "zero\n"
    assert logs("-n", "1").stdout == "precompile attempt 0: 1 node(s): a\nzero\n"


def test_records_have_the_colour_of_their_level(run: RunDir) -> None:
    record = "2026-11-23T08:31:05.123+00:00 {} b rank 1 slurmllm.train: m"
    info, warning, error = (record.format(level) for level in ("INFO", "WARNING", "ERROR"))
    write(run.worker_log("train", 0, 1), f"{info}\n{warning}\n{error}\n".encode())
    result = call("logs", "r", "--rank", "1", "-n", "3", color=True)
    coloured = [info, f"\x1b[33m{warning}\x1b[0m", f"\x1b[31m{error}\x1b[0m"]
    assert result.stdout.splitlines() == coloured
    assert logs("--rank", "1", "-n", "3").stdout.splitlines() == [info, warning, error]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--ranks", "7-9"), "no such logs"),
        (("--ranks", "9-7"), "write 7-9"),
        (("--ranks", "1,x"), "'x' is not a rank"),
        (("--attempt", "4"), "train attempts: 0; ranks"),
        (("--rank", "1", "--all-ranks"), "give one of them"),
        (("--failed", "--stage", "precompile"), "no attempt of r has failed"),
        (("--stacks", "-n", "3", "--failed"), "leave out --failed and -n"),
        (("-f", "--rank", "9"), "ranks with a log: [1]"),
    ],
)
def test_missing_logs_are_errors(run: RunDir, arguments: tuple[str, ...], expected: str) -> None:
    result = logs(*arguments)
    assert (result.exit_code, expected in result.output) == (2, True), result.output


def test_a_worker_without_a_log_printed_nothing_or_was_not_collected(run: RunDir) -> None:
    shutil.rmtree(run.logs)
    assert "r has no logs yet: interrupted, never submitted" in logs("--stage=precompile").output
    result = logs("--rank", "1")
    assert (result.exit_code, "the disk of b" in result.output) == (2, True), result.output
    NodeRecord(node="b", pids={1: 1}, exit_codes={1: 0}).save(run.attempt("train", 0).node("b"))
    result = logs("--rank", "1")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "rank 1 on b, train attempt 0: it printed nothing" in result.stderr


def test_a_running_worker_s_log_is_read_on_its_node(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, log = run.attempt("train", 0), run.worker_log("train", 0, 1)
    record = AttemptRecord.load(attempt.record).model_copy(update={"ended_at": None})
    record.save(attempt.record)
    disk = log.rename(tmp_path / log.name)
    NodeRecord(node="b", pids={1: 1}, log_folder=str(tmp_path)).save(attempt.node("b"))
    assert logs("--rank", "1").stdout == "one\nlast\ufffd\n"
    assert logs("--rank", "1", "-n", "1").stdout == "last\ufffd\n"
    with monkeypatch.context() as patched:  # srun ends after its output has
        (tmp_path / "bin").mkdir()
        slow = tmp_path / "bin" / "tail"
        slow.write_text(f'#!/bin/sh\n{shutil.which("tail")} "$@"\nexec >&-\nsleep 0.2\n')
        slow.chmod(0o755)
        patched.setenv("PATH", str(slow.parent), prepend=":")
        result = logs("--rank", "1")
        assert (result.exit_code, result.output) == (0, "one\nlast\ufffd\n"), result.output
    result = logs("--ranks", "0,1", "--stage", "train")
    assert "without 1 log on the disks of the nodes" in result.stderr
    assert "[rank 0 a] zero" in result.stdout
    disk.unlink()
    result = logs("--rank", "1")
    assert (result.exit_code, "the disk of b" in result.output) == (2, True), result.output
    record.model_copy(update={"host": "other"}).save(attempt.record)
    assert "the disk of other; print it there" in logs("--rank", "1").output
    following = node_log_command(run, record.model_copy(update={"job_id": "7"}), 1, None, True)
    assert following[:3] == ["srun", "--jobid=7", "--nodelist=b"]
    assert following[-4:] == ["--lines=+1", "--follow", "--pid=1", str(disk)]


def test_the_first_failing_worker(run: RunDir) -> None:
    texts = {"error": "KeyError", "message": "'x'", "traceback": "Traceback (most recent …):\n"}
    record = {"rank": 1, "node": "b", "blame": "code", "exit_code": 70, "step": 3, "time": 0.0}
    FailureRecord(**record, **texts).save(run.attempt("train", 0).failure(1))
    text = logs("--failed", "-n", "1").stdout
    assert "r, train attempt 0: code_error → stop\n  rank 1 on b: KeyError: 'x'" in text
    assert "first failing worker: rank 1 on b" in text
    assert "after step 3, blame: code\n  KeyError: 'x'\nTraceback" in text
    assert text.endswith("rank_00001.log\nlast\ufffd\n")


def test_following_goes_to_the_next_attempt(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = threading.Event()
    alive.set()
    monkeypatch.setattr(module, "_LOOK_S", 0.02)
    monkeypatch.setattr(module, "_ASK_S", 0.0)
    monkeypatch.setattr("slurmllm.launch.supervise.run_state.is_active", lambda *_: alive.is_set())

    def later() -> None:
        time.sleep(0.2)
        write(run.worker_log("train", 1, 1), b"again\nend")
        time.sleep(0.2)
        alive.clear()

    thread = threading.Thread(target=later)
    thread.start()
    text = logs("--all-ranks", "-f", "--stage", "train").stdout
    thread.join()
    assert logs("-f", "--rank", "0").stdout == "train attempt 0: 2 node(s): a b\nzero\n"
    assert text.endswith("last\ufffd\n── train attempt 1\n[rank 1]   again\n[rank 1]   end\n")
