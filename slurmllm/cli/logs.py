"""`slurmllm logs RUN [-f]`: the logs of a run, and its first failing worker."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from slurmllm.cli import options

if TYPE_CHECKING:
    from pathlib import Path

    from slurmllm.run.records import AttemptRecord
    from slurmllm.run.rundir import RunDir, Stage
    from slurmllm.status.logs import LogRequests, RankLine
    from slurmllm.supervise.first_failure import Culprit

_LOOK_S = 0.5  # between two reads of the files
_ASK_S = 5.0  # between two checks whether the run is active: they query slurmctld
_FAILED_LINES = 30
_LINES_AT_ONCE = 256  # in a write: a flush for every line takes longer than the merge
_COLOURS = ("cyan", "green", "magenta", "blue")  # of ranks; yellow and red are levels
_LEVELS: dict[str, dict[str, Any]] = {
    "DEBUG": {"dim": True},
    "WARNING": {"fg": "yellow"},
    "ERROR": {"fg": "red"},
    "CRITICAL": {"fg": "red", "bold": True},
}
_SELECTORS = {"--rank", "--ranks", "--all-ranks", "--failed"}


def _parse_ranks(
    ctx: click.Context, param: click.Parameter, text: str | None
) -> frozenset[int] | None:
    """`0,3,8-11` → the ranks."""
    from slurmllm.errors import UserError

    if text is None:
        return None
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UserError(f"--ranks {text}: {part!r} is not a rank; write such as 0,3,8-11")
        if dash and int(last) < int(first):
            raise UserError(f"--ranks {text}: {part!r} ends before it begins; write {last}-{first}")
        if int(last or first) >= 1_000_000:  # a slip of the keyboard would fill the memory
            raise UserError(f"--ranks {text}: {part!r}: a rank is below 1000000")
        ranks.update(range(int(first), int(last or first) + 1))
    return frozenset(ranks)


@click.command()
@click.argument("run", shell_complete=options.complete_run)
@click.option("-f", "--follow", is_flag=True, help="Print new lines until the run ends.")
@click.option("--stage", type=click.Choice(["precompile", "train"]), help="Only this stage.")
@click.option(
    "--attempt",
    type=click.IntRange(min=0),
    help="Only this attempt, of the train stage unless --stage is given.",
)
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    help="The log of one worker, of the last attempt unless --attempt is given.",
)
@click.option(
    "--ranks",
    metavar="LIST",
    callback=_parse_ranks,
    help="Merge the logs of several workers, such as 0,3,8-11.",
)
@click.option(
    "--all-ranks", is_flag=True, help="Merge the logs of all workers; each line has its rank."
)
@click.option(
    "--failed",
    is_flag=True,
    help="Error and last lines of the first worker that failed in the last failed attempt.",
)
@click.option("--stacks", is_flag=True, help="Show the workers' stack traces of the last hang.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(min=1),
    metavar="N",
    help="Only the last N lines of each log.",
)
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
    several ranks are merged by time within each attempt; a line without a time follows the line
    before it in its file.

    While an attempt runs, the logs of workers other than rank 0 are on the disks of their nodes.
    --rank, --ranks and --all-ranks have them copied into the run directory until it ends.

    -f goes on with later attempts. It prints all ranks whose logs are in the run directory, unless
    --rank, --ranks, --all-ranks or --failed is given.
    """
    from slurmllm.errors import EXIT_INTERRUPTED
    from slurmllm.run.rundir import find_run

    _check_options(ctx, stacks)
    run_dir = find_run(run, runs_dir)
    stages: tuple[Stage, ...] = ("precompile", "train") if stage is None else (stage,)
    single = rank is not None or not (follow or all_ranks or ranks)  # worker
    try:
        if stacks:
            click.echo(_stacks(run_dir, rank), nl=False)
        elif failed:
            _print_failures(run_dir, stages, attempt, lines or _FAILED_LINES, follow)
        elif single and rank is None and attempt is None:
            _print_stage_logs(run_dir, stages, lines)
        else:
            if single or attempt is not None:
                stages = stages[-1:]
            if single:
                ranks = frozenset({rank or 0})
            # A plain -f may be of thousands of workers, and few of them print anything.
            request = ranks is not None or all_ranks
            _print_ranks(run_dir, stages, attempt, ranks, lines, follow, request, single)
    except KeyboardInterrupt:  # the usual way to leave
        if not follow:
            raise
        ctx.exit(EXIT_INTERRUPTED)


