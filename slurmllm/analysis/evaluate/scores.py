"""Tables of the scores of a run's checkpoints by suite, with published scores; no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurmllm.analysis.evaluate.request import task_key
from slurmllm.analysis.evaluate.suites import (
    AVERAGE,
    VALIDATION,
    LocatedSuite,
    SuiteTask,
    find_suite,
    read_suite,
    suite_names,
)
from slurmllm.core.errors import SlurmllmError
from slurmllm.core.format import ABSENT
from slurmllm.core.run.artifact_records import EvaluationRecord
from slurmllm.core.run.rundir import RunDir


@dataclass(frozen=True)
class ScoreRow:
    """A row of a suite's table."""

    group: str  # heading of its group, such as `common reasoning`
    name: str  # of the task, or `average` for the mean of its group's tasks
    shots: int | None
    metric: str
    scores: Mapping[int, float]  # checkpoint's step → value, for steps that have one
    errors: Mapping[int, float]  # checkpoint's step → one standard error, if known
    references: Mapping[str, float]  # name of a published model → its score, on the same scale
    # Name of a published model → standard error of its score, if published.
    reference_errors: Mapping[str, float] = field(default_factory=dict)

    def difference(self, model: str, step: int) -> float | None:
        """Return score - published score in standard errors of the two, if ours has one."""
        if model not in self.references or step not in self.scores or not self.errors.get(step):
            return None
        error = math.hypot(self.errors[step], self.reference_errors.get(model, 0.0))
        return (self.scores[step] - self.references[model]) / error

    def published(self, model: str, steps: Sequence[int], number: Callable[[float], str]) -> str:
        """Return a published score with its error and the newest step's difference from it."""
        if model not in self.references:
            return ABSENT
        error = self.reference_errors.get(model)
        figure = with_error(number(self.references[model]), error)
        difference = self.difference(model, steps[-1]) if steps else None
        return figure if difference is None else f"{figure} ({difference:+.1f} SE)"


def with_error(figure: str, error: float | None) -> str:
    """Return `0.39 ± 0.0053`."""
    return figure if error is None else f"{figure} ± {error:.2g}"


@dataclass(frozen=True)
class ScoreTable:
    """The scores of a run in a suite."""

    suite: str
    rows: Sequence[ScoreRow]
    steps: Sequence[int]  # of the checkpoints that have a score, ascending
    tokens: Mapping[int, int]  # checkpoint's step → tokens trained on
    sources: Mapping[str, str]  # name of a published model → where its figures were published


# The scores of files, each with the cache key of its task (`request.task_key`)
Stored = Sequence[tuple[str, EvaluationRecord]]


def score_tables(run: RunDir) -> tuple[list[ScoreTable], list[str]]:
    """Return the tables of all suites with a score, shipped ones first; and warnings."""
    stored, warnings = read_scores(run)
    if not stored:
        return [], warnings
    suites = [find_suite(name) for name in suite_names()]
    for path in run.evaluation_suites():
        try:
            suites.append(LocatedSuite(read_suite(path), path.parent))
        except SlurmllmError as error:
            warnings.append(f"ignoring {path}: {error}")
    tables = [suite_table(suite, stored) for suite in suites]
    # Loss on held-out text is part of every suite: shown in the first one if nothing else is.
    scored = [table for table in tables if table.steps]
    tasks = [table for table in scored if any(row.group != HELD_OUT for row in table.rows)]
    return tasks or scored[:1], warnings


HELD_OUT = "held-out text"  # the group of `validation` in all shipped suites


def read_scores(run: RunDir) -> tuple[Stored, list[str]]:
    """Return all scores of a run, and a warning for each unreadable file."""
    stored = []
    warnings = []
    for path in run.evaluation_files():
        try:
            stored.append((path.stem, EvaluationRecord.load(path)))
        except SlurmllmError as error:
            warnings.append(f"ignoring {path}: {error}")
    return stored, warnings


