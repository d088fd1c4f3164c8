"""The nodes of an attempt and what can be done with them: Slurm's, or this machine's.

`--local` names its nodes local0, local1, …: each is a launcher of its own on this machine, so
that the path through rendezvous, records and restarts is the one that Slurm takes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from slurmllm.errors import SlurmError
from slurmllm.records import JobsRecord
from slurmllm.rundir import RunDir, Stage
from slurmllm.slurm.client import SlurmClient, SlurmCommands
from slurmllm.supervise.interfaces import reachable_address

LOCAL_NODES = "SLURMLLM_LOCAL_NODES"
LOCAL_RESTARTS = "SLURMLLM_LOCAL_RESTARTS"  # as SLURM_RESTART_COUNT
NODE_RANK = "SLURMLLM_NODE_RANK"
NODE_NAME = "SLURMLLM_NODE"
SHARING = "SLURMLLM_SHARING"  # workers that share a machine
SLURMLLM = (sys.executable, "-m", "slurmllm")  # on every node: the interpreter is shared
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Allocation(ABC):
    """The nodes that an attempt runs on; the first one is the supervisor's own."""

    nodes: tuple[str, ...]
    job_id: str | None
    restart_count: int = 0

    @property
    @abstractmethod
    def master_addr(self) -> str:
        """The name or address by which all nodes reach the first one."""

    @abstractmethod
    def launch(self, run_path: Path, stage: Stage, attempt: int) -> list[subprocess.Popen[bytes]]:
        """Start a launcher on every node; the processes end when the launchers have."""

    @abstractmethod
    def ask(self, command: Sequence[str]) -> list[subprocess.Popen[bytes]]:
        """Start a command on every node, whose words come through the processes' pipes.

        It takes nothing away from what else runs there, and one node's end ends no other's.
        """

    @abstractmethod
    def broadcast(self, source: Path, target: Path) -> str | None:
        """Copy a file to the same path on every node; returns why it could not, or None."""

    @abstractmethod
    def state(self) -> str:
        """Slurm's word for the job now; of a local one `RUNNING` or `CANCELLED`."""


class SlurmAllocation(Allocation):
    """The nodes of the Slurm job that this process is the batch script of."""

    job_id: str

    def __init__(self, client: SlurmClient | None = None) -> None:
        self.client = client or SlurmCommands()
        self.job_id = os.environ["SLURM_JOB_ID"]
        self.restart_count = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self.nodes = tuple(self.client.hostnames(os.environ["SLURM_JOB_NODELIST"]))

    @property
    def master_addr(self) -> str:
        """The first node of this attempt: a requeued job may have others than before."""
        return reachable_address(self.nodes[0])

    def launch(self, run_path: Path, stage: Stage, attempt: int) -> list[subprocess.Popen[bytes]]:
        """One srun step, a launcher a node."""
        # One launcher's failure ends the step on the other nodes too.
        options = ["--kill-on-bad-exit=1"]
        return [self._srun(options, _launcher(run_path, stage, attempt), None)]

    def ask(self, command: Sequence[str]) -> list[subprocess.Popen[bytes]]:
        """One srun step beside others, a task a node."""
        options = ["--kill-on-bad-exit=0", "--overlap"]
        return [self._srun(options, command, subprocess.PIPE)]

    def _srun(
        self, options: Sequence[str], command: Sequence[str], output: int | None
    ) -> subprocess.Popen[bytes]:
        """One step, a task a node; its output in a pipe, or where this process's goes."""
        srun = [
            "srun",
            f"--nodes={len(self.nodes)}",
            f"--ntasks={len(self.nodes)}",
            "--ntasks-per-node=1",
            # A node's only task has all of it; Slurm would bind one task to one CPU.
            "--cpu-bind=none",
            "--input=none",
            *(f"--cpus-per-task={cpus}" for cpus in [os.environ.get("SLURM_CPUS_ON_NODE")] if cpus),
            *options,
            *command,
        ]
        errors = None if output is None else subprocess.STDOUT
        try:
            return subprocess.Popen(srun, stdout=output, stderr=errors)
        except OSError as error:
            raise SlurmError(f"srun cannot be started on {self.nodes[0]}: {error}") from error

    def broadcast(self, source: Path, target: Path) -> str | None:
        """Through sbcast's tree; nodes without it read the shared file system once each."""
        try:
            done = subprocess.run(
                ["sbcast", "--force", str(source), str(target)],
                capture_output=True, text=True, errors="replace", timeout=600, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        return None if done.returncode == 0 else (done.stderr.strip() or f"exit {done.returncode}")

    def state(self) -> str:
        """Slurm's word for this start of the job; UNKNOWN where Slurm does not answer.

        From the accounting where there is one: squeue says COMPLETING to every ending alike.
        """
        rows = [row for row in self.client.accounting(self.job_id) if row.job_id == self.job_id]
        if self.restart_count < len(rows):
            return rows[self.restart_count].state
        try:
            job = self.client.queue([self.job_id]).get(self.job_id)
        except SlurmError:
            return "UNKNOWN"
        return job.state if job is not None else "UNKNOWN"


class LocalAllocation(Allocation):
    """This machine, as one node or several.

    Args:
        run: The run that it works for; None where it is no run's.
    """

    job_id = None

    def __init__(self, run: RunDir | None = None) -> None:
        self._run = run
        self.restart_count = int(os.environ.get(LOCAL_RESTARTS) or 0)
        count = int(os.environ.get(LOCAL_NODES) or 1)
        self.nodes = tuple(f"local{index}" for index in range(count))

    @property
    def master_addr(self) -> str:
        """The loopback address: nothing leaves this machine."""
        return "127.0.0.1"

    def launch(self, run_path: Path, stage: Stage, attempt: int) -> list[subprocess.Popen[bytes]]:
        """One launcher process a node."""
        return self._start(_launcher(run_path, stage, attempt), None)

    def ask(self, command: Sequence[str]) -> list[subprocess.Popen[bytes]]:
        """One process a node."""
        return self._start(command, subprocess.PIPE)

    def _start(self, command: Sequence[str], output: int | None) -> list[subprocess.Popen[bytes]]:
        errors = None if output is None else subprocess.STDOUT
        return [
            subprocess.Popen(
                command,
                env={**os.environ, NODE_RANK: str(index), NODE_NAME: name},
                preexec_fn=die_with_parent, stdout=output, stderr=errors,
            )
            for index, name in enumerate(self.nodes)
        ]  # fmt: skip

    def broadcast(self, source: Path, target: Path) -> str | None:
        """Nothing to do: every launcher reads the run directory on this machine."""
        return None

    def state(self) -> str:
        """Running while this process does, unless `slurmllm cancel` has ended it."""
        if self._run is None or not self._run.jobs.is_file():
            return "RUNNING"
        sent = JobsRecord.load(self._run.jobs).submissions[-1]
        return "RUNNING" if sent.cancelled_at is None else "CANCELLED"


def current_allocation(run: RunDir) -> Allocation:
    """The nodes that this process was started on, for a run."""
    # --local inside an interactive allocation has both: the narrower wish counts.
    in_slurm = "SLURM_JOB_ID" in os.environ and LOCAL_NODES not in os.environ
    return SlurmAllocation() if in_slurm else LocalAllocation(run)


def die_with_parent() -> None:
    """In a child before exec: end when the parent does, however it does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    """A TCP port that nobody listens on now, on this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _launcher(run_path: Path, stage: Stage, attempt: int) -> list[str]:
    return [*SLURMLLM, "launch", str(run_path), "--stage", stage, "--attempt", str(attempt)]
