"""Runs that were cut, copied in part or written by a newer version: read as far as they go."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_slurm import FakeSlurm
from reported_runs import make_reported_run

from slurmllm.cli.main import cli
from slurmllm.report.document import sections
from slurmllm.report.figures import figures, page_data
from slurmllm.report.sources import read_run_facts
from slurmllm.report.write import to_html
from slurmllm.run.rundir import RunDir


def keep_only(name: str) -> Callable[[RunDir], None]:
    def cut(run: RunDir) -> None:
        for entry in run.path.iterdir():
            if entry.name != name:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    return cut


def newer_config(run: RunDir) -> None:
    text = run.config.read_text().replace("train:\n", "train:\n  quantum: true\n", 1)
    run.config.write_text(text + "flux: {a: 1}\n")


def newer_attempt(run: RunDir) -> None:
    record = run.attempt("train", 1).record
    record.write_text(record.read_text().replace('"done"', '"teleported"'))


def cut_metrics(run: RunDir) -> None:
    run.metrics(1).write_bytes(run.metrics(1).read_bytes()[:-150])


def broken_in_the_middle(run: RunDir) -> None:
    lines = run.metrics(0).read_text().splitlines()
    lines[1] = lines[1][:30]
    run.metrics(0).write_text("\n".join(lines) + "\n")


def newer_events(run: RunDir) -> None:
    path = run.events(1)
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as stream:
        stream.write('{"kind": "teleported", "step": 1, "attempt": 1, "time": 1.0}\n{"kind": "sa')


def no_losses(run: RunDir) -> None:
    rows = [json.loads(line) for line in run.metrics(1).read_text().splitlines()]
    run.metrics(1).write_text("".join(json.dumps(row | {"loss": None}) + "\n" for row in rows))


# What is done to a run; the file that a warning names; whether steps and parameters are known yet.
@pytest.mark.parametrize(
    ("damage", "named", "steps", "parameters"),
    [
        (lambda run: run.config.write_bytes(b"\x00\xff"), "config.yaml", True, False),
        (lambda run: run.config.write_text("- a\n"), "config.yaml", True, False),
        (newer_config, "config.yaml", True, True),
        (keep_only("metrics"), "config.yaml", True, False),
        (keep_only("attempts"), "metrics", False, False),
        (keep_only("config.yaml"), "metrics", False, True),
        (newer_attempt, "attempts/001/attempt.json", True, True),
        (lambda run: run.attempt("train", 0).record.write_text(""), "000/attempt.json", True, True),
        (lambda run: run.plan.write_text("[1]"), "plan.json", True, True),
        (lambda run: run.data.write_text("{}"), "data.json", True, True),
        (lambda run: run.jobs.write_text("no"), "jobs.json", True, True),
        (lambda run: run.skips.write_text('{"skips": 3}'), "skips.json", True, True),
        (lambda run: run.metrics(1).write_text(""), "", True, True),
        (cut_metrics, "attempt_001.jsonl", True, True),
        (broken_in_the_middle, "attempt_000.jsonl:2", True, True),
        (no_losses, "", True, True),
        (newer_events, "events/attempt_001.jsonl", True, True),
        (lambda run: run.config.write_text("a: [1\n"), "config.yaml", True, False),
    ],
)
def test_what_is_left_is_reported(
    tmp_path: Path, damage: Callable[[RunDir], object], named: str, steps: bool, parameters: bool
) -> None:
    run = make_reported_run(RunDir(tmp_path / "runs" / "r"), steps=6)
    damage(run)
    arguments = ["report", "r", "--runs-dir", str(tmp_path / "runs"), "--json", "--no-files"]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    (shown,) = json.loads(done.stdout)["runs"]
    assert (shown["steps"] > 0) is steps
    assert (shown["parameters"] is not None) is parameters
    assert not named or any(named in warning for warning in shown["warnings"]), shown["warnings"]
    assert not any("\n" in warning for warning in shown["warnings"])
    facts = [read_run_facts(run.path, {}, None, FakeSlurm(["n1"]))]
    drawn = figures(facts)
    page = to_html("r", sections(facts, drawn), page_data(facts, drawn), "now")
    assert ("Warnings</h2>" in page) is bool(shown["warnings"])


def test_nothing_at_all_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(cli, ["report", str(tmp_path / "empty")])
    assert done.exit_code != 0
    assert isinstance(done.exception, SystemExit)
    assert "empty" in done.output
