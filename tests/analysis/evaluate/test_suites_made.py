"""The suites hlat and pythia, every task of them, on questions that we made up (`made_hub`)."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from amounts import sample
from analysis.evaluate.conftest import by_hand, needs_harness, scores, train_tiny
from analysis.evaluate.made_hub import PER_SPLIT, made_row, write_hub, write_humaneval, write_logiqa
from click.testing import Result
from command_line import answer, call

from slurmllm.analysis.evaluate.suites import AVERAGE, VALIDATION, find_suite
from slurmllm.core.run.rundir import RunDir

pytestmark = needs_harness
Evaluate = Callable[..., Result]
SUITES = ("hlat", "pythia")
STEP = "80"


@pytest.fixture(scope="module", autouse=True)
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The made questions, in the working directory; caches that are thrown away."""
    import datasets

    folder, fetched = tmp_path_factory.mktemp("hub"), tmp_path_factory.mktemp("fetched")
    rows = [row for name in SUITES for row in find_suite(name).suite.rows()]
    write_hub(folder, {row.task for row in rows if row.folder is None and row.task != VALIDATION})
    write_hub(folder, ["logiqa"])
    write_humaneval(folder)
    write_logiqa(fetched)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", fetched)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", fetched)
        yield folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of short answers, so that what it writes ends soon; room for the longest prompts."""
    folder = tmp_path_factory.mktemp("made")
    texts = [
        text
        for i in range(60)
        for text in (
            f"def next_{i}(x):\n    return x + 1\n",
            f"Q: {made_row('openai/gsm8k', '', i)['question']}\nA: The answer is 7.\n\n",
            f"Leaf {i} is {('red', 'blue')[i % 2]}.\n",
        )
    ]
    overrides = (
        "model.seq_len=2048 model.num_layers=1 data.validation=0.3 train.global_batch=2 "
        f"train.steps={STEP} train.micro_batch=2 checkpoint.every_steps={STEP} optim.lr=0.02 "
        "optim.warmup_steps=2"
    )
    return train_tiny(folder, texts, texts * 4, overrides)


@pytest.mark.parametrize("name", sample(1, ["pythia", "hlat"]))
def test_every_row_has_its_figure(name: str, made: RunDir, evaluate: Evaluate) -> None:
    done = evaluate(
        made, "--suite", name, "--limit", 1, "--batch-size", 50, "--allow-code-execution", "--json"
    )
    output = json.loads(done.stdout)
    assert done.exit_code == 0, (done.stderr, output["failed"])
    assert (output["failed"], output["skipped"], output["warnings"]) == ([], [], [])
    (table,) = output["suites"]
    rows = {(row["group"], row["name"].partition(" (first ")[0]): row for row in table["rows"]}
    suite = find_suite(name).suite
    for group in suite.groups:
        figures = []
        for task in group.tasks:
            row = rows.pop((group.name, task.title))
            assert (row["metric"], row["shots"]) == (task.metric, task.shots)
            assert math.isfinite(row["scores"][STEP])
            figures.append(row["scores"][STEP])
            assert row["references"] == _published(suite, group.name, task.title)
        if group.average:
            row = rows.pop((group.name, AVERAGE))
            assert row["scores"][STEP] == pytest.approx(sum(figures) / len(figures))
            assert _published(suite, group.name, AVERAGE).items() <= row["references"].items()
    assert not rows
    assert any(row["references"] for row in table["rows"])
    if name == "hlat":
        few, more, most = (
            scores(output, f"humaneval pass@{k} (first 1)")[STEP] for k in (1, 10, 100)
        )
        assert 0 < few <= more <= most


def _published(suite: Any, group: str, row: str) -> dict[str, float]:
    return {
        model.model: model.figures[group][row]
        for model in suite.references
        if row in model.figures.get(group, {})
    }


def test_the_figures_are_those_by_hand(made: RunDir, evaluate: Evaluate, tmp_path: Path) -> None:
    tasks = ("mmlu_anatomy", "gsm8k_cot", "lambada_openai", "triviaqa", "logiqa")
    asked = [word for task in tasks for word in ("--task", task)]
    rows = answer(
        evaluate(made, *asked, "--shots", 5, "--limit", PER_SPLIT, "--json", "--no-plot")
    )["suites"][0]["rows"]
    export = ["checkpoint", "export", STEP, "--run", str(made.path), "--out", str(tmp_path / "m")]
    assert call(*export).exit_code == 0
    arguments = f"--num_fewshot 5 --limit {PER_SPLIT} --tasks {','.join(tasks)}".split()
    of_harness = by_hand(tmp_path / "m", tmp_path / "results", *arguments)
    ours = {(row["task"], row["metric"]): row["scores"][STEP] for row in rows}
    assert {task for task, _ in ours} == set(tasks)
    assert ours == {(task, metric): of_harness[task][metric] for task, metric in ours}
    assert ours["gsm8k_cot", "exact_match,strict-match"] > 0
    assert ours["logiqa", "acc,none"] > 0


def test_options_of_shipped_tasks(made: RunDir, evaluate: Evaluate, tmp_path: Path) -> None:
    def asked(tokens: int) -> Result:
        path = tmp_path / f"own{tokens}.yaml"
        options = f"{{generation_kwargs: {{max_gen_toks: {tokens}, until: [Q]}}}}"
        path.write_text(
            f"name: own{tokens}\ngroups:\n  - name: g\n    tasks:\n"
            f"      - {{task: gsm8k_cot, shots: 1, options: {options}, name: one}}\n"
            f"      - {{task: gsm8k_cot, shots: 2, options: {options}, name: two}}\n"
            f"      - {{task: bbh_cot_fewshot, options: {options}}}\n"
        )
        return evaluate(made, "--suite", path, "--limit", 1, "--no-plot", "--json")

    assert asked(4).exit_code == 0
    done = asked(4000)
    assert done.exit_code == 1
    output = json.loads(done.stdout)
    failed = output["failed"]
    assert (output["evaluated"], [failure["shots"] for failure in failed]) == (0, [1, 2, None])
    assert all("4000 tokens, but its context holds 2048" in failure["error"] for failure in failed)
