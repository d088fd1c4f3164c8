"""Suites and tasks that somebody else wrote: they run no code unless it is allowed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from analysis.evaluate.conftest import needs_harness
from click.testing import CliRunner, Result

from slurmllm.analysis.evaluate.harness import task_fault
from slurmllm.analysis.evaluate.request import TaskRequest
from slurmllm.analysis.evaluate.suites import SuiteTask, find_suite
from slurmllm.cli.main import cli
from slurmllm.train.model.private_names import TASK_FUNCTIONS

pytestmark = needs_harness

TEXT = "doc_to_text: '{{question}}'\n"
TARGET = "doc_to_target: '{{answer}}'\n"
BOTH = TEXT + TARGET
FILES = f"{BOTH}dataset_kwargs: {{data_files: FOLDER/q.json"
ESCAPE = "{{ cycler.__init__.__globals__.os.system(mark) }}"
ALLOWED = "--allow-code-execution"


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "code ran"


def write_suite(folder: Path, mark: Path, task: str, options: str = "{}") -> Path:
    """A suite of one task, whose folder has everything that code could come from."""
    tasks = folder / "tasks"
    tasks.mkdir()
    touch = f"open({str(mark)!r}, 'w').close()\n"
    (tasks / "evil.py").write_text(f"{touch}def run(*_, **__): {touch}")
    (tasks / "evil" / "custom_generate").mkdir(parents=True)
    (tasks / "evil" / "evil.py").write_text(touch)
    question = {"question": "1+1", "answer": "2", "mark": f"touch {str(mark)!r}"}
    (tasks / "q.json").write_text(json.dumps(question))
    (tasks / "own.yaml").write_text(
        f"task: own\ndataset_path: json\ndataset_kwargs: {{data_files: {tasks}/q.json}}\n"
        f"test_split: train\noutput_type: generate_until\n{task}"
    )
    suite = folder / "suite.yaml"
    suite.write_text(
        "name: own\ngroups:\n  - name: g\n    tasks:\n"
        f"      - {{task: own, folder: tasks, options: {options}}}\n"
    )
    return suite


def fetch(suite: Path, *more: str) -> Result:
    return CliRunner().invoke(cli, ["evaluate", "none", "--suite", str(suite), "--fetch", *more])


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("doc_to_text: !function evil.run\n" + TARGET, "own.yaml, line 6: `!function evil.run`"),
        (TEXT + TARGET + "process_docs: !function evil.run\n", "line 8: `!function evil.run`"),
        ("class: !function evil.run\n", "line 6: `!function evil.run`"),
        ("include: ../other.yml\n" + TEXT, "other.yml, line 1: `!function"),
        (TEXT + TARGET + "metric_list: [{metric: FOLDER/evil}]\n", "`metric: /"),
        (f"{BOTH}generation_kwargs: {{custom_generate: FOLDER/evil}}\n", "`custom_generate: /"),
        (TEXT + TARGET + "dataset_path: pandas\n", "`dataset_path: pandas`"),
        (
            "include: HARNESS/tasks/gsm8k/gsm8k.yaml\ndataset_kwargs: {trust_remote_code: 1}\n",
            "`trust_remote_code: 1`",
        ),
        (f"{FILES}, cache_dir: FOLDER/copies}}\n", "`cache_dir` may copy your files to other"),
        (f"{FILES}, storage_options: {{a: b}}}}\n", "`storage_options` may copy"),
        ("include: SHIPPED/smoke_sums.yaml\n", "`custom_dataset: <function"),
        (
            "group: own\naggregate_metric_list: [{metric: acc}]\ntask: [logiqa]\n",
            "`dataset_kwargs` changes the input of",
        ),
    ],
)
def test_code_of_a_task_is_refused(tmp_path: Path, mark: Path, task: str, reason: str) -> None:
    import lm_eval

    harness, shipped = str(Path(str(lm_eval.__file__)).parent), find_suite("smoke").folder / "smoke"
    task = task.replace("FOLDER", str(tmp_path / "tasks")).replace("HARNESS", harness)
    suite = write_suite(tmp_path, mark, task.replace("SHIPPED", str(shipped)))
    (tmp_path / "other.yml").write_text("doc_to_target: !function tasks.evil.run\n")
    done = fetch(suite)
    assert not mark.exists()
    assert not (tmp_path / "tasks" / "copies").exists()
    assert done.exit_code == 2, done.output
    assert reason in done.output
    assert str(tmp_path) in done.output
    assert "pass --allow-code-execution to allow it, if you trust its author" in done.output
    # Before any job, too.
    request = TaskRequest(find_suite(str(suite)).suite.groups[0].tasks[0], tmp_path, "")
    fault = task_fault(request)
    assert fault is not None
    assert reason in fault
    assert not mark.exists()


def test_allowed_code_runs(tmp_path: Path, mark: Path) -> None:
    suite = write_suite(tmp_path, mark, f"{TEXT}doc_to_target: !function evil.run\n")
    done = fetch(suite, ALLOWED)
    assert done.exit_code == 0, done.output
    assert mark.exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("{generation_kwargs: {custom_generate: x/y, trust_remote_code: true}}", "trust_remote"),
        ("{unsafe_code: false}", "`unsafe_code` changes the input of"),
        ("{metadata: {tokenizer: evil}}", "`metadata` changes the input of"),
        ("{metric_list: [{metric: tasks/evil}]}", "`metric: tasks/evil`"),
    ],
)
def test_code_in_options_is_refused(tmp_path: Path, mark: Path, options: str, reason: str) -> None:
    done = fetch(write_suite(tmp_path, mark, TEXT + TARGET, options))
    assert done.exit_code == 2, done.output
    assert "options of own in the suite: `" in done.output
    assert reason in done.output


def test_harmless_tasks_need_no_permission(tmp_path: Path, mark: Path) -> None:
    options = "{repeats: 2, generation_kwargs: {max_gen_toks: 4, until: [x]}, num_fewshot: 0}"
    done = fetch(write_suite(tmp_path, mark, TEXT + TARGET, options))
    assert done.exit_code == 0, done.output
    shipped = find_suite("smoke")
    row = SuiteTask(task="smoke_sums", folder="smoke")
    assert task_fault(TaskRequest(row, shipped.folder, "")) is None


@pytest.mark.parametrize(
    "template",
    [
        ESCAPE,
        "{{ lipsum.__globals__.os.system(mark) }}",
        "{{ '{0.__class__.__mro__}'.format(mark) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ (mark|attr('__class__')).__mro__ }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**11 }}",
    ],
)
def test_templates_are_sandboxed_and_end(tmp_path: Path, mark: Path, template: str) -> None:
    started = time.monotonic()
    done = fetch(write_suite(tmp_path, mark, f'doc_to_text: "{template}"\n{TARGET}'), ALLOWED)
    assert time.monotonic() - started < 60
    assert not mark.exists()
    assert done.exit_code == 1, done.output
    assert "own: " in done.output


def test_a_harness_whose_tasks_cannot_be_checked(
    tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = TASK_FUNCTIONS._replace(names=("_gone",))
    monkeypatch.setattr("slurmllm.analysis.evaluate.harness.TASK_FUNCTIONS", names)
    done = fetch(write_suite(tmp_path, mark, TEXT + TARGET))
    assert done.exit_code == 2, done.output
    assert "own.yaml cannot be checked for code: no _gone in lm_eval.tasks" in done.output
