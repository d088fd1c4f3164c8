"""The fault injector: kinds of faults, and how the processes of a run on this machine get them.

As a program, `python -m slurmllm.analysis.drill.injector RUN SPEC` waits for a step or a save of
the run and injects one fault; the result goes to the run's drill.json. It runs on the node of the
fault: only there do process ids mean something, and only there is the start of a save visible at
once.
`tools/chaos` uses its functions on a development cluster.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import psutil

from slurmllm.core.config.command import CommandConfig
from slurmllm.core.errors import NodeError, SlurmllmError
from slurmllm.core.format import Texts
from slurmllm.core.metrics.row_reader import last_row
from slurmllm.core.run.records import AttemptRecord, EndingClass, NodeRecord, Record
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.slurm.setup import slurm_environment
from slurmllm.launch.supervise.started_processes import started_by
from slurmllm.train.checkpoint.foreign import list_trainer_checkpoints, newest_complete

FaultKind = Literal[
    "worker", "node", "first_node", "time_limit", "save", "hang", "terminate", "full_disk"
]
FaultKinds = tuple[FaultKind, ...]
FAULT_KINDS: FaultKinds = get_args(FaultKind)
# Short, for a quick drill; the watchdog also waits for ten times the run's slow steps, as always.
HANG_LIMIT_S = 20.0
POLL_S = 0.005
SAVE_POLL_S = 0.001  # a small save takes some milliseconds
ATTEMPT_POLL_S = 1.0
STEPS_BEFORE_SAVE = 2  # metrics are written one step late: a save may begin from here on
ROLES = ("supervise", "launch", "worker")
_NODE = "SLURMLLM_NODE"  # supervise.allocation.NODE_NAME, which launchers of --local have
_SAVING = re.compile(r"^\.step_(\d{8,})\.(?:\d+\.)?tmp$")


class Fault(NamedTuple):
    """One kind of fault."""

    expected: EndingClass | None  # the class that the attempt must get; None: any
    min_nodes: int = 1  # nodes that the run must have
    of_commands: bool = False  # whether only other projects' trainers get it, on all nodes
    overrides: Texts = ()  # values that the run needs for it, as given to --set


FAULTS: dict[FaultKind, Fault] = {
    "worker": Fault("node_failure"),  # SIGKILL to one worker
    "node": Fault("node_failure", min_nodes=2),  # SIGKILL to launcher and workers of one node
    "first_node": Fault("node_failure"),  # SIGKILL to all of the first node, with the supervisor
    "time_limit": Fault("advance_signal"),  # the signal that Slurm sends ahead of the time limit
    "save": Fault("node_failure"),  # SIGKILL to one worker while a checkpoint is written
    "hang": Fault(  # SIGSTOP to one worker
        "hang", overrides=("watchdog.enabled=true", f"watchdog.min_step_s={HANG_LIMIT_S:g}")
    ),
    "terminate": Fault(None, of_commands=True),  # SIGTERM to all workers
    # Their files can no longer grow (RLIMIT_FSIZE), which takes no rights of root.
    "full_disk": Fault(None, of_commands=True),
}


class FaultSpec(Record):
    """The fault to inject."""

    kind: FaultKind
    attempt: int
    node: str
    rank: int  # of the worker, for the kinds that hit one worker
    at_step: int  # inject once this step's metrics are written; kind `save`: when its save begins
    local: bool
    trainer: CommandConfig | None = None  # of another project


class Injection(Record):
    """`drill.json`: the fault that was injected into a run, and when."""

    kind: FaultKind
    attempt: int
    node: str
    step: int | None = None
    time: float
    pids: tuple[int, ...] = ()
    missed: str = ""


class RunProcess(NamedTuple):
    """A process of a run."""

    pid: int
    role: str  # one of `ROLES`; empty for others with the run's path among their arguments
    rank: int | None  # of a worker
    command: Texts
    node: str  # of a launcher of --local


def find_processes(run: RunDir) -> list[RunProcess]:
    """Return the processes on this machine that have the run's path among their arguments."""
    processes = (_read_process(pid, run) for pid in psutil.pids() if pid != os.getpid())
    return [process for process in processes if process is not None]


def _read_process(pid: int, run: RunDir) -> RunProcess | None:
    with suppress(psutil.Error):  # it has ended, or belongs to another user
        process = psutil.Process(pid)
        command = tuple(process.cmdline())
        if str(run.path) in command:
            verb = command[command.index("slurmllm") + 1] if "slurmllm" in command[:-1] else ""
            role = verb if verb in ROLES else ""
            variables = process.environ()
            rank = int(variables["RANK"]) if variables.get("RANK", "").isdigit() else None
            return RunProcess(pid, role, rank, command, variables.get(_NODE, ""))
    return None


