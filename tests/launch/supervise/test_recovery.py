"""What the supervisor does about a run that stands still, or has two supervisors; real processes.

The workers' backend is the rehearsal one: everything but the arithmetic.
"""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from end_to_end.bench import LEAN, SMALL, Bench, processes_with
from made_records import make_run

from slurmllm.core.config.load import load
from slurmllm.core.errors import StorageError
from slurmllm.launch.supervise.allocation import LocalAllocation
from slurmllm.launch.supervise.attempts import open_attempt
from slurmllm.launch.supervise.next_job import requeue_unrecorded

STEPS = 40
# A fault after step 23 comes before the save of step 30, on a busy machine too.
SLOW_STEPS = "--set=env.SLURMLLM_REHEARSAL_STEP_S=0.3"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("recovery") / "runs") as bench:
        yield bench


@pytest.fixture(scope="module")
def submit(inputs: tuple[str, ...]) -> tuple[str, ...]:
    limits = ("--set=watchdog.min_step_s=5", "--set=watchdog.save_s=30")
    return ("submit", "tiny_neox", "--nodes=2", "--local", *SMALL, *LEAN, *limits, *inputs)


@pytest.fixture(scope="module")
def unbroken(bench: Bench, submit: tuple[str, ...]) -> str:
    bench.call(*submit, "--name=unbroken")
    phases = bench.attempt("unbroken", 0)["phases_s"]
    parts = ("preflight", "cache", "start_up", "first_step", "training", "saving", "stopping")
    attempt = bench.attempt("unbroken", 0)
    took_s = attempt["ended_at"] - attempt["started_at"]
    assert sum(phases.get(name, 0.0) for name in parts) == pytest.approx(took_s, abs=0.05)
    assert (attempt["steps_gained"], attempt["steps_lost"]) == (STEPS, 0)
    return "unbroken"


def test_a_stopped_worker_is_found_and_the_run_goes_on(
    bench: Bench, submit: tuple[str, ...], unbroken: str
) -> None:
    process = bench.start(*submit, SLOW_STEPS, "--name=stopped")
    bench.wait_for_step("stopped", 23)
    os.kill(bench.node("stopped", 0, "local1")["pids"]["1"], signal.SIGSTOP)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert bench.endings("stopped") == [("hang", "requeue"), ("done", "finish")]
    hung = bench.attempt("stopped", 0)
    assert hung["blamed_nodes"] == ["local1"]
    assert "limit 5 s" in hung["evidence"][0]
    assert any("rank 1: no answer; state T (stopped)" in line for line in hung["evidence"])
    assert (hung["steps_gained"], hung["checkpoint_after"]) == (20, 20)
    assert hung["steps_lost"] == hung["last_step"] - 20 >= 3
    assert bench.compare_exactly(unbroken, "stopped")["overlaps"]["b"]["identical"]
    text = bench.call("logs", "stopped", "--stacks")
    assert text.startswith("attempt 0, rank 1, differs from the others\nno answer")
    # It waits for the result of an operation of the control plane.
    assert "in _receive" in bench.call("logs", "stopped", "--stacks", "--rank=0")
    assert "leave out -f" in bench.call("logs", "stopped", "--stacks", "-f", code=2)
    assert "has no stacks" in bench.call("logs", unbroken, "--stacks", code=2)


def test_of_two_supervisors_the_newer_one_has_the_run(
    bench: Bench, submit: tuple[str, ...], unbroken: str
) -> None:
    # The second one starts while the first trains, on a busy machine too.
    slow = "--set=env.SLURMLLM_REHEARSAL_STEP_S=0.6"
    first = bench.start(*submit, slow, "--name=split")
    bench.wait_for_step("split", 12)
    run = bench.runs / "split"
    second = subprocess.Popen(
        ["bash", str(run / "scripts" / "train.sbatch")],
        env={**os.environ, "SLURMLLM_LOCAL_NODES": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    old_pids = [bench.node("split", 0, f"local{n}")["pids"][str(n)] for n in (0, 1)]
    output, _ = first.communicate(timeout=400)
    assert first.returncode == 1, output
    assert "superseded by attempt 1 of another supervisor" in output
    output, _ = second.communicate(timeout=400)
    assert second.returncode == 0, output
    assert "attempt 0: is still open and is superseded by this attempt: process" in output
    assert bench.endings("split") == [("superseded", "stop"), ("done", "finish")]
    assert not any(Path(f"/proc/{pid}").exists() for pid in old_pids)
    bench.compare_exactly(unbroken, "split")
    assert not processes_with(str(run))


def test_a_local_run_is_cancelled_and_resumed(bench: Bench, submit: tuple[str, ...]) -> None:
    # Slow steps: the run must not end before `cancel` has started on a busy machine.
    process = bench.start(*submit, "--set=env.SLURMLLM_REHEARSAL_STEP_S=0.6", "--name=r")
    bench.wait_for_step("r", 3)
    assert "to save and exit" in bench.call("cancel", "r")
    assert re.search("already asked to save and exit|nothing to cancel", bench.call("cancel", "r"))
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 130, output
    state = bench.status("r")
    assert (state["state"], state["reason"]) == ("cancelled", "`slurmllm resume r` continues")
    assert bench.endings("r") == [("cancelled", "stop")]
    assert state["last_checkpoint"]["step"] == state["step"] >= 3
    assert "nothing to cancel" in bench.call("cancel", "r")
    bench.call("resume", "r")
    assert bench.status("r")["state"] == "done"


def test_a_directory_that_cannot_be_written_costs_a_start_and_not_the_run(tmp_path: Path) -> None:
    run, allocation = make_run(tmp_path / "r", "slurm.backoff_s=0.1"), LocalAllocation()
    refused = StorageError("cannot write x: Read-only file system")
    assert requeue_unrecorded(run, "train", allocation, refused) == 75
    allocation.restart_count = 3
    with pytest.raises(StorageError, match=r"4 starts in a row.*storage_budget 3.*resume r"):
        requeue_unrecorded(run, "train", allocation, refused)
    open_attempt(run, "train", load(run.config), allocation)  # a start that could write counts anew
    assert requeue_unrecorded(run, "train", allocation, refused) == 75
    with pytest.raises(StorageError, match="quota"):
        requeue_unrecorded(run, "train", allocation, StorageError("x: Disk quota exceeded"))
