"""`slurmllm evaluate` on a run that has memorized the smoke suite, compared with the harness."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from analysis.evaluate.conftest import ALL, Learnt, by_hand, in_processes, needs_harness, scores
from click.testing import Result
from command_line import answer, call, refused
from safetensors.torch import load_file

from slurmllm.analysis.evaluate.harness import Harness, task_manager
from slurmllm.analysis.evaluate.request import TaskRequest, TaskScores
from slurmllm.analysis.evaluate.scores import score_tables
from slurmllm.analysis.evaluate.suites import VALIDATION, find_suite, suite_names, suites_dir
from slurmllm.core.run.rundir import RunDir

pytestmark = needs_harness
Evaluate = Callable[..., Result]


@pytest.mark.numerics
def test_the_numbers_are_the_harness_s_own(learnt: Learnt, tmp_path: Path) -> None:
    export = ["checkpoint", "export", "180", "--run", str(learnt.run.path)]
    done = call(*export, "--out", tmp_path / "hub")
    assert done.exit_code == 0, done.output
    tasks = f"--include_path {suites_dir() / 'smoke'} --tasks smoke_choice,smoke_sums,smoke_code"
    arguments = f"--num_fewshot 2 --confirm_run_unsafe_code {tasks}".split()
    of_harness = by_hand(tmp_path / "hub", tmp_path / "results", *arguments)
    ours = {name: scores(learnt.output, name)["180"] for name in ("smoke_choice", "smoke_sums")}
    assert ours["smoke_choice"] == of_harness["smoke_choice"]["acc,none"] > 0.25  # not by chance
    assert ours["smoke_sums"] == of_harness["smoke_sums"]["exact_match,get-answer"] > 0
    for k in (1, 2, 4):
        code = scores(learnt.output, f"smoke_code pass@{k}")["180"]
        assert code == of_harness["smoke_code"][f"pass@{k},programs"] > 0


def test_cached_scores_are_not_computed_again(learnt: Learnt, evaluate: Evaluate) -> None:
    assert (learnt.output["evaluated"], learnt.output["cached"]) == (8, 0)
    before = {path: path.stat().st_mtime_ns for path in learnt.run.evaluation_files()}
    repeated = json.loads(evaluate(learnt.run, *ALL).stdout)
    assert (repeated["evaluated"], repeated["cached"], repeated["failed"]) == (0, 8, [])
    assert repeated["suites"] == learnt.output["suites"]
    assert {path: path.stat().st_mtime_ns for path in learnt.run.evaluation_files()} == before
    assert Path(repeated["plot"]).read_bytes().startswith(b"\x89PNG")
    assert not list((learnt.run.path / "evaluations").glob(".export-*"))
    options = ("--suite", "smoke", "--allow-code-execution", "--no-plot")
    step = json.loads(evaluate(Path(f"{learnt.run.path}@90"), *options, "--json").stdout)
    assert (step["evaluated"], step["cached"]) == (0, 4)
    assert scores(step, "smoke_choice") == {"90": scores(learnt.output, "smoke_choice")["90"]}
    table = evaluate(learnt.run, *options)
    assert "smoke_choice" in table.stdout
    assert "0 tasks evaluated, 4 cached, 0 failed" in table.stdout


def test_damaged_checkpoint_is_skipped(learnt: Learnt, evaluate: Evaluate, tmp_path: Path) -> None:
    copy = RunDir(tmp_path / "copy")
    shutil.copytree(learnt.run.path, copy.path)
    for path in copy.evaluation_files():
        if path.name.startswith("smoke_choice"):
            path.unlink()
    weights = max(copy.checkpoint(90).iterdir(), key=lambda path: path.stat().st_size)
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    done = evaluate(copy, *ALL)
    output = json.loads(done.stdout)
    assert done.exit_code == 0, done.output
    assert [checkpoint["step"] for checkpoint in output["damaged"]] == [90]
    assert "step 90, which does not verify" in done.stderr
    assert output["evaluated"] == 1
    whole = scores(learnt.output, "smoke_choice")
    assert scores(output, "smoke_choice") == {"180": whole["180"]}
    named = evaluate(copy, "--suite", "smoke", "--task", "smoke_choice", "--checkpoint", 90)
    assert named.exit_code == 4, named.output
    (copy.checkpoint(90) / "manifest.json").unlink()
    unfinished = evaluate(Path(f"{copy.path}@90"), "--suite", "smoke")
    assert (unfinished.exit_code, "has no manifest.json" in unfinished.output) == (4, True)
    assert "no checkpoint of step 7" in evaluate(Path(f"{copy.path}@7"), "--suite", "smoke").output


def test_a_failing_task_ends_no_others(learnt: Learnt, evaluate: Evaluate, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    lines = "custom_dataset: !function slurmllm.analysis.evaluate.suites.shipped_lines\n"
    choice = (suites_dir() / "smoke" / "smoke_choice.yaml").read_text()
    (tasks / "good.yaml").write_text(choice.replace("task: smoke_choice", "task: good"))
    bad = choice.replace("task: smoke_choice", "task: bad")
    bad = bad.replace(lines, "dataset_path: no/such\n")
    (tasks / "bad.yaml").write_text(bad)
    suite = tmp_path / "own.yaml"
    suite.write_text(
        "name: own\ngroups:\n  - name: mine\n    tasks:\n"
        "      - {task: bad, shots: 0, metric: acc, folder: tasks}\n"
        "      - {task: good, shots: 0, folder: tasks}\n"
    )
    assert "shipped_lines` runs Python code; pass --allow-code-execution" in refused(
        evaluate(learnt.run, "--suite", suite, "--limit", 4, "--json")
    )
    done = evaluate(learnt.run, "--suite", suite, "--limit", 4, "--json", "--allow-code-execution")
    assert done.exit_code == 1, done.output
    output = json.loads(done.stdout)
    (failed,) = output["failed"]
    assert (failed["step"], failed["task"]) == (180, "bad")
    assert "cannot be fetched here" in failed["error"]
    (row,) = output["suites"][0]["rows"]
    assert row["name"] == "good (first 4)"
    # Recorded, so that the report finds it.
    tables, warnings = score_tables(learnt.run)
    assert [table.suite for table in tables] == ["smoke", "own"]
    assert warnings == []


def test_a_job_that_is_killed_is_reported_and_imports_nothing_of_the_working_directory(
    learnt: Learnt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformers.py").write_text(f"open({str(tmp_path / 'code ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    choice = (suites_dir() / "smoke" / "smoke_choice.yaml").read_text()
    task = choice.replace("slurmllm.analysis.evaluate.suites.shipped_lines", "deadly.load")
    (tasks / "deadly.yaml").write_text(task.replace("task: smoke_choice", "task: deadly"))
    (tasks / "good.yaml").write_text(choice.replace("task: smoke_choice", "task: good"))
    (tasks / "deadly.py").write_text("import os\ndef load(**_):\n    os.kill(os.getpid(), 9)\n")
    suite = tmp_path / "deadly.yaml"
    suite.write_text(
        "name: deadly\ngroups:\n  - name: g\n    tasks:\n"
        "      - {task: good, folder: tasks}\n      - {task: deadly, folder: tasks}\n"
    )
    done = in_processes(
        learnt.run, "--suite", suite, "--json", "--no-plot", "--limit", 2, "--allow-code-execution"
    )
    assert done.exit_code == 1, done.output
    output = json.loads(done.stdout)
    assert [row["name"] for row in output["suites"][0]["rows"]] == ["good (first 2)"]
    (failed,) = output["failed"]
    assert failed["task"] == "deadly"
    assert "killed by signal 9" in failed["error"]
    assert Path(failed["error"].rpartition(" ")[2]).is_file()
    assert not list((learnt.run.path / "evaluations").glob(".export-*"))
    assert not (tmp_path / "code ran").exists()


def test_an_interrupted_evaluation_continues(learnt: Learnt, evaluate: Evaluate) -> None:
    tasks = ("--task", "smoke_choice", "--task", "smoke_sums")
    asked = ("--suite", "smoke", *tasks, "--limit", 5, "--no-plot", "--json")
    score, started = Harness.score, []

    def stopped_at_the_second(self: Harness, request: TaskRequest) -> TaskScores:
        started.append(request.task.task)
        if len(started) > 1:
            raise KeyboardInterrupt
        return score(self, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Harness, "score", stopped_at_the_second)
        done = evaluate(learnt.run, *asked)
    assert "repeat the command to continue" in done.output
    assert not list((learnt.run.path / "evaluations").glob(".export-*"))
    output = json.loads(evaluate(learnt.run, *asked).stdout)
    assert (output["cached"], output["evaluated"]) == (1, 1)


def test_a_metric_that_a_task_lacks(learnt: Learnt, evaluate: Evaluate, tmp_path: Path) -> None:
    suite = tmp_path / "own.yaml"
    row = f"task: smoke_choice, folder: {suites_dir() / 'smoke'}"
    suite.write_text(
        "name: metrics\ngroups:\n  - name: g\n    tasks:\n"
        f"      - {{{row}, metric: accuracy, name: bad}}\n      - {{{row}, metric: acc}}\n"
    )
    done = evaluate(learnt.run, "--suite", suite, "--limit", 2, "--no-plot", "--json")
    assert done.exit_code == 1
    output = json.loads(done.stdout)
    assert len(output["suites"][0]["rows"]) == 1
    (failed,) = output["failed"]
    assert "no finite metric 'accuracy'; the task has acc,none" in failed["error"]


def test_cuda_of_none(learnt: Learnt, evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    logs = list(learnt.run.logs.rglob("*"))
    assert "torch finds no CUDA device here" in refused(
        evaluate(learnt.run, "--task", "validation", "--limit", 4, "--device", "cuda")
    )
    assert list(learnt.run.logs.rglob("*")) == logs


def test_a_model_folder(learnt: Learnt, evaluate: Evaluate, tmp_path: Path) -> None:
    export = ["checkpoint", "export", "90", "--run", str(learnt.run.path)]
    folder = tmp_path / "hub"
    assert call(*export, "--out", folder).exit_code == 0
    output = answer(evaluate(folder, "--suite", "smoke", "--task", "smoke_choice", "--json"))
    expected = scores(learnt.output, "smoke_choice")["90"]
    assert scores(output, "smoke_choice")["0"] == expected
    # Programs that somebody put into the folder do not run.
    mark = tmp_path / "code ran"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((folder / name).read_text())
        classes = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
        values["auto_map"] = dict.fromkeys(classes, "evil.Evil")
        (folder / name).write_text(json.dumps(values))
    done = evaluate(folder, "--suite", "smoke", "--task", "smoke_choice", "--json")
    assert scores(json.loads(done.stdout), "smoke_choice")["0"] == expected
    assert not mark.exists()
    # Pickled weights are not read.
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    done = evaluate(folder, "--suite", "smoke", "--task", "smoke_choice")
    assert (done.exit_code, "no weights in safetensors" in done.output) == (2, True), done.output


def test_the_harness_knows_the_tasks_of_all_suites() -> None:
    for folder in (None, *(str(path) for path in suites_dir().iterdir() if path.is_dir())):
        tasks = set(task_manager(folder, False).all_tasks)  # by the arguments of `evaluate`
        name_of_folder = None if folder is None else Path(folder).name
        for name in suite_names():
            rows = [row for row in find_suite(name).suite.rows() if row.folder == name_of_folder]
            assert {row.task for row in rows} - {VALIDATION} <= tasks


def test_no_harness(learnt: Learnt, evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("evaluate", "harness"):
        monkeypatch.setattr(f"slurmllm.analysis.evaluate.{module}.harness_version", lambda: None)
    # What is known is shown, programs' scores too; nothing more can be had.
    done = evaluate(learnt.run, "--suite", "smoke", "--json")
    assert scores(json.loads(done.stdout), "smoke_code pass@1")["180"] > 0
    assert "pip install 'slurmllm[eval]'" in refused(
        evaluate(learnt.run, "--suite", "smoke", "--limit", 3)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no task is given"),
        (("--suite", "smok"), "did you mean 'smoke'"),
        (("--suite", "smoke", "--task", "piqa"), "is not in suite smoke"),
        (("--suite", "smoke", "--task", "smoke_code", "--limit", "1"), "--allow-code-execution"),
        (("--suite", "smoke", "--checkpoint", "61"), "it has: 90, 180"),
        (("--task", "pika"), "did you mean"),
        (("--task", "ai2_arc"), "is a tag of several tasks; name them: arc_challenge, arc_easy"),
        (("--task", "openllm"), "is a group without a metric of its own; name its tasks: arc_"),
        (("--task", "humaneval"), "pass --allow-code-execution to allow it"),
        (("--suite", "smoke", "--tokenizer", "no.json"), "cannot read tokenizer no.json"),
        (("--task", ""), "name a task of the harness"),
        (("--task", "piqa", "--partition", "p"), "add --slurm"),
        (("--task", "piqa", "--validation-corpus", "x"), "requires --task validation"),
        (("--suite", "smoke", "--plot", "x.pdf"), "x.png"),
    ],
)
def test_refusals(
    learnt: Learnt, evaluate: Evaluate, arguments: tuple[str, ...], message: str
) -> None:
    assert message in refused(evaluate(learnt.run, *arguments))
