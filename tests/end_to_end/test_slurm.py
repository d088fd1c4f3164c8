"""The whole way on a real Slurm: two jobs, a node that dies, signals."""

from __future__ import annotations

import json
import subprocess

import pytest
from end_to_end.bench import SLOWLY, Bench
from end_to_end.slurm_runs import Cluster, accounted, lose_node, submit, wait

pytestmark = pytest.mark.slurm


@pytest.fixture
def unbroken(slurm: Cluster, bench: Bench, inputs: tuple[str, ...]) -> str:
    if not (bench.runs / "whole").is_dir():
        submit(bench, inputs, "whole")
        wait(bench, "whole", "done", "stopped", "interrupted")
    return "whole"


def test_both_jobs_complete(bench: Bench, unbroken: str) -> None:
    shown = bench.status(unbroken)
    assert bench.endings(unbroken) == [("done", "finish")]
    jobs = {stage: job["job_id"] for stage, job in shown["jobs"].items()}
    bench.until(lambda: accounted(jobs["train"]) == ["COMPLETED"], "sacct: train not COMPLETED")
    assert accounted(jobs["precompile"]) == ["COMPLETED"]
    assert shown["step"] == 40


def test_every_node_starts_warm(bench: Bench, unbroken: str) -> None:
    nodes = bench.attempt(unbroken, 0)["nodes"]
    first = bench.first_steps(unbroken)
    assert sorted(first) == sorted(nodes)
    assert len(nodes) == 2
    assert all(step["cache_hits"] > 0 and step["cache_misses"] == 0 for step in first.values())
    precompile = bench.runs / unbroken / "graphs" / "attempts" / "000" / "workers"
    cold = json.loads((precompile / "rank_00000.json").read_text())
    assert cold["cache_misses"] > 0
    origins = [bench.node(unbroken, 0, node)["cache"] for node in nodes]
    # The archive went over sbcast; no node found the precompile node's folder on its own disk
    # but, perhaps, the precompile node itself.
    assert origins.count("broadcast") >= 1
    assert "shared" not in origins


def test_node_local_disks_are_apart(slurm: Cluster, bench: Bench, unbroken: str) -> None:
    script = (bench.runs / unbroken / "scripts" / "train.sbatch").read_text()
    cache = script.partition("SLURMLLM_CACHE=")[2].split()[0]
    folder = ("bash", "-c", f"ls -d {cache}-*")  # by the processor
    on_host = subprocess.run(folder, capture_output=True, check=False)
    assert on_host.returncode != 0
    nodes = bench.attempt(unbroken, 0)["nodes"]
    other = next(name for name in ("n1", "n2", "n3", "n4", "n5") if name not in nodes)
    for node, there in ((nodes[1], True), (other, False)):
        found = subprocess.run(
            ["srun", "-Q", "-w", node, "-N1", "-n1", *folder], capture_output=True, check=False
        )
        assert (found.returncode == 0) is there


def test_a_node_that_dies(
    slurm: Cluster, bench: Bench, inputs: tuple[str, ...], unbroken: str
) -> None:
    job = submit(bench, inputs, "nodeless")["train"]
    bench.wait_for_step("nodeless", 15)
    before = bench.attempt("nodeless", 0)["nodes"]
    lost = before[1]
    lose_node(slurm, bench, "nodeless", lost)
    assert bench.endings("nodeless") == [("node_failure", "requeue"), ("done", "finish")]
    assert bench.attempt("nodeless", 0)["blamed_nodes"] == [lost]
    after = bench.attempt("nodeless", 1)["nodes"]
    assert lost not in after
    assert len(after) == len(before)
    first = bench.first_steps("nodeless")
    for fresh in set(after) - set(before):
        assert first[fresh]["cache_misses"] == 0
        assert first[fresh]["cache_hits"] > 0
        assert bench.node("nodeless", 1, fresh)["cache"] == "broadcast"
    overlap = bench.compare_exactly(unbroken, "nodeless")["overlaps"]["b"]
    assert overlap["identical"] or overlap["rows"] == 0  # it may die right after a checkpoint
    bench.until(lambda: accounted(job)[-1] == "COMPLETED", "sacct: not COMPLETED")


def test_the_first_node_dies_with_the_supervisor(
    slurm: Cluster, bench: Bench, inputs: tuple[str, ...]
) -> None:
    submit(bench, inputs, "headless", *SLOWLY)
    bench.wait_for_step("headless", 15)
    lost = bench.attempt("headless", 0)["nodes"][0]
    lose_node(slurm, bench, "headless", lost)
    assert bench.endings("headless") == [("node_failure", "requeue"), ("done", "finish")]
    assert "Slurm: NODE_FAIL" in bench.attempt("headless", 0)["evidence"][0]


def test_signals_as_at_the_time_limit(
    bench: Bench, inputs: tuple[str, ...], rehearsed_on_slurm: str
) -> None:
    job = submit(bench, inputs, "signalled", *SLOWLY)["train"]
    bench.wait_for_step("signalled", 8)
    subprocess.run(["scancel", "--signal=USR1", "--batch", job], check=True)  # as --signal=B:USR1
    bench.wait_for_step("signalled", 25, attempt=1)
    subprocess.run(["scancel", "--signal=USR1", job], check=True)  # to every process of the step
    wait(bench, "signalled", "done", "stopped", "cancelled")
    left = ("advance_signal", "requeue")
    assert bench.endings("signalled") == [left, left, ("done", "finish")]
    for number, step in ((0, 8), (1, 25)):
        attempt = bench.attempt("signalled", number)
        assert attempt["checkpoint_after"] == attempt["last_step"] >= step
        assert bench.attempt("signalled", number + 1)["first_step"] == attempt["last_step"] + 1
    assert bench.compare_exactly(rehearsed_on_slurm, "signalled")["overlaps"]["b"]["rows"] == 0


def test_a_log_is_fetched_from_the_disk_of_its_node(
    slurm: Cluster, bench: Bench, inputs: tuple[str, ...]
) -> None:
    submit(
        bench,
        inputs,
        "fetched",
        "--set=backend=rehearsal",
        "--set=env.SLURMLLM_LOG=debug",
        "--set=env.SLURMLLM_REHEARSAL_STEP_S=1.0",
    )
    bench.wait_for_step("fetched", 2)
    path = bench.runs / "fetched" / "logs" / "train_000" / "rank_00001.log"
    assert not path.exists()
    text = bench.call("logs", "fetched", "--rank", "1")
    assert "asking the nodes of train attempt 0" in text
    assert "starting from step 0" in text.partition("asking")[2]
    assert path.is_file()
    bench.call("cancel", "fetched")
    wait(bench, "fetched", "cancelled", "done", "stopped")
