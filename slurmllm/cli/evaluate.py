"""`slurmllm evaluate`: scores of a run's checkpoints in tasks, and their validation loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from slurmllm.evaluate.evaluate import EvaluationPlan
    from slurmllm.evaluate.request import JobOutcome, JobRequest
    from slurmllm.evaluate.suites import LocatedSuite
    from slurmllm.run.rundir import RunDir

_DEFAULT_JOBS = 16


@click.command()
@click.argument("run", shell_complete=options.complete_run)
@click.option(
    "--suite", "suites", multiple=True, metavar="NAME|FILE.yaml",
    help="Suite of tasks: hlat, pythia, smoke, or your own .yaml file; repeatable.",
)  # fmt: skip
@click.option(
    "--task", "tasks", multiple=True, metavar="TASK",
    help="Task of the harness, or `validation` for the loss on held-out text; repeatable. With "
    "--suite: only these tasks of the suite.",
)  # fmt: skip
@click.option(
    "--checkpoint", "steps", multiple=True, metavar="STEP|latest|all",
    help="Checkpoints to evaluate; repeatable.  [default: latest]",
)  # fmt: skip
@click.option(
    "--limit", type=click.IntRange(min=1),
    help="Maximum number of questions (or sequences) per task.",
)  # fmt: skip
@click.option(
    "--shots", type=click.IntRange(min=0),
    help="Few-shot examples before each question.  [default: the suite's, else the task's]",
)  # fmt: skip
@click.option(
    "--batch-size", type=click.IntRange(min=1),
    help="Sequences per batch.  [default: 1 on a CPU, as many as fit on a CUDA device]",
)  # fmt: skip
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True,
    help="Device to evaluate on; auto: cuda if available, else cpu.",
)  # fmt: skip
@click.option(
    "--jobs", type=click.IntRange(min=1), metavar="N",
    help=f"Checkpoints evaluated in parallel.  [default: 1; {_DEFAULT_JOBS} with --slurm]",
)  # fmt: skip
@click.option(
    "--slurm", is_flag=True, help="Run in a Slurm array instead of processes on this machine."
)
@options.job_options(
    "partition account qos time",
    time="Time limit of each job: minutes, H:MM:SS or D-HH:MM:SS.  [default: 24:00:00]",
)
@options.site
@click.option("--cpus", type=click.IntRange(min=1), metavar="N", help="CPUs per Slurm job.")
@click.option("--gpus", type=click.IntRange(min=1), metavar="N", help="GPUs per Slurm job.")
@click.option(
    "--validation-corpus", type=click.Path(path_type=Path), metavar="FILE",
    help="Text, JSON lines or a corpus for --task validation, instead of the held-out documents of "
    "RUN.",
)  # fmt: skip
@click.option(
    "--tokenizer", type=click.Path(path_type=Path), metavar="FILE",
    help="A tokenizer.json.  [default: the run's]",
)  # fmt: skip
@click.option(
    "--export-dir", type=click.Path(path_type=Path), metavar="DIR",
    help="Keep the exported models in DIR, and reuse those that exist.  [default: remove them]",
)  # fmt: skip
@click.option(
    "--allow-code-execution", "allow_code", is_flag=True,
    help="Allow tasks to run programs that the model writes, as your user, without a sandbox.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Evaluate again even if scores are cached.")
@click.option(
    "--fetch", "fetching", is_flag=True, help="Download the data sets of the tasks and exit."
)
@options.plot(".  [default: <run>/reports/evaluation-<suite>.png]")
@options.no_plot
@options.runs_dir
@options.as_json
@click.pass_context
def evaluate(
    ctx: click.Context, /, run: str, suites: tuple[str, ...], tasks: tuple[str, ...],
    steps: tuple[str, ...], limit: int | None, shots: int | None, batch_size: int | None,
    device: str, jobs: int | None, slurm: bool, cluster: str | None,
    validation_corpus: Path | None, tokenizer: Path | None,
    export_dir: Path | None, allow_code: bool, force: bool, fetching: bool,
    plot: str | None, no_plot: bool, runs_dir: Path, as_json: bool,
    **slurm_options: Any,  # partition, account, qos, time, cpus, gpus
) -> None:  # fmt: skip
    """Evaluate checkpoints of RUN.

    Runs tasks of lm-evaluation-harness and computes the validation loss.

    RUN is a run's name or directory, a checkpoint, or a Hugging Face model folder. Scores are
    cached, and an interrupted evaluation continues after its last score. The harness is an optional
    dependency: pip install 'slurmllm[eval]'.

    Exit codes: 0 every task has a score, 1 some have none (they are listed), 2 invalid input or
    configuration, 3 a Slurm failure, 4 storage or a damaged checkpoint.
    """
    from dataclasses import replace
    from secrets import token_hex
    from time import monotonic

    from slurmllm.checkpoint.formats.tokenizer_files import tokenizer_from_file
    from slurmllm.cli.evaluate_output import report
    from slurmllm.errors import EXIT_NEGATIVE, CheckpointError, UserError
    from slurmllm.evaluate.evaluate import (
        EvaluationResult,
        is_cached,
        missing_metrics,
        plan_evaluation,
        plan_jobs,
        run_jobs,
    )
    from slurmllm.evaluate.harness import resolve_device
    from slurmllm.evaluate.request import EvaluationSettings, ModelRef, find_target, select_models
    from slurmllm.evaluate.suites import save_suite

    started = monotonic()
    for option, value in slurm_options.items():
        if value is not None and not slurm:
            raise click.UsageError(f"--{option} is an option of Slurm jobs; add --slurm")
    if plot is not None and (no_plot or len(suites) > 1):
        raise UserError("--plot names the picture of one suite; omit --no-plot, other --suite")
    options.check_picture(plot)
    located = _locate_suites(suites, tasks, shots)
    if fetching:
        _fetch(ctx, located, allow_code)
        return
    target = find_target(run, runs_dir)
    if tokenizer is not None:
        tokenizer_from_file(tokenizer)  # raises its error before any job does
    # Absolute paths: Slurm jobs may run in another directory.
    settings = EvaluationSettings(
        limit, batch_size, device, allow_code,
        export_dir and export_dir.absolute(), tokenizer and tokenizer.absolute(),
        token_hex(4),
    )  # fmt: skip
    plan = plan_evaluation(target, located, settings, named=tasks, corpus=validation_corpus)
    permitted = plan.permitted()

    def all_cached(model: ModelRef) -> bool:
        job = plan.job(target.store, model, permitted)
        return not force and all(is_cached(job, task) for task in permitted)

    selection = select_models(target, steps, all_cached)
    jobs_to_run, forbidden, cached = plan_jobs(target, selection.models, plan, force=force)
    for task in set(tasks) & set(forbidden):
        raise UserError(f"{task} {forbidden[task]}")
    plan = replace(plan, skipped={**plan.skipped, **forbidden})
    for task, why in plan.skipped.items():
        click.echo(f"warning: skipping {task}: {why}", err=True)
    for line in selection.warnings:
        click.echo(f"warning: {line}", err=True)
    result = EvaluationResult()
    if jobs_to_run:
        _require_harness(jobs_to_run, plan)
        # On Slurm the nodes have the devices, not this machine.
        if device == "cuda" and not slurm:
            resolve_device("cuda")
        for suite in plan.suites:
            # A named corpus is part of the task's name, which no saved suite could repeat.
            if not suite.shipped and validation_corpus is None:
                save_suite(target.store, suite, complete=not (suites and tasks))
        at_once = jobs or (_DEFAULT_JOBS if slurm else 1)
        runner = _runner(target.store, at_once, slurm, cluster, slurm_options, jobs_to_run)
        try:
            result = run_jobs(jobs_to_run, runner, _echo_end)
        except KeyboardInterrupt:
            click.echo("scores are saved; repeat the command to continue", err=True)
            raise
    result.cached = cached
    without_metric = missing_metrics(target, selection.models, plan)
    for failure in without_metric:
        click.echo(f"failed: step {failure.step}, {failure.task}: {failure.reason}", err=True)
    result.failed += without_metric
    report(
        target, selection, plan, result,
        plot=None if no_plot else (plot or ""), as_json=as_json, seconds=monotonic() - started,
    )  # fmt: skip
    damaged = result.damaged
    # With --checkpoint all, a damaged checkpoint among good ones is only a warning.
    if len(damaged) < len(selection.models):
        damaged = {step: it for step, it in damaged.items() if step in selection.named_steps}
    if damaged:
        lines = "\n".join(f"  step {step}: {'; '.join(it)}" for step, it in damaged.items())
        raise CheckpointError(f"damaged checkpoints; restore them:\n{lines}")
    ctx.exit(EXIT_NEGATIVE if result.failed else 0)


def _locate_suites(
    suites: tuple[str, ...], tasks: tuple[str, ...], shots: int | None
) -> tuple[LocatedSuite, ...]:
    from dataclasses import replace

    from slurmllm.errors import UserError
    from slurmllm.evaluate.suites import (
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
        return (LocatedSuite(suite_of_tasks(tasks, shots), suites_dir()),)
    located = [find_suite(name) for name in dict.fromkeys(suites)]
    if tasks:
        located = [replace(one, suite=one.suite.only(tasks)) for one in located]
    if shots is not None:
        located = [replace(it, suite=it.suite.with_shots(shots), shipped=False) for it in located]
    return tuple(located)


def _require_harness(jobs: Sequence[JobRequest], plan: EvaluationPlan) -> None:
    """Check before any job that the harness is installed and can run its tasks."""
    from slurmllm.errors import UserError
    from slurmllm.evaluate.harness import require_harness, task_fault

    text = plan.validation and plan.validation.name
    tasks = {task.key: task for job in jobs for task in job.tasks if task.task.task != text}
    if not tasks:
        return
    require_harness()
    if all(suite.shipped for suite in plan.suites):
        return  # the tests check the tasks of shipped suites, and the index takes seconds
    allow_code = plan.settings.allow_code
    faults = [fault for task in tasks.values() if (fault := task_fault(task, allow_code))]
    if faults:
        raise UserError("\n  ".join(dict.fromkeys(faults)))


def _fetch(ctx: click.Context, suites: Sequence[LocatedSuite], allow_code: bool) -> None:
    from slurmllm.errors import EXIT_NEGATIVE, DataError
    from slurmllm.evaluate.harness import fetch, require_harness
    from slurmllm.evaluate.request import TaskRequest
    from slurmllm.evaluate.suites import VALIDATION

    require_harness()
    failed = False
    for located in suites:
        for row in {row.task: row for row in located.suite.rows()}.values():
            if row.task == VALIDATION:
                continue
            try:
                fetch(TaskRequest(row, located.folder, ""), allow_code)
                click.echo(f"{row.task}: fetched")
            except DataError as error:
                failed = True
                click.echo(f"{row.task}: {error}", err=True)
    ctx.exit(EXIT_NEGATIVE if failed else 0)


def _runner(
    store: RunDir, at_once: int, slurm: bool, cluster: str | None, given: dict[str, Any],
    jobs: Sequence[JobRequest],
) -> Any:  # fmt: skip
    """The function that runs jobs; it reports new scores on stderr."""
    from functools import partial

    from slurmllm.evaluate.executor import run_local, run_on_slurm
    from slurmllm.slurm.arrays import Resources

    runner = partial(run_on_slurm if slurm else run_local, at_once=at_once)
    runner = partial(runner, logs=store.logs / "evaluate", on_poll=_ScoreProgress(jobs))
    if not slurm:
        return runner
    cpus, gpus = given.pop("cpus"), given.pop("gpus")
    given["time"] = given["time"] or "24:00:00"
    return partial(
        runner,
        options=options.slurm_options(cluster, given, _directives(store)),
        resources=Resources(cpus, gpus),
        on_submit=partial(click.echo, err=True),
    )


def _directives(store: RunDir) -> dict[str, str | bool]:
    """The options of sbatch in a run's own recipe; none of a run that others may have written."""
    from slurmllm.config.load import load
    from slurmllm.errors import ConfigError

    try:
        return load(store.config, trusted=True).recipe.slurm.directives.evaluate
    except ConfigError as error:
        click.echo(f"warning: the run's slurm.directives are not used: {error.title}", err=True)
        return {}


