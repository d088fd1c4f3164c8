"""The sections of a recipe: what is trained, on what data, how; hardware-independent.

Batches count sequences, lengths count tokens. Field names are the ones that `--set` takes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from slurmllm.config.families import FAMILIES, Activation, FamilyName, gate_block
from slurmllm.config.variables import refuse_reserved

EnvName = Annotated[
    str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"), AfterValidator(refuse_reserved)
]
PositiveInt = Annotated[int, Field(gt=0, lt=2**40)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    """A frozen group of fields; unknown fields are faults and nothing is converted silently."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


class ModelConfig(Section):
    """The shape of the model; fields with a default of the family may be left out."""

    family: FamilyName = Field(
        description="Model family: neox (GPT-NeoX, Pythia), llama (Llama 2) or gpt3."
    )
    num_layers: Annotated[PositiveInt, Field(le=100_000)] = Field(description="Decoder layers.")
    hidden_size: PositiveInt = Field(description="Width of the residual stream.")
    num_heads: PositiveInt = Field(description="Attention heads.")
    num_kv_heads: PositiveInt | None = Field(
        default=None, description="Key and value heads; as many as attention heads by default."
    )
    ffn_hidden_size: PositiveInt = Field(description="Width of the feed-forward layer.")
    vocab_size: PositiveInt = Field(
        description="Vocabulary entries, no fewer than the tokenizer's."
    )
    vocab_pad_multiple: PositiveInt = Field(
        default=1, description="The embedding's rows are rounded up to a multiple of this."
    )
    seq_len: PositiveInt = Field(description="Tokens in a training sequence.")
    rotary_pct: Annotated[float, Field(ge=0, le=1)] = Field(
        description="Share of each head's dimensions that rotary positions turn; the family's."
    )
    rotary_base: PositiveFloat = Field(default=10000.0, description="Base of the rotary angles.")
    activation: Activation = Field(
        description="Between the matrices of the feed-forward layer: gelu (by erf), gelu_tanh or "
        "silu; the family's."
    )
    attention_bias: bool = Field(description="Biases of attention's matrices; the family's.")
    mlp_bias: bool = Field(description="Biases of the feed-forward matrices; the family's.")
    parallel_residual: bool = Field(
        description="Attention and feed-forward both read the block's input, and one sum adds "
        "them; the family's."
    )
    tied_embeddings: bool = Field(
        description="The head is the embedding, transposed; the family's."
    )
    norm_eps: PositiveFloat = Field(default=1e-5, description="Epsilon of the norms.")
    init_std: PositiveFloat = Field(
        default=0.02, description="Standard deviation of the initial weights."
    )
    scaled_init: bool = Field(
        default=False,
        description="Divide the standard deviation of each layer's two output matrices by "
        "sqrt(2 · num_layers), as HLAT does.",
    )
    output_init_std: PositiveFloat | None = Field(
        default=None,
        description="Standard deviation of each layer's two output matrices; init_std where left "
        "out (and scaled_init is off).",
    )

    @model_validator(mode="before")
    @classmethod
    def _ask_the_family(cls, values: Any) -> Any:
        return with_family(values) if isinstance(values, Mapping) else values

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer has a gate."""
        return FAMILIES[self.family].gated

    @property
    def gate_block(self) -> int:
        """Rows of gate and of up that alternate in the coalesced matrix."""
        return gate_block(self.ffn_hidden_size)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: the vocabulary rounded up."""
        multiple = self.vocab_pad_multiple
        return (self.vocab_size + multiple - 1) // multiple * multiple


def with_family(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a model section, those left out filled in with the family's values."""
    family = values.get("family")
    defaults = FAMILIES[family].defaults if isinstance(family, str) and family in FAMILIES else {}
    return {**defaults, **values}


class CorpusShare(Section):
    """One corpus of a blend."""

    path: str = Field(description="As `data.corpus`.")
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=1.0, description="Its share of the sequences, relative to the others'."
    )


def _not_empty(corpora: tuple[CorpusShare, ...]) -> tuple[CorpusShare, ...]:
    if not corpora:
        raise ValueError("a blend names at least one corpus, as {path, weight}")
    return corpora


_NOT_EMPTY = AfterValidator(_not_empty)


