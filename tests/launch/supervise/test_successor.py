"""The chain of jobs: one successor at a time, cancelled at the end, which no race can double."""

import threading
import time
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm
from launch.supervise.starts import attempt_record, start_of
from made_records import make_run, save_submission

from slurmllm.core.config.load import read_summary
from slurmllm.core.errors import SlurmError
from slurmllm.core.run.records import AttemptRecord, JobsRecord, Submission
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.slurm.client import wait_for
from slurmllm.core.slurm.setup import PREDECESSOR
from slurmllm.launch.supervise import next_job, run_lock
from slurmllm.launch.supervise.allocation import SlurmAllocation
from slurmllm.launch.supervise.policy import NodeFault
from slurmllm.launch.supervise.run_state import JobState, derive_state, is_active, read_records
from slurmllm.launch.supervise.successor import (
    cancel_successor,
    choose_restart,
    ensure_successor,
    register_train_job,
)
from slurmllm.launch.supervise.supervisor import Supervisor

Chained = tuple[RunDir, FakeSlurm]
NODES = ("n1", "n2")
SCRIPT = "#!/bin/bash\n#SBATCH --nodes=1\n"


def sent(run: RunDir) -> Submission:
    last = JobsRecord.load(run.jobs).last
    assert last is not None
    return last


def attempt(run: RunDir, number: int, job: str, **more: object) -> AttemptRecord:
    fields = {"attempt": number, "job_id": job, "started_at": time.time()}
    record = attempt_record(**fields, **more)
    record.save(run.attempt("train", number).record)
    return record


@pytest.fixture
def chained(tmp_path: Path) -> Chained:
    """A run whose train job 1 runs, on a site without requeues."""
    run, cluster = make_run(tmp_path / "r"), FakeSlurm()
    cluster.config, cluster.may_requeue = {"JobRequeue": "0"}, False
    run.script("train").parent.mkdir(parents=True)
    run.logs.mkdir()
    run.script("train").write_text(SCRIPT)
    job = cluster.submit(SCRIPT, requeue=False)
    cluster.start(job)
    save_submission(run, submitted_at=1.0, nodes=2, train_job=job, restart="chain")
    return run, cluster


def successor_of(run: RunDir, cluster: FakeSlurm, job: str = "1") -> str:
    """The successor that a start of a job makes sure of."""
    successor = ensure_successor(run, start_of(cluster, job, NODES), SCRIPT, [])
    assert successor is not None
    return successor


def pending(cluster: FakeSlurm) -> list[str]:
    return [job.job_id for job in cluster.jobs.values() if job.state == "PENDING"]


def begin(cluster: FakeSlurm, job: str, monkeypatch: pytest.MonkeyPatch) -> SlurmAllocation:
    """A successor starts: the job before it has ended."""
    predecessor = cluster.jobs[job].after
    assert predecessor is not None
    cluster.start(job)
    assert cluster.jobs[job].state == "RUNNING"
    monkeypatch.setenv(PREDECESSOR, predecessor)
    return start_of(cluster, job, NODES)


def test_auto_finds_out(chained: Chained) -> None:
    run, cluster = chained
    assert choose_restart("auto", None, cluster) == "chain"
    assert choose_restart("requeue", None, cluster) == "requeue"
    cluster.config = {"JobRequeue": "1"}
    assert choose_restart("auto", None, cluster) == "requeue"
    # What an earlier submission has found out; but a user's choice comes first.
    assert choose_restart("auto", sent(run), cluster) == "chain"
    assert choose_restart("none", sent(run), cluster) == "none"
    cluster.config = None  # slurmctld is unreachable
    assert choose_restart("auto", None, cluster) == "requeue"


def test_a_job_has_one_successor_whatever_was_recorded(chained: Chained) -> None:
    run, cluster = chained
    this_allocation = start_of(cluster, "1", NODES)
    assert ensure_successor(run, this_allocation, SCRIPT, ["n3"]) == "2"
    assert (cluster.jobs["2"].after, cluster.jobs["2"].excluded) == ("1", ("n3",))
    assert not cluster.jobs["2"].may_requeue
    assert ensure_successor(run, this_allocation, SCRIPT, []) == "2"  # a restart in the allocation
    # A supervisor was killed between sbatch and the record, twice.
    JobsRecord(submissions=(sent(run).model_copy(update={"successor_job": None}),)).save(run.jobs)
    name = cluster.jobs["2"].name
    cluster.submit(SCRIPT, name=name, after="1", requeue=False)
    assert ensure_successor(run, this_allocation, SCRIPT, []) == "2"
    assert (pending(cluster), sent(run).successor_job) == (["2"], "2")
    cluster.start("2")
    assert pending(cluster) == ["2"]  # job 1 runs
    # A refusal leaves everything as it was.
    cluster.cancel(["2"])
    cluster.refuse = "AssocMaxSubmitJobLimit"
    with pytest.raises(SlurmError, match="AssocMaxSubmitJobLimit"):
        ensure_successor(run, this_allocation, SCRIPT, [])


