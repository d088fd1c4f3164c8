"""`slurmllm logs RUN [-f]`: the logs of a run, and its first failing worker."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.exceptions import Exit

from slurmllm.cli import options
from slurmllm.core.errors import EXIT_INTERRUPTED, RunError, SlurmError, StorageError, UserError
from slurmllm.core.format import Values, format_plural
from slurmllm.core.run.rundir import RunDir, Stage, find_run

if TYPE_CHECKING:
    from slurmllm.analysis.status.details import Culprit
    from slurmllm.analysis.status.logs import LogSelection, RankLine
    from slurmllm.core.run.records import AttemptRecord

_LOOK_S = 0.5  # between two reads of the files
_ASK_S = 5.0  # between two checks whether the run is active: they query slurmctld
_FAILED_LINES = 30
_LINES_AT_ONCE = 256  # in a write: a flush for every line takes longer than the merge
_COLOURS = ("cyan", "green", "magenta", "blue")  # of ranks; yellow and red are levels
_LEVELS: dict[str, Values] = {
    "DEBUG": {"dim": True},
    "WARNING": {"fg": "yellow"},
    "ERROR": {"fg": "red"},
    "CRITICAL": {"fg": "red", "bold": True},
}
_Number = click.IntRange(min=0)
_SELECTORS = {"--rank", "--ranks", "--all-ranks", "--failed"}


def _parse_ranks(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> frozenset[int] | None:
    """`0,3,8-11` → the ranks."""
    if value is None:
        return None
    ranks: set[int] = set()
    for segment in value.split(","):
        # A slip of the keyboard would fill the memory: a rank has at most six digits.
        match = re.fullmatch(r"\s*([0-9]{1,6})(?:-([0-9]{1,6}))?\s*", segment)
        fault = f"{segment!r} is not a rank below 1000000; write it as 0,3,8-11"
        if match is not None:
            first = int(match[1])
            last = int(match[2] or match[1])
            fault = f"{segment!r} ends before it begins; write {last}-{first}"
        if match is None or last < first:
            raise UserError(f"--ranks {value}: {fault}")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)


@click.command()
@options.run_argument("run")
@options.flag("-f --follow", "Print new lines until the run ends.")
@options.choice("--stage", "precompile train", "Only this stage.")
@click.option("--attempt", type=_Number, help="Only this attempt (default stage: train).")
@click.option("--rank", type=_Number, help="The log of one worker; default: of the last attempt.")
@click.option("--ranks", metavar="LIST", callback=_parse_ranks, help="Workers, such as 0,3,8-11.")
@options.flag("--all-ranks", "All workers; each line has its rank.")
@options.flag("--failed", "The worker that failed first in the last failure.")
@options.flag("--stacks", "The workers' stack traces of the last hang.")
@options.count("-n", "--lines", help="Only the last lines of each log.")
@options.runs_dir
def logs(
    *,
    run: str,
    follow: bool,
    stage: Stage | None,
    attempt: int | None,
    rank: int | None,
    ranks: frozenset[int] | None,
    all_ranks: bool,
    failed: bool,
    stacks: bool,
    lines: int | None,
    runs_dir: Path,
) -> None:
    """Print the logs of RUN: precompile stage, then train stage.

    The log of a stage has the output of the batch script, the supervisor and rank 0. Logs of
    several ranks are merged by time within each attempt.

    While an attempt runs, the logs of workers other than rank 0 are on the disks of their nodes.
    --rank reads one there, by srun; the others are collected when the attempt ends.

    -f continues with later attempts. Without an option for ranks it prints all ranks whose logs are
    in the run directory.
    """
    from slurmllm.analysis.status.logs import log_batches, select_logs
    from slurmllm.analysis.status.runs import state_text
    from slurmllm.core.slurm.client import SlurmClient

    used = options.given()
    if stacks and (unused := {*used} - {"run", "--stacks", "--rank", "--runs-dir"}):
        raise UserError(
            f"--stacks combines only with --rank; leave out {' and '.join(sorted(unused))}"
        )
    if len(selectors := [name for name in used if name in _SELECTORS]) > 1:
        raise UserError(f"{' and '.join(selectors)}: each selects workers; give one of them")
    run_dir = find_run(run, runs_dir)
    selection = select_logs(
        run_dir, stage, attempt, rank, ranks, lines, bool(follow or all_ranks or ranks)
    )
    endings = _until_ended(run_dir) if follow else None
    state = partial(state_text, run_dir, SlurmClient())
    try:
        if stacks:
            click.echo(_stacks(run_dir, rank), nl=False)
        elif failed:
            _print_failures(selection, lines or _FAILED_LINES, follow)
        else:
            printer = _Printer(run_dir, selection.worker is None)
            for rank_lines in log_batches(selection, lines, state, endings):
                _echo(printer.texts(rank_lines))
    except KeyboardInterrupt:  # the usual way to leave
        if not follow:
            raise
        raise Exit(EXIT_INTERRUPTED) from None


def _echo(texts: Iterable[str]) -> None:
    texts = iter(texts)
    while block := list(islice(texts, _LINES_AT_ONCE)):
        click.echo("\n".join(block))


def _coloured(message: str) -> str:
    """Return a line in the colour of its level; click removes colours unless on a terminal."""
    from slurmllm.core.log import parse_line

    record = parse_line(message)
    style = _LEVELS.get(record.level) if record else None
    return click.style(message, **style) if style else message


@dataclass
class _Printer:
    """Lines in their colours; with `labels`, `[rank 3 node-b]` and a heading for each attempt."""

    run: RunDir
    labels: bool
    attempt: tuple[Stage, int] | None = None  # of the last line
    records: dict[tuple[Stage, int], AttemptRecord] = field(default_factory=dict)
    width: int = 0

    def texts(self, lines: Iterable[RankLine]) -> Iterator[str]:
        from slurmllm.analysis.status.logs import node_of
        from slurmllm.core.run.records import AttemptRecord

        for line in lines:
            if not self.labels:
                yield _coloured(line.text)
                continue
            attempt = line[:2]
            if self.attempt != attempt:
                self.attempt = attempt
                yield click.style(f"── {line.stage} attempt {line.attempt}", bold=True)
            node = ""  # if the record of the attempt is not written yet
            with suppress(StorageError):
                if attempt not in self.records:
                    self.records[attempt] = AttemptRecord.load(self.run.attempt(*attempt).record)
                node = f" {node_of(self.records[attempt], line.rank)}".rstrip()
            label = f"[rank {line.rank}{node}]"
            self.width = max(self.width, len(label))
            label = click.style(label.ljust(self.width), fg=_COLOURS[line.rank % len(_COLOURS)])
            yield f"{label} {_coloured(line.text)}".rstrip()


def _stacks(run: RunDir, rank: int | None) -> str:
    """Return the stacks of the last attempt that hung, those that differ from the others first."""
    from slurmllm.core.run.records import AttemptRecord
    from slurmllm.launch.supervise.collectives import ras_report, torch_analysis
    from slurmllm.launch.supervise.stacks import outliers, read_locations, read_stacks

    hung = [attempt for attempt in run.attempts("train") if attempt.stacks(0).parent.is_dir()]
    if not hung:
        raise RunError(f"{run.name} has no stacks: no attempt of it has hung")
    attempt = hung[-1]
    dumps = read_stacks(attempt)
    if not dumps:
        raise RunError(f"{run.name} has no stacks that can be read; see {attempt.path}")
    if rank is not None and rank not in dumps:
        raise RunError(
            f"rank {rank}: no stacks in attempt {attempt.number}; there are "
            f"{', '.join(map(str, sorted(dumps)))}"
        )
    locations = read_locations(attempt)
    differing = [locations[outlier].worker for outlier in outliers(locations)]
    reports = {}
    for worker in dict.fromkeys((*differing, *sorted(dumps))) if rank is None else [rank]:
        mark = ", differs from the others" if worker in differing else ""
        reports[f"rank {worker}{mark}"] = f"{dumps[worker]}\n"
    if rank is None and attempt.collectives(0).parent.is_dir():
        reports["NCCL RAS"] = ras_report(attempt)
        with suppress(StorageError):
            world_size = AttemptRecord.load(attempt.record).world_size
            reports["torchfrtrace"] = torch_analysis(attempt, world_size)
    return "\n".join(
        f"attempt {attempt.number}, {name}\n{report.rstrip()}\n"
        for name, report in reports.items()
        if report
    )


def _print_failures(selection: LogSelection, lines: int, follow: bool) -> None:
    """Print the first failing worker of an attempt; when following, of every failed attempt."""
    from slurmllm.analysis.status.details import culprit, failed_attempts

    run = selection.run
    attempt = selection.attempt
    printed = set()
    for ended in _until_ended(run) if follow else [True]:
        # More may be written about an attempt that is failing until it has ended: --follow waits.
        records = [
            record
            for record in failed_attempts(run, selection.stages)
            if attempt in (None, record.attempt) and (ended or record.ending is not None)
        ]
        for record in records[-1:]:
            if (record.stage, record.attempt) not in printed:
                printed.add((record.stage, record.attempt))
                _print_culprit(run, culprit(run, record), lines)
    if not printed and follow:
        click.echo(f"no attempt of {run.name} has failed")
    elif not printed:
        name = "no attempt of" if attempt is None else f"not attempt {attempt}, or none, of"
        raise RunError(f"{name} {run.name} has failed; see `slurmllm status`")


def _print_culprit(run: RunDir, culprit: Culprit, lines: int) -> None:
    from slurmllm.analysis.status.logs import last_lines

    record = culprit.record
    failure = culprit.failure
    ending = " → ".join(filter(None, (record.ending or "failing", record.action)))
    click.secho(f"{run.name}, {record.stage} attempt {record.attempt}: {ending}", bold=True)
    _echo(f"  {line}" for line in record.evidence)
    if culprit.rank is None:
        click.echo(f"no single worker failed first; see `slurmllm logs {run.name} --all-ranks`")
        return
    node = f" on {culprit.node}" if culprit.node else ""
    process = (failure and failure.process) or f"rank {culprit.rank}"
    click.secho(f"first failing worker: {process}{node}", fg="red", bold=True)
    _echo(f"  {line}" for line in culprit.how)
    if failure is not None:
        step = f" after step {failure.step}" if failure.step is not None else ""
        failed_at = datetime.fromtimestamp(failure.time)
        click.echo(f"  {failed_at:%Y-%m-%d %H:%M:%S}{step}, blame: {failure.blame}")
        click.echo(f"  {failure.error}: {failure.message}\n{failure.traceback.rstrip()}".rstrip())
    if culprit.stacks:
        click.echo(f"  stacks of all workers: `slurmllm logs {run.name} --stacks`")
    texts = last_lines(run, record, culprit.rank, lines)
    log = run.worker_log(record.stage, record.attempt, culprit.rank)
    heading = f"last {format_plural(len(texts), 'line')} of" if texts else "nothing in"
    click.secho(f"{heading} {log}", bold=True)
    _echo(map(_coloured, texts))


def _until_ended(run: RunDir) -> Iterator[bool]:
    """Yield whether the run has ended, checked before each read of the files."""
    from slurmllm.core.slurm.client import SlurmClient
    from slurmllm.launch.supervise.run_state import is_active

    client, ask_at, unreachable, ended = SlurmClient(), 0.0, False, False
    while not ended:
        if time.monotonic() >= ask_at:
            ask_at = time.monotonic() + _ASK_S
            try:
                ended = not is_active(run, client)
                unreachable = False
            except SlurmError as error:  # slurmctld may be restarting
                if not unreachable:
                    options.note(f"slurmctld is unreachable; retrying: {error}")
                unreachable = True
        yield ended
        if not ended:
            time.sleep(_LOOK_S)
