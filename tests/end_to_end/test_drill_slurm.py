"""`slurmllm drill` on a real Slurm, with an ordinary user's means: srun into the job, requeue."""

from __future__ import annotations

import json

import pytest
from end_to_end.bench import REHEARSED, Bench
from end_to_end.slurm_runs import Cluster, accounted, submit, wait

pytestmark = pytest.mark.slurm


def test_nodes_that_go_and_the_first_of_them(
    slurm: Cluster, bench: Bench, inputs: tuple[str, ...]
) -> None:
    submit(bench, inputs, "base", *REHEARSED)
    wait(bench, "base", "done", "stopped", "interrupted")
    text = bench.call("drill", "base", "--kinds=node,first_node", "--json", "--keep")
    found = json.loads(text[text.index("{") :])
    assert found["passed"], found
    assert found["own_reference"]
    first, second = found["drills"]
    assert (first["kind"], second["kind"]) == ("node", "first_node")
    assert [one["ending"] for one in found["drills"]] == ["node_failure", "node_failure"]
    nodes = bench.attempt(first["run"], 0)["nodes"]
    assert (first["node"], second["node"]) == (
        nodes[1],
        bench.attempt(second["run"], 0)["nodes"][0],
    )
    assert found["kept"] == [one["run"] for one in found["drills"]]
    for one in found["drills"]:
        assert one["recovery"]["requeue_s"] > 0
        job = bench.status(one["run"])["jobs"]["train"]["job_id"]
        bench.until(lambda job=job: accounted(job)[-1] == "COMPLETED", "sacct: not COMPLETED")
