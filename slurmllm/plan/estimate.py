"""What the planner says of one way to lay a run out: its memory, its step, what limits it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from slurmllm.config.resolve import RunConfig
from slurmllm.plan.mesh import Mesh


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by what they go into; they add up to the step.

    Attributes:
        compute: Matrix products, attention and elementwise work, forward and backward.
        recompute: What activation checkpointing computes again.
        tensor: Collectives within the tensor-parallel groups.
        bubble: Stages of the pipeline that wait for others.
        transfer: Activations and their gradients from stage to stage.
        data: Gradients and weights between data-parallel workers, as far as computing does not
            hide them.
        optimizer: The optimizer's own step.
        overhead: The rest: operators' launches, the host.
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
    """Bytes of the worker that needs the most.

    Attributes:
        parts: Name → bytes at the step's fullest moment; they add up to the peak.
        limit: That a model may take of a device.
    """

    parts: Mapping[str, int]
    limit: int

    @property
    def peak(self) -> int:
        """The most within a step, bytes."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether it is within the limit."""
        return self.peak <= self.limit


@dataclass(frozen=True)
class LayoutEstimate:
    """One layout of a run on a number of nodes.

    Attributes:
        config: The run's configuration with this layout written into it.
        mesh: Degrees and batch arithmetic.
        memory: What a worker needs.
        step: How long a step takes.
        model_flops: Of one step, as MFU counts them: no recomputation, no padding.
    """

    config: RunConfig
    mesh: Mesh
    memory: MemoryUse
    step: StepTime
    model_flops: float

    @property
    def fits(self) -> bool:
        """Whether every worker's memory holds it."""
        return self.memory.fits

    @property
    def seq_per_s(self) -> float:
        """Sequences trained on in a second, by all nodes."""
        return self.mesh.global_batch / self.step.total

    @property
    def tokens_per_s(self) -> float:
        """Likewise tokens."""
        return self.seq_per_s * self.config.recipe.model.seq_len

    @property
    def mfu(self) -> float:
        """Model-FLOPs utilization: of the devices' peak in the run's precision."""
        return self.model_flops / self.step.total / (self.mesh.world_size * peak_flops(self.config))


def peak_flops(config: RunConfig) -> float:
    """FLOP/s of one device at most, in the precision that the run computes in."""
    hardware = config.cluster.hardware
    assert hardware is not None, "the planner needs cluster.hardware"
    computes_fp32 = config.recipe.train.precision == "fp32"
    return (hardware.fp32_tflops if computes_fp32 else hardware.bf16_tflops) * 1e12
