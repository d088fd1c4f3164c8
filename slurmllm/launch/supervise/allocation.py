"""The nodes of an attempt: those of a Slurm job, or this machine.

`--local` names its nodes local0, local1, …: each is a launcher of its own on this machine, so that
rendezvous, records and restarts take the same path as under Slurm.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeGuard

from slurmllm.core.config.cluster import Cluster
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.config.rules import minutes_of
from slurmllm.core.config.variables import is_secret_option
from slurmllm.core.errors import ConfigError, SlurmError, UserError
from slurmllm.core.run.records import NodeNames, last_submission
from slurmllm.core.run.rundir import RunDir, Stage
from slurmllm.core.run.safe_files import login_name
from slurmllm.core.slurm.client import (
    AccountingRow,
    SlurmClient,
    check_configuration_file,
    step_options,
    wait_for,
)
from slurmllm.core.slurm.container import (
    CONTAINER,
    CONTAINER_PYTHON,
    container_arguments,
    in_container,
)
from slurmllm.core.slurm.error_texts import Command, Processes, StopCheck
from slurmllm.core.slurm.setup import (
    JOB_VARIABLES,
    SETUP,
    SRUN_OPTIONS,
    in_setup,
    slurm_environment,
)
from slurmllm.train.control.rendezvous import (
    NODE_NAME,
    NODE_RANK,
    die_with_parent,
    new_secret,
    reachable_address,
)

_STEP = "slurmllm-launch"  # name of the launchers' step
# The only task of a node uses all of it; Slurm would bind it to one CPU. Without --cpus-per-task,
# which is one number for all nodes, a step has all CPUs of each.
_ONE_A_NODE = ("--ntasks-per-node=1", "--cpu-bind=none", "--input=none")
# One launcher's failure ends the step on the other nodes too.
_LAUNCH = ("--kill-on-bad-exit=1", f"--job-name={_STEP}")
LOCAL_NODES = "SLURMLLM_LOCAL_NODES"
LOCAL_RESTARTS = "SLURMLLM_LOCAL_RESTARTS"  # as SLURM_RESTART_COUNT
HELD_NODES = "SLURMLLM_HELD_NODES"  # of the allocation that salloc holds, to be used
BROADCAST_S = 600.0  # for sbcast to send a file to all nodes
# On every node: the interpreter is shared. -P: the folder that a job starts in may be another
# user's, and its modules would be imported.
SLURMLLM = (sys.executable, "-P", "-m", "slurmllm")


log = logging.getLogger(__name__)


class Allocation(ABC):
    """The nodes of an attempt; the supervisor runs on the first one."""

    nodes: NodeNames
    all_nodes: NodeNames = ()  # of a job: with those that the present attempt does not use
    job_id: str | None = None
    restart_count: int = 0
    requeues: bool = False  # whether Slurm starts the job again; else its caller starts the script
    restarted = False  # whether an earlier attempt ran in this start of the job

    @property
    @abstractmethod
    def master_addr(self) -> str:
        """The name or address by which all nodes reach the first one."""

    def launch(self, run_path: Path, stage: Stage, attempt: int) -> Processes:
        """Start a launcher on every node; the processes end with the launchers."""
        return self._start(
            [*SLURMLLM, "launch", str(run_path), "--stage", stage, "--attempt", str(attempt)],
            launchers=True,
        )

    def ask(self, command: Command) -> Processes:
        """Start a command on every node, with its output in the processes' pipes.

        It shares the nodes with what else runs there; a failing node ends no other node's command.
        """
        return self._start(command, launchers=False)

    @abstractmethod
    def _start(self, command: Command, *, launchers: bool) -> Processes:
        """Start it with the output of this process if it is `launchers`, else with pipes."""

    def broadcast(self, source: Path, target: Path, stop: StopCheck) -> str | None:
        """Copy a file to the same path on every node; returns the reason of a failure.

        `stop` is polled; True ends the copying. On one machine the launchers read the source.
        """
        return None

    @abstractmethod
    def state(self) -> str:
        """The job's state in Slurm's terms; `RUNNING` or `CANCELLED` for a local run."""


class SlurmAllocation(Allocation):
    """The nodes of the Slurm job whose batch script this process is."""

    job_id: str
    requeues = True

    def __init__(self, client: SlurmClient | None = None) -> None:
        self.client = client or SlurmClient()
        self.job_id = os.environ["SLURM_JOB_ID"]
        self.restart_count = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self.all_nodes = tuple(self.client.hostnames(os.environ["SLURM_JOB_NODELIST"]))
        self.nodes = self.all_nodes

    @property
    def master_addr(self) -> str:
        return reachable_address(self.nodes[0])  # a requeued job may have other nodes than before

    def check_time_limit(self, lead_s: float) -> None:
        """Raise ConfigError if the job's limit, as somebody has changed it, leaves no time."""
        try:
            limit = self.client.batch_job(self.job_id).time_limit
        except SlurmError as error:
            log.warning("the time limit is unknown: %s", error)
            return
        if limit[:1].isdigit() and (minutes := minutes_of(limit)) * 60 <= lead_s:
            raise ConfigError(
                f"job {self.job_id}: time limit {minutes:g} min is not above signal_lead_s "
                f"{lead_s:g}, so Slurm asks it to stop as it starts; `slurmllm resume` starts a "
                "job with slurm.time, or lower slurm.signal_lead_s"
            )

    def choose(
        self, without: Collection[str], count: int, avoid: Collection[str] = ()
    ) -> NodeNames:
        """Return the nodes for new workers; empty if too few remain, or not the supervisor's.

        Nodes to `avoid` are used only if there are no others, but the supervisor's always is.
        """
        left = [name for name in self.all_nodes if name not in without]
        if len(left) < count or left[0] != self.all_nodes[0]:
            return ()
        chosen = [left[0], *sorted(left[1:], key=avoid.__contains__)][:count]
        return tuple(filter(chosen.__contains__, left))  # in Slurm's order

    def give_up(self, lost_nodes: Collection[str]) -> None:
        """Release lost nodes, so that Slurm does not end the job when it marks them as down.

        Not --no-kill: with it, a job whose batch host dies keeps its nodes until the time limit.
        Raises a SlurmError if Slurm does not let jobs shrink.
        """
        left = tuple(name for name in self.all_nodes if name not in lost_nodes)
        if left != self.all_nodes:
            self.client.shrink(self.job_id, left)
            self.all_nodes = left

    def restart(self, nodes: NodeNames, patience_s: float) -> None:
        """End what is left of the launchers, and use other nodes from now on."""

        def are_gone() -> bool:
            steps = self.client.steps(self.job_id, _STEP)
            self.client.cancel(steps, kill=True)
            return not steps

        try:
            wait_for(are_gone, patience_s, 0.5)
        except SlurmError as error:
            log.warning("%s", error)
        self.nodes = nodes
        self.restarted = True

    def _start(self, command: Command, *, launchers: bool) -> Processes:
        srun = ["srun", f"--nodes={len(self.nodes)}", f"--ntasks={len(self.nodes)}", *_ONE_A_NODE]
        if self.all_nodes and self.nodes != self.all_nodes:
            srun.append(f"--nodelist={','.join(self.nodes)}")
        srun += _LAUNCH if launchers else ["--kill-on-bad-exit=0"]
        # An earlier step ends, for Slurm, when its lost node has ended it.
        srun += ["--overlap"] if self.restarted or not launchers else []
        srun += [*step_options(), *task_command(command)]
        try:
            # srun hands its environment to the nodes.
            environment = {**slurm_environment(in_job=True), **new_secret()}
            stdout, stderr = (None, None) if launchers else (subprocess.PIPE, subprocess.STDOUT)
            return [subprocess.Popen(srun, env=environment, stdout=stdout, stderr=stderr)]
        except OSError as error:
            raise SlurmError(f"srun cannot be started on {self.nodes[0]}: {error}") from error

    def broadcast(self, source: Path, target: Path, stop: StopCheck) -> str | None:
        # sbcast sends through a tree; without it every node reads the shared file system once.
        # Without --force it makes the file: an existing one, or a link to another, is refused.
        deadline = time.monotonic() + BROADCAST_S
        try:
            process = subprocess.Popen(
                ["sbcast", str(source), str(target)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=slurm_environment(in_job=True),
            )
        except OSError as error:
            return str(error)
        with process:
            while True:
                try:
                    output, _ = process.communicate(timeout=0.05)
                    break
                except subprocess.TimeoutExpired:
                    if stop() or time.monotonic() > deadline:
                        process.kill()
                        return "stopped" if stop() else f"not finished after {BROADCAST_S:.0f} s"
        message = output.decode(errors="replace").strip()
        return None if process.returncode == 0 else (message or f"exit {process.returncode}")

    def state(self) -> str:
        """The state of this start of the job; UNKNOWN if Slurm does not respond."""
        # Accounting first: squeue reports COMPLETING for every kind of ending.
        if row := start_of_job(self.client, self.job_id, self.restart_count):
            return row.state
        with suppress(SlurmError, KeyError):
            return self.client.queue([self.job_id])[self.job_id].state
        return "UNKNOWN"


def is_requeued(allocation: Allocation) -> TypeGuard[SlurmAllocation]:
    """Whether Slurm starts the job again."""
    return allocation.requeues


def start_of_job(client: SlurmClient, job_id: str, restart_count: int) -> AccountingRow | None:
    """Return the accounting of a start of a job, if it is there."""
    # A job that lost a node and went on has two rows, the first one RESIZING.
    rows = [r for r in client.accounting(job_id) if r.job_id == job_id and r.state != "RESIZING"]
    return rows[restart_count] if restart_count < len(rows) else None


def accounted_state(client: SlurmClient, job_id: str) -> str:
    """Return the state of the last start of a job; UNKNOWN without accounting, which may lag."""
    rows = [row for row in client.accounting(job_id) if row.job_id == job_id]
    return rows[-1].state if rows else "UNKNOWN"


class HeldAllocation(SlurmAllocation):
    """The first nodes of an allocation that salloc holds, for `submit --in-allocation`."""

    requeues = False

    def __init__(self, run: RunDir) -> None:
        super().__init__()
        self._here = LocalAllocation(run)  # the process that started it
        self.nodes = self.all_nodes[: int(os.environ[HELD_NODES])]
        self.restart_count = self._here.restart_count

    def give_up(self, lost_nodes: Collection[str]) -> None:
        """Nothing: the allocation is the user's."""

    def state(self) -> str:
        recorded = self._here.state()
        return recorded if recorded == "CANCELLED" else super().state()


class LocalAllocation(Allocation):
    """This machine as one node or several; `run` is None outside a run."""

    def __init__(self, run: RunDir | None = None) -> None:
        self._run = run
        self.restart_count = int(os.environ.get(LOCAL_RESTARTS) or 0)
        count = int(os.environ.get(LOCAL_NODES) or 1)
        self.nodes = tuple(f"local{index}" for index in range(count))

    @property
    def master_addr(self) -> str:
        return "127.0.0.1"

    def _start(self, command: Command, *, launchers: bool) -> Processes:
        environment = {**os.environ, **new_secret()}
        return [
            subprocess.Popen(
                in_container(command),
                env={**environment, NODE_RANK: str(index), NODE_NAME: name},
                preexec_fn=die_with_parent,
                stdout=None if launchers else subprocess.PIPE,
                stderr=None if launchers else subprocess.STDOUT,
            )
            for index, name in enumerate(self.nodes)
        ]

    def state(self) -> str:
        last = None if self._run is None else last_submission(self._run)
        return "RUNNING" if last is None or last.cancelled_at is None else "CANCELLED"


def current_allocation(run: RunDir) -> Allocation:
    if HELD_NODES in os.environ:
        return HeldAllocation(run)
    # --local inside an interactive allocation sets both: the narrower one applies.
    in_slurm = "SLURM_JOB_ID" in os.environ and LOCAL_NODES not in os.environ
    return SlurmAllocation() if in_slurm else LocalAllocation(run)


def held_allocation(client: SlurmClient, nodes: int | None) -> tuple[str, int]:
    """Return the job id of this shell's allocation, and `nodes` or the number of its nodes.

    Raises a UserError if there is no allocation, it has ended, or it has fewer nodes.
    """
    job_id, nodelist = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_JOB_NODELIST")
    if not job_id or not nodelist:
        raise UserError("there is no allocation here; `salloc --nodes=N` first, or add --local")
    job = client.queue([job_id]).get(job_id)
    if job is None or not job.has_nodes:
        state = "gone" if job is None else job.state
        raise UserError(f"the allocation of this shell, job {job_id}, is {state}; `salloc` again")
    count = len(client.hostnames(nodelist))
    if nodes is not None and nodes > count:
        raise UserError(f"job {job_id} holds {count} nodes, fewer than --nodes {nodes}")
    return job_id, nodes or count


def node_command(cluster: Cluster, module: str = "slurmllm") -> list[str]:
    """Return `python -m slurmllm` on the nodes, for a verb outside a run."""
    python = sys.executable if cluster.container is not None else cluster.python
    return [python or sys.executable, "-P", "-m", module]


def task_command(command: Command) -> list[str]:
    """Return the command of a task of srun: after cluster.setup, and in cluster.container."""
    inside = in_container(command)
    # With pyxis the task itself is inside, where the site's modules are not.
    by_srun = CONTAINER_PYTHON in os.environ and CONTAINER not in os.environ
    return inside if by_srun else in_setup(inside)


def export_site(config: RunConfig, folders: Sequence[Path]) -> None:
    """Set what a batch script exports for its tasks."""
    for name in JOB_VARIABLES:  # of a job that this process runs in
        os.environ.pop(name, None)
    cluster = config.cluster
    os.environ[SETUP] = "\n".join(cluster.setup)
    if cluster.container is not None:
        prefix = shlex.join(
            container_arguments(cluster.container, cluster.device, [*folders, cluster.node_local])
        )
        os.environ[CONTAINER_PYTHON] = cluster.container.python
        os.environ["LOGNAME"] = login_name()  # the image's passwd need not know it
        os.environ[SRUN_OPTIONS if cluster.container.srun_runs_it else CONTAINER] = prefix


def launch_line(nodes: str, stage: Stage, options: Sequence[str]) -> str:
    """Return the srun of an attempt as a reader of the batch script may type it."""
    srun = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", *_ONE_A_NODE, *_LAUNCH]
    return (
        f'{shlex.join([*srun, *step_options(options)])} "$SLURMLLM_PYTHON" -P -m slurmllm launch '
        f'"$SLURMLLM_RUN" --stage {stage} --attempt N'
    )


def allocate_nodes(
    config: RunConfig,
    command: Command,
    job_name: str,
    *,
    nodes: int | None = None,
    local: bool = False,
    options: Mapping[str, str | None] | None = None,
    folders: Sequence[Path] = (),
) -> Allocation:
    """Return the nodes for a verb: this machine, or those of the current job or of a new one.

    Inside an allocation (salloc, a batch script) these are its nodes, unless a number is given.
    Else this function does not return: salloc replaces this process and runs the verb again inside
    the new allocation. `command` is the verb with its arguments, without those that choose the
    nodes; `options` are salloc's, by name; `folders` are shown to a container.
    Raises a SlurmError if salloc is not installed.
    """
    if local:
        os.environ[LOCAL_NODES] = str(nodes or 1)
        return LocalAllocation()
    export_site(config, folders)
    salloc_options = dict(options or {})
    inside = {"SLURM_JOB_ID", "SLURM_JOB_NODELIST"} <= os.environ.keys()
    if inside and nodes is None and not salloc_options.get("nodelist"):
        return SlurmAllocation()
    if shutil.which("salloc") is None:
        raise SlurmError(
            "salloc is not on the PATH; run this on a node of the Slurm cluster, or add --local "
            "to use this machine"
        )
    check_configuration_file()
    salloc_options["partition"] = salloc_options.get("partition") or config.cluster.partition
    salloc_options["time"] = salloc_options.get("time") or "15"
    if nodes is not None or not salloc_options.get("nodelist"):
        salloc_options["nodes"] = str(nodes or 1)
    salloc = ["salloc", f"--job-name={job_name}", "--ntasks-per-node=1"]
    salloc += [f"--{name}={value}" for name, value in salloc_options.items() if value]
    salloc += ["--exclusive"] if config.cluster.exclusive else []
    salloc += config.cluster.directives
    environment = slurm_environment(salloc=True)
    # Slurm's accounting stores the command line, for everybody; these verbs need no secrets.
    command = [argument for argument in command if not is_secret_option(argument)]
    return os.execvpe("salloc", [*salloc, *SLURMLLM, *command], environment)  # noqa: S606 (no shell)
