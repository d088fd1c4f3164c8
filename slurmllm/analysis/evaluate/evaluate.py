"""Plan evaluations, run jobs for scores that are not cached, and build the result tables.

A job scores one checkpoint: a process of this machine, or a task of a Slurm array.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from slurmllm.analysis.evaluate.request import (
    EXPORT_PREFIX,
    EvaluationSettings,
    EvaluationTarget,
    JobOutcome,
    JobRequest,
    ModelRef,
    TaskRequest,
    TaskScores,
    ValidationText,
    harness_version,
    task_key,
)
from slurmllm.analysis.evaluate.scores import ScoreTable, match_metric, read_scores, suite_table
from slurmllm.analysis.evaluate.suites import VALIDATION, LocatedSuite, SuiteTask
from slurmllm.analysis.evaluate.validation_text import LOOP, cache_key_parts, validation_text
from slurmllm.core.errors import DataError, SlurmllmError, StorageError, UserError
from slurmllm.core.format import Texts
from slurmllm.core.run.artifact_records import EvaluationRecord
from slurmllm.core.run.rundir import RunDir, storage_errors
from slurmllm.core.slurm.arrays import ArrayRequest, map_calls
from slurmllm.core.slurm.processes import FailedCall
from slurmllm.train.checkpoint.catalogue import read_entry, verify_entry

# Longer than any evaluation: an older temporary folder belongs to no active job.
_STALE_EXPORT_S = 30 * 24 * 3600.0


@dataclass(frozen=True)
class EvaluationPlan:
    """The tasks for every model."""

    target: EvaluationTarget
    suites: Sequence[LocatedSuite]  # without the tasks that are skipped
    validation: ValidationText | None  # text of `validation`, if requested
    skipped: dict[str, str]  # task → reason
    harness: str | None  # its version; if not installed, that of the newest cached score, or None
    settings: EvaluationSettings

    def request(self, row: SuiteTask, folder: Path) -> TaskRequest:
        """Return the request of a suite's row, with the cache key of its scores."""
        version = self.harness or ""
        parts = None
        if self.validation and row.task == self.validation.name:
            row = SuiteTask(task=row.task)
            version = LOOP
            parts = cache_key_parts(self.validation, self.settings.tokenizer)
        key = task_key(row, folder, self.settings.limit, version, parts)
        return TaskRequest(row, folder, key, self.settings.allow_code)

    def tasks(self) -> list[TaskRequest]:
        """Return all tasks, each once."""
        requests = (self.request(row, s.folder) for s in self.suites for row in s.suite.rows())
        # A row of another metric has the same key.
        return list({task.key: task for task in requests}.values())

    def permitted(self) -> list[TaskRequest]:
        """Return the tasks, without those that run the model's programs unless `allow_code`."""
        allow_code = self.settings.allow_code
        return [task for task in self.tasks() if allow_code or not task.task.runs_code]

    def is_cached(self, model: ModelRef, force: bool) -> bool:
        """Return whether a model has all scores that may be computed; never with `force`."""
        job = self.job(model, self.permitted())
        return not force and all(is_cached(job, task) for task in job.tasks)

    def job(self, model: ModelRef, tasks: Sequence[TaskRequest]) -> JobRequest:
        return JobRequest(self.target.store.path, model, tasks, self.validation, self.settings)


class TaskFailure(NamedTuple):
    """A task without a score, and the reason on one line."""

    step: int
    task: str
    shots: int | None
    error: str


@dataclass
class EvaluationResult:
    """The result of a call."""

    evaluated: int = 0  # number of new scores, over all models
    cached: int = 0  # likewise, of cached ones
    failed: list[TaskFailure] = field(default_factory=list)
    # Step → faults of the checkpoint's files.
    damaged: dict[int, Texts] = field(default_factory=dict)


def plan_evaluation(
    target: EvaluationTarget,
    suites: Sequence[LocatedSuite],
    settings: EvaluationSettings,
    *,
    named: Sequence[str],
    corpus: Path | None,
) -> EvaluationPlan:
    """Resolve the text of `validation`, or skip it if there is none and it was not named.

    `named` are the tasks of --task, `corpus` is the file of --validation-corpus.
    """
    skipped = {}
    validation: ValidationText | None = None
    if any(row.task == VALIDATION for located in suites for row in located.suite.rows()):
        try:
            validation = validation_text(target.run, corpus)
        except UserError as error:
            if VALIDATION in named or corpus:
                raise
            skipped[VALIDATION] = str(error)
    elif corpus:
        raise UserError("--validation-corpus requires --task validation")

    def resolve(row: SuiteTask) -> SuiteTask | None:
        """Return the row, that of `validation` named by its text; None if it is skipped."""
        if row.task == VALIDATION and validation:
            return row.model_copy(update={"task": validation.name, "name": row.title})
        return None if row.task in skipped else row

    remaining = [replace(s, suite=s.suite.changed(resolve)) for s in suites]
    if not any(located.suite.groups for located in remaining):
        reasons = "; ".join(f"{task} {why}" for task, why in skipped.items())
        raise UserError(f"no task is left to evaluate: {reasons}")
    version = harness_version()
    if version is None:
        # Cached scores can be shown without the harness, but their cache keys contain the harness
        # version that computed them.
        stored, _ = read_scores(target.store)
        of_harness = [record for _, record in stored if record.version != LOOP]
        newest = max(of_harness, key=lambda record: record.evaluated_at, default=None)
        version = newest.version if newest else None
    return EvaluationPlan(target, remaining, validation, skipped, version, settings)


