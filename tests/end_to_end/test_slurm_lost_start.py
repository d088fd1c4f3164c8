"""slurmctld killed in the second in which it starts a job, made to happen every time.

slurmctld saves its state with some seconds of delay. Here it gets back the state of before the
start, and a prolog has the nodes register before the batch script exists: Slurm then shows the
job as pending while its script runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from end_to_end.bench import Bench
from end_to_end.slurm_runs import Cluster, submit, wait

from slurmllm.config.resolve import resolve
from slurmllm.diagnose.login_node import slurm_findings
from slurmllm.run.records import JobsRecord, Submission
from slurmllm.run.rundir import RunDir
from slurmllm.slurm.client import SlurmClient
from slurmllm.status.runs import run_state

pytestmark = pytest.mark.slurm

SAVE_S = 6.0  # slurmctld saves its state every five seconds
LoseStart = Callable[[str], None]


def scontrol(*arguments: str) -> None:
    subprocess.run(["scontrol", *arguments], check=True, capture_output=True)


@pytest.fixture
def lose_start(slurm: Cluster, bench: Bench) -> Iterator[LoseStart]:
    """Start a held job and have slurmctld lose that start; the job is then held again."""
    conf = Path(os.environ["SLURM_CONF"])
    prolog, state, saved = conf.with_name("prolog"), conf.with_name("slurmctld"), conf.parent / "s"
    before, registered = conf.read_text(), conf.with_name("registered")
    prolog.write_text(f"#!/bin/sh\nuntil [ -e {registered} ]; do sleep 0.2; done\n")
    prolog.chmod(0o755)

    def lose(job: str) -> None:
        conf.write_text(f"{before}Prolog={prolog}\n")
        scontrol("reconfigure")
        time.sleep(SAVE_S)
        shutil.copytree(state, saved)
        scontrol("release", job)
        bench.until(lambda: SlurmClient().batch_job(job).state == "RUNNING", "never started")
        slurm.call("restart", "--stop", "--kill")
        shutil.rmtree(state)
        saved.rename(state)
        slurm.call("restart", "--start")
        assert SlurmClient().batch_job(job).state == "PENDING"
        states = SlurmClient().node_states
        bench.until(lambda: set(states().values()) <= {"idle"}, "the nodes never registered")
        registered.touch()

    yield lose
    conf.write_text(before)
    registered.unlink(missing_ok=True)
    scontrol("reconfigure")
    shutil.rmtree(saved, ignore_errors=True)
    for node, node_state in SlurmClient().node_states().items():
        if "drain" in node_state:
            resume = ["scontrol", "update", f"NodeName={node}", "State=RESUME"]
            # Since 23.11 a reconfigured slurmctld starts again.
            bench.until(lambda c=resume: subprocess.run(c).returncode == 0, f"{node} stays drained")


def test_a_run_whose_start_slurmctld_has_lost_goes_on(
    bench: Bench, inputs: tuple[str, ...], lose_start: LoseStart
) -> None:
    # Nothing starts before the job is held, however busy this machine is.
    scontrol("update", "PartitionName=main", "State=DOWN")
    job = submit(bench, inputs, "lost", "--set=backend=rehearsal", "--set=train.steps=20")["train"]
    scontrol("hold", job)
    scontrol("update", "PartitionName=main", "State=UP")
    bench.until(lambda: bench.status("lost")["state"] == "queued", "never pending", every_s=1.0)
    lose_start(job)
    log = bench.runs / "lost" / "logs" / "train.log"
    lost = f"slurmctld shows job {job} as pending: it has lost this start of the job"
    bench.until(lambda: log.is_file() and lost in log.read_text(), "the supervisor never left")
    # Its node would refuse the same job again: another one takes its place.
    wait(bench, "lost", "done")
    assert bench.endings("lost") == [("done", "finish")]
    assert bench.attempt("lost", 0)["job_id"] == str(int(job) + 1)
    assert SlurmClient().queue([job]).get(job) is None or not (
        SlurmClient().queue([job])[job].active
    )
    # No node is blamed, excluded or drained.
    assert not (bench.runs / "lost" / "excluded.json").exists()
    assert not any("drain" in state for state in SlurmClient().node_states().values())


def test_a_node_that_slurm_has_drained_for_it_is_explained(
    bench: Bench, lose_start: LoseStart, tmp_path: Path
) -> None:
    script, mark = tmp_path / "job.sh", tmp_path / "mark"
    script.write_text(f"#!/bin/bash\n#SBATCH --requeue\necho >>{mark}\nsleep 300\n")
    sbatch = ["sbatch", "--parsable", "--hold", "--nodelist=n1", f"--output={tmp_path}/out"]
    job = subprocess.check_output([*sbatch, str(script)], text=True).strip()
    lose_start(job)
    bench.until(mark.exists, "the script never started")
    scontrol("release", job)
    client = SlurmClient()
    bench.until(lambda: "drain" in client.node_states()["n1"], "n1 was not drained")
    run = RunDir(tmp_path / "runs" / "r")
    run.path.mkdir(parents=True)
    run.config.write_text(resolve("tiny_neox").to_yaml())
    sent = Submission(submitted_at=0.0, nodes=1, local=False, first_attempt=0, train_job=job)
    JobsRecord(submissions=(sent,)).save(run.jobs)
    fix = "`scontrol update NodeName=n1 State=RESUME`"

    def explained() -> bool:
        reason = run_state(run, client).reason
        return "Duplicate jobid" in reason and fix in reason and "scontrol release" in reason

    bench.until(explained, "status never explained it", every_s=1.0)
    nodes = {f.check: f for f in slurm_findings(client, resolve("tiny_neox").cluster)}["nodes"]
    assert nodes.status == "warn"
    assert fix in nodes.fix
    client.cancel([job])
    bench.until(lambda: client.node_states()["n1"] == "drained", "the job never ended")
