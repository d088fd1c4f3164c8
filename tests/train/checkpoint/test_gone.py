"""Checkpoints that a scratch file system has removed: training never starts again unnoticed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from made_records import save_attempt, save_submission

from slurmllm.cli.main import cli
from slurmllm.core.errors import CheckpointError
from slurmllm.core.run.records import Event, SkipsRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.supervise.policy import is_transient
from slurmllm.train.checkpoint.catalogue import require_recorded
from train.checkpoint.pretend import CONFIG, find, save_at, skip, state

SAVED_AT = 1_800_000_000.0


def record(run: RunDir, attempt: int, *steps: int, first_step: int | None = None) -> None:
    """An attempt's records and its checkpoints."""
    save_attempt(
        run,
        attempt,
        started_at=SAVED_AT,
        ended_at=SAVED_AT,
        ending="node_failure",
        first_step=first_step,
        steps_gained=max(steps, default=0),
        checkpoint_after=max(steps, default=None),
    )
    run.events(attempt).parent.mkdir(exist_ok=True)
    with run.events(attempt).open("w") as stream:
        for step in steps:
            save_at(run, step, attempt=attempt)
            event = Event(kind="save", step=step, attempt=attempt, time=SAVED_AT)
            stream.write(event.model_dump_json() + "\n")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path / "runs" / "a")
    run_dir.path.mkdir(parents=True)
    run_dir.config.write_text(CONFIG.to_yaml())
    record(run_dir, 0, 10, 20, first_step=1)
    return run_dir


def test_all_gone(run: RunDir) -> None:
    shutil.rmtree(run.checkpoints)
    with pytest.raises(CheckpointError) as caught:
        find(run)
    message = str(caught.value)
    assert f"{run.checkpoint(20)} was saved 2027-01-15 0" in message
    assert "is gone" in message
    assert "`slurmllm resume a --from-scratch` starts again from step 0" in message
    # Slurm's requeue ends with this: no further attempt can do better.
    assert not is_transient([f"rank 0 on n: CheckpointError: {message}"])


def remove_events(run: RunDir) -> None:
    shutil.rmtree(run.events(0).parent)


def remove_records(run: RunDir) -> None:
    shutil.rmtree(run.attempt("train", 0).path.parent)


def remove_all_but_the_submission(run: RunDir) -> None:
    save_submission(run, local=True, first_attempt=1)
    remove_records(run)
    remove_events(run)


def damage_events(run: RunDir) -> None:
    run.events(0).unlink()
    run.events(0).mkdir()


def remove_the_record_and_damage_the_events(run: RunDir) -> None:
    run.events(0).write_text("")
    run.attempt("train", 0).record.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_events, "step_00000020 was saved"),
        (remove_records, "--from-scratch` starts again from step 0"),
        (remove_all_but_the_submission, "--from-scratch` starts again from step 0"),
        (damage_events, "--from-scratch` starts again from step 0"),
        (remove_the_record_and_damage_the_events, "--from-scratch` starts again from step 0"),
    ],
)
def test_the_records_are_gone_or_damaged_too(
    run: RunDir, damage: Callable[[RunDir], None], message: str
) -> None:
    shutil.rmtree(run.checkpoints)
    damage(run)
    for check in (require_recorded, find):
        with pytest.raises(CheckpointError, match=message):
            check(run)


def test_an_attempt_that_was_killed_at_once_has_saved_nothing(run: RunDir) -> None:
    shutil.rmtree(run.checkpoints)
    shutil.rmtree(run.events(0).parent)
    run.attempt("train", 0).record.unlink()
    assert find(run).state is None


def test_the_verb_refuses_before_a_job_waits_in_the_queue(run: RunDir) -> None:
    shutil.rmtree(run.checkpoints)
    done = CliRunner().invoke(
        cli, ["resume", "a", "--local", "--runs-dir", str(run.path.parent)], env={**os.environ}
    )
    assert done.exit_code == 4, done.output
    assert "step_00000020 was saved" in done.output
    assert not run.jobs.exists()


def test_the_newest_gone(run: RunDir) -> None:
    shutil.rmtree(run.checkpoint(20))
    resumable = find(run)
    assert resumable.state == state(10)
    (line,) = resumable.skipped
    assert line.startswith("step 20: saved 2027-01-15 0")
    assert line.endswith("and gone; its steps are recomputed")


def test_not_reported_once_its_steps_are_computed_again(run: RunDir) -> None:
    shutil.rmtree(run.checkpoint(20))
    record(run, 1, 15, first_step=11)
    assert find(run).skipped == ()
    shutil.rmtree(run.checkpoints)
    with pytest.raises(CheckpointError, match="step_00000015 was saved"):
        find(run)


def test_a_roll_back_explains_it(run: RunDir) -> None:
    shutil.rmtree(run.checkpoints)
    SkipsRecord(skips=(skip(5),)).save(run.skips)
    assert find(run).state is None


def test_from_scratch_and_its_requeues(run: RunDir) -> None:
    save_submission(run, local=True, first_attempt=1, from_scratch=True)
    resumable = find(run)  # the old ones verify
    assert resumable.state is None
    assert resumable.invalidated[0] == "step 20: attempt 0 saved it, before `resume --from-scratch`"
    shutil.rmtree(run.checkpoints)
    assert find(run).state is None
    record(run, 1, 10, first_step=1)
    assert find(run).state == state(10)
    shutil.rmtree(run.checkpoints)
    with pytest.raises(CheckpointError, match="step_00000010 was saved"):
        find(run)
