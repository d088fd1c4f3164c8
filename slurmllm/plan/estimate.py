"""The estimate of one layout of a run: memory and step time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from slurmllm.config.resolve import RunConfig
from slurmllm.plan.mesh import Mesh


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by part; the parts add up to the step.

    Attributes:
        compute: Matrix products, attention and elementwise work, forward and backward.
        recompute: Recomputation of activation checkpointing.
        tensor: Collectives within the tensor-parallel groups.
        bubble: Pipeline stages waiting for others.
        transfer: Activations and their gradients from stage to stage.
        data: Data-parallel communication that computing does not hide.
        optimizer: The optimizer's own step.
        overhead: Launches of operators, and the host.
    """

    compute: float
    recompute: float
    tensor: float
    bubble: float
    transfer: float
    data: float
    optimizer: float
    overhead: float

    @property
    def total(self) -> float:
        """The step, s."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Name → seconds, in the order of a step."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class MemoryUse:
    """Memory of the worker that needs the most, bytes.

    Attributes:
        parts: Name → bytes at the peak; they add up to it.
        limit: Device memory available to a model.
    """

    parts: Mapping[str, int]
    limit: int

    @property
    def peak(self) -> int:
        """Peak within a step, bytes."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.limit


@dataclass(frozen=True)
class LayoutEstimate:
    """The estimate of one layout of a run on a number of nodes.

    Attributes:
        config: The run's configuration with this layout.
        mesh: Degrees and batch arithmetic.
        memory: Memory of a worker.
        step: Duration of a step.
        model_flops: FLOPs of one step as in MFU: without recomputation and padding.
    """

    config: RunConfig
    mesh: Mesh
    memory: MemoryUse
    step: StepTime
    model_flops: float

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


def peak_flops(config: RunConfig) -> float:
    """Peak FLOP/s of one device in the run's precision."""
    hardware = config.cluster.hardware
    assert hardware is not None, "the planner needs cluster.hardware"
    computes_fp32 = config.recipe.train.precision == "fp32"
    return (hardware.fp32_tflops if computes_fp32 else hardware.bf16_tflops) * 1e12