class _ScoreProgress:
    """Prints a line on stderr for each new or changed score file."""

    def __init__(self, jobs: Sequence[JobRequest]) -> None:
        self._pending = [(job, task) for job in jobs for task in job.tasks]
        self._total = len(self._pending)
        paths = (job.score_file(task) for job, task in self._pending)
        self._previous = {path: _mtime(path) for path in paths}

    def __call__(self) -> None:
        for job, task in list(self._pending):
            path = job.score_file(task)
            # By time and not by existence: --force replaces files.
            if _mtime(path) != self._previous[path]:
                self._pending.remove((job, task))
                done = self._total - len(self._pending)
                title = f"step {job.model.step}, {job.title(task)}"
                click.echo(f"{done} of {self._total}: {title}", err=True)


def _mtime(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _echo_end(job: JobRequest, outcome: JobOutcome) -> None:
    step = job.model.step
    if outcome.damaged:
        faults = "; ".join(outcome.damaged)
        click.echo(f"warning: skipping step {step}, which does not verify: {faults}", err=True)
    for task in job.tasks:
        if task.key in outcome.failed:
            reason = outcome.failed[task.key]
            click.echo(f"failed: step {step}, {job.title(task)}: {reason}", err=True)
    if outcome.error is not None:
        click.echo(f"failed: step {step}: {outcome.error}", err=True)
