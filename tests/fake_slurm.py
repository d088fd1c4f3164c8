"""Slurm in memory, with the methods of `slurm/client.py`, for tests without a cluster.

Jobs are pending until `start` and end with `finish`; dependencies, requeue and node states behave
as in Slurm, as far as slurmllm depends on them. Nothing is executed.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slurmllm.core.errors import SlurmError
from slurmllm.core.slurm import client


@dataclass
class _Job:
    job_id: str
    script: str
    after_ok: str | None
    state: str = "PENDING"
    nodes: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    delay_s: float = 0.0
    after: str | None = None
    name: str | None = None
    comment: str = ""
    may_requeue: bool = True
    incarnations: list[client.AccountingRow] = field(default_factory=list)

    @property
    def wanted_nodes(self) -> int:
        match = re.search(r"^#SBATCH --nodes=(\d+)$", self.script, re.MULTILINE)
        return int(match.group(1)) if match else 1

    def row(self, state: str) -> client.AccountingRow:
        return client.AccountingRow(self.job_id, state, "0:0", ",".join(self.nodes), "", "")


def _of_script(script: str) -> list[str]:
    return re.findall(r"^#SBATCH --exclude=(\S+)", script, re.MULTILINE)


class FakeSlurm(client.SlurmClient):
    """A cluster that a test controls.

    Attributes:
        states: Node → state.
        refuse: Error message of sbatch; None: it accepts jobs.
        refuse_srun: Error message of srun; None: it accepts all options.
        missing: Commands that are not installed.
        config: The active configuration; None: slurmctld is unreachable.
        cpus: CPUs of every node.
        gres: Generic resources of every node.
        memory_mb: Memory of every node.
        unequal: Node → fields in which it differs from the others.
        limits: Fields of the partition, as of `scontrol show partition`.
        flags: QOS → its flags.
        waits: Job → reason why it is pending.
        partition: The one partition, the default.
        may_drain: Whether this user may drain nodes.
        may_requeue: Whether this user may requeue jobs.
        reasons: Drained node → reason.
        features: Node → its one feature.
        accounts: Associations of this user.
    """

    def __init__(self, nodes: Sequence[str] = ("n1", "n2", "n3", "n4")) -> None:
        self.states = dict.fromkeys(nodes, "idle")
        self.jobs: dict[str, _Job] = {}
        self.refuse: str | None = None
        self.refuse_srun: str | None = None
        self.missing: list[str] = []
        self.config: dict[str, str] | None = {
            "SLURM_VERSION": "22.05.8",
            "ClusterName": "fake",
            "JobRequeue": "1",
            "AccountingStorageType": "accounting_storage/slurmdbd",
        }
        self.cpus, self.gres, self.partition, self.memory_mb = 4, "", "main", 16000
        self.unequal: dict[str, dict[str, int | str]] = {}
        self.limits, self.flags = dict[str, str](), dict[str, str]()
        self.waits: dict[str, str] = {}
        self.may_drain, self.reasons = False, dict[str, str]()
        self.may_requeue, self.time_limit = True, "1-00:00:00"
        self.features: dict[str, str] = {}
        self.accounts: list[client.Association] = []
        self._ids = itertools.count(1)

    def submit(
        self,
        script: str,
        after_ok: str | None = None,
        exclude: Sequence[str] = (),
        requeue: bool = True,
        after: str | None = None,
        name: str | None = None,
        umask: int = -1,
    ) -> str:
        if self.refuse is not None:
            raise SlurmError(f"sbatch failed with exit code 1: sbatch: error: {self.refuse}")
        job_id = str(next(self._ids))
        self.jobs[job_id] = job = _Job(job_id, script, after_ok)
        job.after, job.name, job.may_requeue = after, name, requeue
        job.excluded = self._in_slurm_conf([*_of_script(script), *exclude])
        return job_id

    def _in_slurm_conf(self, nodes: Sequence[str]) -> tuple[str, ...]:
        """As `SlurmClient` does after Slurm's refusal."""
        names = dict.fromkeys(name for listed in nodes for name in self.hostnames(listed))
        return tuple(name for name in names if name in self.states)

    def can_start(self, script: str, exclude: Sequence[str]) -> bool:
        count = _Job("", script, None).wanted_nodes
        match = re.search(r"^#SBATCH --constraint=(\w+)$", script, re.MULTILINE)
        lists = [*_of_script(script), *exclude]
        names = [name for nodes in lists for name in self.hostnames(nodes)]
        usable = (
            name
            for name, state in self.states.items()
            if state in ("idle", "allocated") and name not in names
            if not match or match[1] in self.features.get(name, "")
        )
        return len(list(usable)) >= count

    def check_srun(self, options: Sequence[str]) -> None:
        if self.refuse_srun is not None:
            raise SlurmError(f"srun failed with exit code 255: {self.refuse_srun}")

    def start(self, job_id: str) -> None:
        """Start a pending job on the first idle nodes that it may use."""
        job = self._job(job_id)
        if job.state != "PENDING":
            return
        if job.after_ok is not None and self._job(job.after_ok).state != "COMPLETED":
            return
        if job.after is not None and self._job(job.after).state in ("PENDING", "RUNNING"):
            return
        earlier = (j for j in self.jobs.values() if j.name == job.name and j.name is not None)
        if any(j.state in ("PENDING", "RUNNING") and int(j.job_id) < int(job_id) for j in earlier):
            return
        free = [n for n, state in self.states.items() if state == "idle" and n not in job.excluded]
        if len(free) >= job.wanted_nodes:
            job.nodes, job.state = tuple(free[: job.wanted_nodes]), "RUNNING"

    def finish(self, job_id: str, state: str = "COMPLETED") -> None:
        """End a job; if it failed, jobs that depend on its success are cancelled."""
        job = self._job(job_id)
        job.state = state
        job.incarnations.append(job.row(state))
        if state != "COMPLETED":
            for other in self.jobs.values():
                if other.after_ok == job_id and other.state == "PENDING":
                    self.finish(other.job_id, "CANCELLED")

    def fail_node(self, node: str) -> None:
        """Take a node down; its jobs are requeued, as with JobRequeue=1."""
        self.states[node] = "down*"
        for job in self.jobs.values():
            if job.state == "RUNNING" and node in job.nodes and not job.may_requeue:
                self.finish(job.job_id, "NODE_FAIL")
            elif job.state == "RUNNING" and node in job.nodes:
                job.incarnations.append(job.row("NODE_FAIL"))
                job.state, job.nodes = "PENDING", ()

    def queue(self, job_ids: Sequence[str]) -> dict[str, client.QueuedJob]:
        match = (self.jobs[job_id] for job_id in job_ids if job_id in self.jobs)
        return {
            job.job_id: client.QueuedJob(
                job.job_id,
                job.state,
                self.waits.get(
                    job.job_id, "Dependency" if job.state == "PENDING" and job.after_ok else "None"
                ),
                ",".join(job.nodes),
                ",".join(job.excluded),
                "".join(re.findall(r"^#SBATCH --nodelist=(\S+)", job.script, re.MULTILINE)),
                job.comment,
            )
            for job in match
        }

    def jobs_with_output(self, names: Sequence[str], paths: Sequence[Path]) -> list[str]:
        return [
            job.job_id
            for job in self.jobs.values()
            if job.state in ("PENDING", "RUNNING")
            and any(f"--output={path}\n" in job.script for path in paths)
        ]

    def comment(self, job_id: str, text: str) -> None:
        self._job(job_id).comment = text

    def successors(self, job_id: str, name: str) -> list[str]:
        jobs = self.jobs.values()
        return [
            job.job_id
            for job in jobs
            if (job.after, job.name, job.state) == (job_id, name, "PENDING")
        ]

    def accounting(self, *job_ids: str) -> list[client.AccountingRow]:
        match: list[client.AccountingRow] = []
        for job in (self.jobs[job_id] for job_id in job_ids if job_id in self.jobs):
            current = [job.row(job.state)] if job.state in ("RUNNING", "PENDING") else []
            match += [*job.incarnations, *current]
        return match

    def requeue(self, job_id: str) -> None:
        job = self._job(job_id)
        if job.state == "PENDING":
            raise SlurmError("scontrol failed with exit code 1: Job is pending execution")
        if not (job.may_requeue and self.may_requeue):
            raise SlurmError("scontrol failed with exit code 1: Requested operation is disabled")
        job.incarnations.append(job.row("REQUEUED"))
        job.state, job.nodes = "PENDING", ()

    def batch_job(self, job_id: str) -> client.BatchJob:
        job = self._job(job_id)
        host, excluded = next(iter(job.nodes), ""), ",".join(job.excluded)
        return client.BatchJob(job.state, len(job.incarnations), host, excluded, self.time_limit)

    def shrink(self, job_id: str, nodes: Sequence[str]) -> None:
        job = self._job(job_id)
        job.incarnations.append(job.row("RESIZING"))
        job.nodes = tuple(nodes)

    def steps(self, job_id: str, name: str) -> list[str]:
        return []

    def cancel(self, job_ids: Sequence[str], kill: bool = False) -> None:
        for job_id in job_ids:
            if job_id in self.jobs and self.jobs[job_id].state in ("PENDING", "RUNNING"):
                self.finish(job_id, "CANCELLED")

    def exclude(self, job_id: str, nodes: Sequence[str]) -> None:
        job = self._job(job_id)
        if job.state != "PENDING":
            raise SlurmError("scontrol failed with exit code 1: Job is no longer pending execution")
        job.excluded = self._in_slurm_conf(nodes)

    def cluster_name(self) -> str:
        return self.settings()["ClusterName"]

    def delay(self, job_id: str, seconds: float) -> None:
        # `start` ignores it.
        job = self._job(job_id)
        if job.state != "PENDING":
            raise SlurmError("scontrol failed with exit code 1: Job is no longer pending execution")
        job.delay_s = max(job.delay_s, seconds)

    def responds(self, job_id: str, node: str) -> bool:
        return node in self._job(job_id).nodes and self.states[node] in ("idle", "allocated")

    def drain(self, node: str, reason: str) -> None:
        # A real node is "draining" until its jobs have ended; this one is drained at once.
        if not self.may_drain or node not in self.states:
            raise SlurmError("scontrol failed with exit code 1: Invalid user id")
        self.states[node], self.reasons[node] = "drained", reason

    def hostnames(self, nodelist: str) -> list[str]:
        names: list[str] = []
        for part in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", nodelist):
            match = re.fullmatch(r"(.+)\[(.+)\]", part)
            if not match:
                names.append(part)
                continue
            for span in match.group(2).split(","):
                first, _, last = span.partition("-")
                width = len(first)
                span_range = range(int(first), int(last or first) + 1)
                names += [f"{match.group(1)}{number:0{width}d}" for number in span_range]
        return names

    def node_states(self) -> dict[str, str]:
        return dict(self.states)

    def missing_commands(self) -> list[str]:
        return list(self.missing)

    def settings(self) -> dict[str, str]:
        if self.config is None:
            raise SlurmError("scontrol failed with exit code 1: Unable to contact slurm controller")
        return dict(self.config)

    def check_accounting(self) -> None:
        if self.settings().get("AccountingStorageType") != "accounting_storage/slurmdbd":
            raise SlurmError("sacct failed with exit code 1: accounting storage is disabled")

    def partition_nodes(self) -> list[client.PartitionNode]:
        return [
            client.PartitionNode(
                self.partition,
                True,
                True,
                name,
                state,
                self.cpus,
                self.gres,
                self.reasons.get(name, ""),
                self.memory_mb,
            )._replace(**self.unequal.get(name, {}))
            for name, state in self.states.items()
        ]

    def partitions(self) -> dict[str, dict[str, str]]:
        self.settings()
        fields = {"PartitionName": self.partition, "Default": "YES", "State": "UP"}
        return {self.partition: {**fields, **self.limits}}

    def qos_flags(self) -> dict[str, str]:
        return dict(self.flags)

    def associations(self) -> list[client.Association]:
        return list(self.accounts)

    def _job(self, job_id: str) -> _Job:
        if job_id not in self.jobs:
            raise SlurmError("slurm_load_jobs error: Invalid job id specified")
        return self.jobs[job_id]
