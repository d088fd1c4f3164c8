"""Neuron's persistent compile cache, read from its files.

    <cache>/neuron/neuronxcc-<version>/MODULE_<hash of the graph>+<hash of the flags>/
        model.hlo_module.pb     the graph, from its extraction on
        compile_flags.json
        model.neff, model.done  the compiled graph; complete once model.done exists
        model.log               the compiler's log of a graph that failed
        *.lock                  a process compiles it, or was killed during it

A failed graph stays failed: while model.log exists, the compiler's wrapper does not try again
(unless NEURON_CC_FLAGS has --retry_failed_compilation). Layout and states are those of
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
_NOT_IN_GRAPHS = (
    "FI_", "OFI_", "CCOM_", "GLOO_", "NCCL_", "MALLOC_", "GLIBC_", "TF_NUM_", "HF_", "OMP_",
    "NEURON_RT_", "NEURON_COMPILE_CACHE_URL", "XLA_THREAD_POOL_SIZE", "XLA_IO_THREAD_POOL_SIZE",
    "TORCHELASTIC_RUN_ID", "LD_LIBRARY_PATH", "PYTHON",
)  # fmt: skip


def graphs(cache: Path) -> list[Graph]:
    """Return the graphs in a cache folder, each with its state."""
    found = []
    for entry in sorted((cache / FOLDER).glob("neuronxcc-*/MODULE_*")):
        if not entry.is_dir():
            continue
        neff, log = entry / "model.neff", entry / "model.log"
        graph = Graph(entry.name, str(entry.relative_to(cache)), "missing", entry.parent.name)
        if (entry / "model.done").is_file() and neff.is_file() and neff.stat().st_size > 0:
            graph = graph._replace(state="compiled")
        elif log.is_file():
            graph = graph._replace(state="failed", log=log)
        found.append(graph)
    return found


def count_graphs(cache: Path) -> int:
    return sum(graph.state == "compiled" for graph in graphs(cache))


def expects_graphs(config: RunConfig) -> bool:
    return config.cluster.device == "neuron"  # NxD's CPU mode compiles nothing


def precompile_commands(config: RunConfig, workers: Sequence[str], work: Path) -> list[list[str]]:
    """Collect the graphs of the workers' steps, then compile the graphs in the cache.

    Two commands: with one, the tool compiles only the graphs named on the workers' standard output,
    which is rank 0's alone. The tool empties its working folder, whose default is shared by all
    runs of a user on a node, so it gets `work`.
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
    """Return the settings that the graphs of a run depend on.

    The optimizer's constants are part of its graph, the mesh's degrees part of the replica groups
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
            name: value
            for name, value in sorted(flags.items())
            if not name.startswith(_NOT_IN_GRAPHS)
        },
    }
