"""The estimate of one layout of a run: memory of its fullest worker, step time of its slowest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurmllm.core.config.cluster import Hardware
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import ConfigError
from slurmllm.plan.memory import worker_memory
from slurmllm.plan.mesh import Mesh
from slurmllm.plan.neuron_memory import neuron_memory
from slurmllm.plan.parameters import model_flops
from slurmllm.plan.step import StepTime, peak_flops, step_time

# A layout that uses more than this share of the memory is tight: the prediction's error, and what
# the allocator cannot use of fragmented memory, may exceed the rest.
TIGHT = 0.95


@dataclass(frozen=True)
class MemoryUse:
    """Memory of the worker that needs the most, bytes."""

    parts: Mapping[str, int]  # Name → bytes at the peak; they add up to it
    limit: int  # device memory available to a model

    @property
    def peak(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.limit

    @property
    def tight(self) -> bool:
        return TIGHT * self.limit < self.peak <= self.limit


@dataclass(frozen=True)
class LayoutEstimate:
    """The estimate of one layout of a run on a number of nodes."""

    config: RunConfig
    mesh: Mesh
    memory: MemoryUse
    step: StepTime
    model_flops: float  # FLOPs of one step as in MFU: without recomputation and padding

    @property
    def fits(self) -> bool:
        return self.memory.fits

    @property
    def seq_per_s(self) -> float:
        """Throughput of all nodes, sequences/s."""
        return self.mesh.global_batch / self.step.total

    @property
    def tokens_per_s(self) -> float:
        """Throughput of all nodes, tokens/s."""
        return self.seq_per_s * self.config.recipe.model.seq_len

    @property
    def mfu(self) -> float:
        """Model-FLOPs utilization, relative to the peak in the run's precision."""
        return self.model_flops / self.step.total / (self.mesh.world_size * peak_flops(self.config))


def predict(config: RunConfig, mesh: Mesh) -> LayoutEstimate:
    """Predict memory and step time; raises ConfigError if the profile has no hardware figures."""
    hardware = known_hardware(config)
    # The worker that needs the most is in the first or the last pipeline stage.
    stages = sorted({0, mesh.tensor * mesh.data * (mesh.pipeline - 1)})
    if config.backend == "nxd":
        parts = [neuron_memory(config, mesh, rank) for rank in stages]
    else:
        parts = [worker_memory(config, mesh, rank).parts() for rank in stages]
    return LayoutEstimate(
        config=config,
        mesh=mesh,
        memory=MemoryUse(max(parts, key=lambda use: sum(use.values())), hardware.usable_bytes),
        step=step_time(config, mesh),
        model_flops=model_flops(config.recipe.model, mesh.global_batch),
    )


def known_hardware(config: RunConfig) -> Hardware:
    """Return the cluster's hardware figures; raises ConfigError if there are none."""
    cluster = config.cluster
    if cluster.hardware is not None:
        return cluster.hardware
    fix = (
        "take that section from a shipped profile, trn1 or trn1n"
        if cluster.device == "neuron"  # which `calibrate` does not measure
        else f"`slurmllm calibrate --cluster {cluster.name} --out FILE.yaml` measures it on the "
        "nodes, and --cluster FILE.yaml uses it"
    )
    raise ConfigError(
        f"cluster profile {cluster.name} cannot be planned for",
        [f"cluster.hardware: missing; {fix}"],
    )
