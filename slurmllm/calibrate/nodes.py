"""The nodes to measure: those of an allocation, of a job of its own, or this machine."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import NoReturn

from slurmllm.config.resolve import RunConfig
from slurmllm.errors import SlurmError
from slurmllm.supervise.allocation import (
    LOCAL_NODES,
    SLURMLLM,
    Allocation,
    LocalAllocation,
    SlurmAllocation,
)


def nodes_at_hand(
    config: RunConfig,
    again: Sequence[str],
    *,
    nodes: int | None = None,
    local: bool = False,
    options: Mapping[str, str | None] | None = None,
) -> Allocation:
    """The nodes to measure; does not return where a job must be waited for.

    Inside an allocation (salloc, a batch script) these are its nodes, unless a number is asked
    for; else this process becomes salloc, which runs the verb again with nodes at hand.

    Args:
        config: With the profile, whose partition, exclusiveness and directives count.
        again: The verb and its arguments without those that choose the nodes:
            `["plan", "--calibrate", "--cluster", "p4d", …]`.
        nodes: How many; 1 where left out.
        local: This machine, without Slurm.
        options: Of salloc, by name: nodelist, partition, account, qos, reservation, exclude, time.

    Raises:
        SlurmError: there is no salloc here.
    """
    if local:
        os.environ[LOCAL_NODES] = str(nodes or 1)
        return LocalAllocation()
    given = dict(options or {})
    if "SLURM_JOB_ID" in os.environ and nodes is None and not given.get("nodelist"):
        # What batch jobs are given and salloc's command is not.
        if cpus := re.match(r"\d+", os.environ.get("SLURM_JOB_CPUS_PER_NODE", "")):
            os.environ.setdefault("SLURM_CPUS_ON_NODE", cpus.group())
        return SlurmAllocation()
    return _become_salloc(config, again, given, nodes)


def _become_salloc(
    config: RunConfig, again: Sequence[str], given: dict[str, str | None], nodes: int | None
) -> NoReturn:
    if shutil.which("salloc") is None:
        raise SlurmError(
            "salloc is not on the PATH; run this on a node of the Slurm cluster, or add --local "
            "to measure this machine"
        )
    cluster = config.cluster
    given["partition"] = given.get("partition") or cluster.partition
    given["time"] = given.get("time") or "15"
    if nodes is not None or not given.get("nodelist"):
        given["nodes"] = str(nodes or 1)
    words = [f"--{name}={value}" for name, value in given.items() if value]
    words += [*(["--exclusive"] if cluster.exclusive else []), *cluster.directives]
    command = ["salloc", "--job-name=slurmllm-calibrate", "--ntasks-per-node=1", *words]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_JOB")}
    os.execvpe("salloc", [*command, *SLURMLLM, *again], environment)
