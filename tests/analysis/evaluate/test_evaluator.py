"""Evaluations during training: what is due, what a job leaves, and how long checkpoints stay."""

import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest
from command_line import call as run_verb
from command_line import call_json, refused
from fake_slurm import FakeSlurm
from made_records import make_run, save_manifest, save_submission

from slurmllm.analysis.evaluate.evaluator import Evaluator, evaluate_checkpoint
from slurmllm.analysis.evaluate.scores import read_scores
from slurmllm.core.config.load import load
from slurmllm.core.config.operation import CheckpointConfig
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.run.artifact_records import CheckpointEvaluation
from slurmllm.core.run.records import JobsRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.submit.deletion import cancel_jobs
from slurmllm.train.checkpoint.catalogue import remove_expired
from slurmllm.train.checkpoint.foreign import remove_old

SCORE = (
    "import sys, json; print('loading'); n = int(open(sys.argv[1]).read());"
    "print(json.dumps({'accuracy': n / 100, 'name': 'x', 'worst': float('nan')}));"
    "sys.exit(n == 40)"
)


def make(folder: Path, *evaluate: str, steps: int = 50) -> tuple[RunDir, RunConfig]:
    """A run of another trainer with checkpoints at steps 10, 20, 30 and 40."""
    command = json.dumps([sys.executable, "-c", SCORE, "{checkpoint}"])[1:-1].replace('", "', '" "')
    settings = ("command.run=train", "command.checkpoints={run}/out/{step}.txt")
    line = f"evaluate.command={json.dumps(command)}"
    total = (f"command.steps={steps}", "checkpoint.keep=1", line)
    run = make_run(folder / "r", *settings, *total, *evaluate, recipe="trainers/plain")
    save_submission(run, submitted_at=time.time() - 100, train_job="7")
    (run.path / "out").mkdir()
    run.logs.mkdir()
    for step in (10, 20, 30, 40):
        path = run.path / "out" / f"{step}.txt"
        path.write_text(str(step))
        os.utime(path, (time.time() - 60, time.time() - 60 + step / 100))  # complete: it is quiet
    return run, load(run.config)


def states(run: RunDir) -> list[str]:
    paths = map(run.evaluating, (10, 20, 30, 40))
    return [CheckpointEvaluation.load(path).state for path in paths if path.exists()]


def test_every_second_checkpoint_and_the_last_get_a_job(tmp_path: Path) -> None:
    run, config = make(tmp_path, "evaluate.every=3", "evaluate.time=15", "slurm.qos=low", steps=40)
    slurm = FakeSlurm()
    for _ in range(2):
        Evaluator(run, config, slurm).update()
    assert states(run) == ["skipped", "skipped", "submitted", "submitted"]
    script = slurm.jobs["1"].script
    assert "#SBATCH --job-name=r-evaluate\n#SBATCH --nodes=1\n" in script
    assert "#SBATCH --time=15\n" in script
    assert "#SBATCH --qos=low\n" in script
    assert script.endswith(f"slurmllm evaluate-checkpoint {run.path} 30")
    assert len(slurm.jobs) == 2


def test_removed_checkpoints_count_as_skipped(tmp_path: Path) -> None:
    run, config = make(tmp_path, "evaluate.every=2")
    paths = [run.path / "out" / f"{step}.txt" for step in (10, 20, 30, 40)]
    for path in paths:
        path.rename(path.with_suffix(".hidden"))
    for path in paths:
        path.with_suffix(".hidden").rename(path)
        Evaluator(run, config, FakeSlurm()).update()
        path.unlink()
    assert states(run) == ["skipped", "submitted", "skipped", "submitted"]


def test_a_refused_or_lost_job_is_submitted_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, config = make(tmp_path)
    slurm = FakeSlurm()
    slurm.refuse = "Invalid account"
    evaluator = Evaluator(run, config, slurm)
    evaluator.update()
    assert states(run) == ["due"] * 4
    assert "step 40 due: sbatch failed" in run_verb("status", run.path).output
    refused_run, _ = make(tmp_path / "refused")
    for _ in range(3):
        Evaluator(refused_run, config, slurm).update()
    assert states(refused_run) == ["failed"] * 4
    assert "Invalid account" in call_json("status", refused_run.path)["evaluations"][3]["error"]
    slurm.refuse = None
    evaluator = Evaluator(run, config, slurm)  # of a resume
    evaluator.update()
    assert states(run) == ["submitted"] * 4
    for job in slurm.jobs:
        slurm.start(job)
        slurm.finish(job, "TIMEOUT")
    evaluator.update()
    assert states(run) == ["submitted"] * 4
    monkeypatch.setattr("slurmllm.analysis.evaluate.evaluator.CACHED_S", 0.0)
    evaluator.update()
    assert states(run) == ["failed"] * 4
    lost = call_json("status", run.path)["evaluations"]
    assert lost[0]["error"] == "job 1 ended without a result"


