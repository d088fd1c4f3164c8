"""The environment of a trainer of another project, which compiles what it likes by itself."""

from __future__ import annotations

from pathlib import Path

from slurmllm.backends.environment import Variable
from slurmllm.backends.without_graphs import (  # noqa: F401 - of `BackendEnvironment`
    arguments,
    cache_variables,
    expects_graphs,
    graph_inputs,
    graphs,
    graphs_depend_on_accumulation,
    node_versions,
    precompile_commands,
    precompile_nodes,
    processor,
    versions,
)
from slurmllm.config.resolve import RunConfig


def variables(config: RunConfig, profiles: Path | None = None) -> dict[str, Variable]:
    return {}


def unsupported(config: RunConfig) -> list[str]:
    return []
