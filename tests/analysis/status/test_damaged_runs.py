"""One damaged run, or one of another user, must not hide the other runs of its folder."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_slurm import FakeSlurm
from made_records import save_attempt, save_manifest
from training_rows import make_row, write_rows

from slurmllm.cli.main import cli
from slurmllm.core.config.resolve import resolve
from slurmllm.core.run.records import (
    AttemptRecord,
    ExcludedNodes,
    Heartbeat,
    JobsRecord,
    SkipsRecord,
    WorkerPhase,
)
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.run.worker_files import read_phase
from slurmllm.core.slurm import client
from slurmllm.launch.supervise.evidence import _log_tail
from slurmllm.launch.supervise.watchdog import recent_step_times

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
pytestmark = pytest.mark.timeout(300)  # a pipe blocks who opens it
PLENTY = 10 << 30  # bytes
DEEP = '{"a":' * 50_000 + "1" + "}" * 50_000
LAUGHS = "a0: &a0 {k: v}\n" + "".join(
    f"a{i}: &a{i} {{{', '.join(f'x{j}: *a{i - 1}' for j in range(9))}}}\n" for i in range(1, 12)
)
MERGES = "a0: &a0 {k: v}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 12)
)


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(client, "SlurmClient", FakeSlurm)
    monkeypatch.chdir(tmp_path)


@functools.cache
def configuration() -> str:
    return resolve("tiny_neox", overrides=["train.steps=100"]).to_yaml()


def make(name: str) -> RunDir:
    """A run with one of each file that `status` or `report` reads."""
    run = RunDir(Path("runs").absolute() / name)
    run.path.mkdir(parents=True)
    run.config.write_text(configuration())
    JobsRecord().save(run.jobs)
    save_attempt(run, started_at=1.7e9, ended_at=1.7e9 + 10, ending="done", action="finish")
    phase = WorkerPhase(phase="stepping", step=1, since=1.7e9)
    beat = Heartbeat(node="n1", written_at=1.7e9, ranks={0: phase})
    beat.save(run.attempt("train", 0).heartbeat("n1"))
    SkipsRecord().save(run.skips)
    ExcludedNodes().save(run.excluded)
    write_rows(run.metrics(0), [make_row(step) for step in range(1, 9)])
    write_rows(run.events(0), [{"kind": "save", "step": 8, "attempt": 0, "time": 1.7e9}])
    save_manifest(run, 8)
    run.logs.mkdir()
    run.stage_log("train").write_text("line\n")
    return run


FILES: dict[str, Callable[[RunDir], Path]] = {
    "config": lambda run: run.config,
    "jobs": lambda run: run.jobs,
    "attempt": lambda run: run.attempt("train", 0).record,
    "skips": lambda run: run.skips,
    "metrics": lambda run: run.metrics(0),
    "events": lambda run: run.events(0),
    "manifest": lambda run: run.checkpoint(8) / "manifest.json",
    "heartbeat": lambda run: run.attempt("train", 0).heartbeat("n1"),
    "log": lambda run: run.stage_log("train"),
}
REQUIRED = ("config", "jobs", "attempt", "skips", "metrics")  # damage to them is the run's


def make_sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, PLENTY)


KINDS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "sparse": make_sparse,
    "deep": lambda path: path.write_text(DEEP),
    "digits": lambda path: path.write_text('{"step": ' + "9" * 5000 + "}\n"),
    "line": lambda path: path.write_text('{"step": 1, "note": "' + "x" * (20 << 20)),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00" * 100),
}
CONFIGS = {
    "laughs": LAUGHS,
    "merges": MERGES,
    "brackets": "a: " + "[" * 30_000,
    "braces": "a: " + "{a: " * 30_000,
    "dashes": "- " * 60_000,
    "integer": "train: {steps: " + "9" * 5000 + "}\n",
    "itself": "a: &a [*a]\n",
    "steps": "name: x\ntrain: {steps: 1" + "0" * 400 + "}\ncluster: {}\n",
}


def states(*arguments: str) -> dict[str, dict[str, object]]:
    done = CliRunner().invoke(cli, ("status", "--json", *arguments))
    assert done.exit_code == 0, done.output
    return {run["name"]: run for run in json.loads(done.stdout)["runs"]}


def answers(line: str) -> None:
    """A verb ends by itself."""
    done = CliRunner().invoke(cli, line.split())
    assert done.exit_code in (0, 2, 4), (line, done.output, done.exception)


@pytest.mark.parametrize("kind", KINDS)
def test_each_file_of_a_run_may_be_damaged(kind: str) -> None:
    make("good")
    for name, path_of in FILES.items():
        path = path_of(make(f"bad-{name}"))
        path.unlink()
        KINDS[kind](path)
    began = time.process_time()
    shown = states()
    assert time.process_time() - began < 15
    assert sorted(shown) == sorted(["good", *(f"bad-{name}" for name in FILES)])
    assert (shown["good"]["state"], shown["good"]["step"]) == ("done", 8)
    for name in REQUIRED:
        if (kind, name) not in (("line", "metrics"), ("deep", "metrics"), ("digits", "metrics")):
            run = shown[f"bad-{name}"]
            assert run["state"] == "damaged" or run["step"] == 0, (name, run["reason"])
    assert shown["bad-config"]["state"] == "damaged"
    assert "runs/bad-config/config.yaml" in str(shown["bad-config"]["reason"])
    # Of one run, the reason.
    lines = [f"status bad-{name}" for name in FILES]
    lines += ["checkpoint list bad-manifest", "logs bad-attempt"]
    lines += ["logs bad-log"] if kind != "sparse" else []  # a long log is printed
    names = [f"bad-{name}" for name in FILES if name != "config"]
    for line in (*lines, f"report good {' '.join(names)} --no-files --json"):
        answers(line)


def test_configurations_that_stand_for_too_much() -> None:
    make("good")
    for kind, text in CONFIGS.items():
        make(kind).config.write_text(text)
    # A process of its own: libyaml's stack overflow would end this one.
    command = [sys.executable, "-c", "from slurmllm.cli.main import main; main()"]
    command += ["status", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    shown = {run["name"]: run for run in json.loads(done.stdout)["runs"]}
    assert shown.pop("good")["state"] == "done"
    assert {name: run["state"] for name, run in shown.items()} == dict.fromkeys(CONFIGS, "damaged")
    assert all(run["reason"] for run in shown.values())


@pytest.mark.parametrize("kind", ["fifo", "device", "sparse"])
def test_files_of_workers_are_read_within_limits(kind: str) -> None:
    """Stacks, phases, logs and metrics, as `logs`, the launchers and the supervisor read them."""
    run = make("damaged")
    record = AttemptRecord.load(run.attempt("train", 0).record)
    stacks, phase, log = run.attempt("train", 0).stacks(1), run.path / "phase", run.metrics(0)
    log.unlink()
    stacks.parent.mkdir(parents=True)
    run.worker_log("train", 0, 1).parent.mkdir(parents=True)
    for path in (stacks, phase, log, run.worker_log("train", 0, 1)):
        KINDS[kind](path)
    done = CliRunner().invoke(cli, ("logs", "damaged", "--stacks"))
    assert (done.exit_code, "no stacks that can be read" in done.output) == (2, True)
    assert read_phase(phase) is None
    assert recent_step_times(run) == []
    assert len("".join(_log_tail(run, record, 1))) <= 1 << 16
    run.stage_log("train").unlink()
    if kind != "sparse":  # a long log is printed
        KINDS[kind](run.stage_log("train"))
        assert CliRunner().invoke(cli, ("logs", "damaged")).exit_code == 2


def test_numbers_that_no_run_has() -> None:
    make("good")
    for name, path_of, old, new in (
        ("saved", FILES["manifest"], "1700000000.0", "1e300"),
        ("began", FILES["attempt"], "1700000000.0", "-1e300"),
        ("ended", FILES["attempt"], "1700000010.0", "1e300"),
        ("tokens", FILES["metrics"], '"tokens": 32768', '"tokens": 1' + "0" * 400),
        ("step", FILES["metrics"], '"step": 8', f'"step": {2**63}'),
        ("loss", FILES["metrics"], '"step": 8, "attempt": 0, "loss": ', '"step": 8, "loss": 1e40'),
        ("world", FILES["attempt"], '"world_size": 1', '"world_size": 1' + "0" * 400),
    ):
        path = path_of(make(name))
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
    shown = states()
    assert len(shown) == 8
    assert shown["good"]["state"] == "done"
    for name in shown:
        answers(f"status {name}")
        answers(f"status {name} --json")
    assert CliRunner().invoke(cli, ("status",)).exit_code == 0


@only_root
def test_a_run_of_another_user_is_shown_with_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tempfile.mkdtemp(dir="/var/tmp")  # pytest's own is closed to others
    Path(folder).chmod(0o755)
    monkeypatch.chdir(folder)
    make("good")
    paths = {"folder": ".", "config": "config.yaml", "metrics": "metrics", "jobs": "jobs.json"}
    for name, path in (paths | {"attempts": "attempts", "attempt": "attempts/000"}).items():
        closed = make(name).path / path
        closed.chmod(0)
        os.chown(closed, 54321, 54321)
    states()  # all is imported: the interpreter's files may be closed to the other user
    os.seteuid(54322)
    try:
        shown = states()
        assert CliRunner().invoke(cli, ("status",)).exit_code == 0
        refused = CliRunner().invoke(cli, ("status", "folder"))
    finally:
        os.seteuid(0)
    assert refused.exit_code == 2
    assert "belongs to uid 54321" in refused.output
    assert shown.pop("good")["state"] == "done"
    shutil.rmtree(folder)
    assert len(shown) == 6
    for name, run in shown.items():
        assert run["state"] == "damaged", name
        assert "belongs to uid 54321" in str(run["reason"]), (name, run["reason"])
