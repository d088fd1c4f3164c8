"""The cluster profile: the hardware and the site settings of one Slurm cluster."""

from __future__ import annotations

from contextlib import suppress
from datetime import date, timedelta
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from slurmllm.core.config.data_sources import SiteData, SourceName
from slurmllm.core.config.directives import refuse_generated
from slurmllm.core.config.operation import (
    EnvName,
    ListOf,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    SlurmWord,
)
from slurmllm.core.format import Texts


def _not_generated(directive: str) -> str:
    refuse_generated(directive.removeprefix("--").partition("=")[0])
    return directive


Directive = Annotated[
    str, Field(pattern=r"^--[a-z][a-z-]*(=[^\s\"'\\$`]+)?$"), AfterValidator(_not_generated)
]

SetupLine = Annotated[str, Field(pattern=r"^[^\r\n\x00]*\S[^\r\n\x00]*$")]


Argument = Annotated[str, Field(pattern=r"^[^\s\x00]+$")]


def _mount(value: str) -> str:
    source, _, destination = value.partition(":")
    if not source.startswith("/") or not (destination == "" or destination.startswith("/")):
        raise ValueError("must be /SOURCE or /SOURCE:/TARGET, with :ro to forbid writing")
    return value


class Container(Section):
    """The container that the tasks of jobs run in."""

    runtime: Literal["pyxis", "apptainer", "singularity", "docker", "podman"]
    """What starts it."""
    image: Argument
    """File or folder on the shared file system, by its absolute path, or a name that the runtime
    knows, such as docker://nvcr.io/nvidia/pytorch:25.01-py3."""
    mounts: ListOf[Annotated[Argument, AfterValidator(_mount)]] = ()
    """Further folders of the host: /SOURCE, /SOURCE:/TARGET or /SOURCE:/TARGET:ro."""
    options: ListOf[Argument] = ()
    """Further options of the runtime."""
    python: Argument = "python3"
    """Interpreter in the image, with slurmllm of the same version."""

    @property
    def srun_runs_it(self) -> bool:
        """Whether it is started by options of srun, and not by a command of its own."""
        return self.runtime == "pyxis"


RelaxedCheck = Literal[
    "device errors",
    "temperature",
    "clocks",
    "GPU memory",
    "GPU processes",
    "Xid",
    "DCGM",
    "network ports",
    "shared memory",
]


class HealthChecks(Section):
    """Checks of a node, before an attempt and by `health`."""

    enabled: bool = True
    """Whether every node is checked before every attempt."""
    timeout_s: PositiveFloat = 60.0
    """Seconds after which a node that does not respond fails."""
    min_node_local_gb: NonNegativeFloat = 1.0
    """Free space under node_local, GB of 10^9 bytes."""
    min_memory_gb: NonNegativeFloat = 0.0
    """Available memory of the host, GB of 10^9 bytes."""
    max_write_s: PositiveFloat | None = None
    """Maximum duration of a fsynced write to the shared file system, s; no limit by default."""
    max_clock_skew_s: PositiveFloat = 5.0
    """Maximum difference of a node's clock from the others', s."""
    efa_interfaces: NonNegativeInt = 0
    """EFA interfaces of a node."""
    driver_version: str | None = None
    """Version of the devices' driver; any by default."""
    unequal_versions: Literal["warn", "fail"] = "warn"
    """Result for a node whose driver, runtime, packages or ports differ from most others'."""
    bandwidth: Literal["never", "health", "always"] = "health"
    """When to measure the all-reduce over all nodes: only by `slurmllm health`, or before every
    attempt too."""
    min_allreduce_gb_s: PositiveFloat | None = None
    """Minimum bus bandwidth of that all-reduce, GB/s; not checked by default."""
    dcgm: Literal["never", "health", "always"] = "always"
    """When to run `dcgmi diag -r 1`, if it is installed: only by `slurmllm health`, or before
    the first attempt of each Slurm job too."""
    network_gb_s: PositiveFloat | None = None
    """Minimum total rate of a node's active InfiniBand, RoCE and EFA ports, GB/s; by default the
    nodes are only compared with each other."""
    warn_only: ListOf[RelaxedCheck] = ()
    """Checks whose failure only warns."""


class Trackers(Section):
    """Where the trackers of a recipe's `trackers` are."""

    project: str = "slurmllm"
    """W&B's project, MLflow's experiment."""
    entity: str | None = None
    """W&B's entity: a user or a team; the key's own by default."""
    tracking_uri: Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.-]*:\S+$")] | None = None
    """MLflow's server; $MLFLOW_TRACKING_URI by default. A user and password are variables,
    `--set env.MLFLOW_TRACKING_USERNAME` and `--set env.MLFLOW_TRACKING_PASSWORD`."""
    network: bool = True
    """Whether the nodes reach them. If not, `slurmllm track sync` on the login node does."""


