"""What the ranks of a hang wait for: torch's Flight Recorder and NCCL's RAS, where they answer.

The launchers collect what `blocked` and `ras_lines` read. torch's own analyzer
(torch/distributed/flight_recorder, `torchfrtrace`) needs torch and records from the first step on;
`logs --stacks` runs it. This reading needs neither, as supervisors hold the nodes meanwhile.
"""

from __future__ import annotations

import pickle
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from slurmllm.core.format import printable
from slurmllm.core.run.flight_recorder import (
    Operation,
    Recording,
    dump_prefixes,
    read_dump,
    read_recording,
    request_dump,
    shortened,
)
from slurmllm.core.run.records import Lines
from slurmllm.core.run.rundir import AttemptDir, read_all
from slurmllm.core.run.safe_files import read_limited, write_whole
from slurmllm.launch.supervise.stacks import ranks_text

_DUMPS_S = 4.0  # torch looks at its pipe once a second
_RAS = "localhost:28028"  # NCCL_RAS_ADDR's default
_RAS_S = 4.0  # for peers to answer NCCL, which adds up to five
_RAS_BYTES = 1 << 20
_MAX_LINES = 4
_ANALYZER = "torch.distributed.flight_recorder.fr_trace"
_ANALYZER_S = 300.0  # it imports torch
# Of RAS's report: what follows the headings (NCCL 2.24 to 2.31, src/ras/client_support.cc)
_RAS_PROBLEMS = re.compile(r"^(?:Errors|Warnings)\n=+\n(.*?)(?=^\w+\n=+\n|\Z)", re.M | re.S)


class Blocked(NamedTuple):
    """What a hang waits for."""

    lines: Lines = ()
    ranks: tuple[int, ...] = ()  # for which the others wait


def collect_dumps(
    attempt: AttemptDir, environment: Mapping[str, str], since: float, on_request: bool = True
) -> None:
    """Store the dumps of a node's ranks that are newer than `since`, Unix time, s.

    Without `on_request`, those that torch made by itself, after a time-out of a collective.
    """
    pipe, dump = dump_prefixes(environment)
    ranks = _ranks(dump)
    if on_request:
        since = time.time() - 1.0  # a file system's clock may be coarse
        ranks = {rank for rank in _ranks(pipe, ".pipe") if request_dump(Path(f"{pipe}{rank}.pipe"))}
    deadline = time.monotonic() + _DUMPS_S
    while ranks:
        for rank in sorted(ranks):
            # What is not there yet, or half a dump, is read again.
            with suppress(OSError, ValueError):
                path = Path(f"{dump}{rank}")
                if path.stat().st_mtime >= since:
                    write_whole(
                        attempt.collectives(rank), shortened(read_dump(path)), durable=False
                    )
                    ranks.remove(rank)
        if not on_request or time.monotonic() > deadline:
            break
        time.sleep(0.1)


def _ranks(prefix: str, ending: str = "") -> set[int]:
    """Return the ranks of the files `<prefix><rank><ending>`."""
    folder, name = Path(prefix).parent, Path(prefix).name
    files = folder.glob(f"{name}*{ending}") if prefix else ()
    numbers = (path.name.removeprefix(name).removesuffix(ending) for path in files)
    return {int(number) for number in numbers if number.isdigit()}


def query_ras(attempt: AttemptDir, address: str | None = None) -> None:
    """Store what NCCL's RAS reports of the job, if it answers on this node."""
    host, _, port = (address or _RAS).rpartition(":")
    reply = b""
    with suppress(OSError, ValueError):
        with socket.create_connection((host.strip("[]"), int(port)), 1.0) as connection:
            connection.settimeout(1.0)
            stream = connection.makefile("rb")
            for command in (b"CLIENT PROTOCOL 2", b"TIMEOUT %d" % _RAS_S):
                connection.sendall(command + b"\n")
                stream.readline(1000)
            connection.settimeout(_RAS_S + 5.0)
            connection.sendall(b"VERBOSE STATUS\n")
            reply = stream.read(_RAS_BYTES)
        write_whole(attempt.ras, reply, durable=False)


