"""Notifications: what a command gets, and that none of them delays a run."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm
from launch.supervise.starts import attempt_record

from slurmllm.core.config.resolve import recipes_dir, resolve
from slurmllm.core.errors import ConfigError
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.submit.prepare import RunRequest, prepare, render_run, write_run
from slurmllm.launch.supervise import notify, supervisor
from slurmllm.launch.supervise.allocation import SlurmAllocation
from slurmllm.launch.supervise.notify import Notifier, event_of

BEGUN = attempt_record(attempt=3)
DONE = attempt_record(attempt=3, ending="done", action="finish")


def command(tmp_path: Path) -> str:
    """The setting of a command that appends what it gets to a file, a line each."""
    script = (
        "import json, os, sys; message = sys.stdin.read(); "
        "assert os.environ['SLURMLLM_NOTIFICATION'] == json.loads(message)['text']; "
        f"open({str(tmp_path / 'messages')!r}, 'a').write(message + '\\n')"
    )
    return f"slurm.notify.command={json.dumps([sys.executable, '-c', script])}"


def messages(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "messages").read_text().splitlines()]


def notifier(tmp_path: Path, *overrides: str) -> Notifier:
    return Notifier(RunDir(tmp_path / "demo"), resolve("tiny_neox", "local", overrides))


def test_a_command_gets_a_line_of_text_and_fields(tmp_path: Path) -> None:
    sender = notifier(tmp_path, command(tmp_path), "slurm.notify.on=[start, requeue]")
    sender.started(BEGUN)
    sender._sending[0].join()
    fields = {"evidence": ["n2 stopped responding"], "blamed_nodes": ["n2"], "last_step": 45}
    fields |= {"attempt": 3, "class": "node_failure", "action": "requeue"}
    sender.closed(attempt_record(**fields))
    sender._sending[1].join()
    sender.closed(DONE)  # not asked for
    assert len(sender._sending) == 2
    first, second = messages(tmp_path)
    assert (first["event"], second["event"]) == ("start", "requeue")
    assert first["text"] == "demo: train attempt 3 of job 7: started on 2 node(s)"
    assert second["text"] == (
        "demo: train attempt 3 of job 7: node_failure → requeue, after step 45: "
        "n2 stopped responding"
    )
    fields |= {"run": "demo", "stage": "train", "job_id": "7", "nodes": ["n1", "n2"]}
    assert (fields | {"run_dir": str(tmp_path / "demo")}).items() <= second.items()


@pytest.mark.parametrize(
    ("stage", "ending", "action", "event"),
    [
        ("train", "done", "finish", "end"),
        ("train", "cancelled", "stop", "end"),
        ("train", "code_error", "stop", "failure"),
        ("train", "no_progress", "stop", "failure"),
        ("train", "hang", "requeue", "requeue"),
        ("train", "divergence", "stop", "divergence"),
        ("train", "divergence", "requeue", "divergence"),
        ("train", "superseded", "stop", None),
        ("precompile", "done", "finish", None),
        ("precompile", "compile_failure", "stop", "failure"),
    ],
)
def test_events(stage: str, ending: str, action: str, event: str | None) -> None:
    assert event_of(attempt_record(attempt=3, stage=stage, ending=ending, action=action)) == event


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        (["/nowhere/tell"], "/nowhere/tell cannot be started: No such file or directory"),
        (["/bin/false"], "/bin/false ended with exit code 1"),
    ],
)
def test_a_failure_is_logged(
    program: list[str], fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sender = notifier(tmp_path, f"slurm.notify.command={json.dumps(program)}")
    sender.closed(DONE)
    sender.wait()
    assert caplog.messages == [f"notification of end not delivered: {fault}"]


def test_a_command_that_hangs_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notify, "TIMEOUT_S", 5.0)
    monkeypatch.setattr(notify, "LAST_WAIT_S", 0.1)
    sender = notifier(tmp_path, "slurm.notify.command=[/bin/sleep, '600']")
    sender.closed(DONE)
    sender.wait()  # for LAST_WAIT_S at most
    assert sender._sending[0].is_alive()
    assert "not delivered before the end of the supervisor" in caplog.text
    monkeypatch.setattr(notify, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(notify, "LAST_WAIT_S", 600.0)
    sender.started(BEGUN)
    sender._sending[1].join()
    assert "start not delivered: /bin/sleep has not ended after 0.2 s" in caplog.text
    sender.wait()  # returns at once, as one has taken too long
    assert sender._sending[0].is_alive()
    sender._sending[0].join()


def test_a_supervisor_announces_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, slurm = RunDir(tmp_path / "runs" / "r"), FakeSlurm(("n1",))
    overrides = [command(tmp_path), f"cluster.node_local={tmp_path}"]
    overrides += ["data.corpus=none", "cluster.health.enabled=false"]
    config = resolve("tiny_neox", "local", overrides)
    run.path.mkdir(parents=True)
    write_run(render_run(config, 1, run))
    job = slurm.submit(run.script("train").read_text())
    slurm.start(job)
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    allocation = SlurmAllocation(slurm)
    monkeypatch.setattr(supervisor, "current_allocation", lambda _: allocation)
    assert supervisor.supervise(run, "train") == 4  # there are no graphs
    assert sorted(message["event"] for message in messages(tmp_path)) == ["failure", "start"]


def test_a_webhook_and_a_command_in_a_recipe_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"slurm\.notify\.webhook was removed; .*curl"):
        resolve("tiny_neox", "local", ["slurm.notify.webhook=MY_WEBHOOK"])
    recipe = tmp_path / "mine.yaml"
    lines = (recipes_dir() / "tiny_neox.yaml").read_text()
    assert "\nslurm:\n" in lines
    recipe.write_text(lines.replace("\nslurm:\n", "\nslurm:\n  notify: {command: [/tmp/evil]}\n"))
    with pytest.raises(ConfigError, match=r"slurm\.notify\.command .*may not set a program"):
        resolve(str(recipe), "local")
    resolved = resolve(str(recipe), "local", ["slurm.notify.command=[/bin/true]"])
    assert resolved.recipe.slurm.notify.command == ("/bin/true",)


def test_a_command_that_does_not_exist_is_refused_at_submit(tmp_path: Path) -> None:
    config = resolve("tiny_neox", "local", ["slurm.notify.command=[nowhere-tell]"])
    with pytest.raises(ConfigError, match="nowhere-tell is no program that can be run"):
        prepare(RunRequest(config=config, nodes=1, root=tmp_path / "runs", local=True))
    assert not (tmp_path / "runs").exists()
