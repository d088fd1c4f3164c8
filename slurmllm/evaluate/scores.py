"""What a run's checkpoints scored, by suite, beside published figures; without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from slurmllm.errors import SlurmllmError
from slurmllm.rundir import RunDir

if TYPE_CHECKING:
    from slurmllm.evaluate.suites import Placed, SuiteTask
    from slurmllm.records import EvaluationRecord


@dataclass(frozen=True)
class ScoreRow:
    """One line of a suite's table.

    Attributes:
        group: Heading that it stands under, such as `common reasoning`.
        name: Of the task, or `average` for the mean of its group's tasks.
        shots: Examples before each question.
        metric: As the harness names it.
        scores: Checkpoint's step → value; steps without one are absent.
        errors: Checkpoint's step → standard error, where known.
        references: Name of a published model → its figure, on the same scale.
    """

    group: str
    name: str
    shots: int | None
    metric: str
    scores: Mapping[int, float]
    errors: Mapping[int, float]
    references: Mapping[str, float]


@dataclass(frozen=True)
class ScoreTable:
    """What a run scored in a suite.

    Attributes:
        suite: Its name.
        rows: In the suite's order.
        steps: Of the checkpoints that have a score, ascending.
        tokens: Checkpoint's step → tokens trained on.
        sources: Name of a published model → where its figures were published.
    """

    suite: str
    rows: tuple[ScoreRow, ...]
    steps: tuple[int, ...]
    tokens: Mapping[int, int]
    sources: Mapping[str, str]


@dataclass(frozen=True)
class Found:
    """A score on disk.

    Attributes:
        key: The task's set-up (`keys.task_key`).
        record: What was scored.
    """

    key: str
    record: EvaluationRecord


def score_tables(run: RunDir) -> tuple[list[ScoreTable], list[str]]:
    """The tables of all suites in which a run has a score, shipped ones first.

    Returns:
        The tables, and a line for each file that could not be used.
    """
    from slurmllm.evaluate.suites import (
        Placed,
        find_suite,
        read_suite,
        suite_names,
    )

    found, warnings = read_scores(run)
    if not found:
        return [], warnings
    placed = [find_suite(name) for name in suite_names()]
    for path in run.evaluation_suites():
        try:
            placed.append(Placed(read_suite(path), path.parent))
        except SlurmllmError as error:
            warnings.append(f"{path} is passed over: {error}")
    tables = [suite_table(one, found) for one in placed]
    # Loss on held-out text is part of every suite: alone, it makes no table but the first.
    scored = [table for table in tables if table.steps]
    own = [table for table in scored if any(row.group != HELD_OUT for row in table.rows)]
    return own or scored[:1], warnings


# The group of the rows that our own loop makes, in all suites that ship.
HELD_OUT = "held-out text"


def read_scores(run: RunDir) -> tuple[list[Found], list[str]]:
    """All scores of a run, and a line for each file that is none."""
    from slurmllm.records import EvaluationRecord

    found, warnings = [], []
    for path in run.evaluation_files():
        try:
            found.append(Found(path.stem, EvaluationRecord.load(path)))
        except SlurmllmError as error:
            warnings.append(f"{path} is passed over: {error}")
    return found, warnings


def suite_table(placed: Placed, found: Sequence[Found], limit: int | None = None) -> ScoreTable:
    """The table of a suite; rows without a score are left out.

    Args:
        placed: The suite.
        found: Scores of a run.
        limit: Questions at most, where scores of so many are wanted; None: of all of them where
            there are any, else of the most, and the row's name says so.
    """
    rows: list[ScoreRow] = []
    steps: dict[int, int] = {}
    figures = {reference.model: reference.figures for reference in placed.suite.references}
    for group in placed.suite.groups:
        made: list[ScoreRow] = []
        for task in group.tasks:
            scores = _newest(_of_limit(_matching(placed.folder, task, found), limit))
            steps |= {record.step: record.tokens for record in scores}
            made += _rows(group.name, task, scores)
        published = {model: of.get(group.name, {}) for model, of in figures.items()}
        made = [replace(row, references=_of_row(published, _bare(row.name))) for row in made]
        rows += made
        if group.average and len(group.tasks) > 1:
            rows += _average(group.name, made, len(group.tasks), published)
    scored = tuple(sorted(steps))
    sources = {r.model: r.source for r in placed.suite.references}
    return ScoreTable(placed.suite.name, tuple(rows), scored, steps, sources)


def _matching(folder: Path, task: SuiteTask, found: Iterable[Found]) -> list[EvaluationRecord]:
    """The scores of a task as the suite sets it up, by whichever version of the harness."""
    from slurmllm.evaluate.cache_key import task_key
    from slurmllm.evaluate.suites import VALIDATION

    return [
        one.record
        for one in found
        if one.record.task == task.task
        and (
            task.task.partition(":")[0] == VALIDATION
            or one.key == task_key(task, folder, _whole(one.record.limit), one.record.version)
        )
    ]


def _whole(limit: float | None) -> int | None:
    return None if limit is None else int(limit)


def _of_limit(records: Sequence[EvaluationRecord], limit: int | None) -> list[EvaluationRecord]:
    if limit is not None:
        return [record for record in records if record.limit == limit]
    limits = {record.limit for record in records}
    best = None if None in limits or not limits else max(one for one in limits if one is not None)
    return [record for record in records if record.limit == best]


def _newest(records: Sequence[EvaluationRecord]) -> list[EvaluationRecord]:
    """One of each step: the one judged last."""
    by_time = sorted(records, key=lambda record: record.evaluated_at)
    return sorted({record.step: record for record in by_time}.values(), key=lambda r: r.step)


def _rows(group: str, task: SuiteTask, records: Sequence[EvaluationRecord]) -> list[ScoreRow]:
    if not records:
        return []
    limit = records[-1].limit
    name = task.title if limit is None else f"{task.title} (first {limit:g})"
    # The harness's word: some tasks allow no examples, whatever the suite asks for.
    shots = records[-1].shots if records[-1].shots is not None else task.shots
    metrics = (
        [task.metric] if task.metric else list(dict.fromkeys(m for r in records for m in r.scores))
    )
    rows = []
    for metric in metrics:
        named = {
            record.step: key for record in records if (key := of_metric(metric, record.scores))
        }
        scores = {r.step: r.scores[named[r.step]] for r in records if r.step in named}
        errors = {
            r.step: r.errors[named[r.step]]
            for r in records
            if r.step in named and named[r.step] in r.errors
        }
        if scores:
            rows.append(ScoreRow(group, name, shots, metric, scores, errors, {}))
    return rows


def of_metric(metric: str, scores: Mapping[str, float]) -> str | None:
    """The harness's name for a metric: with its filter, the first one where none is given."""
    if metric in scores:
        return metric
    return next((name for name in scores if name.partition(",")[0] == metric), None)