class DataConfig(Section):
    """What the model reads."""

    corpus: (
        Annotated[
            Annotated[str, Tag("[path]")]
            | Annotated[tuple[CorpusShare, ...], Field(strict=False), _NOT_EMPTY, Tag("[blend]")],
            Discriminator(lambda value: "[blend]" if isinstance(value, list | tuple) else "[path]"),
        ]
        | None
    ) = Field(
        default=None,
        description="Corpus made by `slurmllm data build`, a Megatron .bin/.idx, a .npy of token "
        "ids, or `stdlib`: the texts of this machine's Python standard library, built at the first "
        "submit. A list of {path, weight} blends several.",
    )
    tokenizer: str | None = Field(
        default=None,
        description="A tokenizer.json, or `stdlib`: trained on the stdlib corpus at the first "
        "submit.",
    )
    mask: Literal["none", "document"] = Field(
        default="none",
        description="Attention across document boundaries: `none` masks nothing, `document` keeps "
        "attention and positions within each document.",
    )
    validation: Annotated[float, Field(ge=0, le=0.5)] = Field(
        default=0.0,
        description="Share of the documents, chosen by the hash of their content, that training "
        "never sees.",
    )
    num_workers: Annotated[int, Field(ge=0)] = Field(
        default=1, description="Processes that tokenize ahead of the training, for each worker."
    )

    @property
    def corpora(self) -> tuple[CorpusShare, ...]:
        """The corpora; empty if none is set."""
        if isinstance(self.corpus, str):
            return (CorpusShare(path=self.corpus),)
        return self.corpus or ()


def _number_or_auto(value: Any) -> Any:
    """One fault and not one for each kind of value that would do."""
    if value == "auto" or (type(value) is int and 0 < value < 2**40):
        return value
    raise ValueError("must be a whole number above 0, or auto")


class TrainConfig(Section):
    """How long and in which batches the model trains."""

    steps: PositiveInt = Field(description="Optimizer steps to the run's end.")
    global_batch: PositiveInt = Field(description="Sequences in one optimizer step.")
    micro_batch: Annotated[PositiveInt | Literal["auto"], BeforeValidator(_number_or_auto)] = Field(
        description="Sequences in one forward pass of one worker; auto: measured once, in the "
        "precompile stage; 1 on Neuron devices, which cannot measure it."
    )
    init_from: str | None = Field(
        default=None,
        description="A checkpoint folder whose weights the run starts from, at step 0: one that "
        "`slurmllm checkpoint import` made, or another run's.",
    )
    finetune: bool = Field(
        default=False, description="Whether train.init_from must be set before the run can start."
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(
        default=1234, description="Seed of the initial weights and of the data order."
    )
    precision: Literal["fp32", "bf16_mixed", "bf16_sr", "bf16"] = Field(
        default="fp32",
        description="fp32; bf16_mixed: bf16 products, fp32 master weights and optimizer state; "
        "bf16_sr: bf16 throughout with stochastic rounding; bf16: bf16 throughout.",
    )
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        default="none", description="What the backward pass recomputes instead of keeping."
    )
    compile: bool = Field(default=True, description="torch.compile on the native backend.")
    incomplete_graphs: Literal["refuse", "compile"] = Field(
        default="refuse",
        description="What the train stage does if precompile left a graph uncompiled: refuse to "
        "start, or compile it while training.",
    )
    log_every: PositiveInt = Field(default=10, description="Steps between lines in the log.")


class OptimConfig(Section):
    """The optimizer and the learning rate's schedule."""

    name: Literal["adamw"] = Field(default="adamw", description="The optimizer.")
    lr: PositiveFloat = Field(description="Learning rate after the warm-up.")
    min_lr: NonNegativeFloat = Field(default=0.0, description="Learning rate at the decay's end.")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Steps of linear rise from 0."
    )
    decay: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="The way down from lr to min_lr."
    )
    decay_steps: PositiveInt | None = Field(
        default=None,
        description="Step at which min_lr is reached, warm-up included; train.steps if left out.",
    )
    betas: Annotated[tuple[float, float], Field(strict=False)] = Field(
        default=(0.9, 0.95), description="Adam's averaging constants."
    )
    eps: PositiveFloat = Field(default=1e-8, description="Adam's epsilon.")
    weight_decay: NonNegativeFloat = Field(default=0.01, description="Decoupled weight decay.")
    decay_norms_and_biases: bool = Field(
        default=False, description="Whether norms and biases decay too (HLAT: every parameter)."
    )
    grad_clip: NonNegativeFloat = Field(
        default=1.0, description="Largest gradient 2-norm over all parameters; 0 clips nothing."
    )


