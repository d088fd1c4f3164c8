"""`slurmllm health` on this machine, and its all-reduce."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from diagnose.conftest import health


def test_a_machine_that_is_fit(tmp_path: Path) -> None:
    small = "--set=cluster.health.min_node_local_gb=0"
    text = health(tmp_path / "runs", "--local", "--no-bandwidth", "--nodes=2", small)
    assert text.startswith("cluster profile local\nnode    state  CPUs")
    assert "local1" in text
    assert "0 fail" in text.splitlines()[-1]
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_machine_that_lacks_something(tmp_path: Path) -> None:
    unfit = "--set=cluster.node_local=/nowhere"
    text = health(tmp_path, "--local", "--no-bandwidth", unfit, code=3)
    assert "fail: local0: /nowhere does not exist; is the disk mounted?" in text
    found = json.loads(health(tmp_path, "--local", "--no-bandwidth", unfit, "--json", code=3))
    findings = {f["check"]: f for f in found["nodes"]["local0"]["findings"]}
    assert (found["exit_code"], findings["node-local disk"]["status"]) == (3, "fail")
    assert findings["memory"]["value"] > 0
    assert found["nodes"]["local0"]["versions"]["torch"]


def test_the_all_reduce_against_a_floor_that_nobody_reaches(tmp_path: Path) -> None:
    floor = ("--set=cluster.health.min_allreduce_gb_s=100000",)
    text = health(tmp_path, "--local", "--nodes=3", *floor, "--json", code=3)
    nodes: dict[str, Any] = json.loads(text)["nodes"]
    for node in nodes.values():
        (found,) = (f for f in node["findings"] if f["check"] == "all-reduce")
        assert 0 < found["value"] < 100000
        assert "GB/s with the faster of its neighbours" in found["message"]


def test_without_slurm_salloc_is_missing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "slurmllm", "health", "--runs-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": str(tmp_path)},
    )
    assert done.returncode == 3
    assert "salloc is not on the PATH" in done.stderr
    assert "--local" in done.stderr
