"""What `submit` sends to a real Slurm: the README's first line and a sweep."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from data.corpus.data_server import data_server
from data.corpus.published import mirror_configuration, publish_wikipedia
from end_to_end.bench import SLOWLY, Bench
from end_to_end.scenes import SceneBench, scene

from slurmllm.core.slurm.client import SlurmClient, to_unix

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).resolve().parent.parent.parent
# A node of the development cluster has one CPU, so one worker; four of them are the pipeline.
REHEARSED = (
    "--cluster=local",
    "--set=backend=rehearsal",
    "--set=env.SLURMLLM_REHEARSAL_STEP_S=0.05",
    "--set=parallel.tensor=1",
    "--set=parallel.pipeline=4",
    "--set=train.micro_batch=1",
    "--set=parallel.sequence=false",
    "--set=train.global_batch=8",
    "--set=model.seq_len=128",
    "--set=train.steps=12",
    "--set=optim.warmup_steps=2",
    "--set=checkpoint.every_steps=6",
)


@scene()
def test_neox_20b_on_four_nodes_from_a_fresh_copy(stage: SceneBench) -> None:
    """The data come from a server, the steps are rehearsed."""
    folder = stage.runs.parent / "neox"
    listing = ["git", "ls-files", "-co", "--exclude-standard", "slurmllm", "configs", "sbatch"]
    for name in subprocess.check_output(listing, cwd=ROOT, text=True).splitlines():
        (folder / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / "clone" / name)
    with data_server() as server, Bench(folder / "runs") as bench:
        publish_wikipedia(server, folder / "published")
        # As a connection does it that breaks off in the middle.
        server.faults["wiki/my-gpt2_text_document.bin"] = {"break_at": [None, 5000, None]}
        user = mirror_configuration(server, folder / "user" / "config.yaml")
        env = {"PYTHONPATH": f"{folder}/clone", "SLURMLLM_CONFIG": str(user)}
        line = ("submit", "neox_20b", "--nodes=4", "--name=neox", *REHEARSED)
        assert "slurmllm data fetch wikipedia_gpt2" in bench.call(*line, code=2, env=env)
        assert "wikipedia_gpt2: 5 files" in bench.call(*line, "--fetch", "--json", env=env)
        assert len(server.asked("wiki/my-gpt2_text_document.bin")) == 3
        bench.is_over = stage.is_over
        bench.wait("neox", "done", "stopped")
        shown = bench.status("neox")
    assert (shown["state"], shown["step"], shown["nodes"]) == ("done", 12, 4)
    assert shown["trial"] is False
    data = (bench.runs / "neox" / "data.json").read_text()
    assert str(bench.runs / ".data" / "wikipedia_gpt2" / "my-gpt2_text_document") in data
    script = [sys.executable, "-P", "-c", "import slurmllm; print(slurmllm.__file__)"]
    path = subprocess.check_output(script, env={**os.environ, **env}, text=True)
    assert path.startswith(str(folder / "clone"))


@scene(order=0)
def test_a_sweep_of_two_at_a_time_of_which_one_is_cancelled(stage: SceneBench) -> None:
    shorter = ("--set=train.steps=24", "--precompile=always")  # others may have the same graphs
    sweep = ("--sweep=optim.lr=3e-4,3e-3", "--sweep=train.seed=1,2", "--max-running=2")
    arguments = (*stage.line("grid"), *SLOWLY, *shorter, *sweep)
    sent = json.loads(stage.look(*arguments, "--json"))
    jobs = {run["run"]: run["train_job"] for run in sent["runs"]}
    (graphs,) = sent["graphs"]
    assert graphs["precompile_job"] is not None
    cancelled = "grid-lr3e-4-seed1"  # the first of its lane
    metrics = stage.runs / "grid" / cancelled / "metrics" / "attempt_000.jsonl"
    stage.until(
        lambda: metrics.is_file() and '"step":3,' in metrics.read_text(),
        f"{cancelled} never trained",
    )
    stage.look("cancel", cancelled)
    stage.until(lambda: all(stage.ended(f"grid/{run}") for run in jobs), "runs never ended")
    states = {"done": 3, "cancelled": 1}
    stage.until(lambda: stage.status("grid")["states"] == states, "no end", every_s=2.0)
    rows = SlurmClient().accounting(*jobs.values(), graphs["precompile_job"])
    trained = [row for row in rows if row.job_id in jobs.values()]
    starts = [(to_unix(row.start) or 0.0, 1) for row in trained]
    ends = [(to_unix(row.end) or 0.0, -1) for row in trained]
    running = list(accumulate(change for _, change in sorted([*starts, *ends])))
    assert max(running) <= 2
    # No run compiled its own graphs, and none but the cancelled one was stopped by it.
    assert not list((stage.runs / "grid").glob("grid-lr*/graphs/attempts"))
    table = json.loads(stage.look("compare", "grid", "--json"))
    losses = [run["loss"] for run in table["runs"] if run["state"] == "done"]
    assert all(better <= worse for better, worse in pairwise(losses))
    assert table["runs"][-1]["run"] == cancelled
    assert "report.html" in stage.look("report", "grid")
