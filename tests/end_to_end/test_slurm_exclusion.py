"""Exclusions on a real Slurm never cost a run the nodes that it needs."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator

import pytest
from end_to_end.bench import REHEARSED, SLOWLY, Bench
from end_to_end.slurm_runs import Cluster, submit, wait

from slurmllm.run.records import ExcludedNode, ExcludedNodes
from slurmllm.slurm.client import SlurmClient

pytestmark = pytest.mark.slurm
A100 = "--set=slurm.directives.train={constraint: a100}"


@pytest.fixture
def a100(slurm: Cluster) -> Iterator[None]:
    """Two nodes, n1 and n2, have the feature a100."""

    def set_feature(name: str) -> None:
        features = (f"AvailableFeatures={name}", f"ActiveFeatures={name}")
        subprocess.run(["scontrol", "update", "NodeName=n[1-2]", *features], check=True)

    set_feature("a100")
    yield
    set_feature("")


def test_a_node_without_a_substitute_is_not_excluded(
    slurm: Cluster, bench: Bench, inputs: tuple[str, ...], a100: None
) -> None:
    """Other nodes are idle, but not of the feature; the lost one comes back after 25 s."""
    submit(bench, inputs, "two", A100, *SLOWLY)
    bench.wait_for_step("two", 5)
    slurm.call("fail", "n2")
    time.sleep(25)
    slurm.call("heal", "n2")
    wait(bench, "two", "done", "stopped")
    assert bench.endings("two") == [("node_failure", "requeue"), ("done", "finish")]
    assert bench.attempt("two", 0)["blamed_nodes"] == ["n2"]
    (row,) = json.loads(bench.look("nodes", "two", "--json"))["excluded"]
    assert (row["node"], row["jobs"]) == ("n2", [])  # recorded, and in no job's list
    assert row["evidence"] in ("slurm", "no_answer")
    assert round((row["until"] - row["since"]) / 3600) == 1


def test_a_pending_run_starts_on_an_included_node(
    bench: Bench, inputs: tuple[str, ...], a100: None
) -> None:
    held = "--set=slurm.directives.train.hold=true"  # or it starts before its list has changed
    job = submit(bench, inputs, "short", A100, *REHEARSED, held)["train"]
    SlurmClient().exclude(job, ["n2"])
    subprocess.check_call(["scontrol", "release", job])
    node = ExcludedNode(node="n2", reason="x", since=time.time(), until=time.time() + 3600)
    ExcludedNodes(nodes=(node,)).save(bench.runs / "short" / "excluded.json")
    bench.until(lambda: "BadConstraints" in bench.status("short")["reason"], "never BadConstraints")
    remedy = "excluded: n2; `slurmllm resume short --include n2` uses them"
    assert remedy in bench.status("short")["reason"]
    (row,) = json.loads(bench.look("nodes", "short", "--json"))["excluded"]
    assert (row["node"], row["jobs"]) == ("n2", [job])
    bench.call("resume", "short", "--include=n2")
    wait(bench, "short", "done", "stopped")
    assert bench.endings("short") == [("done", "finish")]
    assert json.loads(bench.look("nodes", "short", "--json")) == {"excluded": []}
