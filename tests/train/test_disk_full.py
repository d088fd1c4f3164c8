"""A disk that is full while saving: exit 4, nothing half-written, older checkpoints intact."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurmllm.checkpoint.folder import file_faults, read_manifest
from slurmllm.run.records import FailureRecord
from slurmllm.run.rundir import RunDir
from train.conftest import LONG
from train.gang import Gang, make_run

TWO = ("cluster.devices_per_node=2", *LONG)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint of 2.0 MB and a bit."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root to mount a small file system")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def assert_saved_nothing_more(gang: Gang, reason: str, step: int) -> None:
    assert gang.wait() == [4, 4], gang.output()
    assert [p.name for p in gang.run.checkpoints.iterdir()] == [f"step_{step:08d}"]
    manifest = read_manifest(gang.run.checkpoint(step))
    assert file_faults(gang.run.checkpoint(step), manifest.files) == []
    failure = FailureRecord.load(gang.run.attempt("train", gang.attempt).failure(0))
    assert (failure.error, failure.blame) == ("CheckpointError", "infrastructure")
    for part in (
        reason,
        f"step_{step + 10:08d}",
        "MB are free",
        "took 2.0 MB",
        "slurmllm resume",
    ):
        assert part in failure.message
    assert "Traceback" not in gang.output(), "one clear message"


def test_no_space_left(small_disk: Path, data: tuple[str, str]) -> None:
    run = make_run(small_disk / "run", data, *TWO)
    assert_saved_nothing_more(Gang(run, world=2), "No space left on device", step=10)


def test_file_size_limit(new_run: Callable[..., RunDir], unbroken: RunDir) -> None:
    run = new_run(*TWO)
    shutil.copytree(unbroken.checkpoint(40), run.checkpoint(40))
    gang = Gang(run, world=2, attempt=1, env={"TEST_FILE_SIZE_LIMIT": "100000"})
    assert_saved_nothing_more(gang, "File too large", step=40)
