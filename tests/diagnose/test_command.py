"""`slurmllm health` on this machine, and its all-reduce."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from diagnose.conftest import health
from slurmllm.cli.main import cli


def test_a_machine_that_is_fit(tmp_path: Path) -> None:
    small = "--set=cluster.health.min_node_local_gb=0"
    text = health(tmp_path / "runs", "--local", "--no-bandwidth", "--nodes=2", small)
    assert text.startswith("cluster profile local\nnode    state  CPUs")
    assert "local1" in text
    assert "0 fail" in text.splitlines()[-1]
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_machine_that_lacks_something(tmp_path: Path) -> None:
    unfit = "--set=cluster.node_local=/nowhere"
    finding = json.loads(health(tmp_path, "--local", "--no-bandwidth", unfit, "--json", code=3))
    findings = {f["check"]: f for f in finding["nodes"]["local0"]["findings"]}
    disk = findings["node-local disk"]
    assert (finding["exit_code"], disk["status"]) == (3, "fail")
    assert disk["message"].startswith("/nowhere does not exist; is the disk mounted?")
    assert findings["memory"]["value"] > 0
    assert finding["nodes"]["local0"]["versions"]["torch"]


def test_the_all_reduce_against_a_floor_that_nobody_reaches(tmp_path: Path) -> None:
    floor = ("--set=cluster.health.min_allreduce_gb_s=100000",)
    text = health(tmp_path, "--local", "--nodes=3", *floor, "--json", code=3)
    nodes: dict[str, Any] = json.loads(text)["nodes"]
    for node in nodes.values():
        (finding,) = (f for f in node["findings"] if f["check"] == "all-reduce")
        assert 0 < finding["value"] < 100000
        assert "GB/s with the faster of its neighbours" in finding["message"]


def test_without_slurm_salloc_is_missing(tmp_path: Path) -> None:
    arguments = ["health", "--runs-dir", str(tmp_path)]
    done = CliRunner().invoke(cli, arguments, env={"PATH": str(tmp_path)})
    assert done.exit_code == 3
    assert "salloc is not on the PATH" in done.stderr
    assert "--local" in done.stderr