def _bare(name: str) -> str:
    return name.partition(" (first ")[0]


def _of_row(published: Mapping[str, Mapping[str, float]], row: str) -> dict[str, float]:
    return {model: figures[row] for model, figures in published.items() if row in figures}


def _average(
    group: str, rows: Sequence[ScoreRow], tasks: int, published: Mapping[str, Mapping[str, float]]
) -> list[ScoreRow]:
    """The mean of a group's rows, at the steps and for the models that have all of them."""
    from slurmllm.evaluate.suites import AVERAGE

    if len(rows) != tasks:
        return []
    steps = set.intersection(*(set(row.scores) for row in rows))
    scores = {step: sum(row.scores[step] for row in rows) / tasks for step in sorted(steps)}
    # Standard error of a mean of independent figures.
    errors = {
        step: sum(row.errors[step] ** 2 for row in rows) ** 0.5 / tasks
        for step in sorted(steps)
        if all(step in row.errors for row in rows)
    }
    references = {}
    for model, figures in published.items():
        if AVERAGE in figures:
            references[model] = figures[AVERAGE]
        elif all(model in row.references for row in rows):
            references[model] = sum(row.references[model] for row in rows) / tasks
    if not scores:
        return []
    limited = any("(first " in row.name for row in rows)
    name = AVERAGE + (" (first questions)" if limited else "")
    return [ScoreRow(group, name, None, "", scores, errors, references)]
