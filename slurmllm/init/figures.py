"""Whose hardware figures a profile takes: those of the shipped profile that is nearest."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from slurmllm.config.profiles import available, read_profile
from slurmllm.config.resolve import clusters_dir
from slurmllm.init.survey import NodeKind

# GPU, as a word of GRES types and features → the shipped profile with its data sheet's figures.
_GPUS = {"h200": "p5e", "h100": "h100_ib", "b200": "p6-b200", "a100": "a100_ib"}
_SMALL_A100 = "p4d"  # of 40 GB
_OTHER_GPU = "a100_ib"
# Parts of a GPU, and boards with links and clocks of their own.
_UNLIKE = re.compile(r"\d+g\.\d+gb|\bpcie\b|\bnvl\b|\bgh200\b|\bgb200\b")


@dataclass(frozen=True)
class Figures:
    """A shipped profile to extend, and how sure it is that its figures hold."""

    profile: str
    confidence: Literal["exact", "likely", "guess"]
    reason: str
    # What the new profile changes of it besides what Slurm says.
    changes: dict[str, Any] = field(default_factory=dict)


def nearest_figures(kind: NodeKind) -> Figures:
    """Return the shipped profile whose figures are nearest to those of nodes.

    Exact by the instance type, which ParallelCluster makes a feature of the nodes; else by the
    type of GPU, which says nothing of the network.
    """
    shipped = {name: shipped_values(name) for name in available(clusters_dir())}
    for name, values in shipped.items():
        if values.get("instance_type") in kind.features:
            reason = f"the nodes have the feature {values['instance_type']}"
            return Figures(name, "exact", reason)
    if not kind.gpus:
        reason = "Slurm counts no GPUs; the figures are a guess at two cores of a server"
        return Figures("local", "guess", reason)
    name, gpu = _by_gpu(" ".join([kind.gpu_type, *kind.features]))
    keys = (key for key in ("instance_type", "env") if shipped[name].get(key))
    changes: dict[str, Any] = dict.fromkeys(keys)
    if shipped[name].get("health", {}).get("efa_interfaces"):
        changes["health"] = {"efa_interfaces": 0}
    if gpu is None:
        subject = f"the GPU {kind.gpu_type}" if kind.gpu_type else "a GPU that Slurm does not name"
        reason = f"{subject} has no shipped profile, these are {name}'s"
        source = f"a guess: those of {name}; `slurmllm calibrate` measures"
        changes["hardware"] = {"rough": True, "source": source}
        return Figures(name, "guess", reason, changes)
    hardware = shipped[name]["hardware"]
    assumed = [*hardware.get("assumed", []), "network_gb_s", "network_efficiency"]
    if kind.gpus != shipped[name]["devices_per_node"]:
        assumed += ["node_link_efficiency", "overlap"]
    changes["hardware"] = {"assumed": list(dict.fromkeys(assumed))}
    reason = f"by the GPU {gpu}, of {hardware['memory_gib']:g} GiB; the network is assumed"
    return Figures(name, "likely", reason, changes)


def shipped_values(name: str) -> dict[str, Any]:
    return read_profile(clusters_dir() / f"{name}.yaml", clusters_dir())[0]


def _by_gpu(text: str) -> tuple[str, str | None]:
    """Return a shipped profile and the GPU by which it was chosen; None: of another GPU."""
    text = re.sub(r"[^a-z0-9.]+", " ", text.lower())
    gpu = next((gpu for gpu in _GPUS if re.search(rf"\b{gpu}\b", text)), None)
    if gpu is None:
        return _OTHER_GPU, None
    name = _SMALL_A100 if gpu == "a100" and re.search(r"\b40(gb)?\b", text) else _GPUS[gpu]
    return name, None if _UNLIKE.search(text) else gpu
