"""`slurmllm drill` on a real Slurm, with an ordinary user's means: srun into the job, requeue."""

from __future__ import annotations

import json

import pytest
from end_to_end.bench import Bench
from end_to_end.slurm_runs import accounted

pytestmark = pytest.mark.slurm


def test_nodes_that_go_and_the_first_of_them(bench: Bench, rehearsed_on_slurm: str) -> None:
    text = bench.call("drill", rehearsed_on_slurm, "--kinds=node,first_node", "--json", "--keep")
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