def plan_jobs(
    models: Sequence[ModelRef], plan: EvaluationPlan, *, force: bool
) -> tuple[list[JobRequest], dict[str, str], int]:
    """Return a job for each model with scores that are not cached; with `force`, for all.

    Returns also task → reason for those that may not run, and the number of cached scores.
    """
    tasks = plan.tasks()
    permitted = plan.permitted()
    jobs = []
    forbidden: dict[str, str] = {}
    cached = 0
    for model in models:
        job = plan.job(model, tasks)
        missing = [task for task in tasks if force or not is_cached(job, task)]
        forbidden |= {
            task.task.task: "executes model-written code; pass --allow-code-execution to allow it"
            for task in missing
            if task not in permitted
        }
        if todo := [task for task in missing if task in permitted]:
            jobs.append(replace(job, tasks=todo))
        cached += sum(is_cached(job, task) and task not in todo for task in tasks)
    return jobs, forbidden, cached


def is_cached(job: JobRequest, task: TaskRequest) -> bool:
    with contextlib.suppress(StorageError):
        EvaluationRecord.load(job.score_file(task))
        return True
    return False


def run_jobs(
    jobs: Sequence[JobRequest],
    *,
    at_once: int,
    logs: Path,
    on_poll: Callable[[], None],
    echo: Callable[[str], None],
    array: ArrayRequest | None = None,
) -> EvaluationResult:
    """Run jobs in processes of this machine, or in a Slurm array.

    `on_poll` is called regularly meanwhile, `echo` with a line for each failure.
    """
    result = EvaluationResult()
    calls = map_calls(
        run_job,
        [(job,) for job in jobs],
        names=[f"step_{job.model.step:08d}" for job in jobs],
        logs=logs,
        at_once=at_once,
        on_poll=on_poll,
        array=array,
    )
    try:
        with contextlib.closing(calls):
            for index, outcome in calls:
                job = jobs[index]
                step = jobs[index].model.step
                if isinstance(outcome, FailedCall):
                    # It ended early: the scores that it had saved count.
                    missing = [task.key for task in job.tasks if not is_cached(job, task)]
                    outcome = JobOutcome(dict.fromkeys(missing, outcome.message))
                if outcome.damaged:
                    faults = "; ".join(outcome.damaged)
                    echo(f"warning: skipping step {step}, which does not verify: {faults}")
                    result.damaged[step] = outcome.damaged
                    continue
                for task in job.tasks:
                    if reason := outcome.failed.get(task.key):
                        echo(f"failed: step {step}, {job.title(task)}: {reason}")
                        result.failed.append(
                            TaskFailure(step, task.task.task, task.task.shots, reason)
                        )
                result.evaluated += len(job.tasks) - len(outcome.failed)
    finally:
        # Jobs that were killed may leave their exported models behind.
        for job in jobs:
            prefix = f"{EXPORT_PREFIX}{job.settings.call_id}-"
            for folder in RunDir(job.store).evaluations.glob(f"{EXPORT_PREFIX}*"):
                with contextlib.suppress(OSError):
                    stale = time.time() - folder.stat().st_mtime > _STALE_EXPORT_S
                    if stale or folder.name.startswith(prefix):
                        shutil.rmtree(folder, ignore_errors=True)
    return result


def missing_metrics(models: Sequence[ModelRef], plan: EvaluationPlan) -> Iterator[TaskFailure]:
    """Yield the rows whose metric is not among a task's scores."""
    for model in models:
        for located in plan.suites:
            for row in located.suite.rows():
                key = plan.request(row, located.folder).key
                path = plan.target.store.evaluation(model.checksum, key)
                if row.metric is None or not path.is_file():
                    continue
                scores = EvaluationRecord.load(path).scores
                if match_metric(row.metric, scores) is None:
                    reason = f"no finite metric {row.metric!r}; the task has {', '.join(scores)}"
                    yield TaskFailure(model.step, row.task, row.shots, reason)


