from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from training_rows import MakeFile, MakeRun, Row, write_rows

from slurmllm.rundir import RunDir


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write a run under `<tmp_path>/runs`, one metrics file for each list of rows."""

    def make(name: str, *attempts: Iterable[Row]) -> RunDir:
        run = RunDir(tmp_path / "runs" / name)
        run.path.mkdir(parents=True)
        run.config.write_text("recipe: {}\n")
        for number, rows in enumerate(attempts):
            write_rows(run.metrics(number), rows)
        return run

    return make


@pytest.fixture
def make_file(tmp_path: Path) -> MakeFile:
    """Write a metrics file that belongs to no run."""
    return lambda name, rows: write_rows(tmp_path / f"{name}.jsonl", rows)
