"""How a run continues on a real Slurm without a requeue: new workers in its job, or another job."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from end_to_end.bench import LEAN, SLOWLY
from end_to_end.scenes import ALONE, SceneBench, accounted, scene, worker_of
from made_records import save_submission

from slurmllm.analysis.status.runs import run_state
from slurmllm.core.config.resolve import resolve
from slurmllm.core.run.records import JobsRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.slurm.client import SlurmClient
from slurmllm.launch.diagnose.login_node import slurm_findings

pytestmark = pytest.mark.slurm

AT_ONCE = "--set=slurm.backoff_s=0"
CHAIN = "--set=slurm.restart=chain"
SAVE_S = 6.0  # slurmctld saves its state every five seconds


def scontrol(*arguments: str) -> None:
    subprocess.run(["scontrol", *arguments], check=True, capture_output=True)


@scene(order=0)
def test_a_spare_node_takes_the_place_of_a_lost_one(stage: SceneBench) -> None:
    job = stage.submit("spared", *SLOWLY, AT_ONCE, "--set=slurm.spare_nodes=1")
    stage.wait_for_step("spared", 12)
    os.kill(worker_of(stage.runs / "spared", rank=1), signal.SIGKILL)
    stage.wait_for_step("spared", 22, attempt=1)
    lost = stage.attempt("spared", 1)["nodes"][1]
    stage.lose_node("spared", lost)
    restart = ("node_failure", "restart")
    assert stage.endings("spared") == [restart, restart, ("done", "finish")]
    killed, failed, last = (stage.attempt("spared", number) for number in range(3))
    for attempt in (killed, failed, last):
        assert (attempt["job_id"], attempt["restart_count"]) == (job, 0)
    assert killed["nodes"] == failed["nodes"]
    assert (killed["spare_nodes"], last["spare_nodes"]) == (1, 0)
    assert lost not in last["nodes"]
    assert failed["blamed_nodes"] == [lost]
    # Slurm has taken the lost node out of the job, which it did not requeue.
    stage.until(lambda: accounted(job) == ["RESIZING", "COMPLETED"], "sacct: not COMPLETED")
    stage.compare_exactly(stage.rehearsed(), "spared")
    assert stage.status("spared")["restarts"] == 2


@scene(order=0)
def test_a_chain_of_jobs(stage: SceneBench) -> None:
    jobs = [stage.submit("chained", *SLOWLY, AT_ONCE, CHAIN)]
    run = RunDir(stage.runs / "chained")

    def sent() -> tuple[str | None, str | None]:
        last = JobsRecord.load(run.jobs).submissions[-1]
        assert last.restart == "chain"
        return last.train_job, last.successor_job

    stage.wait_for_step("chained", 12)
    first, successor = sent()
    assert first == jobs[0]
    assert successor is not None
    assert SlurmClient().queue([successor])[successor].reason == "Dependency"
    subprocess.run(["scancel", "--signal=USR1", "--batch", jobs[0]], check=True)  # the time limit
    stage.wait_for_step("chained", 24, attempt=1)
    jobs.append(successor)
    assert sent()[0] == successor
    lost = stage.attempt("chained", 1)["nodes"][1]
    stage.lose_node("chained", lost)
    left, failed = ("advance_signal", "chain"), ("node_failure", "chain")
    assert stage.endings("chained") == [left, failed, ("done", "finish")]
    train, following = sent()
    assert following is None
    jobs.append(str(train))
    assert [stage.attempt("chained", number)["job_id"] for number in range(3)] == jobs
    assert lost not in stage.attempt("chained", 2)["nodes"]
    listed = subprocess.run(["squeue", "-h", "-o", "%j"], capture_output=True, text=True)
    assert "chained-train" not in listed.stdout, "no job is left"
    stage.compare_exactly(stage.rehearsed(), "chained")


@scene()
def test_a_job_takes_the_nodes_that_there_are(stage: SceneBench) -> None:
    scontrol("update", "NodeName=n20", "State=DRAIN", "Reason=test")
    try:
        options = ("--nodes=2-4", "--exclude=n[1-16,21-22]")
        job = stage.submit("elastic", *SLOWLY, AT_ONCE, *options)
        stage.wait_for_step("elastic", 12)
    finally:
        scontrol("update", "NodeName=n20", "State=RESUME")
    subprocess.run(["scancel", "--signal=USR1", "--batch", job], check=True)
    stage.wait("elastic", "done", "stopped", "cancelled")
    assert stage.endings("elastic") == [("advance_signal", "requeue"), ("done", "finish")]
    first, last = stage.attempt("elastic", 0), stage.attempt("elastic", 1)
    # Of three nodes the global batch allows two.
    assert (len(first["nodes"]), len(last["nodes"])) == (2, 4)
    assert last["spare_nodes"] == 0
    assert stage.status("elastic")["mesh"]["accumulation"] == 1
    shown = stage.look("compare", stage.rehearsed(), "elastic", "--json", "--no-plot")
    assert json.loads(shown)["verdict"] in ("identical", "match")


def reconfigure(stage: SceneBench, conf: Path, text: str) -> None:
    conf.write_text(text)
    scontrol("reconfigure")
    # Since 23.11 a reconfigured slurmctld starts again.
    ping = ["scontrol", "show", "config"]
    stage.until(lambda: subprocess.run(ping, capture_output=True).returncode == 0, "no slurmctld")


@scene(order=ALONE)
def test_a_site_that_refuses_requeues_gets_a_chain(stage: SceneBench) -> None:
    conf = Path(os.environ["SLURM_CONF"])
    before = conf.read_text()
    assert "JobRequeue=1" in before
    reconfigure(stage, conf, before.replace("JobRequeue=1", "JobRequeue=0"))
    try:
        stage.submit("refusing", *LEAN, "--set=slurm.directives.train.hold=true")
        (submission,) = JobsRecord.load(RunDir(stage.runs / "refusing").jobs).submissions
        assert submission.restart == "chain"
        stage.look("cancel", "refusing")
    finally:
        reconfigure(stage, conf, before)


@contextmanager
def start_to_lose(stage: SceneBench) -> Iterator[Callable[[str], None]]:
    """Start a held job and have slurmctld lose that start; the job is then held again.

    slurmctld saves its state with some seconds of delay. Here it gets back the state of before the
    start, and a prolog has the nodes register before the batch script exists: Slurm then shows the
    job as pending while its script runs.
    """
    conf = Path(os.environ["SLURM_CONF"])
    prolog, state, saved = conf.with_name("prolog"), conf.with_name("slurmctld"), conf.parent / "s"
    before, registered = conf.read_text(), conf.with_name("registered")
    prolog.write_text(f"#!/bin/sh\nuntil [ -e {registered} ]; do sleep 0.2; done\n")
    prolog.chmod(0o755)

    def lose(job: str) -> None:
        reconfigure(stage, conf, f"{before}Prolog={prolog}\n")
        time.sleep(SAVE_S)
        shutil.copytree(state, saved)
        scontrol("release", job)
        stage.until(lambda: SlurmClient().batch_job(job).state == "RUNNING", "never started")
        stage.cluster.call("restart", "--stop", "--kill")
        shutil.rmtree(state)
        saved.rename(state)
        stage.cluster.call("restart", "--start")
        assert SlurmClient().batch_job(job).state == "PENDING"
        states = SlurmClient().node_states
        stage.until(lambda: set(states().values()) <= {"idle"}, "the nodes never registered")
        registered.touch()

    def resumed() -> bool:
        # What slurmctld reads again as it is reconfigured may have no drained node any more.
        drained = [node for node, name in SlurmClient().node_states().items() if "drain" in name]
        for node in drained:
            subprocess.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=False)
        return not drained

    try:
        yield lose
    finally:
        reconfigure(stage, conf, before)
        registered.unlink(missing_ok=True)
        shutil.rmtree(saved, ignore_errors=True)
        stage.until(resumed, "nodes are still drained")


@scene(order=ALONE)
def test_a_run_whose_start_slurmctld_has_lost_goes_on(stage: SceneBench) -> None:
    # Nothing starts before the job is held, however busy this machine is.
    scontrol("update", "PartitionName=main", "State=DOWN")
    job = stage.submit("lost", *LEAN, "--set=train.steps=20")
    scontrol("hold", job)
    scontrol("update", "PartitionName=main", "State=UP")
    stage.until(lambda: stage.status("lost")["state"] == "queued", "never pending", every_s=1.0)
    with start_to_lose(stage) as lose:
        lose(job)
        log = stage.runs / "lost" / "logs" / "train.log"
        lost = f"slurmctld shows job {job} as pending: it has lost this start of the job"
        stage.until(lambda: log.is_file() and lost in log.read_text(), "the supervisor never left")
        # Its node would refuse the same job again: another one takes its place.
        stage.wait("lost", "done")
        assert stage.endings("lost") == [("done", "finish")]
        # slurmctld has lost the number of the last job too.
        assert stage.attempt("lost", 0)["job_id"] == stage.status("lost")["jobs"]["train"]["job_id"]
        assert stage.attempt("lost", 0)["job_id"] != job
        shown = SlurmClient().queue([job]).get(job)
        assert shown is None or not shown.active
        # No node is blamed, excluded or drained.
        assert not (stage.runs / "lost" / "excluded.json").exists()
        assert not any("drain" in state for state in SlurmClient().node_states().values())


@scene(order=ALONE)
def test_a_node_that_slurm_has_drained_for_it_is_explained(stage: SceneBench) -> None:
    folder = stage.runs.parent / "drained"
    folder.mkdir()
    script, mark = folder / "job.sh", folder / "mark"
    script.write_text(f"#!/bin/bash\n#SBATCH --requeue\necho >>{mark}\nsleep 300\n")
    sbatch = ["sbatch", "--parsable", "--hold", "--nodelist=n1", f"--output={folder}/out"]
    job = subprocess.check_output([*sbatch, str(script)], text=True).strip()
    with start_to_lose(stage) as lose:
        lose(job)
        stage.until(mark.exists, "the script never started")
        scontrol("release", job)
        client = SlurmClient()
        stage.until(lambda: "drain" in client.node_states()["n1"], "n1 was not drained")
        run = RunDir(folder / "runs" / "r")
        run.path.mkdir(parents=True)
        run.config.write_text(resolve("tiny_neox").to_yaml())
        save_submission(run, train_job=job)
        fix = "`scontrol update NodeName=n1 State=RESUME`"

        def explained() -> bool:
            reason = run_state(run, client).reason
            return "Duplicate jobid" in reason and fix in reason and "scontrol release" in reason

        stage.until(explained, "status never explained it", every_s=1.0)
        nodes = {f.check: f for f in slurm_findings(client, resolve("tiny_neox").cluster)}["nodes"]
        assert (nodes.status, fix in nodes.fix) == ("warn", True)
        client.cancel([job])
        stage.until(lambda: client.node_states()["n1"] == "drained", "the job never ended")
