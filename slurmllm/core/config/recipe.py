"""The sections of a recipe: what is trained, on what data, how; hardware-independent.

Batches count sequences, lengths count tokens. Field names are the ones that `--set` takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import cycle, islice
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from slurmllm.core.config.command import CommandConfig, WorkerTraits, absent_section
from slurmllm.core.config.data_sources import DataConfig, EvalConfig
from slurmllm.core.config.families import BUILT_IN, FAMILIES, Activation, FamilyName, gate_block
from slurmllm.core.config.operation import (
    CheckpointConfig,
    EnvName,
    EvaluateConfig,
    GuardConfig,
    ListOf,
    NonNegativeFloat,
    NumberOrAuto,
    PositiveFloat,
    PositiveInt,
    ProfileConfig,
    Section,
    SlurmConfig,
    WatchdogConfig,
)
from slurmllm.core.config.yaml_source import Values, without_nulls
from slurmllm.core.errors import ConfigError
from slurmllm.core.format import Texts
from slurmllm.core.plugins import OPTIMIZERS, PluginRef, split_prefix


class RopeScaling(Section):
    """Rotary frequencies for texts longer than those of pretraining."""

    kind: Literal["llama3", "yarn", "linear", "dynamic"]
    """The scaling: llama3 (Llama 3.1 and 3.2), yarn (arXiv 2309.00071), linear, or dynamic, which
    within model.seq_len changes nothing. Each has some of the fields below."""
    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)]
    """Low frequencies are divided by this; with linear all are."""
    original_max_position_embeddings: PositiveInt | None = None
    """llama3, yarn: tokens in a sequence of pretraining."""
    low_freq_factor: PositiveFloat | None = None
    """llama3: frequencies with at most so many rotations in the original length are low."""
    high_freq_factor: PositiveFloat | None = None
    """llama3: frequencies with at least so many rotations are not scaled; between the two the
    factor is blended."""
    beta_fast: PositiveFloat | None = None
    """yarn: frequencies with at least so many rotations in the original length are not scaled; by
    default 32."""
    beta_slow: PositiveFloat | None = None
    """yarn: frequencies with at most so many rotations are divided by factor; by default 1."""
    truncate: bool | None = None
    """yarn: round the range of blended dimensions to whole ones; by default true."""
    attention_factor: PositiveFloat | None = None
    """yarn: rotated queries and keys are multiplied by this; by default it follows from mscale and
    mscale_all_dim, else it is 1 + ln(factor) / 10."""
    mscale: PositiveFloat | None = None
    """yarn: attention_factor is (1 + mscale · ln(factor) / 10) / (1 + mscale_all_dim · ln(factor) /
    10)."""
    mscale_all_dim: PositiveFloat | None = None
    """yarn: set with mscale."""

    @model_validator(mode="before")
    @classmethod
    def _has_fields_of_its_kind(cls, values: Any) -> Any:
        kind = values.get("kind") if isinstance(values, Mapping) else None
        kind_fields = SCALING_FIELDS.get(str(kind))
        if kind_fields is None:
            return values  # the fields have faults of their own
        set_fields = without_nulls(values)
        for name in set_fields:
            if name in cls.model_fields and name not in {"kind", *kind_fields}:
                raise ValueError(
                    f"{name} is not a field of the scaling {kind}, which has "
                    f"{', '.join(kind_fields)}; leave it out"
                )
        filled = {**kind_fields, **set_fields}
        if missing := [name for name, value in filled.items() if value is ...]:
            raise ValueError(f"{', '.join(missing)} must be set with kind {kind}")
        return filled

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError("mscale and mscale_all_dim must be set together, or left out")
        slow, fast = self.beta_slow, self.beta_fast
        if slow and fast and slow > fast:
            raise ValueError(
                f"beta_slow {slow:g} is greater than beta_fast {fast:g}; choose a smaller one"
            )
        return self

    @model_serializer(mode="wrap")
    def _dump_set_fields(self, dump: SerializerFunctionWrapHandler) -> Values:
        return without_nulls(dump(self))


# Kind of scaling → its fields with their defaults; `...`: must be set.
SCALING_FIELDS: Mapping[str, Values] = {
    "llama3": {
        "factor": ...,
        "low_freq_factor": ...,
        "high_freq_factor": ...,
        "original_max_position_embeddings": ...,
    },
    "yarn": {
        "factor": ...,
        "original_max_position_embeddings": ...,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
        "attention_factor": None,
        "mscale": None,
        "mscale_all_dim": None,
    },
    "linear": {"factor": ...},
    "dynamic": {"factor": ...},
}


def _rope(value: Any) -> Any:
    if value in (None, "none") or (type(value) in (int, float) and 0 < value < math.inf):
        return value
    raise ValueError("must be none, or a base above 0")


class LayerAttention(Section):
    """What may differ between the attention of layers; by default full causal attention."""

    window: PositiveInt | None = None
    """Tokens that a token attends to, itself included; all before it by default."""
    rope: Annotated[Literal["none"] | PositiveFloat | None, BeforeValidator(_rope)] = None
    """none: no rotary positions; a number: rotary angles of this base, not scaled; by default
    those of rotary_base and rope_scaling."""


FULL_ATTENTION = LayerAttention()


def _whole(value: Any) -> Any:
    """Return 20.0, as some runs have it, as 20."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class ModelConfig(Section):
    """The shape of the model; fields with a default of the family may be left out."""

    family: FamilyName
    """Model family: neox (GPT-NeoX, Pythia), llama (Llama 2 and 3), qwen3, gpt3, mistral, smollm3,
    olmo3, gemma3 or nanochat."""
    num_layers: Annotated[PositiveInt, Field(le=100_000)]
    """Decoder layers."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    num_heads: PositiveInt
    """Attention heads."""
    num_kv_heads: PositiveInt | None = None
    """Key and value heads; as many as attention heads by default."""
    head_dim: PositiveInt | None = None
    """Width of an attention head; hidden_size / num_heads by default."""
    ffn_hidden_size: PositiveInt
    """Width of the feed-forward layer."""
    vocab_size: PositiveInt
    """Vocabulary entries, no fewer than the tokenizer's."""
    vocab_pad_multiple: PositiveInt = 1
    """The embedding's rows are rounded up to a multiple of this."""
    seq_len: PositiveInt
    """Tokens in a training sequence."""
    rotary_pct: Annotated[float, Field(ge=0, le=1)]
    """Share of each head's dimensions that rotary positions turn; the family's."""
    rotary_base: PositiveFloat = 10000.0
    """Base of the rotary angles."""
    rope_scaling: RopeScaling | None = None
    """Scaled rotary frequencies (Llama 3.1, YaRN); none by default."""
    attention_pattern: Annotated[tuple[LayerAttention, ...], Field(strict=False)] = ()
    """Attention of each layer; the list is repeated over the layers and cut to num_layers. An entry
    may have a window (in tokens) and rope (none, or the base of rotary positions); `{}` is full
    attention with rotary_base, the default."""
    query_pre_attn_scalar: Annotated[PositiveInt | None, BeforeValidator(_whole)] = None
    """Attention scores are divided by the square root of this; by default the width of a head."""
    attention_softcap: PositiveFloat | None = None
    """Soft cap of attention scores, cap · tanh(score / cap); none by default."""
    logits_softcap: PositiveFloat | None = None
    """Soft cap of the logits, cap · tanh(logit / cap); none by default."""
    activation: Activation
    """Activation of the feed-forward layer: gelu (by erf), gelu_tanh, silu or relu2 (ReLU squared);
    by default the family's."""
    attention_bias: bool
    """Biases of attention's matrices; the family's."""
    mlp_bias: bool
    """Biases of the feed-forward matrices; the family's."""
    parallel_residual: bool
    """Attention and feed-forward both read the block's input, and one sum adds them; the family's.
    """
    qk_norm: bool
    """RMSNorm of queries and keys; by default the family's."""
    tied_embeddings: bool
    """The head is the embedding, transposed; the family's."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of the norms."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""
    scaled_init: bool = False
    """Divide the standard deviation of each layer's two output matrices by sqrt(2 · num_layers), as
    HLAT does."""
    output_init_std: PositiveFloat | None = None
    """Standard deviation of each layer's two output matrices; init_std where left out (and
    scaled_init is off)."""

    @model_validator(mode="before")
    @classmethod
    def _ask_the_family(cls, values: Any) -> Any:
        return with_family(values) if isinstance(values, Mapping) else values

    @field_validator("attention_pattern")
    @classmethod
    def _shortest_pattern(
        cls, pattern: tuple[LayerAttention, ...], info: ValidationInfo
    ) -> tuple[LayerAttention, ...]:
        """Return the shortest equivalent pattern: equal models have equal configurations."""
        count = info.data.get("num_layers")
        if count is None or not pattern:
            return pattern
        base = None if info.data.get("rope_scaling") else info.data.get("rotary_base")
        pattern = tuple(
            LayerAttention(window=kind.window) if kind.rope == base else kind for kind in pattern
        )
        layers = tuple(islice(cycle(pattern), count))
        period = next(n for n in range(1, count + 1) if layers[n:] == layers[:-n])
        return () if layers[:period] == (FULL_ATTENTION,) else layers[:period]

    @field_validator("query_pre_attn_scalar")
    @classmethod
    def _leave_out_default(cls, scalar: int | None, info: ValidationInfo) -> int | None:
        width, heads = info.data.get("head_dim"), info.data.get("num_heads")
        hidden = info.data.get("hidden_size")
        if width is None and heads and hidden:
            width = hidden // heads
        return None if scalar == width else scalar

    @cached_property
    def layer_kinds(self) -> Sequence[LayerAttention]:
        """The attention of each layer."""
        pattern = self.attention_pattern or (FULL_ATTENTION,)
        return tuple(islice(cycle(pattern), self.num_layers))

    def rotary_scheme(self, attention: LayerAttention) -> tuple[float, RopeScaling | None]:
        """Return base and scaling of a layer's rotary positions."""
        if isinstance(attention.rope, float):
            return attention.rope, None
        return self.rotary_base, self.rope_scaling

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def gated(self) -> bool:
        return FAMILIES[self.family].gated

    @property
    def gate_block(self) -> int:
        return gate_block(self.ffn_hidden_size)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: the vocabulary rounded up."""
        multiple = self.vocab_pad_multiple
        return (self.vocab_size + multiple - 1) // multiple * multiple


def with_family(values: Mapping[str, Any]) -> Values:
    """Return the fields of a model section, those left out with the family's values."""
    family = values.get("family")
    built_in = FAMILIES.get(family) if isinstance(family, str) else None
    return {**(built_in.defaults if built_in else {}), **values}


