"""Which worker an attempt failed by: the first whose failure is its own, and what tells of it.

The order is that of `classify`: a hang that no failure came before, then what workers wrote down
before they failed, then how processes ended, then nodes that said nothing. What workers say who
only lost a peer is an echo, and taken where there is nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import NamedTuple

from slurmllm.error_patterns import meaning_of, telling_line
from slurmllm.errors import EXIT_OK, EXIT_REQUEUE
from slurmllm.log import message_of
from slurmllm.records import AttemptRecord, FailureRecord, HangRecord, NodeRecord
from slurmllm.rundir import AttemptDir, RunDir, Stage
from slurmllm.supervise.attempts import failure_records, load_attempts, node_records
from slurmllm.supervise.classify import reported_all
from slurmllm.supervise.log_files import GrowingLog, node_of

_NO_FAILURES = ("done", "advance_signal", "cancelled", "superseded")
_LAST_WORDS = 200  # lines in which a cause is looked for


@dataclass(frozen=True)
class Culprit:
    """The worker that an attempt failed by, as far as that is known.

    Attributes:
        record: The attempt's.
        rank: None where nothing tells which.
        node: Empty likewise.
        how: What is known of it, a line each.
        failure: What the worker wrote down.
        stacks: Whether the attempt left stacks, having hung.
    """

    record: AttemptRecord
    rank: int | None
    node: str
    how: tuple[str, ...]
    failure: FailureRecord | None = None
    stacks: bool = False


def failed_attempts(run: RunDir, stages: Sequence[Stage]) -> list[AttemptRecord]:
    """The attempts that failed or are failing, in the order of their starts."""
    found = [record for stage in stages for record in load_attempts(run, stage)]
    return sorted((one for one in found if _has_failed(run, one)), key=lambda r: r.started_at)


def _has_failed(run: RunDir, record: AttemptRecord) -> bool:
    if record.ending is not None:
        return record.ending not in _NO_FAILURES
    paths = run.attempt(record.stage, record.attempt)
    if paths.hang.is_file() or failure_records(run, record):
        return True
    return any(_bad(node_records(run, record)))


def culprit(run: RunDir, record: AttemptRecord) -> Culprit:
    """Who an attempt failed by.

    Raises:
        StorageError: one of its records is damaged.
    """
    nodes, failures = node_records(run, record), failure_records(run, record)
    own = [f for f in failures if meaning_of(f"{f.error} {f.message}") != "lost_peer"]
    first = min(own, key=lambda failure: failure.time, default=None)
    hang_path = run.attempt(record.stage, record.attempt).hang
    if hang_path.is_file() and record.ending in (None, "hang"):
        hang = HangRecord.load(hang_path)
        if first is None or first.time >= hang.found_at:
            return _hung(run, record, hang)
    silent = [name for name in record.nodes if not reported_all(nodes.get(name))]
    lost = [name for name in silent if name in record.blamed_nodes]
    if lost and record.ending is not None:
        return _silent(run, record, lost)
    if first is not None:
        return Culprit(record, first.rank, first.node, _exit(nodes, first.rank), first)
    spoken = {failure.rank for failure in failures}
    unspoken = [one for one in _bad(nodes) if one[0] not in spoken]
    if unspoken:
        rank, _, node = _most_telling(run, record, unspoken)
        return Culprit(record, rank, node, _exit(nodes, rank))
    if silent and record.ending is not None:
        return _silent(run, record, silent)
    echo = min(failures, key=lambda failure: failure.time, default=None)
    if echo is not None:
        how = ("it only lost a peer, and no other worker wrote down why",)
        return Culprit(record, echo.rank, echo.node, how, echo)
    return Culprit(record, None, "", ())


def log_of(run: RunDir, record: AttemptRecord, rank: int) -> Path:
    """The log that a worker of an attempt writes into."""
    if rank == 0:
        return run.stage_log(record.stage)
    return run.worker_log(record.stage, record.attempt, rank)


def last_lines(run: RunDir, record: AttemptRecord, rank: int, lines: int) -> list[str]:
    """The end of what a worker of an attempt printed; of rank 0, with the supervisor's words."""
    log = GrowingLog(log_of(run, record, rank))
    if rank != 0:
        log.skip_to_last(lines)
        return [*log.lines(), *log.flush()][-lines:]
    found: list[str] = []
    begin, following = (f"{record.stage} attempt {n}" for n in (record.attempt, record.attempt + 1))
    for text in (*log.lines(), *log.flush()):
        message = message_of(text)
        if message.startswith((f"{following}:", f"{following} ")):
            break
        if message.startswith((f"{begin}:", f"{begin} ")) and "→" not in message:
            found = []
        found.append(text)
    return found[-lines:]


def _bad(nodes: Mapping[str, NodeRecord]) -> list[tuple[int, int, str]]:
    """Rank, exit code and node of the workers that failed by themselves."""
    return [
        (rank, code, name)
        for name, node in nodes.items()
        for rank, code in sorted(node.exit_codes.items())
        if code not in (EXIT_OK, EXIT_REQUEUE) and rank not in node.stopped_ranks
    ]