def suite_tables(
    models: Sequence[ModelRef], plan: EvaluationPlan
) -> tuple[list[ScoreTable], list[str]]:
    """Return the tables of the suites, and a warning for each unreadable file.

    Excludes scores of a different validation text with the same name, and scores of weights that
    a selected step had earlier.
    """
    stored, warnings = read_scores(plan.target.store)
    checksums = {model.step: model.checksum for model in models}
    stored = [
        (key, record)
        for key, record in stored
        if checksums.get(record.step, record.checkpoint) == record.checkpoint
    ]
    if plan.validation:
        row = SuiteTask(task=plan.validation.name)
        # The key depends on the limit: one key for each limit among the scores.
        limits = {record.limit for _, record in stored}
        keys = set()
        for limit in limits:
            settings = replace(plan.settings, limit=None if limit is None else int(limit))
            keys.add(replace(plan, settings=settings).request(row, Path()).key)
        stored = [(key, r) for key, r in stored if r.task != row.task or key in keys]
    return [suite_table(suite, stored, plan.settings.limit) for suite in plan.suites], warnings


def select_steps(table: ScoreTable, steps: Sequence[int]) -> ScoreTable:
    rows = [
        replace(
            row,
            scores={step: value for step, value in row.scores.items() if step in steps},
            errors={step: value for step, value in row.errors.items() if step in steps},
        )
        for row in table.rows
    ]
    scored = [step for step in table.steps if step in steps]
    return replace(table, rows=[row for row in rows if row.scores], steps=scored)


_SHARD_BYTES = 5 * 10**9  # files of an exported model


def run_job(request: JobRequest) -> JobOutcome:
    """Evaluate the tasks of a job; a task that fails does not end the others."""
    model = request.model
    validation = request.validation
    if not model.verified and not model.huggingface:
        faults = verify_entry(read_entry(model.directory)).faults
        if faults:
            return JobOutcome(damaged=faults)
    failed = {}

    def evaluate(task: TaskRequest, score: Callable[[TaskRequest], TaskScores]) -> None:
        started = time.monotonic()  # not time.time(), which may be set back
        try:
            scores = score(task)
            record = EvaluationRecord(
                step=model.step,
                tokens=model.tokens,
                checkpoint=model.checksum,
                task=task.task.task,
                limit=request.settings.limit,
                seconds=time.monotonic() - started,
                evaluated_at=time.time(),
                **scores._asdict(),
            )
            # Saved at once: an interrupted job continues after its last score.
            record.save(request.score_file(task))
        except Exception as error:
            failed[task.key] = _reason(error)

    harness_tasks = []
    for task in request.tasks:
        if validation and task.task.task == validation.name:
            evaluate(task, lambda _: validation_scores(request))
        else:
            harness_tasks.append(task)
    if harness_tasks:
        from slurmllm.analysis.evaluate.harness import Harness

        try:
            with exported(model, RunDir(request.store).evaluations, request.settings) as folder:
                harness = Harness(folder, request.settings)
                for task in harness_tasks:
                    evaluate(task, harness.score)
        except Exception as error:
            reason = _reason(error)
            failed |= {t.key: reason for t in harness_tasks if not request.score_file(t).is_file()}
    return JobOutcome(failed=failed)


def validation_scores(request: JobRequest) -> TaskScores:
    """Return the scores of the loss on held-out text."""
    # Here and not above: torch, which the login node does without.
    from slurmllm.analysis.evaluate.harness import resolve_device
    from slurmllm.analysis.evaluate.validation_loss import held_out_loss
    from slurmllm.analysis.evaluate.validation_text import stream_spec

    directory = request.model.directory
    settings = request.settings
    assert request.validation is not None
    device = resolve_device(settings.device)
    with stream_spec(request.validation, directory, settings.tokenizer) as spec:
        loss = held_out_loss(directory, spec, settings.limit, settings.batch_size, device)
    return TaskScores(loss.scores, loss.errors, loss.sequences, LOOP)


def _reason(error: Exception) -> str:
    """Return an error on one line; the traceback of an unexpected one goes to the job's log."""
    if isinstance(error, SlurmllmError):
        return str(error)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextlib.contextmanager
def exported(model: ModelRef, store: Path, settings: EvaluationSettings) -> Iterator[Path]:
    """Yield the Hugging Face folder of a model: its own, or a temporary export in `store`."""
    from slurmllm.train.checkpoint.formats.exporting import plan_export, run_export
    from slurmllm.train.checkpoint.formats.model_folders import checkpoint_tokenizer

    directory = model.directory
    if model.huggingface:
        yield directory
        return
    tokenizer = checkpoint_tokenizer(directory, settings.tokenizer)
    if not tokenizer.files:
        raise DataError(f"no tokenizer is known for {directory}; give --tokenizer FILE")
    with storage_errors(
        f"cannot create a folder for the exported model in {store}",
        "check its permissions and the file system",
    ):
        store.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(
            prefix=f"{EXPORT_PREFIX}{settings.call_id}-", dir=store, ignore_cleanup_errors=True
        )
    # If the job is killed, the caller removes the folder (`evaluate.run_jobs`).
    with temporary as parent:
        folder = Path(parent, directory.name)
        run_export(plan_export(directory, tokenizer), folder, _SHARD_BYTES)
        yield folder