FolderPath = Annotated[str, Field(pattern=r"^/[^\x00\r\n]*$")]


class Metrics(Section):
    """How a run exports its metrics to Prometheus while it trains; by default it does not."""

    port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    """Port on which a run's first node serves /metrics: on localhost only, without token_file."""
    token_file: FolderPath | None = None
    """File with the bearer token that a request must send; only its owner may read it."""
    textfile: FolderPath | None = None
    """Folder on the nodes that the textfile collector of node_exporter reads."""

    @model_validator(mode="after")
    def _require_port(self) -> Metrics:
        if self.token_file is not None and self.port is None:
            raise ValueError("token_file needs a port; set cluster.metrics.port, such as 9464")
        return self


GroupName = Annotated[str, Field(pattern=r"^[^\s:/,]+$")]


class Cluster(Section):
    """A cluster profile (`--cluster`); `--set cluster.<field>=…` overrides a value."""

    # It is written into comments of the scripts: a line break would end the comment.
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """The profile's name."""
    description: str = ""
    """One line on what this cluster is."""
    device: Literal["cpu", "cuda", "neuron"]
    """What the workers compute on."""
    instance_type: Annotated[str, Field(pattern=r"^[a-z0-9-]+\.[a-z0-9-]+$")] | None = None
    """EC2 instance type of the nodes, such as trn1.32xlarge; none if they differ."""
    devices_per_node: PositiveInt
    """Workers on a node: GPUs, NeuronCores, or processes on CPUs."""
    cpus_per_node: PositiveInt | None = None
    """CPUs that a node's workers share; all by default."""
    node_local: Annotated[str, Field(pattern=r"^/[A-Za-z0-9_./-]*$")]
    """A folder on every node's own disk, for the cache of compiled graphs."""
    trusted_group: GroupName | None = None
    """Unix group whose members' compiled graphs, which are code, are used too."""
    runs_group: GroupName | None = None
    """Unix group that may read the directories of new runs; all others may not."""
    partition: SlurmWord | None = None
    """Default partition."""
    exclusive: bool = True
    """Whether jobs take whole nodes."""
    setup: ListOf[SetupLine] = ()
    """Lines of shell that each job and each task of srun runs first, such as `module load cuda`."""
    python: Annotated[str, Field(pattern=r"^(/[^\s'\"$`\\]+|[A-Za-z0-9_.-]+)$")] | None = None
    """Interpreter of the jobs: a path, or a name that setup puts on the PATH; else that of submit.
    """
    container: Container | None = None
    """The container that the tasks of jobs run in."""
    directives: ListOf[Directive] = ()
    """Further sbatch options, such as --gres=gpu:8."""
    master_port: Annotated[int, Field(ge=1024, le=65534)] | None = None
    """Port of the rendezvous, the port after it for the control plane; free ones by default."""
    # Between Llama 3's 6334 h (arXiv 2407.21783, section 3.3.4: 419 unexpected interruptions in 54
    # days on 2048 hosts) and OPT-175B's 1700 h (arXiv 2205.01068, section 2.5: over 100 hosts, say
    # 105, cycled in 2 months of 124): their geometric mean.
    node_mtbf_hours: Annotated[PositiveFloat, Field(le=1e9)] = 3300.0
    """Hours between two failures of one node, before the run has seen any."""
    planning_only: str | None = None
    """Why no job runs on it, although `plan` predicts; `submit` and `resume` refuse the profile."""
    hardware: Hardware | None = None
    """What the nodes can do, for `slurmllm plan`."""
    price: Price | None = None
    """What a node costs."""
    health: HealthChecks = HealthChecks()
    trackers: Trackers = Trackers()
    metrics: Metrics = Metrics()
    data: dict[SourceName, SiteData] = Field(default_factory=dict)
    """Where the site has published data sets: `wikipedia_gpt2: {corpus: FILE, tokenizer: FILE}`."""
    data_folder: str | None = None
    """Where `slurmllm data fetch` puts data sets, on the shared file system; by default `.data` in
    the folder of the runs."""
    data_mirrors: dict[str, str] = Field(default_factory=dict)
    """Mirrors of published data sets: a URL prefix → its replacement; the longest match is used."""
    env: dict[EnvName, str] = Field(default_factory=dict)
    """Environment variables for every job of this cluster."""


