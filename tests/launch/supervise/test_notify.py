"""Notifications: what a command gets, and that none of them delays a run."""

import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
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


class Receiver(HTTPServer):
    """Keeps what is posted to it."""

    def __init__(self) -> None:
        self.posted: list[dict[str, Any]] = []
        super().__init__(("127.0.0.1", 0), _Posts)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class _Posts(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append(json.loads(content))
        self.send_response(202)
        self.end_headers()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        yield server
        server.shutdown()


def notify_of_a_failure(tmp_path: Path, command: list[str]) -> None:
    sender = notifier(tmp_path, f"slurm.notify.command={json.dumps(command)}")
    sender.started(BEGUN)
    sender._sending[-1].join()
    fields = {"evidence": ["n2 stopped responding"], "nodes": ["n2"], "class": "hang"}
    hangs = [attempt_record(attempt=3, **fields, action=name) for name in ("requeue", "stop")]
    for record in (*hangs, DONE):
        sender.closed(record)
        sender._sending[-1].join()


def test_pagerduty_opens_an_incident_and_resolves_it(tmp_path: Path, receiver: Receiver) -> None:
    key = tmp_path / "key"
    key.write_text("R0UT1NG\n")
    script = recipes_dir().parent / "notify" / "pagerduty.py"
    notify_of_a_failure(tmp_path, [sys.executable, str(script), str(key), receiver.url])
    events = receiver.posted  # none of the requeue
    assert [event["event_action"] for event in events] == ["resolve", "trigger", "resolve"]
    assert {(e["routing_key"], e["dedup_key"]) for e in events} == {
        ("R0UT1NG", str(tmp_path / "demo"))
    }
    payload = events[1]["payload"]
    assert payload["summary"].endswith("hang → stop: n2 stopped responding")
    assert (payload["severity"], payload["source"]) == ("critical", "n2")
    assert payload["timestamp"].endswith("+00:00")
    assert payload["custom_details"]["event"] == "failure"


def test_the_pages_command_posts_to_slack(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".slack_webhook").write_text(receiver.url)
    page = (Path(__file__).parents[3] / "docs" / "supervise.md").read_text()
    (post,) = re.findall(r"`(curl .*slack_webhook.*)`", page)
    notify_of_a_failure(tmp_path, ["sh", "-c", post])
    assert len(receiver.posted) == 4
    assert all(message["text"].startswith("demo: ") for message in receiver.posted)
