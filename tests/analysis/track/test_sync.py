"""Which steps a tracker gets, and that nothing is lost: with a tracker in this process."""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from command_line import call
from made_records import save_attempt, save_submission
from present import present
from reported_runs import add_scores
from training_rows import make_rows, write_rows

from slurmllm.analysis.track import sync as sending
from slurmllm.analysis.track.sync import (
    Description,
    State,
    StepValues,
    Tracker,
    TrackerRecord,
    state_of,
    sync,
)
from slurmllm.core.config import trackers as tracker_settings
from slurmllm.core.config.load import save
from slurmllm.core.config.resolve import RunConfig, resolve
from slurmllm.core.config.trackers import missing_for_trackers
from slurmllm.core.errors import ConfigError, InfrastructureError, RunError
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.submit.prepare import RunRequest, prepare
from slurmllm.launch.supervise.side_processes import SideProcesses

KEY = "cAnArY" + "0" * 34


class Memory(Tracker):
    """Remembers what it is sent; fails after `fails_after` steps."""

    got: ClassVar[list[tuple[str, int, float]]] = []
    states: ClassVar[list[State]] = []
    newest: ClassVar[int | None] = None
    fails_after: ClassVar[int | None] = None
    about: ClassVar[Description | None] = None

    def __init__(self, config: RunConfig) -> None:
        self.url = "https://tracker/r"

    def open(self, run_id: str, about: Description) -> str:
        self._id, Memory.about = run_id or "id", about
        return self._id

    def last_step(self) -> int | None:
        return Memory.newest

    def log(self, steps: Sequence[StepValues]) -> None:
        if Memory.fails_after is not None and len(Memory.got) >= Memory.fails_after:
            raise OSError(f"no route to host; the key is {KEY}")
        Memory.got += [(self._id, step.step, next(iter(step.values.values()))) for step in steps]

    def close(self, state: State) -> None:
        Memory.states.append(state)


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "TRACKERS", {"wandb": Memory})
    monkeypatch.setattr(sending, "missing_for_trackers", lambda *_: [])
    fresh: dict[str, Any] = {"got": [], "states": [], "newest": None, "fails_after": None}
    for name, value in fresh.items():
        monkeypatch.setattr(Memory, name, value)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, "")  # restored after what `sync` sets
        monkeypatch.delenv(name)


@pytest.fixture
def config() -> RunConfig:
    return resolve("tiny_neox", "local", ["trackers=[wandb]", f"env.WANDB_API_KEY={KEY}"])


@pytest.fixture
def run(tmp_path: Path, config: RunConfig) -> RunDir:
    run_dir = RunDir(tmp_path / "runs" / "demo")
    run_dir.logs.mkdir(parents=True)
    save(config, run_dir)
    return run_dir


def send(run: RunDir, config: RunConfig) -> tuple[int, TrackerRecord]:
    (session,) = sync(run, config, ("wandb",))
    return session.steps_sent, session.record


def steps() -> list[int]:
    return [step for _, step, _ in Memory.got]


def test_scores_are_sent_once_after_their_steps(run: RunDir, config: RunConfig) -> None:
    write_rows(run.metrics(0), make_rows(1, 45))
    add_scores(run, 20)
    _, record = send(run, config)
    assert Memory.got[-2:] == [(record.run_id, 20, 0.2)] * 2
    assert len({*record.scores}) == 2
    send(run, config)
    assert len(Memory.got) == 47


def test_a_requeue_continues_one_run_and_repeats_no_step(run: RunDir, config: RunConfig) -> None:
    write_rows(run.metrics(0), make_rows(1, 45))
    assert send(run, config)[0] == 45
    assert send(run, config)[0] == 0
    write_rows(run.metrics(1), make_rows(41, 200, attempt=1))
    number, record = send(run, config)
    assert number == 155
    assert steps() == list(range(1, 201))
    assert {run_id for run_id, _, _ in Memory.got} == {record.run_id}
    assert TrackerRecord.load(run.tracker("wandb")) == record
    assert (record.last_step, record.url) == (200, "https://tracker/r")
    # What it lost with a process is sent again.
    Memory.newest = 190  # uploads end with the process
    send(run, config)
    assert steps() == [*range(1, 201), *range(191, 201)]


def test_a_failure_loses_nothing_and_names_no_key(run: RunDir, config: RunConfig) -> None:
    write_rows(run.metrics(0), make_rows(1, 300))
    Memory.fails_after = 160
    with pytest.raises(InfrastructureError, match=r"OSError: no route to host") as error:
        send(run, config)
    assert "`slurmllm track sync demo` sends what is missing" in str(error.value)
    assert KEY not in str(error.value)
    assert steps() == list(range(1, 161))
    Memory.fails_after = None
    send(run, config)
    assert steps() == list(range(1, 301))


