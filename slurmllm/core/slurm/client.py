"""The interface to Slurm: a few methods over Slurm's own commands.

tests/fake_slurm.py has the same methods in memory; tests/core/slurm/ runs the same tests on both.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from slurmllm.core.errors import SlurmError
from slurmllm.core.run.safe_files import login_name
from slurmllm.core.slurm.error_texts import fault_of
from slurmllm.core.slurm.setup import PREDECESSOR, SRUN_OPTIONS, slurm_environment

# Slurm's long names (squeue(1), JOB STATE CODES) of the states of jobs that have ended. Jobs in all
# other states are active, also in those that newer versions add.
ENDED_STATES = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"}
    | {"PREEMPTED", "TIMEOUT"}
)
# Those of jobs that have no nodes yet, or none any more.
WAITING_STATES = frozenset(
    {"PENDING", "CONFIGURING", "POWER_UP_NODE", "REQUEUED", "REQUEUE_FED", "EXPEDITING"}
    | {"REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT", "LAUNCH_FAILED", "RECONFIG_FAIL"}
)
COMMAND_TIMEOUT_S = 60
ADOPTION_S = 30.0  # for a job to appear whose sbatch gave no answer
RESPONSE_S = 10.0  # for a process to start and end on a node
PATIENCE_S = 300.0  # for slurmctld to be restarted, or its backup to take over
_RETRY_S = 2.0
# slurmctld got the request, and may have carried it out (slurm_errno.c).
_NO_REPLY = re.compile(r"Socket timed out on send/recv|Zero Bytes were transmitted")
# Refusals of a job for the nodes that it may use (slurm_errno.c).
_NO_NODES = re.compile(
    r"Requested (nodes? (?!has)|(partition|topology) conf|reservation not usable|more tasks)"
    r"|Required (node|partition) not|More processors requested|Invalid node name"
)
_UNKNOWN_NODE = "Invalid node name"  # Slurm's error for a node that is not in slurm.conf
_EXCLUDE = re.compile(r"^#SBATCH --exclude=(\S+)", re.MULTILINE)
# Base states (sinfo(1), NODE STATE CODES) of a node that runs no job until an administrator acts.
_UNUSABLE = re.compile(r"down|drain|fail|error|unknown|inval")
_SINFO = ["sinfo", "--noheader", "--Node"]
_SACCTMGR = ["sacctmgr", "--noheader", "--parsable2", "show"]
T = TypeVar("T")
Fields = dict[str, str]  # by name
Names = Sequence[str]  # of jobs or nodes
log = logging.getLogger(__name__)
# All commands that slurmllm calls; srun and sbcast are called inside the jobs.
COMMANDS = ("sbatch", "squeue", "sacct", "scontrol", "scancel", "sinfo", "srun", "sbcast")


class UnansweredError(SlurmError):
    """A command gave no answer in time, so what it has done is unknown."""


class QueuedJob(NamedTuple):
    """A job in slurmctld's memory."""

    job_id: str
    state: str
    reason: str
    nodes: str
    excluded: str = ""  # nodes, as Slurm writes them: `n[1-2],n4`
    requested: str = ""  # nodes, by --nodelist
    comment: str = ""

    @property
    def active(self) -> bool:
        return self.state not in ENDED_STATES

    @property
    def has_nodes(self) -> bool:
        """Whether it was started and has not ended: suspended ones and those that resize, too."""
        return self.active and self.state not in WAITING_STATES


class BatchJob(NamedTuple):
    """What slurmctld shows of the current start of a job."""

    state: str
    restarts: int  # how often the job was requeued
    host: str  # node of the batch script; empty while the job is pending
    excluded: str = ""  # nodes, as Slurm writes them: `n[1-2],n4`
    time_limit: str = ""  # `1-00:00:00`, UNLIMITED
    preempt_time: str = ""  # when Slurm began to preempt it; `None`
    eligible_time: str = ""