GIB = 2**30  # bytes
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Overlap = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Hardware(Section):
    """Peak and achievable speeds of a device and of its links."""

    source: str
    """Where the figures come from."""
    software: str | None = None
    """Years of the software that the shares are fitted to, such as 2023-26; null: not known."""
    rough: bool = False
    """Whether the figures are a guess; the planner then neither refuses nor warns."""
    assumed: ListOf[str] = ()
    """Names of the shares and constants below that were never measured on this hardware."""
    bf16_tflops: PositiveFloat
    """Peak rate of a device's bf16 matrix products, TFLOP/s, dense."""
    fp32_tflops: PositiveFloat
    """Peak rate of a device's fp32 matrix products, TFLOP/s."""
    fp8_tflops: PositiveFloat | None = None
    """Peak rate of a device's fp8 matrix products, TFLOP/s, dense; null: it has none."""
    memory_gib: PositiveFloat
    """Memory of a device, GiB of 2^30 bytes."""
    reserved_gib: NonNegativeFloat = 0.0
    """Memory that runtime, libraries and context take before any model, GiB."""
    memory_gb_s: PositiveFloat
    """Bandwidth between a device and its memory, GB/s of 10^9 bytes."""
    node_link_gb_s: PositiveFloat
    """Bandwidth from a device to the others of its node, GB/s in one direction."""
    network_gb_s: PositiveFloat
    """Bandwidth from a node to the others, GB/s in one direction."""
    matrix_efficiency: Share
    """Share of the peak that large matrix products reach."""
    matrix_half: NonNegativeFloat = 0.0
    """Smallest dimension at which a matrix product reaches half of matrix_efficiency, where that
    was measured; 0: the times of its work and of its memory traffic are added as squares."""
    attention_efficiency: Share
    """Share of the peak that the products within attention reach."""
    memory_efficiency: Share
    """Share of the memory's bandwidth that elementwise work reaches."""
    node_link_efficiency: Share
    """Share of node_link_gb_s that collectives reach."""
    part_of_node: Share = 1.0
    """Share of node_link_efficiency that a process group on a part of the node reaches: 1 behind a
    switch; 0.5 in a torus, where its rings use one of two directions."""
    shard_efficiency: Share = 1.0
    """Bandwidth that an all-gather or a reduce-scatter reaches, as a share of an all-reduce's;
    below 1 with gloo, on CPUs."""
    network_efficiency: Share
    """Share of network_gb_s that collectives reach."""
    network_efficiency_range: tuple[Share, Share] | None = Field(default=None, strict=False)
    """Bounds of network_efficiency where it is an assumption; `plan --json` has what they give."""
    network_half: PositiveFloat | None = None
    """Nodes of a group at which congestion leaves half of network_efficiency; none by default."""
    node_link_latency_us: NonNegativeFloat = 0.0
    """One hop of a collective within a node, microseconds."""
    network_latency_us: NonNegativeFloat = 0.0
    """One hop of a collective between nodes, microseconds."""
    overlap: Overlap = 0.0
    """Share of the data-parallel communication that computation hides, while it lasts."""
    straggler_share: Overlap = 0.0
    """Share by which each doubling of the nodes slows a step: all wait for the slowest."""
    operator_us: NonNegativeFloat = 0.0
    """Launch overhead of a block's operators, microseconds."""
    step_overhead_s: NonNegativeFloat = 0.0
    """Further overhead of a step, seconds."""

    @field_validator("assumed")
    @classmethod
    def _assumes_its_own(cls, assumed: Texts) -> Texts:
        names = [name for name in cls.model_fields if name not in ("source", "rough", "assumed")]
        if not set(assumed) <= set(names):
            raise ValueError(f"names unknown fields; known here: {', '.join(names)}")
        return assumed

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


def _past_day(value: str) -> str:
    """Return a day (YYYY-MM-DD) that has begun in some time zone; raise ValueError for another."""
    day = ""
    with suppress(ValueError):
        day = date.fromisoformat(value).isoformat()
    if day != value:
        raise ValueError("must be a day, such as 2023-12-12")
    if day > (date.today() + timedelta(days=1)).isoformat():
        raise ValueError(f"{day} is in the future; write when these were the prices")
    return day


class Price(Section):
    """What a node costs."""

    on_demand: PositiveFloat
    """Dollars for an hour of one node, on demand."""
    date: Annotated[str, AfterValidator(_past_day)]
    """When these were the prices."""
    source: str = ""
    """Where they come from."""