# Parts of a block: attention without its matrices, the feed-forward layer, the norms.
BLOCK_PARTS = ("core", "mlp", "norm")
_CHECKPOINTING = ("none", "selective", "full")


def _checkpointing(value: Any) -> Any:
    """Sort the parts and write [core] as selective, so that equal settings have equal graphs."""
    if value in _CHECKPOINTING:
        return value
    rule = "must be none, selective or full, or a list of core, mlp and norm"
    if value in BLOCK_PARTS:
        value = (value,)
    if not isinstance(value, list | tuple):
        raise ValueError(rule)
    if not value:
        raise ValueError("must name a part of core, mlp and norm; to recompute nothing, write none")
    unknown = [name for name in value if name not in BLOCK_PARTS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not a part of a block; {rule}")
    if len(set(value)) < len(value):
        raise ValueError("must name each part once")
    parts = tuple(name for name in BLOCK_PARTS if name in value)
    return "selective" if parts == ("core",) else parts


Checkpointing = Literal["none", "selective", "full"] | tuple[Literal["core", "mlp", "norm"], ...]


class TrainConfig(Section):
    """How long and in which batches the model trains."""

    steps: PositiveInt
    """Optimizer steps to the run's end."""
    global_batch: PositiveInt
    """Sequences in one optimizer step."""
    micro_batch: NumberOrAuto = "auto"
    """Sequences in one forward pass of one worker; left out: the planner chooses it, at submit;
    auto: measured once, in the precompile stage; 1 on Neuron devices, which cannot measure it."""
    init_from: str | None = None
    """The checkpoint whose weights the run starts from, at step 0: RUN, RUN@latest, RUN@STEP, or a
    folder, such as `slurmllm checkpoint import` makes."""
    finetune: bool | Annotated[str, Field(pattern=r"^hf://[^/]+/[^/]+$")] = False
    """Whether train.init_from must be set before the run can start; or the published weights that
    it is to name, as for `slurmllm checkpoint import`."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1234
    """Seed of the initial weights and of the data order."""
    precision: Literal["fp32", "bf16_mixed", "fp8_mixed", "bf16_sr", "bf16"] = "fp32"
    """fp32; bf16_mixed: bf16 products, fp32 master weights and optimizer state; fp8_mixed: as
    bf16_mixed, with the blocks' matrix products in fp8; bf16_sr: bf16 throughout with stochastic
    rounding; bf16: bf16 throughout."""
    fp8_recipe: Literal["tensorwise", "rowwise"] = "tensorwise"
    """Scales of fp8_mixed: one for each tensor, or for each row and column (torchao's recipes of
    these names). tensorwise is faster, and FSDP gathers weights in fp8; rowwise is more robust to
    outliers."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of the z-loss, z_loss · log²Z per target token (PaLM: 1e-4), Z the softmax's
    denominator. Its gradient is added to the cross entropy's, which alone is the loss reported."""
    activation_checkpointing: Annotated[Checkpointing, BeforeValidator(_checkpointing)] = "none"
    """What the backward pass recomputes instead of keeping: none; selective, the core of attention;
    full, whole blocks; or a list of parts of a block: core, mlp (the feed-forward layer), norm.
    Left out with `parallel: auto`, the planner chooses it."""
    compile: bool = True
    """torch.compile on the native backend."""
    incomplete_graphs: Literal["refuse", "compile"] = "refuse"
    """What the train stage does if precompile left a graph uncompiled: refuse to start, or compile
    it while training."""
    log_every: PositiveInt = 10
    """Steps between lines in the log."""

    @property
    def is_mixed(self) -> bool:
        """Whether fp32 weights are multiplied in a narrower format."""
        return self.precision in ("bf16_mixed", "fp8_mixed")

    @property
    def is_fp8(self) -> bool:
        return self.precision == "fp8_mixed"

    @property
    def checkpointing_text(self) -> str:
        """`selective`, or a list's parts as `core+mlp`."""
        setting = self.activation_checkpointing
        return setting if isinstance(setting, str) else "+".join(setting)

    @property
    def recomputed(self) -> Texts:
        """What the backward pass recomputes: some of `BLOCK_PARTS`, or `block`, a whole one."""
        setting = self.activation_checkpointing
        if isinstance(setting, tuple):
            return setting
        return {"none": (), "selective": ("core",), "full": ("block",)}[setting]


ADAMW, MUON = OPTIMIZERS  # every backend has AdamW, the native one Muon
PartName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]
ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]


