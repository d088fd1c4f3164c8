"""Logs of workers on the disk of their node, and their way into the run directory."""

import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from end_to_end.bench import LEAN, SMALL, Bench, processes_with
from launch.supervise.starts import attempt_record
from train.gang import Gang, make_data, make_run

from slurmllm.core.config.resolve import RunConfig, resolve
from slurmllm.core.run.records import AttemptRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.supervise import rank_logs
from slurmllm.launch.supervise.rank_logs import RankLogs, collect_leftovers
from slurmllm.train.backends.environment import make_cache_folder


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "runs" / "r")


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return resolve("tiny_neox", "local", [f"cluster.node_local={tmp_path / 'disk'}"])


def record_of(run: RunDir, attempt: int = 0, started_at: float = 1.5) -> AttemptRecord:
    record = attempt_record(attempt=attempt, job_id=None, world_size=4, started_at=started_at)
    record.save(run.attempt("train", attempt).record)
    return record


def logs_of(config: RunConfig, run: RunDir, attempt: int = 0, node: str = "n1") -> RankLogs:
    return RankLogs(config, run, record_of(run, attempt), node)


def folder_on_disk(config: RunConfig, run: RunDir) -> Path:
    cache = make_cache_folder(config, run)
    return cache.with_name(f"{cache.name}.logs")


def content(run: RunDir, rank: int, attempt: int = 0) -> str | None:
    path = run.worker_log("train", attempt, rank)
    return path.read_text() if path.is_file() else None


def test_logs_are_on_the_node_until_they_are_collected(config: RunConfig, run: RunDir) -> None:
    logs = logs_of(config, run)
    files = {rank: logs.open(rank) for rank in (1, 2, 3)}
    os.write(files[1], b"one\n")
    os.write(files[2], b"two\n")
    assert not run.logs.exists()
    assert logs.folder is not None
    assert (logs.folder / "rank_00001.log").read_text() == "one\n"
    logs.collect()
    assert (content(run, 1), content(run, 2)) == ("one\n", "two\n")
    assert content(run, 3) is None  # it printed nothing
    assert list(folder_on_disk(config, run).iterdir()) == []
    logs.collect()
    assert content(run, 1) == "one\n"


