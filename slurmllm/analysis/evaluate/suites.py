"""Suites: tasks of an evaluation, with published scores; the data of the shipped tasks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator, model_validator

from slurmllm.core.config.operation import Section
from slurmllm.core.config.profiles import available, find_yaml
from slurmllm.core.config.resolve import recipes_dir
from slurmllm.core.config.yaml_source import read_yaml, write_yaml
from slurmllm.core.errors import ConfigError, UserError
from slurmllm.core.format import Json, format_plural
from slurmllm.core.run.rundir import RunDir, write_atomic

# Not a task of the harness: our own loop over held-out text.
VALIDATION = "validation"
AVERAGE = "average"
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_Name = Annotated[str, Field(pattern=_NAME)]
_Text = Annotated[str, Field(min_length=1)]


class SuiteTask(Section):
    """A row of a suite's table."""

    # Task or group of tasks, as the harness names it; `validation` is the loss on held-out text.
    task: _Text
    name: str = ""  # Of the row; default: the task's.
    # Examples before each question; null leaves it to the task.
    shots: Annotated[int, Field(ge=0)] | None = None
    # As the harness names it, with or without its filter (`exact_match` or
    # `exact_match,get-answer`); null gives every metric a row.
    metric: str | None = None
    # Other settings of the task, such as generation_kwargs or repeats.
    options: Json = Field(default_factory=dict)
    # Folder of the task's own YAML file, relative to the suite's; null: the harness ships the task.
    folder: str | None = None
    runs_code: bool = False  # Whether it runs the programs that the model writes.

    @property
    def title(self) -> str:
        return self.name or self.task


class SuiteGroup(Section):
    """Rows under one heading."""

    name: _Text  # Heading.
    # Its rows, in order.
    tasks: Annotated[tuple[SuiteTask, ...], Field(strict=False, min_length=1)]
    average: bool = True  # Whether the mean of its rows has a row.


class Reference(Section):
    """A published model."""

    model: _Text  # Name of the column.
    source: _Text  # Where the figures were published.
    # Group → row (or `average`) → figure, on the metric's own scale.
    figures: dict[str, dict[str, float]]
    # The same of the figures' standard errors, if published.
    errors: dict[str, dict[str, float]] = Field(default_factory=dict)


class Suite(Section):
    """A suite of tasks."""

    name: _Name  # Of the suite.
    description: str = ""  # One sentence.
    # Its groups, in order.
    groups: Annotated[tuple[SuiteGroup, ...], Field(strict=False, min_length=1)]
    # Published models, shown next to the run.
    references: Annotated[tuple[Reference, ...], Field(strict=False)] = ()

    @field_validator("groups")
    @classmethod
    def _rows_differ(cls, groups: tuple[SuiteGroup, ...]) -> tuple[SuiteGroup, ...]:
        names = Counter(f"{group.name} / {row.title}" for group in groups for row in group.tasks)
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise ValueError(f"rows of one name: {', '.join(twice)}; give them a `name` each")
        return groups

    @model_validator(mode="after")
    def _references_fit(self) -> Suite:
        rows = {g.name: {AVERAGE, *(t.title for t in g.tasks)} for g in self.groups}
        unknown = [
            f"{reference.model}: {group} / {row}"
            for reference in self.references
            for table in (reference.figures, reference.errors)
            for group, figures in table.items()
            for row in figures
            if row not in rows.get(group, set())
        ]
        if unknown:
            raise ValueError(f"references to rows that are not there: {', '.join(unknown)}")
        return self

    def rows(self) -> Iterator[SuiteTask]:
        return (task for group in self.groups for task in group.tasks)

    def changed(self, change: Callable[[SuiteTask], SuiteTask | None]) -> Suite:
        """Return the suite with other rows: what `change` makes of each, None to leave it out."""
        groups = []
        for group in self.groups:
            if rows := tuple(filter(None, map(change, group.tasks))):
                groups.append(group.model_copy(update={"tasks": rows}))
        return self.model_copy(update={"groups": tuple(groups)})

    def only(self, tasks: Sequence[str]) -> Suite:
        """Return the suite with only some tasks; raise UserError if one is not in it."""
        names = list(dict.fromkeys(row.task for row in self.rows()))
        for task in tasks:
            if task not in names:
                raise UserError(
                    f"--task {task} is not in suite {self.name}; it has {', '.join(names)}; omit "
                    "--suite for other tasks of the harness"
                )
        return self.changed(lambda row: row if row.task in tasks else None)

    def with_shots(self, shots: int) -> Suite:
        """Return the suite with another number of examples, which becomes part of its name."""
        suite = self.changed(
            lambda row: row if row.task == VALIDATION else row.model_copy(update={"shots": shots})
        )
        # Published figures are of the suite's own number of examples.
        return suite.model_copy(update={"name": f"{self.name}-{shots}shot", "references": ()})


@dataclass(frozen=True)
class LocatedSuite:
    """A suite and its folder."""

    suite: Suite
    folder: Path  # folders of tasks are relative to it
    shipped: bool = False  # whether it comes with slurmllm, unchanged


