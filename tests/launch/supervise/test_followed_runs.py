"""The verbs that read a run's metrics, of a run whose trainer logs every tenth step only."""

import time
from pathlib import Path

import pytest
from command_line import call, call_json
from made_records import make_run, save_attempt, save_manifest, save_submission

from slurmllm.analysis.status.history import read_history
from slurmllm.core.config.load import load
from slurmllm.core.metrics.source import read_curve
from slurmllm.core.run.records import AttemptRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.run.worker_files import EventLog
from slurmllm.launch.supervise.attempts import timeline
from slurmllm.launch.supervise.progress import TrainerProgress
from slurmllm.launch.supervise.watchdog import recent_step_times

BEGAN = 1.7e9


def line(step: int) -> str:
    spike = 3.0 if step == 150 else 0.0
    return f"step: {step} loss: {8 - step / 50 + spike:.4f} grad_norm: 1.5\n"


def follow(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, number: int, first: int, last: int, at: float
) -> None:
    """An attempt's lines of torchtitan, every tenth step of 2 s."""
    clock = [at]
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: clock[0])
        progress = TrainerProgress(run, number, "torchtitan")
        for step in range(first, last + 1):
            clock[0] += 2.0
            if step % 10 == 0:
                progress.feed(line(step).encode())
            progress.update()
        progress.update(last=True)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Steps 1 to 120 with a checkpoint after 95, a failure, and steps 96 to 200."""
    run = make_run(tmp_path / "titan", "train.steps=200")
    for path in (run.metrics(0), run.events(0)):
        path.parent.mkdir(parents=True)
    save_submission(run, submitted_at=BEGAN, local=True)
    save_manifest(run, 95, attempt=0)
    save_manifest(run, 200, attempt=1)
    times = {"started_at": BEGAN, "ended_at": BEGAN + 300}
    save_attempt(run, 0, ending="hang", action="restart", checkpoint_after=95, **times)
    times = {"started_at": BEGAN + 300, "ended_at": BEGAN + 550}
    saved = {"checkpoint_before": 95, "checkpoint_after": 200}
    save_attempt(run, 1, ending="done", action="finish", **saved, **times)
    follow(run, monkeypatch, 0, 1, 120, BEGAN + 10)
    follow(run, monkeypatch, 1, 96, 200, BEGAN + 320)
    return run


def test_verbs_read_its_rows(run: RunDir, tmp_path: Path) -> None:
    runs = f"--runs-dir={run.path.parent}"

    status = call_json("status", "titan", runs)
    assert (status["step"], status["loss"], status["step_s"]) == (200, 4.0, 2.0)
    assert "4.0000, gradient norm 1.500" in call("status", "titan", runs).stdout
    (spikes,) = call_json("spikes", "titan", "--window", "5", runs)["runs"]
    assert [spike["step"] for spike in spikes["spikes"]] == [150]
    log = tmp_path / "other.log"
    log.write_text("".join(map(line, range(10, 201, 10))))
    compared = call_json("compare", "titan", str(log), runs)
    assert (compared["verdict"], compared["alignment"]["points"]) == ("identical", 20)
    report = call_json("report", "titan", "--no-files", runs)
    assert report["runs"][0]["utilization"]["steps"] == 200


def test_its_time_is_that_of_all_steps(run: RunDir) -> None:
    config = load(run.config)
    first, last = (AttemptRecord.load(run.attempt("train", n).record) for n in (0, 1))
    read = timeline(run, first, None, config)
    assert (read.first_step, read.last_step, read.steps_gained, read.steps_lost) == (1, 120, 95, 25)
    parts = {"start_up": 10.0, "first_step": 20.0, "training": 220.0}
    assert read.phases_s == parts | {"saving": 0.0, "stopping": 50.0}
    read = timeline(run, last, None, config)
    assert (read.first_step, read.phases_s["start_up"]) == (96, 20.0)
    history = read_history(run)
    assert history.steps[1].numbers.tolist() == list(range(96, 201))
    assert history.steps[0].numbers.tolist() == list(range(1, 121))
    assert set(history.steps[0].seconds.tolist()) == {2.0}
    assert history.steps[0].ends[:3].tolist() == [BEGAN + 12, BEGAN + 14, BEGAN + 16]
    assert set(recent_step_times(run)) == {20.0}, "between two rows"
    curve = read_curve(run.path)
    assert (len(curve.steps), curve.overlap_rows) == (20, 3)


def test_evaluations_at_steps_without_a_row(run: RunDir) -> None:
    events = EventLog(run.events(1), 1)
    for step in (150, 155, 201):
        events.add("evaluation", step, values={"validation": step / 100})
    assert read_curve(run.path).columns.keys() >= {"loss", "grad_norm", "time"}
    run.config.write_text("command: {run: theirs}\n")
    curve = read_curve(run.path)
    assert curve.series("val_loss")[0].tolist() == [150, 155, 201]
    assert curve.series("val_loss")[1].tolist() == [1.5, 1.55, 2.01]
    assert curve.series("loss")[0].tolist() == list(range(10, 201, 10))
    assert len(curve.steps) == 22
