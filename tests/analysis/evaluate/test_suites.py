"""Suites read, refused, recorded; and the tables made of what is on disk."""

import math
import os
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import psutil
import pytest
from matplotlib.figure import Figure
from training_rows import make_rows, write_rows

from slurmllm.analysis.evaluate.code_tests import pass_at_k, passes, programs
from slurmllm.analysis.evaluate.plot import draw
from slurmllm.analysis.evaluate.request import task_key
from slurmllm.analysis.evaluate.scores import ScoreRow, ScoreTable, score_tables
from slurmllm.analysis.evaluate.suites import (
    AVERAGE,
    LocatedSuite,
    SuiteTask,
    find_suite,
    read_suite,
    save_suite,
    suite_names,
    suite_of_tasks,
)
from slurmllm.core.errors import ConfigError, UserError
from slurmllm.core.metrics.source import read_curve
from slurmllm.core.run.artifact_records import EvaluationRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.slurm.client import wait_for

Keep = Callable[..., Path]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "a")


@pytest.fixture
def keep(run: RunDir) -> Keep:
    """Write a score as a job does."""

    def write(
        step: int,
        row: SuiteTask,
        value: float,
        *,
        at: float = 0,
        limit: int | None = None,
        version: str = "lm_eval 1",
    ) -> Path:
        placed = find_suite("hlat")
        record = EvaluationRecord(
            step=step,
            tokens=step * 1000,
            checkpoint=f"{step:064d}",
            task=row.task,
            limit=limit,
            scores={f"{row.metric},none": value},
            errors={f"{row.metric},none": 0.01},
            version=version,
            seconds=1,
            evaluated_at=at,
        )
        key = task_key(row, placed.folder, limit, version)
        path = run.evaluation(record.checkpoint[::-1], key)
        record.save(path)
        return path

    return write


def rows_of(group: str) -> list[SuiteTask]:
    (match,) = [g for g in find_suite("hlat").suite.groups if g.name == group]
    return list(match.tasks)


def table(run: RunDir, suite: str) -> ScoreTable:
    (scores,) = [table for table in score_tables(run)[0] if table.suite == suite]
    return scores


def test_shipped_suites_are_sound() -> None:
    assert suite_names() == ["hlat", "pythia", "smoke"]
    for name in suite_names():
        suite = find_suite(name).suite
        assert suite.name == name
        for reference in suite.references:
            assert reference.source
            figures = [value for group in reference.figures.values() for value in group.values()]
            assert all(0 < value < 1 for value in figures)
            for group, errors in reference.errors.items():
                assert all(
                    0 < error < reference.figures[group][row] for row, error in errors.items()
                )


# AWS's post "End-to-end LLM training on instance clusters with over 100 nodes using AWS Trainium":
# row, shots, metric, and for HLAT 7B and OpenLLaMA 2 7B the score and its standard error, percent.
HLAT_TABLE = """
MMLU                           5 accuracy              41.318 3.602 41.075 3.611
BBH                            3 multiple_choice_grade 36.565 1.845 35.502 1.861
common reasoning               0 accuracy              56.152 1.194 56.893 1.195
common reasoning, normalized   0 accuracy_norm         59.455 1.206 61.262 1.190
world knowledge                5 exact_match           38.846 0.534 37.023 0.520
reading comprehension          0 accuracy              72.508 0.781 72.416 0.782
math                           8 accuracy               9.401 0.804  5.231 0.613
code                           0 pass@1                 7.62  -      9.06  -
code                           0 pass@10               19.83  -     23.58  -
code                           0 pass@100              34.15  -     40.24  -
"""
METRICS = {
    "accuracy": {"acc", "exact_match,strict-match"},
    "accuracy_norm": {"acc_norm"},
    "multiple_choice_grade": {"exact_match,get-answer"},  # the one metric that differs
}


def test_hlat_has_the_rows_of_the_post_and_of_the_page() -> None:
    suite = find_suite("hlat").suite
    references = {reference.model: reference for reference in suite.references}
    page = []
    for line in HLAT_TABLE.strip().splitlines():
        name, (shots, metric, *figures) = line[:30].strip(), line[30:].split()
        (group,) = [group for group in suite.groups if group.name == name]
        tasks = [task for task in group.tasks if name != "code" or task.metric == metric]
        assert {task.shots for task in tasks} == {int(shots)}
        (ours,) = {task.metric for task in tasks}
        assert ours in METRICS.get(metric, {metric})
        row = AVERAGE if group.average else tasks[0].title
        for model, published in zip(
            ("HLAT 7B", "OpenLLaMA 2 7B of AWS"), (figures[:2], figures[2:]), strict=True
        ):
            score = references[model].figures[name][row]
            error = references[model].errors.get(name, {}).get(row)
            assert score == pytest.approx(float(published[0]) / 100)
            assert (error is None) == (published[1] == "-")
            assert error is None or error == pytest.approx(float(published[1]) / 100)
        named = ", ".join(dict.fromkeys(task.task for task in tasks))
        page.append(f"| {name} | {named} | {shots} | {ours} |")
    text = (Path(__file__).parents[3] / "docs" / "evaluate.md").read_text()
    assert "\n".join(page) in text
    shown = {group.name for group in suite.groups} - {"held-out text"}
    assert shown == {line[:30].strip() for line in HLAT_TABLE.strip().splitlines()}


