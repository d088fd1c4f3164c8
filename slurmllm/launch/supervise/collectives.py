"""What the ranks of a hang wait for: torch's Flight Recorder and NCCL's RAS, where they answer.

The launchers collect what `read_blocked` reads. torch's own analyzer
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
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from slurmllm.core.format import format_ranks, printable
from slurmllm.core.run.flight_recorder import (
    Operation,
    Recording,
    dump_prefixes,
    read_dump,
    request_dump,
)
from slurmllm.core.run.records import Lines
from slurmllm.core.run.rundir import AttemptDir, by_rank, read_ranks
from slurmllm.core.run.safe_files import read_limited, write_whole
from slurmllm.core.slurm.client import wait_for

_DUMPS_S = 4.0  # torch looks at its pipe once a second
_RAS = "localhost:28028"  # NCCL_RAS_ADDR's default
_RAS_S = 10.0  # NCCL waits five for peers, and adds up to five
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


def collect_dumps(attempt: AttemptDir, environment: Mapping[str, str], since: float) -> None:
    """Store new dumps of a node's ranks; if none listens, those after `since`, Unix time, s.

    Torch makes these by itself, after a time-out of a collective.
    """
    pipe, dump = dump_prefixes(environment)
    ranks = {rank for rank, path in by_rank(pipe, ".pipe").items() if request_dump(path)}
    # A file system's clock may be coarse.
    oldest, patience_s = (time.time() - 1.0, _DUMPS_S) if ranks else (since, 0.0)
    stored = set[int]()

    def store() -> bool:
        for rank, path in by_rank(dump).items():
            # What is not there yet, or half a dump, is read again.
            with suppress(OSError, ValueError):
                if rank not in stored and path.stat().st_mtime >= oldest:
                    content = read_dump(path).model_dump_json().encode()
                    write_whole(attempt.collectives(rank), content, durable=False)
                    stored.add(rank)
        return stored >= ranks

    wait_for(store, patience_s, 0.1)


def query_ras(attempt: AttemptDir, address: str | None = None) -> None:
    """Store what NCCL's RAS reports of the job, if it answers on this node."""
    host, _, port = (address or _RAS).rpartition(":")
    with suppress(OSError, ValueError):
        with socket.create_connection((host.strip("[]"), int(port)), _RAS_S) as connection:
            connection.sendall(b"VERBOSE STATUS\n")
            report = connection.makefile("rb").read(_RAS_BYTES)
        write_whole(attempt.ras, report, durable=False)


def ras_report(attempt: AttemptDir) -> str:
    """Return what NCCL's RAS reported; empty if it did not answer."""
    with suppress(OSError):
        report = read_limited(attempt.ras, _RAS_BYTES).decode(errors="replace")
        return "\n".join(map(printable, report.split("\n")))
    return ""


def read_recordings(attempt: AttemptDir) -> dict[int, Recording]:
    """Return what the ranks of an attempt recorded, as far as it can be read."""
    return read_ranks(attempt.collectives, Recording.load)


def read_blocked(attempt: AttemptDir, world_size: int) -> Blocked:
    """Return what an attempt's ranks wait for, by what torch and NCCL recorded."""
    lines, ranks = blocked(read_recordings(attempt), world_size)
    problems = "\n".join(_RAS_PROBLEMS.findall(ras_report(attempt))).split("\n")
    if by_nccl := "; ".join(filter(None, map(str.strip, problems))):
        lines += (f"NCCL RAS: {by_nccl:.600}",)
    return Blocked(lines, ranks)


class _Meeting(NamedTuple):
    """An operation in which ranks wait."""

    order: tuple[int, ...]  # less: explains more
    idle: frozenset[int]  # ranks that have not joined it and wait in no other one
    unrecorded: tuple[int, ...]
    line: str


