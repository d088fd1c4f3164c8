"""A sample of tools/chaos on real clusters: four nodes that train, many that rehearse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from _pytest.tmpdir import TempPathFactory

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(1800)]

CHAOS = Path(__file__).parents[2] / "tools" / "chaos"


def chaos(folder: Path, *options: str) -> dict[str, Any]:
    """Run the suite; returns the summary of all runs."""
    command = [sys.executable, str(CHAOS), f"--dir={folder}", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads((folder / "results" / "table.json").read_text())["all"])


@pytest.fixture
def folder(slurm: object, tmp_path_factory: TempPathFactory) -> Path:
    """Short: a Unix socket's path in it may have 107 bytes. `slurm` skips where there is none."""
    return tmp_path_factory.mktemp("c")


def test_four_nodes_that_train_survive(folder: Path) -> None:
    summary = chaos(folder, "--runs=3", "--seed=1", "--parallel=3")
    assert summary["runs"] == 3
    assert summary["failures"] >= 3
    assert not any(summary["checks"].values())


def test_many_nodes_that_rehearse_survive(folder: Path) -> None:
    # 128 of them, as `make chaos` has it, take minutes on two CPUs.
    summary = chaos(folder, "--nodes=32", "--backend=rehearsal", "--runs=1", "--seed=2")
    assert summary["failures"] >= 1
    assert not any(summary["checks"].values())