def ras_report(attempt: AttemptDir) -> str:
    """Return what NCCL's RAS reported; empty if it did not answer."""
    try:
        report = read_limited(attempt.ras, _RAS_BYTES).decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(map(printable, report.split("\n")))


def ras_lines(attempt: AttemptDir) -> Lines:
    """Return a line with the problems that NCCL's RAS reported, if any."""
    problems = "\n".join(_RAS_PROBLEMS.findall(ras_report(attempt))).split("\n")
    lines = [line.strip() for line in problems if line.strip()]
    return (f"NCCL RAS: {'; '.join(lines[:8])}"[:600],) if lines else ()


def read_recordings(attempt: AttemptDir) -> dict[int, Recording]:
    """Return what the ranks of an attempt recorded, as far as it can be read."""
    folder = attempt.collectives(0).parent

    def read(path: Path) -> tuple[int, Recording] | None:
        with suppress(OSError, ValueError):
            return int(path.name.removeprefix("rank_")), read_recording(path)
        return None

    paths = sorted(folder.glob("rank_*")) if folder.is_dir() else []
    return dict(pair for pair in read_all(read, paths) if pair is not None)


def read_blocked(attempt: AttemptDir, world_size: int) -> Blocked:
    """Return what an attempt's ranks wait for, by what torch and NCCL recorded."""
    by_torch = blocked(read_recordings(attempt), world_size)
    return by_torch._replace(lines=by_torch.lines + ras_lines(attempt))


def blocked(recordings: Mapping[int, Recording], world_size: int) -> Blocked:
    """Return what the ranks wait for, and the ranks for which they wait.

    A rank that has not joined an operation because it waits in another one is not the cause.
    """
    meetings: dict[object, dict[int, Operation]] = defaultdict(dict)
    busy = set()
    for rank, recording in recordings.items():
        first: dict[object, Operation] = {}
        for operation in recording.entries:
            if not operation.finished:
                first.setdefault((operation.process_group, operation.is_p2p), operation)
                busy.add(rank)
        for operation in first.values():
            group = operation.process_group[0]
            number = operation.peers if operation.is_p2p else operation.collective_seq_id
            meetings[group, recording.members(group), number][rank] = operation
    unfinished = [_meet(recordings, busy, waiting, world_size) for waiting in meetings.values()]
    # What explains the others: ranks that wait nowhere, at first where only such ranks are missing.
    causes: list[_Meeting] = []
    idle: set[int] = set()
    for meeting in sorted(unfinished, key=lambda meeting: len(meeting.missing) - len(meeting.idle)):
        if not idle.issuperset(meeting.idle):
            idle.update(meeting.idle)
            causes.append(meeting)
    unrecorded = [meeting for meeting in unfinished if meeting.unrecorded]
    chosen = (
        causes
        or unrecorded
        or [meeting for meeting in unfinished if meeting.differing]
        or unfinished
    )
    return Blocked(tuple(m.line() for m in chosen[:_MAX_LINES]), tuple(sorted(idle)))