class AccountingRow(NamedTuple):
    """One incarnation of a job, or one of its steps (`job_id` holds a dot), from sacct."""

    job_id: str
    state: str
    exit_code: str
    nodes: str
    start: str
    end: str
    submit: str = ""
    eligible: str = ""


class PartitionNode(NamedTuple):
    """A node of a partition."""

    partition: str
    default: bool  # whether it is the default partition
    up: bool  # whether the partition is up
    name: str
    state: str  # lower case, with Slurm's suffix (`*` not responding, `~` powered down)
    cpus: int
    gres: str = ""  # generic resources, such as `gpu:a100:8`; may be empty
    reason: str = ""  # why it is down or drained, as Slurm or an administrator wrote it
    memory_mb: int = 0
    features: str = ""  # separated by commas; may be empty

    @property
    def in_service(self) -> bool:
        """Whether it may run a job before an administrator acts; `*`: it does not respond."""
        return not (_UNUSABLE.match(self.state) or self.state.endswith("*"))


@dataclass(frozen=True)
class Association:
    """An account that a user may charge."""

    account: str
    default: bool  # whether jobs without --account charge it
    partition: str  # the only one where it may be charged; empty: any
    qos: tuple[str, ...]
    default_qos: str = ""


def count_gpus(gres: str) -> int:
    """`gpu:a100:8(S:0-1),gpu:2` → 10; `gpu` → 1."""
    # A type holds more than digits, such as 1g.10gb.
    counts = re.findall(r"(?:^|,)gpu(?::\d*[^:,(\d][^:,(]*)?(?::(\d+))?(?![^,(:])", gres)
    return sum(int(count or 1) for count in counts)


def to_unix(timestamp: str) -> float | None:
    """Return the Unix time of Slurm's local time; None for `Unknown` and `None`."""
    try:
        return datetime.fromisoformat(timestamp).timestamp()
    except ValueError:
        return None


def _is_unreachable(error: SlurmError) -> bool:
    # `network`: of a client command, a lower layer's line about the way to slurmctld comes first.
    return fault_of(str(error)) in ("controller", "network")


def retry_unreachable(call: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
    """Retry a call while slurmctld is unreachable, for `patience_s`; other errors are raised."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return call()
        except SlurmError as error:
            if not _is_unreachable(error) or time.monotonic() > deadline:
                raise
            log.warning("slurmctld is unreachable; retrying: %s", error)
            time.sleep(_RETRY_S)


def wait_for(condition: Callable[[], object], patience_s: float, poll_s: float) -> bool:
    """Return whether a condition becomes true within `patience_s`."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True


def step_beside(job_id: str, nodes: Names) -> list[str]:
    """Return the command of a step with a task on each of `nodes`, while other steps run.

    The step shares CPUs (--overlap) and memory (--mem=0) of the job's other steps.
    """
    return [
        "srun",
        f"--jobid={job_id}",
        f"--nodelist={','.join(nodes)}",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes)}",
        "--overlap",
        "--mem=0",
        "--cpu-bind=none",
        "--input=none",
        "--quiet",
    ]


ELSEWHERE = "run slurmllm on a node of the Slurm cluster"