def blocked(recordings: Mapping[int, Recording], world_size: int) -> Blocked:
    """Return what the ranks wait for, and the ranks for which they wait.

    A rank that has not joined an operation because it waits in another one is not the cause.
    """
    operations: dict[object, dict[int, Operation]] = defaultdict(dict)
    for rank, recording in recordings.items():
        # The first one of each group: the next ones wait for it.
        waits = {
            (operation.process_group, operation.is_p2p): operation
            for operation in reversed(recording.entries)
            if not operation.finished
        }
        for (group, _), operation in waits.items():
            number = operation.peers or operation.collective_seq_id
            operations[group, recording.members(group[0]), number][rank] = operation
    busy = {rank for waiting in operations.values() for rank in waiting}
    meetings = [_meet(recordings, busy, waiting, world_size) for waiting in operations.values()]
    ranks = sorted(frozenset[int]().union(*(meeting.idle for meeting in meetings)))
    # One line for each cause: without ranks that wait nowhere, it is those that recorded nothing.
    lines: dict[object, str] = {}
    for meeting in sorted(meetings):
        if meeting.idle or not ranks:
            lines.setdefault((meeting.idle, meeting.unrecorded), meeting.line)
    return Blocked(tuple(lines.values())[:_MAX_LINES], tuple(ranks))


def _meet(
    recordings: Mapping[int, Recording],
    busy: AbstractSet[int],
    waiting: Mapping[int, Operation],
    world_size: int,
) -> _Meeting:
    rank, first = next(iter(waiting.items()))
    members = _members(recordings, rank, first.process_group, world_size)
    if first.is_p2p:
        members = [members[peer] for peer in first.peers if peer < len(members)]
    absent = sorted({*members} - waiting.keys())
    missing = [r for r in absent if r in recordings and recordings[r].is_before(first)]
    unrecorded = [r for r in absent if r not in recordings]
    alike: dict[str, list[int]] = defaultdict(list)
    states = {operation.state for operation in waiting.values()}
    for rank, operation in sorted(waiting.items()):
        what = "it" if missing and operation.text == first.text else operation.text
        # `scheduled` where others have `started`: the device has not begun.
        state = f", {operation.state}" if len(states) > 1 else ""
        alike[f"{what}{operation.caller}{state}"].append(rank)
    clauses = [f"{format_ranks(ranks, 'waits', 'wait')} in {text}" for text, ranks in alike.items()]
    if missing:
        clauses.insert(0, f"{format_ranks(missing, 'has', 'have')} not joined {first.text}")
    if unrecorded:
        clauses.append(f"{format_ranks(unrecorded)} recorded nothing")
    idle = frozenset(missing) - busy
    order = (len(missing) - len(idle), not unrecorded, -len(alike))
    return _Meeting(order, idle, tuple(unrecorded), printable("; ".join(clauses)))


def _members(
    recordings: Mapping[int, Recording], rank: int, group: tuple[str, str], world_size: int
) -> list[int]:
    """Return the ranks of a group; of gloo's (torch 2.13) those that are known to have used it."""
    name, description = group
    if members := recordings[rank].members(name):
        return sorted(members)
    if description == "default_pg":
        return [*range(world_size)]
    return sorted(rank for rank, recording in recordings.items() if recording.last_number(name))


def torch_analysis(attempt: AttemptDir, world_size: int) -> str:
    """Return what torch's own analyzer says of an attempt's dumps, in a process with torch.

    It unpickles what it reads, so it gets copies of plain values. They begin at one operation of
    each group for all ranks, as it cannot compare others.
    """
    recordings = read_recordings(attempt)
    begin: dict[tuple[str, str], int] = defaultdict(int)
    for recording in recordings.values():
        firsts = {e.process_group: e.collective_seq_id for e in reversed(recording.entries)}
        begin |= {group: max(begin[group], number) for group, number in firsts.items()}
    with tempfile.TemporaryDirectory() as folder:
        for rank, recording in recordings.items():
            entries = [
                {**e.model_dump(), "record_id": 0}
                for e in recording.entries
                if e.collective_seq_id >= begin[e.process_group]
            ]
            groups = {
                group[0]: {
                    "desc": group[1],
                    "ranks": str(_members(recordings, rank, group, world_size)),
                }
                for group in {e.process_group for e in recording.entries}
            }
            dump = {"version": recording.version, "entries": entries, "pg_config": groups}
            Path(folder, f"rank_{rank}").write_bytes(pickle.dumps(dump))
        command = [sys.executable, "-P", "-m", _ANALYZER, "--allow-incomplete-ranks", folder]
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=_ANALYZER_S)
            return done.stdout + done.stderr
    return ""