def suites_dir() -> Path:
    """Return the folder of the suites that ship with slurmllm, one YAML file each."""
    return recipes_dir().parent / "evaluation"


def suite_names() -> list[str]:
    return available(suites_dir())


def find_suite(name: str) -> LocatedSuite:
    """Return a suite by name or YAML file; raise ConfigError without one, and as `read_suite`."""
    path = find_yaml(name, suites_dir(), "suite", "choose an existing one").absolute()
    return LocatedSuite(read_suite(path), path.parent, shipped=name in suite_names())


def read_suite(path: Path) -> Suite:
    """Read a suite's file; raise ConfigError with all its faults, by dotted path."""
    values, _ = read_yaml(path)
    try:
        return Suite.model_validate(values)
    except ValidationError as error:
        items = error.errors()
    locations = [item["loc"] for item in items]
    faults = []
    for item in items:
        # pydantic also reports a list as empty if all its elements are invalid.
        if any(other != item["loc"] == other[: len(item["loc"])] for other in locations):
            continue
        field = ".".join(map(str, item["loc"])) or "the suite"
        rule = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        if item["type"] in ("model_type", "model_attributes_type"):
            rule = "must be fields and values, such as {task: piqa}"
        value_note = ""
        if isinstance(item["input"], str | int | float):
            value_note = f" (is {item['input']!r:.60})"
        rule = rule.replace("a valid tuple", "a list").replace("Tuple", "the list")
        faults.append(f"{field}: {rule}{value_note}")
    raise ConfigError(f"{path}: {format_plural(len(faults), 'error')}", faults)


def suite_of_tasks(tasks: Sequence[str], shots: int | None) -> Suite:
    rows = tuple(
        SuiteTask(task=task, shots=None if task == VALIDATION else shots)
        for task in dict.fromkeys(tasks)
    )
    group = SuiteGroup(name="tasks", tasks=rows, average=False)
    return Suite(name="tasks", description="Tasks named one by one.", groups=(group,))


def save_suite(run: RunDir, located: LocatedSuite, *, complete: bool = True) -> None:
    """Save a suite that is not shipped, for `report` and later tables.

    Tasks of --task are added to those of earlier calls. A suite that is not `complete` does not
    replace an existing file.
    """
    suite = located.suite
    path = run.evaluation_suite(located.suite.name)
    if not complete and path.is_file():
        return
    if suite.name == "tasks" and path.is_file():
        new = {(row.task, row.shots) for row in suite.rows()}
        saved = (row for row in read_suite(path).rows() if (row.task, row.shots) not in new)
        rows = [*saved, *suite.rows()]
        tasks = [row.task for row in rows]
        # Rows of one task with several numbers of shots have the shots in their names.
        distinct = tuple(
            row.model_copy(update={"name": f"{row.task} {row.shots}-shot"})
            if tasks.count(row.task) > 1 and row.shots is not None
            else row
            for row in rows
        )
        group = suite.groups[0].model_copy(update={"tasks": distinct})
        suite = suite.model_copy(update={"groups": (group,)})
    values = suite.model_dump(mode="json")
    for group in values["groups"]:
        for row in group["tasks"]:
            # The saved file is in another folder, to which a relative path would not apply.
            row["folder"] = row["folder"] and str(located.folder / row["folder"])
    write_atomic(path, write_yaml(values))


def logiqa_questions(**files: Any) -> Json:
    """Return the splits of LogiQA (arXiv 2007.08124), for a task's `custom_dataset`.

    A question is a block of lines: the letter of the answer, the passage, the question and four
    options, each with its letter. The columns, and the blanks inserted after full stops, are those
    of the data set that the harness's task was written for. `files` are URLs by split, downloaded
    once into the cache (HF_HOME), and arguments of the harness, which are ignored.
    """
    from datasets import Dataset, DownloadConfig, DownloadManager

    def spaced(sentence: str) -> str:
        return sentence.replace(".", ". ").strip()

    def rows(path: str) -> Iterator[Json]:
        for block in Path(path).read_text("utf-8").strip().split("\n\n"):
            label, passage, question, *options = block.strip().split("\n")
            yield {
                "label": label.strip(),
                "context": spaced(passage),
                "question": spaced(question),
                "options": [spaced(option[2:]) for option in options],
            }

    urls = {split: url for split, url in files.items() if isinstance(url, str)}
    # use_etag=False: no request for a newer version, because a node may have no network.
    manager = DownloadManager(download_config=DownloadConfig(use_etag=False))
    paths: dict[str, str] = manager.download(urls)
    return {split: Dataset.from_list(list(rows(path))) for split, path in paths.items()}


def shipped_lines(**files: Any) -> Json:
    """Return the splits of a shipped task, for its YAML's `custom_dataset`.

    `files` are .jsonl files by split, relative to the suites' folder, and ignored arguments.
    """
    from datasets import Dataset

    folder = suites_dir()
    return {
        split: Dataset.from_list(
            [json.loads(line) for line in (folder / name).read_text("utf-8").splitlines()]
        )
        for split, name in files.items()
        if isinstance(name, str) and name.endswith(".jsonl")
    }
