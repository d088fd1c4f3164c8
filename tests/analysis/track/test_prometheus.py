"""The page that Prometheus reads: its figures, its parsers, its port and its file."""

import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from command_line import call, call_json, printed, refused
from made_records import make_run, save_manifest, save_submission
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from reported_runs import make_reported_run
from training_rows import make_rows, write_rows

from slurmllm.analysis.status.runs import supervised_state
from slurmllm.analysis.track import exporter
from slurmllm.analysis.track.prometheus import Page
from slurmllm.core.config.load import load
from slurmllm.core.config.resolve import recipes_dir
from slurmllm.core.run.records import ExcludedNode, ExcludedNodes, SlowRank, SlowRanksRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.supervise.side_processes import SideProcesses

TOKEN = "0123456789abcdef0123"
DASHBOARD = recipes_dir().parent / "grafana" / "slurmllm.json"
Samples = Mapping[tuple[str, str], float]  # (name, value of the further label) → value
OPEN: dict[str, Any] = {"class": None, "action": None, "ended_at": None, "checkpoint_after": None}


def parse(page: str) -> Samples:
    samples = {}
    for family in text_string_to_metric_families(page):
        assert family.documentation.endswith(".")
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run"), sample
            assert labels.pop("cluster"), sample
            assert labels.pop("user"), sample
            further = labels.get("job_id") or "".join(labels.values())
            samples[sample.name.removeprefix("slurmllm_"), further] = sample.value
    return samples


@pytest.fixture
def training(tmp_path: Path) -> RunDir:
    """A run on trn1 whose second attempt trains."""
    run = make_reported_run(RunDir(tmp_path / "runs" / "r"), job_id="7", **OPEN)
    save_submission(run, nodes=4, train_job="7")
    node = ExcludedNode(node="n9", reason="Xid 79", since=time.time(), until=time.time() + 60)
    ExcludedNodes(nodes=(node,)).save(run.excluded)
    slow = SlowRank(rank=3, node="n0", ratio=1.31, peers=128, since=0.0)
    SlowRanksRecord(ranks=(slow,)).save(run.attempt("train", 1).slow_ranks)
    return run


def page_of(run: RunDir) -> str:
    page = Page(run, load(run.config))
    page.update(supervised_state(run))
    return generate_latest(page).decode()


def test_the_figures_are_those_of_status_and_report(training: RunDir) -> None:
    samples = parse(page_of(training))
    status = call_json("status", training.path)
    (report,) = call_json("report", training.path)["runs"]
    assert samples["run_state", "training"] == 1
    assert sum(value for (name, _), value in samples.items() if name == "run_state") == 1
    assert samples["run_info", "7"] == 1
    assert samples["last_step", ""] == status["step"] == 60
    assert samples["loss", ""] == status["loss"] == report["loss"]
    assert samples["tokens_per_second", ""] == status["tokens_per_s"]
    assert samples["trained_tokens", ""] == status["tokens"]
    assert samples["last_step_timestamp_seconds", ""] == status["metrics"]["time"]
    restarts = [value for (name, _), value in samples.items() if name == "restarts_total"]
    assert sum(restarts) == status["restarts"] == samples["restarts_total", "node_failure"]
    (lost,) = report["endings"]
    assert samples["lost_node_seconds_total", lost["class"]] == lost["node_hours"] * 3600 > 0
    assert samples["excluded_nodes", ""] == len(status["excluded"]) == 1
    assert samples["excluded_node_info", "n9"] == 1
    assert samples["attempt", ""] == 1
    assert samples["slow_rank_ratio", "n03"] == 1.31
    # The report's is of the mean over all steps; here, all take as long.
    rate = report
    assert samples["model_flops_utilization_ratio", ""] == pytest.approx(rate["mfu"])
    assert rate["mfu"] > 0.01