class SlurmClient:
    """The real Slurm, through sbatch, squeue, sacct, scontrol, scancel and sinfo."""

    def submit(
        self,
        script: str,
        after_ok: str | None = None,
        exclude: Names = (),
        requeue: bool = True,
        after: str | None = None,
        name: str | None = None,
        umask: int = -1,
    ) -> str:
        """Submit the text of a batch script (a file may be replaced meanwhile); return the job id.

        Args:
            after_ok: A job whose success the new job waits for.
            exclude: Nodes, in addition to those of the script. Of both, nodes that are not in
                slurm.conf are left out.
            requeue: Whether the job may be requeued, if the script has --requeue.
            after: A job whose end, of any kind, the new job waits for; the new one finds it in
                $SLURMLLM_PREDECESSOR.
            name: The job's name, in place of that of the script; the job starts when all of this
                user's earlier jobs of that name have ended, requeued ones included.
            umask: The job's, if not this process's.

        Raises a SlurmError if sbatch is missing or refuses, an UnansweredError if it gives no
        answer, nor does slurmctld, which may have the job.
        """
        depends = [f"afterok:{after_ok}"] if after_ok else []
        depends += [f"afterany:{after}"] if after else []
        depends += ["singleton"] if name else []
        options = ["--parsable"]
        options += [f"--dependency={','.join(depends)}"] if depends else []
        options += [f"--job-name={name}"] if name else []
        options += [] if requeue else ["--no-requeue"]
        # sbatch hands its environment to the job.
        environment = slurm_environment() | ({PREDECESSOR: after} if after else {})
        # Not in the job's comment, which sites give a meaning of their own.
        token = f"# submission {os.urandom(8).hex()}"
        content = f"{script.rstrip()}\n{token}\n"
        try:
            output = self._sbatch(content, exclude, *options, env=environment, umask=umask)
            job_id = output.strip().rpartition("\n")[2].partition(";")[0]
            if not job_id.isdigit():
                raise UnansweredError(f"sbatch printed {output!r} instead of a job id")
        except UnansweredError as error:
            match = re.search(r"^#SBATCH --job-name=(\S+)", script, re.MULTILINE)
            return self._adopt(name or (match[1] if match else "sbatch"), token, error)
        return job_id

    def _adopt(self, name: str, token: str, unanswered: UnansweredError) -> str:
        """Return the job of a submission without an answer: its script holds `token`."""
        command = ["squeue", "--noheader", "--me", "--format=%i", f"--name={name}"]
        deadline = time.monotonic() + ADOPTION_S
        fix = f"`squeue --me --name={name}` shows a job of it, and `scancel ID` ends that"
        try:
            while time.monotonic() < deadline:
                for job_id in retry_unreachable(lambda: _run(*command), ADOPTION_S).split():
                    if token in _run("scontrol", "write", "batch_script", job_id, "-"):
                        log.warning(
                            "%s; the queue has job %s of this submission, which is used",
                            unanswered,
                            job_id,
                        )
                        return job_id
                time.sleep(_RETRY_S)
        except SlurmError as error:
            raise UnansweredError(f"{unanswered}; it may have submitted a job: {fix}") from error
        raise SlurmError(
            f"{unanswered}; no job of the submission appeared in {ADOPTION_S:g} s; later, {fix}"
        )

    def can_start(self, script: str, exclude: Names) -> bool:
        """Return whether a job could start, now or later, without these nodes (sbatch --test-only).

        Slurm itself counts the nodes that the job may use: partitions, features, reservation,
        GRES, states. True too if it refuses the test for another reason than its nodes, such as a
        limit on submitted jobs.
        """
        try:
            self._sbatch(script, exclude, "--test-only")
        except SlurmError as error:
            if _is_unreachable(error):
                raise
            return not _NO_NODES.search(str(error))
        return True

    def _sbatch(self, script: str, exclude: Names, *options: str, **kwargs: Any) -> str:
        # sbatch uses only the last --exclude.
        names = list(dict.fromkeys([*_EXCLUDE.findall(script), *exclude]))

        def sbatch(nodes: str) -> str:
            option = [f"--exclude={nodes}"] if names else []
            return _run("sbatch", *options, *option, input=script, **kwargs)

        return self._with_known(names, sbatch)

    def _with_known(self, nodes: Names, call: Callable[[str], str]) -> str:
        """Call with a list of nodes; if Slurm refuses it, again without those not in slurm.conf."""
        try:
            return call(",".join(nodes))
        except SlurmError as error:
            if not nodes or _UNKNOWN_NODE not in str(error):
                raise
            try:
                states = self.node_states()
                names = self.hostnames(",".join(nodes))
            except SlurmError:
                raise error from None
        unknown = " ".join(name for name in names if name not in states)
        log.warning("left out of the excluded nodes, as not in slurm.conf: %s", unknown)
        return call(",".join(name for name in names if name in states))

    def check_srun(self, options: Sequence[str]) -> None:
        """Raise SlurmError with srun's message if it does not take these options."""
        if options:
            _run("srun", *options, "--version")  # reads the options before it prints

    def queue(self, job_ids: Names) -> dict[str, QueuedJob]:
        """Return those of the jobs that slurmctld still has in memory, by id."""
        if not job_ids:
            return {}
        try:
            rows = _rows(
                7,
                "squeue",
                "--noheader",
                "--states=all",
                "--format=%i|%T|%r|%N|%x|%n|%k",
                f"--jobs={','.join(job_ids)}",
            )
        except SlurmError as error:
            if "Invalid job id" in str(error):  # a single id that slurmctld has purged already
                return {}
            raise
        return {row[0]: QueuedJob(*(f.removesuffix("(null)") for f in row)) for row in rows}

    def jobs_with_output(self, names: Names, paths: Sequence[Path]) -> list[str]:
        """Return this user's jobs of some names that write their output into one of some files."""
        output = _run(
            "squeue",
            "--noheader",
            "--me",
            f"--name={','.join(names)}",
            "--Format=JobID:30,STDOUT:4096",
        )
        rows = (line.split(None, 1) for line in output.splitlines())
        return [row[0] for row in rows if len(row) == 2 and Path(row[1].strip()) in paths]

    def successors(self, job_id: str, name: str) -> list[str]:
        """Return the pending jobs of a name that wait for the end of a job."""
        waits = re.compile(rf"\bafterany:{job_id}\b")
        rows = _rows(
            2,
            "squeue",
            "--noheader",
            "--me",
            "--states=PENDING",
            "--format=%i|%E",
            f"--name={name}",
        )
        return [pending for pending, dependency in rows if waits.search(dependency)]

    def accounting(self, *job_ids: str) -> list[AccountingRow]:
        """Return every incarnation and step of jobs, oldest first; empty without accounting."""
        if not job_ids:
            return []
        rows = _rows(
            8,
            "sacct",
            "--noheader",
            "--parsable2",
            "--duplicates",
            "--format=JobID,State,ExitCode,NodeList,Start,End,Submit,Eligible",
            f"--jobs={','.join(job_ids)}",
            accounting=True,
        )
        # "CANCELLED by 1000" → "CANCELLED"
        return [AccountingRow(r[0], r[1].split(" ")[0], *r[2:]) for r in rows]

    def requeue(self, job_id: str) -> None:
        # CAUTION: Slurm then sends SIGTERM to all processes of the job, this command among them.
        _run("scontrol", "requeue", job_id, through_sigterm=True)

    def batch_job(self, job_id: str) -> BatchJob:
        """Return the current start of a job; raises SlurmError if the job is unknown."""
        output = _run("scontrol", "show", "job", "--oneliner", job_id, through_sigterm=True)
        details = ("BatchHost", "ExcNodeList", "TimeLimit", "PreemptTime", "EligibleTime")
        # The first of a name: later fields hold the user's own text.
        fields = dict(reversed(re.findall(r"\b(\w+)=(\w\S*)", output)))
        count = fields.get("Restarts", "")
        return BatchJob(
            fields.get("JobState", "UNKNOWN"),
            int(count) if re.fullmatch(r"\d{1,9}", count) else 0,
            *(fields.get(name, "") for name in details),
        )

    def cancel(self, job_ids: Names, kill: bool = False) -> None:
        """Cancel jobs or steps, `kill` by SIGKILL; those that have ended are ignored."""
        if job_ids:
            _run("scancel", "--quiet", *(["--signal=KILL"] if kill else []), "--", *job_ids)

    def steps(self, job_id: str, name: str) -> list[str]:
        """Return the ids of a job's steps of a name that have not ended."""
        rows = _rows(2, "squeue", "--noheader", "--steps", f"--jobs={job_id}", "--format=%i|%j")
        return [step for step, step_name in rows if step_name == name]

    def shrink(self, job_id: str, nodes: Names) -> None:
        """Reduce a running job to some of its nodes, if SchedulerParameters permit it."""
        with tempfile.TemporaryDirectory() as folder:  # scontrol leaves scripts in its folder
            _update(f"JobId={job_id}", f"NodeList={','.join(nodes)}", cwd=folder)

    def exclude(self, job_id: str, nodes: Names) -> None:
        """Set the excluded nodes of a pending job; Slurm refuses this for a running job.

        Nodes that are not in slurm.conf are left out.
        """
        self._with_known(nodes, lambda names: _update(f"JobId={job_id}", f"ExcNodeList={names}"))

    def comment(self, job_id: str, message: str) -> None:
        """Set the comment of a job, which a requeue keeps."""
        _update(f"JobId={job_id}", f"Comment={message}")

    def delay(self, job_id: str, seconds: float) -> None:
        """Delay the start of a pending job by at least `seconds`; never moves it earlier."""
        eligible = to_unix(self.batch_job(job_id).eligible_time)
        # Slurm itself delays a requeued job until its old credentials have expired.
        if eligible is None or eligible - time.time() < seconds:
            _update(f"JobId={job_id}", f"StartTime=now+{math.ceil(seconds)}")

    def responds(self, job_id: str, node: str) -> bool:
        """Return whether a process can be started on a node of a job within `RESPONSE_S`."""
        try:
            _run(*step_beside(job_id, [node]), "true", timeout_s=RESPONSE_S)
        except SlurmError:
            return False
        return True

    def drain(self, node: str, reason: str) -> None:
        """Drain a node; raises SlurmError if permission is denied or the node is unknown."""
        _update(f"NodeName={node}", "State=DRAIN", f"Reason={reason}")

    def hostnames(self, nodelist: str) -> list[str]:
        """Return the names in a node list such as `n[1-4]`, in Slurm's order."""
        return _run("scontrol", "show", "hostnames", nodelist, through_sigterm=True).split()

    def node_states(self) -> Fields:
        """Return the state of every node, lower case; `*` at its end: the node does not respond."""
        return dict(_rows(2, *_SINFO, "--all", "--format=%N|%T", through_sigterm=True))

    def missing_commands(self) -> list[str]:
        return [command for command in COMMANDS if shutil.which(command) is None]

    def cluster_name(self) -> str:
        return os.environ.get("SLURM_CLUSTER_NAME") or self.settings().get("ClusterName", "")

    def settings(self) -> Fields:
        rows = (line.partition("=") for line in _run("scontrol", "show", "config").splitlines())
        return {key.strip(): value.strip() for key, equals, value in rows if equals}

    def check_accounting(self) -> None:
        """Query the accounting database; raises SlurmError if none is reachable."""
        _run("sacct", "--noheader", "--allocations", "--starttime=now")

    def partition_nodes(self) -> list[PartitionNode]:
        """Return every node of every partition that this user may use."""
        rows = _rows(9, *_SINFO, "--format=%P|%a|%N|%T|%c|%m|%G|%f|%E")
        return [
            PartitionNode(
                partition=partition.removesuffix("*"),
                default=partition.endswith("*"),
                up=up == "up",
                name=name,
                state=state,
                cpus=int(cpus),
                gres=gres.removesuffix("(null)"),
                reason="" if reason == "none" else reason,
                memory_mb=int(memory),
                features=features.removesuffix("(null)"),
            )
            for partition, up, name, state, cpus, memory, gres, features, reason in rows
            if cpus.isdecimal() and memory.isdecimal()
        ]

    def partitions(self) -> dict[str, Fields]:
        """Return the fields of every partition that this user may see, such as MaxTime."""
        lines = _run("scontrol", "show", "partition", "--oneliner").splitlines()
        rows = (dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines)
        return {row["PartitionName"]: row for row in rows if "PartitionName" in row}

    def qos_flags(self) -> Fields:
        """Return the flags of every QOS, such as PartitionTimeLimit; empty without accounting."""
        return dict(_rows(2, *_SACCTMGR, "qos", "format=name,flags", accounting=True))

    def associations(self) -> list[Association]:
        """Return the accounts that this user may charge; empty without accounting."""
        rows = _rows(
            5,
            *_SACCTMGR,
            "user",
            login_name(),
            "withassoc",
            "format=defaultaccount,account,partition,qos,defaultqos",
            accounting=True,
        )
        return [
            Association(account, account == default, partition, tuple(qos.split(",")), default_qos)
            for default, account, partition, qos, default_qos in rows
        ]


