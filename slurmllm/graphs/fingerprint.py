"""The fingerprint of a run's graphs: runs of equal fingerprints have equal graphs.

Computed on the login node before a submission, and again on the nodes that compile. It covers
everything that may change a graph, so that in doubt the graphs are compiled again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from slurmllm.backends.environment import load_environment
from slurmllm.config.resolve import RunConfig
from slurmllm.plan.mesh import Mesh

_THREADS = "OMP_NUM_THREADS"
_PACKAGE = Path(__file__).resolve().parent.parent
# The modules outside model/, config/families/ and the backend that decide graphs. The rest of plan/
# (search, cost, tables) chooses a mesh, which is in the fingerprint itself; nothing of plan/ but
# these two may be imported by the code that builds the model.
GRAPH_MODULES = ("plan/mesh.py", "plan/parameters.py")


def graph_fingerprint(
    config: RunConfig,
    mesh: Mesh,
    local: bool,
    measured: int | None = None,
    versions: Mapping[str, str] | None = None,
) -> str | None:
    """Return a digest of everything that decides a run's graphs.

    Args:
        mesh: Of the train stage.
        measured: The measured micro batch of a recipe with `micro_batch: auto`: precompile's
            graphs are of that one, for every node count.
        versions: Of the libraries and, with `local`, the processor; by default those of this
            machine, or the container's image.

    Returns:
        None if the micro batch is not measured yet, so that the graphs are unknown.
    """
    micro = config.recipe.train.micro_batch
    if micro == "auto":
        if measured is None:
            return None
        mesh = replace(mesh, micro_batch=measured, global_batch=mesh.data * measured)
    environment = load_environment(config.backend)
    if versions is None and config.cluster.container is not None:
        versions = {"image": config.cluster.container.image}  # theirs are not known out here
    elif versions is None:  # nor the processors of nodes: each compares its own
        versions = {**environment.versions(), **(node_processor(config) if local else {})}
    parts = {
        "backend": config.backend,
        "versions": dict(versions),
        "sources": sources(config.backend),
        "graphs": environment.graph_inputs(config, mesh, worker_threads(config, mesh, local)),
        # The fastest micro batch is a measurement on one kind of node.
        "measured_on": config.cluster.name if micro == "auto" else None,
    }
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def node_processor(config: RunConfig) -> dict[str, str]:
    """Return what graphs compiled by this machine's workers are made for; empty: any processor."""
    variables = {**os.environ, **config.cluster.env, **config.recipe.env}
    return load_environment(config.backend).processor(config.cluster.device, variables)


@functools.cache
def sources(backend: str, package: Path = _PACKAGE) -> str:
    """Return a digest of the code that decides graphs: model, mesh and backend."""
    # The version number is not enough: a checkout changes without a new one.
    digest = hashlib.sha256()
    folders = (package / "model", package / "config/families", package / "backends" / backend)
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    for file in (*files, *(package / module for module in GRAPH_MODULES)):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{file.relative_to(package).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def worker_threads(config: RunConfig, mesh: Mesh, local: bool) -> int | None:
    """Return the CPU threads of a worker; None if only the nodes know their number of CPUs."""
    variables = {**config.cluster.env, **config.recipe.env}
    threads = variables.get(_THREADS) or os.environ.get(_THREADS, "")
    if threads.isdigit():
        return int(threads)
    cpus = config.cluster.cpus_per_node
    if cpus is None and local:
        cpus = len(os.sched_getaffinity(0))
    return None if cpus is None else threads_of(cpus, mesh, local)


def threads_of(cpus: int, mesh: Mesh, local: bool) -> int:
    return max(1, cpus // sharing(mesh, local))


def sharing(mesh: Mesh, local: bool) -> int:
    """Return the number of workers that share a machine's CPUs and memory."""
    # The nodes of --local are all on this machine, in both stages alike.
    return mesh.devices_per_node * (mesh.nodes if local else 1)