_BelowOne = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """The optimizer and the learning rate's schedule."""

    name: PartName = ADAMW
    """The optimizer: adamw; muon, for the matrices of the decoder layers, and AdamW for all else;
    or the name of one of your own (the last two: native backend)."""
    lr: PositiveFloat
    """Learning rate after the warm-up."""
    adamw_lr: PositiveFloat | None = None
    """With muon, AdamW's learning rate after the warm-up; optim.lr if left out. It follows the same
    schedule as optim.lr."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the decay's end."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear rise from 0."""
    warmup_ratio: _BelowOne | None = None
    """Warm-up as a share of train.steps, rounded to whole steps; in place of warmup_steps."""
    step_count: Literal["from_1", "nemo", "transformers"] = "from_1"
    """How the schedule counts: from_1, step n of the warm-up has lr · n / warmup_steps; nemo, lr ·
    n / (warmup_steps + 1); transformers, lr · (n - 1) / warmup_steps, so 0 at step 1. With the last
    two the decay begins and ends one step later."""
    decay: Literal["cosine", "linear", "1-sqrt", "constant"] = "cosine"
    """The way down from lr to min_lr; 1-sqrt: min_lr + (lr - min_lr) · (1 - sqrt(progress))."""
    decay_start: NonNegativeInt | None = None
    """Last step at lr before the decay; by default the last step of the warm-up."""
    decay_steps: PositiveInt | None = None
    """Step at which min_lr is reached, warm-up included; train.steps if left out."""
    betas: Annotated[tuple[_BelowOne, _BelowOne], Field(strict=False)] = (0.9, 0.95)
    """Adam's averaging constants."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon."""
    momentum: _BelowOne = 0.95
    """Muon's momentum."""
    nesterov: bool = True
    """Whether Muon's momentum is Nesterov's."""
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Muon's Newton-Schulz iterations."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Muon's factor of the learning rate for a matrix: match_rms_adamw, 0.2 · sqrt(max(rows,
    columns)), with which AdamW's rate fits; original, sqrt(max(1, rows / columns))."""
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay as in PyTorch's AdamW: each step takes lr · weight_decay of the weights, with
    the lr of that step. Composer's DecoupledAdamW takes lr / (largest lr) · weight_decay: divide
    its value by optim.lr for the same decay (1e-5 there is 0.0167 here at lr 6e-4)."""
    decay_norms_and_biases: bool = False
    """Whether norms and biases decay too (HLAT: every parameter)."""
    grad_clip: NonNegativeFloat = 1.0
    """Largest gradient 2-norm over all parameters; 0 clips nothing."""
    settings: Values = Field(default_factory=dict)
    """Settings of an optimizer of a plugin."""

    @field_validator("settings")
    @classmethod
    def _belong_to_another_optimizer(cls, settings: Values, info: ValidationInfo) -> Values:
        name = info.data.get("name")
        if settings and name in OPTIMIZERS:
            raise ValueError(
                f"are only for optimizers of plugins, but optim.name is {name}; set optim.name to "
                "one, or leave optim.settings out and set fields of optim itself, such as "
                "optim.betas, or optim.momentum for muon"
            )
        return settings

    def warmup(self, total_steps: int) -> int:
        return num_warmup_steps(self.warmup_steps, self.warmup_ratio, total_steps)


def num_warmup_steps(steps: int, ratio: float | None, total_steps: int) -> int:
    """Return the steps of the warm-up, given as a number or as a share of all steps."""
    return steps if ratio is None else round(ratio * total_steps)


class ParallelConfig(Section):
    """Mesh degrees; data parallelism follows from the node count."""

    auto: bool = False
    """Whether the planner chooses what is not set here, at submit. `parallel: auto` leaves all of
    it to the planner."""
    tensor: PositiveInt = 1
    """Tensor-parallel degree."""
    pipeline: PositiveInt = 1
    """Pipeline stages."""
    virtual_pipeline: PositiveInt = 1
    """Chunks of layers that each pipeline stage holds; more than 1 interleaves them (1F1B either
    way)."""
    sequence: bool = False
    """Sequence parallelism inside the tensor-parallel group."""
    zero: Annotated[int, Field(ge=0, le=3)] = 1
    """What data-parallel workers share out: 1 optimizer state, 2 gradients too, 3 parameters too. A
    backend may share out more than asked."""
    shard_nodes: PositiveInt | None = None
    """Nodes over which data-parallel workers shard weights, gradients and optimizer state; other
    groups of as many nodes hold copies (HSDP). null: over all data-parallel workers."""

    @model_validator(mode="before")
    @classmethod
    def _is_a_section(cls, values: Any) -> Any:
        if isinstance(values, Mapping | cls):
            return values
        raise ValueError("must be auto, or degrees such as {tensor: 8, pipeline: 4}")


def _with_auto(section: Any) -> Any:
    """Return a parallel section with `auto`, whole or in place of degrees, as `parallel.auto`."""
    if section == "auto":
        return {"auto": True}
    if not isinstance(section, Mapping) or "auto" not in section.values():
        return section
    return {**{name: value for name, value in section.items() if value != "auto"}, "auto": True}


class LayoutTrain(Section):
    """Settings of `train` that depend on the hardware."""

    micro_batch: NumberOrAuto | None = None
    """As train.micro_batch."""
    activation_checkpointing: Annotated[
        Checkpointing | None, BeforeValidator(lambda value: value and _checkpointing(value))
    ] = None
    """As train.activation_checkpointing."""


class Layout(Section):
    """How a recipe is trained on some hardware."""

    parallel: Annotated[ParallelConfig, BeforeValidator(_with_auto)] = ParallelConfig()
    """The section there."""
    train: LayoutTrain = LayoutTrain()
    """Values of `train` there."""


TrackerName = Literal["wandb", "mlflow"]


class Recipe(Section):
    """One YAML file per run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """The recipe's name; run names begin with it."""
    description: str = ""
    """One line for `slurmllm recipes`."""
    default_cluster: str = "local"
    """Cluster profile if neither --cluster nor $SLURMLLM_CLUSTER is given."""
    command: CommandConfig | None = None
    """A trainer of another project, in place of the sections from model to parallel."""
    model: ModelConfig
    data: DataConfig = DataConfig()
    train: TrainConfig
    eval: EvalConfig = EvalConfig()
    optim: OptimConfig
    parallel: ParallelConfig = ParallelConfig()
    layouts: Annotated[dict[str, Layout], Field(default_factory=dict, exclude=True)]
    """By device (cuda, neuron, cpu) or name of a cluster profile: the layout that a source used
    there, for what the recipe does not set itself. On other clusters the planner chooses."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: GuardConfig = GuardConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    profile: ProfileConfig = ProfileConfig()
    slurm: SlurmConfig = SlurmConfig()
    backend: Literal["auto", "native", "nxd", "rehearsal"] = "auto"
    """Nxd on Neuron devices, native elsewhere; rehearsal does everything but the arithmetic."""
    evaluate: EvaluateConfig | None = None
    trackers: ListOf[TrackerName] = ()
    """Trackers that get the run's metrics: wandb, mlflow; project and server in the profile."""
    env: dict[EnvName, str] = Field(default_factory=dict)
    """Environment variables for this recipe's workers; they replace those of the same name from the
    cluster profile and the backend."""
    hooks: dict[PartName, Values] = Field(default_factory=dict)
    """Hooks of plugins, each with its settings: `{layer_norms: {every: 10}}`."""
    plugins: ListOf[ModuleName] = ()
    """Modules that register hooks, optimizers, model families or data sources:
    `[my_package.my_module]`."""

    @model_validator(mode="before")
    @classmethod
    def _has_command_or_training(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("command") is None:
            return values
        return {
            **values,
            "model": absent_section(ModelConfig, "model"),
            "train": absent_section(TrainConfig, "train"),
            "optim": absent_section(OptimConfig, "optim"),
        }

    def require_training(self, feature: str, fix: str) -> None:
        """Raise ConfigError if the recipe has a command, and `feature` is of our own trainings."""
        if not self.worker.has_model:
            raise ConfigError(
                f"{feature} needs a model section, and {self.name} has a command in its place, of "
                f"whose model nothing is known; {fix}"
            )

    @property
    def worker(self) -> WorkerTraits:
        """What the run's workers are: slurmllm's own, or those of the command."""
        command = self.command
        if command is None:
            return WorkerTraits(has_model=True, steps=self.train.steps)
        return WorkerTraits(False, command.steps, command.one_per_node)

    @property
    def steps(self) -> int | None:
        """Steps to the end; None if a command does not say."""
        return self.worker.steps

    @property
    def plugin_refs(self) -> list[PluginRef]:
        """The parts of other packages that the recipe names."""
        if not self.worker.has_model:
            return []
        refs = [PluginRef("hooks", name, f"hooks.{name}") for name in self.hooks]
        if self.optim.name not in OPTIMIZERS:
            refs.append(PluginRef("optimizers", self.optim.name, "optim.name"))
        if self.model.family not in BUILT_IN:
            refs.append(PluginRef("models", self.model.family, "model.family"))
        texts = [("data.corpus", share.path) for share in self.data.corpora]
        texts += [(f"eval.corpora.{name}", path) for name, path in self.eval.corpora.items()]
        for path, reference in texts:
            if name := split_prefix(reference)[0]:
                refs.append(PluginRef("data_sources", name, path))
        return refs
