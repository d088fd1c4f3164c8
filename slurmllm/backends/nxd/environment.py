"""The surroundings of neuronx-distributed (NxD) on trn1: NEURON_*, FI_*, XLA_* and the cache.

Only what the supported versions read (Neuron 2.28, PyTorch 2.9, NxD 0.17); docs/trn1.md sets it
beside the published scripts and says why the rest of theirs is left out. Sources:

- neox_20b.sh (and pythia_6.9B_slurm.sh alike), train_setup.sh: neuronx-nemo-megatron
- HLAT: awslabs/HLAT, 7b/ and 70b/
- run_llama2_70B_tp_pp.sh: neuronx-distributed, whose source is "NxD"
- NxDT: neuronx-distributed-training, train_setup.sh and training_orchestrator.py
- Neuron: the AWS Neuron SDK's documentation; torch-xla: its source, version 2.9
"""

from __future__ import annotations

from typing import NamedTuple

from slurmllm.backends.environment import Variable
from slurmllm.backends.nxd.arguments import arguments as arguments
from slurmllm.backends.nxd.compiler_flags import compiler_flags
from slurmllm.backends.nxd.graphs import count_graphs as count_graphs
from slurmllm.backends.nxd.graphs import expects_graphs as expects_graphs
from slurmllm.backends.nxd.graphs import graph_inputs as graphs_of
from slurmllm.backends.nxd.graphs import graphs as graphs
from slurmllm.backends.nxd.graphs import precompile_commands as precompile_commands
from slurmllm.backends.nxd.instances import instance_faults, instance_of
from slurmllm.backends.nxd.limits import unsupported as _unsupported
from slurmllm.backends.nxd.versions import node_versions as node_versions
from slurmllm.backends.nxd.versions import versions as versions
from slurmllm.config.resolve import RunConfig
from slurmllm.plan.mesh import Mesh


class _Published(NamedTuple):
    """What the published scripts of a kind of model set by measurement, not by rule."""

    script: str
    in_flight: int
    arenas: int


_NEOX = _Published("neox_20b.sh", 5, 128)
_GPT3 = _Published("train_setup.sh", 5, 128)
_LLAMA = _Published("HLAT 7B", 3, 64)
_LLAMA_PIPELINE = _Published("run_llama2_70B_tp_pp.sh", 7, 128)


def variables(config: RunConfig) -> dict[str, Variable]:
    """The workers' environment, each value with its source."""
    on_device = config.cluster.device == "neuron"
    return {
        **(_network(config) if on_device else _CPU_MODE),
        # Our launcher stands for torchrun. Only under that name does torch-xla give each worker
        # the core of its LOCAL_RANK and tell the runtime the world's size.
        "TORCHELASTIC_RUN_ID": Variable("slurmllm", "torch-xla: workers as under torchrun"),
        "NEURON_CC_FLAGS": Variable(" ".join(compiler_flags(config)), "neox_20b.sh, HLAT, NxDT"),
        **_runtime(config),
        **_collectives(config),
        **_host(config),
    }


_CPU_MODE = {
    "NXD_CPU_MODE": Variable("1", "NxD: cluster.device cpu, for tests"),
    "PJRT_DEVICE": Variable("CPU", "torch-xla: cluster.device cpu"),
}


def _network(config: RunConfig) -> dict[str, Variable]:
    if instance_of(config.cluster).efa_devices == 0:
        return {}
    return {
        "FI_PROVIDER": Variable("efa", "Neuron: collectives over EFA"),
        "FI_EFA_USE_DEVICE_RDMA": Variable("1", "Neuron: device memory straight to the network"),
        "FI_EFA_FORK_SAFE": Variable("1", "Neuron: data workers fork; kernels before 5.15"),
    }


def _runtime(config: RunConfig) -> dict[str, Variable]:
    published = _published(config)
    precision = config.recipe.train.precision
    rounding = (
        Variable("1", "train.precision bf16_sr (neox_20b.sh, HLAT 7B)")
        if precision == "bf16_sr"
        else Variable("0", f"train.precision {precision} (HLAT 70B, NxDT)")
    )
    return {
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": rounding,
        "NEURON_RT_EXEC_TIMEOUT": Variable("4000", "HLAT, s: outlasts a graph a peer compiles"),
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": Variable(
            str(published.in_flight), published.script
        ),
        "NEURON_FUSE_SOFTMAX": Variable("1", "train_setup.sh, HLAT"),
        "NEURON_TRANSFER_WITH_STATIC_RING_OPS": Variable("", "neox_20b.sh, HLAT 7B"),
        "XLA_DISABLE_FUNCTIONALIZATION": Variable(
            "0", "run_llama2_70B_tp_pp.sh; Neuron: else splits of 2D tensors go wrong"
        ),
    }


def _collectives(config: RunConfig) -> dict[str, Variable]:
    """The sizes of NxD's buckets: whichever of the two this run's optimizer reads."""
    recipe = config.recipe
    if recipe.parallel.zero == 0:
        size, source = "1024", "neox_20b.sh (there BUCKET_CAP_MB)"
        if recipe.model.family == "llama":
            size, source = "512", "HLAT 7B, NxD: its default"
        return {"ALLREDUCE_BUCKET_CAP_MB": Variable(size, source)}
    if recipe.train.precision == "fp32":
        size, source = "130", "NxD: its default; NaN above 140"
    else:  # NxD halves it by itself only where it finds XLA_DOWNCAST_BF16=0
        size, source = "65", "NxD: half of 130 where tensors are bf16 to torch"
    return {"ALL_GATHER_REDUCE_SCATTER_BUCKET_CAP_MB": Variable(size, source)}


def _host(config: RunConfig) -> dict[str, Variable]:
    published = _published(config)
    return {
        "MALLOC_ARENA_MAX": Variable(str(published.arenas), published.script),
        "XLA_THREAD_POOL_SIZE": Variable("4", "neox_20b.sh"),
    }


def _published(config: RunConfig) -> _Published:
    recipe = config.recipe
    if recipe.model.family == "llama":
        return _LLAMA_PIPELINE if recipe.parallel.pipeline > 1 else _LLAMA
    return _NEOX if recipe.model.family == "neox" else _GPT3


def cache_variables(cache: str) -> dict[str, Variable]:
    """Where neuronx-cc keeps its graphs."""
    return {
        "NEURON_COMPILE_CACHE_URL": Variable(
            f"{cache}/neuron", "HLAT: node-local; a shared one timed out at 128 nodes"
        )
    }


def precompile_nodes(config: RunConfig, nodes: int) -> int:
    """All: the graphs hold the collectives and their replica groups."""
    return nodes


def graph_inputs(config: RunConfig, mesh: Mesh, threads: int | None) -> dict[str, object]:
    """What changes the graphs of a run; CPU threads do not."""
    return graphs_of(config, mesh, variables(config))


def unsupported(config: RunConfig) -> list[str]:
    """What this backend cannot train, and what does not fit the nodes; one line a reason."""
    return [*_unsupported(config), *instance_faults(config.cluster)]


def graphs_hold_steps(config: RunConfig) -> bool:
    """Yes: a pipeline's graphs, and the order in which they come, follow from its micro batches."""
    return True
