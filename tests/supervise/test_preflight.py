"""Preflight: the ending if a node fails its checks, and the nodes that a run excludes."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm

from slurmllm.config.load import load
from slurmllm.config.resolve import resolve
from slurmllm.diagnose.finding import fail, ok, warn
from slurmllm.run.records import (
    AttemptRecord,
    ExcludedNode,
    ExcludedNodes,
    JobsRecord,
    NodeHealth,
    NodeRecord,
    Submission,
)
from slurmllm.run.rundir import RunDir
from slurmllm.submit.prepare import render_run, write_run
from slurmllm.supervise.allocation import LocalAllocation, SlurmAllocation
from slurmllm.supervise.attempts import close_attempt, open_attempt
from slurmllm.supervise.classify import Ending
from slurmllm.supervise.exclusion import exclude_failed, excluded, to_avoid
from slurmllm.supervise.preflight import preflight_ending, preflight_warnings
from slurmllm.supervise.supervisor import Supervisor

OVERRIDES = ("slurm.partition=main", "slurm.drain=true", "cluster.health.min_node_local_gb=0")
DISK = fail("node-local disk", 0.1, 20, "0.1 GB free in /scratch; profile trn1 requires 20")
CHIP = fail("devices", 30, 32, "30 NeuronCores; profile trn1 requires 32")


def health(node: str, *findings: object) -> NodeHealth:
    return NodeHealth.model_validate({"node": node, "findings": findings, "checks_s": 0.1})


def test_nodes_that_are_fit() -> None:
    slow = warn("shared file system", 0.4, 0.25, "a fsynced write to /fsx takes 0.40 s")
    nodes = {"n1": health("n1", ok("devices", 32)), "n2": health("n2", slow)}
    assert preflight_ending(nodes) is None
    assert preflight_warnings(nodes) == ("n2: a fsynced write to /fsx takes 0.40 s",)


def test_a_node_that_fails_is_named_and_blamed() -> None:
    ending = preflight_ending(
        {"n1": health("n1"), "n2": health("n2"), "n3": health("n3", CHIP, DISK)}
    )
    assert ending == Ending(
        "node_failure",
        (f"preflight: n3: {CHIP.message}", f"preflight: n3: {DISK.message}"),
        ("n3",),
        started=False,
    )


def test_what_all_nodes_fail_is_no_nodes_fault() -> None:
    both = {"n1": health("n1", DISK), "n2": health("n2", DISK, CHIP)}
    ending = preflight_ending(both)
    assert ending is not None
    assert ending.blamed_nodes == ("n2",)
    assert ending.evidence == (
        f"preflight: all nodes: {DISK.message}",
        f"preflight: n2: {CHIP.message}",
    )
    alone = preflight_ending({"n1": health("n1", DISK)})
    assert alone is not None
    assert alone.blamed_nodes == ("n1",)


@pytest.mark.parametrize("nodes", [("n1",), ("n1", "n2")])
def test_a_shared_file_system_that_all_find_wanting_is_no_nodes_fault(
    nodes: tuple[str, ...],
) -> None:
    shared = fail("shared file system", "unusable", "", "cannot write /fsx: Read-only file system")
    found = {name: health(name, shared) for name in nodes}
    ending = preflight_ending(found)
    assert ending is not None
    assert (ending.ending, ending.blamed_nodes) == ("storage_failure", ())
    assert "Read-only file system" in ending.evidence[0]
    one = preflight_ending({**found, "n9": health("n9")})
    assert one is not None
    assert (one.ending, one.blamed_nodes) == ("node_failure", nodes)


class Allocation(SlurmAllocation):
    """Slurm's nodes, whose checks run here; n2 has no disk."""

    def ask(self, command: Sequence[str]) -> list[subprocess.Popen[bytes]]:
        at = list(command).index("--profile") + 1
        profile = json.loads(command[at])
        started = []
        for name in self.nodes:
            arguments = list(command)
            if name == "n2":
                arguments[at] = json.dumps({**profile, "node_local": "/nowhere"})
            local = LocalAllocation()
            local.nodes = (name,)
            started += local.ask(arguments)
        return started


@pytest.fixture(autouse=True)
def _handlers_of_before() -> Iterator[None]:
    """A supervisor takes signals for itself."""
    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "runs" / "r")
    found.path.mkdir(parents=True)
    disk = tmp_path / "disk"
    disk.mkdir()
    config = resolve("tiny_neox", "local", [*OVERRIDES, f"cluster.node_local={disk}"])
    write_run(render_run(config, 2, found))
    return found


def allocation(
    run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, stage: str = "train"
) -> Allocation:
    job = slurm.submit(run.script("train" if stage == "train" else "precompile").read_text())
    slurm.start(job)
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_JOB_NODELIST", ",".join(slurm.jobs[job].nodes))
    return Allocation(slurm)


