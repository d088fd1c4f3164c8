"""A sweep on a real Slurm: two of six runs at a time on four nodes, one cancelled meanwhile."""

from __future__ import annotations

import json
from itertools import accumulate, pairwise

import pytest
from end_to_end.bench import SLOWLY, SMALL, Bench
from end_to_end.slurm_runs import Cluster

from slurmllm.slurm.client import SlurmClient, to_unix

pytestmark = pytest.mark.slurm


def test_two_at_a_time_and_one_cancelled(
    slurm: Cluster, bench: Bench, inputs: tuple[str, ...]
) -> None:
    arguments = (
        "submit",
        "tiny_neox",
        "--nodes=2",
        "--name=grid",
        *SMALL,
        *SLOWLY,
        "--set=cluster.health.enabled=false",
        *inputs,
        "--exclude=n5",
        "--set=train.steps=20",
        "--sweep=optim.lr=3e-4,3e-3",
        "--sweep=train.seed=1,2,3",
        "--max-running=2",
        "--precompile=always",  # other runs here may have the same graphs
    )
    sent = json.loads(bench.call(*arguments, "--json"))
    jobs = {run["run"]: run["train_job"] for run in sent["runs"]}
    (graphs,) = sent["graphs"]
    assert graphs["precompile_job"] is not None
    cancelled = "grid-lr3e-4-seed3"  # the second of its lane

    def training() -> bool:
        metrics = bench.runs / "grid" / cancelled / "metrics" / "attempt_000.jsonl"
        return metrics.is_file() and '"step":3,' in metrics.read_text()

    bench.until(training, f"{cancelled} never trained")
    bench.look("cancel", cancelled)

    def ended() -> bool:
        return bench.status("grid")["states"] == {"done": 5, "cancelled": 1}

    bench.until(lambda: all(bench.ended(f"grid/{run}") for run in jobs), "runs never ended")
    bench.until(ended, "the sweep never ended", every_s=2.0)
    rows = SlurmClient().accounting(*jobs.values(), graphs["precompile_job"])
    trained = [row for row in rows if row.job_id in jobs.values()]
    starts = [(to_unix(row.start) or 0.0, 1) for row in trained]
    ends = [(to_unix(row.end) or 0.0, -1) for row in trained]
    running = list(accumulate(change for _, change in sorted([*starts, *ends])))
    assert max(running) <= 2  # one, while a node of the four is down
    # No run compiled its own graphs, and none but the cancelled one was stopped by it.
    assert not list((bench.runs / "grid").glob("grid-lr*/graphs/attempts"))
    table = json.loads(bench.look("compare", "grid", "--json"))
    losses = [run["loss"] for run in table["runs"] if run["state"] == "done"]
    assert all(one <= other for one, other in pairwise(losses))
    assert table["runs"][-1]["run"] == cancelled
    report = bench.look("report", "grid")
    assert "report.html" in report
    assert (bench.runs / "grid" / "reports" / "report.html").is_file()
