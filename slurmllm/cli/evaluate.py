"""`slurmllm evaluate`: what do a run's checkpoints know and can?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from slurmllm.evaluate.checkpoints import Target
    from slurmllm.evaluate.evaluate import Question
    from slurmllm.evaluate.request import Outcome, Work
    from slurmllm.evaluate.suites import Placed

_DEFAULT_JOBS = 16


@click.command()
@click.argument("run")
@click.option(
    "--suite",
    "suites",
    multiple=True,
    metavar="NAME|FILE.yaml",
    help="Suite of tasks: hlat, pythia, smoke, or a file of your own; repeatable.",
)
@click.option(
    "--task",
    "tasks",
    multiple=True,
    metavar="TASK",
    help="Task of the harness, or validation: loss on held-out text; repeatable. With --suite: "
    "of the suite, these alone.",
)
@click.option(
    "--checkpoint",
    "steps",
    multiple=True,
    metavar="STEP|latest|all",
    help="Which checkpoints; repeatable.  [default: latest]",
)
@click.option("--limit", type=click.IntRange(min=1), help="Questions (sequences) a task at most.")
@click.option("--shots", type=click.IntRange(min=0), help="Examples before each question.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    help="Sequences at a time.  [default: 1 on a CPU, what fits on a CUDA device]",
)
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"Checkpoints at a time.  [default: 1; {_DEFAULT_JOBS} with --slurm]",
)
@click.option("--slurm", is_flag=True, help="In the jobs of a Slurm array, not in processes here.")
@click.option("--partition", help="Slurm partition.")
@click.option("--account", help="Slurm account.")
@click.option("--qos", help="Slurm quality of service.")
@click.option(
    "--time", help="Time limit of a job: minutes, H:MM:SS or D-HH:MM:SS.  [default: 24:00:00]"
)
@click.option("--cpus", type=click.IntRange(min=1), metavar="N", help="CPUs of a Slurm job.")
@click.option("--gpus", type=click.IntRange(min=1), metavar="N", help="GPUs of a Slurm job.")
@click.option(
    "--validation-corpus",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Text, JSON lines or a corpus for the task validation, instead of the held-out documents.",
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A tokenizer.json.  [default: the run's]",
)
@click.option(
    "--export-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Keep the exported models here, and use those that are there.  [default: they go]",
)
@click.option(
    "--allow-code-execution",
    "allow_code",
    is_flag=True,
    help="Let tasks run the programs that the model writes, as your user, without a sandbox.",
)
@click.option("--force", is_flag=True, help="Evaluate again what is known.")
@click.option("--fetch", "fetching", is_flag=True, help="Fetch the tasks' questions, and stop.")
@click.option(
    "--plot",
    metavar="FILE.png",
    help="Picture.  [default: <run>/reports/evaluation-<suite>.png]",
)
@options.no_plot
@options.runs_dir
@options.as_json
@click.pass_context
def evaluate(
    ctx: click.Context,
    /,
    run: str,
    suites: tuple[str, ...],
    tasks: tuple[str, ...],
    steps: tuple[str, ...],
    limit: int | None,
    shots: int | None,
    batch_size: int | None,
    device: str,
    jobs: int | None,
    slurm: bool,
    validation_corpus: Path | None,
    tokenizer: Path | None,
    export_dir: Path | None,
    allow_code: bool,
    force: bool,
    fetching: bool,
    plot: str | None,
    no_plot: bool,
    runs_dir: str | None,
    as_json: bool,
    **for_slurm: Any,
) -> None:
    """Judge checkpoints of RUN by tasks of lm-evaluation-harness, and by loss on held-out text.

    RUN is a run's name or directory; a checkpoint or a Hugging Face model folder will do too.
    What is known is not done again, and what was interrupted goes on. The harness is an extra:
    pip install 'slurmllm[eval]'.

    Exit codes: 0 every task was scored, 1 some were not (they are listed), 2 something you can put
    right, 3 Slurm, 4 storage or a checkpoint.
    """
    from dataclasses import replace
    from secrets import token_hex
    from time import monotonic

    from slurmllm.checkpoint.formats.tokenizer_files import tokenizer_from_file
    from slurmllm.cli.evaluate_output import report
    from slurmllm.errors import EXIT_NEGATIVE, CheckpointError, UserError
    from slurmllm.evaluate.checkpoints import choose, find_target
    from slurmllm.evaluate.evaluate import (
        Answer,
        asked_of,
        count_known,
        is_known,
        permitted,
        settle,
        without_figure,
        works,
    )
    from slurmllm.evaluate.evaluate import run as do
    from slurmllm.evaluate.request import Settings, Work
    from slurmllm.evaluate.suites import record_suite
    from slurmllm.rundir import runs_root

    begun = monotonic()
    _require_slurm(slurm, for_slurm)
    if plot is not None and (no_plot or len(suites) > 1):
        raise UserError("--plot names the picture of one suite; leave out --no-plot, other --suite")
    options.check_picture(plot)
    placed = _placed(suites, tasks, shots)
    if fetching:
        _fetch(ctx, placed)
        return
    target = find_target(run, runs_root(runs_dir))
    if tokenizer is not None:
        tokenizer_from_file(tokenizer)  # says what is wrong with it before any job does
    settings = Settings(
        limit, batch_size, device, allow_code,
        export_dir and export_dir.absolute(), tokenizer and tokenizer.absolute(),
        token_hex(4),
    )  # fmt: skip
    question = settle(target, placed, named=tasks, corpus=validation_corpus)
    asked = asked_of(question, settings)
    may = permitted(asked, settings)

    def known(candidate: Any) -> bool:
        whole = Work(target.store.path, candidate, may, question.held_out, settings)
        return not force and all(is_known(whole, one) for one in may)

    chosen = choose(target, steps, known)
    todo, forbidden = works(target, chosen.candidates, question, settings, again=force)
    for task in set(tasks) & set(forbidden):
        raise UserError(f"{task} {forbidden[task]}")
    question = replace(question, skipped={**question.skipped, **forbidden})
    known_before = count_known(target, chosen.candidates, question, settings, todo)
    for task, why in question.skipped.items():
        click.echo(f"warning: {task} is left out: {why}", err=True)
    for line in chosen.warnings:
        click.echo(f"warning: {line}", err=True)
    answer = Answer()
    if todo:
        _require_harness(todo, question)
        if device == "cuda" and not slurm:
            _require_cuda()
        for one in question.placed:
            if not one.shipped and validation_corpus is None:
                record_suite(target.store, one, whole=not (suites and tasks))
        at_once = jobs or (_DEFAULT_JOBS if slurm else 1)
        try:
            answer = do(todo, _runner(target, at_once, slurm, for_slurm, todo), _say_end)
        except KeyboardInterrupt:
            click.echo("what has a score keeps it; the same command goes on", err=True)
            raise
    answer.cached = known_before
    without = without_figure(target, chosen.candidates, question, settings)
    for failure in without:
        click.echo(f"failed: step {failure.step}, {failure.task}: {failure.why}", err=True)
    answer.failed += without
    report(
        target, chosen, question, settings, answer,
        plot=None if no_plot else (plot or ""), as_json=as_json, seconds=monotonic() - begun,
    )  # fmt: skip
    unsound = answer.unsound
    if len(unsound) < len(chosen.candidates):  # of `all`, the others have been judged
        unsound = {step: faults for step, faults in unsound.items() if step in chosen.named}
    if unsound:
        lines = "\n".join(f"  step {step}: {'; '.join(it)}" for step, it in unsound.items())
        raise CheckpointError(f"checkpoints that do not verify; restore them:\n{lines}")
    ctx.exit(EXIT_NEGATIVE if answer.failed else 0)


def _require_slurm(slurm: bool, given: dict[str, Any]) -> None:
    for option, value in given.items():
        if value is not None and not slurm:
            raise click.UsageError(f"--{option} is of Slurm jobs; add --slurm")


def _placed(
    suites: tuple[str, ...], tasks: tuple[str, ...], shots: int | None
) -> tuple[Placed, ...]:
    """The suites that the options ask for."""
    from dataclasses import replace

    from slurmllm.errors import UserError
    from slurmllm.evaluate.suites import (
        Placed,
        find_suite,
        suite_names,
        suites_dir,
        tasks_alone,
    )

    if not all(tasks):
        raise UserError("--task '': name a task of the harness, or validation")
    if not suites:
        if not tasks:
            raise UserError(
                f"say what to evaluate: --suite NAME ({', '.join(suite_names())}, or a .yaml "
                "file), --task TASK of the harness, or --task validation"
            )
        return (Placed(tasks_alone(tasks, shots), suites_dir()),)
    placed = [find_suite(name) for name in dict.fromkeys(suites)]
    if tasks:
        placed = [replace(one, suite=one.suite.only(tasks)) for one in placed]
    if shots is not None:
        placed = [replace(one, suite=one.suite.with_shots(shots), shipped=False) for one in placed]
    return tuple(placed)


def _require_harness(todo: Sequence[Work], question: Question) -> None:
    """The harness must be there if one of its tasks is to be done, and know those of no suite."""
    from slurmllm.errors import UserError
    from slurmllm.evaluate.harness import fault_of, require_harness

    held_out = question.held_out and question.held_out.name
    theirs = {one.key: one for work in todo for one in work.asked if one.task.task != held_out}
    if not theirs:
        return
    require_harness()
    if all(one.shipped for one in question.placed):
        return
    allow_code = todo[0].settings.allow_code
    faults = [fault for one in theirs.values() if (fault := fault_of(one, allow_code))]
    if faults:
        raise UserError("\n  ".join(dict.fromkeys(faults)))


def _require_cuda() -> None:
    from slurmllm.evaluate.harness import torch_device

    torch_device("cuda")


def _fetch(ctx: click.Context, placed: Sequence[Placed]) -> None:
    from slurmllm.errors import EXIT_NEGATIVE, DataError
    from slurmllm.evaluate.harness import fetch, require_harness
    from slurmllm.evaluate.request import Asked
    from slurmllm.evaluate.suites import VALIDATION

    require_harness()
    failed = False
    for one in placed:
        for row in {row.task: row for row in one.suite.rows()}.values():
            if row.task == VALIDATION:
                continue
            try:
                fetch(Asked(row, one.folder, ""))
                click.echo(f"{row.task}: fetched")
            except DataError as error:
                failed = True
                click.echo(f"{row.task}: {error}", err=True)
    ctx.exit(EXIT_NEGATIVE if failed else 0)


def _runner(
    target: Target, at_once: int, slurm: bool, for_slurm: dict[str, Any], todo: Sequence[Work]
) -> Any:
    """What runs the jobs; it says on stderr what is done."""
    from functools import partial

    from slurmllm.evaluate.executor import Listeners, logs_of, run_here, run_on_slurm
    from slurmllm.slurm.arrays import Resources, SlurmOptions

    logs = logs_of(target.store)
    tell = Listeners(_Progress(todo), lambda note: click.echo(note, err=True))
    if not slurm:
        return partial(run_here, at_once=at_once, logs=logs, tell=tell)
    cpus, gpus = for_slurm.pop("cpus"), for_slurm.pop("gpus")
    given = {name: value for name, value in for_slurm.items() if value is not None}
    return partial(
        run_on_slurm,
        at_once=at_once,
        logs=logs,
        tell=tell,
        options=SlurmOptions(**{"time": "24:00:00", **given}),
        resources=Resources(cpus, gpus),
    )


class _Progress:
    """A line on stderr for each score that is new on disk."""

    def __init__(self, todo: Sequence[Work]) -> None:
        self._waiting = [(work, one) for work in todo for one in work.asked]
        self._total = len(self._waiting)
        self._before = {work.file(one): _changed(work.file(one)) for work, one in self._waiting}

    def __call__(self) -> None:
        for work, one in list(self._waiting):
            path = work.file(one)
            if _changed(path) != self._before[path]:
                self._waiting.remove((work, one))
                done = self._total - len(self._waiting)
                click.echo(
                    f"{done} of {self._total}: step {work.candidate.step}, {work.name(one)}",
                    err=True,
                )


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _say_end(work: Work, outcome: Outcome) -> None:
    step = work.candidate.step
    if outcome.unsound:
        faults = "; ".join(outcome.unsound)
        click.echo(f"warning: step {step} does not verify and is passed over: {faults}", err=True)
    for one in work.asked:
        if one.key in outcome.failed:
            why = outcome.failed[one.key]
            click.echo(f"failed: step {step}, {work.name(one)}: {why}", err=True)
    if outcome.lost is not None:
        click.echo(f"failed: step {step}: {outcome.lost}", err=True)
