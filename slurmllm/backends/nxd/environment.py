"""The surroundings of neuronx-distributed (NxD) on trn1: NEURON_*, FI_*, XLA_* and the cache.

Sources: "NeoX" is neuronx-nemo-megatron's neox_20b.sh, "HLAT" is github awslabs/HLAT, "70B" is
NxD's run_llama2_70B_tp_pp.sh; "Neuron" is the AWS Neuron SDK's documentation.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from slurmllm.backends.environment import Variable
from slurmllm.config.resolve import RunConfig

_PACKAGES = ("neuronx-distributed", "torch-neuronx", "neuronx-cc", "torch-xla", "torch")


def variables(config: RunConfig) -> dict[str, Variable]:
    """The workers' environment, each value with its source."""
    stochastic = config.recipe.train.precision == "bf16_sr"
    in_flight = "7" if config.recipe.parallel.tensor >= 32 else "5"
    return {
        "FI_PROVIDER": Variable("efa", "Neuron: collectives over EFA"),
        "FI_EFA_USE_DEVICE_RDMA": Variable("1", "Neuron: device memory straight to the network"),
        "FI_EFA_FORK_SAFE": Variable("1", "Neuron: data workers fork"),
        "NEURON_CC_FLAGS": Variable(
            "--model-type transformer --distribution-strategy=llm-training "
            "--enable-mixed-precision-accumulation",
            "HLAT, NxD examples",
        ),
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": Variable(
            "1" if stochastic else "0", "train.precision (NeoX, HLAT 7B: 1)"
        ),
        "NEURON_RT_EXEC_TIMEOUT": Variable("100", "NeoX 10, later scripts 100, s"),
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": Variable(in_flight, "NeoX 5, 70B 7"),
        "NEURON_FUSE_SOFTMAX": Variable("1", "NeoX, HLAT"),
        "NEURON_TRANSFER_WITH_STATIC_RING_OPS": Variable("", "NeoX"),
        "MALLOC_ARENA_MAX": Variable("64", "NeoX"),
        "BUCKET_CAP_MB": Variable("1024", "NeoX"),
        "TF_NUM_INTEROP_THREADS": Variable("1024", "NeoX"),
        "XLA_THREAD_POOL_SIZE": Variable("4", "NeoX"),
        "XLA_IO_THREAD_POOL_SIZE": Variable("4", "NeoX"),
    }


def cache_variables(cache: str) -> dict[str, Variable]:
    """Where neuronx-cc keeps its graphs."""
    return {
        "NEURON_COMPILE_CACHE_URL": Variable(
            f"{cache}/neuron", "HLAT: node-local; a shared one timed out at 128 nodes"
        )
    }


def precompile_nodes(nodes: int) -> int:
    """All: the graphs hold the collectives and their replica groups."""
    return nodes


def count_graphs(cache: Path) -> int:
    """Compiled modules (NEFF files) in the compiler's cache."""
    return sum(1 for _ in (cache / "neuron").rglob("*.neff"))


def versions() -> dict[str, str]:
    """Versions of the Neuron packages that are installed."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def unsupported(config: RunConfig) -> list[str]:
    """This version renders trn1 jobs and does not train on them yet."""
    return [
        f"backend: nxd: this version of slurmllm renders the jobs of {config.recipe.name} for "
        "Neuron devices (--dry-run) and cannot train on them yet; train with --cluster p4d or "
        "local, --set backend=native and a data-parallel mesh"
    ]