def _check_options(ctx: click.Context, stacks: bool) -> None:
    from slurmllm.errors import UserError

    used = [
        param.opts[0]
        for param in ctx.command.params
        if param.name and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
    ]
    if stacks and (others := {*used} - {"run", "--stacks", "--rank", "--runs-dir"}):
        names = " and ".join(sorted(others))
        raise UserError(
            f"--stacks shows the last hang and combines only with --rank; leave out {names}"
        )
    selectors = [name for name in used if name in _SELECTORS]
    if len(selectors) > 1:
        raise UserError(f"{' and '.join(selectors)}: each selects workers; give one of them")


def _print_stage_logs(run: RunDir, stages: tuple[Stage, ...], lines: int | None) -> None:
    from slurmllm.errors import RunError
    from slurmllm.run.safe_files import open_regular
    from slurmllm.supervise.log_files import GrowingLog, start_of_last

    paths = [path for path in map(run.stage_log, stages) if path.is_file()]
    if not paths:
        raise RunError(
            f"{run.name} has no logs yet: its jobs are pending; see `slurmllm status {run.name}`"
        )
    for path in paths:
        open_regular(path).close()  # `GrowingLog` ignores a file that cannot be read
        log = GrowingLog(path, 0 if lines is None else start_of_last(path, lines))
        _echo(map(_coloured, chain(log.lines(), log.flush())))


def _print_ranks(
    run: RunDir,
    stages: tuple[Stage, ...],
    attempt: int | None,
    ranks: frozenset[int] | None,
    lines: int | None,
    follow: bool,
    request: bool,
    single: bool,
) -> None:
    """Print the logs of several workers (None: all), or of a single one of the last attempt."""
    from slurmllm.status.logs import LogRequests, MergedLogs

    requests = LogRequests(run, stages, ranks, attempt) if request else None
    if requests is not None and not follow:
        _request_logs(run, requests, wait=True)
    # Earlier attempts can be long: the last lines are those of the newest attempt.
    newest = {
        stage: max((attempt.number for attempt in run.attempts(stage)), default=0)
        for stage in (stages if lines or single else ())
    }
    merged = MergedLogs(run, stages, lambda rank: ranks is None or rank in ranks, newest, attempt)
    rank = max(ranks) if single and ranks else None  # the only one
    if not merged.any_file() and not _may_get_log(run, stages[-1], attempt, rank, follow):
        return
    printer = _Printer(run)
    for ended in _until_ended(run) if follow else [True]:
        rank_lines = merged.poll_last(lines, ended) if lines else merged.poll(ended)
        lines = None  # for the first look
        _echo(printer.texts(rank_lines, prefix=not single))
        if requests is not None and not ended:
            _request_logs(run, requests, wait=False)


def _may_get_log(
    run: RunDir, stage: Stage, attempt: int | None, rank: int | None, follow: bool
) -> bool:
    """Whether workers without a log, or the only one, may get one; False if it printed nothing.

    Raises:
        RunError: There are no such workers, or the log is still on its node.
    """
    from slurmllm.errors import RunError, StorageError
    from slurmllm.run.records import NodeRecord
    from slurmllm.status.logs import newest_attempt, ranks_with_logs
    from slurmllm.supervise.log_files import node_of

    record: AttemptRecord | None = None
    with suppress(StorageError):
        record = newest_attempt(run, (stage,), attempt)
    node = node_of(record, rank) if record is not None and rank is not None else ""
    if follow and (rank is None or record is None or node):
        return True
    numbers = [attempt.number for attempt in run.attempts(stage)]
    if attempt is not None and attempt not in numbers:
        others = f"there are 0–{numbers[-1]}" if numbers else "there is none yet"
        raise RunError(f"{stage} attempt {attempt} of {run.name}: {others}")
    number = max(numbers, default=0) if attempt is None else attempt
    if not (rank and node):
        ranks = ranks_with_logs(run, stage, number)
        others = f"; those with one are {ranks[0]}–{ranks[-1]}" if ranks else ""
        raise RunError(
            f"none of these workers of {run.name} wrote a log{others}; see {run.logs}, and "
            f"`slurmllm status {run.name}` for whether it has started"
        )
    worker = f"rank {rank} on {node}, {stage} attempt {number}"
    with suppress(StorageError):
        node_record = NodeRecord.find(run.attempt(stage, number).node(node))
        # Its launcher has collected the logs.
        if node_record is not None and rank in node_record.exit_codes:
            click.echo(f"{worker}: it printed nothing", err=True)
            return False
    raise RunError(
        f"{worker}: its log is on the disk of {node}, whose launcher has not collected it; the "
        f"next attempt on {node} does"
    )