def suite_table(located: LocatedSuite, stored: Stored, limit: int | None = None) -> ScoreTable:
    """Return the table of a suite, without rows that have no score.

    With `limit`, only scores of so many questions; else the scores of all questions, or where there
    are none those of the most questions, whose number the row's name has.
    """
    rows: list[ScoreRow] = []
    tokens: dict[int, int] = {}
    suite = located.suite
    for group in suite.groups:
        published = {model.model: model.figures.get(group.name, {}) for model in suite.references}
        errors = {model.model: model.errors.get(group.name, {}) for model in suite.references}
        group_rows = []
        for task in group.tasks:
            matching = _matching(located.folder, task, stored)
            # Scores of different numbers of questions are not comparable: only one is shown.
            limits = [r.limit or math.inf for r in matching]
            chosen = limit or max(limits, default=None)
            matching = [r for r, n in zip(matching, limits, strict=True) if n == chosen]
            # One record of each step: the newest.
            matching.sort(key=lambda record: (record.step, record.evaluated_at))
            newest = {record.step: record for record in matching}
            tokens |= {record.step: record.tokens for record in newest.values()}
            references = _of(task.title, published)
            reference_errors = _of(task.title, errors)
            for row in _rows(group.name, task, list(newest.values())):
                row = replace(row, references=references, reference_errors=reference_errors)
                group_rows.append(row)
        rows += group_rows
        # A mean of fewer tasks is not comparable with the published one.
        if group.average and len(group_rows) == len(group.tasks) > 1:
            rows += _average(group.name, group_rows, published, _of(AVERAGE, errors))
    sources = {model.model: model.source for model in suite.references}
    return ScoreTable(suite.name, rows, sorted(tokens), tokens, sources)


def _of(row: str, figures: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return model → its figure of a row, if it has one."""
    return {model: of_model[row] for model, of_model in figures.items() if row in of_model}


def _matching(folder: Path, task: SuiteTask, stored: Stored) -> list[EvaluationRecord]:
    """Return the scores of a task as the suite defines it, of any version of the harness."""
    records = [(key, record) for key, record in stored if record.task == task.task]
    # The key of `validation` depends on its text, which is not read here.
    if task.task.partition(":")[0] == VALIDATION:
        return [record for _, record in records]
    matching = []
    for key, record in records:
        # The record has a float, whose digest would differ.
        limit = None if record.limit is None else int(record.limit)
        if key == task_key(task, folder, limit, record.version):
            matching.append(record)
    return matching


def _rows(group: str, task: SuiteTask, records: Sequence[EvaluationRecord]) -> Iterator[ScoreRow]:
    if not records:
        return
    last = records[-1]
    name = task.title if last.limit is None else f"{task.title} (first {last.limit:g})"
    # As the harness reports them: some tasks allow no examples, whatever the suite sets.
    shots = task.shots if last.shots is None else last.shots
    metrics = (
        [task.metric] if task.metric else list(dict.fromkeys(m for r in records for m in r.scores))
    )
    for metric in metrics:
        named = [(r, key) for r in records if (key := match_metric(metric, r.scores))]
        scores = {record.step: record.scores[key] for record, key in named}
        errors = {record.step: record.errors[key] for record, key in named if key in record.errors}
        if scores:
            yield ScoreRow(group, name, shots, metric, scores, errors, {})


def match_metric(metric: str, scores: Mapping[str, float]) -> str | None:
    """Return the harness's name of a metric, with its filter: the first one by default."""
    if metric in scores:
        return metric
    return next((name for name in scores if name.partition(",")[0] == metric), None)


def _average(
    group: str,
    rows: Sequence[ScoreRow],
    published: Mapping[str, Mapping[str, float]],
    reference_errors: Mapping[str, float],
) -> Iterator[ScoreRow]:
    """Yield the mean of a group's rows, for steps and published models that have all of them."""
    tasks = len(rows)
    steps = sorted(set.intersection(*(set(row.scores) for row in rows)))
    if not steps:
        return
    scores = {step: sum(row.scores[step] for row in rows) / tasks for step in steps}
    # Standard error of a mean of independent scores.
    errors = {
        step: sum(row.errors[step] ** 2 for row in rows) ** 0.5 / tasks
        for step in steps
        if all(step in row.errors for row in rows)
    }
    references = {
        model: sum(row.references[model] for row in rows) / tasks
        for model in published
        if all(model in row.references for row in rows)
    } | _of(AVERAGE, published)
    limited = any("(first " in row.name for row in rows)
    name = AVERAGE + (" (first questions)" if limited else "")
    yield ScoreRow(group, name, None, "", scores, errors, references, reference_errors)
