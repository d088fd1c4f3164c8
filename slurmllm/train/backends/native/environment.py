"""The environment of the native backend: variables, Inductor's cache, unsupported settings."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from slurmllm.core.config.recipe import ADAMW, Recipe
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.config.rules import choose, divisors
from slurmllm.plan.mesh import Mesh
from slurmllm.plan.parameters import block_products
from slurmllm.train.backends.environment import (
    BackendEnvironment,
    Graph,
    Variable,
    Variables,
    common_graph_inputs,
    output_of,
)

CPUINFO = Path("/proc/cpuinfo")
_UNKNOWN = "unknown"
# The flags of x86-64 that name instructions which a compiler emits by itself.
_INSTRUCTIONS = re.compile(r"s?sse|avx|amx|fma|bmi|f16c|gfni|vaes|vpclmul|xop|tbm|abm|popcnt|movbe")
# `submit --local` asks once for each earlier run.
output = functools.cache(output_of)
_FP8_MULTIPLE = 16  # of the dimensions of fp8 products (torch._scaled_mm)
_FX_GRAPHS = "inductor/fxgraph"  # two levels: first letters of the key, then the key


def variables(config: RunConfig, profiles: Path | None = None) -> Variables:
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


def cache_variables(cache: str) -> Variables:
    return {
        "TORCHINDUCTOR_CACHE_DIR": Variable(f"{cache}/inductor", "PyTorch: compiled graphs"),
        "TRITON_CACHE_DIR": Variable(f"{cache}/triton", "Triton: compiled GPU kernels"),
    }


# Graphs contain no collectives between replicas, serve any accumulation, and are compiled in the
# workers.
precompile_nodes = BackendEnvironment.precompile_nodes
precompile_commands = BackendEnvironment.precompile_commands
graphs_depend_on_accumulation = BackendEnvironment.graphs_depend_on_accumulation
arguments = BackendEnvironment.arguments  # the runtime reads the recipe itself


def expects_graphs(config: RunConfig) -> bool:
    return config.recipe.train.compile


def graphs(cache: Path) -> list[Graph]:
    compiler = f"inductor {importlib.metadata.version('torch')}"
    return [
        Graph(entry.name, str(entry.relative_to(cache)), "compiled", compiler)
        for entry in sorted((cache / _FX_GRAPHS).glob("*/*"))
        # Empty if a worker was killed when it began to write.
        if entry.is_dir() and any(entry.iterdir())
    ]


def graph_inputs(config: RunConfig, mesh: Mesh, threads: int | None) -> dict[str, object]:
    """Return the shapes and formats of a block, and the CPU threads that its code is for."""
    recipe = config.recipe
    cluster = config.cluster
    # Before the nodes are known, the partition replaces their number of threads.
    on = threads if threads is not None else (recipe.slurm.partition or cluster.partition)
    return {
        **common_graph_inputs(config, mesh),
        **({"fp8_recipe": recipe.train.fp8_recipe} if recipe.train.is_fp8 else {}),
        "compile": recipe.train.compile,
        "z_loss": recipe.train.z_loss > 0,
        "tensor": mesh.tensor,
        "pipeline": mesh.pipeline,
        "virtual_pipeline": mesh.virtual_pipeline,
        "sequence": recipe.parallel.sequence,
        "threads": on if cluster.device == "cpu" else None,
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


node_versions = versions  # the driver of a GPU is in torch's own messages


def unsupported(config: RunConfig) -> list[str]:
    recipe = config.recipe
    tensor = recipe.parallel.tensor
    model = recipe.model
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
    if recipe.train.is_fp8:
        faults += _fp8_faults(config)
    instance = config.cluster.instance_type or ""
    if config.cluster.device == "neuron" and instance.startswith("trn1"):
        faults.append(
            f"backend: native: on neuron devices it needs TorchNeuron, which is for trn2 and trn3, "
            f"not for {instance}; --set backend=nxd, or choose another --cluster"
        )
    elif config.cluster.device == "neuron" and config.cluster.container is None:
        faults += filter(None, [missing_torch_neuron()])
    return faults


def missing_torchao() -> str | None:
    if importlib.util.find_spec("torchao") is not None:
        return None
    return (
        f"train.precision: fp8_mixed needs torchao, which is not installed on {platform.node()}; "
        "`pip install torchao` (extra fp8 of slurmllm), or --set train.precision=bf16_mixed"
    )


def _fp8_faults(config: RunConfig) -> list[str]:
    cluster = config.cluster
    hardware = cluster.hardware
    fix = "--set train.precision=bf16_mixed"
    if cluster.device == "neuron":
        return [
            f"train.precision: fp8_mixed: torchao has no fp8 products for neuron devices; {fix}"
        ]
    faults = []
    if cluster.device == "cuda" and hardware and not hardware.rough and not hardware.fp8_tflops:
        faults.append(
            f"train.precision: fp8_mixed: profile {cluster.name} has no hardware.fp8_tflops, as "
            f"GPUs before compute capability 8.9 (A100) have no fp8 products; {fix}, or if these "
            "have them, set cluster.hardware.fp8_tflops to their data sheet's dense peak"
        )
    if cluster.container is None:
        faults += filter(None, [missing_torchao()])
    return [*faults, *_fp8_sizes(config.recipe)]


def _fp8_sizes(recipe: Recipe) -> list[str]:
    """Return a fault for each setting with products whose sizes torch._scaled_mm refuses."""
    model, tensor = recipe.model, recipe.parallel.tensor
    micro_batch = recipe.train.micro_batch
    rows = micro_batch if isinstance(micro_batch, int) else 1  # auto: any number
    attention_in, attention_out, _, feed_forward_out = block_products(model, 1, tensor)
    hidden, heads = model.hidden_size, [attention_out.k, attention_in.n]
    # Setting, its value, the factor that its multiple has besides 16, and sizes that it decides.
    settings = [
        ("ffn_hidden_size", model.ffn_hidden_size, tensor, [feed_forward_out.k]),
        ("seq_len", model.seq_len, 1, [rows * model.seq_len]),
    ]
    if model.head_dim is None:
        settings.append(("hidden_size", hidden, model.num_heads, [hidden, *heads]))
    else:
        settings += [("hidden_size", hidden, 1, [hidden]), ("head_dim", model.head_dim, 1, heads)]
    return [
        f"model.{name}: {value}: a worker's products have a dimension of {sizes[0]}, no multiple "
        f"of {_FP8_MULTIPLE}, as fp8 needs; make it {value - value % -(factor * _FP8_MULTIPLE)}, "
        "or --set train.precision=bf16_mixed"
        for name, value, factor, all_sizes in settings
        if (sizes := [size for size in all_sizes if size % _FP8_MULTIPLE])
    ]


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


def processor(device: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return what this node's graphs are made for; `variables` are those of the workers.

    Inductor vectorizes for ATen's CPU capability and compiles with `-march=native`; its cache keys
    hold neither. A graph of another capability would be compiled for a vector length that its loops
    were not written for, and compute garbage. The name of a GPU is in the keys.
    """
    if device == "cuda":
        gpus = output("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader")
        names = {line.replace(",", "") for line in (gpus or _UNKNOWN).splitlines()}
        return {"gpu": ", ".join(sorted(names))}
    fields = cpu_fields()
    compiler = variables.get("CXX") or "g++"
    flags = set(fields.get("flags") or fields.get("Features") or [])  # x86-64, Arm
    x86 = platform.machine() == "x86_64"
    features = filter(_INSTRUCTIONS.match, flags) if x86 else flags
    version = output(compiler, "-dumpfullversion", "-dumpversion") or _UNKNOWN
    return {
        "cpu_capability": cpu_capability(flags, variables.get("ATEN_CPU_CAPABILITY")),
        "cpu_features": " ".join(sorted(features)),
        # Inductor takes a smaller capability if this one cannot compile for the processor's.
        "compiler": f"{Path(compiler).name} {version}",
    }


def cpu_capability(flags: set[str], requested: str | None) -> str:
    """Return torch.backends.cpu.get_cpu_capability() of an x86-64 with these flags.

    `requested` is $ATEN_CPU_CAPABILITY. On other architectures return it, or `native`.
    """
    if platform.machine() != "x86_64":
        return requested or "native"
    if requested in ("default", "avx2", "avx512"):  # others are ignored
        return requested.upper()
    # ATen's DispatchStub.cpp
    if {"avx512vl", "avx512bw", "avx512dq", "fma"} <= flags:
        return "AVX512"
    return "AVX2" if {"avx2", "fma"} <= flags else "DEFAULT"


def cpu_fields(cpuinfo: Path = CPUINFO) -> dict[str, list[str]]:
    """Return the fields of /proc/cpuinfo's last processor, split at spaces; none without it."""
    if not cpuinfo.is_file():
        return {}
    lines = (line.partition(":") for line in cpuinfo.read_text().splitlines())
    return {key.strip(): value.split() for key, _, value in lines}
