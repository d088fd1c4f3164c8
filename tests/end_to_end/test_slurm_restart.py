"""How a run continues on a real Slurm without a requeue: new workers in its job, or another job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from end_to_end.bench import REHEARSED, SLOWLY, Bench
from end_to_end.slurm_runs import Cluster, accounted, lose_node, outside_pid, submit, wait

from slurmllm.run.records import JobsRecord
from slurmllm.run.rundir import RunDir
from slurmllm.slurm.client import SlurmClient

pytestmark = pytest.mark.slurm

QUICK = (*REHEARSED, "--set=slurm.backoff_s=0")
TRAINED = ("--set=train.compile=false", "--set=slurm.backoff_s=0")


@pytest.fixture
def no_requeue(slurm: Cluster) -> Iterator[None]:
    """A site that refuses requeues."""
    conf = Path(os.environ["SLURM_CONF"])
    before = conf.read_text()
    assert "JobRequeue=1" in before
    conf.write_text(before.replace("JobRequeue=1", "JobRequeue=0"))
    subprocess.run(["scontrol", "reconfigure"], check=True)
    try:
        yield
    finally:
        conf.write_text(before)
        subprocess.run(["scontrol", "reconfigure"], check=True)


def test_a_spare_node_takes_the_place_of_a_lost_one(
    slurm: Cluster, bench: Bench, inputs: tuple[str, ...], rehearsed_on_slurm: str
) -> None:
    job = submit(bench, inputs, "spared", *QUICK, *SLOWLY, "--set=slurm.spare_nodes=1")["train"]
    bench.wait_for_step("spared", 12)
    os.kill(outside_pid(bench.runs / "spared", rank=1), signal.SIGKILL)
    bench.wait_for_step("spared", 22, attempt=1)
    lost = bench.attempt("spared", 1)["nodes"][1]
    lose_node(slurm, bench, "spared", lost)
    again = ("node_failure", "restart")
    assert bench.endings("spared") == [again, again, ("done", "finish")]
    killed, failed, last = (bench.attempt("spared", number) for number in range(3))
    assert {one["job_id"] for one in (killed, failed, last)} == {job}
    assert {one["restart_count"] for one in (killed, failed, last)} == {0}
    assert killed["nodes"] == failed["nodes"]
    assert (killed["spare_nodes"], last["spare_nodes"]) == (1, 0)
    assert lost not in last["nodes"]
    assert failed["blamed_nodes"] == [lost]
    # Slurm has taken the lost node out of the job, which it did not requeue.
    bench.until(lambda: accounted(job) == ["RESIZING", "COMPLETED"], "sacct: not COMPLETED")
    bench.compare_exactly(rehearsed_on_slurm, "spared")
    assert bench.status("spared")["restarts"] == 2


def test_a_chain_of_jobs(
    slurm: Cluster, bench: Bench, inputs: tuple[str, ...], rehearsed_on_slurm: str, no_requeue: None
) -> None:
    jobs = [submit(bench, inputs, "chained", *QUICK, *SLOWLY)["train"]]
    run = RunDir(bench.runs / "chained")

    def sent() -> tuple[str | None, str | None]:
        last = JobsRecord.load(run.jobs).submissions[-1]
        assert last.restart == "chain"
        return last.train_job, last.successor_job

    bench.wait_for_step("chained", 12)
    first, successor = sent()
    assert first == jobs[0]
    assert successor is not None
    assert SlurmClient().queue([successor])[successor].reason == "Dependency"
    refused = subprocess.run(["scontrol", "requeue", jobs[0]], capture_output=True, text=True)
    assert "disabled" in refused.stderr
    subprocess.run(["scancel", "--signal=USR1", "--batch", jobs[0]], check=True)  # the time limit
    bench.wait_for_step("chained", 24, attempt=1)
    jobs.append(successor)
    assert sent()[0] == successor
    lost = bench.attempt("chained", 1)["nodes"][1]
    lose_node(slurm, bench, "chained", lost)
    assert bench.endings("chained") == [
        ("advance_signal", "chain"),
        ("node_failure", "chain"),
        ("done", "finish"),
    ]
    train, following = sent()
    assert following is None
    jobs.append(str(train))
    assert [bench.attempt("chained", number)["job_id"] for number in range(3)] == jobs
    assert lost not in bench.attempt("chained", 2)["nodes"]
    name = "chained-train"
    listed = subprocess.run(["squeue", "-h", "-o", "%i %j"], capture_output=True, text=True)
    assert name not in listed.stdout, "no job is left"
    bench.compare_exactly(rehearsed_on_slurm, "chained")


def test_a_job_takes_the_nodes_that_there_are(
    slurm: Cluster, bench: Bench, inputs: tuple[str, ...], rehearsed_on_slurm: str
) -> None:
    def update(*fields: str) -> None:
        subprocess.run(["scontrol", "update", "NodeName=n4,n5", *fields], check=True)

    update("State=DRAIN", "Reason=test")
    try:
        job = submit(bench, inputs, "elastic", *QUICK, "--nodes=2-4")["train"]
        bench.wait_for_step("elastic", 12)
    finally:
        update("State=RESUME")
    subprocess.run(["scancel", "--signal=USR1", "--batch", job], check=True)
    wait(bench, "elastic", "done", "stopped", "cancelled")
    assert bench.endings("elastic") == [("advance_signal", "requeue"), ("done", "finish")]
    first, last = bench.attempt("elastic", 0), bench.attempt("elastic", 1)
    # Of three nodes the global batch allows two.
    assert (len(first["nodes"]), len(last["nodes"])) == (2, 4)
    assert last["spare_nodes"] == 0
    assert bench.status("elastic")["mesh"]["accumulation"] == 1
    shown = bench.look("compare", rehearsed_on_slurm, "elastic", "--json", "--no-plot")
    assert json.loads(shown)["verdict"] in ("identical", "match")


@pytest.mark.long
def test_a_chain_over_three_time_limits_and_a_lost_node(
    slurm: Cluster, bench: Bench, inputs: tuple[str, ...], no_requeue: None
) -> None:
    # Slurm looks at time limits every 30 s: a job trains for 30 to 60 s before it is signalled.
    many = (*TRAINED, "--set=train.steps=1500", "--set=checkpoint.every_steps=50")
    submit(bench, inputs, "limits", *many, "--time=2", "--set=slurm.signal_lead_s=60")
    bench.until(lambda: (bench.runs / "limits/metrics/attempt_001.jsonl").is_file(), "no chain")
    lost = bench.attempt("limits", 1)["nodes"][1]
    lose_node(slurm, bench, "limits", lost)
    endings = bench.endings("limits")
    assert endings.count(("advance_signal", "chain")) >= 3
    assert endings.count(("node_failure", "chain")) == 1
    assert endings[-1] == ("done", "finish")
    jobs = [bench.attempt("limits", number)["job_id"] for number in range(len(endings))]
    assert len(set(jobs)) == len(jobs)
    listed = subprocess.run(["squeue", "-h", "-o", "%i"], capture_output=True, text=True)
    assert not set(jobs) & set(listed.stdout.split()), "no job is left"
    submit(bench, inputs, "unlimited", *many)
    wait(bench, "unlimited", "done")
    found = json.loads(bench.look("compare", "unlimited", "limits", "--exact", "--json"))
    assert (found["verdict"], found["steps_compared"]) == ("identical", 1500)