def test_all_faults_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "name: a b\nsuite: 1\ngroups:\n  - name: g\n    tasks:\n"
        "      - {task: t, shots: -1}\n      - {name: u}\n      - piqa\n  - {name: h, tasks: []}\n"
    )
    with pytest.raises(ConfigError) as error:
        find_suite(str(path))
    places = [fault.partition(":")[0] for fault in error.value.faults]
    tasks = [f"groups.0.tasks.{place}" for place in ("0.shots", "1.task", "2")]
    assert sorted(places) == [*tasks, "groups.1.tasks", "name", "suite"]
    assert "must be fields and values, such as {task: piqa} (is 'piqa')" in str(error.value)
    path.write_text(
        "name: s\ngroups:\n  - {name: g, tasks: [{task: t}]}\n"
        "references:\n  - {model: M, source: here, figures: {g: {u: 0.5, average: 0.5}}}\n"
    )
    with pytest.raises(ConfigError, match="M: g / u"):
        find_suite(str(path))


def test_averages_stand_beside_published_ones(run: RunDir, keep: Keep, tmp_path: Path) -> None:
    nq, trivia = rows_of("world knowledge")
    keep(10, nq, 0.1)
    keep(10, trivia, 0.3)
    keep(20, nq, 0.2)
    scores = table(run, "hlat")
    assert scores.tokens == {10: 10_000, 20: 20_000}
    names = [row.name for row in scores.rows]
    assert names == ["nq_open", "triviaqa", "average"]
    average = scores.rows[-1]
    assert average.scores == {10: pytest.approx(0.2)}  # step 20 lacks a part
    assert average.errors[10] == pytest.approx(0.01 / 2**0.5)
    assert average.references == {
        "HLAT 7B": 0.38846,
        "Llama 2 7B": 0.489,
        "OpenLLaMA 2 7B of AWS": 0.37023,
    }
    assert scores.rows[0].references == {"Llama 2 7B": 0.247}
    # The average of AWS's post has a standard error; a model without one differs by ours alone.
    assert average.reference_errors["HLAT 7B"] == 0.00534
    (step,) = average.scores
    error = average.errors[step]
    assert average.difference("HLAT 7B", step) == pytest.approx(
        (average.scores[step] - 0.38846) / math.hypot(error, 0.00534)
    )
    assert average.difference("Llama 2 7B", step) == pytest.approx(
        (average.scores[step] - 0.489) / error
    )
    assert average.difference("nobody", step) is None
    draw(scores, "a", tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_the_validation_loss_is_drawn_over_the_training_loss(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_rows(RunDir(tmp_path).metrics(0), make_rows(1, 40))
    curve = read_curve(tmp_path)
    drawn: list[Figure] = []
    write_picture = "slurmllm.analysis.evaluate.plot.write_picture"
    monkeypatch.setattr(write_picture, lambda *arguments: drawn.append(arguments[0]))
    rows = tuple(
        ScoreRow("held-out text", metric, None, metric, {20: 4.5, 40: 4.2}, {}, {})
        for metric in ("loss", "perplexity")
    )
    shown = ScoreTable("hlat", rows, (20, 40), {20: 20 * 4096, 40: 40 * 4096}, {})
    draw(shown, "a", tmp_path / "p.png", curve)
    losses, perplexities = drawn[0].axes[:2]
    training, scores = losses.get_lines()
    assert training.get_label() == "training loss"
    ends = [np.asarray(line.get_xdata())[-1] for line in (training, scores)]
    assert ends == [40 * 4096, 40 * 4096]
    assert np.array_equal(training.get_ydata(), curve.columns["loss"])
    assert len(perplexities.get_lines()) == 1
    draw(shown, "a", tmp_path / "p.png")
    assert len(drawn[1].axes[0].get_lines()) == 1


def test_whole_evaluations_go_before_limited_ones(run: RunDir, keep: Keep) -> None:
    nq, _ = rows_of("world knowledge")
    keep(10, nq, 0.9, limit=5)
    keep(20, nq, 0.8, limit=7)
    (row,) = table(run, "hlat").rows
    assert (row.name, row.scores) == ("nq_open (first 7)", {20: 0.8})
    keep(10, nq, 0.2, at=5, version="lm_eval 2")  # newer
    keep(10, nq, 0.1, at=1)
    (row,) = table(run, "hlat").rows
    assert (row.name, row.scores) == ("nq_open", {10: 0.2})


def test_set_up_otherwise_is_another_task(run: RunDir, keep: Keep) -> None:
    nq, _ = rows_of("world knowledge")
    keep(10, nq.model_copy(update={"shots": 1}), 0.2)
    assert score_tables(run) == ([], [])
    keys = {
        task_key(row, Path(), limit, version)
        for row in (nq, nq.model_copy(update={"options": {"repeats": 2}}))
        for limit in (None, 3)
        for version in ("a", "b")
    }
    assert len(keys) == 8


@pytest.mark.parametrize("size", [1, 5 << 40])
def test_a_folder_of_tasks_is_hashed_within_limits(tmp_path: Path, size: int) -> None:
    for number in range(10_001 if size == 1 else 1):
        path = tmp_path / f"{number // 100}" / f"{number}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.truncate(path, size)
    row = rows_of("world knowledge")[0].model_copy(update={"folder": str(tmp_path)})
    with pytest.raises(UserError, match=r"more than 10,000 files or 4 GiB: .*; name the folder"):
        task_key(row, Path(), None, "a")


def test_damaged_and_newer_files_are_passed_over(run: RunDir, keep: Keep) -> None:
    nq, trivia = rows_of("world knowledge")
    whole, cut = keep(10, nq, 0.1), keep(10, trivia, 0.2)
    cut.write_text(cut.read_text()[:40])
    newer = whole.with_name("newer.json")
    newer.write_text('{"format": 9, "results": []}')
    scores, warnings = score_tables(run)
    assert [row.name for row in scores[0].rows] == ["nq_open"]
    assert all(str(path) in line for path, line in zip((newer, cut), warnings, strict=True))


def test_tasks_named_one_by_one_are_recorded_together(run: RunDir) -> None:
    for shots in (0, 5, 5, 5):  # the same again is the same row
        save_suite(run, LocatedSuite(suite_of_tasks(["piqa"], shots), Path()))
    save_suite(run, LocatedSuite(suite_of_tasks(["sciq"], None), Path()))
    suite = read_suite(run.evaluation_suite("tasks"))
    assert [row.title for row in suite.rows()] == ["piqa 0-shot", "piqa 5-shot", "sciq"]
    suite = find_suite("hlat").suite
    assert [row.title for row in suite.only(["gsm8k_cot"]).rows()] == ["gsm8k"]
    with pytest.raises(UserError, match="not in suite hlat"):
        suite.only(["x"])
    other = suite.with_shots(1)
    assert other.name == "hlat-1shot"
    assert {row.shots for row in other.rows()} == {1, None}


GOOD, BAD = "def f(x):\n    return x + 1", "def f(x):\n    return x"
TESTS = "assert f(1) == 2"


@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("x = 1", True),
        ("assert False", False),
        ("import os; os._exit(0)", False),
        ("this is no program", False),
        ("x = bytearray(1 << 40)", False),
        ("while True: pass", False),
        ("print(open('/proc/self/cmdline').read()[-35:-3]); import os; os._exit(0)", False),
        ("assert input", True),
    ],
)
def test_a_program_passes_by_reaching_its_end(program: str, passed: bool) -> None:
    assert passes(program, limit_s=1 if "while" in program else 10) is passed


def test_no_process_of_a_program_outlives_it(tmp_path: Path) -> None:
    (alive := tmp_path / "alive").touch()
    leaves = f"while os.path.exists({str(alive)!r}): time.sleep(0.1)"
    program = f"if os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  {leaves}\n os._exit(0)"
    assert passes(f"import os, time\n{program}\nos.wait()")
    started = [sys.executable, "-I", "-"]

    def ended() -> bool:  # a killed process ends later
        return started not in [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])]

    assert wait_for(ended, 30, 0.1)


def test_pass_at_k_is_the_share_of_subsets_with_a_good_one() -> None:
    samples = [BAD, GOOD, BAD, GOOD]
    scores = pass_at_k([TESTS], [samples], k=[1, 2, 3, 5])
    for k in (1, 2, 3):
        subsets = list(combinations(samples, k))
        assert scores[f"pass@{k}"] == pytest.approx(sum(GOOD in s for s in subsets) / len(subsets))
    assert "pass@5" not in scores


def test_programs_are_prompts_with_what_follows() -> None:
    assert programs([["b", "c"]], [{"prompt": "a"}]) == [["ab", "ac"]]