def step_options(options: Sequence[str] | None = None) -> list[str]:
    """Return the options of each srun in this job; --mem=0, all memory, if none says how much.

    `options` are the run's, by default of this job's environment.
    """
    options = [*(shlex.split(os.environ.get(SRUN_OPTIONS, "")) if options is None else options)]
    # A job's --mem-per-cpu would leave no memory to a second step.
    sized = any(re.match("--mem(-per-|=|$)", option) for option in options)
    return options if sized else ["--mem=0", *options]


def check_configuration_file() -> None:
    """Raise SlurmError if $SLURM_CONF is no file, for which a command would wait for a minute."""
    if (conf := os.environ.get("SLURM_CONF")) and not Path(conf).exists():
        raise SlurmError(f"$SLURM_CONF names {conf}, which does not exist; unset or correct it")


def _rows(
    columns: int, *command: str, accounting: bool = False, through_sigterm: bool = False
) -> list[list[str]]:
    """Return the rows that a command prints, with `|` between columns; others are left out.

    `accounting`: no rows if it fails, as a cluster may run without accounting.
    """
    try:
        lines = _run(*command, through_sigterm=through_sigterm).splitlines()
    except SlurmError:
        if not accounting:
            raise
        return []
    rows = (line.split("|", columns - 1) for line in lines)
    return [[field.strip() for field in row] for row in rows if len(row) == columns]