def _most_telling(
    run: RunDir, record: AttemptRecord, bad: Sequence[tuple[int, int, str]]
) -> tuple[int, int, str]:
    """The one whose log names a cause; else the first that a signal ended, else the first."""
    for one in bad:
        told = telling_line(last_lines(run, record, one[0], _LAST_WORDS))
        if told is not None and told[1] != "lost_peer":
            return one
    return next((one for one in bad if one[1] < 0), bad[0])


def _exit(nodes: Mapping[str, NodeRecord], rank: int) -> tuple[str, ...]:
    for node in nodes.values():
        code = node.exit_codes.get(rank)
        if code is not None and code < 0:
            return (f"ended by {_signal(-code)}",)
        if code is not None:
            return (f"ended with exit code {code}",)
    return ()


def _signal(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"


def _hung(run: RunDir, record: AttemptRecord, hang: HangRecord) -> Culprit:
    places = read_places(run.attempt(record.stage, record.attempt))
    apart = standing_apart(places)
    rank = next(iter((*apart, *hang.behind)), None)
    how = [
        f"no progress for {hang.waited_s:.0f} s in phase {hang.phase} after step {hang.step} "
        f"(limit {hang.limit_s:.0f} s)"
    ]
    if hang.unresponsive_nodes:
        how.append(f"no sign of life from {', '.join(hang.unresponsive_nodes)}")
    if rank in places:
        how.append(f"it stood in {places[rank].words}")
    node = node_of(run, record.stage, record.attempt, rank) if rank is not None else ""
    return Culprit(record, rank, node, tuple(how), stacks=bool(places))


def _silent(run: RunDir, record: AttemptRecord, silent: Sequence[str]) -> Culprit:
    """A node that was lost: of its workers the first stands for all."""
    per_node = record.world_size // max(len(record.nodes), 1)
    rank = record.nodes.index(silent[0]) * per_node
    how = (f"no word from {', '.join(silent)}: its launcher did not live to report",)
    return Culprit(record, rank, silent[0], how)


# The frames of faulthandler and of py-spy.
_FAULTHANDLER = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+) in (?P<name>.+)')
_PY_SPY = re.compile(r"^\s+(?P<name>\S+) \((?P<path>[^:)]+):(?P<line>\d+)\)$")
# Where a worker stands that computes or waits for the others.
_TOGETHER = re.compile(r"/torch/|/torch_xla/|/neuronx_distributed/|slurmllm/backends/")
_MAX_LINES = 4


class Place(NamedTuple):
    """Where a worker's main thread stood.

    Attributes:
        words: For people.
        apart: Whether it neither computed nor waited for the others.
    """

    words: str
    apart: bool


def read_places(attempt: AttemptDir) -> dict[int, Place]:
    """Where the workers of a hung attempt stood, by rank."""
    folder = attempt.stacks(0).parent
    found = {}
    for path in sorted(folder.glob("rank_*.txt")) if folder.is_dir() else []:
        try:
            found[int(path.stem.removeprefix("rank_"))] = place(path.read_text(errors="replace"))
        except (OSError, ValueError):
            continue
    return found


def place(dump: str) -> Place:
    """Where the main thread of a worker stood, by its dump."""
    if dump.startswith("no answer"):
        return Place(dump.splitlines()[0], apart=True)
    # faulthandler puts the thread that took the signal, the main one, under "Current thread", and
    # the innermost frame first.
    main = dump.rpartition("Current thread")[2]
    frames = list(_FAULTHANDLER.finditer(main)) or list(_PY_SPY.finditer(main))
    if not frames:
        return Place("no Python frames", apart=False)
    inner = frames[0]
    words = f"{inner['name']} ({_short(inner['path'])}:{inner['line']})"
    own = next((frame for frame in frames if "slurmllm/" in frame["path"]), None)
    if own is not None and own is not inner:
        words += f" from {own['name']} ({_short(own['path'])}:{own['line']})"
    # With some frames of a library or a backend it is in the step that all make together.
    apart = not any(_TOGETHER.search(frame["path"]) for frame in frames)
    return Place(words, apart)


def standing_apart(places: Mapping[int, Place]) -> tuple[int, ...]:
    """The ranks that the others wait for; none where all or none stand apart."""
    apart = tuple(sorted(rank for rank, found in places.items() if found.apart))
    return apart if len(apart) < len(places) else ()


def evidence(places: Mapping[int, Place]) -> tuple[str, ...]:
    """A line for each worker that stands apart, else one of where most stand."""
    apart = standing_apart(places)
    lines = [f"rank {rank}: {places[rank].words}" for rank in apart[:_MAX_LINES]]
    if not apart and places:
        words = [found.words for found in places.values()]
        most = max(set(words), key=words.count)
        lines = [f"{words.count(most)} of {len(words)} workers: {most}"]
    return tuple(lines)


def _short(path: str) -> str:
    return "/".join(path.split("/")[-2:])
