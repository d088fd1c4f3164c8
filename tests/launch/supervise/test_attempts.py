"""Attempts opened, closed and counted; the supervisor's own table for lost attempts."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from socket import gethostname
from types import SimpleNamespace

import pytest
from fake_slurm import FakeSlurm
from launch.supervise.starts import attempt_record, start_of
from made_records import make_run, save_manifest, save_submission
from training_rows import write_rows

from slurmllm.core.config.command import STEPS_NOT_PASSED, CommandConfig
from slurmllm.core.config.resolve import resolve
from slurmllm.core.errors import ConfigError, SlurmError
from slurmllm.core.run.records import AttemptRecord, HangRecord, NodeRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.run.worker_files import EventLog
from slurmllm.core.slurm.client import AccountingRow, to_unix
from slurmllm.launch.supervise import attempts
from slurmllm.launch.supervise import evidence as evidences
from slurmllm.launch.supervise.allocation import LocalAllocation
from slurmllm.launch.supervise.attempt_monitor import Observations
from slurmllm.launch.supervise.classify import Ending, Evidence
from slurmllm.launch.supervise.evidence import gather_evidence
from slurmllm.launch.supervise.exclusion import (
    delay,
    failed_nodes,
    nodes_to_avoid,
    requeue,
    slurm_failed,
    usable,
)
from slurmllm.launch.supervise.next_job import wait_writable
from slurmllm.launch.supervise.run_lock import lost_start, still_runs, was_restarted

LOST = Ending("node_failure", ("local0 stopped responding",), ("local0",))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "r", "slurm.no_progress_limit=3", "slurm.failure_budget=4")


def attempt(run: RunDir, ending: Ending, checkpoint: int | None = None) -> AttemptRecord:
    record = attempts.open_attempt(run, "train", resolve("tiny_neox"), LocalAllocation())
    if checkpoint is not None:
        save_manifest(run, checkpoint, attempt=record.attempt)
    return attempts.close_attempt(run, record, ending)


def test_attempts_are_numbered_and_kept(run: RunDir) -> None:
    first = attempt(run, LOST, checkpoint=20)
    second = attempt(run, Ending("done", ("2 workers finished",)), checkpoint=40)
    assert [a.attempt for a in attempts.load_attempts(run, "train")] == [0, 1]
    assert (first.action, second.action) == ("requeue", "finish")
    assert (second.checkpoint_before, second.checkpoint_after) == (20, 40)
    assert first.steps_gained == second.steps_gained == 20
    assert AttemptRecord.load(run.attempt("train", 0).record) == first
    assert (first.pid, first.process) == (os.getpid(), attempts.process_identity(os.getpid()))
    assert '"class": "node_failure"' in run.attempt("train", 0).record.read_text()


def test_attempts_without_a_new_checkpoint_come_to_an_end(run: RunDir) -> None:
    endings = [attempt(run, LOST) for _ in range(3)]
    assert [a.action for a in endings] == ["requeue", "requeue", "stop"]
    assert endings[-1].ending == "no_progress"
    assert "3 attempts in a row" in endings[-1].evidence[0]
    assert "local0 stopped responding" in endings[-1].evidence
    # A resume counts from its own first attempt.
    save_submission(run, local=True, first_attempt=3)
    assert attempt(run, LOST).action == "requeue"


def test_new_graphs_of_the_nodes_are_in_the_record(run: RunDir) -> None:
    record = attempts.open_attempt(run, "train", resolve("tiny_neox"), LocalAllocation())
    for name, graphs in (("local0", ("b", "a")), ("local1", ("a",))):
        NodeRecord(node=name, new_graphs=graphs).save(run.attempt("train", 0).node(name))
    record = record.model_copy(update={"nodes": ("local0", "local1")})
    assert attempts.close_attempt(run, record, LOST).new_graphs == ("a", "b")


def test_unequal_versions_are_named_with_their_nodes() -> None:
    same = {"torch": "2.9", "neuron-driver": "2.24"}
    assert attempts.unequal_versions({"n1": same, "n2": same, "n3": {}}) == ""
    text = attempts.unequal_versions(
        {"n1": same, "n2": {**same, "neuron-driver": "2.21"}, "n3": same}
    )
    assert "neuron-driver 2.24 on n1 n3, 2.21 on n2" in text
    assert "torch" not in text


def rows(*states: str) -> list[AccountingRow]:
    batch = AccountingRow("7.batch", "CANCELLED", "0:15", "n1", "", "")
    of_job = [AccountingRow("7", state, "0:0", "n[1-2]", "", "") for state in states]
    return [row for start in of_job for row in (start, batch)]


@pytest.mark.parametrize(
    ("states", "restart_count", "ending"),
    [
        (("NODE_FAIL", "RUNNING"), 0, "node_failure"),
        (("TIMEOUT", "RUNNING"), 0, "advance_signal"),
        (("PREEMPTED", "RUNNING"), 0, "advance_signal"),
        (("CANCELLED",), 0, "cancelled"),
        (("OUT_OF_MEMORY",), 0, "out_of_memory"),
        (("NODE_FAIL", "PREEMPTED", "RUNNING"), 1, "advance_signal"),
        ((), 0, "node_failure"),
    ],
)
def test_an_orphaned_attempt_ends_by_accounting(
    states: tuple[str, ...], restart_count: int, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = attempt_record(restart_count=restart_count)
    cluster = FakeSlurm()
    monkeypatch.setattr(cluster, "accounting", lambda _: rows(*states))
    row = attempts.incarnation(record, start_of(cluster, "8", ("n1",)))
    assert attempts.ending_of_orphaned(record, {}, row).ending == ending


def test_one_unresponsive_node_is_blamed_for_an_orphaned_attempt() -> None:
    reported = {"n1": NodeRecord(node="n1", pids={0: 5}, exit_codes={0: 70})}
    row = AccountingRow("7", "NODE_FAIL", "0:0", "n[1-2]", "", "2026-11-21T05:14:09")
    assert attempts.ending_of_orphaned(attempt_record(), reported, row).blamed_nodes == ("n2",)
    assert attempts.ending_of_orphaned(attempt_record(), {}, row).blamed_nodes == ()
    for spare_nodes, nodes in ((0, ("n1", "n2")), (1, ("n2",))):
        record = attempt_record(nodes=nodes, spare_nodes=spare_nodes)
        for failed, blamed in ((["n2"], ("n2",)), (["n1"], ()), ([], ())):
            assert attempts.ending_of_orphaned(record, reported, row, failed).blamed_nodes == blamed
    alone = attempt_record(nodes=("n2",))  # whatever Slurm counts as failed now, it was this one
    assert attempts.ending_of_orphaned(alone, {}, row, []).blamed_nodes == ("n2",)
    assert datetime.fromtimestamp(to_unix(row.end) or 0).isoformat() == row.end


def test_nodes_that_slurm_counts_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent() -> dict[str, str]:
        raise SlurmError("sinfo failed")

    cluster = FakeSlurm()
    cluster.states |= {"n2": "down*", "n3": "drained"}
    assert failed_nodes(LocalAllocation()) is None
    assert failed_nodes(start_of(cluster, "1", ("n1",))) == ["n2"]
    # Not responding: of the job, it is asked; of others, Slurm's word counts, but not of most.
    start = start_of(cluster, "2", ("n1", "n2"))
    cluster.states |= {"n2": "allocated*", "n3": "idle", "n4": "idle*", "n5": "idle"}
    monkeypatch.setattr(cluster, "responds", lambda _, node: node != "n2")
    assert failed_nodes(start) == ["n4", "n2"]
    monkeypatch.setattr(cluster, "responds", lambda *_: False)  # srun fails everywhere
    assert failed_nodes(start) == ["n4"]
    monkeypatch.setattr(cluster, "responds", lambda *_: True)
    cluster.states = dict.fromkeys(cluster.states, "unknown")  # slurmctld was restarted
    assert failed_nodes(start) == []
    monkeypatch.setattr(cluster, "node_states", silent)
    assert failed_nodes(start_of(cluster, "1", ("n1",))) == []


def test_usable_nodes() -> None:
    assert all(map(usable, ("idle", "mixed", "allocated", "completing")))
    unusable = ["down", "drained", "draining", "fail", "failing", "maint", "unknown", "idle*"]
    unusable += ["powering_up", "power_saving", "reboot_requested"]
    assert not any(map(usable, unusable))
    states = ["down", "down*", "failing", "draining"]
    states += ["powering_down", "powered_down", "maint", "idle"]
    cluster = FakeSlurm(("n1",))
    assert slurm_failed(start_of(cluster, "1", ("n1",)), {s: s for s in states}) == [*states[:3]]


Job = tuple[FakeSlurm, str]
TWO = "#SBATCH --nodes=2\n"


@pytest.fixture
def job() -> Job:
    """A job that runs on n1 and n2 of four nodes."""
    cluster = FakeSlurm(("n1", "n2", "n3", "n4"))
    job_id = cluster.submit(TWO)
    cluster.start(job_id)
    return cluster, job_id


def test_lost_nodes_are_avoided_where_others_can_take_their_place(job: Job) -> None:
    cluster, job_id = job
    assert nodes_to_avoid(cluster, TWO, [], ["n4"]) == ["n4"]
    assert nodes_to_avoid(cluster, "#SBATCH --nodes=4\n", [], ["n4"]) == []
    assert nodes_to_avoid(cluster, TWO, ["n2"], ["n4"]) == ["n2", "n4"]
    # As many as possible: n4 is used again, which was excluded before n3.
    assert nodes_to_avoid(cluster, TWO, ["n2"], ["n3", "n4"]) == ["n2", "n3"]
    cluster.features = dict.fromkeys(("n1", "n2"), "a100")
    a100 = f"{TWO}#SBATCH --constraint=a100\n"
    assert nodes_to_avoid(cluster, a100, ["n2"], [], job_id=job_id) == []  # of four idle nodes
    requeue(cluster, job_id)
    cluster.exclude(job_id, ["n2", "n4"])
    cluster.start(job_id)
    assert cluster.jobs[job_id].nodes == ("n1", "n3")


def test_without_spare_nodes_slurm_is_waited_for(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, job_id = job
    cluster.states.update(n3="drained", n4="down")
    with monkeypatch.context() as patched:  # time.sleep refuses it: the node answers at once
        patched.setattr("slurmllm.launch.supervise.exclusion.POLL_S", -1.0)
        assert nodes_to_avoid(cluster, TWO, ["n2"], [], job_id=job_id) == []
    cluster.states["n2"] = "down*"
    assert nodes_to_avoid(cluster, TWO, ["n2"], []) == []


def test_nodes_that_are_silent_beside_a_lost_one_are_waited_for(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, job_id = job
    cluster.states.update(n1="allocated*", n2="allocated*", n3="down*", n4="idle")
    monkeypatch.setattr(cluster, "responds", lambda *_: False)
    answers = iter(["allocated*", "allocated"])
    monkeypatch.setattr(
        "slurmllm.launch.supervise.exclusion.time.sleep",
        lambda _: cluster.states.update(n1=next(answers)),
    )
    held = ("n1", "n2")
    assert nodes_to_avoid(cluster, TWO, ["n2"], [], job_id=job_id, held_nodes=held) == ["n2"]
    cluster.states.update(n1="idle", n3="down", n4="idle*")  # n4 is not the job's: not waited for
    assert nodes_to_avoid(cluster, TWO, ["n2"], [], job_id=job_id, held_nodes=held) == []


def test_a_log_that_cannot_be_written_is_waited_for(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    wait_writable(run, 0.1)  # no longer than that
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(wait_writable, run, 20.0)
        time.sleep(0.2)
        assert not waiting.done()
        run.logs.mkdir()
    assert waiting.exception() is None
    assert list(run.logs.iterdir()) == []


def test_a_job_that_slurm_requeued_itself_is_no_error(job: Job) -> None:
    cluster, job_id = job
    cluster.fail_node("n2")
    requeue(cluster, job_id)
    delay(cluster, job_id, 0.0)
    assert cluster.jobs[job_id].delay_s == 0.0
    delay(cluster, job_id, 60.0)
    assert (cluster.jobs[job_id].state, cluster.jobs[job_id].delay_s) == ("PENDING", 60.0)


def test_two_supervisors_never_share_a_number(run: RunDir) -> None:
    config, allocation = resolve("tiny_neox"), LocalAllocation()
    with ThreadPoolExecutor(8) as pool:
        opened = pool.map(
            lambda _: attempts.open_attempt(run, "train", config, allocation), range(16)
        )
        assert sorted(record.attempt for record in opened) == list(range(16))


def test_where_the_time_went_and_what_was_gained(run: RunDir) -> None:
    """By hand: launched at 110, first step 120 to 130, steps to 160, a save of 5 s, killed."""
    phases = {"preflight": 8.0, "cache": 2.0}
    record = attempt_record(started_at=100.0, ended_at=171.0, phases_s=phases)
    times = {7: 130.0, 8: 140.0, 9: 155.0, 10: 165.0}
    rows = [{"step": step, "time": at, "step_time_s": 10.0} for step, at in times.items()]
    write_rows(run.metrics(0), rows)
    EventLog(run.events(0), 0).add("save", 8, waited_s=5.0)
    save = json.loads(run.events(0).read_text()) | {"time": 145.0}
    run.events(0).write_text(json.dumps(save) + '\n{"kind": "sa')
    config = resolve("tiny_neox")
    outcome = attempts.timeline(run, record, 168.0, config)
    phases |= {"start_up": 10.0, "first_step": 10.0, "training": 33.0}
    assert outcome.phases_s == phases | {"saving": 5.0, "stopping": 3.0}
    assert (outcome.first_step, outcome.last_step) == (7, 10)
    assert (outcome.steps_gained, outcome.steps_lost) == (0, 4)
    assert attempts.timeline(run, record, None, config).phases_s["stopping"] == 6.0
    evaluation = save | {"kind": "evaluation", "step": 9, "time": 160.0, "waited_s": 4.0}
    write_rows(run.events(0), [save, evaluation])
    phases = attempts.timeline(run, record, 168.0, config).phases_s
    assert (phases["training"], phases["evaluation"]) == (29.0, 4.0)


def test_what_an_attempt_waited_for_slurm() -> None:
    first = attempt_record(started_at=1000.0, ended_at=2000.0)
    restarted = attempt_record(restart_count=1, attempt=1, started_at=2120.0)
    times = ("05:14:09", "05:00:00", "05:10:09")
    start, submit, eligible = (f"2026-11-21T{time}" for time in times)
    row = AccountingRow("7", "RUNNING", "0:0", "n[1-2]", start, "Unknown", submit, eligible)
    assert attempts.queue_s(restarted, [first], row) == 120.0
    assert attempts.queue_s(first, [], row) == 240.0
    assert attempts.queue_s(first, [], None) is None


def test_only_an_attempt_without_a_supervisor_is_closed_for_it(run: RunDir, job: Job) -> None:
    cluster, job_id = job
    allocation = start_of(cluster, "8", ("n1", "n2"))
    assert still_runs(run, attempt_record(), allocation) is None  # job 7 is unknown to Slurm
    of_it = attempt_record(job_id=job_id)
    assert still_runs(run, of_it, allocation) == f"job {job_id} is RUNNING"
    cluster.finish(job_id, "FAILED")
    assert still_runs(run, of_it, allocation) is None
    allocation.job_id = "7"
    assert still_runs(run, attempt_record(), allocation) is None  # an earlier start of this job
    local = attempt_record(job_id=None, host=gethostname(), pid=2**22)
    assert still_runs(run, local, LocalAllocation()) is None


def test_an_incarnation_that_slurm_had_lost_requeues_nothing(job: Job) -> None:
    cluster, job_id = job
    allocation = start_of(cluster, job_id, cluster.jobs[job_id].nodes)
    assert not was_restarted(allocation)
    cluster.fail_node("n2")
    assert not was_restarted(allocation)  # it waits: its excluded nodes are not set yet
    cluster.start(job_id)
    assert was_restarted(allocation)
    allocation.restart_count, allocation.nodes = 1, cluster.jobs[job_id].nodes
    assert not was_restarted(allocation)


def test_a_start_that_slurmctld_has_lost_in_a_crash(job: Job) -> None:
    cluster, job_id = job
    allocation = start_of(cluster, job_id, cluster.jobs[job_id].nodes)
    assert lost_start(allocation) is None
    assert lost_start(LocalAllocation()) is None
    # slurmctld has a state of before the start: pending, and no restart is counted.
    cluster.jobs[job_id].state, cluster.jobs[job_id].nodes = "PENDING", ()
    assert lost_start(allocation).startswith(f"slurmctld shows job {job_id} as pending")
    assert not was_restarted(allocation)
    cluster.states[allocation.nodes[0]] = "drained"
    cluster.start(job_id)
    assert lost_start(allocation).endswith(f"started it on {cluster.jobs[job_id].nodes[0]}")
    assert was_restarted(allocation)  # with the same count of restarts: it must not be requeued
    cluster.requeue(job_id)
    assert lost_start(allocation) is None  # a requeue is counted, and known


HANG = HangRecord(found_at=0.0, phase="stepping", step=7, waited_s=90.0, limit_s=60.0)


Ended = tuple[RunDir, FakeSlurm]


@pytest.fixture
def ended(tmp_path: Path) -> Ended:
    """A job of two nodes: n1's worker was killed, n2 reports nothing."""
    run, cluster = RunDir(tmp_path / "r"), FakeSlurm(("n1", "n2"))
    cluster.start(cluster.submit("#!/bin/bash\n#SBATCH --nodes=2\n"))
    paths = run.attempt("train", 0)
    NodeRecord(node="n1", pids={0: 5}, exit_codes={0: -9}).save(paths.node("n1"))
    run.logs.mkdir()
    run.stage_log("train").write_text("of precompile\ntrain attempt 0: begun\nKilled\n")
    return run, cluster


