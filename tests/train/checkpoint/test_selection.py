"""Which checkpoint of another project's trainer a resume takes, and how the trainer finds it."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from made_records import make_attempt, save_submission

from slurmllm.core.config.command import CommandConfig
from slurmllm.core.config.resolve import resolve
from slurmllm.core.errors import CheckpointError, StorageError
from slurmllm.core.run.records import AttemptRecord, RejectedCheckpoint, SkipsRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.train.checkpoint import selection
from slurmllm.train.checkpoint.foreign import remove_old
from slurmllm.train.checkpoint.selection import select_checkpoint, use_checkpoint
from slurmllm.train.checkpoint.verification import Verification


def adapter(name: str) -> CommandConfig:
    command = resolve(f"trainers/{name}", "local", ["command.run=x"]).recipe.command
    assert command is not None
    return command


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    (run.path / "outputs").mkdir(parents=True)
    return run


def save(run: RunDir, step: int, folder: str, *files: str, broken: bool = False) -> Path:
    """Write a checkpoint of small files of torch.save and JSON, complete by the last one."""
    path = run.path / "outputs" / folder.format(step)
    for name in files:
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".json"):
            file.write_text('{"global_step": 1}')
            continue
        torch.save({"step": step}, file)
        if broken:
            file.write_bytes(file.read_bytes()[:-40])
    return path


OLMO = ("step{}", "train/rank0.pt", ".metadata.json")
MEGATRON = ("iter_{:07d}", "common.pt", "metadata.json")


def begin(run: RunDir, command: CommandConfig) -> AttemptRecord:
    newest, passed_over = select_checkpoint(run, command)
    chosen: dict[str, Any] = {"passed_over": passed_over}
    if newest is not None:
        chosen |= {"checkpoint_before": newest.step, "checkpoint_path": str(newest.path)}
    return use_checkpoint(run, command, make_attempt(1, **chosen))


def test_a_broken_newest_is_moved_from_a_trainer_that_would_take_it(run: RunDir) -> None:
    for step in (10, 20, 30):
        save(run, step, *OLMO, broken=step > 10)
    record = begin(run, adapter("olmo_core"))
    assert record.checkpoint_before == 10
    assert [entry.step for entry in record.passed_over] == [30, 20]
    assert "train/rank0.pt: it is cut off" in record.passed_over[0].reason
    assert sorted(p.name for p in (run.path / "outputs").iterdir()) == ["step10"]
    moved = run.path / "set_aside/001/outputs/step30"
    assert record.passed_over[0].moved_to == str(moved)
    assert (moved / "train/rank0.pt").stat().st_size > 0


def test_what_is_not_the_run_s_own_stays_and_is_said_to(run: RunDir, tmp_path: Path) -> None:
    (run.path / "outputs").rmdir()
    (tmp_path / "scratch").mkdir()
    (run.path / "outputs").symlink_to(tmp_path / "scratch")
    for step in (10, 20):
        save(run, step, *OLMO, broken=step == 20)
    (entry,) = begin(run, adapter("olmo_core")).passed_over
    assert entry.reason.endswith(f"outside {run.path}; its trainer may still load it")
    assert (tmp_path / "scratch/step20").is_dir()


@pytest.mark.parametrize("name", ["torchtitan", "hf_trainer", "megatron_bridge", "litgpt"])
def test_nothing_is_moved_if_the_command_names_the_checkpoint(name: str, run: RunDir) -> None:
    command = adapter(name)
    assert command.names_checkpoint
    command = command.model_copy(update={"checkpoints": "{run}/outputs/s-{step}"})
    command = command.model_copy(update={"completion_file": "end.json"})
    save(run, 10, "s-{}", "a.pt", "end.json")
    newest = save(run, 20, "s-{}", "a.pt", "end.json", broken=True)
    record = begin(run, command)
    assert (record.checkpoint_before, record.passed_over[0].moved_to) == (10, None)
    assert newest.is_dir()


@pytest.mark.parametrize(
    ("text", "broken", "listed", "step"),
    [
        ("20", False, False, 20),
        ("20", True, False, 10),  # it would take the broken one
        ("10", False, False, 10),  # stale, or files of the newer one are missing: no list says
        ("10\n", False, True, 20),  # stale: a list shows all files
        ("", False, False, 20),  # cut by a full disk or a quota
        (None, False, False, 20),  # never written: without it Megatron starts again from step 0
        ("7", False, False, 20),  # names a folder that is not there
        ("\x00\x00", False, False, 20),
    ],
)
def test_megatrons_tracker_names_the_newest_that_verifies(
    text: str | None,
    broken: bool,
    listed: bool,
    step: int,
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if listed:
        verified = Verification((), (), listed)
        monkeypatch.setattr(selection, "verify_checkpoint", lambda *_: verified)
    save(run, 10, *MEGATRON)
    save(run, 20, *MEGATRON, broken=broken)
    tracker = run.path / "outputs/latest_checkpointed_iteration.txt"
    if text is not None:
        tracker.write_text(text)
    record = begin(run, adapter("megatron"))
    assert (record.checkpoint_before, tracker.read_text()) == (step, str(step))
    assert len([*(run.path / "outputs").glob("iter_*")]) == 2


def test_deepspeeds_latest_is_known_by_its_name(run: RunDir) -> None:
    checkpoints = "{run}/outputs/global_step{step}"
    command = CommandConfig.model_validate({"run": "x", "checkpoints": checkpoints})
    for step in (10, 20):
        path = save(run, step, "global_step{}", "mp_rank_00_model_states.pt", broken=step == 20)
        for file in (path, *path.iterdir()):
            os.utime(file, (time.time() - 99,) * 2)
    (run.path / "outputs/latest").write_text("global_step20")
    assert begin(run, command).checkpoint_before == 10
    assert (run.path / "outputs/latest").read_text() == "global_step10"


def test_a_tracker_that_cannot_be_written_stops_the_run(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    save(run, 10, *MEGATRON)
    monkeypatch.setattr(selection, "write_whole", refuse)
    with pytest.raises(StorageError, match=r"must name 10: Disk quota exceeded"):
        begin(run, adapter("megatron"))


def test_nemo_finds_an_older_one_by_a_link(run: RunDir) -> None:
    form = "default/checkpoints/gpt--val_loss=0.00-step={}-consumed_samples=5.0"
    old = save(run, 9, form, "weights/common.pt", "weights/metadata.json")
    save(run, 19, form + "-last", "weights/common.pt", "weights/metadata.json", broken=True)
    assert begin(run, adapter("nemo")).checkpoint_before == 9
    link = old.with_name(f"{old.name}-last")
    assert [p.name for p in old.parent.glob("*last")] == [link.name]
    assert link.resolve() == old


def test_without_a_verified_checkpoint_the_run_stops_and_nothing_is_moved(run: RunDir) -> None:
    path = run.path / "outputs/ckpt.pt"  # nanoGPT's only one
    path.write_bytes(b"PK\x03\x04" + bytes(99))
    os.utime(path, (time.time() - 99,) * 2)
    run.metrics(0).parent.mkdir()
    run.metrics(0).write_text(f'{{"step":10,"time":{time.time() - 100}}}\n')
    command = adapter("nanogpt")
    with pytest.raises(CheckpointError, match=r"ckpt\.pt: it is cut off\nrestore one"):
        begin(run, command)
    assert path.exists()
    assert begin(run, command.model_copy(update={"verify": False})).passed_over == ()


def test_a_rejected_checkpoint_is_passed_over_until_it_is_saved_again(run: RunDir) -> None:
    for step in (10, 20):
        save(run, step, *OLMO)
    os.utime(run.path / "outputs/step10/.metadata.json", (time.time() - 99,) * 2)
    values = {"onset": 20, "attempt": 3, "reason": "loss NaN at step 21"}
    rejected = RejectedCheckpoint.model_validate(values | {"until": time.time() + 1})
    SkipsRecord(rejected=(rejected,)).save(run.skips)
    record = begin(run, adapter("olmo_core"))
    assert record.passed_over[0].reason == "attempt 3: loss NaN at step 21"
    save(run, 20, *OLMO)
    os.utime(run.path / "outputs/step20/.metadata.json", (time.time() + 99,) * 2)
    newest, _ = select_checkpoint(run, adapter("olmo_core"))
    assert newest is not None
    assert newest.step == 20


def test_retention_counts_only_what_verifies(run: RunDir) -> None:
    save_submission(run, submitted_at=time.time() - 100, local=True)
    for step in (10, 20, 30, 40):
        save(run, step, *OLMO, broken=step == 40)
    removed = remove_old(run, adapter("olmo_core"), keep=2)
    assert [path.name for path in removed] == ["step10"]
