"""`slurmllm evaluate`: scores of a run's checkpoints in tasks, and their validation loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from slurmllm.cli import commands, options
from slurmllm.core.errors import EXIT_NEGATIVE, CheckpointError, ConfigError, DataError, UserError
from slurmllm.core.format import Json, Texts
from slurmllm.core.run.rundir import RunDir

if TYPE_CHECKING:
    from slurmllm.analysis.evaluate.evaluate import EvaluationPlan, EvaluationResult
    from slurmllm.analysis.evaluate.request import (
        EvaluationSettings,
        JobRequest,
        Selection,
    )
    from slurmllm.analysis.evaluate.suites import LocatedSuite

_DEFAULT_JOBS = 16  # with --slurm


def _settings(tokenizer: Path | None, **values: Any) -> EvaluationSettings:
    from slurmllm.analysis.evaluate.request import EvaluationSettings
    from slurmllm.train.checkpoint.formats.model_folders import tokenizer_from_file

    if tokenizer is not None:
        tokenizer_from_file(tokenizer)  # raises its error before any job does
        tokenizer = tokenizer.absolute()  # Slurm jobs may run in another directory
    return EvaluationSettings(call_id=token_hex(4), tokenizer=tokenizer, **values)


settings_options = options.grouped(
    "settings",
    _settings,
    ("limit", "batch_size", "device", "tokenizer", "allow_code"),
    options.count("--limit", help="Maximum number of questions (sequences) per task."),
    options.count("--batch-size", help="Sequences per batch.  [default: 1 on a CPU]"),
    options.choice("--device", "auto cpu cuda", "Where to run.", default="auto"),
    click.option("--tokenizer", type=options.FILE, help="A tokenizer.json.  [default: the run's]"),
    options.flag(
        "--allow-code-execution allow_code",
        "Allow tasks to run programs that the model writes, as your user, without a sandbox.",
    ),
)


@commands.grouped(
    common="suite task checkpoint limit shots device jobs force fetch json",
)
@options.run_argument("run")
@options.repeatable(
    "--suite suites", "NAME|FILE.yaml", "Suite: hlat, pythia, smoke, or your own file; repeatable."
)
@options.repeatable(
    "--task tasks", "TASK", "Task of the harness, or validation (loss on text); repeatable."
)
@options.repeatable(
    "--checkpoint steps", "STEP|latest|all", "Checkpoint (default: latest); repeatable."
)
@settings_options
@click.option(
    "--shots", type=click.IntRange(min=0), help="Few-shot examples.  [default: the suite's]"
)
@options.count("--jobs", help="Checkpoints in parallel.  [default: 1; 16 with --slurm]")
@options.flag("--slurm", "Run in a Slurm array, not on this machine.")
@options.job_options(
    "partition account qos time",
    time="Time limit of each job: minutes, H:MM:SS or D-HH:MM:SS.  [default: 24:00:00]",
)
@options.site
@options.count("--cpus", help="CPUs per Slurm job.")
@options.count("--gpus", help="GPUs per Slurm job.")
@click.option("--validation-corpus", "corpus", type=options.FILE, help="Text of --task validation.")
@options.flag("--force", "Evaluate again even if scores are cached.")
@options.flag("--fetch", "Download the data sets of the tasks and exit.")
@options.plot_or_none("<run>/reports/evaluation-<suite>.png")
@options.runs_dir
@options.as_json
@click.pass_context
def evaluate(
    ctx: click.Context,
    /,
    run: str,
    suites: Texts,
    tasks: Texts,
    steps: Texts,
    shots: int | None,
    jobs: int | None,
    slurm: bool,
    cluster: str | None,
    corpus: Path | None,
    force: bool,
    fetch: bool,
    plot: str | None,
    runs_dir: Path,
    as_json: bool,
    settings: EvaluationSettings,
    **job: Any,
) -> None:
    """Evaluate checkpoints with lm-evaluation-harness.

    Scores tasks and the validation loss. RUN is a run's name or directory, RUN@STEP, a
    checkpoint's folder, or that of a Hugging Face model. Scores are cached, and an interrupted
    evaluation continues after its last score. The harness is an optional dependency: pip install
    'slurmllm[eval]'.

    Exit codes: 0 every task has a score, 1 some have none (they are listed), 2 invalid input or
    configuration, 3 a Slurm failure, 4 storage or a damaged checkpoint.
    """
    from slurmllm.analysis.evaluate.evaluate import missing_metrics, plan_evaluation, plan_jobs
    from slurmllm.analysis.evaluate.request import find_target, select_models
    from slurmllm.cli.evaluate_output import report

    started = monotonic()
    if not slurm:
        options.refuse_job_options({**job, "cluster": cluster})
    _refuse_output(suites, fetch=fetch, plot=plot, as_json=as_json)
    located = _locate_suites(suites, tasks, shots)
    if fetch:
        _fetch(ctx, located, settings.allow_code)
        return
    target = find_target(run, runs_dir)
    plan = plan_evaluation(target, located, settings, named=tasks, corpus=corpus)
    selection = select_models(target, steps, lambda model: plan.is_cached(model, force))
    missing, forbidden, cached = plan_jobs(selection.models, plan, force=force)
    plan = _skip(plan, forbidden, tasks, selection.warnings)
    if missing:
        _check_jobs(missing, plan, slurm)
        # A named corpus is part of the task's name, which no saved suite could repeat.
        if corpus is None:
            _save_suites(plan, complete=not (suites and tasks))
    result = _run(missing, target.store, jobs, slurm, cluster, job)
    result.cached = cached
    for failure in missing_metrics(selection.models, plan):
        options.note(f"failed: step {failure.step}, {failure.task}: {failure.error}")
        result.failed.append(failure)
    report(selection, plan, result, plot, as_json, monotonic() - started)
    _check_damage(selection, result)
    ctx.exit(EXIT_NEGATIVE if result.failed else 0)


def _save_suites(plan: EvaluationPlan, complete: bool) -> None:
    from slurmllm.analysis.evaluate.suites import save_suite

    for suite in plan.suites:
        if not suite.shipped:
            save_suite(plan.target.store, suite, complete=complete)


def _skip(
    plan: EvaluationPlan, forbidden: dict[str, str], named: Sequence[str], warnings: Sequence[str]
) -> EvaluationPlan:
    """Skip tasks that may not run, and print warnings; raise UserError if one was named."""
    for task in set(named) & set(forbidden):
        raise UserError(f"{task} {forbidden[task]}")
    skipped = {**plan.skipped, **forbidden}
    for task, why in skipped.items():
        options.warn(f"skipping {task}: {why}")
    for line in warnings:
        options.warn(line)
    return replace(plan, skipped=skipped)


def _refuse_output(suites: Texts, *, fetch: bool, plot: str | None, as_json: bool) -> None:
    if fetch and as_json:
        raise UserError("--fetch prints no JSON; leave out --json")
    if plot and len(suites) > 1:
        raise UserError("--plot names the picture of one suite; leave out other --suite")


def _locate_suites(suites: Texts, tasks: Texts, shots: int | None) -> list[LocatedSuite]:
    from slurmllm.analysis.evaluate.suites import (
        LocatedSuite,
        find_suite,
        suite_names,
        suite_of_tasks,
        suites_dir,
    )

    if not all(tasks):
        raise UserError("--task '': name a task of the harness, or validation")
    if not suites:
        if not tasks:
            raise UserError(
                f"no task is given: --suite NAME ({', '.join(suite_names())}, or a .yaml "
                "file), --task TASK of the harness, or --task validation"
            )
        return [LocatedSuite(suite_of_tasks(tasks, shots), suites_dir())]
    located = [find_suite(name) for name in dict.fromkeys(suites)]
    if tasks:
        located = [replace(it, suite=it.suite.only(tasks)) for it in located]
    if shots is not None:
        located = [replace(it, suite=it.suite.with_shots(shots), shipped=False) for it in located]
    return located


def _check_jobs(jobs: Sequence[JobRequest], plan: EvaluationPlan, slurm: bool) -> None:
    """Check before any job that its device exists and that the harness can run its tasks."""
    from slurmllm.analysis.evaluate.harness import require_harness, resolve_device, task_fault

    validation, settings = plan.validation and plan.validation.name, plan.settings
    tasks = {task.key: task for job in jobs for task in job.tasks if task.task.task != validation}
    if tasks:
        require_harness()
        # The tests check the tasks of shipped suites, and the index takes seconds.
        checked = [] if all(suite.shipped for suite in plan.suites) else tasks.values()
        if faults := dict.fromkeys(filter(None, map(task_fault, checked))):
            raise UserError("\n  ".join(faults))
    # On Slurm the nodes have the devices, not this machine.
    if settings.device == "cuda" and not slurm:
        resolve_device("cuda")


def _fetch(ctx: click.Context, suites: Sequence[LocatedSuite], allow_code: bool) -> None:
    from slurmllm.analysis.evaluate.harness import fetch, require_harness
    from slurmllm.analysis.evaluate.request import TaskRequest
    from slurmllm.analysis.evaluate.suites import VALIDATION

    require_harness()
    failed = False
    for located in suites:
        for row in {row.task: row for row in located.suite.rows()}.values():
            if row.task == VALIDATION:
                continue
            try:
                fetch(TaskRequest(row, located.folder, "", allow_code))
                click.echo(f"{row.task}: fetched")
            except DataError as error:
                failed = True
                options.note(f"{row.task}: {error}")
    ctx.exit(EXIT_NEGATIVE if failed else 0)


def _run(
    jobs: Sequence[JobRequest],
    store: RunDir,
    at_once: int | None,
    slurm: bool,
    cluster: str | None,
    job_options: Json,
) -> EvaluationResult:
    """Run jobs; report new scores and failures on stderr."""
    from slurmllm.analysis.evaluate.evaluate import EvaluationResult, run_jobs
    from slurmllm.core.format import format_plural
    from slurmllm.core.slurm.arrays import ArrayRequest, slurm_options

    if not jobs:
        return EvaluationResult()
    at_once = at_once or (_DEFAULT_JOBS if slurm else 1)
    logs, progress = store.logs / "evaluate", _score_progress(jobs)
    array = None
    if slurm:
        cpus, gpus = job_options.pop("cpus"), job_options.pop("gpus")
        job_options["time"] = job_options["time"] or "24:00:00"

        def echo_array(job_id: str, num_jobs: int) -> None:
            checkpoints = format_plural(num_jobs, "checkpoint")
            options.note(f"Slurm job {job_id}: {checkpoints}, {at_once:,} at a time")

        array = ArrayRequest(
            "slurmllm-evaluate",
            slurm_options(cluster, job_options, _directives(store)),
            "the evaluation jobs",
            "evaluate on this machine without --slurm",
            echo_array,
            cpus,
            gpus,
        )
    try:
        return run_jobs(
            jobs, at_once=at_once, logs=logs, on_poll=progress, echo=options.note, array=array
        )
    except KeyboardInterrupt:
        options.note("scores are saved; repeat the command to continue")
        raise


def _check_damage(selection: Selection, result: EvaluationResult) -> None:
    """Raise CheckpointError if no checkpoint, or a named one, does not verify."""
    damaged = result.damaged
    # With --checkpoint all, a damaged checkpoint among good ones is only a warning.
    if len(damaged) < len(selection.models):
        damaged = {step: it for step, it in damaged.items() if step in selection.named_steps}
    if damaged:
        lines = "\n".join(f"  step {step}: {'; '.join(it)}" for step, it in damaged.items())
        raise CheckpointError(f"damaged checkpoints; restore them:\n{lines}")


def _directives(store: RunDir) -> dict[str, str | bool]:
    """Return the run's own options of sbatch; none of a run that others may have written."""
    from slurmllm.core.config.load import load

    try:
        return load(store.config, trusted=True).recipe.slurm.directives.evaluate
    except ConfigError as error:
        options.warn(f"the run's slurm.directives are not used: {error.title}")
        return {}


def _score_progress(jobs: Sequence[JobRequest]) -> Callable[[], None]:
    """Return a function that prints a line on stderr for each new or changed score file."""
    pending = {
        job.score_file(task): f"step {job.model.step}, {job.title(task)}"
        for job in jobs
        for task in job.tasks
    }
    # By time and not by existence: --force replaces files.
    before = {path: _mtime(path) for path in pending}

    def show() -> None:
        for path in [path for path in pending if _mtime(path) != before[path]]:
            title = pending.pop(path)
            options.note(f"{len(before) - len(pending)} of {len(before)}: {title}")

    return show


def _mtime(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
