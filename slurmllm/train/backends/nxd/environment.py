"""The environment of neuronx-distributed (NxD) on trn1: variables, compile cache, versions.

Variables are only those that the supported versions read (Neuron 2.28, PyTorch 2.9, NxD 0.17);
docs/trn1.md compares them with the published scripts, with the reason for each omission. Sources:

- neox_20b.sh (and pythia_6.9B_slurm.sh alike), train_setup.sh: neuronx-nemo-megatron
- HLAT: awslabs/HLAT, 7b/ and 70b/
- run_llama2_70B_tp_pp.sh: neuronx-distributed, whose source is "NxD"
- NxDT: neuronx-distributed-training, train_setup.sh and training_orchestrator.py
- Neuron: the AWS Neuron SDK's documentation; torch-xla: its source, version 2.9

Neuron's persistent compile cache is read from its files:

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

import importlib.metadata
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from slurmllm.core.config.families import FAMILIES
from slurmllm.core.config.recipe import ADAMW, ModelConfig, Recipe
from slurmllm.core.config.resolve import RunConfig
from slurmllm.plan.mesh import Mesh
from slurmllm.train.backends.environment import (
    BackendEnvironment,
    Graph,
    Variable,
    Variables,
    common_graph_inputs,
    output_of,
)
from slurmllm.train.backends.nxd.arguments import arguments as arguments

INSPECT = "NEURON_RT_INSPECT_ENABLE"
_PROFILER = "Neuron Explorer: environment variables"
_CPU_MODE = {
    "NXD_CPU_MODE": Variable("1", "NxD: cluster.device cpu, for tests"),
    "PJRT_DEVICE": Variable("CPU", "torch-xla: cluster.device cpu"),
}
_EFA = {
    "FI_PROVIDER": Variable("efa", "Neuron: collectives over EFA"),
    "FI_EFA_USE_DEVICE_RDMA": Variable("1", "Neuron: device memory straight to the network"),
    "FI_EFA_FORK_SAFE": Variable("1", "Neuron: data workers fork; kernels before 5.15"),
}


def _buckets(recipe: Recipe, has_rms_norm: bool) -> Variables:
    """Return the size of NxD's buckets, in the variable that this run's optimizer reads."""
    if recipe.parallel.zero == 0:
        buckets = Variable("1024", "neox_20b.sh (there BUCKET_CAP_MB)")
        if has_rms_norm:
            buckets = Variable("512", "HLAT 7B, NxD: its default")
        return {"ALLREDUCE_BUCKET_CAP_MB": buckets}
    buckets = Variable("130", "NxD: its default; NaN above 140")
    if recipe.train.precision != "fp32":  # NxD halves it only if XLA_DOWNCAST_BF16 is 0
        buckets = Variable("65", "NxD: half of 130 where tensors are bf16 to torch")
    return {"ALL_GATHER_REDUCE_SCATTER_BUCKET_CAP_MB": buckets}


def _profiling(profiles: Path | None) -> Variables:
    """Return the variables of Neuron's profiler, which the runtime reads when a worker starts.

    It profiles the whole attempt, and of the device each graph's first execution.
    """
    variables = {
        INSPECT: Variable("1", f"profile.steps ({_PROFILER})"),
        "NEURON_RT_INSPECT_DEVICE_PROFILE": Variable("1", f"{_PROFILER}: a graph's first run"),
    }
    if profiles is not None:
        variables["NEURON_RT_INSPECT_OUTPUT_DIR"] = Variable(
            str(profiles), f"{_PROFILER}: a folder a worker, named by its process"
        )
    return variables


def variables(config: RunConfig, profiles: Path | None = None) -> Variables:
    recipe = config.recipe
    on_neuron = config.cluster.device == "neuron"
    precision = recipe.train.precision
    has_rms_norm = FAMILIES[recipe.model.family].norm == "rms"
    # Executions in flight and malloc's arenas, which the published scripts found by measurement.
    arenas = "128"
    if not has_rms_norm:
        script = "neox_20b.sh" if recipe.model.family == "neox" else "train_setup.sh"
        in_flight = "5"
    elif recipe.parallel.pipeline > 1:
        script = "run_llama2_70B_tp_pp.sh"
        in_flight = "7"
    else:
        script = "HLAT 7B"
        in_flight = "3"
        arenas = "64"
    network = _CPU_MODE
    if on_neuron:
        instance = INSTANCES.get(config.cluster.instance_type or DEFAULT, INSTANCES[DEFAULT])
        network = _EFA if instance.efa_devices else {}
    rounding = Variable("0", f"train.precision {precision} (HLAT 70B, NxDT)")
    if precision == "bf16_sr":
        rounding = Variable("1", "train.precision bf16_sr (neox_20b.sh, HLAT 7B)")
    # neox_20b.sh, HLAT; the first of run_llama2_70B_tp_pp.sh, too.
    flags = ["--model-type=transformer", "--distribution-strategy=llm-training"]
    if precision != "fp32":  # sums of bf16 values, such as softmax and norms, in fp32
        flags.append("--enable-mixed-precision-accumulation")  # neox_20b.sh, NxDT
    # The compiler casts nothing. AWS sets this for fp32 (train_setup.sh) and autocast (NxDT); its
    # other modes cast the whole model by XLA_USE_BF16, where our model casts by itself. Explicit,
    # because releases differ in the default (matmult, later none).
    flags.append("--auto-cast=none")
    is_profiled = recipe.profile.steps is not None and on_neuron
    return {
        **network,
        # Our launcher replaces torchrun. Only with this variable does torch-xla give each worker
        # the core of its LOCAL_RANK and pass the world size to the runtime.
        "TORCHELASTIC_RUN_ID": Variable("slurmllm", "torch-xla: workers as under torchrun"),
        "NEURON_CC_FLAGS": Variable(" ".join(flags), "neox_20b.sh, HLAT, NxDT; --auto-cast: ours"),
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": rounding,
        "NEURON_RT_EXEC_TIMEOUT": Variable("4000", "HLAT, s: outlasts a graph a peer compiles"),
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": Variable(in_flight, script),
        "NEURON_FUSE_SOFTMAX": Variable("1", "train_setup.sh, HLAT"),
        "NEURON_TRANSFER_WITH_STATIC_RING_OPS": Variable("", "neox_20b.sh, HLAT 7B"),
        "XLA_DISABLE_FUNCTIONALIZATION": Variable(
            "0", "run_llama2_70B_tp_pp.sh; Neuron: else splits of 2D tensors go wrong"
        ),
        **_buckets(recipe, has_rms_norm),
        "MALLOC_ARENA_MAX": Variable(arenas, script),
        "XLA_THREAD_POOL_SIZE": Variable("4", "neox_20b.sh"),
        **(_profiling(profiles) if is_profiled else {}),
    }


def cache_variables(cache: str) -> Variables:
    return {
        "NEURON_COMPILE_CACHE_URL": Variable(
            f"{cache}/neuron", "HLAT: node-local; a shared one timed out at 128 nodes"
        )
    }


def precompile_nodes(config: RunConfig, nodes: int) -> int:
    """Return all nodes: the graphs contain the collectives and their replica groups."""
    return nodes


# The graphs of a pipeline, and their order, follow from its micro batches.
graphs_depend_on_accumulation = True
_TOOL = "neuron_parallel_compile"

# Variables of the network, the host and the device's runtime; any other may change a graph.
_NOT_IN_GRAPHS = (
    *("FI_", "OFI_", "CCOM_", "GLOO_", "NCCL_", "MALLOC_", "GLIBC_", "TF_NUM_", "HF_", "OMP_"),
    *("NEURON_RT_", "NEURON_COMPILE_CACHE_URL", "XLA_THREAD_POOL_SIZE"),
    *("XLA_IO_THREAD_POOL_SIZE", "TORCHELASTIC_RUN_ID", "LD_LIBRARY_PATH", "PYTHON"),
)


def graphs(cache: Path) -> list[Graph]:
    entries = []
    for entry in sorted((cache / "neuron").glob("neuronxcc-*/MODULE_*")):
        if not entry.is_dir():
            continue
        neff = entry / "model.neff"
        log = entry / "model.log"
        graph = Graph(entry.name, str(entry.relative_to(cache)), "missing", entry.parent.name)
        if (entry / "model.done").is_file() and neff.is_file() and neff.stat().st_size > 0:
            graph = graph._replace(state="compiled")
        elif log.is_file():
            graph = graph._replace(state="failed", log=log)
        entries.append(graph)
    return entries


def expects_graphs(config: RunConfig) -> bool:
    # NxD's CPU mode itself compiles nothing.
    return config.cluster.device == "neuron" or _find_tool() is not None


def _find_tool() -> str | None:
    return shutil.which(_TOOL, path=str(Path(sys.executable).parent)) or shutil.which(_TOOL)


def precompile_commands(config: RunConfig, workers: Sequence[str], work: Path) -> list[list[str]]:
    """Collect the graphs of the workers' steps, then compile the graphs in the cache.

    With one command the tool would compile only the graphs of rank 0's output. It empties its
    working folder, which by default all runs of a user share, so it gets `work`.
    """
    if not expects_graphs(config):
        return [list(workers)]
    tool = _find_tool() or _TOOL
    options = ["--parallel_compile_workdir", str(work)]
    return [
        [tool, "--command", "collect", *options, *workers],
        [tool, "--command", "compile", *options],
    ]


_SCHEDULE = {
    "min_lr",
    "warmup_steps",
    "warmup_ratio",
    "step_count",
    "decay",
    "decay_start",
    "decay_steps",
}


def graph_inputs(config: RunConfig, mesh: Mesh, threads: int | None) -> dict[str, object]:
    """Return the settings that the graphs of a run depend on; CPU threads are none of them.

    The optimizer's constants and the mesh's replica groups are parts of graphs.
    """
    recipe = config.recipe
    flags = {name: variable.value for name, variable in variables(config).items()}
    flags = {**flags, **config.cluster.env, **recipe.env}
    return {
        **common_graph_inputs(config, mesh),
        "z_loss": recipe.train.z_loss,
        "accumulation": mesh.accumulation,
        "parallel": recipe.parallel.model_dump(mode="json"),
        "nodes": mesh.nodes,
        "devices_per_node": mesh.devices_per_node,
        # The learning rate is an input of the graphs, so its schedule is not part of them.
        "optim": recipe.optim.model_dump(mode="json", exclude=_SCHEDULE),
        "variables": {
            name: value
            for name, value in sorted(flags.items())
            if not name.startswith(_NOT_IN_GRAPHS)
        },
    }


class Instance(NamedTuple):
    """An EC2 instance type."""

    cores: int  # NeuronCores; each takes one worker
    efa_devices: int  # network devices for collectives between nodes


# Neuron's "How to prepare trn1.32xlarge for multi-node execution" and its trn1 architecture page.
INSTANCES = {
    "trn1.2xlarge": Instance(cores=2, efa_devices=0),
    "trn1.32xlarge": Instance(cores=32, efa_devices=8),
    "trn1n.32xlarge": Instance(cores=32, efa_devices=16),
}
DEFAULT = "trn1.32xlarge"


_TENSOR_SIZES = (1, 2, 4, 8, 16, 32)


def _shared_norms(model: ModelConfig, tensor: int) -> list[str]:
    """Return a fault if tensor parallelism splits the heads that one norm is computed over."""
    if tensor == 1 or not model.qk_norm or FAMILIES[model.family].qk_norm_over == "head":
        return []
    return [
        f"parallel.tensor: {tensor}: queries and keys of model.family {model.family} are normed "
        "over all heads, of which each tensor-parallel worker has some; --set "
        "parallel.tensor=1, or backend=native"
    ]


def _precision_faults(recipe: Recipe) -> Iterator[str]:
    if recipe.train.is_fp8:
        yield (
            "train.precision: fp8_mixed: neuronx-distributed has no fp8 products for training; "
            "--set train.precision=bf16_mixed"
        )
    if recipe.train.precision == "bf16_mixed" and recipe.parallel.zero == 0:
        yield (
            "train.precision: bf16_mixed: neuronx-distributed keeps fp32 master weights in its "
            "ZeRO-1 optimizer; --set parallel.zero=1, or train.precision=bf16_sr"
        )


def unsupported(config: RunConfig) -> list[str]:
    recipe = config.recipe
    cluster = config.cluster
    parallel = recipe.parallel
    model = recipe.model
    faults = _shared_norms(model, parallel.tensor)
    if cluster.device == "cuda":
        faults.append(
            "backend: nxd: neuronx-distributed computes on neuron devices (for tests, on cpu), not "
            "on cuda; --set backend=native, or choose another --cluster"
        )
    if recipe.optim.name != ADAMW:
        faults.append(
            f"optim.name: {recipe.optim.name} needs the native backend, as neuronx-distributed has "
            f"its own ZeRO-1 AdamW; --set optim.name={ADAMW}, or backend=native"
        )
    if parallel.zero > 1:
        faults.append(
            f"parallel.zero: {parallel.zero}: neuronx-distributed shards only the optimizer state "
            "(ZeRO-1); --set parallel.zero=1"
        )
    if parallel.shard_nodes is not None:
        faults.append(
            f"parallel.shard_nodes: {parallel.shard_nodes}: neuronx-distributed shards over all "
            "data-parallel workers; --set parallel.shard_nodes=null, or backend=native"
        )
    faults += _precision_faults(recipe)
    if parallel.sequence and model.seq_len % parallel.tensor:
        faults.append(
            f"model.seq_len: {model.seq_len} is not a multiple of parallel.tensor "
            f"{parallel.tensor}, over which sequence parallelism shards it; "
            "--set parallel.sequence=false, or change the length"
        )
    if cluster.device == "neuron" and parallel.tensor not in _TENSOR_SIZES:
        faults.append(
            f"parallel.tensor: {parallel.tensor}: the collectives of trn1 work on "
            f"{', '.join(map(str, _TENSOR_SIZES))} cores"
        )
    name = cluster.instance_type
    # No run has a profile for planning as its cluster.
    if cluster.device != "neuron" or name is None or cluster.planning_only is not None:
        return faults
    if name not in INSTANCES:
        faults.append(
            f"cluster.instance_type: {name} is not known to backend nxd; choose "
            f"{', '.join(INSTANCES)}, or train with --set backend=native on another cluster"
        )
    elif cluster.devices_per_node > (cores := INSTANCES[name].cores):
        faults.append(
            f"cluster.devices_per_node: {cluster.devices_per_node} workers, and {name} has "
            f"{cores} NeuronCores; set {cores}"
        )
    return faults


NOT_INSTALLED = "not installed"
_PACKAGES = (
    "neuronx-distributed",
    "torch-neuronx",
    "libneuronxla",
    "neuronx-cc",
    "torch-xla",
    "torch",
)
_DRIVER = Path("/sys/module/neuron/version")
_LIBRARIES = Path("/opt/aws/neuron/lib")


def versions() -> dict[str, str]:
    by_package = {}
    for package in _PACKAGES:
        try:
            by_package[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            by_package[package] = NOT_INSTALLED
    return by_package


processor = BackendEnvironment.processor  # neuronx-cc compiles for its own device, on any host


def node_versions() -> dict[str, str]:
    try:
        driver = _DRIVER.read_text(encoding="utf-8").strip()  # of the loaded kernel module
    except OSError:
        driver = output_of("modinfo", "--field", "version", "neuron") or NOT_INSTALLED
    return {
        **versions(),
        "neuron-driver": driver,
        "neuron-runtime": _library_version("libnrt.so.1", "aws-neuronx-runtime-lib"),
        "neuron-collectives": _library_version("libnccom.so.2", "aws-neuronx-collectives"),
    }


def _library_version(name: str, package: str) -> str:
    """Return the version from the file that the library links to, else from its package."""
    file = _LIBRARIES / name
    if file.exists() and (match := re.search(r"\.so\.(\d+\.\d[\w.+-]*)$", file.resolve().name)):
        return match.group(1)
    return (
        output_of("dpkg-query", "--show", "--showformat=${Version}", package)
        or output_of("rpm", "--query", "--queryformat", "%{VERSION}", package)
        or NOT_INSTALLED
    )
