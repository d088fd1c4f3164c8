"""Neuron's persistent compile cache, read by its files alone.

    <cache>/neuron/neuronxcc-<version>/MODULE_<hash of the graph>+<hash of the flags>/
        model.hlo_module.pb     the graph, there from its extraction on
        compile_flags.json
        model.neff, model.done  the compiled graph; whole once model.done is there
        model.log               the compiler's words on a graph that failed
        *.lock                  somebody compiles it, or did when he was ended

A graph that failed stays failed: as long as model.log is there, the compiler's wrapper does not
try again (unless NEURON_CC_FLAGS has --retry_failed_compilation). Layout and states are those of
libneuronxla's `neuron_cc_cache`, as the AWS Neuron documentation ("Neuron Persistent Cache",
"neuron_parallel_compile") and optimum-neuron's notes on its cache describe them.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurmllm.backends.environment import Graph, Variable
from slurmllm.config.resolve import RunConfig
from slurmllm.plan.mesh import Mesh

FOLDER = "neuron"  # inside the node-local cache folder
_TOOL = "neuron_parallel_compile"

# Variables of the network, the host and the device's runtime; any other may change a graph.
_NO_PART = (
    "FI_", "OFI_", "CCOM_", "GLOO_", "NCCL_", "MALLOC_", "GLIBC_", "TF_NUM_", "HF_", "OMP_",
    "NEURON_RT_", "NEURON_COMPILE_CACHE_URL", "XLA_THREAD_POOL_SIZE", "XLA_IO_THREAD_POOL_SIZE",
    "TORCHELASTIC_RUN_ID", "LD_LIBRARY_PATH", "PYTHON",
)  # fmt: skip


def graphs(cache: Path) -> list[Graph]:
    """The graphs in a cache folder, each with its state."""
    found = (entry for entry in (cache / FOLDER).glob("neuronxcc-*/MODULE_*") if entry.is_dir())
    return [_graph(cache, entry) for entry in sorted(found)]


def _graph(cache: Path, entry: Path) -> Graph:
    log = entry / "model.log"
    name, folder, compiler = entry.name, str(entry.relative_to(cache)), entry.parent.name
    if (entry / "model.done").is_file() and _has_content(entry / "model.neff"):
        return Graph(name, folder, "compiled", compiler)
    if log.is_file():
        return Graph(name, folder, "failed", compiler, log)
    return Graph(name, folder, "missing", compiler)


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def count_graphs(cache: Path) -> int:
    """Compiled graphs in a cache folder."""
    return sum(graph.state == "compiled" for graph in graphs(cache))


def expects_graphs(config: RunConfig) -> bool:
    """Always on Neuron devices; NxD's CPU mode compiles nothing."""
    return config.cluster.device == "neuron"


def precompile_commands(config: RunConfig, workers: Sequence[str], work: Path) -> list[list[str]]:
    """Collect the graphs of the workers' steps, then compile what the cache holds.

    In two commands: in one, the tool compiles what it reads of on the standard output of the
    workers, and only rank 0 speaks there. Its own default for the working folder is the same for
    all runs of a user on a node, and it empties it.
    """
    tool = shutil.which(_TOOL, path=str(Path(sys.executable).parent)) or shutil.which(_TOOL)
    if tool is None and not expects_graphs(config):
        return [list(workers)]
    own = ["--parallel_compile_workdir", str(work)]
    return [
        [tool or _TOOL, "--command", "collect", *own, *workers],
        [tool or _TOOL, "--command", "compile", *own],
    ]


def graph_inputs(
    config: RunConfig, mesh: Mesh, variables: Mapping[str, Variable]
) -> dict[str, object]:
    """What changes the graphs of a run.

    The optimizer's constants are part of its graph, and the mesh's degrees of the replica groups
    of every collective.
    """
    recipe = config.recipe
    flags = {name: variable.value for name, variable in variables.items()}
    flags = {**flags, **config.cluster.env, **recipe.env}
    return {
        "model": recipe.model.model_dump(mode="json"),
        "precision": recipe.train.precision,
        "activation_checkpointing": recipe.train.activation_checkpointing,
        "mask": recipe.data.mask,
        "micro_batch": mesh.micro_batch,
        "accumulation": mesh.accumulation,
        "parallel": recipe.parallel.model_dump(mode="json"),
        "nodes": mesh.nodes,
        "devices_per_node": mesh.devices_per_node,
        "device": config.cluster.device,
        "optim": recipe.optim.model_dump(mode="json"),
        "variables": {
            name: value for name, value in sorted(flags.items()) if not name.startswith(_NO_PART)
        },
    }
