"""Environment variables, compile cache and unsupported settings of a backend, without torch."""

from __future__ import annotations

import errno
import glob
import hashlib
import importlib
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.config.variables import mask
from slurmllm.core.errors import NodeError
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.run.safe_files import login_name, make_private_folder, replaceable_error
from slurmllm.plan.mesh import Mesh, measures_micro_batch, replica_nodes

BROADCAST = "SLURMLLM_BROADCAST"  # the path of the broadcast archive on the nodes
_OUTPUT_S = 20.0  # nvidia-smi takes some seconds if the driver has to wake the GPUs up


class Variable(NamedTuple):
    """An environment variable of the workers."""

    value: str
    source: str


Variables = dict[str, Variable]  # by name


class Graph(NamedTuple):
    """A graph in the cache folder of a compiler."""

    name: str
    folder: str  # path inside the cache; identifies the graph and has its files
    # `missing` if the compiler left neither an artifact nor an error.
    state: Literal["compiled", "failed", "missing"]
    compiler: str  # name and version
    log: Path | None = None  # of a failed graph


class BackendEnvironment:
    """The functions of a backend's `environment.py`; as they are here, those of another project's
    trainer, which compiles what it likes by itself.
    """

    # Whether the precompile stage must run steps of the run's own global batch.
    graphs_depend_on_accumulation = False

    @staticmethod
    def variables(config: RunConfig, profiles: Path | None = None) -> Variables:
        """Return the workers' environment variables, each with its source.

        `profiles` is the folder for profiles of the device's own runtime (`profile.steps`).
        """
        return {}

    @staticmethod
    def cache_variables(cache: str) -> Variables:
        """Return the variables that place the compiler's cache in the node-local folder `cache`."""
        return {}

    @staticmethod
    def precompile_nodes(config: RunConfig, nodes: int) -> int:
        """Return the number of nodes of the precompile stage for a run on `nodes`.

        Those of one replica, unless graphs contain collectives between replicas.
        """
        return min(nodes, replica_nodes(config))

    @staticmethod
    def precompile_commands(
        config: RunConfig, workers: Sequence[str], work: Path
    ) -> list[list[str]]:
        """Return the commands that fill a node's cache, in order.

        The first runs `workers`, the command that starts the node's workers and waits for them;
        `work` is a temporary folder on the node's own disk.
        """
        return [list(workers)]

    @staticmethod
    def expects_graphs(config: RunConfig) -> bool:
        """Return whether the run compiles graphs."""
        return False

    @staticmethod
    def graphs(cache: Path) -> list[Graph]:
        """Return the graphs in a cache folder, by name."""
        return []

    @staticmethod
    def graph_inputs(config: RunConfig, mesh: Mesh, threads: int | None) -> dict[str, object]:
        """Return the settings that the graphs of a run depend on, except versions; JSON types.

        The mesh is that of the train stage, whose micro batch precompile uses; `threads` are the
        CPU threads of a worker, None before the nodes are known.
        """
        return {}

    @staticmethod
    def versions() -> dict[str, str]:
        """Return the versions that a compiled graph depends on."""
        return {"python": platform.python_version()}

    @staticmethod
    def processor(device: str, variables: Mapping[str, str]) -> dict[str, str]:
        """Return what graphs that are compiled on this node are made for, besides `versions`.

        `device` is `cluster.device`, `variables` are the workers'. Empty: graphs serve any node.
        """
        return {}

    @staticmethod
    def node_versions() -> dict[str, str]:
        """Return `versions` and those of driver and runtime, for the attempt's record of a node."""
        return BackendEnvironment.versions()

    @staticmethod
    def arguments(config: RunConfig, mesh: Mesh) -> dict[str, Any]:
        """Return the arguments of the library's functions, for `submit --dry-run`; JSON types."""
        return {}

    @staticmethod
    def unsupported(config: RunConfig) -> list[str]:
        """Return why this backend cannot train the run, one line for each reason."""
        return []


class RehearsalEnvironment(BackendEnvironment):
    """That of the rehearsal backend, which has no model and so compiles no graphs."""

    @staticmethod
    def variables(config: RunConfig, profiles: Path | None = None) -> Variables:
        return {
            "MALLOC_ARENA_MAX": Variable("1", "glibc: fewer arenas, less memory held by threads"),
            "OMP_NUM_THREADS": Variable("1", "rehearsal: no computation to parallelize"),
            "OPENBLAS_NUM_THREADS": Variable("1", "numpy: no thread pool"),
            "TOKENIZERS_PARALLELISM": Variable("false", "tokenizers: no thread pool"),
        }

    @staticmethod
    def unsupported(config: RunConfig) -> list[str]:
        faults = []
        if config.recipe.train.init_from is not None:
            faults.append(
                "train.init_from: the rehearsal backend has no weights; leave it out with "
                "--set train.init_from=null"
            )
        if config.recipe.train.micro_batch == "auto" and config.cluster.device != "neuron":
            faults.append(
                "train.micro_batch: auto: the rehearsal backend has no model whose memory could be "
                "measured; give a number with --set train.micro_batch=1"
            )
        return faults


