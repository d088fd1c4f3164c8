"""The site's records of nodes: a node that failed one run is excluded from the next ones."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from command_line import answer, call, refused
from fake_slurm import FakeSlurm
from launch.supervise.starts import start_of
from made_records import make_run

from slurmllm.core.config.load import load
from slurmllm.core.run.records import ExcludedNode, Finding, NodeEvidence, NodeHealth
from slurmllm.core.run.records import SiteNodeRecord as Record
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.slurm import client
from slurmllm.launch.submit import launch
from slurmllm.launch.supervise.exclusion import exclude_failed, excluded, excluded_names
from slurmllm.launch.supervise.policy import NodeFault
from slurmllm.launch.supervise.site_nodes import (
    LONGEST_S,
    add_record,
    end_by_health,
    in_effect,
    read_records,
    site_exclusions,
)
from slurmllm.launch.supervise.supervisor import Supervisor

HOUR_S = 3600.0
DEVICES = ("devices", "device errors")


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeSlurm:
    cluster = FakeSlurm([f"n{number}" for number in range(1, 9)])
    for module in (client, launch):
        monkeypatch.setattr(module, "SlurmClient", lambda: cluster)
    monkeypatch.chdir(tmp_path)
    return cluster


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def fail(run: RunDir, evidence: NodeEvidence = "hardware", *names: str) -> None:
    fault = NodeFault(evidence, "x", ("memory",) if evidence == "check" else ())
    exclude_failed(run, dict.fromkeys(names or ("n3",), fault), "fake")


def add(root: Path, node: str = "n3", source: str = "s", **fields: object) -> None:
    now = time.time()
    values = {"kind": "excluded", "node": node, "cluster": "fake", "since": now}
    values |= {"until": now + HOUR_S, "evidence": "no_answer", "reason": "x"}
    add_record(root, Record.model_validate(values | fields), source)


def names(root: Path, cluster: str = "fake") -> list[str]:
    return [record.node for record in in_effect(read_records(root), cluster)]


def submit(*more: str) -> dict[str, object]:
    return dict(answer(call("submit", "tiny_neox", "--nodes=4", "--data=builtin", "--json", *more)))


def test_a_node_that_failed_one_run_is_excluded_from_the_next(slurm: FakeSlurm, root: Path) -> None:
    run = make_run(root / "a")
    fail(run, "hardware", "n3")
    done = call("submit", "tiny_neox", "--nodes=4", "--data=builtin", "--name=b")
    assert "excluded: n3; `slurmllm nodes` shows why" in done.stderr
    assert {job.excluded for job in slurm.jobs.values()} == {("n3",)}
    assert submit("--exclude=n1")["excluded"] == ["n3"]
    assert slurm.jobs["4"].excluded == ("n1", "n3")
    # All nodes that are left: it cannot start without, and says so.
    wide = ("submit", "tiny_neox", "--nodes=8", "--data=builtin", "train.global_batch=16")
    done = call(*wide)
    assert "not excluded: n3: the job needs it" in done.stderr
    swept = call("submit", "tiny_neox", "--nodes=4", "--data=builtin", "--sweep=train.seed=1,2")
    assert "excluded: n3" in swept.stderr
    assert slurm.jobs[max(slurm.jobs, key=int)].excluded == ("n3",)
    other = RunDir(root / "b")
    assert excluded_names(slurm, other, load(other.config)) == ["n3"]  # of a requeue, a successor
    (row,) = answer(call("nodes", "b", "--json"))["site"]
    expected = {"node": "n3", "run": "a", "evidence": "hardware", "avoided": True}
    assert row | expected == row
    assert row["user"].endswith(f"(uid {os.geteuid()})")
    table = call("nodes").stdout
    assert "pending jobs" in table
    assert "avoided" in table


@pytest.mark.parametrize(
    ("evidence", "own", "site"),
    [("hardware", 1, 24), ("check", 1, 1), ("slurm", 1, 1), ("repeated", 1, 0.25)],
)
def test_durations(evidence: NodeEvidence, own: float, site: float, root: Path) -> None:
    run = make_run(root / "a")
    fail(run, evidence)
    (of_run,), (of_site,) = excluded(run), in_effect(read_records(root), "fake")
    assert of_run.until - of_run.since == pytest.approx(own * HOUR_S)
    assert of_site.until - of_site.since == pytest.approx(site * HOUR_S)
    for _ in range(3 if evidence == "repeated" else 0):  # however often that run blames it
        fail(run, evidence)
        (of_site,) = in_effect(read_records(root), "fake")
        assert of_site.until - of_site.since <= HOUR_S


def test_records_that_do_not_count(root: Path) -> None:
    fail(make_run(root / "never", "slurm.exclude_hours=0"))
    drilled = make_run(root / "drilled")
    drilled.drill.write_text("{}")
    fail(drilled)
    assert read_records(root) == []
    now = time.time()
    add(root, "n1", since=now - 9, until=now - 1)  # expired
    add(root, "n2", cluster="another")
    add(root, "n4", since=now + HOUR_S)  # a wrong clock
    assert names(root) == []
    add(root, "n5", until=now + 1e9)
    (record,) = in_effect(read_records(root), "fake")
    assert record.until - record.since == LONGEST_S


def test_jobs_avoid_a_share_of_the_partition(slurm: FakeSlurm, root: Path) -> None:
    now = time.time()
    kinds = ("repeated", "no_answer", "slurm", "check", "hardware", "user", "user")
    for number, evidence in enumerate(kinds, start=1):
        add(root, f"n{number}", evidence=evidence, since=now - 100 + number)
    add(root, "n99", evidence="user")  # it has left slurm.conf
    assert names(root)[:4] == ["n99", "n7", "n6", "n5"]
    run = make_run(root / "a")
    config = load(run.config)
    assert site_exclusions(slurm, config, root, run) == ["n7", "n6"]  # of eight
    avoided = {r["node"]: r["avoided"] for r in answer(call("nodes", "--json"))["site"]}
    assert [node for node, avoids in avoided.items() if avoids] == ["n7", "n6"]
    assert not {**avoided}["n99"]
    for count, most in ((1, 0), (2, 1), (3, 1)):
        few = FakeSlurm([f"n{7 - number}" for number in range(count)])
        assert len(site_exclusions(few, config, root, run)) == most
    slurm.config = None  # slurmctld is unreachable
    assert site_exclusions(slurm, config, root, run) == []


def test_many_writers_lose_nothing(root: Path) -> None:
    runs = [make_run(root / f"r{number}") for number in range(4)]

    def write(writer: int) -> None:
        for number in range(writer, 32, 4):
            exclude_failed(runs[writer], {f"n{number}": NodeFault("slurm", "x")}, "fake")
            add(root, "n99", source=f"source {number}", reason=str(number))

    with ThreadPoolExecutor(4) as pool:  # a run has one supervisor at a time
        list(pool.map(write, range(4)))
    records = read_records(root)
    assert {r.node for r in records} == {*(f"n{n}" for n in range(32)), "n99"}
    assert {r.reason for r in records if r.node == "n99"} == {str(n) for n in range(32)}
    assert not [*(root / ".nodes").glob(".*")]  # temporary files


def test_hostile_records_are_left_out(
    root: Path, slurm: FakeSlurm, caplog: pytest.LogCaptureFixture
) -> None:
    add(root, "n3", reason="x\x1b[2J" * 9)
    folder = root / ".nodes"
    whole = next(folder.iterdir()).read_text()
    for name, node in (("cut", None), ("option", "--all"), ("path", "../n3"), ("inf", "n4")):
        text = whole[:20] if node is None else whole.replace('"n3"', f'"{node}"')
        (folder / f"{name}.json").write_text(
            text.replace('"until": ', '"until": 1e999, "was": ') if name == "inf" else text
        )
    (folder / "large.json").write_text(whole + " " * 70_000)
    os.mkfifo(folder / "pipe.json")
    (folder / "folder.json").mkdir()
    (folder / "link.json").symlink_to("/dev/zero")
    assert names(root) == ["n3"]
    assert "8 unreadable records" in caplog.text
    assert "\x1b" not in call("nodes").stdout
    (folder / "notes").write_text("not a record")
    assert submit()["excluded"] == ["n3"]


def test_a_shared_folder_is_as_open_as_the_runs(root: Path, slurm: FakeSlurm) -> None:
    root.chmod(0o3775)
    add(root)
    assert (root / ".nodes").stat().st_mode & 0o7777 == 0o3775
    shared = root / "elsewhere"  # of users with a folder of runs each
    (root / ".nodes").rename(shared)
    (root / ".nodes").symlink_to(shared)
    add(root, "n4")
    assert sorted(names(root)) == ["n3", "n4"]
    old = time.time() - LONGEST_S - 9
    for path in shared.iterdir():
        os.utime(path, (old, old))
    add(root, "n5")
    assert names(root) == ["n5"]


def test_a_user_excludes_and_clears(slurm: FakeSlurm, root: Path) -> None:
    run = make_run(root / "a")
    fail(run)
    done = call("nodes", "--exclude=n[5-6]", "--reason=fan", "--hours=2")
    assert "n5 n6: excluded until" in done.stderr
    rows = {row["node"]: row for row in answer(call("nodes", "--json"))["site"]}
    assert (rows["n5"]["reason"], rows["n5"]["evidence"]) == ("fan", "user")
    assert rows["n5"]["until"] - rows["n5"]["since"] == pytest.approx(2 * HOUR_S)
    assert "no longer excluded" in call("nodes", "--clear=n3", "--include=n5").stderr
    assert names(root) == ["n6"]
    assert excluded(run) == []  # for the run that excluded it too
    for wrong, part in (
        (("--exclude=", "--reason=x"), "error: no node is named\n"),
        (("--clear=",), "error: no node is named\n"),
        (("--exclude=n5", "--reason=x", "--hours=nan"), "--hours nan: write a number of hours"),
        (("--exclude=n5",), "belong together"),
        (("--reason=x",), "belong together"),
        (("--exclude=n99", "--reason=x"), "n99 is not among the nodes of the cluster: n1"),
        (("--clear=n4",), "n4 is not among the excluded nodes: n6"),
        (("a", "--clear=n6"), "leave out RUN"),
        (("--exclude=n5", "--reason=x", "--hours=721"), "721"),
    ):
        refused = call("nodes", *wrong)
        assert (refused.exit_code, part in refused.stderr) == (2, True), refused.stderr
    fail(run)  # since then
    assert sorted(names(root)) == ["n3", "n6"]
    submit("--name=b")
    assert "n6 again" in call("nodes", "b", "--include=n6").stderr
    assert excluded_names(slurm, RunDir(root / "b"), load(run.config)) == ["n3"]
    assert excluded_names(slurm, run, load(run.config)) == ["n3", "n6"]


CASES: list[tuple[NodeEvidence, tuple[str, ...], bool]] = [
    ("hardware", ("memory",), False),
    ("hardware", (*DEVICES, "memory"), True),
    ("check", DEVICES, False),
    ("check", ("memory",), True),
    ("slurm", (), True),
    ("no_answer", (), True),
    ("repeated", ("memory",), True),
    ("user", (*DEVICES, "memory"), False),
]


@pytest.mark.parametrize(("evidence", "passed", "ends"), CASES)
def test_a_passed_health_ends_exclusions_that_it_covers(
    evidence: NodeEvidence, passed: tuple[str, ...], ends: bool, root: Path
) -> None:
    run = make_run(root / "a")
    fail(run, evidence)

    def health(**fields: object) -> dict[str, NodeHealth]:
        findings = [Finding(check=check, status="ok", value=1) for check in passed]
        values = {"node": "n3", "findings": findings, "checks_s": 0.1} | fields
        return {"n3": NodeHealth.model_validate(values)}

    failed = Finding(check="clock", status="fail", value=9)
    for record in (health(checks_s=None), health(findings=[failed]), {}):
        assert [*end_by_health(root, "fake", record)] == []
    assert [ended for _, ended in end_by_health(root, "fake", health())] == [ends]
    assert names(root) == [] if ends else ["n3"]
    assert len(excluded(run)) == (0 if ends else 1)
    fail(run, evidence)  # again, later
    assert names(root) == ["n3"]


def test_spare_nodes_take_the_place_of_excluded_ones(
    slurm: FakeSlurm, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(root / "a", "slurm.spare_nodes=2")
    for node in ("n1", "n2"):
        add(root, node)
    allocation = start_of(slurm, "1", ("n1", "n2", "n3", "n4"))
    made = Supervisor(run, "train", allocation)
    assert made.allocation.nodes == ("n1", "n3")  # its own process is on n1
    assert "without a spare node: n1" in caplog.text
    assert allocation.choose(("n4",), 3, ("n2",)) == ("n1", "n2", "n3")


def test_records_of_earlier_versions_are_read(slurm: FakeSlurm, root: Path) -> None:
    run = make_run(root / "a")
    node = {"node": "n3", "reason": "x" * 9999, "since": time.time(), "until": time.time() + 60}
    run.excluded.write_text(json.dumps({"nodes": [node]}))
    assert call("nodes", "a", "--json").exit_code == 0
    assert excluded(run) == [ExcludedNode.model_validate(node)]
    add(root, kind="cleared", since=time.time() + 1)
    assert excluded(run) == []


def test_a_record_ends_those_of_machines_whose_clock_is_ahead(slurm: FakeSlurm, root: Path) -> None:
    run, ahead = make_run(root / "a"), time.time() + 300
    for node in ("n3", "n4"):
        add(root, node, evidence="hardware", since=ahead, until=ahead + HOUR_S)
    call("nodes", "--clear", "n3")
    assert names(root) == ["n4"]
    call("nodes", "a", "--include", "n4")
    assert excluded_names(slurm, run, load(run.config)) == []
    fail(run, "hardware", "n3")  # by a machine whose clock is behind
    assert names(root)[0] == "n3"
    assert [node.node for node in excluded(run)] == ["n3"]


def test_a_weaker_suspicion_does_not_end_a_stronger_one(root: Path) -> None:
    run = make_run(root / "a")
    fail(run, "hardware")
    fail(run, "repeated")
    (record,) = in_effect(read_records(root), "fake")
    assert record.evidence == "hardware"
    assert record.until - record.since == pytest.approx(24 * HOUR_S)


def test_the_partition_is_that_of_the_new_job(
    slurm: FakeSlurm, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(root)
    monkeypatch.setenv("SLURM_JOB_PARTITION", "interactive")  # in which `submit` is called
    assert submit()["excluded"] == ["n3"]
    slurm.unequal = {f"n{n}": {"partition": "gpu", "default": False} for n in range(1, 9)}
    assert submit("--", "-p", "gpu")["excluded"] == ["n3"]


def test_the_share_and_unreadable_records_are_said(slurm: FakeSlurm, root: Path) -> None:
    done = call("nodes", "--exclude", "n[1-4]", "--reason", "x" * 5000)
    assert "at most a quarter of a partition" in done.stderr
    (root / ".nodes/n9.json").write_text("{}")
    unreadable = f"1 unreadable records, such as {root}/.nodes/n9.json"
    assert unreadable in call("nodes").stderr


def test_another_user_s_closed_run_hides_no_node(slurm: FakeSlurm, root: Path) -> None:
    add(root)
    make_run(root / "a").jobs.write_text("{")  # the same error as of a closed one
    done = call("nodes")
    assert (done.exit_code, "n3" in done.stdout) == (0, True)
    assert "a/jobs.json is damaged" in done.stderr
    assert "a/jobs.json is damaged" in refused(call("nodes", "a"), 4)