def gather(
    ended: Ended,
    stop_signal: str | None = None,
    hang: HangRecord | None = None,
    command: CommandConfig | None = None,
) -> Evidence:
    run, cluster = ended
    allocation, observed = start_of(cluster, "1", ("n1", "n2")), Observations(hang=hang)
    record = attempt_record(job_id="1")
    config = resolve("tiny_neox", "p4d")
    if command is not None:
        config = resolve("trainers/plain", "local", ["command.run=x"])
        config = config.with_settings("command", **dict(command))
    return gather_evidence(run, record, allocation, observed, stop_signal, (), config)


def test_what_slurm_and_the_nodes_report(ended: Ended) -> None:
    _, cluster = ended
    evidence = gather(ended)
    assert (evidence.slurm_state, evidence.step_out_of_memory) == ("RUNNING", False)
    assert (list(evidence.nodes), evidence.unreported, evidence.down_nodes) == (["n1"], ["n2"], {})
    assert evidence.log_tails == {0: ["train attempt 0: begun", "Killed"]}
    assert (evidence.unwritable, evidence.uncompiled) == (None, ())
    del cluster.states["n2"]  # sinfo does not list it, which is no evidence
    assert gather(ended).down_nodes == {}
    cluster.states["n2"], cluster.reasons["n2"] = "down*", "hw: PSU"
    cluster.finish("1", "OUT_OF_MEMORY")
    evidence = gather(ended)
    assert (evidence.down_nodes, evidence.step_out_of_memory) == ({"n2": "hw: PSU"}, True)


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ("00:04:00", "time limit 4 min is not above signal_lead_s 300"),
        ("00:05:00", "time limit 5 min is not"),
        ("00:06:00", ""),
        ("UNLIMITED", ""),
    ],
)
def test_a_time_limit_that_leaves_no_time(ended: Ended, limit: str, text: str) -> None:
    allocation, ended[1].time_limit = start_of(ended[1], "1", ("n1", "n2")), limit
    with pytest.raises(ConfigError, match=text) if text else nullcontext():
        allocation.check_time_limit(300)


