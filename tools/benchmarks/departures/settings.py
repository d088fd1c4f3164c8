"""Everything about a small training that a departure can change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

STEPS = 160
EARLY, LATE = 1, 81  # steps from which departures begin
RESUMED_EARLY = 9  # a resume at step 1 resumes nothing

GradientFault = Literal[
    "none", "rank_dropped", "rank_scaled", "rank_halved", "rank_stale", "summed", "world_size",
    "not_reduced", "bucket_not_reduced", "clipped_by_rank", "element_flipped",
    "norms_not_reduced", "not_a_number",
]  # fmt: skip
ForwardFault = Literal["none", "bias_by_rank", "heads_dropped", "half_of_ffn_zero"]
Number = Literal["fp32", "bf16", "fp16", "tf32"]


@dataclass(frozen=True)
class Settings:
    """One training: the recipe, and the faults that its framework has.

    Attributes:
        source_dropped: The corpus's source that is left out; None: none.
        batches_repeated: Every batch is read twice, so that half of the corpus is read.
        batch_offset: Batches by which the reading is ahead of the step.
        rank_data_repeated: All ranks read the rows of rank 0.
        label_shift: Positions by which the labels are off.
        tokens_replaced: Share of tokens that are random.
        micro_batch_means: The gradient is the mean of the micro batches' means, although they have
            different numbers of target tokens.
        micro_batches_left_out: Micro batches of each rank, the last ones, that no gradient is of.
        copy_of_first_micro_batch: The first micro batch's gradient is added twice.
        frozen: Weights that no update changes.
        moments: Number format in which the optimizer keeps its moments.
        weights: Number format in which the weights are stored after each update.
        shard_not_updated: A quarter of the weights, an optimizer shard, keeps its old values.
        schedule_start: Steps that the schedule counts less than the training.
        fused: Attention, norms, activation and loss by PyTorch's fused kernels.
        reversed_sums: Gradients of micro batches and ranks are added in the opposite order.
    """

    seed: int = 1
    init_seed: int | None = None
    data_seed: int | None = None
    dropout_seed: int | None = None
    # data
    seq_len: int = 32
    source_dropped: int | None = None
    batches_repeated: bool = False
    batch_offset: int = 0
    rank_data_repeated: bool = False
    label_shift: int = 0
    tokens_replaced: float = 0.0
    mask_padding: bool = True
    mask_prompts: bool = True
    separate_documents: bool = True
    # batches and ranks
    global_batch: int = 8
    ranks: int = 2
    micro_batches: int = 1
    micro_batch_means: bool = False
    micro_batches_left_out: int = 0
    copy_of_first_micro_batch: bool = False
    # model
    dropout: float = 0.0
    tied: bool = True
    init_scale: float = 1.0
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    residual_scale: float = 1.0
    attention_scale: float = 1.0
    frozen: Literal["none", "biases", "layer", "embeddings"] = "none"
    # optimizer
    optimizer: Literal["adamw", "adam_l2", "momentum"] = "adamw"
    lr: float = 1.2e-2
    lr_of_embeddings: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_norms: bool = False  # biases too
    clip: float | None = 0.8
    bias_correction: bool = True
    shard_not_updated: bool = False
    # schedule
    schedule: Literal["cosine", "linear", "constant", "inverse_sqrt"] = "cosine"
    warmup: int = 20
    decay_steps: int = STEPS
    min_lr: float = 0.1
    schedule_start: int = 0
    # numbers
    compute: Number = "fp32"
    weights: Literal["fp32", "bf16", "bf16_stochastic"] = "fp32"
    moments: Literal["fp32", "bf16"] = "fp32"
    loss_in_bf16: bool = False
    gradients_in_bf16: bool = False
    # kernels that change roundings only
    fused: bool = False
    reversed_sums: bool = False
    # faults of ranks
    gradient_fault: GradientFault = "none"
    forward_fault: ForwardFault = "none"

    def changed(self, changes: dict[str, Any]) -> Settings:
        """Returns a copy with some settings changed."""
        return replace(self, **changes)

    @property
    def sequences_per_pass(self) -> int:
        return self.global_batch // (self.ranks * self.micro_batches)
