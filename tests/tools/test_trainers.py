"""tools/trainers.py: the catalog, the table, and all stages on a trainer without packages."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))  # as it has itself

from _trainers import environment, stages
from _trainers.catalog import Trainer, load_trainers
from _trainers.commands import StageError, run_limited
from _trainers.stages import Outcome, run_trainer
from _trainers.table import BEGIN, END, row_of, update_table

from slurmllm.core.config.resolve import resolve

CATALOG = load_trainers()
PAGE = Path(__file__).resolve().parents[2] / "docs" / "any_trainer.md"


@pytest.mark.parametrize("trainer", CATALOG, ids=lambda trainer: trainer.name)
def test_a_trainer_has_a_recipe_and_exact_versions(trainer: Trainer, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(trainer.filled_recipe))
    command = resolve(str(file), "local").recipe.command
    assert command is not None
    assert "{run}" in command.run
    for placeholder in ("{scripts}", "{tests}", "{work}", "{source}", "{docs}"):
        assert placeholder not in command.run
    assert all("==" in requirement for requirement in trainer.requirements)
    assert trainer.expected == "exact" or trainer.reason


def test_the_rows_of_the_page_are_those_of_the_catalog() -> None:
    table = PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    titles = {line.split("|")[1].strip() for line in table.splitlines() if line[:2] == "| "}
    assert titles - {"trainer"} <= {trainer.title for trainer in CATALOG}
    assert len({trainer.title for trainer in CATALOG}) == len(CATALOG)


def test_an_unknown_trainer_is_named() -> None:
    with pytest.raises(SystemExit, match=r"unknown trainer: dpp; there are .*ddp"):
        load_trainers(["dpp"])


def outcome_of(verdict: str, identical: bool, **values: Any) -> Outcome:
    resume = {"verdict": verdict, "text": f"text of {verdict}", "from_step": 10}
    result = {"at_step": 15, "faults": ["a fault"], "recovery": {"total_s": 21.6}, "resume": resume}
    known: dict[str, Any] = {"name": "x", "title": "X", "date": "2026-11-29", "expected": "exact"}
    return Outcome(
        **{**known, "version": "x 1.0", "steps": 40, **values},
        compare={"verdict": "identical" if identical else "differ", "reason": "loss differs"},
        drill={"drills": [result]},
    )


def test_a_row_says_the_weaker_of_comparison_and_drill() -> None:
    exact = outcome_of("exact", True)
    assert exact.verdict == "exact"
    row = "| X | x 1.0 | 2026-11-29 | 15 → 10 of 40 | 22 s | text of exact |"
    assert row_of(exact) == row
    differs = outcome_of("exact", False, reason="it saves no RNG state")
    assert differs.verdict == "differs"
    assert row_of(differs).endswith("| loss differs, text of exact (it saves no RNG state) |")
    assert outcome_of("within_noise", True).verdict == "within_noise"
    assert outcome_of("not_resumed", True).verdict == "fails"
    failed = Outcome("x", "X", "2026-11-29", "exact", failure="pip: no | such\nversion")
    row = r"| X | – | 2026-11-29 | – | – | not shown: pip: no \| such version |"
    assert (failed.verdict, row_of(failed)) == ("fails", row)


def test_only_the_rows_that_were_run_are_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    update_table(page, [outcome_of("exact", True), outcome_of("exact", True, title="A")])
    update_table(page, [outcome_of("exact", True, version="x 2.0")])
    lines = page.read_text().splitlines()
    assert (lines[0], lines[1], lines[-2], lines[-1]) == ("before", BEGIN, END, "after")
    rows = [line.split(" | ")[:2] for line in lines if line.startswith("| ")]
    assert rows == [["| trainer", "version"], ["| A", "x 1.0"], ["| X", "x 2.0"]]
    page.write_text("no table")
    with pytest.raises(SystemExit, match="markers"):
        update_table(page, [])


def test_a_stage_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    command = ["bash", "-c", "sleep 600 & echo $!; wait"]
    log = tmp_path / "log"
    with pytest.raises(StageError, match="slow: not over after 2 s"):
        run_limited("slow", command, log, {"PATH": "/usr/bin:/bin"}, 2.0)
    child = Path("/proc") / log.read_text().strip() / "cmdline"
    while child.exists() and b"sleep" in child.read_bytes():  # SIGKILL takes a moment
        time.sleep(0.05)


@pytest.mark.long
def test_all_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (environment, stages):
        monkeypatch.setattr(module, "BUILD", tmp_path)
    monkeypatch.setattr(stages, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(stages, "LOGS", tmp_path / "logs")
    run = "python {tests}/steps.py --out {run}/out --steps 20 --step-s 0.2"
    checkpoints = {"checkpoints": "{run}/out/step-{step}", "completion_file": "done"}
    recipe = {"extends": "trainers/plain", "command": {"run": run, **checkpoints}}
    # On one node: its ranks do not wait for each other, and the other would finish.
    trainer = Trainer(name="steps", title="Steps", package="pip", recipe=recipe, nodes=1)
    outcome = run_trainer(trainer)
    assert (outcome.failure, outcome.verdict) == ("", "exact"), outcome
    assert (outcome.steps, outcome.checkpoints) == (20, [5, 10, 15, 20])
    assert (outcome.ending, outcome.resumed_from) == ("node_failure", 5)
    assert outcome.version.startswith("pip ")
    # A trainer that cannot start is a row with its reason.
    recipe = {"extends": "trainers/plain", "command": {"run": "python {run}/absent.py"}}
    outcome = run_trainer(Trainer(name="absent", title="A", expected="fails", recipe=recipe))
    assert outcome.verdict == "fails"
    assert "can't open file" in outcome.failure