def test_it_follows_a_run_and_logs_each_failure_once(
    run: RunDir, config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    looks, began = 0, time.monotonic()

    def train(seconds: float) -> None:
        nonlocal looks
        looks += 1
        limit_s = (time.monotonic() - began) / sending.READING_SHARE
        assert sending.INTERVAL_S <= seconds <= max(sending.INTERVAL_S, limit_s)
        write_rows(run.metrics(0), make_rows(1, 10 * looks))
        Memory.fails_after = 10 if looks in (2, 3) else None

    (session,) = sync(run, config, ("wandb",), lambda: looks == 5, train)
    assert steps() == list(range(1, 51))
    assert session.steps_sent == 50
    assert caplog.text.count("no route to host") == 1
    assert Memory.states == ["running"]


def test_only_one_process_sends(run: RunDir, config: RunConfig) -> None:
    run.trackers.mkdir()
    hold = (
        "import fcntl, sys; lock = open(sys.argv[1], 'w'); fcntl.lockf(lock, fcntl.LOCK_EX); "
        "print('held', flush=True); input()"
    )
    command = [sys.executable, "-c", hold, str(run.trackers / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert present(other.stdout).readline() == b"held\n"
        with pytest.raises(RunError, match="another process sends the metrics of demo"):
            send(run, config)
        other.communicate(b"\n")
    send(run, config)


def test_the_description_has_the_commit_and_no_key(run: RunDir, config: RunConfig) -> None:
    save_submission(run, train_job="7", git_commit="ab-dirty")
    write_rows(run.metrics(0), make_rows(1, 2))
    send(run, config)
    about = present(Memory.about)
    assert about.notes == {
        "slurmllm.run_dir": str(run.path),
        "slurmllm.analysis.report": str(run.path / "reports" / "report.html"),
        "slurmllm.jobs": "7",
        "slurmllm.git_commit": "ab-dirty",
    }
    assert about.config["env.WANDB_API_KEY"] == "***"
    assert about.config["optim.lr"] == config.recipe.optim.lr


def test_states(run: RunDir) -> None:
    assert state_of(run) == "running"
    for ending, action, state in (
        *((None, None, "running"), ("hang", "requeue", "running"), ("done", "finish", "finished")),
        *(("cancelled", "stop", "cancelled"), ("code_error", "stop", "failed")),
        ("superseded", "stop", "running"),
    ):
        save_attempt(run, ending=ending, action=action)
        assert state_of(run) == state


def test_what_is_missing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(tracker_settings, "PACKAGES", {"wandb": "no_wandb", "mlflow": "no_mlflow"})
    config = resolve("tiny_neox", "local", ["trackers=[wandb, mlflow]"])
    with pytest.raises(ConfigError) as error:
        prepare(RunRequest(config=config, nodes=1, root=tmp_path / "runs", local=True))
    package, other, uri, key = error.value.faults
    assert "pip install 'slurmllm[wandb]'" in package
    assert "pip install 'slurmllm[mlflow]'" in other
    assert uri.startswith("cluster.trackers.tracking_uri: not set")
    assert "no API key here; `wandb login`" in key
    assert not (tmp_path / "runs").exists()


def test_a_key_may_be_in_any_of_its_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(tracker_settings, "PACKAGES", {"wandb": "json"})

    def complete(*overrides: str) -> bool:
        return not missing_for_trackers(resolve("tiny_neox", "local", overrides), ("wandb",))

    assert not complete()
    assert complete(f"env.WANDB_API_KEY={KEY}")
    assert complete("cluster.env.WANDB_MODE=offline")
    for name, host in ((".netrc", "api.wandb.ai"), ("_netrc", "wandb.of.this.site")):
        (tmp_path / name).write_text(f"machine {host}\n login user\n password {KEY}\n")
        (tmp_path / name).chmod(0o644)
        assert complete(), name
        (tmp_path / name).unlink()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert complete()


def test_an_address_with_a_password_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="an address with a password") as error:
        resolve("tiny_neox", "local", [f"cluster.trackers.tracking_uri=https://me:{KEY}@host"])
    assert KEY not in str(error.value)


def test_a_child_that_fails_is_a_warning(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = resolve("tiny_neox", "local", ["trackers=[wandb]"])  # and there is no key
    save(config, run)
    tracking = SideProcesses(run, config)
    tracking.start("train")
    tracking.children[run.track_log].wait()
    tracking.stop(requeued=False)
    assert "may lack the last steps" in caplog.text
    assert "no API key here" in run.track_log.read_text()


def test_one_child_sends_all_attempts_of_a_job(
    run: RunDir, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def start_sleep(_: object, **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(["sleep", "60"], **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start_sleep)
    tracking = SideProcesses(run, config)
    tracking.start("precompile")
    for _ in range(3):
        tracking.start("train")
    assert len(started) == 1
    started[0].kill()
    started[0].wait()
    tracking.start("train")
    assert len(started) == 2, "in place of one that has ended"
    tracking.stop(requeued=True)
    assert started[1].returncode == -signal.SIGKILL


def test_no_child_without_trackers_or_network(run: RunDir) -> None:
    for override in ("cluster.trackers.network=false", "trackers=[]"):
        tracking = SideProcesses(run, resolve("tiny_neox", "local", ["trackers=[wandb]", override]))
        tracking.start("train")
        tracking.stop(requeued=False)
        assert not run.track_log.exists()
    save(resolve("tiny_neox", "local"), run)
    done = call("track", "sync", run.path)
    assert "demo has no trackers; name one with --to wandb or --to mlflow" in done.output
