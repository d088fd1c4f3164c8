"""`slurmllm logs RUN [-f]`: the logs of a run, and its first failing worker."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from pathlib import Path

    from slurmllm.records import AttemptRecord
    from slurmllm.rundir import RunDir, Stage
    from slurmllm.status.log_requests import LogRequests
    from slurmllm.status.logs import RankLine
    from slurmllm.supervise.first_failure import Culprit

_LOOK_S = 0.5  # between two reads of the files
_ASK_S = 5.0  # between two checks whether the run is active: they query slurmctld
_BLOCK_BYTES = 1024 * 1024
_FAILED_LINES = 30
_LINES_AT_ONCE = 256  # in a write: a flush for every line takes longer than the merge
# For launchers to notice a request: they look every 5 s, and NFS may hide a new file for half a
# minute.
_ANSWER_S = 90.0
_COLOURS = ("cyan", "green", "magenta", "blue")  # of ranks; yellow and red are levels
_LEVELS: dict[str, dict[str, Any]] = {
    "DEBUG": {"dim": True}, "WARNING": {"fg": "yellow"}, "ERROR": {"fg": "red"},
    "CRITICAL": {"fg": "red", "bold": True},
}  # fmt: skip


@click.command()
@click.argument("run", shell_complete=options.complete_run)
@click.option("-f", "--follow", is_flag=True, help="Print new lines until the run ends.")
@click.option("--stage", type=click.Choice(["precompile", "train"]), help="Only this stage.")
@click.option(
    "--attempt", type=click.IntRange(min=0),
    help="Only this attempt, of the train stage unless --stage is given.",
)  # fmt: skip
@click.option(
    "--rank", type=click.IntRange(min=0),
    help="The log of one worker, of the last attempt unless --attempt is given.",
)  # fmt: skip
@click.option(
    "--ranks", metavar="LIST", help="Merge the logs of several workers, such as 0,3,8-11."
)
@click.option(
    "--all-ranks", is_flag=True, help="Merge the logs of all workers; each line has its rank."
)
@click.option(
    "--failed", is_flag=True,
    help="Error and last lines of the first worker that failed in the last failed attempt.",
)  # fmt: skip
@click.option("--stacks", is_flag=True, help="Show the workers' stack traces of the last hang.")
@click.option(
    "-n", "--lines", type=click.IntRange(min=1), metavar="N",
    help="Only the last N lines of each log.",
)  # fmt: skip
@options.runs_dir
def logs(
    *, run: str, follow: bool, stage: Stage | None, attempt: int | None, rank: int | None,
    ranks: str | None, all_ranks: bool, failed: bool, stacks: bool, lines: int | None,
    runs_dir: Path,
) -> None:  # fmt: skip
    """Print the logs of RUN: precompile stage, then train stage.

    The log of a stage has the output of the batch script, the supervisor and rank 0. Logs of
    several ranks are merged by time within each attempt; a line without a time follows the line
    before it in its file.

    While an attempt runs, the logs of workers other than rank 0 are on the disks of their nodes.
    --rank, --ranks and --all-ranks have them copied into the run directory until it ends.

    -f goes on with later attempts. It prints all ranks whose logs are in the run directory, unless
    --rank, --ranks, --all-ranks or --failed is given.
    """
    from slurmllm.errors import EXIT_INTERRUPTED, RunError, UserError
    from slurmllm.rundir import find_run
    from slurmllm.status.log_requests import LogRequests

    chosen = {"--rank": rank is not None, "--ranks": ranks is not None, "--all-ranks": all_ranks,
              "--failed": failed}  # fmt: skip
    if sum(chosen.values()) > 1:
        given_options = " and ".join(name for name, given in chosen.items() if given)
        raise UserError(f"{given_options}: each selects workers; give one of them")
    others = {"--ranks": ranks, "--all-ranks": all_ranks or None, "--failed": failed or None,
              "-f": follow or None, "--stage": stage, "--attempt": attempt,
              "-n": lines}  # fmt: skip
    if stacks and (given := [name for name, value in others.items() if value is not None]):
        raise UserError(
            f"--stacks shows the last hang and combines only with --rank; leave out "
            f"{' and '.join(given)}"
        )
    found = find_run(run, runs_dir)
    stages: tuple[Stage, ...] = ("precompile", "train") if stage is None else (stage,)
    try:
        if stacks:
            click.echo(_stacks(found, rank), nl=False)
        elif failed:
            _Failures(found, stages, attempt, lines or _FAILED_LINES).run(follow)
        elif all_ranks or ranks is not None or (follow and rank is None):
            among = None if ranks is None else _among(ranks)
            wanted = (lambda _: True) if among is None else among.__contains__
            asked = stages if attempt is None else stages[-1:]
            # A plain -f may be of thousands of workers, and few of them print anything.
            requests = LogRequests(found, asked, among, attempt) if among or all_ranks else None
            if not follow:
                _wait_for_logs(found, requests)
            _merge(found, stages, attempt, wanted, lines, follow, requests, prefix=True)
        elif rank or attempt is not None:
            only = rank or 0
            stages = stages[-1:]
            requests = LogRequests(found, stages, frozenset({only}), attempt)
            if not follow:
                _wait_for_logs(found, requests)
            if only and not _require_log(found, stages[0], attempt, only, follow):
                return
            _merge(
                found, stages, attempt, lambda one: one == only, lines, follow, requests, last=True
            )
        else:
            paths = [found.stage_log(name) for name in stages]
            if not any(path.is_file() for path in paths):
                raise RunError(
                    f"{found.name} has no logs yet: its jobs are pending; see `slurmllm status "
                    f"{found.name}`"
                )
            for path in paths:
                _print(path, lines)
    except KeyboardInterrupt:  # the usual way to leave
        if not follow:
            raise
        click.get_current_context().exit(EXIT_INTERRUPTED)


def _among(ranks: str) -> frozenset[int]:
    """`0,3,8-11` → the ranks."""
    from slurmllm.errors import UserError

    found: set[int] = set()
    for part in ranks.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UserError(f"--ranks {ranks}: {part!r} is not a rank; write such as 0,3,8-11")
        if dash and int(last) < int(first):
            raise UserError(
                f"--ranks {ranks}: {part!r} ends before it begins; write {last}-{first}"
            )
        if int(last or first) >= 1_000_000:  # a slip of the keyboard would fill the memory
            raise UserError(f"--ranks {ranks}: {part!r}: a rank is below 1000000")
        found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _require_log(run: RunDir, stage: Stage, attempt: int | None, rank: int, follow: bool) -> bool:
    """Whether a worker has a log, by default in the last attempt; False if it printed nothing.

    Raises a RunError if there is no such worker, or its log is still on its node.
    """
    from slurmllm.errors import RunError, StorageError
    from slurmllm.status.log_requests import newest_attempt, printed_nothing
    from slurmllm.status.logs import ranks_with_logs
    from slurmllm.supervise.log_files import node_of

    attempts = [one.number for one in run.attempts(stage)]
    number = attempt if attempt is not None else max(attempts, default=None)
    there = ranks_with_logs(run, stage, number) if number is not None else []
    record: AttemptRecord | None = None
    with suppress(StorageError):
        record = newest_attempt(run, (stage,), attempt)
    known = record is not None and rank < record.world_size
    running = record is not None and record.ended_at is None
    if rank in there or (follow and (not there or (known and running))):
        return True
    if record is not None and known:
        node = node_of(run, stage, record.attempt, rank)
        worker = f"rank {rank} on {node}, {stage} attempt {record.attempt}"
        if printed_nothing(run, record, rank):
            click.echo(f"{worker}: it printed nothing", err=True)
            return False
        raise RunError(
            f"{worker}: its log is on the disk of {node}, whose launcher has not collected it; the "
            f"next attempt on {node} does"
        )
    of = f" in attempt {number}" if number is not None else ""
    those = f"; those with one are {there[0]}–{there[-1]}" if there else ""
    raise RunError(f"rank {rank}: no worker of {run.name} wrote a log{of}{those}; see {run.logs}")


def _ask(run: RunDir, requests: LogRequests) -> AttemptRecord | None:
    """Ask a running attempt for logs; returns its record if they are not there yet."""
    from slurmllm.errors import SlurmError, StorageError
    from slurmllm.slurm.client import SlurmClient
    from slurmllm.status.runs import is_active

    try:
        record = requests.ask(lambda: is_active(run, SlurmClient()))
    except (SlurmError, StorageError) as error:
        click.echo(f"cannot ask for logs on the disks of the nodes: {error}", err=True)
        return None
    if record is not None:
        click.echo(
            f"asking the nodes of {record.stage} attempt {record.attempt} for logs on their disks",
            err=True,
        )
    return record


def _wait_for_logs(run: RunDir, requests: LogRequests | None) -> None:
    """Ask for logs, and wait until they are in the run directory or the attempt has ended."""
    from slurmllm.records import AttemptRecord

    record = _ask(run, requests) if requests is not None else None
    if record is None or requests is None:
        return
    path, deadline = run.attempt(record.stage, record.attempt).record, time.monotonic() + _ANSWER_S
    while requests.missing(record) and AttemptRecord.load(path).ended_at is None:
        if time.monotonic() > deadline:
            _warn_of_missing(run, requests, record)
            return
        time.sleep(_LOOK_S)


def _warn_of_missing(run: RunDir, requests: LogRequests, record: AttemptRecord) -> None:
    from slurmllm.supervise.log_files import node_of

    missing = requests.missing(record)
    nodes = dict.fromkeys(node_of(run, record.stage, record.attempt, rank) for rank in missing)
    ranks, names = ", ".join(map(str, missing[:8])), " ".join(list(nodes)[:8])
    more = " …" if len(missing) > 8 else ""
    click.echo(
        f"no answer from {names} within {_ANSWER_S:.0f} s: without the logs of rank {ranks}{more}, "
        "which are collected when the attempt ends",
        err=True,
    )


def _merge(
    run: RunDir, stages: tuple[Stage, ...], attempt: int | None, wanted: Callable[[int], bool],
    lines: int | None, follow: bool, requests: LogRequests | None, prefix: bool = False,
    last: bool = False,
) -> None:  # fmt: skip
    """Print the logs of several workers, or of one of the last attempt."""
    from slurmllm.errors import RunError
    from slurmllm.status.logs import MergedLogs

    if attempt is not None:
        stages = stages[-1:]
        there = [one.number for one in run.attempts(stages[0])]
        if attempt not in there and not follow:
            known = f"there are 0–{there[-1]}" if there else "there is none yet"
            raise RunError(f"{stages[0]} attempt {attempt} of {run.name}: {known}")
    newest = {stage: max((a.number for a in run.attempts(stage)), default=0) for stage in stages}
    # Earlier attempts can be long: the last lines are those of the newest attempt.
    merged = MergedLogs(run, stages, wanted, newest if last or lines else {}, attempt)
    if lines is not None:
        merged.begin_with_last(lines)
    found = merged.poll(last=not follow)
    if lines:
        # The last lines of every worker, in the order of all lines.
        last_lines: dict[tuple[Stage, int, int], deque[tuple[int, RankLine]]] = {}
        for place, line in enumerate(found):
            last_lines.setdefault(line[:3], deque(maxlen=lines)).append((place, line))
        kept = sorted(chain.from_iterable(last_lines.values()), key=itemgetter(0))
        found = iter([line for _, line in kept])
    printer = _Printer(run, prefix)
    if not follow and not merged.any_file():
        raise RunError(
            f"none of these workers of {run.name} wrote a log; see {run.logs}, and "
            f"`slurmllm status {run.name}` for whether it has started"
        )
    printer.print(found)
    asked: AttemptRecord | None = None
    asked_at = 0.0
    for ended in _until_ended(run) if follow else ():
        printer.print(merged.poll(last=ended))
        if requests is None or ended:
            continue
        if new := _ask(run, requests):
            asked, asked_at = new, time.monotonic()
        if asked is not None and time.monotonic() > asked_at + _ANSWER_S:
            if requests.missing(asked):
                _warn_of_missing(run, requests, asked)
            asked = None


def _coloured(text: str) -> str:
    """A line in the colour of its level; click removes colours where the output has none."""
    from slurmllm.log import parse_line

    record = parse_line(text)
    style = _LEVELS.get(record.level) if record is not None else None
    return text if style is None else click.style(text, **style)


class _Printer:
    """Prints lines, if wanted with `[rank 3 node-b]` and a heading for each attempt."""

    def __init__(self, run: RunDir, prefix: bool) -> None:
        self.run, self.prefix = run, prefix
        self.attempt: tuple[Stage, int] | None = None
        self.known: dict[tuple[Stage, int, int], str] = {}
        self.records: dict[tuple[Stage, int], AttemptRecord] = {}
        self.width = 0

    def print(self, lines: Iterable[RankLine]) -> None:
        texts = self._texts(lines)
        while block := list(islice(texts, _LINES_AT_ONCE)):
            click.echo("\n".join(block))

    def _texts(self, lines: Iterable[RankLine]) -> Iterator[str]:
        from slurmllm.supervise.log_files import worker_node

        for line in lines:
            if not self.prefix:
                yield _coloured(line.text)
                continue
            if self.attempt != line[:2]:
                self.attempt = line[:2]
                yield click.style(f"── {line.stage} attempt {line.attempt}", bold=True)
            label = self.known.get(line[:3])
            if label is None:
                record = self._record_of(line.stage, line.attempt)
                node = "" if record is None else worker_node(record, line.rank)
                label = f"[rank {line.rank}{' ' + node if node else ''}]"
                if node:  # unknown until the record of a new attempt is written
                    self.known[line[:3]] = label
                self.width = max(self.width, len(label))
            label = click.style(label.ljust(self.width), fg=_COLOURS[line.rank % len(_COLOURS)])
            yield f"{label} {_coloured(line.text)}".rstrip()

    def _record_of(self, stage: Stage, attempt: int) -> AttemptRecord | None:
        """The record of an attempt, read once for all its workers; None if it is missing."""
        from slurmllm.errors import StorageError
        from slurmllm.records import AttemptRecord

        if (stage, attempt) not in self.records:
            try:
                record = AttemptRecord.load(self.run.attempt(stage, attempt).record)
            except StorageError:  # not written yet
                return None
            self.records[stage, attempt] = record
        return self.records[stage, attempt]


def _stacks(run: RunDir, rank: int | None) -> str:
    """The stacks of the last attempt that hung, those that differ from the others first."""
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
        known = ", ".join(map(str, sorted(dumps)))
        raise RunError(f"rank {rank}: no stacks in attempt {attempt.number}; there are {known}")
    apart = outliers({rank: stack_location(dump) for rank, dump in dumps.items()})
    ranks = [rank] if rank is not None else [*apart, *sorted(set(dumps) - set(apart))]
    parts = []
    for shown in ranks:
        mark = ", differs from the others" if shown in apart else ""
        parts.append(f"attempt {attempt.number}, rank {shown}{mark}\n{dumps[shown].rstrip()}\n")
    return "\n".join(parts)


class _Failures:
    """Prints the first failing worker of an attempt; when following, of every failed attempt."""

    def __init__(
        self, run: RunDir, stages: tuple[Stage, ...], attempt: int | None, lines: int
    ) -> None:
        self.found, self.lines = run, lines
        self.stages = stages if attempt is None else stages[-1:]
        self.attempt = attempt
        self.printed: set[tuple[Stage, int]] = set()

    def run(self, follow: bool) -> None:
        from slurmllm.errors import RunError

        if not self._print_last(open_too=not follow) and not follow:
            of = f"attempt {self.attempt}" if self.attempt is not None else "no attempt"
            verb = "has not failed" if self.attempt is not None else "has failed"
            raise RunError(f"{of} of {self.found.name} {verb}; see `slurmllm status`")
        for ended in _until_ended(self.found) if follow else ():
            self._print_last(open_too=ended)
        if follow and not self.printed:
            click.echo(f"no attempt of {self.found.name} has failed")

    def _print_last(self, open_too: bool) -> bool:
        # More may be written about an attempt that is failing until it has ended: --follow waits.
        from slurmllm.supervise.first_failure import culprit, failed_attempts

        failed = [
            record
            for record in failed_attempts(self.found, self.stages)
            if self.attempt in (None, record.attempt) and (open_too or record.ending is not None)
        ]
        if not failed or (failed[-1].stage, failed[-1].attempt) in self.printed:
            return False
        self.printed.add((failed[-1].stage, failed[-1].attempt))
        self._print(culprit(self.found, failed[-1]))
        return True

    def _print(self, found: Culprit) -> None:
        from slurmllm.supervise.first_failure import last_lines, log_of

        record, name = found.record, self.found.name
        action = f" → {record.action}" if record.action else ""
        ending = f"{record.ending or 'failing'}{action}"
        click.secho(f"{name}, {record.stage} attempt {record.attempt}: {ending}", bold=True)
        for line in record.evidence:
            click.echo(f"  {line}")
        if found.rank is None:
            click.echo(f"no single worker failed first; see `slurmllm logs {name} --all-ranks`")
            return
        node = f" on {found.node}" if found.node else ""
        click.secho(f"first failing worker: rank {found.rank}{node}", fg="red", bold=True)
        for line in found.how:
            click.echo(f"  {line}")
        if (failure := found.failure) is not None:
            step = f" after step {failure.step}" if failure.step is not None else ""
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure.time))
            click.echo(f"  {at}{step}, blame: {failure.blame}")
            click.echo(f"  {failure.error}: {failure.message}")
            if failure.traceback.strip():
                click.echo(failure.traceback.rstrip())
        if found.stacks:
            click.echo(f"  stacks of all workers: `slurmllm logs {name} --stacks`")
        lines = last_lines(self.found, record, found.rank, self.lines)
        log = log_of(self.found, record, found.rank)
        heading = f"last {len(lines)} lines of {log}" if lines else f"nothing in {log}"
        click.secho(heading, bold=True)
        for line in lines:
            click.echo(_coloured(line))


def _until_ended(run: RunDir) -> Iterator[bool]:
    """Yields whether the run has ended, checked before each read of the files."""
    from slurmllm.errors import SlurmError
    from slurmllm.slurm.client import SlurmClient
    from slurmllm.status.runs import is_active

    client, asked_at, unreachable = SlurmClient(), float("-inf"), False
    while True:
        ended = False
        if time.monotonic() >= asked_at + _ASK_S:
            asked_at = time.monotonic()
            try:
                ended, unreachable = not is_active(run, client), False
            except SlurmError as error:  # slurmctld may be restarting
                if not unreachable:
                    click.echo(f"slurmctld is unreachable; retrying: {error}", err=True)
                unreachable = True
        yield ended
        if ended:
            return
        time.sleep(_LOOK_S)


def _print(path: Path, lines: int | None) -> None:
    """Print a file, or its last lines; on a terminal in the colours of the levels."""
    from codecs import getincrementaldecoder

    from slurmllm.safe_files import open_regular
    from slurmllm.supervise.log_files import GrowingLog, start_of_last

    if not path.is_file():
        return
    begin = start_of_last(path, lines) if lines is not None else 0  # bytes
    if sys.stdout.isatty():
        log = GrowingLog(path, begin)
        for line in chain(log.lines(), log.flush()):
            click.echo(_coloured(line))
        return
    # A block may end within a character; a pipe gets the bytes of the log, controls included.
    decoder = getincrementaldecoder("utf-8")(errors="replace")
    with open_regular(path) as stream:
        stream.seek(begin)
        while block := stream.read(_BLOCK_BYTES):
            click.echo(decoder.decode(block), nl=False)
        click.echo(decoder.decode(b"", final=True), nl=False)