def _update(*fields: str, cwd: str | None = None) -> str:
    # It may be called by a process of the job itself, after a requeue.
    return _run("scontrol", "update", *fields, through_sigterm=True, cwd=cwd)


def _run(
    *command: str,
    through_sigterm: bool = False,
    timeout_s: float = COMMAND_TIMEOUT_S,
    **options: Any,
) -> str:
    """Run a Slurm command and return its standard output; `options` are of `subprocess.run`.

    `through_sigterm`: it survives the end of the job that it is called from.
    """
    if shutil.which(command[0]) is None:
        raise SlurmError(f"{command[0]} is not on the PATH; {ELSEWHERE}")
    options.setdefault("env", slurm_environment())
    if not Path("/proc/self/cwd").readlink().exists():  # removed: sbatch and srun need one
        options["cwd"] = options.get("cwd") or "/"
    if through_sigterm:  # stays ignored across exec
        options["preexec_fn"] = lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN)
    options |= {"capture_output": True, "text": True, "errors": "replace"}
    try:
        check_configuration_file()
        done = subprocess.run(command, timeout=timeout_s, **options)
    except OSError as error:
        raise SlurmError(f"{command[0]} cannot be started: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise UnansweredError(
            f"{command[0]} gave no answer for {timeout_s:g} s; is slurmctld up? try `scontrol ping`"
        ) from error
    if done.returncode != 0:
        output = " ".join((done.stderr.strip() or done.stdout).split())
        error_class = UnansweredError if _NO_REPLY.search(output) else SlurmError
        raise error_class(
            f"{command[0]} failed with exit code {done.returncode}: {output or 'no message'}"
        )
    return str(done.stdout)