@dataclass(frozen=True)
class _Meeting:
    """An operation in which ranks wait."""

    waiting: Mapping[int, Operation]  # as each rank recorded it
    members: int  # number of ranks that take part
    missing: Sequence[int]  # ranks that have not joined it …
    idle: Sequence[int]  # … and do not wait in another one
    unrecorded: Sequence[int]

    @property
    def differing(self) -> bool:
        operations = self.waiting.values()
        return not any(o.is_p2p for o in operations) and len({o.name for o in operations}) > 1

    def line(self) -> str:
        operation = next(iter(self.waiting.values()))
        group = f"of group {printable(operation.group)}"
        if self.differing:
            by_name = defaultdict(list)
            for rank, other in sorted(self.waiting.items()):
                by_name[f"{other.name}{other.caller}"].append(rank)
            texts = (f"{ranks_text(ranks)} in {name}" for name, ranks in by_name.items())
            return f"operations {operation.collective_seq_id} {group} differ: {'; '.join(texts)}"
        ranks = sorted(self.waiting)
        wait = "waits" if len(ranks) == 1 else "wait"
        number = "" if operation.is_p2p else f"{operation.collective_seq_id} "
        description = f"{printable(operation.name)} {number}{group}"
        if self.missing:
            have = "has" if len(self.missing) == 1 else "have"
            peers = ranks_text(ranks)
            if 2 < len(ranks) == self.members - len(self.missing):
                peers = f"the other {len(ranks)}"
            absent = f"{ranks_text(self.missing)} {have} not joined {description}"
            return f"{absent}; {peers} {wait} in it{operation.caller}"
        waits = f"{ranks_text(ranks)} {wait} in {description}{operation.caller}"
        if self.unrecorded:
            return f"{waits}; {ranks_text(self.unrecorded)} recorded nothing"
        # A kernel that has not begun: known if torch times the operations.
        states = {rank: other.state for rank, other in sorted(self.waiting.items())}
        if {*states.values()} == {"scheduled", "started"}:
            behind = [rank for rank, state in states.items() if state == "scheduled"]
            return f"{waits}; on the device of {ranks_text(behind)} it has not begun"
        return f"{waits}, which all have joined" if len(states) == self.members else waits


def _meet(
    recordings: Mapping[int, Recording],
    busy: Collection[int],
    waiting: Mapping[int, Operation],
    world_size: int,
) -> _Meeting:
    rank, operation = next(iter(waiting.items()))
    name, description = operation.process_group
    members = _members(recordings, rank, name, description, world_size)
    if operation.is_p2p:
        ordered = sorted(members)
        members = {ordered[peer] for peer in operation.peers if peer < len(ordered)} | {*waiting}
    missing = [
        member
        for member in sorted(members - waiting.keys())
        if member in recordings
        and (operation.is_p2p or recordings[member].is_before(name, operation.collective_seq_id))
    ]
    idle = [member for member in missing if member not in busy]
    return _Meeting(waiting, len(members), missing, idle, sorted(members - recordings.keys()))


def _members(
    recordings: Mapping[int, Recording], rank: int, name: str, description: str, world_size: int
) -> set[int]:
    """Return the ranks of a group; of gloo's (torch 2.13) those that are known to have used it."""
    if members := recordings[rank].members(name):
        return {*members}
    if description == "default_pg":
        return {*range(world_size)}
    return {rank for rank, recording in recordings.items() if recording.last_number(name)}


def torch_analysis(attempt: AttemptDir, world_size: int) -> str:
    """Return what torch's own analyzer says of an attempt's dumps, in a process with torch.

    It unpickles what it reads, so it gets copies of plain values. They begin at one operation of
    each group for all ranks, as it cannot compare others.
    """
    dumps = {}
    for rank in read_recordings(attempt):
        with suppress(OSError, ValueError):
            dumps[rank] = read_dump(attempt.collectives(rank))
    recordings = {rank: Recording.model_validate(dump) for rank, dump in dumps.items()}
    begin: dict[str, int] = defaultdict(int)
    for recording in recordings.values():
        of_rank: dict[str, int] = {}
        for operation in recording.entries:
            of_rank.setdefault(operation.process_group[0], operation.collective_seq_id)
        for name, number in of_rank.items():
            begin[name] = max(begin[name], number)
    with tempfile.TemporaryDirectory() as folder:
        for rank, dump in dumps.items():
            rows = [
                e for e in dump["entries"] if e["collective_seq_id"] >= begin[e["process_group"][0]]
            ]
            for index, row in enumerate(rows):
                name, description = row["process_group"]
                row["record_id"] = index
                members = sorted(_members(recordings, rank, name, description, world_size))
                group = {"name": name, "desc": description, "ranks": str(members)}
                dump["pg_config"][name] = group
            Path(folder, f"rank_{rank}").write_bytes(pickle.dumps({**dump, "entries": rows}))
        command = [sys.executable, "-P", "-m", _ANALYZER, "--allow-incomplete-ranks", folder]
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=_ANALYZER_S)
            return done.stdout + done.stderr
    return ""
