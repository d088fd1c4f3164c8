"""MLflow's own server, with SQLite, and a run that is requeued; needs mlflow (`make trackers`)."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from end_to_end.bench import SMALL, Bench
from train.gang import make_data
from training_rows import make_row, make_rows, write_rows

from slurmllm.analysis.track.sync import sync
from slurmllm.core.config.load import save
from slurmllm.core.config.resolve import RunConfig, resolve
from slurmllm.core.metrics.source import read_run
from slurmllm.core.run.rundir import RunDir

pytest.importorskip("mlflow.server", reason="mlflow is not installed: `make trackers` runs this")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path / "runs") as bench:
        yield bench


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)),
        *("--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--workers", "1"),
        *("--artifacts-destination", str(folder / "artifacts")),
    ]
    with (folder / "log").open("wb") as output:
        where: Any = {"cwd": folder, "stdout": output, "stderr": output, "start_new_session": True}
        environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
        process = subprocess.Popen(command, env=environment, **where)
    uri = f"http://127.0.0.1:{port}"
    try:

        def answers() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            try:
                with urllib.request.urlopen(f"{uri}/health", timeout=5):
                    return True
            except OSError:
                return False

        Bench(folder).until(answers, "mlflow's server does not answer", every_s=0.2)
        yield uri
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def runs_of(uri: str, name: str) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("slurmllm")
    query = f"tags.`mlflow.runName` = '{name}'"
    return list(client.search_runs([experiment.experiment_id], query))


def curve_of(uri: str, run_id: str, tag: str = "train/loss") -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    history = MlflowClient(tracking_uri=uri).get_metric_history(run_id, tag)
    return [
        (metric.step, metric.value)
        for metric in sorted(history, key=lambda m: (m.step, m.timestamp))
    ]


def test_one_curve_of_one_run_after_a_requeue(bench: Bench, server: str, tmp_path: Path) -> None:
    corpus, tokenizer = make_data(tmp_path)
    settings = (
        *("backend=rehearsal", "train.compile=false", "model.vocab_size=512"),
        *("env.SLURMLLM_REHEARSAL_STEP_S=0.1", f"data.corpus={corpus}", "trackers=[mlflow]"),
        *(f"data.tokenizer={tokenizer}", f"cluster.trackers.tracking_uri={server}"),
    )
    submit = ("submit", "tiny_neox", "--nodes=2", "--local", "--name=r")
    process = bench.start(*submit, *SMALL, *settings)
    bench.wait_for_step("r", 23)
    os.kill(bench.node("r", 0, "local1")["pids"]["1"], signal.SIGKILL)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert [ending for ending, _ in bench.endings("r")] == ["node_failure", "done"]
    log = (bench.runs / "r" / "logs" / "track.log").read_text()
    if "may lack the last steps" in output:  # on a machine with other work
        log += bench.call("track", "sync", "r")
    (tracked,) = runs_of(server, "r")
    merged = read_run(bench.runs / "r")
    rows = zip(merged.steps.tolist(), merged.columns["loss"].tolist(), strict=True)
    assert curve_of(server, tracked.info.run_id) == list(rows)
    assert merged.steps.tolist() == list(range(1, 41))
    assert {value for _, value in curve_of(server, tracked.info.run_id, "run/attempt")} <= {0, 1}
    assert tracked.info.status == "FINISHED", log
    assert tracked.data.params["optim.lr"]
    assert tracked.data.tags["slurmllm.run_dir"] == str(bench.runs / "r")


def config_of(uri: str) -> RunConfig:
    overrides = ["trackers=[mlflow]", f"cluster.trackers.tracking_uri={uri}"]
    return resolve("tiny_neox", "local", overrides)


def made_run(tmp_path: Path, uri: str, name: str) -> RunDir:
    run = RunDir(tmp_path / "runs" / name)
    run.logs.mkdir(parents=True)
    save(config_of(uri), run)
    return run


def test_a_process_that_was_killed_before_it_had_recorded(server: str, tmp_path: Path) -> None:
    run = made_run(tmp_path, server, "killed")
    config = config_of(server)
    write_rows(run.metrics(0), make_rows(1, 30))
    (session,) = sync(run, config, ("mlflow",))
    session.record.model_copy(update={"last_step": -1}).save(run.tracker("mlflow"))
    write_rows(run.metrics(0), [*make_rows(1, 30), make_row(31, loss=float("nan"))])
    sync(run, config, ("mlflow",))
    (tracked,) = runs_of(server, "killed")
    curve = curve_of(server, tracked.info.run_id)
    assert curve[:30] == [(row["step"], row["loss"]) for row in make_rows(1, 30)]
    assert len(curve) == 31
    assert curve[30][1] != curve[30][1]


def test_without_a_server_the_run_ends_well_and_nothing_is_lost(bench: Bench, server: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
    run = made_run(bench.runs.parent, nowhere, "offline")
    write_rows(run.metrics(0), make_rows(1, 30))
    shown = bench.call("track", "sync", "offline", code=3)
    assert "mlflow: MlflowException: API request to http://127.0.0.1:" in shown
    assert "nothing is lost: `slurmllm track sync offline` sends what is missing" in shown
    save(config_of(server), run)
    assert f"mlflow: 30 steps sent, up to 30; {server}/#/" in bench.call("track", "sync", "offline")
    assert len(runs_of(server, "offline")) == 1
