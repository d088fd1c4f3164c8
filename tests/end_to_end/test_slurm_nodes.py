"""On a real Slurm: exclusions, and waits that are explained."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from end_to_end.bench import LEAN, SLOWLY, SMALL, BenchOfThreads
from end_to_end.scenes import SceneBench, scene

from slurmllm.core.run.records import ExcludedNode, ExcludedNodes, SiteNodeRecord
from slurmllm.core.slurm.client import SlurmClient
from slurmllm.launch.supervise.site_nodes import add_record

pytestmark = pytest.mark.slurm
NODE, DRAINED = "n21", "n22"  # no other scene needs them
RESUMED = (f"NodeName={DRAINED}", "State=RESUME")


def scontrol(*arguments: str) -> None:
    subprocess.run(["scontrol", *arguments], check=True, capture_output=True)


@scene()
def test_a_node_without_a_substitute_is_not_excluded(stage: SceneBench) -> None:
    """Other nodes are idle, but not of the feature; the lost one comes back after 25 s."""
    stage.submit("two", "--set=slurm.directives.train={constraint: a100}", *SLOWLY)
    stage.wait_for_step("two", 5)
    stage.cluster.call("fail", "n16")
    time.sleep(25)
    stage.cluster.call("heal", "n16")
    stage.wait("two", "done", "stopped")
    first, *between, last = stage.endings("two")
    assert (first, last) == (("node_failure", "requeue"), ("done", "finish"))
    # A node that registers again may end the attempt that has just begun on it.
    assert set(between) <= {("advance_signal", "requeue")}
    assert stage.attempt("two", 0)["blamed_nodes"] == ["n16"]
    (row,) = json.loads(stage.look("nodes", "two", "--json"))["excluded"]
    assert (row["node"], row["jobs"]) == ("n16", [])  # recorded, and in no job's list
    assert row["evidence"] in ("slurm", "no_answer")
    assert round((row["until"] - row["since"]) / 3600) == 1


@scene()
def test_a_pending_run_starts_on_an_included_node(stage: SceneBench) -> None:
    held = "--set=slurm.directives.train.hold=true"  # or it starts before its list has changed
    nodes = "--set=slurm.directives.train.constraint=h100"
    job = stage.submit("short", *LEAN, nodes, held, "--set=train.steps=20")
    SlurmClient().exclude(job, ["n14"])
    scontrol("release", job)
    node = ExcludedNode(node="n14", reason="x", since=time.time(), until=time.time() + 3600)
    ExcludedNodes(nodes=(node,)).save(stage.runs / "short" / "excluded.json")
    reason = lambda: stage.status("short")["reason"]  # noqa: E731
    stage.until(lambda: "BadConstraints" in reason(), "never BadConstraints", every_s=2.0)
    remedy = "excluded: n14; `slurmllm resume short --include n14` uses them"
    assert remedy in reason()
    (row,) = json.loads(stage.look("nodes", "short", "--json"))["excluded"]
    assert (row["node"], row["jobs"]) == ("n14", [job])
    stage.call("resume", "short", "--include=n14")
    stage.wait("short", "done", "stopped")
    assert stage.endings("short") == [("done", "finish")]
    assert json.loads(stage.look("nodes", "short", "--json"))["excluded"] == []


@scene()
def test_other_runs_avoid_a_node_that_one_run_excludes(stage: SceneBench) -> None:
    """In a folder of runs of its own: the other scenes lose nodes too."""
    with BenchOfThreads(stage.runs.parent / "memory") as bench:
        bench.is_over = stage.is_over
        error = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
        command = f"test {{attempt}} = 1 || {{ echo {error}; exit 1; }} >&2; echo step 1 loss 2"

        def submit(name: str, *options: str) -> dict[str, Any]:
            line = ("submit", f"--name={name}", "--cluster=local", "--nodes=1", "--json", *options)
            settings = ("--set=cluster.health.enabled=false", "--set=slurm.backoff_s=0")
            return dict(json.loads(bench.look(*line, *settings, "--", command)))

        submit("first")
        bench.wait("first", "done", "stopped", "cancelled")
        assert bench.endings("first") == [("node_failure", "chain"), ("done", "finish")]
        (bad,) = bench.attempt("first", 0)["excluded_nodes"]
        assert bench.attempt("first", 1)["nodes"] != [bad]

        client, now = SlurmClient(), time.time()
        times: dict[str, Any] = {"since": now, "until": now + 600}
        fields = {**times, "cluster": client.cluster_name()}
        gone = SiteNodeRecord(node="n99", kind="excluded", evidence="user", **fields)
        add_record(bench.runs, gone, "a node that has left slurm.conf")
        site = json.loads(bench.look("nodes", "--json"))["site"]
        assert {row["node"]: (row["evidence"], row["avoided"]) for row in site} == {
            bad: ("hardware", True),
            "n99": ("user", False),
        }
        second = submit("second", "--set=slurm.directives.train.hold=true")
        job = second["jobs"]["train"]
        assert (second["excluded"], client.batch_job(job).excluded) == ([bad], bad)
        bench.look("cancel", "second")
        bench.look("nodes", "--clear", f"{bad},n99")
        assert submit("third", "--set=slurm.directives.train.hold=true")["excluded"] == []
        bench.look("cancel", "third")


@contextmanager
def partition(name: str) -> Iterator[str]:
    nodes = f"{NODE},{DRAINED}" if name == "late-node" else NODE
    scontrol("create", f"PartitionName={name}", f"Nodes={nodes}", "MaxTime=60", "State=UP")
    try:
        yield name
    finally:
        # Refused while a job is in it, and if the node is not drained.
        subprocess.run(["scontrol", "delete", f"PartitionName={name}"], capture_output=True)
        if DRAINED in nodes:
            subprocess.run(["scontrol", "update", *RESUMED], capture_output=True)


# Options of the job, what changes before it is released, Slurm's reason, ours, its command
WAITS = {
    "held": ("hold=true", "", "JobHeldUser", "the user holds it", "scontrol release"),
    "begin": ("begin=now+1hour", "", "BeginTime", "delayed", "StartTime=now"),
    "time": (
        *("", "PartitionName=late-time MaxTime=10", "PartitionTimeLimit"),
        *("MaxTime", "TimeLimit=10"),
    ),
    "node": (
        *(f"nodelist={DRAINED}", f"NodeName={DRAINED} State=DRAIN Reason=disk_is_bad"),
        *("ReqNodeNotAvail", "drained: disk_is_bad", ""),
    ),
    "bad": ("", f"JobId=$JOB ExcNodeList={NODE}", "BadConstraints", "exclusions", "ExcNodeList="),
}


@pytest.mark.parametrize("name", WAITS)
@scene()
def test_a_wait_is_explained_and_its_command_ends_it(stage: SceneBench, name: str) -> None:
    option, change, reason, text, command = WAITS[name]
    options = [option, *(["hold=true"] if name not in ("held", "begin") else [])]
    run = f"wait-{name}"
    with partition(f"late-{name}") as late:
        arguments = ["submit", "tiny_neox", "--nodes=1", f"--name={run}", *SMALL, *LEAN]
        arguments += [*stage.inputs, f"--partition={late}", "--precompile=always", "--json"]
        arguments += [f"--set=slurm.directives.precompile.{text}" for text in options if text]
        job = str(json.loads(stage.look(*arguments))["jobs"]["precompile"])
        if change:
            scontrol("update", *change.replace("$JOB", job).split())
        if name not in ("held", "begin"):
            scontrol("release", job)

        def waits() -> bool:
            shown = stage.status(run)["jobs"]["precompile"]["reason"]
            return bool(shown.startswith(reason))

        stage.until(waits, f"never {reason}", every_s=2.0)
        status = stage.status(run)
        shown_job = status["jobs"]["precompile"]
        assert status["state"] == "queued"
        for part in (text, shown_job["meaning"], shown_job["remedy"]):
            assert part in status["reason"]
        if command:
            lines = re.findall("`([^`]+)`", shown_job["remedy"].replace("MAXTIME", "10"))
            remedy = next(line for line in lines if command in line)
            subprocess.run(shlex.split(remedy), check=True)
        else:
            scontrol("update", *RESUMED)
        stage.until(lambda: not waits(), f"{reason} has not ended", every_s=2.0)
        stage.look("cancel", run)