def test_sigterm_waits_for_accounting(ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: ended[1].finish("1", "TIMEOUT"))
    monkeypatch.setattr(evidences, "time", clock)
    assert gather(ended, "SIGUSR1").slurm_state == "RUNNING"
    assert gather(ended, "SIGTERM").slurm_state == "TIMEOUT"


@pytest.mark.parametrize(("after_s", "state"), [(60, "PREEMPTED"), (-60, "RUNNING")])
def test_a_preemption_before_the_attempt_does_not_count(
    ended: Ended, after_s: int, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = ended[1]
    at = datetime.fromtimestamp(attempt_record().started_at + after_s).isoformat()
    job = cluster.batch_job("1")._replace(preempt_time=at)
    monkeypatch.setattr(cluster, "batch_job", lambda _: job)
    assert gather(ended).slurm_state == state


def test_a_launcher_that_could_not_end_its_workers_hung(ended: Ended) -> None:
    hang = gather(ended, hang=HANG).hang
    assert hang.suspects == hang.unresponsive_nodes == ("n2",)


def test_without_suspects_the_node_whose_stack_differs_is_one(ended: Ended) -> None:
    paths = ended[0].attempt("train", 0)
    NodeRecord(node="n2", pids={1: 6}, exit_codes={1: -9}).save(paths.node("n2"))
    paths.stacks(0).parent.mkdir()
    frame = 'Current thread 0x2 (most recent call first):\n  File "/x/{}.py", line 7 in f\n'
    paths.stacks(0).write_text(frame.format("torch/distributed"))
    paths.stacks(1).write_text(frame.format("slurmllm/data/stream"))
    evidence = gather(ended, hang=HANG)
    assert evidence.stacks[0] == "rank 1: f (data/stream.py:7)"
    assert (evidence.hang.suspects, evidence.hang.unresponsive_nodes) == (("n2",), ())


def test_the_evidence_of_a_stop_names_the_newest_checkpoint(ended: Ended) -> None:
    run = ended[0]
    assert gather(ended).trainer.leaving == "left before the first step was done; no checkpoint"
    run.metrics(0).parent.mkdir()
    run.checkpoint(5).mkdir(parents=True)
    texts = {5: "saved and left", 7: "left after step 7; newest checkpoint: step 5"}
    for step, leaving in texts.items():
        run.metrics(0).write_text(f'{{"step": {step}, "loss": 1.0}}\n')
        assert gather(ended).trainer.leaving == leaving


def test_what_a_trainer_of_another_project_has_left(ended: Ended) -> None:
    command = CommandConfig(run="x", steps=20)
    without = gather(ended, command=command).trainer
    assert without.leaving == (
        "ended without saving, as command.save_signal is none; no complete checkpoint is known"
    )
    assert without.unfinished == ""
    metrics = ended[0].metrics(0)
    metrics.parent.mkdir()
    # One row has no interval; steps may be counted from 0, be unlogged, or begin again.
    read = "the last step that was read is {} of 20 (command.steps)".format
    cases = {"7": read(7), "18 19": read(19), "5 15": read(15), "1 9 1 9": read(9), "10 20": ""}
    for steps, unfinished in (
        cases | {"17 18": f"done early, 18 of 20: {STEPS_NOT_PASSED}"}
    ).items():
        metrics.write_text("".join(f'{{"step": {n}, "loss": 1.0}}\n' for n in steps.split()))
        left = gather(ended, command=command).trainer
        early = (18, 20) if "early" in unfinished else None
        assert (left.unfinished, left.done_early) == (unfinished, early)
    path = ended[0].path / "out/step-5/done"
    path.parent.mkdir(parents=True)
    path.touch()
    fields = {"checkpoints": "{run}/out/step-{step}", "completion_file": "done"}
    saving = CommandConfig(run="x", save_signal="USR1", **fields)
    assert gather(ended, command=saving).trainer.leaving == (
        "asked to save, and left; newest checkpoint: step 5"
    )
