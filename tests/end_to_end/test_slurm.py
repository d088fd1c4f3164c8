"""The whole way on a real Slurm: two jobs, a node that dies, signals."""

from __future__ import annotations

import json
import subprocess

import pytest
from end_to_end.bench import SLOWLY, Bench
from end_to_end.slurm_runs import Cluster, accounted, lose_node, submit, wait
from report.browser import open_report, require_chromium, require_sound

pytestmark = pytest.mark.slurm
STEPS = 100  # so many that a busy machine can kill a node before the last one


@pytest.fixture
def broken(slurm: Cluster, bench: Bench, inputs: tuple[str, ...]) -> str:
    """A run by torch whose graphs are compiled by a job of their own, and that loses a node."""
    if not (bench.runs / "nodeless").is_dir():
        submit(bench, inputs, "nodeless", f"--set=train.steps={STEPS}")
        bench.wait_for_step("nodeless", 15)
        lose_node(slurm, bench, "nodeless", bench.attempt("nodeless", 0)["nodes"][1])
    return "nodeless"


def test_both_jobs_complete(bench: Bench, broken: str) -> None:
    shown = bench.status(broken)
    assert bench.endings(broken) == [("node_failure", "requeue"), ("done", "finish")]
    jobs = {stage: job["job_id"] for stage, job in shown["jobs"].items()}
    bench.until(lambda: accounted(jobs["train"])[-1] == "COMPLETED", "sacct: train not COMPLETED")
    assert accounted(jobs["precompile"]) == ["COMPLETED"]
    assert shown["step"] == STEPS


def test_every_node_starts_warm(bench: Bench, broken: str) -> None:
    cold = bench.runs / broken / "graphs" / "attempts" / "000" / "workers" / "rank_00000.json"
    assert json.loads(cold.read_text())["cache_misses"] > 0
    for attempt in range(2):
        nodes = bench.attempt(broken, attempt)["nodes"]
        assert len(nodes) == 2
        for rank in range(2):
            folder = bench.runs / broken / "attempts" / f"{attempt:03d}" / "workers"
            warm = json.loads((folder / f"rank_{rank:05d}.json").read_text())
            assert (warm["cache_hits"] > 0, warm["cache_misses"]) == (True, 0)
        # The archive went over sbcast; no node found the precompile node's folder on its own disk
        # but, perhaps, the precompile node itself.
        origins = [bench.node(broken, attempt, node)["cache"] for node in nodes]
        assert origins.count("broadcast") >= 1
        assert "shared" not in origins


def test_node_local_disks_are_apart(bench: Bench, broken: str) -> None:
    script = (bench.runs / broken / "scripts" / "train.sbatch").read_text()
    cache = script.partition("SLURMLLM_CACHE=")[2].split()[0]
    folder = ("bash", "-c", f"ls -d {cache}-*")  # by the processor
    on_host = subprocess.run(folder, capture_output=True, check=False)
    assert on_host.returncode != 0
    nodes = {node for attempt in (0, 1) for node in bench.attempt(broken, attempt)["nodes"]}
    other = next(name for name in ("n1", "n2", "n3", "n4", "n5") if name not in nodes)
    for node, there in ((bench.attempt(broken, 1)["nodes"][1], True), (other, False)):
        found = subprocess.run(
            ["srun", "-Q", "-w", node, "-N1", "-n1", *folder], capture_output=True, check=False
        )
        assert (found.returncode == 0) is there


def test_a_node_that_dies(bench: Bench, broken: str) -> None:
    before, after = (bench.attempt(broken, attempt)["nodes"] for attempt in (0, 1))
    assert bench.attempt(broken, 0)["blamed_nodes"] == [before[1]]
    assert before[1] not in after
    for fresh in set(after) - set(before):
        assert bench.node(broken, 1, fresh)["cache"] == "broadcast"
    # Steps that were made on both sets of nodes.
    overlap = bench.compare_exactly(broken, broken, STEPS)["overlaps"]["b"]
    assert overlap["identical"] or overlap["rows"] == 0  # it may die right after a checkpoint


def test_the_first_node_dies_with_the_supervisor(
    slurm: Cluster, bench: Bench, inputs: tuple[str, ...]
) -> None:
    submit(bench, inputs, "headless", *SLOWLY)
    bench.wait_for_step("headless", 15)
    lost = bench.attempt("headless", 0)["nodes"][0]
    lose_node(slurm, bench, "headless", lost)
    assert bench.endings("headless") == [("node_failure", "requeue"), ("done", "finish")]
    assert "Slurm: NODE_FAIL" in bench.attempt("headless", 0)["evidence"][0]


@pytest.fixture
def signalled(slurm: Cluster, bench: Bench, inputs: tuple[str, ...]) -> str:
    """A run that gets the signal of the time limit twice."""
    if not (bench.runs / "signalled").is_dir():
        job = submit(bench, inputs, "signalled", *SLOWLY)["train"]
        bench.wait_for_step("signalled", 8)
        batch = ["scancel", "--signal=USR1", "--batch", job]  # as --signal=B:USR1
        subprocess.run(batch, check=True)
        bench.wait_for_step("signalled", 25, attempt=1)
        subprocess.run(["scancel", "--signal=USR1", job], check=True)  # to all of the step
        wait(bench, "signalled", "done", "stopped", "cancelled")
    return "signalled"


def test_signals_as_at_the_time_limit(
    bench: Bench, signalled: str, rehearsed_on_slurm: str
) -> None:
    left = ("advance_signal", "requeue")
    assert bench.endings("signalled") == [left, left, ("done", "finish")]
    for number, step in ((0, 8), (1, 25)):
        attempt = bench.attempt("signalled", number)
        assert attempt["checkpoint_after"] == attempt["last_step"] >= step
        assert bench.attempt("signalled", number + 1)["first_step"] == attempt["last_step"] + 1
    assert bench.compare_exactly(rehearsed_on_slurm, "signalled")["overlaps"]["b"]["rows"] == 0


def test_a_requeued_run_is_reported(
    bench: Bench, signalled: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its page in a real browser."""
    require_chromium()
    (run,) = json.loads(bench.look("report", signalled, "--price", "21.5", "--json"))["runs"]
    assert (run["state"], run["steps"], run["planned_steps"]) == ("done", 40, 40)
    assert (run["nodes"], run["restarts"], run["recipe"]) == (2, 2, "tiny_neox")
    assert run["utilization"]["node_hours"] > 0
    assert run["usd"] == pytest.approx(21.5 * run["utilization"]["node_hours"])
    assert run["seq_per_s_first_500"] > 0
    assert run["tokens"] == 40 * 8 * 128
    assert run["checkpoints"][-1]["step"] == 40
    assert run["versions"]["python"]

    work = tmp_path_factory.mktemp("browser")
    opened = open_report(bench.runs / signalled / "reports" / "report.html", work)
    require_sound(opened)
    plots = opened.seen["plots"]
    assert {"loss", "grad_norm", "lr", "seq_per_s", "parts-0", "utilization"} <= set(plots)
    assert "attempt 0 ended: advance_signal" in plots["loss"]["hover"]
    assert plots["lr"]["points"] >= 1


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
    bench.look("cancel", "fetched")
    wait(bench, "fetched", "cancelled", "done", "stopped")