class ParallelConfig(Section):
    """Mesh degrees; data parallelism follows from the node count."""

    auto: bool = Field(
        default=False,
        description="Whether the planner chooses what is not set here, at submit. `parallel: auto` "
        "leaves all of it to the planner.",
    )
    tensor: PositiveInt = Field(default=1, description="Tensor-parallel degree.")
    pipeline: PositiveInt = Field(default=1, description="Pipeline stages.")
    virtual_pipeline: PositiveInt = Field(
        default=1,
        description="Chunks of layers that each pipeline stage holds; more than 1 interleaves "
        "them (1F1B either way).",
    )
    sequence: bool = Field(
        default=False, description="Sequence parallelism inside the tensor-parallel group."
    )
    zero: Annotated[int, Field(ge=0, le=3)] = Field(
        default=1,
        description="What data-parallel workers share out: 1 optimizer state, 2 gradients too, "
        "3 parameters too. A backend may share out more than asked.",
    )

    @model_validator(mode="before")
    @classmethod
    def _is_a_section(cls, values: Any) -> Any:
        if isinstance(values, Mapping | cls):
            return values
        raise ValueError("must be auto, or degrees such as {tensor: 8, pipeline: 4}")


class CheckpointConfig(Section):
    """When checkpoints are written and which are kept."""

    every_steps: Annotated[PositiveInt | Literal["auto"], BeforeValidator(_number_or_auto)] = Field(
        default=100,
        description="Steps between checkpoints; auto: by Young and Daly, from what a save costs "
        "and how often the run's nodes fail.",
    )
    keep: PositiveInt = Field(default=3, description="Newest checkpoints kept.")
    keep_hours: NonNegativeFloat = Field(
        default=0.0, description="Checkpoints younger than this are kept too."
    )
    keep_every: PositiveInt | None = Field(
        default=None, description="Checkpoints at multiples of this step are kept for good."
    )
    asynchronous: bool = Field(
        default=False, description="Write checkpoints while training continues."
    )
    replica: str | None = Field(
        default=None,
        description="A folder or a URL (s3://…) to which each checkpoint is copied while training "
        "continues, and from which a run resumes if its own directory has none.",
    )
    replica_keep: PositiveInt = Field(
        default=2, description="Newest checkpoints kept in the replica."
    )


def _off(value: Any) -> Any:
    """YAML reads a bare `off` as false."""
    return "off" if value is False else value


class GuardConfig(Section):
    """Reaction to a loss or a gradient norm that is no longer right (after HLAT)."""

    not_finite: Literal["stop", "roll_back"] = Field(
        default="stop", description="At a loss or a gradient norm that is not finite."
    )
    spike: Annotated[Literal["off", "warn", "stop", "roll_back"], BeforeValidator(_off)] = Field(
        default="warn",
        description="At a spike of the gradient norm that does not return.",
    )
    factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = Field(
        default=3.0,
        description="A gradient norm is a spike from so many times its lowest smoothed value on.",
    )
    smoothing_steps: PositiveInt = Field(
        default=50, description="Steps that the smoothed gradient norm is the mean over."
    )
    window_steps: PositiveInt = Field(
        default=50, description="Steps within which a spike must return."
    )
    skip_batches: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="Global batches before the spike's first that a roll-back skips too.",
    )
    max_roll_backs: Annotated[int, Field(ge=0)] = Field(
        default=3, description="Roll-backs of a run before it stops instead."
    )


class WatchdogConfig(Section):
    """When a run that makes no progress counts as hung."""

    enabled: bool = Field(default=True, description="Whether the supervisor watches.")
    start_up_s: PositiveFloat = Field(
        default=1800.0,
        description="Seconds for a phase of the start-up: imports, rendezvous, model, resume.",
    )
    first_step_s: PositiveFloat = Field(
        default=7200.0, description="Seconds for the first step, compilation included."
    )
    step_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = Field(
        default=10.0, description="A step may take so many times the run's slow ones …"
    )
    min_step_s: PositiveFloat = Field(default=60.0, description="… and at least so many seconds.")
    save_s: PositiveFloat = Field(default=1800.0, description="Seconds for a save.")


_SLURM_TIME = re.compile(r"\d+|\d+:[0-5]?\d:[0-5]?\d|\d+-\d{1,2}(:[0-5]?\d){0,2}")
_SLURM_WORD = re.compile(r"[A-Za-z0-9_+.,:=@/%\[\]()|&*][A-Za-z0-9_+.,:=@/%\[\]()|&*-]*")