def test_a_successor_takes_over_and_has_one(
    chained: Chained, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, cluster = chained
    for number in range(3):
        before = str(sent(run).train_job)
        job = successor_of(run, cluster, before)
        attempt(run, number, before, ended_at=2.0, action="chain", ending="hang")
        # A supervisor was killed before it could record the first successor.
        name = cluster.jobs[job].name
        duplicate = cluster.submit(SCRIPT, name=name, after=before, requeue=False)
        cluster.finish(before, "FAILED")
        following = begin(cluster, job, monkeypatch)
        assert register_train_job(run, following) is None
        assert cluster.jobs[duplicate].state == "CANCELLED"
        assert (sent(run).train_job, sent(run).successor_job) == (job, None)
        assert register_train_job(run, following) is None  # again, as after a requeue
        assert pending(cluster) == []
    assert sent(run).earlier_jobs == ("1", "2", "4")  # 3 and 5 were duplicates
    assert len({job.name for job in cluster.jobs.values() if job.name}) == 1  # all names equal


def test_no_successor_of_cancelled_runs(chained: Chained, monkeypatch: pytest.MonkeyPatch) -> None:
    run, cluster = chained
    job = successor_of(run, cluster)
    cancelled = sent(run).model_copy(update={"cancelled_at": 2.0})
    JobsRecord(submissions=(cancelled,)).save(run.jobs)
    assert ensure_successor(run, start_of(cluster, "1", NODES), SCRIPT, []) is None
    cluster.finish("1", "FAILED")  # it had ended before `cancel` could end it
    following = begin(cluster, job, monkeypatch)
    assert register_train_job(run, following) == "the run was cancelled"
    assert sent(run).train_job == "1"


def test_the_successor_of_a_run_that_has_ended_leaves(
    chained: Chained, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, cluster = chained
    job = successor_of(run, cluster)
    attempt(run, 0, "1", ended_at=2.0, action="finish", ending="done")
    cluster.finish("1")  # killed before it could cancel
    following = begin(cluster, job, monkeypatch)
    assert register_train_job(run, following) == "the run has ended: done → finish"
    assert Supervisor(run, "train", following).main() == 1
    assert len(run.attempts("train")) == 1


def test_the_successor_of_a_cancelled_job_records_that(
    chained: Chained, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, cluster = chained
    job = successor_of(run, cluster)
    # A plain scancel of the running job only; the supervisor had taken it for a preemption.
    attempt(run, 0, "1", ended_at=2.0, action="chain", ending="advance_signal")
    cluster.finish("1", "CANCELLED")
    following = begin(cluster, job, monkeypatch)
    assert register_train_job(run, following) == "Slurm: job 1 CANCELLED"
    assert sent(run).cancelled_at is not None
    assert AttemptRecord.load(run.attempt("train", 0).record).ending == "cancelled"


def test_a_duplicate_and_a_job_of_an_earlier_submission_leave(
    chained: Chained, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, cluster = chained
    monkeypatch.setattr(run_lock, "RECORDED_S", 0.0)
    late = cluster.submit(SCRIPT, after="1", requeue=False)
    cluster.finish("1", "FAILED")
    changed = sent(run).model_copy(update={"train_job": "77"})
    JobsRecord(submissions=(sent(run), changed)).save(run.jobs)
    assert Supervisor(run, "train", begin(cluster, late, monkeypatch)).main() == 1
    assert f"job {late} is not of the last submission" in caplog.text
    assert sent(run).train_job == "77"
    assert ensure_successor(run, start_of(cluster, "1", NODES), SCRIPT, []) is None


def closed(run: RunDir, **more: object) -> AttemptRecord:
    fields = {"ended_at": time.time(), "class": "node_failure", "action": "requeue"}
    return attempt(run, 0, "1", **fields, **more)


def test_a_chain_replaces_a_requeue(chained: Chained, caplog: pytest.LogCaptureFixture) -> None:
    run, cluster = chained
    JobsRecord(submissions=(sent(run).model_copy(update={"restart": "requeue"}),)).save(run.jobs)
    this_allocation = Supervisor(run, "train", start_of(cluster, "1", NODES))
    assert this_allocation._act(closed(run, backoff_s=60.0)) == 75
    assert AttemptRecord.load(run.attempt("train", 0).record).action == "chain"
    assert "disabled: another job continues the run" in caplog.text
    assert (sent(run).restart, sent(run).successor_job) == ("chain", "2")
    assert cluster.jobs["2"].delay_s == 60.0


def test_another_job_continues_without_a_lost_node(tmp_path: Path) -> None:
    def continued(name: str, *settings: str, **more: object) -> tuple[FakeSlurm, RunDir]:
        run, cluster = make_run(tmp_path / name, *settings), FakeSlurm(("n1", "n2", "n3"))
        run.script("train").parent.mkdir(parents=True)
        run.logs.mkdir()
        run.script("train").write_text(SCRIPT.replace("1\n", "2\n"))
        job = cluster.submit(run.script("train").read_text())
        cluster.start(job)
        start = start_of(cluster, job, NODES)
        save_submission(run, submitted_at=1.0, nodes=2, train_job=job, **more)
        cluster.refuse = "QOSMaxSubmitJobPerUserLimit" if name == "refused" else None
        supervisor = Supervisor(run, "train", start)
        supervisor._failing = {"n2": NodeFault("no_answer", "n2 stopped responding")}
        assert supervisor._act(closed(run, backoff_s=60.0)) == 75
        return cluster, run

    cluster, run = continued("lost")
    assert (sent(run).train_job, sent(run).earlier_jobs) == ("2", ("1",))
    new = cluster.jobs["2"]
    assert (new.excluded, new.after, new.may_requeue, new.delay_s) == (("n2",), None, True, 60.0)
    assert AttemptRecord.load(run.attempt("train", 0).record).action == "chain"
    assert cluster.jobs["1"].state == "RUNNING"  # until the supervisor leaves
    # Not of a sweep's lane, whose jobs wait for each other, nor against the user's word or Slurm's.
    for name, settings, more in (
        ("asked", ("slurm.restart=requeue",), {}),
        ("lane", (), {"lane": "sweep-1"}),
        ("refused", (), {}),
    ):
        cluster, run = continued(name, *settings, **more)
        assert (list(cluster.jobs), cluster.jobs["1"].state) == (["1"], "PENDING")
        assert sent(run).train_job == "1"


def test_a_refusal_of_the_successor_may_pass(
    chained: Chained, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, cluster = chained
    monkeypatch.setattr(next_job, "RETRY_S", 0.01)
    supervisor = Supervisor(run, "train", start_of(cluster, "1", NODES))
    cluster.refuse = "Required partition not available (inactive or drain)"
    supervisor.next_job.submit_ahead()
    assert sent(run).successor_job is None
    cluster.refuse = None  # while the attempt runs
    assert wait_for(lambda: sent(run).successor_job, 20, 0.01)
    assert pending(cluster) == ["2"]
    cluster.cancel(["2"])
    cluster.refuse = "AssocMaxSubmitJobLimit"
    timer = threading.Timer(0.1, setattr, (cluster, "refuse", None))  # after its end
    timer.start()
    assert supervisor._act(closed(run).model_copy(update={"action": "chain"})) == 75
    assert len(pending(cluster)) == 1


def test_a_chain_without_a_successor_stops_and_tells_how_to_continue(
    chained: Chained, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, cluster = chained
    monkeypatch.setattr(next_job, "PATIENCE_S", 0.0)
    monkeypatch.setattr(next_job, "RETRY_S", 0.0)
    cluster.refuse = "QOSMaxSubmitJobPerUserLimit"
    this_allocation = Supervisor(run, "train", start_of(cluster, "1", NODES))
    assert this_allocation._act(closed(run).model_copy(update={"action": "chain"})) == 70
    written = AttemptRecord.load(run.attempt("train", 0).record)
    assert written.action == "stop"
    assert "QOSMaxSubmitJobPerUserLimit" in written.evidence[-1]
    assert "`slurmllm resume r` continues" in written.evidence[-1]


def test_a_requeue_that_was_asked_for_is_not_replaced(
    chained: Chained, caplog: pytest.LogCaptureFixture
) -> None:
    run, cluster = chained
    make_run(run.path, "slurm.restart=requeue")
    assert Supervisor(run, "train", start_of(cluster, "1", NODES))._act(closed(run)) == 75
    assert "disabled; if the job ends here, `slurmllm resume r`" in caplog.text
    assert list(cluster.jobs) == ["1"]


def test_status_and_cancel_know_the_successor(chained: Chained) -> None:
    run, cluster = chained
    this_allocation = start_of(cluster, "1", NODES)
    ensure_successor(run, this_allocation, SCRIPT, [])
    assert sent(run).own_jobs == ["2", "1"]
    attempt(run, 0, "1", ended_at=2.0, action="chain", ending="hang")
    cluster.finish("1", "FAILED")
    assert is_active(run, cluster)
    records = read_records(run, read_summary(run.config))
    jobs = {"train": JobState("1", "FAILED"), "successor": JobState("2", "PENDING", "Resources")}
    assert derive_state(records, jobs) == ("requeued", "waiting for Resources")
    cancel_successor(run, this_allocation)  # at the end of the run
    assert (pending(cluster), sent(run).successor_job) == ([], None)
