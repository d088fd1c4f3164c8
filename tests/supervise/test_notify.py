"""Notifications: what a webhook and a command get, and that none of them delays a run."""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm
from supervise.starts import attempt_record

from slurmllm.config.resolve import RunConfig, recipes_dir, resolve
from slurmllm.errors import ConfigError
from slurmllm.run.rundir import RunDir
from slurmllm.submit.prepare import RunRequest, prepare, render_run, write_run
from slurmllm.supervise import notify, supervisor
from slurmllm.supervise.allocation import SlurmAllocation
from slurmllm.supervise.notify import Notifier, event_of

WEBHOOK = "slurm.notify.webhook=MY_WEBHOOK"
BEGUN = attempt_record(attempt=3)
DONE = attempt_record(attempt=3, ending="done", action="finish")


@contextmanager
def webhook(status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server's URL, and the JSON that it has got."""
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/json"
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/services/cAnArY", got
        server.shutdown()


def notifier(tmp_path: Path, *overrides: str) -> Notifier:
    return Notifier(RunDir(tmp_path / "demo"), resolve("tiny_neox", "local", overrides))


def test_a_webhook_and_a_command_get_a_line_of_text_and_fields(tmp_path: Path) -> None:
    script = (
        "import json, os, sys; message = json.load(sys.stdin); "
        "assert message['text'] == os.environ['SLURMLLM_NOTIFICATION']; "
        f"open({str(tmp_path / 'got')!r}, 'a').write(message['event'])"
    )
    command = f"slurm.notify.command={json.dumps([sys.executable, '-c', script])}"
    events = "slurm.notify.on=[start, requeue]"
    with webhook() as (url, got):
        sender = notifier(tmp_path, WEBHOOK, f"env.MY_WEBHOOK={url}", command, events)
        sender.started(BEGUN)
        for thread in sender._sending:
            thread.join()
        fields = {"evidence": ["n2 stopped responding"], "blamed_nodes": ["n2"], "last_step": 45}
        fields |= {"attempt": 3, "class": "node_failure", "action": "requeue"}
        sender.closed(attempt_record(**fields))
        sender.closed(DONE)  # not asked for
        for thread in sender._sending:
            thread.join()
    assert [message["event"] for message in got] == ["start", "requeue"]
    assert (tmp_path / "got").read_text() == "startrequeue"
    assert got[0]["text"] == "demo: train attempt 3 of job 7: started on 2 node(s)"
    assert got[1]["text"] == (
        "demo: train attempt 3 of job 7: node_failure → requeue, after step 45: "
        "n2 stopped responding"
    )
    fields |= {"run": "demo", "stage": "train", "job_id": "7", "nodes": ["n1", "n2"]}
    assert (fields | {"run_dir": str(tmp_path / "demo")}).items() <= got[1].items()


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


def test_each_failure_is_logged_without_the_url(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with webhook(404) as (url, _):
        command = "slurm.notify.command=[/nowhere/tell]"
        sender = notifier(tmp_path, WEBHOOK, f"env.MY_WEBHOOK={url}", command)
        sender.closed(DONE)
        sender.wait()
    sender.started(BEGUN)  # nobody listens there any more
    sender.wait()
    monkeypatch.setenv("MY_WEBHOOK", "https://host/cAnArY with a blank")
    broken = notifier(tmp_path, WEBHOOK)
    broken.started(BEGUN)
    broken.wait()
    refused = "/nowhere/tell cannot be started: No such file or directory"
    faults = [
        *(f"end not delivered: {refused}", f"start not delivered: {refused}"),
        "end not delivered: the webhook in MY_WEBHOOK answered HTTP 404",
        "start not delivered: the webhook in MY_WEBHOOK cannot be reached: Connection refused",
        "start not delivered: the webhook in MY_WEBHOOK has not answered: InvalidURL",
    ]
    assert {record.getMessage() for record in caplog.records} == {
        f"notification of {fault}" for fault in faults
    }
    assert "cAnArY" not in caplog.text


def test_a_webhook_that_hangs_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notify, "TIMEOUT_S", 600.0)
    monkeypatch.setattr(notify, "LAST_WAIT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:  # it never answers
        url = f"env.MY_WEBHOOK=http://127.0.0.1:{server.getsockname()[1]}/services/cAnArY"
        sender = notifier(tmp_path, WEBHOOK, url)
        sender.closed(DONE)
        sender.wait()  # for LAST_WAIT_S at most
        assert sender._sending[0].is_alive()
        assert "not delivered before the end of the supervisor" in caplog.text
        monkeypatch.setattr(notify, "TIMEOUT_S", 0.2)
        monkeypatch.setattr(notify, "LAST_WAIT_S", 600.0)
        sender.started(BEGUN)
        sender._sending[1].join()
        assert "start not delivered: the webhook in MY_WEBHOOK" in caplog.text
        sender.wait()  # returns at once, as one has taken too long
        assert sender._sending[0].is_alive()


def test_a_supervisor_announces_its_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, slurm = RunDir(tmp_path / "runs" / "r"), FakeSlurm(("n1",))
    with webhook() as (url, got):
        overrides = [WEBHOOK, f"env.MY_WEBHOOK={url}", f"cluster.node_local={tmp_path}"]
        overrides += ["data.corpus=none", "cluster.health.enabled=false"]
        config = resolve("tiny_neox", "local", overrides)
        run.path.mkdir(parents=True)
        write_run(render_run(config, 1, run))
        job = slurm.submit(run.script("train").read_text())
        slurm.start(job)
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
        asked = SlurmAllocation(slurm)
        monkeypatch.setattr(supervisor, "current_allocation", lambda _: asked)
        with caplog.at_level(logging.INFO):
            assert supervisor.supervise(run, "train") == 4  # there are no graphs
    assert sorted(message["event"] for message in got) == ["failure", "start"]
    shown = [path for path in run.path.rglob("*") if path.is_file()]
    assert {path.name for path in shown if b"cAnArY" in path.read_bytes()} == {"secrets.json"}
    assert "cAnArY" not in caplog.text


def test_a_url_in_place_of_a_name_and_a_command_in_a_recipe_file_are_refused(
    tmp_path: Path,
) -> None:
    url = "https://hooks.example.com/cAnArY"
    for override in (f"slurm.notify.webhook={url}", f"slurm.notify={{webhook: '{url}'}}"):
        with pytest.raises(ConfigError, match=r"slurm\.notify\.webhook: \*\*\*") as error:
            resolve("tiny_neox", "local", [override])
        assert "--set env.SLACK_WEBHOOK" in str(error.value)
        assert "cAnArY" not in str(error.value)
    recipe = tmp_path / "mine.yaml"
    text = (recipes_dir() / "tiny_neox.yaml").read_text()
    assert "\nslurm:\n" in text
    recipe.write_text(text.replace("\nslurm:\n", "\nslurm:\n  notify: {command: [/tmp/evil]}\n"))
    with pytest.raises(ConfigError, match=r"slurm\.notify\.command .*may not set a program"):
        resolve(str(recipe), "local")
    resolved = resolve(str(recipe), "local", ["slurm.notify.command=[/bin/true]"])
    assert resolved.recipe.slurm.notify.command == ("/bin/true",)


def test_what_cannot_work_is_refused_at_submit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(config: RunConfig) -> str:
        with pytest.raises(ConfigError) as error:
            prepare(RunRequest(config=config, nodes=1, root=tmp_path / "runs", local=True))
        assert not (tmp_path / "runs").exists()
        return str(error.value)

    monkeypatch.delenv("MY_WEBHOOK", raising=False)
    config = resolve("tiny_neox", "local", [WEBHOOK, "slurm.notify.command=[nowhere-tell]"])
    text = refused(config)
    assert "slurm.notify.webhook: MY_WEBHOOK is not set" in text
    assert "slurm.notify.command: nowhere-tell is not a program here" in text
    monkeypatch.setenv("MY_WEBHOOK", "hooks.example.com/cAnArY")
    text = refused(resolve("tiny_neox", "local", [WEBHOOK]))
    assert "MY_WEBHOOK holds no http(s) URL" in text
    assert "cAnArY" not in text
