"""A run with checkpoints, for the tests of its catalogue, of resumes and of replicas."""

from pathlib import Path

import pytest

from slurmllm.core.run.rundir import RunDir
from train.checkpoint.pretend import save_at


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Checkpoints of two workers at steps 10 and 20, of attempt 0."""
    run = RunDir(tmp_path / "run")
    save_at(run, 10, 20)
    return run