def _request_logs(run: RunDir, requests: LogRequests, wait: bool) -> None:
    """Ask a running attempt for logs; warn if they are not there in time.

    Args:
        wait: Whether to wait until they are in the run directory or the attempt has ended.
    """
    from slurmllm.errors import SlurmError, StorageError
    from slurmllm.slurm.client import SlurmClient
    from slurmllm.status.logs import ANSWER_S
    from slurmllm.status.runs import is_active
    from slurmllm.supervise.log_files import node_of

    try:
        if record := requests.ask(lambda: is_active(run, SlurmClient())):
            attempt = f"{record.stage} attempt {record.attempt}"
            click.echo(f"asking the nodes of {attempt} for logs on their disks", err=True)
        while missing := requests.awaited():
            if (record := requests.pending) and time.monotonic() > requests.deadline:
                nodes = list(dict.fromkeys(node_of(record, rank) for rank in missing))
                ranks = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
                click.echo(
                    f"no answer from {' '.join(nodes[:8])} within {ANSWER_S:.0f} s: without the "
                    f"logs of rank {ranks}, which are collected when the attempt ends",
                    err=True,
                )
                requests.pending = None
            if not wait:
                break
            time.sleep(_LOOK_S)
    except (SlurmError, StorageError) as error:
        click.echo(f"cannot ask for logs on the disks of the nodes: {error}", err=True)


def _echo(texts: Iterable[str]) -> None:
    texts = iter(texts)
    while block := list(islice(texts, _LINES_AT_ONCE)):
        click.echo("\n".join(block))


def _coloured(text: str) -> str:
    """Return a line in the colour of its level; click removes colours unless on a terminal."""
    from slurmllm.log import parse_line

    record = parse_line(text)
    style = _LEVELS.get(record.level) if record is not None else None
    return text if style is None else click.style(text, **style)


