"""The whole way on a real Slurm: two jobs, a node that dies, signals, drills, evaluation."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest
from end_to_end.bench import SLOWLY
from end_to_end.scenes import SceneBench, accounted, scene, worker_of

pytestmark = pytest.mark.slurm
STEPS = 100  # so many that a busy machine can kill a node before the last one
AGAIN = [("node_failure", "chain"), ("done", "finish")]


@scene(order=0)
def test_a_run_by_torch_that_loses_a_node(stage: SceneBench) -> None:
    """Its graphs are compiled by a job of their own; its checkpoints are evaluated by an array."""
    name = "nodeless"
    stage.submit(name, f"--set=train.steps={STEPS}", "--set=data.validation=0.05")
    stage.wait_for_step(name, 15)
    stage.call("logs", name, "--rank=1")  # by srun on its node: nothing is collected yet
    assert not (stage.runs / name / "logs" / "train_000").exists()
    stage.lose_node(name, stage.attempt(name, 0)["nodes"][1])
    shown = stage.status(name)
    assert (stage.endings(name), shown["step"]) == (AGAIN, STEPS)
    jobs = {stage_name: job["job_id"] for stage_name, job in shown["jobs"].items()}
    stage.until(lambda: accounted(jobs["train"])[-1] == "COMPLETED", "sacct: train not COMPLETED")
    assert accounted(jobs["precompile"]) == ["COMPLETED"]
    before, after = (stage.attempt(name, number)["nodes"] for number in (0, 1))
    assert stage.attempt(name, 0)["blamed_nodes"] == [before[1]]
    assert before[1] not in after
    for node in set(after) - set(before):
        assert stage.node(name, 1, node)["cache"] == "broadcast"
    # Steps that were made on both sets of nodes.
    overlap = stage.compare_exactly(name, name, STEPS)["overlaps"]["b"]
    assert overlap["identical"] or overlap["rows"] == 0  # it may die right after a checkpoint
    check_warm_starts(stage, name)
    check_disks(stage, name)
    check_evaluation(stage, name)


def check_warm_starts(stage: SceneBench, name: str) -> None:
    cold = stage.runs / name / "graphs" / "attempts" / "000" / "workers" / "rank_00000.json"
    assert json.loads(cold.read_text())["cache_misses"] > 0
    for attempt in range(2):
        for rank in range(2):
            folder = stage.runs / name / "attempts" / f"{attempt:03d}" / "workers"
            warm = json.loads((folder / f"rank_{rank:05d}.json").read_text())
            assert (warm["cache_hits"] > 0, warm["cache_misses"]) == (True, 0)
        # The archive went over sbcast; no node found the precompile node's folder on its own disk
        # but, perhaps, the precompile node itself.
        nodes = stage.attempt(name, attempt)["nodes"]
        origins = [stage.node(name, attempt, node)["cache"] for node in nodes]
        assert origins.count("broadcast") >= 1
        assert "shared" not in origins


def check_disks(stage: SceneBench, name: str) -> None:
    """A node has a cache on its own disk; one that neither compiled nor trained has none."""
    script = (stage.runs / name / "scripts" / "train.sbatch").read_text()
    cache = script.partition("SLURMLLM_CACHE=")[2].split()[0]
    folder = ("bash", "-c", f"ls -d {cache}-*")  # by the processor
    assert subprocess.run(folder, capture_output=True).returncode != 0
    compiled = stage.status(name)["jobs"]["precompile"]["job_id"]
    sacct = ["sacct", "-nXPo", "NodeList", "-j", str(compiled)]
    nodes = {subprocess.run(sacct, capture_output=True, text=True, check=True).stdout.strip()}
    nodes |= {node for attempt in (0, 1) for node in stage.attempt(name, attempt)["nodes"]}
    other = next(node for node in ("n3", "n4", "n5", "n6", "n7") if node not in nodes)
    # Not one that another scene heals with an empty disk.
    trained = [node for node in stage.attempt(name, 1)["nodes"] if node != "n16"]
    for node, has_folder in ((trained[-1], True), (other, False)):
        srun = ["srun", "-Q", "-w", node, "-N1", "-n1", *folder]
        assert (subprocess.run(srun, capture_output=True).returncode == 0) is has_folder


def check_evaluation(stage: SceneBench, name: str) -> None:
    pytest.importorskip("lm_eval")
    tasks = ("--suite=smoke", "--task=smoke_choice", "--task=validation", "--limit=2", "--json")
    evaluate = ("evaluate", name, "--checkpoint=all", *tasks)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    output = stage.call(*evaluate, "--slurm", "--jobs=2", env=offline)
    scores = json.loads(output[output.index("{") :])
    assert [checkpoint["step"] for checkpoint in scores["checkpoints"]] == [80, 90, 100]
    assert (scores["evaluated"], scores["cached"], scores["failed"]) == (6, 0, [])
    array = output.partition("Slurm job ")[2].partition(":")[0]
    accounting = ["sacct", "-n", "-X", "-P", "-o", "JobID,State", "-j", array]

    def ended() -> list[str]:
        done = subprocess.run(accounting, capture_output=True, text=True, check=True)
        return sorted(done.stdout.split())

    jobs = [f"{array}_{index}|COMPLETED" for index in range(3)]
    stage.until(lambda: ended() == jobs, "sacct: the array's jobs not COMPLETED", every_s=1)
    assert json.loads(stage.call(*evaluate, env=offline))["cached"] == 6


@scene()
def test_the_first_node_dies_with_the_supervisor(stage: SceneBench) -> None:
    stage.submit("headless", *SLOWLY)
    stage.wait_for_step("headless", 15)
    stage.lose_node("headless", stage.attempt("headless", 0)["nodes"][0])
    assert stage.endings("headless") == [("node_failure", "requeue"), AGAIN[1]]
    assert "Slurm: NODE_FAIL" in stage.attempt("headless", 0)["evidence"][0]


@scene()
def test_signals_as_at_the_time_limit(stage: SceneBench) -> None:
    job = stage.submit("signalled", *SLOWLY)
    stage.wait_for_step("signalled", 8)
    subprocess.run(["scancel", "--signal=USR1", "--batch", job], check=True)  # as --signal=B:USR1
    stage.until((stage.runs / "signalled/attempts/001").is_dir, "not requeued")
    second = stage.attempt("signalled", 0)["last_step"] + 4
    stage.wait_for_step("signalled", second, attempt=1)
    subprocess.run(["scancel", "--signal=USR1", job], check=True)  # to all of the step
    stage.wait("signalled", "done", "stopped", "cancelled")
    left = ("advance_signal", "requeue")
    assert stage.endings("signalled") == [left, left, ("done", "finish")]
    for number, step in ((0, 8), (1, second)):
        attempt = stage.attempt("signalled", number)
        assert attempt["checkpoint_after"] == attempt["last_step"] >= step
        assert stage.attempt("signalled", number + 1)["first_step"] == attempt["last_step"] + 1
    overlaps = stage.compare_exactly(stage.rehearsed(), "signalled")["overlaps"]
    assert overlaps["b"]["rows"] == 0
    (run,) = json.loads(stage.look("report", "signalled", "--price", "21.5", "--json"))["runs"]
    assert (run["state"], run["steps"], run["planned_steps"]) == ("done", 40, 40)
    assert (run["nodes"], run["restarts"], run["recipe"]) == (2, 2, "tiny_neox")
    assert run["usd"] == pytest.approx(21.5 * run["utilization"]["node_hours"])
    assert run["tokens"] == 40 * 8 * 128
    assert run["checkpoints"][-1]["step"] == 40


@scene()
def test_a_crash_stops_the_run_and_logs_come_from_the_nodes_disk(stage: SceneBench) -> None:
    endless = ("--set=train.steps=100000", "--set=env.SLURMLLM_LOG=debug")
    job = stage.submit("crashed", *SLOWLY, *endless)
    stage.wait_for_step("crashed", 2)
    path = stage.runs / "crashed" / "logs" / "train_000" / "rank_00001.log"
    assert not path.exists()
    text = stage.call("logs", "crashed", "--rank", "1", env={})
    assert "starting from step 0" in text  # read on the node: nothing is collected yet
    assert not path.exists()
    node = stage.attempt("crashed", 0)["nodes"][1]
    os.kill(worker_of(stage.runs / "crashed", rank=1), signal.SIGSEGV)
    stage.wait("crashed", "stopped")
    assert stage.endings("crashed") == [("code_error", "stop")]
    assert f"on {node} crashed with SIGSEGV" in stage.attempt("crashed", 0)["evidence"][0]
    assert "starting from step 0" in path.read_text()
    stage.until(lambda: accounted(job) == ["FAILED"], "sacct: not FAILED")


@scene()
def test_drills_by_an_ordinary_users_means(stage: SceneBench) -> None:
    """Nodes are lost by srun into the job."""
    text = stage.call("drill", stage.rehearsed(), "--kinds=node,first_node", "--json", "--keep")
    shown = json.loads(text[text.index("{") :])
    assert (shown["passed"], shown["own_reference"]) == (True, True), shown
    first, second = shown["drills"]
    assert (first["kind"], second["kind"]) == ("node", "first_node")
    assert [drill["ending"] for drill in shown["drills"]] == ["node_failure", "node_failure"]
    assert first["node"] == stage.attempt(first["run"], 0)["nodes"][1]
    assert second["node"] == stage.attempt(second["run"], 0)["nodes"][0]
    assert shown["kept"] == [drill["run"] for drill in shown["drills"]]
    for drill in shown["drills"]:
        assert drill["recovery"]["requeue_s"] > 0
        job = stage.status(drill["run"])["jobs"]["train"]["job_id"]
        stage.until(lambda job=job: accounted(job)[-1] == "COMPLETED", "sacct: not COMPLETED")
