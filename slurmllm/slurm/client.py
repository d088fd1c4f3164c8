"""The seam to Slurm: a few verbs, over Slurm's own commands.

`fake.py` has the same verbs in memory; tests/slurm/ runs the same tests on both.
"""

from __future__ import annotations

import math
import re
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from slurmllm.errors import SlurmError

# Slurm's long state names (squeue(1), JOB STATE CODES).
ACTIVE_STATES = frozenset(
    {
        "PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED",
        "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED",
    }
)  # fmt: skip
COMMAND_TIMEOUT_S = 60
ANSWER_S = 10.0  # for a process to start and end on a node
PATIENCE_S = 300.0  # with a slurmctld that does not answer: it may be started again
_RETRY_S = 2.0
# What commands say while slurmctld is down or starting (slurm_errno.c, and slurmctld's fail-over).
_UNREACHABLE = re.compile(
    r"Unable to contact slurm controller|controller not responding|Unable to connect"
    r"|Connection refused|Connection timed out|Socket timed out|Zero Bytes were transmitted"
    r"|Transport endpoint is not connected|Communication connection failure|backup controller"
    r"|in standby mode|gave no answer|temporarily unable|Unexpected message received"
)
T = TypeVar("T")
# All that slurmllm calls; srun and sbcast inside the jobs.
COMMANDS = ("sbatch", "squeue", "sacct", "scontrol", "scancel", "sinfo", "srun", "sbcast")


@dataclass(frozen=True)
class QueuedJob:
    """A job that Slurm still holds."""

    job_id: str
    state: str
    reason: str
    nodes: str

    @property
    def active(self) -> bool:
        """Whether the job waits or runs."""
        return self.state in ACTIVE_STATES


@dataclass(frozen=True)
class AccountingRow:
    """One incarnation of a job, or one of its steps (`job_id` holds a dot), from sacct."""

    job_id: str
    state: str
    exit_code: str
    nodes: str
    start: str
    end: str
    submit: str = ""
    eligible: str = ""


@dataclass(frozen=True)
class PartitionNode:
    """A node as one of its partitions shows it.

    Attributes:
        partition: The partition's name.
        default: Whether jobs that name no partition go there.
        up: Whether the partition takes and starts jobs.
        name: The node's.
        state: Lower case, with Slurm's suffix (`*` not responding, `~` powered down).
        cpus: As Slurm counts them.
        gres: Generic resources, such as `gpu:a100:8`; empty where there are none.
    """

    partition: str
    default: bool
    up: bool
    name: str
    state: str
    cpus: int
    gres: str = ""


