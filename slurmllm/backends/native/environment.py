"""The native backend's surroundings: torch.compile's cache, NCCL's and the allocator's settings."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

from slurmllm.backends.environment import Variable
from slurmllm.backends.native.limits import unsupported as unsupported
from slurmllm.config.resolve import RunConfig

_FX_GRAPHS = "inductor/fxgraph"  # two levels: first letters of the key, then the key


def variables(config: RunConfig) -> dict[str, Variable]:
    """The workers' environment, each value with its source."""
    found = {
        "MALLOC_ARENA_MAX": Variable("64", "glibc: fewer arenas, less memory held by threads"),
    }
    if config.cluster.device == "cuda":
        found["PYTORCH_CUDA_ALLOC_CONF"] = Variable(
            "expandable_segments:True", "PyTorch: less fragmentation"
        )
        found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = Variable(
            "1", "PyTorch: a lost peer ends the collective with an error"
        )
    return found


def cache_variables(cache: str) -> dict[str, Variable]:
    """Where torch.compile keeps its graphs."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": Variable(f"{cache}/inductor", "PyTorch: compiled graphs"),
        "TRITON_CACHE_DIR": Variable(f"{cache}/triton", "Triton: compiled GPU kernels"),
    }


def precompile_nodes(nodes: int) -> int:
    """One: blocks are compiled without their collectives, so the graphs fit any world size."""
    return min(nodes, 1)


def count_graphs(cache: Path) -> int:
    """FX graphs in Inductor's cache."""
    return sum(1 for entry in (cache / _FX_GRAPHS).glob("*/*") if entry.is_dir())


def versions() -> dict[str, str]:
    """Inductor's cache keys hold torch's version; C++ kernels are built for this processor."""
    return {
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
