"""The cluster profile: the hardware and the site settings of one Slurm cluster."""

from __future__ import annotations

from contextlib import suppress
from datetime import date
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from slurmllm.config.recipe import (
    EnvName,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    SlurmWord,
)

Directive = Annotated[str, Field(pattern=r"^--[a-z][a-z-]*(=[^\s\"'\\$`]+)?$")]


class HealthChecks(Section):
    """Checks of a node, before an attempt and by `health`."""

    enabled: bool = Field(
        default=True, description="Whether every node is checked before every attempt."
    )
    timeout_s: PositiveFloat = Field(
        default=60.0, description="Seconds after which a node that does not respond fails."
    )
    min_node_local_gb: NonNegativeFloat = Field(
        default=1.0, description="Free space under node_local, GB of 10^9 bytes."
    )
    min_memory_gb: NonNegativeFloat = Field(
        default=0.0, description="Available memory of the host, GB of 10^9 bytes."
    )
    max_write_s: PositiveFloat | None = Field(
        default=None,
        description="Maximum duration of a fsynced write to the shared file system, s; no limit by "
        "default.",
    )
    max_clock_skew_s: PositiveFloat = Field(
        default=5.0, description="Maximum difference of a node's clock from the others', s."
    )
    efa_interfaces: Annotated[int, Field(ge=0)] = Field(
        default=0, description="EFA interfaces of a node."
    )
    driver_version: str | None = Field(
        default=None, description="Version of the devices' driver; any by default."
    )
    unequal_versions: Literal["warn", "fail"] = Field(
        default="warn",
        description="Result for a node whose driver, runtime or packages differ from most others'.",
    )
    bandwidth: Literal["never", "health", "always"] = Field(
        default="health",
        description="When to measure the all-reduce over all nodes: only by `slurmllm health`, or "
        "before every attempt too.",
    )
    min_allreduce_gb_s: PositiveFloat | None = Field(
        default=None,
        description="Minimum bus bandwidth of that all-reduce, GB/s; not checked by default.",
    )


class Cluster(Section):
    """A cluster profile (`--cluster`); `--set cluster.<field>=…` overrides a value."""

    # It is written into comments of the scripts: a line break would end the comment.
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(
        description="The profile's name."
    )
    description: str = Field(default="", description="One line on what this cluster is.")
    device: Literal["cpu", "cuda", "neuron"] = Field(description="What the workers compute on.")
    instance_type: Annotated[str, Field(pattern=r"^[a-z0-9-]+\.[a-z0-9-]+$")] | None = Field(
        default=None,
        description="EC2 instance type of the nodes, such as trn1.32xlarge; none if they differ.",
    )
    devices_per_node: PositiveInt = Field(
        description="Workers on a node: GPUs, NeuronCores, or processes on CPUs."
    )
    cpus_per_node: PositiveInt | None = Field(
        default=None, description="CPUs that a node's workers share; all by default."
    )
    node_local: Annotated[str, Field(pattern=r"^/[A-Za-z0-9_./-]*$")] = Field(
        description="A folder on every node's own disk, for the cache of compiled graphs."
    )
    trusted_group: Annotated[str, Field(pattern=r"^[^\s:/,]+$")] | None = Field(
        default=None,
        description="Unix group whose members' compiled graphs, which are code, are used too.",
    )
    partition: SlurmWord | None = Field(default=None, description="Default partition.")
    exclusive: bool = Field(default=True, description="Whether jobs take whole nodes.")
    directives: Annotated[tuple[Directive, ...], Field(strict=False)] = Field(
        default=(), description="Further sbatch options, such as --gres=gpu:8."
    )
    master_port: Annotated[int, Field(ge=1024, le=65535)] | None = Field(
        default=None, description="Port of the rendezvous; a free one by default."
    )
    # Between Llama 3's 6334 h (arXiv 2407.21783, section 3.3.4: 419 unexpected interruptions in 54
    # days on 2048 hosts) and OPT-175B's 1700 h (arXiv 2205.01068, section 2.5: over 100 hosts, say
    # 105, cycled in 2 months of 124): their geometric mean.
    node_mtbf_hours: PositiveFloat = Field(
        default=3300.0,
        description="Hours between two failures of one node, before the run has seen any.",
    )
    hardware: Hardware | None = Field(
        default=None, description="What the nodes can do, for `slurmllm plan`."
    )
    price: Price | None = Field(default=None, description="What a node costs.")
    health: HealthChecks = HealthChecks()
    env: dict[EnvName, str] = Field(
        default_factory=dict, description="Environment variables for every job of this cluster."
    )


GIB = 2**30  # bytes
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Overlap = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Hardware(Section):
    """Figures of one device, of the links between devices, and of what training reaches of both."""

    source: str = Field(description="Where the figures come from.")
    rough: bool = Field(
        default=False,
        description="Whether the figures are a guess; the planner then neither refuses nor warns.",
    )
    bf16_tflops: PositiveFloat = Field(
        description="Peak rate of a device's bf16 matrix products, TFLOP/s, dense."
    )
    fp32_tflops: PositiveFloat = Field(
        description="Peak rate of a device's fp32 matrix products, TFLOP/s."
    )
    memory_gib: PositiveFloat = Field(description="Memory of a device, GiB of 2^30 bytes.")
    reserved_gib: NonNegativeFloat = Field(
        default=0.0,
        description="Memory that runtime, libraries and context take before any model, GiB.",
    )
    memory_gb_s: PositiveFloat = Field(
        description="Bandwidth between a device and its memory, GB/s of 10^9 bytes."
    )
    node_link_gb_s: PositiveFloat = Field(
        description="Bandwidth from a device to the others of its node, GB/s in one direction."
    )
    network_gb_s: PositiveFloat = Field(
        description="Bandwidth from a node to the others, GB/s in one direction."
    )
    matrix_efficiency: Share = Field(
        description="Share of the peak that large matrix products reach."
    )
    matrix_half: NonNegativeFloat = Field(
        default=0.0,
        description="Smallest dimension at which a matrix product reaches half of "
        "matrix_efficiency.",
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
        description="Share of node_link_efficiency that a process group on a part of the node "
        "reaches: 1 behind a switch; 0.5 in a torus, where its rings use one of two directions.",
    )
    shard_efficiency: Share = Field(
        default=1.0,
        description="Bandwidth that an all-gather or a reduce-scatter reaches, as a share of an "
        "all-reduce's; below 1 with gloo, on CPUs.",
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
        description="Share of the data-parallel communication that computation hides.",
    )
    operator_us: NonNegativeFloat = Field(
        default=0.0, description="Launch overhead of a block's operators, microseconds."
    )
    step_overhead_s: NonNegativeFloat = Field(
        default=0.0, description="Further overhead of a step, seconds."
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
