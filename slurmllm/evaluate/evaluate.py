"""From what is asked for to what is known: cached scores, jobs for the rest, tables."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from slurmllm.errors import StorageError, UserError
from slurmllm.evaluate.cache_key import harness_version, task_key
from slurmllm.evaluate.request import EXPORT, Asked, Candidate, HeldOut, Outcome, Settings, Work
from slurmllm.evaluate.scores import ScoreTable, of_metric, read_scores, suite_table
from slurmllm.evaluate.suites import VALIDATION, Placed, SuiteTask
from slurmllm.evaluate.validation_text import LOOP, held_out_text, settled_by
from slurmllm.records import EvaluationRecord
from slurmllm.rundir import RunDir

if TYPE_CHECKING:
    from slurmllm.evaluate.checkpoints import Target

# How a set of jobs is run: works in, what became of each out.
Runner = Callable[[Sequence[Work]], Iterator[tuple[Work, Outcome]]]

# Nothing is evaluated for so long.
_OLD_S = 30 * 24 * 3600.0


@dataclass(frozen=True)
class Question:
    """What is asked of every model.

    Attributes:
        placed: The suites, without what is left out.
        held_out: Text of `validation`, where that is asked for.
        skipped: Task → why it is left out.
        version: Of the harness, or the newest that has judged; None where there is neither.
    """

    placed: tuple[Placed, ...]
    held_out: HeldOut | None
    skipped: dict[str, str]
    version: str | None


@dataclass(frozen=True)
class Failure:
    """A task without a score.

    Attributes:
        step: Of the checkpoint.
        task: Its name.
        shots: As they are asked for.
        why: In a line.
    """

    step: int
    task: str
    shots: int | None
    why: str


@dataclass
class Answer:
    """What became of it.

    Attributes:
        evaluated: Tasks done now, over all models.
        cached: Tasks that were known.
        failed: What has no score.
        unsound: Step → what is wrong with the checkpoint's files.
    """

    evaluated: int = 0
    cached: int = 0
    failed: list[Failure] = field(default_factory=list)
    unsound: dict[int, tuple[str, ...]] = field(default_factory=dict)


def settle(
    target: Target,
    placed: Sequence[Placed],
    *,
    named: Sequence[str],
    corpus: Path | None,
) -> Question:
    """Leave out what cannot be done here; what is named one by one must be possible.

    Args:
        target: What is to be judged.
        placed: The suites.
        named: Tasks named one by one.
        corpus: Text for `validation`.

    Raises:
        UserError: a named task cannot be done.
    """
    skipped: dict[str, str] = {}
    held_out: HeldOut | None = None
    rows = [row for one in placed for row in one.suite.rows()]
    if any(row.task == VALIDATION for row in rows):
        try:
            held_out = held_out_text(target.run, corpus)
        except UserError as error:
            if VALIDATION in named or corpus is not None:
                raise
            skipped[VALIDATION] = str(error)
    elif corpus is not None:
        raise UserError("--validation-corpus is the text of --task validation; add it")
    kept = tuple(_kept(one, skipped, held_out) for one in placed)
    if all(not tuple(one.suite.rows()) for one in kept):
        reasons = "; ".join(f"{task} {why}" for task, why in skipped.items())
        raise UserError(f"nothing is left to evaluate: {reasons}")
    version = harness_version()
    if version is None:
        judged = [one.record for one in read_scores(target.store)[0] if one.record.version != LOOP]
        newest = max(judged, key=lambda record: record.evaluated_at, default=None)
        version = None if newest is None else newest.version
    return Question(kept, held_out, skipped, version)


def _kept(placed: Placed, skipped: Iterable[str], held_out: HeldOut | None) -> Placed:
    """The suite without some tasks, and with the name that `validation` has for this text."""
    groups = []
    for group in placed.suite.groups:
        rows = tuple(
            row.model_copy(update={"task": held_out.name, "name": row.title})
            if row.task == VALIDATION and held_out is not None
            else row
            for row in group.tasks
            if row.task not in skipped
        )
        if rows:
            groups.append(group.model_copy(update={"tasks": rows}))
    suite = placed.suite.model_copy(update={"groups": tuple(groups)})
    return replace(placed, suite=suite)


def asked_of(question: Question, settings: Settings) -> tuple[Asked, ...]:
    """The tasks to do, each once, under the keys of their scores."""
    found: dict[str, Asked] = {}
    for placed in question.placed:
        for row in placed.suite.rows():
            one = _asked(row, placed.folder, question, settings)
            found.setdefault(one.key, one)
    return tuple(found.values())


def _asked(row: SuiteTask, folder: Path, question: Question, settings: Settings) -> Asked:
    if question.held_out is not None and row.task == question.held_out.name:
        bare = SuiteTask(task=row.task)
        parts = settled_by(question.held_out, settings.tokenizer)
        return Asked(bare, folder, task_key(bare, folder, settings.limit, LOOP, parts))
    version = question.version or ""
    return Asked(row, folder, task_key(row, folder, settings.limit, version))


def permitted(asked: Sequence[Asked], settings: Settings) -> tuple[Asked, ...]:
    """Of the tasks, those that may be done: without leave, none that runs a model's programs."""
    return tuple(one for one in asked if settings.allow_code or not one.task.runs_code)