def _slurm_time(value: Any) -> str:
    """A time as sbatch reads it; a bare number counts minutes."""
    text = str(value) if type(value) is int else value
    if not isinstance(text, str) or not _SLURM_TIME.fullmatch(text):
        raise ValueError(
            "must be minutes, H:MM:SS or D-HH:MM:SS, such as 90, 8:00:00, 2-00:00:00 "
            "(Slurm reads 8:00 as eight minutes)"
        )
    return text


def _slurm_word(value: Any) -> str:
    """No blanks, quotes or leading dash, which could end the directive or begin another."""
    text = str(value) if type(value) is int else value
    if not isinstance(text, str) or not _SLURM_WORD.fullmatch(text):
        raise ValueError("must be one word without blanks or quotes, as Slurm itself shows it")
    return text


# Seconds before the time limit: Slurm does not requeue a job that it timed out.
KILL_MARGIN_S = 30.0


def leaving_s(signal_lead_s: float) -> float:
    """Seconds that workers have to save and exit, from the signal ahead of the time limit."""
    return max(signal_lead_s - KILL_MARGIN_S, signal_lead_s / 2)


SlurmTime = Annotated[str, BeforeValidator(_slurm_time)]
SlurmWord = Annotated[str, BeforeValidator(_slurm_word)]


class SlurmConfig(Section):
    """Slurm options of the batch scripts, and limits on restarts."""

    time: SlurmTime = Field(
        default="1-00:00:00",
        description="Time limit of the train job: minutes, H:MM:SS or D-HH:MM:SS.",
    )
    precompile_time: SlurmTime = Field(
        default="2:00:00", description="Time limit of the precompile job."
    )
    signal_lead_s: Annotated[int, Field(ge=0, le=65535)] = Field(
        default=300, description="Seconds before the time limit at which the run saves and exits."
    )
    partition: SlurmWord | None = Field(default=None, description="Partition.")
    account: SlurmWord | None = Field(default=None, description="Account.")
    qos: SlurmWord | None = Field(default=None, description="Quality of service.")
    reservation: SlurmWord | None = Field(default=None, description="Reservation.")
    exclude: SlurmWord | None = Field(default=None, description="Nodes to exclude.")
    failure_budget: Annotated[int, Field(ge=0)] = Field(
        default=20,
        description="Requeues after node failures within slurm.budget_hours before the run stops.",
    )
    hang_budget: Annotated[int, Field(ge=0)] = Field(
        default=5, description="Likewise, after hangs."
    )
    storage_budget: Annotated[int, Field(ge=0)] = Field(
        default=3, description="Likewise, after failures of the shared file system."
    )
    budget_hours: PositiveFloat = Field(
        default=24.0, description="Hours back over which failures are counted."
    )
    backoff_s: NonNegativeFloat = Field(
        default=30.0,
        description="Seconds that a requeued job waits after an attempt without a new checkpoint; "
        "doubled after each further one, up to an hour.",
    )
    no_progress_limit: PositiveInt = Field(
        default=3, description="Attempts in a row without a new checkpoint before the run stops."
    )
    exclude_hours: NonNegativeFloat = Field(
        default=24.0, description="Hours for which a node that failed is excluded from the run."
    )
    drain: bool = Field(
        default=False,
        description="Whether such a node is drained too, if Slurm permits it to this user.",
    )


class Recipe(Section):
    """One YAML file per run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(
        description="The recipe's name; run names begin with it."
    )
    description: str = Field(default="", description="One line for `slurmllm recipes`.")
    default_cluster: str = Field(
        default="local",
        description="Cluster profile if neither --cluster nor $SLURMLLM_CLUSTER is given.",
    )
    model: ModelConfig
    data: DataConfig = DataConfig()
    train: TrainConfig
    optim: OptimConfig
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: GuardConfig = GuardConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    slurm: SlurmConfig = SlurmConfig()
    backend: Literal["auto", "native", "nxd", "rehearsal"] = Field(
        default="auto",
        description="nxd on Neuron devices, native elsewhere; rehearsal does everything but the "
        "arithmetic.",
    )
    env: dict[EnvName, str] = Field(
        default_factory=dict,
        description="Environment variables for this recipe's workers; they replace those of the "
        "same name from the cluster profile and the backend.",
    )
