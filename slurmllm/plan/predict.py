"""Prediction of one layout: memory of its fullest worker, step time of its slowest."""

from __future__ import annotations

from slurmllm.config.cluster import Hardware
from slurmllm.config.resolve import RunConfig
from slurmllm.errors import ConfigError
from slurmllm.plan.estimate import LayoutEstimate, MemoryUse
from slurmllm.plan.flops import model_flops
from slurmllm.plan.memory import WorkerMemory, worker_memory
from slurmllm.plan.mesh import Mesh
from slurmllm.plan.neuron_memory import neuron_memory
from slurmllm.plan.step import step_time


def predict(config: RunConfig, mesh: Mesh) -> LayoutEstimate:
    """Predict memory and step time of a run.

    Raises:
        ConfigError: the profile has no hardware figures.
    """
    hardware = known_hardware(config)
    return LayoutEstimate(
        config=config,
        mesh=mesh,
        memory=memory_use(config, mesh, hardware),
        step=step_time(config, mesh),
        model_flops=model_flops(config.recipe.model, mesh.global_batch),
    )


def known_hardware(config: RunConfig) -> Hardware:
    """The figures of the cluster's hardware.

    Raises:
        ConfigError: there are none.
    """
    cluster = config.cluster
    if cluster.hardware is None:
        fix = (
            "take that section from a shipped profile, trn1 or trn1n"
            if cluster.device == "neuron"  # which --calibrate does not measure
            else f"`slurmllm plan --calibrate --cluster {cluster.name} --out FILE.yaml` measures "
            "it on the nodes, and --cluster FILE.yaml uses it"
        )
        raise ConfigError(
            f"cluster profile {cluster.name} cannot be planned for",
            [f"cluster.hardware: missing; {fix}"],
        )
    return cluster.hardware


def memory_use(config: RunConfig, mesh: Mesh, hardware: Hardware) -> MemoryUse:
    """Memory of the worker that needs the most: in the first or the last pipeline stage."""
    stages = {0, mesh.tensor * mesh.data * (mesh.pipeline - 1)}
    every = [_parts(config, mesh, rank) for rank in sorted(stages)]
    return MemoryUse(max(every, key=lambda parts: sum(parts.values())), hardware.usable_bytes)


def _parts(config: RunConfig, mesh: Mesh, rank: int) -> dict[str, int]:
    if config.backend == "nxd":
        return neuron_memory(config, mesh, rank)
    return _native_parts(worker_memory(config, mesh, rank))


def _native_parts(memory: WorkerMemory) -> dict[str, int]:
    """The parts of the peak, at the moment of the step at which it occurs."""
    within = {
        "whole weights": memory.whole_weights,
        "gradients": memory.whole_gradients,
        "activations": memory.activations,
        "output or block": max(memory.output, memory.block),
    }
    after = {
        "gradients": memory.gradients,
        "end of the step": max(memory.ending, memory.passing),
    }
    moment = max(within, after, key=lambda parts: sum(parts.values()))
    resting = {
        "weights": memory.weights,
        "optimizer": memory.optimizer,
        "pipeline buffers": memory.pipeline,
    }
    return {name: size for name, size in {**resting, **moment}.items() if size}
