"""What a backend says of its surroundings, without torch: the other half of the seam.

Read on the login node (`submit`, `--dry-run`) and by the supervisor and the launchers.
"""

from __future__ import annotations

import getpass
import hashlib
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, cast

from slurmllm.config.resolve import RunConfig
from slurmllm.plan.mesh import Mesh
from slurmllm.rundir import RunDir


class Variable(NamedTuple):
    """An environment variable of the workers."""

    value: str
    source: str


class Graph(NamedTuple):
    """A graph in a compiler's cache folder.

    Attributes:
        folder: Inside the cache; it says which graph this is, and holds the graph's own files.
        state: `missing` where the compiler left neither an artifact nor a reason.
        compiler: Name and version.
        log: What the compiler wrote of a failed one.
    """

    name: str
    folder: str
    state: Literal["compiled", "failed", "missing"]
    compiler: str
    log: Path | None = None


class BackendEnvironment(Protocol):
    """The functions of a backend's `environment.py`."""

    @staticmethod
    def variables(config: RunConfig) -> dict[str, Variable]:
        """The workers' environment, each value with its source."""

    @staticmethod
    def cache_variables(cache: str) -> dict[str, Variable]:
        """Where the compiler keeps its graphs, inside the node-local folder `cache`."""

    @staticmethod
    def precompile_nodes(config: RunConfig, nodes: int) -> int:
        """Nodes that the precompile stage needs for a run on `nodes`, which its mesh fits."""

    @staticmethod
    def precompile_commands(
        config: RunConfig, workers: Sequence[str], work: Path
    ) -> list[list[str]]:
        """The commands that fill a node's cache, in order; the first one runs the workers.

        Args:
            config: The run's.
            workers: The command that starts the node's workers and waits for them.
            work: A folder on the node's own disk that the commands may use and nobody keeps.
        """

    @staticmethod
    def graphs_depend_on_accumulation(config: RunConfig) -> bool:
        """Whether graphs depend on a step's micro batches, so that precompile makes whole steps."""

    @staticmethod
    def expects_graphs(config: RunConfig) -> bool:
        """Whether the run has graphs to compile."""

    @staticmethod
    def graphs(cache: Path) -> list[Graph]:
        """The graphs in a cache folder, by name."""

    @staticmethod
    def count_graphs(cache: Path) -> int:
        """Compiled graphs in a cache folder."""

    @staticmethod
    def graph_inputs(config: RunConfig, mesh: Mesh, threads: int | None) -> dict[str, object]:
        """What changes the graphs of a run, versions aside: plain values with names.

        Args:
            config: The run's.
            mesh: Of the train stage; its micro batch is the one that precompile uses.
            threads: CPU threads of a worker, None where nobody can say before the nodes are known.
        """

    @staticmethod
    def versions() -> dict[str, str]:
        """Versions that decide whether a compiled graph still serves."""

    @staticmethod
    def node_versions() -> dict[str, str]:
        """Those, and what else the attempt's record should say of a node: driver, runtime."""

    @staticmethod
    def arguments(config: RunConfig, mesh: Mesh) -> dict[str, Any]:
        """What goes into the library's functions, as `submit --dry-run` shows it; JSON's types."""

    @staticmethod
    def unsupported(config: RunConfig) -> list[str]:
        """What this backend cannot train, one line a reason; empty where it can."""


def load_environment(backend: str) -> BackendEnvironment:
    """A backend's `environment.py`, by the backend's name."""
    module = importlib.import_module(f"slurmllm.backends.{backend}.environment")
    return cast(BackendEnvironment, module)


def node_local_cache(config: RunConfig, run: RunDir) -> str:
    """The folder on every node's own disk for this run's compiled graphs.

    Its name holds the user, the run and a digest of the run's path: two runs of one name in
    different folders must not share it.
    """
    digest = hashlib.sha256(str(run.path).encode()).hexdigest()[:8]
    return f"{config.cluster.node_local}/slurmllm-{getpass.getuser()}-{run.name}-{digest}"


def worker_environment(config: RunConfig, run: RunDir) -> dict[str, Variable]:
    """The variables that a job exports for its workers, each with its source.

    The recipe's replace the cluster profile's, and those the backend's; a variable has the
    position of its last definition.
    """
    environment = load_environment(config.backend)
    cluster, recipe = config.cluster, config.recipe
    layers = (
        environment.variables(config),
        environment.cache_variables(node_local_cache(config, run)),
        _given(config, "cluster.env", cluster.env, f"cluster {cluster.name}"),
        _given(config, "env", recipe.env, f"recipe {recipe.name}"),
    )
    found: dict[str, Variable] = {}
    for layer in layers:
        for name, variable in layer.items():
            found.pop(name, None)
            found[name] = variable
    return found


def _given(
    config: RunConfig, path: str, values: Mapping[str, str], owner: str
) -> dict[str, Variable]:
    """The variables of a profile or a recipe; their source is its name, or --set."""
    given = {name: config.origins.get(f"{path}.{name}", "") for name in values}
    return {
        name: Variable(value, "--set" if given[name].startswith("--set") else owner)
        for name, value in values.items()
    }