class _Printer:
    """Lines in their colours, and with `[rank 3 node-b]` and a heading for each attempt."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.attempt: tuple[Stage, int] | None = None  # of the last line
        self.records: dict[tuple[Stage, int], AttemptRecord] = {}
        self.width = 0

    def texts(self, lines: Iterable[RankLine], prefix: bool) -> Iterator[str]:
        from slurmllm.supervise.log_files import node_of

        for line in lines:
            if not prefix:
                yield _coloured(line.text)
                continue
            if self.attempt != line[:2]:
                self.attempt = line[:2]
                yield click.style(f"── {line.stage} attempt {line.attempt}", bold=True)
            record = self._record_of(line.stage, line.attempt)
            node = "" if record is None else node_of(record, line.rank)
            label = f"[rank {line.rank}{' ' + node if node else ''}]"
            self.width = max(self.width, len(label))
            label = click.style(label.ljust(self.width), fg=_COLOURS[line.rank % len(_COLOURS)])
            yield f"{label} {_coloured(line.text)}".rstrip()

    def _record_of(self, stage: Stage, attempt: int) -> AttemptRecord | None:
        """Return the record of an attempt, read once; None if it is not written yet."""
        from slurmllm.errors import StorageError
        from slurmllm.run.records import AttemptRecord

        if (stage, attempt) not in self.records:
            with suppress(StorageError):
                path = self.run.attempt(stage, attempt).record
                self.records[stage, attempt] = AttemptRecord.load(path)
        return self.records.get((stage, attempt))


def _stacks(run: RunDir, rank: int | None) -> str:
    """Return the stacks of the last attempt that hung, those that differ from the others first."""
    from slurmllm.errors import RunError
    from slurmllm.supervise.first_failure import outliers, read_stacks, stack_location

    hung = [attempt for attempt in run.attempts("train") if attempt.stacks(0).parent.is_dir()]
    if not hung:
        raise RunError(f"{run.name} has no stacks: no attempt of it has hung")
    attempt = hung[-1]
    dumps = read_stacks(attempt)
    if not dumps:
        raise RunError(f"{run.name} has no stacks that can be read; see {attempt.path}")
    if rank is not None and rank not in dumps:
        ranks = ", ".join(map(str, sorted(dumps)))
        raise RunError(f"rank {rank}: no stacks in attempt {attempt.number}; there are {ranks}")
    differing = outliers({rank: stack_location(dump) for rank, dump in dumps.items()})
    parts = []
    for shown in [rank] if rank is not None else [*differing, *sorted({*dumps} - {*differing})]:
        mark = ", differs from the others" if shown in differing else ""
        parts.append(f"attempt {attempt.number}, rank {shown}{mark}\n{dumps[shown].rstrip()}\n")
    return "\n".join(parts)


def _print_failures(
    run: RunDir, stages: tuple[Stage, ...], attempt: int | None, lines: int, follow: bool
) -> None:
    """Print the first failing worker of an attempt; when following, of every failed attempt."""
    from slurmllm.errors import RunError
    from slurmllm.supervise.first_failure import culprit, failed_attempts

    printed: set[tuple[Stage, int]] = set()
    for ended in _until_ended(run) if follow else [True]:
        # More may be written about an attempt that is failing until it has ended: --follow waits.
        records = [
            record
            for record in failed_attempts(run, stages if attempt is None else stages[-1:])
            if attempt in (None, record.attempt) and (ended or record.ending is not None)
        ]
        if records and (records[-1].stage, records[-1].attempt) not in printed:
            printed.add((records[-1].stage, records[-1].attempt))
            _print_culprit(run, culprit(run, records[-1]), lines)
    if not printed and follow:
        click.echo(f"no attempt of {run.name} has failed")
    elif not printed:
        if attempt is None:
            raise RunError(f"no attempt of {run.name} has failed; see `slurmllm status`")
        raise RunError(f"attempt {attempt} of {run.name} has not failed; see `slurmllm status`")


def _print_culprit(run: RunDir, culprit: Culprit, lines: int) -> None:
    from slurmllm.supervise.first_failure import last_lines, log_of

    record = culprit.record
    action = f" → {record.action}" if record.action else ""
    ending = f"{record.ending or 'failing'}{action}"
    click.secho(f"{run.name}, {record.stage} attempt {record.attempt}: {ending}", bold=True)
    for line in record.evidence:
        click.echo(f"  {line}")
    if culprit.rank is None:
        click.echo(f"no single worker failed first; see `slurmllm logs {run.name} --all-ranks`")
        return
    node = f" on {culprit.node}" if culprit.node else ""
    click.secho(f"first failing worker: rank {culprit.rank}{node}", fg="red", bold=True)
    for line in culprit.how:
        click.echo(f"  {line}")
    if (failure := culprit.failure) is not None:
        step = f" after step {failure.step}" if failure.step is not None else ""
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure.time))
        click.echo(f"  {at}{step}, blame: {failure.blame}")
        click.echo(f"  {failure.error}: {failure.message}")
        if failure.traceback.strip():
            click.echo(failure.traceback.rstrip())
    if culprit.stacks:
        click.echo(f"  stacks of all workers: `slurmllm logs {run.name} --stacks`")
    texts = last_lines(run, record, culprit.rank, lines)
    log = log_of(run, record, culprit.rank)
    click.secho(f"last {len(texts)} lines of {log}" if texts else f"nothing in {log}", bold=True)
    _echo(map(_coloured, texts))


def _until_ended(run: RunDir) -> Iterator[bool]:
    """Yield whether the run has ended, checked before each read of the files."""
    from slurmllm.errors import SlurmError
    from slurmllm.slurm.client import SlurmClient
    from slurmllm.status.runs import is_active

    client, asked_at, unreachable, ended = SlurmClient(), float("-inf"), False, False
    while not ended:
        if time.monotonic() >= asked_at + _ASK_S:
            asked_at = time.monotonic()
            try:
                ended, unreachable = not is_active(run, client), False
            except SlurmError as error:  # slurmctld may be restarting
                if not unreachable:
                    click.echo(f"slurmctld is unreachable; retrying: {error}", err=True)
                unreachable = True
        yield ended
        if not ended:
            time.sleep(_LOOK_S)