def test_an_attempt_ends_with_its_preflight_and_the_next_keeps_off_the_node(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slurm = FakeSlurm(("n1", "n2", "n3", "n4"))
    asked = allocation(run, slurm, monkeypatch)
    assert asked.nodes == ("n1", "n2")
    assert Supervisor(run, "train", asked).main() == 75
    record = AttemptRecord.load(run.attempt("train", 0).record)
    assert (record.ending, record.action, record.blamed_nodes) == (
        "node_failure",
        "requeue",
        ("n2",),
    )
    assert record.evidence[0].startswith("preflight: n2: /nowhere does not exist")
    assert list(record.phases_s) == ["preflight"]
    assert NodeHealth.load(run.attempt("train", 0).health("n1")).of("fail") == ()
    assert NodeHealth.load(run.attempt("train", 0).health("n2")).of("fail")
    (node,) = excluded(run)
    assert (node.node, round((node.until - node.since) / 3600)) == ("n2", 24)
    assert slurm.jobs[asked.job_id].excluded == ("n2",)
    assert "n2 is not drained (slurm.drain): scontrol failed" in caplog.text


def test_a_precompile_job_is_requeued_too_and_the_train_job_keeps_off(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = FakeSlurm(("n2", "n1", "n3", "n4"))
    slurm.may_drain = True
    asked = allocation(run, slurm, monkeypatch, "precompile")
    train = slurm.submit(run.script("train").read_text(), after_ok=asked.job_id)
    sent = Submission(
        submitted_at=0,
        nodes=2,
        local=False,
        first_attempt=0,
        precompile_job=asked.job_id,
        train_job=train,
    )
    JobsRecord(submissions=(sent,)).save(run.jobs)
    assert Supervisor(run, "precompile", asked).main() == 75
    assert slurm.jobs[asked.job_id].state == slurm.jobs[train].state == "PENDING"
    assert slurm.jobs[asked.job_id].excluded == slurm.jobs[train].excluded == ("n2",)
    assert slurm.states["n2"] == "drained"
    assert slurm.reasons["n2"].startswith("slurmllm: preflight: n2: /nowhere")


def closed(run: RunDir, *blamed: str, report: bool = True) -> AttemptRecord:
    """An attempt of a Slurm job that is put down to nodes, which reported their workers' ends."""
    record = open_attempt(run, "train", load(run.config), LocalAllocation())
    record = record.model_copy(update={"job_id": "7", "nodes": ("n1", "n2", "n3")})
    for name in blamed if report else ():
        path = run.attempt("train", record.attempt).node(name)
        NodeRecord(node=name, pids={0: 5}, exit_codes={0: 70}).save(path)
    reasons = tuple(f"rank 3 on {name} was ended by SIGKILL from outside" for name in blamed)
    return close_attempt(run, record, Ending("node_failure", reasons, blamed))


def test_a_node_that_two_attempts_are_put_down_to(run: RunDir) -> None:
    config = load(run.config)
    assert exclude_failed(run, closed(run, "n3"), config) == []
    assert exclude_failed(run, closed(run, "n2"), config) == []
    (node,) = exclude_failed(run, closed(run, "n3"), config)
    assert node.node == "n3"
    assert node.reason == "blamed for 2 attempts: train 0, train 2"
    assert [n.node for n in excluded(run)] == ["n3"]


def test_a_lost_node_at_once_and_for_its_time(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    exclude_failed(run, closed(run, "n3", report=False), load(run.config))
    (node,) = excluded(run)
    assert node.reason == "rank 3 on n3 was ended by SIGKILL from outside"
    now = time.time()
    with monkeypatch.context() as later:
        later.setattr(time, "time", lambda: now + 25 * 3600)
        assert excluded(run) == []
    local = closed(run, "local0", report=False).model_copy(update={"job_id": None})
    assert exclude_failed(run, local, load(run.config)) == []


def test_a_new_job_of_the_run_keeps_off_where_others_can_take_the_place(run: RunDir) -> None:
    config, slurm = load(run.config), FakeSlurm(("n1", "n2", "n3"))
    assert to_avoid(slurm, run, config, 2) == []
    node = ExcludedNode(node="n3", reason="x", since=time.time(), until=time.time() + 60)
    ExcludedNodes(nodes=(node,)).save(run.excluded)
    assert to_avoid(slurm, run, config, 2) == ["n3"]
    assert to_avoid(slurm, run, config, 3) == []
    again = config.recipe.slurm.model_copy(update={"exclude": "n9"})
    given = config.recipe.model_copy(update={"slurm": again})
    scripts = render_run(replace(config, recipe=given), 2, run, ["n3"]).scripts
    assert all("#SBATCH --exclude=n9,n3\n" in text for text in scripts.values())
    assert render_run(config, 2, run, ["n3"]).config.recipe.slurm.exclude is None


def test_an_expired_list_is_taken_off_the_job(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm(("n1", "n3", "n2"))
    ExcludedNodes(nodes=(ExcludedNode(node="n2", reason="x", since=0, until=1),)).save(run.excluded)
    asked = allocation(run, slurm, monkeypatch)
    job = slurm.jobs[asked.job_id]
    job.excluded = ("n2",)
    supervisor = Supervisor(run, "train", asked)
    record = open_attempt(run, "train", load(run.config), asked)
    left = close_attempt(run, record, Ending("advance_signal", ("SIGUSR1: saved and left",)))
    supervisor.next_job.return_to_queue(asked, left)
    assert (job.state, job.excluded) == ("PENDING", ())