def patiently(call: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
    """Ask Slurm again for some minutes while slurmctld is away.

    Raises:
        SlurmError: as `call` raises it: at once where Slurm answered, else after the patience.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return call()
        except SlurmError as error:
            if not _UNREACHABLE.search(str(error)) or time.monotonic() > deadline:
                raise
            print(f"Slurm does not answer, asked again: {error}", flush=True)
            time.sleep(_RETRY_S)


class SlurmClient(ABC):
    """What slurmllm asks of Slurm."""

    @abstractmethod
    def submit(self, script: Path, after_ok: str | None = None) -> str:
        """Submit a batch script, after another job's success where one is named.

        Returns:
            The job id.

        Raises:
            SlurmError: sbatch is absent or refused; the message holds its words.
        """

    @abstractmethod
    def queue(self, job_ids: Sequence[str]) -> dict[str, QueuedJob]:
        """The jobs of these that Slurm still holds in memory, by id."""

    @abstractmethod
    def accounting(self, job_id: str) -> list[AccountingRow]:
        """Every incarnation and step of a job, oldest first; empty without accounting."""

    @abstractmethod
    def requeue(self, job_id: str) -> None:
        """Put a running job back into the queue."""

    @abstractmethod
    def restarts(self, job_id: str) -> int:
        """How often a job was put back into the queue.

        Raises:
            SlurmError: Slurm does not know the job, or does not answer.
        """

    @abstractmethod
    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs; those that ended already are no error."""

    @abstractmethod
    def exclude(self, job_id: str, nodes: Sequence[str]) -> None:
        """Keep a job away from nodes from its next start on; none clears the list.

        Raises:
            SlurmError: the job runs; Slurm takes the list once a requeue has begun.
        """

    @abstractmethod
    def delay(self, job_id: str, seconds: float) -> None:
        """Have a waiting job start no sooner than in so many seconds; never sooner than before.

        Raises:
            SlurmError: the job runs, or Slurm does not know it.
        """

    @abstractmethod
    def answers(self, job_id: str, node: str) -> bool:
        """Whether a process can be started on a node of a job that runs, within some seconds."""

    @abstractmethod
    def drain(self, node: str, reason: str) -> None:
        """Let no more jobs start on a node.

        Raises:
            SlurmError: this user may not, or there is no such node.
        """

    @abstractmethod
    def hostnames(self, nodelist: str) -> list[str]:
        """The names in a node list such as `n[1-4]`, in Slurm's order."""

    @abstractmethod
    def node_states(self) -> dict[str, str]:
        """State of every node, lower case; a trailing `*` means that it does not respond."""

    @abstractmethod
    def missing_commands(self) -> list[str]:
        """Those of Slurm's commands that are not on the PATH."""

    @abstractmethod
    def settings(self) -> dict[str, str]:
        """What slurmctld runs with: slurm.conf's keys and `SLURM_VERSION`.

        Raises:
            SlurmError: slurmctld does not answer.
        """

    @abstractmethod
    def ask_accounting(self) -> None:
        """Ask the accounting database for something small.

        Raises:
            SlurmError: there is none, or it does not answer.
        """

    @abstractmethod
    def partition_nodes(self) -> list[PartitionNode]:
        """Every node of every partition that is open to this user."""


class SlurmCommands(SlurmClient):
    """The real thing: sbatch, squeue, sacct, scontrol, scancel, sinfo."""

    def submit(self, script: Path, after_ok: str | None = None) -> str:
        """See SlurmClient."""
        dependency = [f"--dependency=afterok:{after_ok}"] if after_ok else []
        words = _run(["sbatch", "--parsable", *dependency, str(script)])
        job_id = words.strip().splitlines()[-1].split(";")[0] if words.strip() else ""
        if not job_id.isdigit():
            raise SlurmError(f"sbatch answered {words!r} instead of a job id")
        return job_id

    def queue(self, job_ids: Sequence[str]) -> dict[str, QueuedJob]:
        """See SlurmClient."""
        if not job_ids:
            return {}
        command = ["squeue", "--noheader", "--states=all", "--format=%i|%T|%r|%N"]
        try:
            words = _run([*command, f"--jobs={','.join(job_ids)}"])
        except SlurmError as error:
            if "Invalid job id" in str(error):  # one id alone, already forgotten
                return {}
            raise
        rows = (line.split("|") for line in words.splitlines() if line.count("|") == 3)
        return {job: QueuedJob(job, state, reason, nodes) for job, state, reason, nodes in rows}

    def accounting(self, job_id: str) -> list[AccountingRow]:
        """See SlurmClient."""
        fields = "JobID,State,ExitCode,NodeList,Start,End,Submit,Eligible"
        try:
            words = _run(
                ["sacct", "--noheader", "--parsable2", "--duplicates", f"--jobs={job_id}",
                 f"--format={fields}"]
            )  # fmt: skip
        except SlurmError:  # a cluster may run without accounting
            return []
        rows = (line.split("|") for line in words.splitlines() if line.count("|") == 7)
        # "CANCELLED by 1000" → "CANCELLED"
        return [AccountingRow(r[0], r[1].split(" ")[0], *r[2:]) for r in rows]

    def requeue(self, job_id: str) -> None:
        """See SlurmClient."""
        # Slurm answers with SIGTERM to all processes of the job, this command among them.
        _run(["scontrol", "requeue", job_id], through_sigterm=True)

    def restarts(self, job_id: str) -> int:
        """See SlurmClient."""
        words = _run(["scontrol", "show", "job", "--oneliner", job_id], through_sigterm=True)
        found = re.search(r"\bRestarts=(\d+)", words)
        return int(found[1]) if found else 0

    def cancel(self, job_ids: Sequence[str]) -> None:
        """See SlurmClient."""
        if job_ids:
            _run(["scancel", "--quiet", *job_ids])

    def exclude(self, job_id: str, nodes: Sequence[str]) -> None:
        """See SlurmClient."""
        command = ["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(nodes)}"]
        _run(command, through_sigterm=True)  # a job's own process calls it after a requeue

    def delay(self, job_id: str, seconds: float) -> None:
        """See SlurmClient."""
        words = _run(["scontrol", "show", "job", "--oneliner", job_id], through_sigterm=True)
        found = re.search(r"\bEligibleTime=(\S+)", words)
        with suppress(ValueError):  # Unknown
            # A requeued job has a time of Slurm's own, by which its old credentials are over.
            if found and datetime.fromisoformat(found[1]).timestamp() - time.time() >= seconds:
                return
        update = ["scontrol", "update", f"JobId={job_id}", f"StartTime=now+{math.ceil(seconds)}"]
        _run(update, through_sigterm=True)

    def answers(self, job_id: str, node: str) -> bool:
        """See SlurmClient."""
        step = ["--overlap", "--nodes=1", "--ntasks=1", "--input=none", "--quiet", "true"]
        try:
            _run(["srun", f"--jobid={job_id}", f"--nodelist={node}", *step], timeout_s=ANSWER_S)
        except SlurmError:
            return False
        return True

    def drain(self, node: str, reason: str) -> None:
        """See SlurmClient."""
        _run(["scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}"])

    def hostnames(self, nodelist: str) -> list[str]:
        """See SlurmClient."""
        return _run(["scontrol", "show", "hostnames", nodelist]).split()

    def node_states(self) -> dict[str, str]:
        """See SlurmClient."""
        words = _run(["sinfo", "--noheader", "--Node", "--format=%N|%T"])
        return dict(line.split("|", 1) for line in words.split() if "|" in line)

    def missing_commands(self) -> list[str]:
        """See SlurmClient."""
        return [command for command in COMMANDS if shutil.which(command) is None]

    def settings(self) -> dict[str, str]:
        """See SlurmClient."""
        rows = (line.partition("=") for line in _run(["scontrol", "show", "config"]).splitlines())
        return {key.strip(): value.strip() for key, equals, value in rows if equals}

    def ask_accounting(self) -> None:
        """See SlurmClient."""
        _run(["sacct", "--noheader", "--allocations", "--starttime=now"])

    def partition_nodes(self) -> list[PartitionNode]:
        """See SlurmClient."""
        words = _run(["sinfo", "--noheader", "--Node", "--format=%P|%a|%N|%T|%c|%G"])
        rows = (line.strip().split("|") for line in words.splitlines() if line.count("|") == 5)
        return [
            PartitionNode(
                partition.removesuffix("*"), partition.endswith("*"), up == "up", name, state,
                int(cpus), "" if gres == "(null)" else gres,
            )
            for partition, up, name, state, cpus, gres in rows
        ]  # fmt: skip


def _ignore_sigterm() -> None:
    """In a child before exec: what is ignored stays so."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _run(
    command: list[str], through_sigterm: bool = False, timeout_s: float = COMMAND_TIMEOUT_S
) -> str:
    """Run a Slurm command and return what it printed.

    Args:
        command: The command.
        through_sigterm: Whether it goes on when Slurm ends the job that it is called from.
        timeout_s: Seconds until it counts as failed.

    Raises:
        SlurmError: absent, too slow or failed, with the command's own words.
    """
    if shutil.which(command[0]) is None:
        raise SlurmError(
            f"{command[0]} is not on the PATH; run slurmllm on a node of the Slurm cluster, or "
            "add --local to train on this machine"
        )
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace",
            timeout=timeout_s, check=False,
            preexec_fn=_ignore_sigterm if through_sigterm else None,
        )  # fmt: skip
    except OSError as error:
        raise SlurmError(f"{command[0]} cannot be started: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(
            f"{command[0]} gave no answer for {timeout_s:g} s; is slurmctld up? try `scontrol ping`"
        ) from error
    if done.returncode != 0:
        words = re.sub(r"\s+", " ", (done.stderr.strip() or done.stdout.strip()))
        raise SlurmError(
            f"{command[0]} failed with exit code {done.returncode}: {words or 'no message'}"
        )
    return done.stdout
