"""The cluster profile: the hardware and the habits of one Slurm cluster."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slurmllm.config.hardware import Hardware, Price
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
    """What a node must have, and how it is looked at, before an attempt and by `health`."""

    enabled: bool = Field(
        default=True, description="Whether every node is checked before every attempt."
    )
    timeout_s: PositiveFloat = Field(
        default=60.0, description="Seconds after which a node that has not answered fails."
    )
    min_node_local_gb: NonNegativeFloat = Field(
        default=1.0, description="Free space under node_local, GB of 10^9 bytes."
    )
    min_memory_gb: NonNegativeFloat = Field(
        default=0.0, description="Memory that the host can hand out, GB of 10^9 bytes."
    )
    max_write_s: PositiveFloat | None = Field(
        default=None,
        description="Seconds that a fsynced write to the shared file system may take; no limit "
        "where left out.",
    )
    max_clock_skew_s: PositiveFloat = Field(
        default=5.0, description="Seconds that a node's clock may be off those of the others."
    )
    efa_interfaces: Annotated[int, Field(ge=0)] = Field(
        default=0, description="EFA interfaces of a node."
    )
    driver_version: str | None = Field(
        default=None, description="Version of the devices' driver; any where left out."
    )
    unequal_versions: Literal["warn", "fail"] = Field(
        default="warn",
        description="What a node is told whose driver, runtime or packages differ from most "
        "others'.",
    )
    bandwidth: Literal["never", "health", "always"] = Field(
        default="health",
        description="When to measure the all-reduce over all nodes: by `slurmllm health` alone, "
        "or before every attempt too.",
    )
    min_allreduce_gb_s: PositiveFloat | None = Field(
        default=None,
        description="Bus bandwidth of that all-reduce, GB/s; measured only, where left out.",
    )


class Cluster(Section):
    """What `--cluster` brings; `--set cluster.<field>=…` overrides a value."""

    # It stands in comments of the scripts, so that it must not hold a line break.
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(
        description="The profile's name."
    )
    description: str = Field(default="", description="One line on what this cluster is.")
    device: Literal["cpu", "cuda", "neuron"] = Field(description="What the workers compute on.")
    instance_type: Annotated[str, Field(pattern=r"^[a-z0-9-]+\.[a-z0-9-]+$")] | None = Field(
        default=None,
        description="The nodes' EC2 instance type, such as trn1.32xlarge, where they are of one.",
    )
    devices_per_node: PositiveInt = Field(
        description="Workers on a node: GPUs, NeuronCores, or processes on CPUs."
    )
    cpus_per_node: PositiveInt | None = Field(
        default=None, description="CPUs that a node's workers share; all there are where left out."
    )
    node_local: Annotated[str, Field(pattern=r"^/[A-Za-z0-9_./-]*$")] = Field(
        description="A folder on every node's own disk, for the cache of compiled graphs."
    )
    partition: SlurmWord | None = Field(
        default=None, description="Partition where none is asked for."
    )
    exclusive: bool = Field(default=True, description="Whether jobs take whole nodes.")
    directives: Annotated[tuple[Directive, ...], Field(strict=False)] = Field(
        default=(), description="Further sbatch options, such as --gres=gpu:8."
    )
    master_port: Annotated[int, Field(ge=1024, le=65535)] | None = Field(
        default=None, description="Port of the rendezvous; a free one where left out."
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
