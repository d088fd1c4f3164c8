"""On a real Slurm: suspended jobs, a killed supervisor, a full disk."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from end_to_end.bench import Bench
from end_to_end.slurm_runs import Cluster, accounted, submit, wait

from slurmllm.run.records import UnrecordedEnding
from slurmllm.slurm.client import SlurmClient

pytestmark = pytest.mark.slurm

SLOW = ("--set=backend=rehearsal", "--set=train.steps=100000", "--set=checkpoint.every_steps=20")
SLOW += ("--set=env.SLURMLLM_REHEARSAL_STEP_S=0.1",)


def supervisor_of(run: Path) -> int:
    """The supervisor's process id as this machine numbers it."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"supervise" in arguments and str(run).encode() in arguments:
                return int(entry.name)
    raise AssertionError(f"no supervisor of {run}")


def test_a_suspended_job_and_a_killed_supervisor(
    slurm: Cluster, bench: Bench, inputs: tuple[str, ...]
) -> None:
    job = submit(bench, inputs, "suspended", *SLOW)["train"]
    bench.wait_for_step("suspended", 5)
    subprocess.run(["scontrol", "suspend", job], check=True)
    state = bench.status("suspended")
    subprocess.run(["scontrol", "resume", job], check=True)
    assert (state["state"], state["jobs"]["train"]["state"]) == ("training", "SUSPENDED")
    assert "suspended" in state["reason"]
    os.kill(supervisor_of(bench.runs / "suspended"), signal.SIGKILL)
    second = bench.runs / "suspended" / "attempts" / "001" / "attempt.json"
    bench.until(second.is_file, "not requeued")
    first = bench.attempt("suspended", 0)
    assert (first["class"], first["blamed_nodes"]) == ("node_failure", [])
    # The requeue had the workers save.
    assert bench.attempt("suspended", 1)["checkpoint_before"] == first["last_step"]
    assert not (bench.runs / "suspended" / "excluded.json").exists()
    assert accounted(job)[0] == "REQUEUED"
    bench.look("cancel", "suspended")
    wait(bench, "suspended", "cancelled")


def test_a_full_disk_ends_an_attempt_and_blames_no_node(
    slurm: Cluster, inputs: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = type(slurm)(tmp_path / "cluster")  # type: ignore[call-arg]
    shared = tmp_path / "shared"
    cluster.call("up", "--nodes=2", f"--shared={shared}", "--shared-mb=48", "--kill-wait=30")
    try:
        monkeypatch.setenv("SLURM_CONF", cluster.slurm_conf)
        with Bench(shared / "runs") as bench:
            job = submit(bench, inputs, "full", *SLOW)["train"]
            bench.wait_for_step("full", 5)
            cluster.call("shared", "full")

            def comment() -> str:
                return SlurmClient().queue([job])[job].comment

            bench.until(lambda: UnrecordedEnding.of_comment(comment()), "no ending", every_s=1.0)
            reason = bench.status("full")["reason"]
            assert reason.startswith("storage full, nothing is written: ")
            cluster.call("shared", "free")
            bench.until(lambda: bench.attempt("full", 0)["ended_at"], "never recorded")
            first = bench.attempt("full", 0)
            assert (first["class"], first["action"]) == ("storage_failure", "requeue")
            assert first["blamed_nodes"] == []
            assert "No space left on device" in first["evidence"][0]
            second = bench.runs / "full" / "metrics" / "attempt_001.jsonl"
            bench.until(second.is_file, "never trained again")
            assert comment() == ""
            assert not (bench.runs / "full" / "excluded.json").exists()
            cluster.call("shared", "full")
            bench.look("cancel", "full")
            bench.until(lambda: not SlurmClient().queue([job])[job].active, "not cancelled")
            cluster.call("shared", "free")
    finally:
        cluster.call("down")
