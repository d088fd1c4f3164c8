"""Attempt records, and allocations of a fake Slurm's jobs."""

from fake_slurm import FakeSlurm

from slurmllm.core.run.records import AttemptRecord
from slurmllm.launch.supervise.allocation import SlurmAllocation


def attempt_record(**fields: object) -> AttemptRecord:
    values = {"attempt": 0, "stage": "train", "job_id": "7", "nodes": ("n1", "n2")}
    values |= {"world_size": 2, "master_addr": "n1", "master_port": 2000, "started_at": 1.0}
    return AttemptRecord.model_validate({**values, **fields})


def start_of(
    cluster: FakeSlurm, job_id: str, nodes: tuple[str, ...], restart_count: int = 0
) -> SlurmAllocation:
    """The allocation of one start of a job, without Slurm's variables."""
    allocation = SlurmAllocation.__new__(SlurmAllocation)
    allocation.client, allocation.job_id, allocation.restart_count = cluster, job_id, restart_count
    allocation.nodes = allocation.all_nodes = nodes
    return allocation
