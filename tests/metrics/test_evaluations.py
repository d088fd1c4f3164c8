"""Evaluations of several attempts, as every reader of a run shows them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from training_rows import make_row, make_rows, write_rows
from worker_events import evaluation

from slurmllm.cli.main import cli
from slurmllm.config.load import load, save
from slurmllm.config.resolve import resolve
from slurmllm.metrics.row_reader import last_evaluation, read_evaluations
from slurmllm.metrics.source import read_run
from slurmllm.run.rundir import RunDir
from slurmllm.track.sync import Session, TrackerRecord, _values


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Two attempts; the second one evaluated step 20 again, and has not evaluated step 30 yet."""
    run_dir = RunDir(tmp_path / "runs" / "demo")
    run_dir.logs.mkdir(parents=True)
    settings = ("trackers=[wandb]", "eval.every_steps=10", "eval.corpora={wiki: wiki.npy}")
    save(resolve("tiny_neox", "local", [*settings, "data.validation=0.1"]), run_dir)
    write_rows(run_dir.metrics(0), make_rows(1, 25))
    write_rows(run_dir.metrics(1), make_rows(16, 30, attempt=1))
    evaluation(run_dir, 0, 10, held_out=5.0, wiki=6.0)
    evaluation(run_dir, 0, 20, held_out=1.0, wiki=2.0)
    evaluation(run_dir, 1, 20, held_out=4.0, wiki=5.5)
    evaluation(run_dir, 1, 40, held_out=0.0)  # its row was lost
    return run_dir


def test_the_newest_attempt_s_value_of_a_step(run: RunDir) -> None:
    evaluations = read_evaluations(run, run.metrics_files())
    losses = [(e.step, e.attempt, e.values["held_out"]) for e in evaluations.values()]
    assert losses == [(10, 0, 5.0), (20, 1, 4.0), (40, 1, 0.0)]
    last = last_evaluation(run)
    assert last is not None
    assert last.step == 40
    curve = read_run(run.path)
    assert curve.validation == {"val_loss": "held_out", "val_loss/wiki": "wiki"}
    for metric, expected in (("val_loss", [5.0, 4.0]), ("val_loss/wiki", [6.0, 5.5])):
        steps, values = curve.series(metric)
        assert (steps.tolist(), values.tolist()) == ([10, 20], expected)
    assert len(curve.columns["val_loss"]) == 30


def test_a_tracker_waits_for_the_evaluation_of_the_last_step(run: RunDir) -> None:
    session = Session(run, load(run.config), "wandb")
    sent: list[int] = []

    class Memory:
        repeats = False

        def log(self, steps: list[object]) -> None:
            sent.extend(step.step for step in steps)  # type: ignore[attr-defined]

    session._tracker = Memory()  # type: ignore[assignment]
    assert session.send(read_run(run.path), last=False) == 29
    assert session.send(read_run(run.path), last=False) == 0
    evaluation(run, 1, 30, held_out=3.0, wiki=3.5)
    curve = read_run(run.path)
    assert session.send(curve, last=False) == 1
    assert sent == [*range(1, 31)]
    values = _values(curve, 29).values
    assert values["eval/wiki/loss"] == 3.5
    assert values["eval/held_out/perplexity"] == math.exp(3.0)
    assert not [tag for tag in _values(curve, 28).values if tag.startswith("eval/")]
    assert TrackerRecord.load(run.tracker("wandb")).sent == {0: 15, 1: 30}


def test_compare_and_status(run: RunDir, tmp_path: Path) -> None:
    other = RunDir(tmp_path / "runs" / "other")
    other.logs.mkdir(parents=True)
    save(load(run.config), other)
    write_rows(other.metrics(0), [make_row(step) for step in range(1, 31)])
    evaluation(other, 0, 20, held_out=4.0, wiki=5.0)
    root = ("--runs-dir", str(tmp_path / "runs"))
    done = CliRunner().invoke(cli, ["compare", "demo", "other", "--json", "--no-plot", *root])
    assert done.exit_code == 0, done.output
    statistics = json.loads(done.stdout)["statistics"]
    assert (statistics["val_loss"]["points"], statistics["val_loss"]["max_rel_diff"]) == (1, 0)
    assert statistics["val_loss/wiki"]["max_rel_diff"] == pytest.approx(0.5 / 5.5)
    picture = str(tmp_path / "compared.png")
    shown = CliRunner().invoke(cli, ["compare", "demo", "other", "--plot", picture, *root]).output
    assert (tmp_path / "compared.png").stat().st_size > 10_000
    assert re.search(r"val_loss/wiki +1 ", shown)
    status = CliRunner().invoke(cli, ["status", "other", *root])
    text = "held_out 4.0000, perplexity 54.60; wiki 5.0000, perplexity 148.41 (step 20)"
    assert text in " ".join(status.output.split())
    status = CliRunner().invoke(cli, ["status", "other", "--json", *root])
    texts = json.loads(status.stdout)["evaluation"]["texts"]
    assert texts["wiki"] == {"loss": 5.0, "perplexity": math.exp(5.0)}
