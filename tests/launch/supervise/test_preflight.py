"""Preflight: the ending if a node fails its checks, and the nodes that a run excludes."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm
from launch.supervise.starts import attempt_record, start_of
from made_records import save_submission

from slurmllm.core.config.load import load
from slurmllm.core.config.resolve import resolve
from slurmllm.core.errors import StorageError, UserError
from slurmllm.core.run.records import (
    AttemptRecord,
    ExcludedNode,
    ExcludedNodes,
    JobsRecord,
    NodeHealth,
    NodeRecord,
)
from slurmllm.core.run.rundir import RunDir, Stage
from slurmllm.launch.diagnose import fail, ok, warn
from slurmllm.launch.submit.prepare import render_run, write_run
from slurmllm.launch.supervise import exclusion
from slurmllm.launch.supervise.allocation import LocalAllocation, SlurmAllocation
from slurmllm.launch.supervise.attempts import close_attempt, open_attempt
from slurmllm.launch.supervise.classify import Ending
from slurmllm.launch.supervise.exclusion import (
    drain,
    exclude_failed,
    excluded,
    excluded_names,
    failing,
    include,
    nodes_to_avoid,
)
from slurmllm.launch.supervise.preflight import Preparation, preflight, preflight_ending
from slurmllm.launch.supervise.supervisor import Supervisor

OVERRIDES = ("slurm.partition=main", "slurm.drain=true", "cluster.health.min_node_local_gb=0")
DISK = fail("node-local disk", 0.1, 20, "0.1 GB free in /scratch; profile trn1 requires 20")
CHIP = fail("devices", 30, 32, "30 NeuronCores; profile trn1 requires 32")
ABSENT = fail("devices", "unusable", "", "neuron-ls is neither on $PATH nor in /opt/aws/neuron/bin")
CLOCK = fail("clock", 9.0, 2.0, "the clock differs by +9 s from the other nodes'; the limit is 2 s")
SLOW_LINK = fail("all-reduce", 2.0, 9.0, "2 GB/s; profile trn1 requires 9")
SILENT = fail("answer", "none", "", "no response within 60 s")


def health(node: str, *findings: object) -> NodeHealth:
    return NodeHealth.model_validate({"node": node, "findings": findings, "checks_s": 0.1})


SLOW = warn("shared file system", 0.4, 0.25, "a fsynced write to /fsx takes 0.40 s")


@pytest.mark.parametrize(
    ("findings", "evidence", "blamed"),
    [
        ([(ok("devices", 32),), (SLOW,)], None, ()),
        ([(), (), (CHIP, DISK)], [f"n3: {CHIP.message}", f"n3: {DISK.message}"], ("n3",)),
        ([(DISK,)], [f"n1: {DISK.message}"], ("n1",)),
        ([(CHIP,)], [f"n1: {CHIP.message}"], ("n1",)),
        ([(SILENT,), (SILENT,)], [f"all nodes: {SILENT.message}"], ()),
        ([(CLOCK,), (CLOCK,)], [f"all nodes: {CLOCK.message}"], ()),
        ([(SLOW_LINK,), (SLOW_LINK,)], [f"all nodes: {SLOW_LINK.message}"], ()),
    ],
)
def test_a_node_that_fails_is_named_and_blamed(
    findings: list[tuple[object, ...]], evidence: list[str] | None, blamed: tuple[str, ...]
) -> None:
    names = (f"n{number + 1}" for number in range(len(findings)))
    nodes = {name: health(name, *of_node) for name, of_node in zip(names, findings, strict=True)}
    lines = tuple(f"preflight: {line}" for line in evidence or ())
    expected = None if evidence is None else Ending("node_failure", lines, blamed, started=False)
    assert preflight_ending(nodes, "trn1", "cpu") == expected


@pytest.mark.parametrize(
    ("findings", "evidence", "blamed"),
    [
        ([(DISK,), (DISK, CHIP)], [f"all nodes: {DISK.message}", f"n2: {CHIP.message}"], ("n2",)),
        ([(ABSENT,), (ABSENT,)], [f"all nodes: {ABSENT.message}"], ()),
        ([(ABSENT,)], [f"n1: {ABSENT.message}"], ()),
        ([(ABSENT, DISK)], [f"n1: {ABSENT.message}", f"n1: {DISK.message}"], ("n1",)),
    ],
)
def test_what_all_nodes_fail_stops_the_run_with_profile_and_partition(
    findings: list[tuple[object, ...]], evidence: list[str], blamed: tuple[str, ...]
) -> None:
    nodes = {f"n{n}": health(f"n{n}", *of_node) for n, of_node in enumerate(findings, 1)}
    ending = preflight_ending(nodes, "trn1", "cpu")
    assert (ending.ending, ending.blamed_nodes) == ("bad_configuration", blamed)
    (fix,) = set(ending.evidence) - {f"preflight: {line}" for line in evidence}
    assert "in partition cpu, has what profile trn1 requires" in fix
    assert len(ending.evidence) == 1 + len(evidence)


XID = fail("Xid", 1, 0, "kernel log: Xid (PCI:0000:83:00): 79")
HELD = fail("GPU memory", 9000, 1024, "GPU 0: 9000 MiB in use before the start; the limit is 1024")


@pytest.mark.parametrize(
    ("failing", "num_nodes", "ending", "blamed"),
    [
        ({2: XID}, 4, "node_failure", ("n2",)),
        ({1: XID, 2: HELD, 3: CHIP}, 4, "node_failure", ("n1", "n2", "n3")),
        ({1: HELD, 2: HELD}, 3, "node_failure", ("n1", "n2")),
        ({1: HELD, 2: HELD}, 4, "node_failure", ("n1", "n2")),
        ({1: HELD, 2: HELD, 4: HELD}, 4, "bad_configuration", ()),  # all but one
        ({1: HELD, 2: HELD}, 2, "bad_configuration", ()),
        ({1: SILENT, 2: SILENT, 3: SILENT}, 4, "node_failure", ("n1", "n2", "n3")),
        ({1: XID}, 1, "node_failure", ("n1",)),
    ],
)
def test_a_finding_of_all_nodes_or_of_all_but_one_of_many_blames_none(
    failing: dict[int, Any], num_nodes: int, ending: str, blamed: tuple[str, ...]
) -> None:
    findings = {n: (failing[n],) if n in failing else () for n in range(1, num_nodes + 1)}
    nodes = {f"n{n}": health(f"n{n}", *of_node) for n, of_node in findings.items()}
    result = preflight_ending(nodes, "p4d", "gpu")
    assert (result.ending, result.blamed_nodes) == (ending, blamed)
    if ending == "bad_configuration":
        share = "all" if len(failing) == num_nodes else "3 of 4"
        assert result.evidence[0] == f"preflight: {share} nodes: {HELD.message}"
        assert "in partition gpu, has what profile p4d requires" in result.evidence[1]


def test_dcgm_runs_before_the_first_attempt_of_a_job_only(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(
        "slurmllm.launch.supervise.preflight.check_nodes",
        lambda _, config, *rest: asked.append(config.cluster.health.dcgm),
    )
    for dcgm, expected in (("always", ["always", "never"]), ("health", ["never", "never"])):
        config = resolve("tiny_neox", "local", [*OVERRIDES, f"cluster.health.dcgm={dcgm}"])
        prepared = Preparation(run, "precompile", config, LocalAllocation(), lambda: False)
        for _ in expected:
            assert prepared.prepare(attempt_record(), {}) is None
        assert asked == expected
        asked.clear()


def test_a_warning_is_logged_with_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes, run = {"n1": health("n1"), "n2": health("n2", SLOW)}, RunDir(tmp_path)
    monkeypatch.setattr("slurmllm.launch.supervise.preflight.check_nodes", lambda *_: nodes)
    config, record = resolve("tiny_neox", "local"), attempt_record()
    assert preflight(run, record, config, LocalAllocation(), lambda: False) is None
    assert caplog.messages == [f"preflight: warning: n2: {SLOW.message}"]


@pytest.mark.parametrize("nodes", [("n1",), ("n1", "n2")])
def test_a_file_system_that_all_find_wanting_is_no_nodes_fault(nodes: tuple[str, ...]) -> None:
    shared = fail("shared file system", "unusable", "", "cannot write /fsx: Read-only file system")
    healths = {name: health(name, shared) for name in nodes}
    ending = preflight_ending(healths, "trn1", "cpu")
    assert (ending.ending, ending.blamed_nodes) == ("storage_failure", ())
    assert "Read-only file system" in ending.evidence[0]
    ending = preflight_ending({**healths, "n9": health("n9")}, "trn1", "cpu")
    assert (ending.ending, ending.blamed_nodes) == ("node_failure", nodes)


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
    made = RunDir(tmp_path / "runs" / "r")
    for path in (made.path, tmp_path / "disk"):
        path.mkdir(parents=True)
    config = resolve("tiny_neox", "local", [*OVERRIDES, f"cluster.node_local={tmp_path}/disk"])
    write_run(render_run(config, 2, made))
    return made


def allocation(
    run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, stage: Stage = "train"
) -> Allocation:
    job = slurm.submit(run.script(stage).read_text())
    slurm.start(job)
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_JOB_NODELIST", ",".join(slurm.jobs[job].nodes))
    return Allocation(slurm)


def test_an_attempt_ends_with_its_preflight_and_the_next_keeps_off_the_node(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Records that are unreadable for a while cost no exclusion.
    refusals = [StorageError("cannot read attempt.json: Stale file handle")]

    def failing(*arguments: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return exclusion.failing(*arguments)

    monkeypatch.setattr("slurmllm.launch.supervise.supervisor.failing", failing)
    slurm = FakeSlurm(("n1", "n2", "n3", "n4"))
    asked = allocation(run, slurm, monkeypatch)
    assert asked.nodes == ("n1", "n2")
    save_submission(run, nodes=2, train_job=asked.job_id)
    assert Supervisor(run, "train", asked).main() == 75
    record = AttemptRecord.load(run.attempt("train", 0).record)
    assert (record.ending, record.action) == ("node_failure", "chain")
    assert record.blamed_nodes == ("n2",)
    assert record.evidence[0].startswith("preflight: n2: /nowhere does not exist")
    assert list(record.phases_s) == ["preflight"]
    assert NodeHealth.load(run.attempt("train", 0).health("n1")).of("fail") == ()
    assert NodeHealth.load(run.attempt("train", 0).health("n2")).of("fail")
    (node,) = excluded(run)
    assert (node.node, node.evidence, node.until - node.since) == ("n2", "check", 3600.0)
    last = JobsRecord.last_of(run)
    assert last.earlier_jobs == (asked.job_id,)
    assert slurm.jobs[last.train_job or ""].excluded == ("n2",)
    assert "drained" not in caplog.text  # a full disk is no broken hardware
    assert "Stale file handle" in caplog.text


def test_a_precompile_job_is_requeued_too_and_the_train_job_keeps_off(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = FakeSlurm(("n2", "n1", "n3", "n4"))
    slurm.may_drain = True
    asked = allocation(run, slurm, monkeypatch, "precompile")
    train = slurm.submit(run.script("train").read_text(), after_ok=asked.job_id)
    save_submission(run, nodes=2, train_job=train, precompile_job=asked.job_id)
    assert Supervisor(run, "precompile", asked).main() == 75
    assert slurm.jobs[asked.job_id].state == slurm.jobs[train].state == "PENDING"
    assert slurm.jobs[asked.job_id].excluded == slurm.jobs[train].excluded == ("n2",)


NODES = ("n1", "n2", "n3")
KILLED = "rank 3 on n3 was ended by SIGKILL from outside"


def exclude(
    run: RunDir, slurm: FakeSlurm, text: str = KILLED, reports: bool = False
) -> list[ExcludedNode]:
    """Close an attempt that is blamed on n3; returns what the supervisor excludes for it."""
    if not slurm.jobs:
        slurm.start(slurm.submit("#!/bin/bash\n#SBATCH --nodes=3\n"))
    of_job = start_of(slurm, "1", NODES)
    record = open_attempt(run, "train", load(run.config), LocalAllocation())
    record = record.model_copy(update={"job_id": "1", "nodes": NODES})
    if reports:
        path = run.attempt("train", record.attempt).node("n3")
        NodeRecord(node="n3", pids={0: 5}, exit_codes={0: 70}).save(path)
    ending = Ending("node_failure", (text,), ("n3",))
    faults = failing(run, record, ending, of_job)
    close_attempt(run, record, ending)
    assert failing(run, record, ending, LocalAllocation()) == {}
    return exclude_failed(run, faults)


@pytest.mark.parametrize(
    ("text", "state", "answers", "evidence"),
    [
        ("n3 stopped responding", "idle", "n1 n2 n3", None),  # srun was refused: a launch failure
        ("n3 stopped responding", "idle", "n1 n2", "no_answer"),
        ("n3 stopped responding", "idle", "", None),  # srun itself does not work
        ("n3 stopped responding", "allocated*", "n1 n2", "slurm"),
        ("n3 stopped responding", "allocated*", "n1 n2 n3", None),  # slurmctld was restarted
        ("n3 stopped responding", "draining", "n1 n2 n3", None),  # an administrator's
        ("n3 stopped responding", "powering_down", "n1 n2 n3", None),  # Slurm's power saving
        ("rank 3 on n3: nrt_execute status=1201 message=x", "idle", "n1 n2 n3", "hardware"),
        ("rank 3 on n30: nrt_execute status=1201 message=x", "idle", "n1 n2 n3", None),
    ],
)
def test_only_evidence_about_the_node_excludes_it(
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    state: str,
    answers: str,
    evidence: str | None,
) -> None:
    slurm = FakeSlurm(NODES)
    slurm.may_drain = True
    slurm.start(slurm.submit("#!/bin/bash\n#SBATCH --nodes=3\n"))
    slurm.states["n3"] = state
    monkeypatch.setattr(slurm, "responds", lambda _, node: node in answers.split())
    new = exclude(run, slurm, text)
    assert [(n.node, n.evidence, n.until - n.since) for n in new] == (
        [("n3", evidence, 3600.0)] if evidence else []
    )
    drain(slurm, new)
    assert (slurm.states["n3"] == "drained") is (evidence == "hardware")


def test_again_and_for_longer(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm(NODES)
    assert exclude(run, slurm, reports=True) == []
    (node,) = exclude(run, slurm, reports=True)
    assert node.reason == "blamed for 2 attempts in a row: train 0, train 1"
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2 * 3600)
    assert excluded(run) == []
    (node,) = exclude(run, slurm, reports=True)
    assert (node.exclusions, node.until - node.since) == (2, 4 * 3600)


def test_included_nodes_are_taken_off_pending_jobs(run: RunDir) -> None:
    slurm, script = FakeSlurm(NODES), "#!/bin/bash\n#SBATCH --nodes=2\n"
    config = load(run.config)
    names = excluded_names(slurm, run, config)
    assert nodes_to_avoid(slurm, script, (), names) == []
    times = {"since": time.time(), "until": time.time() + 60}
    nodes = [ExcludedNode(node=name, reason="x", **times) for name in ("n2", "n3")]
    ExcludedNodes(nodes=tuple(nodes)).save(run.excluded)
    names = excluded_names(slurm, run, config)
    assert nodes_to_avoid(slurm, script, (), names) == ["n3"]  # the job needs two of three
    assert nodes_to_avoid(slurm, f"{script}#SBATCH --exclude=n1\n", (), names) == []
    job = slurm.submit(script, exclude=["n2", "n3"])
    save_submission(run, nodes=2, train_job=job)
    with pytest.raises(UserError, match="does not exclude n1; excluded nodes: n2, n3"):
        include(run, slurm, ["n1"])
    assert include(run, slurm, ["n2"]) == [job]
    assert [node.node for node in excluded(run)] == ["n3"]
    assert slurm.jobs[job].excluded == ("n3",)


@pytest.mark.parametrize("own", [None, "n3"])
def test_an_expired_list_is_taken_off_the_job(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, own: str | None
) -> None:
    slurm = FakeSlurm(("n1", "n3", "n2"))
    ExcludedNodes(nodes=(ExcludedNode(node="n2", reason="x", since=0, until=1),)).save(run.excluded)
    asked = allocation(run, slurm, monkeypatch)
    job = slurm.jobs[asked.job_id]
    job.excluded = ("n2",)
    supervisor = Supervisor(run, "train", asked)
    supervisor.next_job.config = supervisor.config.with_settings("slurm", exclude=own)
    record = open_attempt(run, "train", load(run.config), asked)
    left = close_attempt(run, record, Ending("advance_signal", ("SIGUSR1: saved and left",)))
    supervisor.next_job.return_to_queue(left)
    assert (job.state, job.excluded) == ("PENDING", (own,) if own else ())
