"""What breaks a run, on the node where it is to be broken: waits for the moment, then strikes.

python -m slurmllm.drill.agent RUN ORDER: the order in JSON; what was done goes to the run's
drill.json. It runs on the node because there a save is seen the moment it begins, and there
alone do process ids mean something.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from slurmllm.analysis.reading.rows import last_row
from slurmllm.drill import injections
from slurmllm.drill.kinds import KindName
from slurmllm.errors import NodeError, SlurmllmError
from slurmllm.records import AttemptRecord, Record
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
            saving = injections.save_under_way(run) if run.checkpoint_steps() else None
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
        return done(injections.signal_worker(run, order.attempt, order.node, order.rank, number))
    if order.kind == "time_limit":
        return done(*_signal_ahead(run))
    pids = injections.node_pids(run, order.node if order.local else None)
    if not pids:
        raise NodeError(f"no launcher of {run.name} runs on {order.node}")
    if order.kind == "first_node":
        supervisors = injections.supervisor_pids(run)
        if not supervisors:
            raise NodeError(f"the supervisor of {run.name} does not run on {order.node}")
        last = [*supervisors, *injections.descendants(supervisors)]
        pids = [*pids, *(pid for pid in last if pid not in pids)]
        # Written first: with the batch script Slurm ends all of the job, this process too.
        done(*pids).save(run.drill)
    injections.kill(pids)
    return done(*pids)


def _signal_ahead(run: RunDir) -> list[int]:
    """As Slurm does it (--signal=B:USR1@…): to the batch script, which the supervisor is."""
    pids = injections.supervisor_pids(run)
    if not pids:
        raise NodeError(f"the supervisor of {run.name} does not run here")
    job = os.environ.get("SLURM_JOB_ID")
    command = ["scancel", "--signal=USR1", "--batch", job or ""]
    if job is None or subprocess.run(command, check=False).returncode != 0:
        injections.kill(pids, signal.SIGUSR1)
    return pids


def main(arguments: list[str]) -> int:
    """The program's entry; returns 1 where the moment was missed."""
    path, order = arguments
    done = carry_out(RunDir(Path(path)), Order.model_validate_json(order))
    if done.missed:
        print(done.missed, file=sys.stderr, flush=True)
    return 1 if done.missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