def test_ended_damaged_and_new_runs(tmp_path: Path) -> None:
    run = make_reported_run(RunDir(tmp_path / "r"))
    save_submission(run, train_job="7")
    samples = parse(printed(call("track", "prometheus", run.path)))
    assert samples["run_state", "done"] == 1
    assert ("tokens_per_second", "") not in samples
    assert ("model_flops_utilization_ratio", "") not in samples
    run.jobs.write_text("{")
    assert parse(page_of(run))["run_state", "damaged"] == 1
    samples = parse(page_of(make_run(tmp_path / "new")))
    assert samples["last_step", ""] == 0
    assert ("loss", "") not in samples
    assert not any(value for (name, _), value in samples.items() if name == "restarts_total")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_no_fault(training: RunDir) -> None:
    command = ["promtool", "check", "metrics"]
    done = subprocess.run(command, input=page_of(training), capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_dashboard_asks_for_metrics_that_exist(training: RunDir) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [v["definition"] for v in dashboard["templating"]["list"] if "definition" in v]
    asked = {name for text in expressions for name in re.findall(r"slurmllm_\w+", text)}
    save_manifest(training, 30)
    exist = {f"slurmllm_{name}" for name, _ in parse(page_of(training))}
    assert len(asked) > 10
    assert asked <= exist


def get(port: int, token: str | None = None, path: str = "/metrics") -> tuple[int, str]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_client_that_sends_no_whole_request_delays_nobody() -> None:
    server = exporter.serve(CollectorRegistry(), port := free_port(), None)
    assert server.server_address == ("127.0.0.1", port)
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
    began = time.monotonic()
    assert get(port) == (200, "")
    assert time.monotonic() - began < exporter._Handler.timeout
    for connection in silent:
        connection.close()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("content", "mode", "fault"),
    [
        (None, 0o600, "it cannot be read: No such file or directory; `(umask 077; openssl"),
        (TOKEN, 0o644, "others may read or write it; `chmod 600"),
        ("short", 0o600, "it has no token (16 characters or more"),
    ],
)
def test_submit_refuses_a_token_file(
    tmp_path: Path, content: str | None, mode: int, fault: str
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    settings = f"cluster.metrics={{port: 9464, token_file: {path}}}"
    arguments = ("submit", "tiny_neox", "--local", "--data", "builtin", "--set", settings)
    message = refused(call(*arguments, "--runs-dir", tmp_path / "runs"))
    assert f"cluster.metrics.token_file: {path}: {fault}" in message
    assert content is None or content not in message


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_exporter_serves_and_writes_metrics_and_leaves_nothing(tmp_path: Path) -> None:
    token, folder, port = tmp_path / "token", tmp_path / "collector", free_port()
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)
    folder.mkdir()
    metrics = f"cluster.metrics={{port: {port}, token_file: {token}, textfile: {folder}}}"
    run = make_run(tmp_path / "r", metrics)
    write_rows(run.metrics(0), make_rows(1, 3))
    children = SideProcesses(run, load(run.config))
    run.logs.mkdir()
    children.start("precompile")
    assert not run.exporter_log.exists()
    children.start("train")
    until(lambda: bool([*folder.glob("*-r.prom")]) or not is_alive(children))
    (path,) = folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o644
    assert parse(path.read_text())["last_step", ""] == 3
    for wrong in (None, TOKEN[:-1], TOKEN + "0", "", "é"):
        assert get(port, wrong)[0] == 401
    assert get(port, TOKEN) == (200, path.read_text())
    assert TOKEN not in run.config.read_text()
    children.stop(requeued=False)
    assert [*folder.iterdir()] == []
    with pytest.raises(OSError, match="refused"):
        get(port, TOKEN)
    assert run.exporter_log.read_text() == ""


def is_alive(children: SideProcesses) -> bool:
    return children.children[children.run.exporter_log].poll() is None


def test_failures_are_warnings_and_are_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "INTERVAL_S", 0.1)
    folder, stop = tmp_path / "absent", threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = int(other.getsockname()[1])
        run = make_run(tmp_path / "r", f"cluster.metrics={{port: {port}, textfile: {folder}}}")
        exporting = threading.Thread(target=exporter.export, args=(run, load(run.config), stop))
        exporting.start()
        until(lambda: "Address already in use" in caplog.text)
        until(lambda: "No such file or directory" in caplog.text)
        time.sleep(0.5)
        assert not folder.exists()
    folder.mkdir()
    until(lambda: bool([*folder.iterdir()]))
    until(lambda: serves(port))
    assert get(port)[1] == next(folder.iterdir()).read_text()
    stop.set()
    exporting.join()
    assert not [*folder.iterdir()]
    assert caplog.text.count("Address already in use") == 1
    assert caplog.text.count("No such file or directory") == 1


def serves(port: int) -> bool:
    with suppress(OSError):
        return get(port)[0] == 200
    return False
