"""Endings on a real Slurm: the time limit, wrong requests, a killed supervisor, a full disk."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from end_to_end.bench import LEAN, REHEARSED
from end_to_end.scenes import SceneBench, accounted, process_of, scene

from slurmllm.core.run.records import UnrecordedEnding
from slurmllm.core.slurm.client import SlurmClient

pytestmark = pytest.mark.slurm
ENDLESS = (*LEAN, *REHEARSED, "--set=train.steps=100000", "--set=checkpoint.every_steps=20")


@scene(order=0)
def test_the_time_limit_itself(stage: SceneBench) -> None:
    # Slurm looks at time limits every 30 s, and signals when the lead would begin before it looks
    # again: 90 to 120 s after the start, time enough for steps on a busy machine.
    stage.submit("limited", "--time=3", "--set=slurm.signal_lead_s=60", *ENDLESS)
    following = stage.runs / "limited" / "attempts" / "001" / "attempt.json"
    stage.until(following.is_file, "not requeued")
    left = stage.attempt("limited", 0)
    assert left["class"] == "advance_signal"
    assert left["evidence"] == ["SIGUSR1: saved and left"]
    assert left["checkpoint_after"] == left["last_step"]
    assert stage.attempt("limited", 1)["checkpoint_before"] == left["checkpoint_after"]
    stage.wait_for_step("limited", left["last_step"] + 1, attempt=1)
    stage.look("cancel", "limited")
    stage.wait("limited", "cancelled")
    stage.until(lambda: stage.attempt("limited", 1)["ended_at"] is not None, "record left open")
    assert stage.attempt("limited", 1)["class"] == "cancelled"


@pytest.mark.parametrize("checked", [True, False])  # the preflight's srun, or the launchers'
@scene()
def test_an_impossible_request_accuses_no_node(stage: SceneBench, checked: bool) -> None:
    name = f"impossible-{checked}".lower()
    gres = ("--set=slurm.directives.srun.gres=gpu:9", "--set=slurm.drain=true")
    stage.submit(name, *LEAN, *gres, f"--set=cluster.health.enabled={checked}".lower())
    stage.wait(name, "stopped")
    attempt = stage.attempt(name, 0)
    assert (attempt["class"], attempt["action"]) == ("bad_configuration", "stop")
    failure = attempt["launch_failure"]
    assert failure["message"] == "srun: error: Invalid generic resource (gres) specification"
    assert (failure["fault"], failure["options"]) == ("request", ["--gres=gpu:9"])
    assert ("--gres=gpu:9" in failure["command"], failure["exit_code"]) == (True, 1)
    assert attempt["evidence"][0].startswith(failure["message"])
    assert "--gres=gpu:9" in attempt["evidence"][1]
    assert attempt["blamed_nodes"] == []
    assert not (stage.runs / name / "excluded.json").exists()
    drained = {node for node, state in SlurmClient().node_states().items() if "drain" in state}
    assert not drained & {*attempt["nodes"]}
    assert failure["message"] in stage.status(name)["reason"]


@scene()
def test_a_suspended_job_and_a_killed_supervisor(stage: SceneBench) -> None:
    job = stage.submit("suspended", *ENDLESS)
    stage.wait_for_step("suspended", 5)
    subprocess.run(["scontrol", "suspend", job], check=True)
    state = stage.status("suspended")
    subprocess.run(["scontrol", "resume", job], check=True)
    assert (state["state"], state["jobs"]["train"]["state"]) == ("training", "SUSPENDED")
    assert "suspended" in state["reason"]
    run = stage.runs / "suspended"
    os.kill(process_of(run, "supervise"), signal.SIGKILL)
    stage.until((run / "attempts" / "001" / "attempt.json").is_file, "not requeued")
    first = stage.attempt("suspended", 0)
    assert (first["class"], first["blamed_nodes"]) == ("node_failure", [])
    # The requeue had the workers save.
    assert stage.attempt("suspended", 1)["checkpoint_before"] == first["last_step"]
    assert not (run / "excluded.json").exists()
    assert accounted(job)[0] == "REQUEUED"
    stage.look("cancel", "suspended")
    stage.wait("suspended", "cancelled")


@scene()
def test_a_full_disk_ends_an_attempt_and_blames_no_node(stage: SceneBench) -> None:
    with SceneBench(stage.cluster, stage.shared / "runs", stage.shared, stage.inputs) as full:
        full.is_over = stage.is_over
        job = full.submit("full", *ENDLESS)
        full.wait_for_step("full", 5)
        stage.cluster.call("shared", "full")

        def comment() -> str:
            return SlurmClient().queue([job])[job].comment

        full.until(lambda: UnrecordedEnding.of_comment(comment()), "no ending", every_s=1.0)
        reason = full.status("full")["reason"]
        assert reason.startswith("storage full, nothing is written: ")
        stage.cluster.call("shared", "free")
        full.until(lambda: full.attempt("full", 0)["ended_at"], "never recorded")
        first = full.attempt("full", 0)
        assert (first["class"], first["action"]) == ("storage_failure", "requeue")
        assert first["blamed_nodes"] == []
        assert "No space left on device" in first["evidence"][0]
        metrics = full.runs / "full" / "metrics" / "attempt_001.jsonl"
        full.until(metrics.is_file, "never trained again")
        assert comment() == ""
        assert not (full.runs / "full" / "excluded.json").exists()
        stage.cluster.call("shared", "full")
        full.look("cancel", "full")
        full.until(lambda: not SlurmClient().queue([job])[job].active, "not cancelled")
        stage.cluster.call("shared", "free")