def test_cancel_cancels_evaluations_and_a_resume_submits_them(tmp_path: Path) -> None:
    run, config = make(tmp_path)
    slurm = FakeSlurm()
    Evaluator(run, config, slurm).update()
    slurm.start("1")
    slurm.finish("1", "COMPLETED")
    evaluate_checkpoint(run, config, 10)
    assert {job.job for job in cancel_jobs(run, slurm).jobs} == {"2", "3", "4"}
    for _ in range(2):  # as the supervisor's child does, while the workers save
        assert states(run) == ["done", "due", "due", "due"]
        Evaluator(run, config, slurm).update()
    JobsRecord.change_last(run, cancelled_at=None)
    Evaluator(run, config, slurm).update()
    assert states(run) == ["done", *["submitted"] * 3]
    assert len(slurm.jobs) == 7


def test_a_command_s_scores_are_in_the_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, config = make(tmp_path)
    Evaluator(run, config, None).update()
    assert states(run) == ["done", "done", "done", "failed"]
    (table,) = call_json("report", run.path)["runs"][0]["evaluations"]
    (row,) = table["rows"]
    assert (row["metric"], row["scores"]) == ("accuracy", {"10": 0.1, "20": 0.2, "30": 0.3})
    assert capfd.readouterr().out.count("loading") == 5, "the last one was tried twice"
    failed = call_json("status", run.path)["evaluations"][-1]
    assert failed["error"].startswith("exit code 1")
    assert "evaluation     step 40 failed: exit code 1" in run_verb("status", run.path).output
    (run.path / "out" / "10.txt").unlink()
    evaluate_checkpoint(run, config, 10)
    assert "has been removed; see evaluate.hold_hours" in run.evaluating(10).read_text()
    scored, warnings = read_scores(run)
    assert ({record.step for _, record in scored}, warnings) == ({10, 20, 30}, [])


def test_a_checkpoint_is_kept_until_it_is_evaluated_or_for_hold_hours(tmp_path: Path) -> None:
    run, config = make(tmp_path)
    recipe = config.recipe
    assert recipe.command is not None
    assert recipe.evaluate is not None
    Evaluator(run, config, FakeSlurm()).update()
    assert remove_old(run, recipe.command, 1, recipe.evaluate) == []
    evaluate_checkpoint(run, config, 10)
    assert [path.name for path in remove_old(run, recipe.command, 1, recipe.evaluate)] == ["10.txt"]
    ended = recipe.evaluate.model_copy(update={"hold_hours": 0.001})
    assert [path.name for path in remove_old(run, recipe.command, 1, ended)] == ["20.txt"]


def test_retention_of_slurmllms_trainer_waits_for_evaluations(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", "evaluate={suite: smoke}")
    for step in (10, 20):
        save_manifest(run, step, saved_at=time.time())
        (run.checkpoint(step) / "weights").touch()
    evaluate = load(run.config).recipe.evaluate
    remove_expired(run, 20, CheckpointConfig(keep=1), (), evaluate)
    assert run.checkpoint_steps() == [10, 20]
    remove_expired(run, 20, CheckpointConfig(keep=1))
    assert run.checkpoint_steps() == [20]


@pytest.mark.parametrize(
    ("recipe", "evaluate", "fault"),
    [
        ("tiny_neox", "{}", "needs either a suite or a command"),
        (
            "tiny_neox",
            "{suite: mine}",
            "evaluate.suite: mine is neither a shipped suite nor a file",
        ),
        ("trainers/plain", "{suite: smoke}", "reads only slurmllm's own checkpoints"),
    ],
)
def test_submit_refuses(recipe: str, evaluate: str, fault: str, tmp_path: Path) -> None:
    arguments = ["submit", recipe, "--local", "--runs-dir", tmp_path, f"evaluate={evaluate}"]
    more = ["--data", "builtin"] if recipe == "tiny_neox" else ["command.run=train"]
    assert fault in refused(run_verb(*arguments, *more))


def test_a_refused_one_that_the_last_look_meets_first_has_failed(tmp_path: Path) -> None:
    run, config = make(tmp_path)
    slurm, stop = FakeSlurm(), threading.Event()
    slurm.refuse = "QOSMaxSubmitJobPerUserLimit"
    stop.set()
    Evaluator(run, config, slurm).watch(stop)
    assert states(run) == ["failed"] * 4


def test_the_log_has_the_traceback_of_an_error_of_our_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, config = make(tmp_path)
    Evaluator(run, config, FakeSlurm()).update()
    monkeypatch.setattr(
        "slurmllm.analysis.evaluate.evaluator.last_scores",
        lambda output: dict[str, float]()["accuracy"],
    )
    evaluate_checkpoint(run, config, 10)
    assert states(run)[0] == "failed"
    assert "KeyError: 'accuracy'" in caplog.text
