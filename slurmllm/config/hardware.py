"""What the nodes of a cluster can do and what they cost: the figures that the planner reads.

Peaks are the makers'; shares of them (the `…_efficiency` fields) are what training reaches of
them, fitted to published runs (tools/benchmarks/planner.py) or measured by
`slurmllm plan --calibrate`. A device is what one worker computes on: a GPU, a NeuronCore, or the
CPUs of one process.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import date
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from slurmllm.config.recipe import NonNegativeFloat, PositiveFloat, Section

GIB = 2**30  # bytes
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Overlap = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Hardware(Section):
    """Figures of one device, of the links between devices, and of what training reaches of both."""

    source: str = Field(description="Where the figures come from.")
    rough: bool = Field(
        default=False,
        description="Whether they are a guess, on which nothing is refused or warned of.",
    )
    bf16_tflops: PositiveFloat = Field(
        description="bf16 matrix products of a device, at most, TFLOP/s, dense."
    )
    fp32_tflops: PositiveFloat = Field(description="Likewise fp32 matrix products.")
    memory_gib: PositiveFloat = Field(description="Memory of a device, GiB of 2^30 bytes.")
    reserved_gib: NonNegativeFloat = Field(
        default=0.0,
        description="What runtime, libraries and context take of it before any model, GiB.",
    )
    memory_gb_s: PositiveFloat = Field(
        description="Between a device and its memory, GB/s of 10^9 bytes."
    )
    node_link_gb_s: PositiveFloat = Field(
        description="From one device to the others of its node, GB/s in one direction."
    )
    network_gb_s: PositiveFloat = Field(
        description="From one node to the others, GB/s in one direction."
    )
    matrix_efficiency: Share = Field(
        description="Share of the peak that large matrix products reach."
    )
    matrix_half: NonNegativeFloat = Field(
        default=0.0,
        description="Smallest dimension at which a matrix product reaches half of that.",
    )
    attention_efficiency: Share = Field(
        description="Share of the peak that the products within attention reach."
    )
    memory_efficiency: Share = Field(
        description="Share of the memory's bandwidth that elementwise work reaches."
    )
    node_link_efficiency: Share = Field(
        description="Share of node_link_gb_s that collectives reach."
    )
    part_of_node: Share = Field(
        default=1.0,
        description="Share of that which a group reaches that is not the whole node: 1 behind a "
        "switch, half of a torus, where such a group's rings use one of its two directions.",
    )
    shard_efficiency: Share = Field(
        default=1.0,
        description="Share of an all-reduce's rate that gathering and scattering reach on their "
        "own; below 1 with gloo, on CPUs.",
    )
    network_efficiency: Share = Field(description="Share of network_gb_s that collectives reach.")
    node_link_latency_us: NonNegativeFloat = Field(
        default=0.0, description="One hop of a collective within a node, microseconds."
    )
    network_latency_us: NonNegativeFloat = Field(
        default=0.0, description="One hop of a collective between nodes, microseconds."
    )
    overlap: Overlap = Field(
        default=0.0,
        description="Share of the data-parallel communication that computing hides.",
    )
    operator_us: NonNegativeFloat = Field(
        default=0.0, description="What a block's operators cost beside their work, microseconds."
    )
    step_overhead_s: NonNegativeFloat = Field(
        default=0.0, description="What a step costs beside all of this, seconds."
    )

    @field_validator("reserved_gib")
    @classmethod
    def _leaves_memory(cls, reserved_gib: float, info: ValidationInfo) -> float:
        memory_gib = info.data.get("memory_gib")
        if memory_gib is not None and reserved_gib >= memory_gib:
            raise ValueError(
                f"leaves nothing of memory_gib {memory_gib:g}; set what a worker holds without a "
                "model"
            )
        return reserved_gib

    @property
    def usable_bytes(self) -> int:
        """Of a device's memory, what a model may take."""
        return int((self.memory_gib - self.reserved_gib) * GIB)


def _day(value: str) -> str:
    with suppress(ValueError):
        if date.fromisoformat(value).isoformat() == value:
            return value
    raise ValueError("must be a day, such as 2023-12-12")


class Price(Section):
    """What a node costs."""

    on_demand: PositiveFloat = Field(description="Dollars for an hour of one node, on demand.")
    reserved: PositiveFloat | None = Field(
        default=None, description="Likewise, reserved for three years, as the effective rate."
    )
    date: Annotated[str, AfterValidator(_day)] = Field(description="When these were the prices.")
    source: str = Field(default="", description="Where they come from.")

    @field_validator("reserved")
    @classmethod
    def _reserved_is_cheaper(cls, reserved: float | None, info: ValidationInfo) -> float | None:
        on_demand = info.data.get("on_demand")
        if reserved is not None and on_demand is not None and reserved > on_demand:
            raise ValueError(
                f"is above on_demand {on_demand:g}; both are dollars for an hour of one node"
            )
        return reserved
