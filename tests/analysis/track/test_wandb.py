"""W&B's own files of an offline run; needs its package (`make trackers`)."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from training_rows import make_rows, write_rows

from slurmllm.core.config.load import save
from slurmllm.core.config.resolve import resolve
from slurmllm.core.run.rundir import RunDir

pytest.importorskip("wandb", reason="wandb is not installed: `make trackers` runs this")
KEY = "cAnArY" + "0" * 34
SYNC = (sys.executable, "-P", "-m", "slurmllm", "track", "sync")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    overrides = ["trackers=[wandb]", "env.WANDB_MODE=offline", f"env.WANDB_API_KEY={KEY}"]
    run_dir = RunDir(tmp_path / "runs" / "demo")
    run_dir.logs.mkdir(parents=True)
    save(resolve("tiny_neox", "local", overrides), run_dir)
    return run_dir


def sync(run: RunDir, home: Path) -> str:
    environment = {**os.environ, "HOME": str(home)}
    done = subprocess.run(
        [*SYNC, str(run.path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def history(path: Path) -> dict[int, float]:
    """Return the loss of each step in one of W&B's files: LevelDB's log, behind 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    content, losses, record, offset = path.read_bytes(), dict[int, float](), b"", 7
    while offset < len(content):
        left = 32768 - offset % 32768  # of the block
        if left < 7:  # too short for a header
            offset += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, offset)
        piece = content[offset + 7 : offset + 7 + size]
        record = piece if kind in (1, 2) else record + piece  # whole, or its first piece
        offset += 7 + size
        if kind in (1, 4):
            row = wandb_internal_pb2.Record.FromString(record).history
            values = {item.key or ".".join(item.nested_key): item.value_json for item in row.item}
            if "train/loss" in values:
                losses[row.step.num] = json.loads(values["train/loss"])
    return losses


def test_a_requeue_has_one_run_id_and_no_file_the_key(run: RunDir, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    write_rows(run.metrics(0), make_rows(1, 45))
    shown = sync(run, home)
    write_rows(run.metrics(1), make_rows(41, 60, attempt=1))
    shown += sync(run, home)
    assert "wandb: 45 steps sent, up to 45" in shown
    assert "wandb: 15 steps sent, up to 60" in shown
    files = sorted(run.trackers.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({path.name for path in files}) == 1
    losses: dict[int, float] = {}
    for path in files:
        values = history(path)
        assert not losses.keys() & values.keys()
        losses |= values
    assert losses == {row["step"]: row["loss"] for row in make_rows(1, 60)}
    everything = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {p.name for p in everything if KEY.encode() in p.read_bytes()} == {"secrets.json"}
    assert KEY not in shown
