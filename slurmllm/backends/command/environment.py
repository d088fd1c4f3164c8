"""The environment of a trainer of another project, which compiles what it likes by itself.

The rehearsal backend shares what follows from having no graphs.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmllm.backends.environment import Graph, Variable
from slurmllm.config.resolve import RunConfig
from slurmllm.plan.mesh import Mesh, replica_nodes


def variables(config: RunConfig, profiles: Path | None = None) -> dict[str, Variable]:
    return {}


def cache_variables(cache: str) -> dict[str, Variable]:
    return {}


def precompile_nodes(config: RunConfig, nodes: int) -> int:
    """Return the number of nodes of one replica of the model."""
    return min(nodes, replica_nodes(config))


def precompile_commands(config: RunConfig, workers: Sequence[str], work: Path) -> list[list[str]]:
    return [list(workers)]


def graphs_depend_on_accumulation(config: RunConfig) -> bool:
    return False


def expects_graphs(config: RunConfig) -> bool:
    return False


def graphs(cache: Path) -> list[Graph]:
    return []


def graph_inputs(config: RunConfig, mesh: Mesh, threads: int | None) -> dict[str, object]:
    """Return no settings: without graphs, one precompile stage is enough for all runs."""
    return {}


def versions() -> dict[str, str]:
    return {"python": platform.python_version()}


def processor(device: str, variables: Mapping[str, str]) -> dict[str, str]:
    return {}


def node_versions() -> dict[str, str]:
    return versions()


def arguments(config: RunConfig, mesh: Mesh) -> dict[str, Any]:
    return {}


def unsupported(config: RunConfig) -> list[str]:
    return []