def signal_worker(
    run: RunDir, attempt: int, node: str, rank: int, number: signal.Signals = signal.SIGKILL
) -> int:
    """Send a signal to a worker on this machine, else raise a NodeError; return its process id."""
    path = run.attempt("train", attempt).node(node)
    pid = NodeRecord.load(path).pids.get(rank)
    process = None if pid is None else _read_process(pid, run)
    # The record may be of another machine or of a process id that has been reused since.
    if process is None or process.role != "worker":
        raise NodeError(
            f"rank {rank} of attempt {attempt} of {run.name} does not run here: process {pid} of "
            f"{path} is not one of its workers; run the injector on {node}, while it trains"
        )
    try:
        os.kill(process.pid, number)
    except ProcessLookupError as error:
        raise NodeError(f"rank {rank} on {node}: process {pid} has already ended") from error
    return process.pid


def trainer_pids(run: RunDir, spec: FaultSpec) -> list[int]:
    """Return the processes of another project's trainer on this machine, without shells.

    Of one worker, for the kinds that hit one; without a program that starts workers, like torchrun.
    """
    assert spec.trainer is not None
    path = run.attempt("train", spec.attempt).node(spec.node)
    pid = NodeRecord.load(path).pids.get(spec.rank)
    below = descendants(_launchers(run))
    of_all = FAULTS[spec.kind].of_commands
    if not of_all:
        below = [pid, *descendants([pid])] if pid is not None and pid in below else []
    below = [pid for pid in below if _program(pid) not in ("", "bash", "sh")]
    if not below:
        raise NodeError(
            f"rank {spec.rank} of attempt {spec.attempt} of {run.name} does not run on {spec.node}"
        )
    if of_all or not spec.trainer.one_per_node:
        return below
    with suppress(psutil.Error):  # a launcher may start another one, as DeepSpeed's does
        ranks = [process.pid for process in started_by(psutil.Process(below[0]))]
        if ranks:
            return ranks
    return below[1:] or below


def _program(pid: int) -> str:
    with suppress(psutil.Error):
        return psutil.Process(pid).name()
    return ""  # it has ended


def node_pids(run: RunDir, node: str | None = None) -> list[int]:
    """Return a node's launchers, so that none can start workers again, then their descendants.

    `node` is one of --local's nodes, which share this machine; None: this machine is the node.
    """
    launchers = _launchers(run, node)
    return list(dict.fromkeys([*launchers, *descendants(launchers)]))


def _launchers(run: RunDir, node: str | None = None) -> list[int]:
    return [
        process.pid
        for process in find_processes(run)
        if process.role == "launch" and node in (None, process.node)
    ]


def supervisor_pids(run: RunDir) -> list[int]:
    """Return the supervisor on this machine; raises NodeError if it does not run here."""
    pids = [process.pid for process in find_processes(run) if process.role == "supervise"]
    if not pids:
        raise NodeError(f"the supervisor of {run.name} does not run here")
    return pids


def descendants(pids: Iterable[int]) -> list[int]:
    """Return all descendants of some processes, parents before children."""
    below: list[int] = []
    for pid in pids:
        with suppress(psutil.Error):
            below += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return below


