"""What a backend says of its surroundings, without torch: the other half of the seam.

Read on the login node (`submit`, `--dry-run`) and by the supervisor and the launchers.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import NamedTuple, Protocol, cast

from slurmllm.config.resolve import RunConfig


class Variable(NamedTuple):
    """An environment variable of the workers."""

    value: str
    source: str


class BackendEnvironment(Protocol):
    """The functions of a backend's `environment.py`."""

    @staticmethod
    def variables(config: RunConfig) -> dict[str, Variable]:
        """The workers' environment, each value with its source."""

    @staticmethod
    def cache_variables(cache: str) -> dict[str, Variable]:
        """Where the compiler keeps its graphs, inside the node-local folder `cache`."""

    @staticmethod
    def precompile_nodes(nodes: int) -> int:
        """Nodes that the precompile stage needs for a run on `nodes`."""

    @staticmethod
    def count_graphs(cache: Path) -> int:
        """Compiled graphs in a cache folder."""

    @staticmethod
    def versions() -> dict[str, str]:
        """Versions that decide whether a compiled graph still serves."""

    @staticmethod
    def unsupported(config: RunConfig) -> list[str]:
        """What this backend cannot train, one line a reason; empty where it can."""


def load_environment(backend: str) -> BackendEnvironment:
    """A backend's `environment.py`, by the backend's name."""
    module = importlib.import_module(f"slurmllm.backends.{backend}.environment")
    return cast(BackendEnvironment, module)
