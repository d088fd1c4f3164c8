"""Runs on the development cluster, for the end-to-end tests on Slurm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

from end_to_end.bench import SMALL, Bench

from slurmllm.slurm.client import SlurmClient


class Cluster(Protocol):
    """The development cluster's verbs (tests/conftest.DevCluster)."""

    def call(self, *arguments: str) -> str: ...


def submit(bench: Bench, inputs: tuple[str, ...], name: str, *more: str) -> dict[str, str]:
    arguments = ("submit", "tiny_neox", "--nodes=2", f"--name={name}", *SMALL, *inputs, *more)
    return dict(json.loads(bench.look(*arguments, "--json"))["jobs"])


def wait(bench: Bench, name: str, *states: str) -> None:
    """Wait until a run has ended and `status` reports one of some states."""
    bench.until(lambda: bench.ended(name), f"{name} never ended", every_s=0.2)
    bench.until(
        lambda: bench.status(name)["state"] in states, f"{name} never {states}", every_s=1.0
    )


def lose_node(slurm: Cluster, bench: Bench, name: str, lost: str) -> None:
    """Cut a node's power while a run uses it; wait until the run has ended."""
    slurm.call("fail", lost)
    try:
        wait(bench, name, "done", "stopped", "cancelled")
    finally:
        slurm.call("heal", lost)


def accounted(job: str) -> list[str]:
    """The states of a job's incarnations, by sacct."""
    return [row.state for row in SlurmClient().accounting(job) if row.job_id == job]


def outside_pid(run: Path, rank: int) -> int:
    """The process id of a worker as this machine numbers it; nodes number their own."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if (
            b"worker" in arguments
            and str(run).encode() in arguments
            and b"RANK=%d" % rank in variables
        ):
            return int(entry.name)
    raise AssertionError(f"no worker {rank} of {run}")
