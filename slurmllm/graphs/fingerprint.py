"""The fingerprint of a run's graphs: equal fingerprints, equal graphs, as far as can be foretold.

Made on the login node before anything is submitted, and again where the graphs were compiled. It
is cautious: whatever may change a graph is part of it, so that it errs towards compiling again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from slurmllm.backends.environment import load_environment
from slurmllm.config.resolve import RunConfig
from slurmllm.plan.mesh import Mesh

_THREADS = "OMP_NUM_THREADS"
_PACKAGE = Path(__file__).resolve().parent.parent


def graph_fingerprint(
    config: RunConfig,
    mesh: Mesh,
    local: bool,
    measured: int | None = None,
    versions: Mapping[str, str] | None = None,
) -> str | None:
    """A digest of all that decides a run's graphs.

    Args:
        config: The run's.
        mesh: Of the train stage.
        local: Whether the run's nodes are launchers on this machine.
        measured: The micro batch that was measured, for a recipe that says `auto`: precompile's
            graphs are of that one, whatever the node count makes of it.
        versions: Those to reckon with; this machine's where left out.

    Returns:
        None where the micro batch is to be measured yet, so that nobody can tell.
    """
    micro = config.recipe.train.micro_batch
    if micro == "auto":
        if measured is None:
            return None
        mesh = replace(mesh, micro_batch=measured, global_batch=mesh.data * measured)
    environment = load_environment(config.backend)
    parts = {
        "backend": config.backend,
        "versions": dict(environment.versions() if versions is None else versions),
        "sources": sources(config.backend),
        "graphs": environment.graph_inputs(config, mesh, threads(config, mesh, local)),
        # Which micro batch is fastest is a finding on one kind of node.
        "measured_on": config.cluster.name if micro == "auto" else None,
    }
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def sources(backend: str, package: Path = _PACKAGE) -> str:
    """A digest of slurmllm's own code that makes the graphs: model, mesh and backend.

    A release's number does not tell: a checkout changes under one.

    Args:
        backend: The run's.
        package: The folder of slurmllm.
    """
    found = hashlib.sha256()
    for file in _makers(backend, package):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        found.update(f"{file.relative_to(package).as_posix()} {content}\n".encode())
    return found.hexdigest()


def _makers(backend: str, package: Path) -> Iterator[Path]:
    for folder in ("model", f"backends/{backend}", "plan"):
        yield from sorted((package / folder).rglob("*.py"))
    yield package / "config" / "families.py"


def threads(config: RunConfig, mesh: Mesh, local: bool) -> int | None:
    """CPU threads of a worker; None where the nodes alone know how many CPUs they have."""
    own = {**config.cluster.env, **config.recipe.env}
    given = own.get(_THREADS) or os.environ.get(_THREADS)
    if given is not None and given.isdigit():
        return int(given)
    cpus = config.cluster.cpus_per_node
    if cpus is None and local:
        cpus = len(os.sched_getaffinity(0))
    return None if cpus is None else threads_of(cpus, mesh, local)


def threads_of(cpus: int, mesh: Mesh, local: bool) -> int:
    """The share of one worker in a machine's CPUs."""
    return max(1, cpus // sharing(mesh, local))


def sharing(mesh: Mesh, local: bool) -> int:
    """Workers that share a machine's CPUs and memory.

    Those of one node; the nodes of --local are all on this machine, and count in both stages
    alike.
    """
    return mesh.devices_per_node * (mesh.nodes if local else 1)
