"""What breaks a run, on the node where it is to be broken: waits for the moment, then strikes.

python -m slurmllm.drill.injector RUN ORDER: the order in JSON; what was done goes to the run's
drill.json. It runs on the node because there a save is seen the moment it begins, and there
alone do process ids mean something.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, cast

from slurmllm.drill.kinds import KindName
from slurmllm.errors import NodeError, SlurmllmError
from slurmllm.metrics.row_reader import last_row
from slurmllm.records import AttemptRecord, NodeRecord, Record
from slurmllm.rundir import RunDir

POLL_S = 0.005
SAVE_POLL_S = 0.001  # a small save takes some milliseconds
LOOK_S = 1.0  # between two looks at whether the attempt still goes on
STEPS_BEFORE_SAVE = 2  # metrics come a step late, so from here on a save may begin


class Order(Record):
    """What to do to a run.

    Attributes:
        at_step: Strike when this step's row is there; kind save: when its save has begun.
        rank: Of the worker to strike, where the kind strikes one.
    """

    kind: KindName
    attempt: int
    node: str
    rank: int
    at_step: int
    local: bool


class Injection(Record):
    """`drill.json`: what was done to a run, and when."""

    kind: KindName
    attempt: int
    node: str
    step: int | None = None
    time: float
    pids: tuple[int, ...] = ()
    missed: str = ""


def carry_out(run: RunDir, order: Order) -> Injection:
    """Wait for the moment, strike, and write down what was done."""
    try:
        step = _wait(run, order)
        if step is None:
            done = _missed(order, f"attempt {order.attempt} ended before the moment came")
        else:
            done = _strike(run, order, step)
    except SlurmllmError as error:
        done = _missed(order, str(error))
    done.save(run.drill)
    return done


def _missed(order: Order, why: str) -> Injection:
    return Injection(
        kind=order.kind, attempt=order.attempt, node=order.node, time=time.time(), missed=why
    )


def _wait(run: RunDir, order: Order) -> int | None:
    """Until the moment comes; returns the last step seen, None where the attempt ended first."""
    looked_at, near = time.monotonic(), False
    while True:
        if order.kind == "save" and near:
            # The first save is let pass, so that there is a checkpoint to go on from.
            saving = save_under_way(run) if run.checkpoint_steps() else None
            if saving is not None:
                return saving
        else:
            step = _last_step(run, order.attempt)
            if order.kind == "save":
                near = step >= order.at_step - STEPS_BEFORE_SAVE
            elif step >= order.at_step:
                return step
        if time.monotonic() - looked_at > LOOK_S:
            looked_at = time.monotonic()
            if _ended(run, order.attempt):
                return None
        time.sleep(SAVE_POLL_S if near else POLL_S)


def _last_step(run: RunDir, attempt: int) -> int:
    row = last_row(run)
    return int(row["step"]) if row is not None and row.get("attempt") == attempt else 0


def _ended(run: RunDir, attempt: int) -> bool:
    return AttemptRecord.load(run.attempt("train", attempt).record).ended_at is not None


def _strike(run: RunDir, order: Order, step: int) -> Injection:
    def done(*pids: int) -> Injection:
        return Injection(
            kind=order.kind, attempt=order.attempt, node=order.node, step=step,
            time=time.time(), pids=pids,
        )  # fmt: skip

    if order.kind in ("worker", "save", "hang"):
        number = signal.SIGSTOP if order.kind == "hang" else signal.SIGKILL
        return done(signal_worker(run, order.attempt, order.node, order.rank, number))
    if order.kind == "time_limit":
        return done(*_signal_ahead(run))
    pids = node_pids(run, order.node if order.local else None)
    if not pids:
        raise NodeError(f"no launcher of {run.name} runs on {order.node}")
    if order.kind == "first_node":
        supervisors = supervisor_pids(run)
        if not supervisors:
            raise NodeError(f"the supervisor of {run.name} does not run on {order.node}")
        last = [*supervisors, *descendants(supervisors)]
        pids = [*pids, *(pid for pid in last if pid not in pids)]
        # Written first: with the batch script Slurm ends all of the job, this process too.
        done(*pids).save(run.drill)
    kill(pids)
    return done(*pids)


def _signal_ahead(run: RunDir) -> list[int]:
    """As Slurm does it (--signal=B:USR1@…): to the batch script, which the supervisor is."""
    pids = supervisor_pids(run)
    if not pids:
        raise NodeError(f"the supervisor of {run.name} does not run here")
    job = os.environ.get("SLURM_JOB_ID")
    command = ["scancel", "--signal=USR1", "--batch", job or ""]
    if job is None or subprocess.run(command, check=False).returncode != 0:
        kill(pids, signal.SIGUSR1)
    return pids


def main(arguments: list[str]) -> int:
    """The program's entry; returns 1 where the moment was missed."""
    path, order = arguments
    done = carry_out(RunDir(Path(path)), Order.model_validate_json(order))
    if done.missed:
        print(done.missed, file=sys.stderr, flush=True)
    return 1 if done.missed else 0


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
