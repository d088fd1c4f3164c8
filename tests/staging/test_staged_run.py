"""Whole runs from a staged environment: the same rows as from the shared one, and every fall-back.

The interpreter is that of a small virtual environment, which is quickly packed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from end_to_end.bench import PATIENCE_S, SMALL

from staging.environment import make_environment

RUN = (
    *("submit", "tiny_neox", "--nodes=2", "--local", "--set=backend=rehearsal", *SMALL),
    *("--set=train.steps=20", "--set=cluster.health.enabled=false", "--set=data.num_workers=0"),
)
STAGED = "--set=cluster.stage_environment=true"
TIMES = ("time", "step_time_s", "data_wait_s", "forward_backward_s", "optimizer_s")
SPEEDS = ("seq_per_s", "tokens_per_s")


class Bench:
    def __init__(self, folder: Path, inputs: tuple[str, ...]) -> None:
        self.runs, self.node = folder / "runs", folder / "node"
        for path in (self.runs, self.node):
            path.mkdir()
        self.python = make_environment(folder / "venv")
        self.inputs = inputs

    def call(self, *arguments: str) -> str:
        done = subprocess.run(
            [str(self.python), "-P", "-m", "slurmllm", *arguments, "--runs-dir", str(self.runs)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def run(self, name: str, *options: str) -> str:
        local = f"--set=cluster.node_local={self.node}"
        return self.call(*RUN, *self.inputs, local, f"--name={name}", *options)

    def rows(self, name: str) -> list[dict[str, Any]]:
        lines = (self.runs / name / "metrics" / "attempt_000.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return [{k: v for k, v in row.items() if k not in (*TIMES, *SPEEDS)} for row in rows]

    def nodes(self, name: str) -> list[dict[str, Any]]:
        folder = self.runs / name / "attempts" / "000" / "nodes"
        return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]

    @property
    def environments(self) -> list[Path]:
        (private,) = self.node.glob("slurmllm-*")
        return [path for path in (private / "environments").iterdir() if path.is_dir()]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, inputs: tuple[str, ...]) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("staged")
    yield Bench(folder, inputs)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def shared(bench: Bench) -> list[dict[str, Any]]:
    """The rows of a run from the shared environment."""
    bench.run("shared")
    assert {node["environment_source"] for node in bench.nodes("shared")} == {"shared"}
    assert {node["environment_reason"] for node in bench.nodes("shared")} == {""}
    return bench.rows("shared")


@pytest.fixture(scope="module")
def staged(bench: Bench) -> str:
    """What the first run from a staged environment prints."""
    return bench.run("staged", STAGED)


def test_a_staged_run_has_the_same_rows_and_the_next_one_uses_its_environment(
    bench: Bench, shared: list[dict[str, Any]], staged: str
) -> None:
    assert staged.count("files packed") == 1
    nodes = bench.nodes("staged")
    assert [node["environment_source"] for node in nodes] == ["staged", "staged"]
    # Both nodes are this machine: one of them unpacks.
    assert sorted(node["environment_reason"] for node in nodes) == ["archive", "present"]
    assert len(shared) == 20
    assert bench.rows("staged") == shared
    assert len(bench.environments) == 1
    second = bench.run("again", STAGED)
    assert "files packed" not in second
    assert "environment: present on all 2 nodes" in second
    assert {node["environment_reason"] for node in bench.nodes("again")} == {"present"}
    assert bench.rows("again") == shared


def test_workers_fall_back_if_the_archive_is_damaged(
    bench: Bench, shared: list[dict[str, Any]], staged: str
) -> None:
    for root in bench.environments:
        shutil.rmtree(root)
    (archive,) = (bench.runs / ".environments").glob("*.tar*")
    content = bytearray(archive.read_bytes())
    content[len(content) // 2] ^= 1
    archive.write_bytes(content)
    output = bench.run("damaged", STAGED)
    assert "run from the shared environment" in output
    for node in bench.nodes("damaged"):
        assert node["environment_source"] == "shared"
    assert any("is damaged" in node["environment_reason"] for node in bench.nodes("damaged"))
    assert bench.rows("damaged") == shared