def common_graph_inputs(config: RunConfig, mesh: Mesh) -> dict[str, object]:
    """Return the settings that the graphs of each backend depend on."""
    recipe = config.recipe
    return {
        "model": recipe.model.model_dump(mode="json"),
        "precision": recipe.train.precision,
        "activation_checkpointing": recipe.train.activation_checkpointing,
        "mask": recipe.data.mask,
        "micro_batch": mesh.micro_batch,
        "device": config.cluster.device,
        **({} if recipe.eval.every_steps is None else {"evaluates": True}),
    }


def load_environment(backend: str) -> BackendEnvironment:
    if backend == "command":
        return BackendEnvironment()
    if backend == "rehearsal":
        return RehearsalEnvironment()
    module = importlib.import_module(f"slurmllm.train.backends.{backend}.environment")
    return cast(BackendEnvironment, module)


def needs_precompile(config: RunConfig) -> bool:
    """Return whether a run has graphs to compile, or a micro batch to measure."""
    return load_environment(config.backend).expects_graphs(config) or measures_micro_batch(config)


def requires_graphs(config: RunConfig) -> bool:
    """Return whether the train stage starts only with what a precompile stage has left."""
    return needs_precompile(config) and config.recipe.train.incomplete_graphs == "refuse"


def output_of(*command: str) -> str | None:
    """Return what a program prints that ends by itself; None if it is missing, hangs or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_OUTPUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def node_local_cache(config: RunConfig, run: RunDir) -> str:
    """Return the planned folder for this run's compiled graphs on every node's own disk.

    The user's private folder has another name on a node where somebody else has taken this one. The
    digest is of the run's path: two runs of one name must not share the folder.
    """
    digest = hashlib.sha256(str(run.path).encode()).hexdigest()[:8]
    return f"{config.cluster.node_local}/slurmllm-{login_name()}/{run.name}-{digest}"


def make_cache_folder(config: RunConfig, run: RunDir) -> Path:
    """Return this node's folder for the run's graphs, in the user's private folder, which it makes.

    Raises a NodeError if the disk refuses, or other users could replace the private folder.
    """
    planned = Path(node_local_cache(config, run))
    parent = planned.parent.parent
    with node_disk(f"make {planned}"):
        parent.mkdir(parents=True, exist_ok=True)
        if reason := replaceable_error(parent, config.cluster.trusted_group):
            raise PermissionError(errno.EPERM, reason)
        return make_private_folder(planned.parent) / planned.name


@contextmanager
def node_disk(action: str) -> Iterator[None]:
    """Use the node-local disk; a NodeError names what it refused."""
    try:
        yield
    except OSError as error:
        raise NodeError(
            f"cannot {action} on {os.uname().nodename}: {error.strerror or error}; free space "
            "there, or set cluster.node_local to a folder that you may write to on every node"
        ) from error


def broadcast_path(planned: Path) -> Path:
    """Return a path for the broadcast archive on every node, new for every attempt.

    Not in the private folder: sbcast makes no folders. Nobody can guess it, to place a link there.
    """
    return Path(f"{planned.parent}-{planned.name}-{os.urandom(8).hex()}.tar")


def remove_leftovers(planned: Path) -> None:
    """Remove the broadcast archives of a run from this node."""
    private = planned.parent
    for path in private.parent.glob(glob.escape(f"{private.name}-{planned.name}") + "*"):
        with suppress(OSError):
            if path.lstat().st_uid == os.geteuid():
                path.unlink()


def worker_environment(config: RunConfig, run: RunDir) -> Variables:
    """Return the variables that a job exports for its workers, each with its source; secrets
    masked.

    The recipe's replace the cluster profile's, and those the backend's.
    """

    def from_config(path: str, values: Mapping[str, str], owner: str) -> Variables:
        origins = {name: config.origins.get(f"{path}.{name}", "") for name in values}
        return {
            name: Variable(value, "--set" if origins[name].startswith("--set") else owner)
            for name, value in mask(values).items()
        }

    environment = load_environment(config.backend)
    cluster = config.cluster
    recipe = config.recipe
    layers = (
        environment.variables(config, run.neuron_profiles),
        environment.cache_variables(node_local_cache(config, run)),
        from_config("cluster.env", cluster.env, f"cluster {cluster.name}"),
        from_config("env", recipe.env, f"recipe {recipe.name}"),
    )
    variables: Variables = {}
    for layer in layers:
        for name, variable in layer.items():
            variables.pop(name, None)
            variables[name] = variable
    return variables