def test_a_disk_that_refuses_leaves_the_run_directory(
    config: RunConfig, run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = folder_on_disk(config, run)
    blocked.touch()
    logs = logs_of(config, run)
    for rank in (1, 2):
        os.write(logs.open(rank), b"x\n")
    assert (content(run, 1), content(run, 2)) == ("x\n", "x\n")
    assert len(caplog.messages) == 1
    assert "written to the run directory" in caplog.text
    assert logs.folder is None
    logs.collect()
    assert content(run, 1) == "x\n"
    collect_leftovers(config, run, "train", 1)


def test_a_killed_launcher_s_logs_are_collected_by_the_next_attempt(
    config: RunConfig, run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    killed, living = logs_of(config, run, node="n1"), logs_of(config, run, node="n2")
    first, second, third = killed.open(1), killed.open(2), living.open(3)
    for file, line in ((first, b"one\n"), (second, b"two\n"), (third, b"three\n")):
        os.write(file, line)
    copy = run.worker_log("train", 0, 1)
    copy.parent.mkdir(parents=True)
    copy.write_text("on")  # an earlier copy that was cut off
    killed._files.lock.close()  # as its end does
    collect_leftovers(config, run, "train", 0)  # of the same attempt: it may have just begun
    assert content(run, 1) == "on"
    collect_leftovers(config, run, "train", 1)
    assert (content(run, 1), content(run, 2)) == ("one\n", "two\n")
    assert content(run, 3) is None
    assert "collected the logs of 2 workers of train attempt 0" in caplog.text
    collect_leftovers(config, run, "train", 1)
    assert content(run, 1) == "one\n"
    living.collect()
    assert content(run, 3) == "three\n"


def test_the_logs_of_a_removed_run_are_not_another_run_s(config: RunConfig, run: RunDir) -> None:
    logs = logs_of(config, run)
    os.write(logs.open(1), b"old\n")
    logs._files.lock.close()
    record_of(run, started_at=7.0)  # another run of this name
    collect_leftovers(config, run, "train", 1)
    assert content(run, 1) is None
    assert list(folder_on_disk(config, run).iterdir()) == []


def test_logs_stay_while_the_run_directory_refuses(
    config: RunConfig, run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    logs = logs_of(config, run)
    os.write(logs.open(1), b"precious\n")
    run.logs.write_text("not a folder")
    logs.collect()
    assert "it stays there until the next attempt" in caplog.text
    run.logs.unlink()
    record = run.attempt("train", 0).record
    text = record.read_text()
    record.write_text("{")
    collect_leftovers(config, run, "train", 1)
    assert content(run, 1) is None, "it is not known whose they are"
    assert "wait for the next attempt" in caplog.text
    record.write_text(text)
    collect_leftovers(config, run, "train", 1)
    assert content(run, 1) == "precious\n"


def test_of_an_endless_log_the_middle_is_left_out(
    config: RunConfig, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_logs, "MAX_LOG_BYTES", 100)
    monkeypatch.setattr(rank_logs, "BEGIN_BYTES", 10)
    logs = logs_of(config, run)
    os.write(logs.open(1), b"0123456789" * 30)
    logs.collect()
    assert content(run, 1) == "0123456789\n[200 bytes left out]\n" + "0123456789" * 9


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("SLURMLLM_LOG", "debug")  # all ranks print what they do
    with Bench(tmp_path / "runs") as bench:
        yield bench


def test_logs_of_a_run_with_a_killed_launcher_and_a_killed_worker(
    bench: Bench, inputs: tuple[str, ...], tmp_path: Path
) -> None:
    """It is followed by `status --watch` and `logs -f` through both failures to its end."""
    (tmp_path / "disk").mkdir()
    settings = (
        *("cluster.devices_per_node=2", f"cluster.node_local={tmp_path / 'disk'}"),
        *("env.SLURMLLM_REHEARSAL_STEP_S=0.4", "slurm.backoff_s=0", "checkpoint.every_steps=5"),
        *("watchdog.min_step_s=20", "cluster.price={on_demand: 3600.0, date: '2026-01-01'}"),
        "train.steps=100",  # on a busy machine the commands below take as long as dozens of steps
    )
    submit = ("submit", "tiny_neox", "--nodes=2", "--local", "--name=r", *SMALL, *LEAN, *inputs)
    process = bench.start(*submit, *settings)
    run = RunDir(bench.runs / "r")
    bench.wait_for_step("r", 6)
    assert content(run, 3) is None
    assert "starting from step 0" in bench.call("logs", "r", "--rank", "3")
    assert "without 3 logs on the disks" in bench.call("logs", "r", "--all-ranks")
    assert content(run, 3) is None
    worker = bench.start("logs", "r", "-f", "--rank", "3")
    first_line = worker.stdout.readline()
    watching = bench.start("status", "--watch", "0.5", "r", "--json")
    following = bench.start("logs", "r", "-f", "--all-ranks", "--stage=train")
    failures = bench.start("logs", "r", "-f", "--failed")
    launcher = next(
        pid
        for pid in processes_with(str(run.path))
        if b"launch" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        and b"SLURMLLM_NODE=local1\0" in Path(f"/proc/{pid}/environ").read_bytes()
    )
    os.kill(launcher, signal.SIGKILL)
    bench.until(lambda: run.metrics(1).is_file(), "attempt 1 made no step")
    # The next attempt has collected what its launcher left.
    assert "starting from step 0" in str(content(run, 2))
    assert str(content(run, 3)).count("starting from step 0") == 1
    assert "of train attempt 0, whose launcher was killed" in run.stage_log("train").read_text()
    os.kill(bench.node("r", 1, "local1")["pids"]["3"], signal.SIGKILL)
    bench.until(lambda: content(run, 3, 1) is not None, "rank 3's log was not collected")
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert bench.endings("r") == [*[("node_failure", "requeue")] * 2, ("done", "finish")]
    assert [bench.attempt("r", number)["blamed_nodes"] for number in (0, 1)] == [["local1"]] * 2
    for attempt in (0, 1, 2):
        assert all(content(run, rank, attempt) for rank in (1, 2, 3))
    assert not any((tmp_path / "disk").rglob("rank_*.log"))
    looks = [json.loads(line) for line in watching.communicate(timeout=400)[0].splitlines()]
    first, last = looks[0], looks[-1]
    assert (first["state"], last["state"], last["restarts"]) == ("training", "done", 2)
    assert last["step"] == last["last_checkpoint"]["step"] == 100
    taken_s = sum(a["ended_at"] - a["started_at"] for a in last["attempts"])
    assert last["usd"] == pytest.approx(2 * taken_s, rel=0.2)  # two nodes, a dollar a second
    lines = following.communicate(timeout=400)[0].splitlines()
    headings = [lines.index(f"── train attempt {number}") for number in (0, 1, 2)]
    assert headings == sorted(headings)
    assert any(line.startswith("[rank 0 local0] ") and "step 100/100" in line for line in lines)
    output, _ = failures.communicate(timeout=400)
    assert "first failing worker: rank 3 on local1\n  ended by SIGKILL\n" in output
    log = first_line + worker.stdout.read()
    worker.wait(timeout=400)
    collected = "".join(str(content(run, 3, attempt)) for attempt in (0, 1, 2))
    assert log == collected, "each line of its three attempts once"
    codes = [process.returncode for process in (watching, following, failures, worker)]
    assert codes == [0, 0, 0, 0]


def test_a_worker_survives_a_full_disk(tmp_path: Path) -> None:
    """Its log is on the node's disk, which may be full: what it prints is lost, and no more."""
    run = make_run(
        tmp_path / "runs" / "r", make_data(tmp_path), "backend=rehearsal", "train.steps=6"
    )
    entry = (
        "import os; full = os.open('/dev/full', os.O_WRONLY); os.dup2(full, 1); os.dup2(full, 2)\n"
        "import sys; sys.argv[1:] = ['worker', sys.argv[1], '--stage', sys.argv[2], '--attempt', "
        "sys.argv[3]]; from slurmllm.cli.main import cli; cli()"
    )
    Gang(run, entry=entry, env={"SLURMLLM_LOG": "debug"}).finish()
    assert run.metrics(0).read_text().count("\n") == 6