def kill(pids: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to processes, in order; ignores those that have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def save_in_progress(run: RunDir) -> int | None:
    """Return the step of the checkpoint being written, if newer than all complete ones."""
    newest = max(run.checkpoint_steps(), default=-1)
    with suppress(FileNotFoundError):
        for entry in run.checkpoints.iterdir():
            match = _SAVING.match(entry.name)
            # Folders of older steps were left by an attempt that was killed.
            if match and int(match.group(1)) > newest:
                return int(match.group(1))
    return None


def inject(run: RunDir, spec: FaultSpec) -> Injection:
    """Wait for the step of a fault, inject it, and write drill.json."""
    injection = Injection(kind=spec.kind, attempt=spec.attempt, node=spec.node, time=0.0)
    pids: list[int] | None = None
    try:
        step = _wait_for_step(run, spec)
        if step is not None and spec.kind == "save" and spec.trainer:
            step, pids = _kill_in_save(run, spec, spec.trainer)
        if step is None:
            message = f"attempt {spec.attempt} ended before step {spec.at_step}"
            if spec.trainer and spec.trainer.checkpoints is not None:
                message += " with a complete checkpoint"
                if spec.kind == "save":
                    message += ", and a save"
            update: dict[str, object] = {"missed": message}
        else:
            injection = injection.model_copy(update={"step": step})
            update = {"pids": tuple(pids or _inject_now(run, spec, injection))}
    except SlurmllmError as error:
        update = {"step": None, "missed": str(error)}
    injection = injection.model_copy(update={**update, "time": time.time()})
    injection.save(run.drill)
    return injection


def _step_of(run: RunDir, spec: FaultSpec) -> int:
    row = last_row(run)
    return int(row["step"]) if row is not None and row.get("attempt") == spec.attempt else 0


def _wait_for_step(run: RunDir, spec: FaultSpec) -> int | None:
    """Return the last completed step, or the one being saved; None if the attempt ended before."""
    trainer = spec.trainer
    is_our_save = spec.kind == "save" and spec.trainer is None
    begin = spec.at_step - (STEPS_BEFORE_SAVE if is_our_save else 0)

    def can_resume(command: CommandConfig) -> bool:
        """Whether there is a checkpoint that the next command line can name, if it must."""
        named = any(name in (command.resume or "") for name in ("{checkpoint}", "{step}"))
        return not named or newest_complete(list_trainer_checkpoints(run, command)) is not None

    def reached() -> int | None:
        step = _step_of(run, spec)
        return step if step >= begin and (trainer is None or can_resume(trainer)) else None

    def saving() -> int | None:
        # Not the first save: a complete checkpoint to resume from must exist.
        return save_in_progress(run) if run.checkpoint_steps() else None

    step = _poll(run, spec, reached, POLL_S)
    return _poll(run, spec, saving, SAVE_POLL_S) if step is not None and is_our_save else step


def _kill_in_save(
    run: RunDir, spec: FaultSpec, trainer: CommandConfig
) -> tuple[int | None, list[int]]:
    """Kill a worker at the first new file next to the checkpoints; returns the step and it."""
    pids = trainer_pids(run, spec)[:1]  # looked up before: a save may take some milliseconds
    checkpoints = {entry.path for entry in list_trainer_checkpoints(run, trainer)}
    rewritten = set() if "{step}" in (trainer.checkpoints or "") else checkpoints
    folders = {path.parent for path in checkpoints}

    def files() -> set[tuple[Path, int]]:
        """Return the files, with their times if they are written again and again."""
        paths = (path for folder in folders for path in folder.glob("*"))
        return {(path, path.stat().st_mtime_ns if path in rewritten else 0) for path in paths}

    before = files()

    def killed() -> int | None:
        if not files() - before:
            return None
        kill(pids)
        return _step_of(run, spec)

    return _poll(run, spec, killed, SAVE_POLL_S), pids


def _poll(
    run: RunDir, spec: FaultSpec, probe: Callable[[], int | None], interval_s: float
) -> int | None:
    """Return the first value of a probe; None if the attempt ended before."""
    checked_at = time.monotonic()
    while (value := probe()) is None:
        if time.monotonic() - checked_at > ATTEMPT_POLL_S:
            checked_at = time.monotonic()
            if AttemptRecord.load(run.attempt("train", spec.attempt).record).ended_at is not None:
                return None
        time.sleep(interval_s)
    return value


def _inject_now(run: RunDir, spec: FaultSpec, injection: Injection) -> list[int]:
    """Inject the fault; returns the processes that were signalled."""
    if spec.kind in ("full_disk", "terminate"):
        pids = trainer_pids(run, spec)
        if spec.kind == "terminate":
            kill(pids, signal.SIGTERM)
        for pid in pids if spec.kind == "full_disk" else ():
            with suppress(ProcessLookupError):
                hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
        return pids
    if spec.kind in ("worker", "save", "hang"):
        number = signal.SIGSTOP if spec.kind == "hang" else signal.SIGKILL
        if spec.trainer:
            kill(pids := trainer_pids(run, spec)[:1], number)
            return pids
        return [signal_worker(run, spec.attempt, spec.node, spec.rank, number)]
    if spec.kind == "time_limit":
        pids = supervisor_pids(run)
        # As Slurm does it (--signal=B:USR1@…): to the batch script, which is the supervisor. A
        # local run has none: SLURM_JOB_ID may be that of the shell.
        job = None if spec.local else os.environ.get("SLURM_JOB_ID")
        command = ["scancel", "--signal=USR1", "--batch", job or ""]
        if (
            job is None
            or subprocess.run(command, env=slurm_environment(), check=False).returncode != 0
        ):
            kill(pids, signal.SIGUSR1)
        return pids
    pids = node_pids(run, spec.node if spec.local else None)
    if not pids:
        raise NodeError(f"no launcher of {run.name} runs on {spec.node}")
    if spec.kind == "first_node":
        supervisors = supervisor_pids(run)
        pids = list(dict.fromkeys([*pids, *supervisors, *descendants(supervisors)]))
        # Written before the kill: when the batch script dies, Slurm ends the whole job, and with
        # it the step that this process is.
        injection.model_copy(update={"pids": tuple(pids), "time": time.time()}).save(run.drill)
    kill(pids)
    return pids


def main(arguments: list[str]) -> int:
    """Entry point of the program; returns 1 if the fault could not be injected."""
    path, spec = arguments
    injection = inject(RunDir(Path(path)), FaultSpec.model_validate_json(spec))
    if injection.missed:
        print(injection.missed, file=sys.stderr, flush=True)
    return 1 if injection.missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