def works(
    target: Target,
    candidates: Sequence[Candidate],
    question: Question,
    settings: Settings,
    *,
    again: bool,
) -> tuple[list[Work], dict[str, str]]:
    """What is not known yet.

    Returns:
        A job a model, and task → why it is left out for what may not be done.
    """
    asked = asked_of(question, settings)
    may = permitted(asked, settings)
    jobs: list[Work] = []
    left_out: dict[str, str] = {}
    for candidate in candidates:
        whole = Work(target.store.path, candidate, asked, question.held_out, settings)
        missing = [one for one in asked if again or not is_known(whole, one)]
        left_out |= {
            one.task.task: "runs programs that the model writes; allow it: --allow-code-execution"
            for one in missing
            if one not in may
        }
        if todo := tuple(one for one in missing if one in may):
            jobs.append(replace(whole, asked=todo))
    return jobs, left_out


def count_known(
    target: Target,
    candidates: Sequence[Candidate],
    question: Question,
    settings: Settings,
    todo: Sequence[Work],
) -> int:
    """Tasks that are known and are not done again, over all models."""
    asked = asked_of(question, settings)
    again = {work.file(one) for work in todo for one in work.asked}
    wholes = [
        Work(target.store.path, one, asked, question.held_out, settings) for one in candidates
    ]
    return sum(
        is_known(work, one) and work.file(one) not in again for work in wholes for one in asked
    )


def is_known(work: Work, asked: Asked) -> bool:
    """Whether a task's scores are kept and can be read."""
    try:
        EvaluationRecord.load(work.file(asked))
    except StorageError:
        return False
    return True


def run(jobs: Sequence[Work], runner: Runner, on_end: Callable[[Work, Outcome], None]) -> Answer:
    """Do what is not known.

    Args:
        jobs: From `works`.
        runner: Runs them.
        on_end: Told what became of each.
    """
    answer = Answer()
    try:
        _run(jobs, runner, on_end, answer)
    finally:
        for work in jobs:
            _remove_exports(RunDir(work.store).evaluations, work.settings.word)
    return answer


def _remove_exports(folder: Path, word: str) -> None:
    """Remove what jobs of this call, or of one long ago, left when they were killed."""
    for one in folder.glob(f"{EXPORT}*"):
        with contextlib.suppress(OSError):
            old = time.time() - one.stat().st_mtime > _OLD_S
            if old or one.name.startswith(f"{EXPORT}{word}-"):
                shutil.rmtree(one, ignore_errors=True)


def _run(
    jobs: Sequence[Work],
    runner: Runner,
    on_end: Callable[[Work, Outcome], None],
    answer: Answer,
) -> None:
    for work, outcome in runner(jobs):
        on_end(work, outcome)
        step = work.candidate.step
        failed = dict(outcome.failed)
        if outcome.unsound:
            answer.unsound[step] = outcome.unsound
            continue
        if outcome.lost is not None:
            failed = {one.key: outcome.lost for one in work.asked if not is_known(work, one)}
        answer.failed += [
            Failure(step, one.task.task, one.task.shots, failed[one.key])
            for one in work.asked
            if one.key in failed
        ]
        answer.evaluated += len(work.asked) - len(failed)


def without_figure(
    target: Target, candidates: Sequence[Candidate], question: Question, settings: Settings
) -> list[Failure]:
    """The rows whose metric a task's scores do not have."""
    found = []
    for candidate in candidates:
        for placed in question.placed:
            for row in placed.suite.rows():
                key = _asked(row, placed.folder, question, settings).key
                path = target.store.evaluation(candidate.checksum, key)
                if row.metric is None or not path.is_file():
                    continue
                scores = EvaluationRecord.load(path).scores
                if of_metric(row.metric, scores) is None:
                    why = f"no finite figure named {row.metric!r}; it gave {', '.join(scores)}"
                    found.append(Failure(candidate.step, row.task, row.shots, why))
    return found


def tables(
    target: Target, candidates: Sequence[Candidate], question: Question, settings: Settings
) -> tuple[list[ScoreTable], list[str]]:
    """The tables of the suites, and a line for each file that could not be used.

    Scores of another text under the same name are left out, and those of other weights that a
    candidate's step once had.
    """
    found, warnings = read_scores(target.store)
    checksums = {one.step: one.checksum for one in candidates}
    found = [
        one
        for one in found
        if checksums.get(one.record.step, one.record.checkpoint) == one.record.checkpoint
    ]
    if question.held_out is not None:
        row = SuiteTask(task=question.held_out.name)
        limits = {None if one.record.limit is None else int(one.record.limit) for one in found}
        keys = {
            _asked(row, Path(), question, replace(settings, limit=limit)).key for limit in limits
        }
        found = [one for one in found if one.record.task != row.task or one.key in keys]
    return [suite_table(one, found, settings.limit) for one in question.placed], warnings


def of_steps(table: ScoreTable, steps: Sequence[int]) -> ScoreTable:
    """A table with some steps alone."""
    rows = [
        replace(
            row,
            scores={step: value for step, value in row.scores.items() if step in steps},
            errors={step: value for step, value in row.errors.items() if step in steps},
        )
        for row in table.rows
    ]
    kept = tuple(step for step in table.steps if step in steps)
    return replace(table, rows=tuple(row for row in rows if row.scores), steps=kept)
