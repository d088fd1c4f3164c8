"""A staged environment on real Slurm: sent by sbcast, found again after a node failure."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from end_to_end.bench import PATIENCE_S, SMALL, Bench
from end_to_end.slurm_runs import Cluster, lose_node
from staging.environment import make_environment

pytestmark = pytest.mark.slurm


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path / "runs") as bench:
        yield bench


def test_the_archive_goes_over_sbcast_and_a_later_attempt_finds_the_environment(
    slurm: Cluster, bench: Bench, inputs: tuple[str, ...], tmp_path: Path
) -> None:
    python = make_environment(tmp_path / "venv")
    done = subprocess.run(
        [
            str(python),
            "-P",
            "-m",
            "slurmllm",
            "submit",
            "tiny_neox",
            "--nodes=2",
            "--name=staged",
            *SMALL,
            *inputs,
            "--set=backend=rehearsal",
            "--set=cluster.stage_environment=true",
            "--set=cluster.health.min_node_local_gb=0",
            "--set=train.steps=60",
            "--runs-dir",
            str(bench.runs),
        ],
        env={**os.environ, "SLURMLLM_REHEARSAL_STEP_S": "0.2"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    bench.wait_for_step("staged", 15)
    before = bench.attempt("staged", 0)["nodes"]
    first = {node: bench.node("staged", 0, node) for node in before}
    assert {record["environment_source"] for record in first.values()} == {"staged"}
    assert {record["environment_reason"] for record in first.values()} == {"broadcast"}
    lost = before[1]
    lose_node(slurm, bench, "staged", lost)
    assert bench.endings("staged") == [("node_failure", "requeue"), ("done", "finish")]
    after = bench.attempt("staged", 1)["nodes"]
    for node in after:
        record = bench.node("staged", 1, node)
        assert record["environment_source"] == "staged"
        assert record["environment_reason"] == ("present" if node in before else "broadcast")
    # One archive for all attempts, and none left on the nodes.
    archives = list((bench.runs / ".environments").glob("*.tar*"))
    assert len(archives) == 1
    manifest = json.loads(next(archives[0].parent.glob("*.json")).read_text())
    left = subprocess.run(
        ["srun", "-Q", "-w", after[0], "-N1", "-n1", "sh", "-c", "ls -d /var/tmp/slurmllm-*.tar*"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert left.stdout == ""
    assert manifest["archive"] == archives[0].name
