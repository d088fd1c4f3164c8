"""The collectives in which ranks hang, by torch's Flight Recorder and NCCL's RAS.

Launchers store the dumps, and `read_blocked` reads them. torch's own analyzer
(torch/distributed/flight_recorder, `torchfrtrace`) needs torch and recordings from the first step
on: only `logs --stacks` runs it, as the supervisor would hold the nodes meanwhile.
"""

from __future__ import annotations

import os
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

from slurmllm.core.format import by_key, format_ranks, printable
from slurmllm.core.run.flight_recorder import (
    Operation,
    Recording,
    dump_prefixes,
    read_dump,
    request_dump,
)
from slurmllm.core.run.records import Lines, Ranks
from slurmllm.core.run.rundir import AttemptDir, files_by_rank, read_by_rank
from slurmllm.core.run.safe_files import read_limited, write_whole

# Half a second apart: torch looks at its pipe once a second, and may import its compiler before the
# first dump, for 10 s. Other nodes wait for STACKS_S.
_POLLS = 24
_RAS_S = 10.0  # NCCL waits five for peers, and adds up to five
_RAS_BYTES = 1 << 20
_MAX_LINES = 4
_ANALYZER = "torch.distributed.flight_recorder.fr_trace"
_ANALYZER_S = 300.0  # it imports torch
# Of RAS's report: what follows the headings (NCCL 2.24 to 2.31, src/ras/client_support.cc)
_RAS_PROBLEMS = re.compile(r"^(?:Errors|Warnings)\n=+\n(.*?)(?=^\w+\n=+\n|\Z)", re.M | re.S)


Recordings = Mapping[int, Recording]  # by rank


class Blocked(NamedTuple):
    """The operations in which ranks wait."""

    lines: Lines = ()
    missing_ranks: Ranks = ()  # for which the others wait


def collect_dumps(attempt: AttemptDir, environment: Mapping[str, str], since: float) -> None:
    """Request and store dumps of a node's ranks.

    If no rank reads its pipe, store those that torch wrote after `since` (Unix time, s), as it does
    after a time-out of a collective.
    """
    pipe, dump = dump_prefixes(environment)
    requested = {rank for rank, path in files_by_rank(pipe, ".pipe").items() if request_dump(path)}
    if requested:
        since = time.time() - 1.0  # a file system's clock may be coarse
    stored = set[int]()  # reading a dump again for a silent rank takes longer than the wait
    for _ in range(_POLLS):
        for rank, path in files_by_rank(dump).items():
            with suppress(OSError, ValueError):  # such as a half-written file
                if rank not in stored and path.stat().st_mtime >= since:
                    content = read_dump(path).model_dump_json().encode()
                    write_whole(attempt.collectives(rank), content, durable=False)
                    stored.add(rank)
        if requested <= stored:
            break
        time.sleep(0.5)


def query_ras(attempt: AttemptDir) -> None:
    """Store what NCCL's RAS reports of the job, if it answers on this node."""
    host, _, port = os.environ.get("NCCL_RAS_ADDR", "localhost:28028").rpartition(":")
    with suppress(OSError, ValueError):
        with socket.create_connection((host.strip("[]"), int(port)), _RAS_S) as connection:
            connection.sendall(b"VERBOSE STATUS\n")
            report = b""
            until = time.monotonic() + _RAS_S  # another service may never end
            while time.monotonic() < until and (piece := connection.recv(_RAS_BYTES)):
                report = (report + piece)[:_RAS_BYTES]
        write_whole(attempt.ras, report, durable=False)


def ras_report(attempt: AttemptDir) -> str:
    """Return what NCCL's RAS reported; empty if it did not answer."""
    with suppress(OSError):
        report = read_limited(attempt.ras, _RAS_BYTES).decode(errors="replace")
        return "\n".join(map(printable, report.split("\n")))
    return ""


def read_recordings(attempt: AttemptDir) -> Recordings:
    """Return rank → recording, for the recordings of an attempt that can be read."""
    return read_by_rank(attempt.collectives, Recording.load)


def read_blocked(attempt: AttemptDir, world_size: int) -> Blocked:
    """Return the operations in which an attempt's ranks wait."""
    lines, ranks = blocked(read_recordings(attempt), world_size)
    problems = "\n".join(_RAS_PROBLEMS.findall(ras_report(attempt))).split("\n")
    if by_nccl := "; ".join(filter(None, map(str.strip, problems))):
        lines += (f"NCCL RAS: {by_nccl:.600}",)
    return Blocked(lines, ranks)


