"""tools/benchmarks/scale_slurm.py: many nodes on a real Slurm, one of which dies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "benchmarks" / "scale_slurm.py"


def call(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *options], capture_output=True, text=True)


def test_more_workers_than_the_memory_holds_are_refused() -> None:
    done = call("--nodes=250", "--workers=4096")
    assert done.returncode == 2
    assert "1024000 workers on 250 nodes need " in done.stderr
    assert done.stdout == ""


@pytest.mark.slurm
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_node_of_24_dies_and_all_values_are_those_of_an_undisturbed_run(
    slurm: object,
) -> None:
    done = call("--nodes=24", "--workers=4", "--json")
    if done.returncode == 2:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["identical"]
    assert (found["nodes"], found["workers"], found["resumed_from"]) == (24, 96, 30)
    assert found["recomputed_steps"] >= 4
    first, second = found["starts_s"]
    assert (first["class"], second["class"]) == ("node_failure", "done")
    assert found["victim"] in " ".join(found["evidence"])
    for start in (first, second):
        assert start["preflight"] > 0
        assert 0 < start["workers_started"] < start["first_step"]
        assert start["workers_connected"] <= start["first_step"]
    assert found["processes"]["worker"]["processes"] == 96
