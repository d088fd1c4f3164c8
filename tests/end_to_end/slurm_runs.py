"""Runs on the development cluster, for the end-to-end tests on Slurm."""

from __future__ import annotations

import json
from typing import Protocol

from end_to_end.bench import SMALL, Bench

from slurmllm.slurm.client import SlurmCommands


class Cluster(Protocol):
    """The development cluster's verbs (tests/conftest.DevCluster)."""

    def call(self, *arguments: str) -> str: ...


def submit(bench: Bench, inputs: tuple[str, ...], name: str, *more: str) -> dict[str, str]:
    arguments = ("submit", "tiny_neox", "--nodes=4", f"--name={name}", *SMALL, *inputs, *more)
    return dict(json.loads(bench.call(*arguments, "--json"))["jobs"])


def wait(bench: Bench, name: str, *states: str) -> None:
    # Seldom: a `status` takes a third of a second of the CPUs that the run needs.
    bench.until(
        lambda: bench.status(name)["state"] in states, f"{name} never {states}", 240, every_s=1.5
    )


def accounted(job: str) -> list[str]:
    """The states of a job's incarnations, by sacct."""
    return [row.state for row in SlurmCommands().accounting(job) if row.job_id == job]