# An operation in which ranks wait: its sort key (the lowest explains most), the ranks that have not
# joined it and wait in no other one, and a line about it
_PendingOperation = tuple[Ranks, Ranks, str]


def blocked(recordings: Recordings, world_size: int) -> Blocked:
    """Return the operations in which ranks wait, and the ranks for which they wait.

    A rank that has not joined an operation because it waits in another one is not the cause.
    """
    operations: dict[object, dict[int, Operation]] = defaultdict(dict)
    for rank, recording in recordings.items():
        # The first unfinished one of each group: later ones wait for it.
        firsts = {e.process_group: e for e in reversed(recording.entries) if not e.finished}
        for group, operation in firsts.items():
            number = operation.peers or operation.collective_seq_id
            operations[group, recording.ranks(group), number][rank] = operation
    busy = {rank for waiting in operations.values() for rank in waiting}
    pending = sorted(_describe(recordings, busy, item, world_size) for item in operations.values())
    ranks = {rank for _, idle, _ in pending for rank in idle}
    lines: dict[object, str] = {}  # one for each set of missing ranks
    for _, idle, line in pending:
        if idle or not ranks:
            lines.setdefault(idle, line)
    return Blocked(tuple(lines.values())[:_MAX_LINES], tuple(sorted(ranks)))


def _describe(
    recordings: Recordings,
    busy: AbstractSet[int],
    waiting: Mapping[int, Operation],
    world_size: int,
) -> _PendingOperation:
    rank, first = next(iter(waiting.items()))
    members = _members(recordings, rank, first.process_group, world_size)
    if first.is_p2p:
        members = [members[peer] for peer in first.peers if peer < len(members)]
    absent = sorted({*members} - waiting.keys())
    missing = [r for r in absent if r in recordings and recordings[r].is_before(first)]
    unrecorded = [r for r in absent if r not in recordings]
    # `scheduled` where others have `started`: the device has not begun.
    differ = len({operation.state for operation in waiting.values()}) > 1
    ranks_by_text = by_key(
        (f"{o.text}{o.caller}{f', {o.state}' if differ else ''}", rank)
        for rank, o in sorted(waiting.items())
    )
    clauses = [
        f"{format_ranks(ranks, 'waits', 'wait')} in {text}" for text, ranks in ranks_by_text.items()
    ]
    if missing:
        clauses = [clause.replace(first.text, "it") for clause in clauses]
        clauses.insert(0, f"{format_ranks(missing, 'has', 'have')} not joined {first.text}")
    if unrecorded:
        clauses.append(f"{format_ranks(unrecorded)} recorded nothing")
    idle = tuple(rank for rank in missing if rank not in busy)
    order = len(missing) - len(idle), not unrecorded, -len(ranks_by_text)
    return order, idle, printable("; ".join(clauses))


def _members(
    recordings: Recordings, rank: int, group: tuple[str, str], world_size: int
) -> list[int]:
    """Return the ranks of a group; with gloo (torch 2.13) those that are known to have used it."""
    if members := re.findall(r"\d+", recordings[rank].ranks(group)):
        return sorted(map(int, members))
    if group[1] == "default_pg":
        return [*range(world_size)]
    return sorted(r for r, recording in recordings.items() if group in recording.last_numbers)


def torch_analysis(attempt: AttemptDir, world_size: int) -> str:
    """Return what torch's own analyzer says of an attempt's dumps, in a process with torch.

    The analyzer unpickles its input, so it gets copies with plain values only. On all ranks they
    begin at the same operation of each group: it cannot compare others.
    """
    recordings = read_recordings(attempt)
    if not recordings:
        return ""
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
            groups = {}
            for name, description in recording.last_numbers:
                members = _members(recordings, rank, (name, description), world_size)
                groups[name] = {"desc": description, "ranks": str(members)}
            dump = {"version": recording.version, "entries": entries, "pg_config": groups}
            Path(folder, f"rank_{rank}").write_bytes(pickle.dumps(dump))
        command = [sys.executable, "-P", "-m", _ANALYZER, "--allow-incomplete-ranks", folder]
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=_ANALYZER_S)
            return done.stdout + done.stderr
    return ""
