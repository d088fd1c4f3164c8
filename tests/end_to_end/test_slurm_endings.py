"""Endings on a real Slurm: the time limit, cancel, a crash."""

from __future__ import annotations

import os
import signal

import pytest
from end_to_end.bench import REHEARSED, SLOWLY, Bench
from end_to_end.slurm_runs import Cluster, accounted, outside_pid, submit, wait

from slurmllm.slurm.client import SlurmClient

pytestmark = pytest.mark.slurm


def test_the_time_limit_itself(slurm: Cluster, bench: Bench, inputs: tuple[str, ...]) -> None:
    # Slurm looks at time limits every 30 s, and signals when the lead would begin before it looks
    # again: 90 to 120 s after the start, time enough for steps on a busy machine.
    submit(
        bench,
        inputs,
        "limited",
        "--time=3",
        "--set=slurm.signal_lead_s=60",
        "--set=train.steps=100000",
        *REHEARSED,  # two minutes of CPUs for others
    )
    again = bench.runs / "limited" / "attempts" / "001" / "attempt.json"
    bench.until(again.is_file, "not requeued")
    left = bench.attempt("limited", 0)
    assert left["class"] == "advance_signal"
    assert left["evidence"] == ["SIGUSR1: saved and left"]
    assert left["checkpoint_after"] == left["last_step"]
    assert bench.attempt("limited", 1)["checkpoint_before"] == left["checkpoint_after"]
    bench.wait_for_step("limited", left["last_step"] + 1, attempt=1)
    bench.look("cancel", "limited")
    wait(bench, "limited", "cancelled")
    bench.until(lambda: bench.attempt("limited", 1)["ended_at"] is not None, "record left open")
    assert bench.attempt("limited", 1)["class"] == "cancelled"


def test_a_code_error_stops_and_is_not_requeued(
    slurm: Cluster, bench: Bench, inputs: tuple[str, ...]
) -> None:
    job = submit(bench, inputs, "crashed", *SLOWLY)["train"]
    bench.wait_for_step("crashed", 5)
    node = bench.attempt("crashed", 0)["nodes"][1]
    os.kill(outside_pid(bench.runs / "crashed", rank=1), signal.SIGSEGV)
    wait(bench, "crashed", "stopped")
    assert bench.endings("crashed") == [("code_error", "stop")]
    assert f"on {node} crashed with SIGSEGV" in bench.attempt("crashed", 0)["evidence"][0]
    bench.until(lambda: accounted(job) == ["FAILED"], "sacct: not FAILED")


@pytest.mark.parametrize("checked", [True, False])  # the preflight's srun, or the launchers'
def test_an_impossible_request_accuses_no_node(
    slurm: Cluster, bench: Bench, inputs: tuple[str, ...], checked: bool
) -> None:
    name = f"impossible-{checked}".lower()
    submit(
        bench,
        inputs,
        name,
        *REHEARSED,
        "--set=slurm.directives.srun.gres=gpu:9",
        "--set=slurm.drain=true",
        f"--set=cluster.health.enabled={checked}".lower(),
    )
    wait(bench, name, "stopped")
    attempt = bench.attempt(name, 0)
    assert (attempt["class"], attempt["action"]) == ("bad_configuration", "stop")
    failure = attempt["launch_failure"]
    assert failure["message"] == "srun: error: Invalid generic resource (gres) specification"
    assert (failure["fault"], failure["options"]) == ("request", ["--gres=gpu:9"])
    assert "--gres=gpu:9" in failure["command"]
    assert failure["exit_code"] == 1
    assert failure["seconds"] < 60
    assert attempt["evidence"][0].startswith(failure["message"])
    assert "--gres=gpu:9" in attempt["evidence"][1]
    assert attempt["blamed_nodes"] == []
    assert not (bench.runs / name / "excluded.json").exists()
    assert not any("drain" in state for state in SlurmClient().node_states().values())
    assert failure["message"] in bench.status(name)["reason"]
