"""The newest checkpoint that verifies, else the one before, and what was wrong with the others."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurmllm.cli.main import cli
from slurmllm.core.errors import CheckpointError, RunError, StorageError
from slurmllm.core.run.records import SkipsRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.train.checkpoint.catalogue import invalidation_reason, newest_verified
from slurmllm.train.checkpoint.folder import describe, file_faults, read_manifest
from slurmllm.train.checkpoint.resume import Resumable
from train.checkpoint.pretend import FINGERPRINT, find, save_at, skip, state


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)


def test_newest(run: RunDir, tmp_path: Path) -> None:
    assert find(run) == Resumable(state(20), ())
    run.path.rename(tmp_path / "moved")
    assert find(RunDir(tmp_path / "moved"), world=1) == Resumable(state(20), ())
    assert find(run) == Resumable(None, ())


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("shard_1", truncate, "step 20: shard_1 has 999 bytes instead of 1000"),
        ("shard_0", flip, "step 20: shard_0 does not match its checksum"),
        ("shard_1", Path.unlink, "step 20: shard_1 cannot be read: No such file or directory"),
        ("manifest.json", Path.unlink, "step 20: step_00000020 has no manifest.json"),
        ("manifest.json", truncate, "is damaged"),
    ],
)
def test_the_one_before(
    run: RunDir, name: str, damage: Callable[[Path], None], reason: str
) -> None:
    if (name, damage) == ("manifest.json", truncate):
        truncate(run.checkpoint(20) / name)  # the newline at the end is no loss
    damage(run.checkpoint(20) / name)
    resumable = find(run)
    assert resumable.state == state(10)
    assert len(resumable.skipped) == 1
    assert reason in resumable.skipped[0]


def test_none_verifies(run: RunDir) -> None:
    truncate(run.checkpoint(10) / "shard_0")
    flip(run.checkpoint(20) / "shard_1")
    with pytest.raises(CheckpointError) as caught:
        find(run)
    for part in ("step 10: shard_0 has", "step 20: shard_1 does", "move the folder away"):
        assert part in str(caught.value)


def test_another_model_s_checkpoint(run: RunDir) -> None:
    other = {**FINGERPRINT, "model.hidden_size": 128, "data.corpus": "corpus-b"}
    with pytest.raises(RunError) as caught:
        find(run, fingerprint=other)
    assert "model.hidden_size: the checkpoint has 64, the run 128" in str(caught.value)
    assert "data.corpus: the checkpoint has 'corpus-a', the run 'corpus-b'" in str(caught.value)
    assert "train.seed" not in str(caught.value)


def test_a_field_that_only_one_side_knows(run: RunDir) -> None:
    with pytest.raises(RunError, match=r"model\.new: the checkpoint has None, the run 1"):
        find(run, fingerprint={**FINGERPRINT, "model.new": 1})


def test_only_sizes_are_compared_where_checksums_are_not_wanted(run: RunDir) -> None:
    flip(run.checkpoint(20) / "shard_0")
    assert newest_verified(run, checksums=False) == (run.checkpoint(20), [])
    assert newest_verified(run)[0] == run.checkpoint(10)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("saved_at", "NaN"),
        ("save_s", "Infinity"),
        ("step", str(1 << 63)),
        ("tokens", "1" + "0" * 5000),
        ("files", "[]"),
    ],
)
def test_values_that_no_save_writes(run: RunDir, field: str, value: str) -> None:
    path = run.checkpoint(20) / "manifest.json"
    values = json.loads(path.read_text())
    del values[field]
    text = json.dumps(values)
    path.write_text(text[:-1] + f', "{field}": {value}}}')
    assert find(run).state == state(10)
    run.config.write_text("recipe: x\n")
    for verb in (["verify"], ["list"], ["list", "--verify", "--json"]):
        done = CliRunner().invoke(cli, ["checkpoint", *verb, str(run.path)])
        assert done.exit_code == (4 if verb == ["verify"] else 0), done.output
        assert "is damaged" in done.stdout.replace("\n", " ")


def test_a_folder_of_a_step_beyond_64_bits(run: RunDir) -> None:
    (run.checkpoints / f"step_{1 << 63}").mkdir()
    (run.checkpoints / f"step_{'9' * 200}").mkdir()
    assert run.checkpoint_steps() == [10, 20]
    assert find(run).state == state(20)


def test_a_state_of_another_step(run: RunDir) -> None:
    """Else the shards of a folder that was never verified would be loaded."""
    state(10).save(run.checkpoint(20) / "train_state.json")
    manifest = read_manifest(run.checkpoint(20))
    files = tuple(describe(run.checkpoint(20), file.path) for file in manifest.files)
    manifest.model_copy(update={"files": files}).save(run.checkpoint(20) / "manifest.json")
    with pytest.raises(StorageError, match="holds step 10"):
        find(run)


def test_a_pipe_in_place_of_a_file(run: RunDir) -> None:
    (run.checkpoint(20) / "shard_0").unlink()
    os.mkfifo(run.checkpoint(20) / "shard_0")
    manifest = read_manifest(run.checkpoint(20))
    files = [
        f.model_copy(update={"bytes": 0} if f.path == "shard_0" else {}) for f in manifest.files
    ]
    assert file_faults(run.checkpoint(20), files) == ["shard_0 cannot be read: not a regular file"]


SKIPS = (skip(20, 1), skip(30, 3))


@pytest.mark.parametrize(
    ("step", "attempt", "aside"),
    [
        (19, 1, False),  # before the onset
        (20, 1, True),
        (25, 0, True),  # of an earlier attempt, and as late
        (25, 2, False),  # made again
        (30, 2, True),
        (30, 4, False),
    ],
)
def test_which(step: int, attempt: int, aside: bool) -> None:
    assert (invalidation_reason(step, attempt, SKIPS) is not None) == aside


def test_resume_goes_behind_the_onset(run: RunDir) -> None:
    SkipsRecord(skips=(skip(15),)).save(run.skips)
    message = "attempt 0 saved it after the divergence from step 15 on, which attempt 0 rolled back"
    assert find(run) == Resumable(state(10), (), (f"step 20: {message}",))
    assert newest_verified(run) == (run.checkpoint(10), [f"step_00000020: {message}"])
    save_at(run, 20, attempt=1)
    assert find(run) == Resumable(state(20), ()), "made again, it replaced the other"


def test_where_none_is_left_training_starts_from_step_0(run: RunDir) -> None:
    SkipsRecord(skips=(skip(8),)).save(run.skips)
    assert find(run).state is None
    assert len(find(run).invalidated) == 2


def test_a_damaged_list_of_skips(run: RunDir) -> None:
    run.skips.write_text("{")
    with pytest.raises(StorageError, match=r"skips\.json"):
        find(run, world=1)
