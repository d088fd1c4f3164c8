"""`slurmllm logs RUN [-f]`: the logs of a run, and its first failing worker."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmllm.cli import options
from slurmllm.core.errors import EXIT_INTERRUPTED, RunError, SlurmError, StorageError, UserError
from slurmllm.core.format import format_plural
from slurmllm.core.run.rundir import RunDir, Stage, find_run
from slurmllm.core.run.safe_files import open_regular

if TYPE_CHECKING:
    from slurmllm.analysis.status.details import Culprit
    from slurmllm.analysis.status.logs import LogSelection, MergedLogs, RankLine
    from slurmllm.core.run.records import AttemptRecord

_LOOK_S = 0.5  # between two reads of the files
_ASK_S = 5.0  # between two checks whether the run is active: they query slurmctld
_LONGEST_LINE = 1 << 20  # bytes, of a log on a node
_FAILED_LINES = 30
_LINES_AT_ONCE = 256  # in a write: a flush for every line takes longer than the merge
_COLOURS = ("cyan", "green", "magenta", "blue")  # of ranks; yellow and red are levels
_LEVELS: dict[str, dict[str, Any]] = {
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
        if match is None:
            fault = f"{segment!r} is not a rank below 1000000; write it as 0,3,8-11"
            raise UserError(f"--ranks {value}: {fault}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            fault = f"{segment!r} ends before it begins; write {last}-{first}"
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
@click.pass_context
def logs(
    ctx: click.Context,
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
    from slurmllm.analysis.status.logs import LogSelection

    _check_options(ctx, stacks)
    run_dir = find_run(run, runs_dir)
    stages: tuple[Stage, ...] = ("precompile", "train") if stage is None else (stage,)
    single = rank is not None or not (follow or all_ranks or ranks)  # worker
    plain = single and rank is None and attempt is None  # rank 0, in all attempts
    if single:
        ranks = frozenset({rank or 0})
    if attempt is not None or (single and not plain):
        stages = stages[-1:]
    # Earlier attempts can be long: the last lines are those of the newest attempt.
    newest = (single or lines is not None) and not plain
    selection = LogSelection(run_dir, stages, ranks, attempt, newest)
    try:
        if stacks:
            click.echo(_stacks(run_dir, rank), nl=False)
        elif failed:
            _print_failures(selection, lines or _FAILED_LINES, follow)
        else:
            _print_logs(selection, lines, follow, (rank or 0) if single else None)
    except KeyboardInterrupt:  # the usual way to leave
        if not follow:
            raise
        ctx.exit(EXIT_INTERRUPTED)


def _check_options(ctx: click.Context, stacks: bool) -> None:
    used = options.given(ctx)
    if stacks and (unused := {*used} - {"run", "--stacks", "--rank", "--runs-dir"}):
        names = " and ".join(sorted(unused))
        raise UserError(f"--stacks combines only with --rank; leave out {names}")
    if len(selectors := [name for name in used if name in _SELECTORS]) > 1:
        raise UserError(f"{' and '.join(selectors)}: each selects workers; give one of them")


def _print_logs(selection: LogSelection, lines: int | None, follow: bool, rank: int | None) -> None:
    """Print logs; `rank`: the only worker, whose lines have no labels."""
    from slurmllm.analysis.status.logs import MergedLogs

    run, merged = selection.run, MergedLogs(selection)
    tried: set[tuple[Stage, int]] = set()
    if rank and not follow and _print_from_node(selection, merged, tried, rank, lines, follow):
        return
    if rank is None and not follow:
        _note_missing_logs(selection)
    if not merged.any_file() and (message := _explain_no_log(selection, rank, follow)):
        options.note(message)
        return
    for path in map(run.stage_log, selection.stages if selection.includes(0) else ()):
        if path.is_file():
            open_regular(path).close()  # `GrowingLog` ignores a file that cannot be read
    printer = _Printer(run, rank is None)
    for ended in _until_ended(run) if follow else [True]:
        rank_lines = merged.poll_last(lines, ended) if lines else merged.poll(ended)
        _echo(printer.texts(rank_lines))
        if rank and not ended:
            _print_from_node(selection, merged, tried, rank, lines, follow)
        lines = None  # for the first look


def _print_from_node(
    selection: LogSelection,
    merged: MergedLogs,
    tried: set[tuple[Stage, int]],
    rank: int,
    lines: int | None,
    follow: bool,
) -> bool:
    """Print a worker's log from the disk of its node; returns whether it is there.

    `follow`: until the worker ends. `tried` gets the attempt, so that none is printed twice.
    """
    from slurmllm.analysis.status.logs import node_log_command, text_of
    from slurmllm.core.slurm.setup import slurm_environment

    command = None
    with suppress(StorageError):  # a record that is damaged
        record = selection.newest_attempt()
        if record is not None and (record.stage, record.attempt) not in tried:
            command = node_log_command(selection.run, record, rank, lines, follow)
    if command is None or record is None:
        return False
    tried.add((record.stage, record.attempt))
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=slurm_environment())
    except OSError as error:
        raise SlurmError(f"{command[0]} cannot be started: {error}") from error
    with process:
        assert process.stdout is not None
        try:
            while line := process.stdout.readline(_LONGEST_LINE):
                merged.skip(record.stage, record.attempt, rank)
                click.echo(_coloured(text_of(line.removesuffix(b"\n"))))
        finally:
            if process.poll() is None:
                process.terminate()  # srun survives a first Ctrl-C
    return process.returncode == 0


def _note_missing_logs(selection: LogSelection) -> None:
    with suppress(StorageError):
        record = selection.newest_attempt()
        if record is None or record.ended_at is not None:
            return
        if ranks := selection.missing_ranks(record):
            count, attempt = format_plural(len(ranks), "log"), f"{record.stage} attempt"
            command = f"slurmllm logs {selection.run.name} --rank {ranks[0]} -f"
            note = f"collected when {attempt} {record.attempt} ends; `{command}` shows one"
            options.note(f"without {count} on the disks of the nodes, {note}")


def _explain_no_log(selection: LogSelection, rank: int | None, follow: bool) -> str | None:
    """Return that the only worker printed nothing; None if a log may still be written.

    Raises:
        RunError: There are no such workers, or the log is still on its node.
    """
    from slurmllm.analysis.status.logs import node_of, ranks_with_logs
    from slurmllm.core.run.records import NodeRecord

    run, stage, record, node_record = selection.run, selection.stages[-1], None, None
    with suppress(StorageError):
        record = selection.newest_attempt()
    node = node_of(record, rank) if record is not None and rank is not None else ""
    if follow and record is None:
        options.note(f"{run.name} has no logs yet: {_state_text(run)}")
        return None
    if follow and (rank is None or node):
        return None
    if record is None or not (rank and node):
        attempts = ", ".join(str(attempt.number) for attempt in run.attempts(stage))
        listed = "none" if record is None else ranks_with_logs(run, stage, record.attempt)
        logs = f"such logs ({stage} attempts: {attempts}; ranks with a log: {listed})"
        raise RunError(f"{run.name} has no {logs if attempts else 'logs yet'}: {_state_text(run)}")
    worker = f"rank {rank} on {node}, {stage} attempt {record.attempt}"
    with suppress(StorageError):
        node_record = NodeRecord.find(run.attempt(stage, record.attempt).node(node))
    if node_record is not None and rank in node_record.exit_codes:  # whose logs are collected
        return f"{worker}: it printed nothing"
    collector = f"whose launcher has not collected it; the next attempt on {node} does"
    raise RunError(f"{worker}: its log is on the disk of {node}, {collector}")


def _state_text(run: RunDir) -> str:
    from slurmllm.analysis.status.runs import run_states
    from slurmllm.core.slurm.client import SlurmClient

    state = run_states([run], SlurmClient())[0]
    return f"{state.state}, {state.reason or 'starting'}; see `slurmllm status {run.name}`"


def _echo(texts: Iterable[str]) -> None:
    texts = iter(texts)
    while block := list(islice(texts, _LINES_AT_ONCE)):
        click.echo("\n".join(block))


def _coloured(message: str) -> str:
    """Return a line in the colour of its level; click removes colours unless on a terminal."""
    from slurmllm.core.log import parse_line

    record = parse_line(message)
    style = _LEVELS.get(record.level) if record is not None else None
    return message if style is None else click.style(message, **style)


class _Printer:
    """Lines in their colours; with `labels`, `[rank 3 node-b]` and a heading for each attempt."""

    def __init__(self, run: RunDir, labels: bool) -> None:
        self.run, self.labels = run, labels
        self.attempt: tuple[Stage, int] | None = None  # of the last line
        self.records: dict[tuple[Stage, int], AttemptRecord] = {}
        self.width = 0

    def texts(self, lines: Iterable[RankLine]) -> Iterator[str]:
        from slurmllm.analysis.status.logs import node_of
        from slurmllm.core.run.records import AttemptRecord

        for line in lines:
            if not self.labels:
                yield _coloured(line.text)
                continue
            if self.attempt != line[:2]:
                self.attempt = line[:2]
                yield click.style(f"── {line.stage} attempt {line.attempt}", bold=True)
            node = ""  # if the record of the attempt is not written yet
            with suppress(StorageError):
                if line[:2] not in self.records:
                    path = self.run.attempt(line.stage, line.attempt).record
                    self.records[line[:2]] = AttemptRecord.load(path)
                node = f" {node_of(self.records[line[:2]], line.rank)}".rstrip()
            label = f"[rank {line.rank}{node}]"
            self.width = max(self.width, len(label))
            label = click.style(label.ljust(self.width), fg=_COLOURS[line.rank % len(_COLOURS)])
            yield f"{label} {_coloured(line.text)}".rstrip()


def _stacks(run: RunDir, rank: int | None) -> str:
    """Return the stacks of the last attempt that hung, those that differ from the others first."""
    from slurmllm.launch.supervise.stacks import outliers, read_locations, read_stacks

    hung = [attempt for attempt in run.attempts("train") if attempt.stacks(0).parent.is_dir()]
    if not hung:
        raise RunError(f"{run.name} has no stacks: no attempt of it has hung")
    dumps = read_stacks(hung[-1])
    if not dumps:
        raise RunError(f"{run.name} has no stacks that can be read; see {hung[-1].path}")
    attempt = f"attempt {hung[-1].number}"
    if rank is not None and rank not in dumps:
        listed = ", ".join(map(str, sorted(dumps)))
        raise RunError(f"rank {rank}: no stacks in {attempt}; there are {listed}")
    locations = read_locations(hung[-1])
    differing = [locations[outlier].worker for outlier in outliers(locations)]
    stacks = []
    for worker in dict.fromkeys((*differing, *sorted(dumps))) if rank is None else [rank]:
        mark = ", differs from the others" if worker in differing else ""
        stacks.append(f"{attempt}, rank {worker}{mark}\n{dumps[worker].rstrip()}\n")
    return "\n".join(stacks)


def _print_failures(selection: LogSelection, lines: int, follow: bool) -> None:
    """Print the first failing worker of an attempt; when following, of every failed attempt."""
    from slurmllm.analysis.status.details import culprit, failed_attempts

    run, attempt = selection.run, selection.attempt
    printed = set()
    for ended in _until_ended(run) if follow else [True]:
        # More may be written about an attempt that is failing until it has ended: --follow waits.
        records = [
            record
            for record in failed_attempts(run, selection.stages)
            if attempt in (None, record.attempt) and (ended or record.ending is not None)
        ]
        if records and (records[-1].stage, records[-1].attempt) not in printed:
            printed.add((records[-1].stage, records[-1].attempt))
            _print_culprit(run, culprit(run, records[-1]), lines)
    if not printed and follow:
        click.echo(f"no attempt of {run.name} has failed")
    elif not printed:
        name = "no attempt of" if attempt is None else f"not attempt {attempt}, or none, of"
        raise RunError(f"{name} {run.name} has failed; see `slurmllm status`")


def _print_culprit(run: RunDir, culprit: Culprit, lines: int) -> None:
    from slurmllm.analysis.status.logs import last_lines

    record, failure = culprit.record, culprit.failure
    action = f" → {record.action}" if record.action else ""
    ending = f"{record.ending or 'failing'}{action}"
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
        failed_at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure.time))
        click.echo(f"  {failed_at}{step}, blame: {failure.blame}")
        traceback = failure.traceback.rstrip()
        click.echo(f"  {failure.error}: {failure.message}\n{traceback}".rstrip())
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

    client, asked_at, unreachable, ended = SlurmClient(), float("-inf"), False, False
    while not ended:
        if time.monotonic() >= asked_at + _ASK_S:
            asked_at = time.monotonic()
            try:
                ended, unreachable = not is_active(run, client), False
            except SlurmError as error:  # slurmctld may be restarting
                if not unreachable:
                    options.note(f"slurmctld is unreachable; retrying: {error}")
                unreachable = True
        yield ended
        if not ended:
            time.sleep(_LOOK_S)
