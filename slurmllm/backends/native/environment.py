"""The environment of the native backend: variables, Inductor's cache, unsupported settings."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurmllm.backends.environment import Graph, Variable
from slurmllm.backends.native.processor import processor as processor
from slurmllm.config.recipe import ADAMW
from slurmllm.config.resolve import RunConfig
from slurmllm.config.rules import choose, divisors
from slurmllm.plan.mesh import Mesh, replica_nodes

_FX_GRAPHS = "inductor/fxgraph"  # two levels: first letters of the key, then the key


def variables(config: RunConfig, profiles: Path | None = None) -> dict[str, Variable]:
    values = {
        "MALLOC_ARENA_MAX": Variable("64", "glibc: fewer arenas, less memory held by threads")
    }
    if config.cluster.device == "cpu":
        # A step frees and allocates the same large tensors. From the system, each one is new pages
        # that the kernel clears: about a tenth of the time of a 70-million-parameter step.
        values |= {
            "GLIBC_TUNABLES": Variable("glibc.malloc.hugetlb=1", "glibc: huge pages"),
            "MALLOC_MMAP_MAX_": Variable("0", "glibc: large tensors from the heap, reused"),
            "MALLOC_TRIM_THRESHOLD_": Variable(str(2**40), "glibc: the heap is kept"),
        }
    if config.cluster.device == "cuda":
        values["PYTORCH_CUDA_ALLOC_CONF"] = Variable(
            "expandable_segments:True", "PyTorch: less fragmentation"
        )
        values["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = Variable(
            "1", "PyTorch: a lost peer ends the collective with an error"
        )
    return values


def cache_variables(cache: str) -> dict[str, Variable]:
    return {
        "TORCHINDUCTOR_CACHE_DIR": Variable(f"{cache}/inductor", "PyTorch: compiled graphs"),
        "TRITON_CACHE_DIR": Variable(f"{cache}/triton", "Triton: compiled GPU kernels"),
    }


def precompile_nodes(config: RunConfig, nodes: int) -> int:
    """Return the nodes of one replica: graphs contain no collectives between replicas."""
    return min(nodes, replica_nodes(config))


def precompile_commands(config: RunConfig, workers: Sequence[str], work: Path) -> list[list[str]]:
    """Return the workers' command alone: Inductor compiles in the workers."""
    return [list(workers)]


def graphs_depend_on_accumulation(config: RunConfig) -> bool:
    """Return False: each micro batch is computed by the same graphs."""
    return False


def expects_graphs(config: RunConfig) -> bool:
    return config.recipe.train.compile


def graphs(cache: Path) -> list[Graph]:
    """Return the FX graphs in Inductor's cache, a folder each, named by the graph's key."""
    compiler = f"inductor {importlib.metadata.version('torch')}"
    entries = sorted((cache / _FX_GRAPHS).glob("*/*"))
    return [
        Graph(entry.name, str(entry.relative_to(cache)), "compiled", compiler)
        for entry in entries
        # Empty if a worker was killed when it began to write.
        if entry.is_dir() and any(entry.iterdir())
    ]


def graph_inputs(config: RunConfig, mesh: Mesh, threads: int | None) -> dict[str, object]:
    """Return the shapes and formats of a block, and the CPU threads that its code is compiled for.

    Not the number of data-parallel workers: graphs contain no collectives between replicas.
    """
    recipe, cluster = config.recipe, config.cluster
    # Before the nodes are known, the partition replaces their number of threads.
    on = threads if threads is not None else (recipe.slurm.partition or cluster.partition)
    return {
        "model": recipe.model.model_dump(mode="json"),
        "precision": recipe.train.precision,
        "activation_checkpointing": recipe.train.activation_checkpointing,
        "compile": recipe.train.compile,
        "z_loss": recipe.train.z_loss > 0,
        "mask": recipe.data.mask,
        "micro_batch": mesh.micro_batch,
        "tensor": mesh.tensor,
        "pipeline": mesh.pipeline,
        "virtual_pipeline": mesh.virtual_pipeline,
        "sequence": recipe.parallel.sequence,
        "device": cluster.device,
        "threads": on if cluster.device == "cpu" else None,
        **({} if recipe.eval.every_steps is None else {"evaluates": True}),
        "variables": {
            name: value
            for name, value in {**cluster.env, **recipe.env}.items()
            if name.startswith(("TORCH", "INDUCTOR", "TRITON", "CXX", "OMP", "ATEN"))
        },
    }


def versions() -> dict[str, str]:
    """Return the versions in Inductor's cache keys, and the processor that C++ kernels are for."""
    return {
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def node_versions() -> dict[str, str]:
    """Return `versions`: the driver of a GPU is in torch's own messages."""
    return versions()


def arguments(config: RunConfig, mesh: Mesh) -> dict[str, Any]:
    return {}  # the runtime reads the recipe itself


def unsupported(config: RunConfig) -> list[str]:
    recipe = config.recipe
    tensor, model = recipe.parallel.tensor, recipe.model
    faults = []
    if model.kv_heads % tensor:
        faults.append(
            f"parallel.tensor: {tensor} does not divide {model.kv_heads} key and value heads, "
            "which the native backend does not replicate; "
            f"{choose(divisors(model.kv_heads))} with --set parallel.tensor"
        )
    share = model.padded_vocab_size // tensor
    if share * (tensor - 1) >= model.vocab_size:
        faults.append(
            f"model.vocab_pad_multiple: {model.vocab_pad_multiple} pads {model.vocab_size} entries "
            f"to {model.padded_vocab_size}, and the last of {tensor} tensor-parallel workers has "
            f"nothing but padding; set a smaller multiple of {tensor}"
        )
    if recipe.optim.name != ADAMW and recipe.train.precision == "bf16_sr":
        faults.append(
            f"train.precision: bf16_sr rounds stochastically inside AdamW, and optim.name is "
            f"{recipe.optim.name}; --set train.precision=bf16_mixed, fp32 or bf16"
        )
    instance = config.cluster.instance_type or ""
    if config.cluster.device == "neuron" and instance.startswith("trn1"):
        faults.append(
            f"backend: native: on neuron devices it needs TorchNeuron, which is for trn2 and trn3, "
            f"not for {instance}; --set backend=nxd, or choose another --cluster"
        )
    elif config.cluster.device == "neuron" and config.cluster.container is None:
        faults += filter(None, [missing_torch_neuron()])
    return faults


def missing_torch_neuron() -> str | None:
    """Return a fault if TorchNeuron, through which torch computes on trn2 and trn3, is missing."""
    if importlib.util.find_spec("torch_neuronx") is not None:
        return None
    version = ".".join(importlib.metadata.version("torch").split(".")[:2])
    return (
        "backend: native: on neuron devices it needs TorchNeuron, which is not installed on "
        f"{platform.node()}; `pip install 'torch-neuronx=={version}.*'` as AWS's Neuron SDK 2.33 "
        "describes (trn2, trn3; torch 2.13 or 2.14), or --set backend=nxd, or choose another "
        "--cluster"
    )
