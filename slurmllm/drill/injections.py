"""Breaking a run: find its processes on this machine, and send them signals.

Everything here acts on the machine that it is called on, with the rights of an ordinary user. A
process is never taken by its id alone: its command line must name the run, since an id of
another machine, or one that was given out again, means somebody else's process.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, cast

from slurmllm.errors import NodeError
from slurmllm.records import NodeRecord
from slurmllm.rundir import RunDir

Role = Literal["supervise", "launch", "worker"]
_ROLES = ("supervise", "launch", "worker")
_NODE = b"SLURMLLM_NODE="  # supervise.allocation.NODE_NAME; launchers of --local have it
_SAVING = re.compile(r"^\.step_(\d{8,})\.(?:\d+\.)?tmp$")


class Process(NamedTuple):
    """A process of a run."""

    pid: int
    role: Role


def processes_of(run: RunDir) -> list[Process]:
    """The supervisor, launchers and workers of a run on this machine, by their command lines."""
    found = []
    for pid in _pids():
        role = role_of(pid, run)
        if role is not None:
            found.append(Process(pid, role))
    return found


def role_of(pid: int, run: RunDir) -> Role | None:
    """What a process is to a run; None where it is none of its processes, or gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    if os.fsencode(run.path) not in words or b"slurmllm" not in words:
        return None
    verb = words[words.index(b"slurmllm") + 1].decode(errors="replace")
    return cast("Role", verb) if verb in _ROLES else None


def worker_pid(run: RunDir, attempt: int, node: str, rank: int) -> int:
    """The process id of a worker of an attempt, which runs on this machine.

    Raises:
        NodeError: it does not run here.
        StorageError: the launcher's record cannot be read.
    """
    path = run.attempt("train", attempt).node(node)
    pid = NodeRecord.load(path).pids.get(rank)
    if pid is None or role_of(pid, run) != "worker":
        raise NodeError(
            f"rank {rank} of attempt {attempt} of {run.name} does not run here: {path} has process "
            f"{pid}, which is none of its workers; the call belongs onto {node}, while it trains"
        )
    return pid


def signal_worker(
    run: RunDir, attempt: int, node: str, rank: int, number: signal.Signals = signal.SIGKILL
) -> int:
    """Send a worker of this machine a signal; returns its process id.

    Raises:
        NodeError: it does not run here, or has ended by itself.
    """
    pid = worker_pid(run, attempt, node, rank)
    try:
        os.kill(pid, number)
    except ProcessLookupError as error:
        raise NodeError(f"rank {rank} on {node}: process {pid} has ended already") from error
    return pid


def node_pids(run: RunDir, node: str | None = None) -> list[int]:
    """A node's launchers first, then all that descends from them.

    Args:
        run: The run.
        node: One of --local's nodes, which share this machine; None: this machine is the node.
    """
    launchers = [p.pid for p in processes_of(run) if p.role == "launch"]
    if node is not None:
        launchers = [pid for pid in launchers if _named(pid, node)]
    return list(dict.fromkeys([*launchers, *descendants(launchers)]))


def supervisor_pids(run: RunDir) -> list[int]:
    """The supervisor on this machine, if it runs here."""
    return [p.pid for p in processes_of(run) if p.role == "supervise"]


def kill(pids: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Send processes a signal, in order; those that are gone are passed over."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def descendants(pids: Iterable[int]) -> list[int]:
    """All processes below some others, parents before children."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        with suppress(OSError, IndexError):
            # pid (name, which may hold blanks and brackets) state ppid …
            parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(pid)
    found: list[int] = []
    level = list(pids)
    while level:
        level = [child for pid in level for child in children.get(pid, [])]
        found += level
    return found


def save_under_way(run: RunDir) -> int | None:
    """The step of a checkpoint that is being written now, beyond those that are complete."""
    newest = max(run.checkpoint_steps(), default=-1)
    with suppress(FileNotFoundError):
        for entry in run.checkpoints.iterdir():
            match = _SAVING.match(entry.name)
            if match and int(match.group(1)) > newest:
                return int(match.group(1))
    return None


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _named(pid: int, node: str) -> bool:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return _NODE + os.fsencode(node) in words
    return False
