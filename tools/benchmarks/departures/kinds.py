"""The departures: what is changed, what a right answer names, and which half each belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from departures.settings import EARLY, LATE, RESUMED_EARLY, Settings
from departures.training import OLD_STEPS, Change, Event
from departures.truth import Signature, Verdict

Half = Literal["rules", "held_out"]
Changes = Mapping[str, Any]

_BOTH = (EARLY, LATE)
_RESUMED = (RESUMED_EARLY, LATE)


@dataclass(frozen=True)
class Kind:
    """A test case: a departure with a known cause, or two runs of the same training.

    Attributes:
        group: Component of training that it affects.
        name: Unique name.
        causes: Correct causes.
        signature: Expected pattern in the log; see truth.py.
        changes: Settings that differ, or a function from the first step that differs to them.
        event: What happens once, before the first step that differs.
        log: Name of the change to the log (logs.py), or "" if none.
        base: Settings of both runs that differ from the defaults.
        starts: First steps that differ; the kind is trained once for each.
        verdicts: Correct verdicts; None: derived from the logged values (`visible_verdicts`).
        equivalent: `equivalent` is correct too: the runs differ only by randomness (data order).
        late_signature: Signature for the later start, if different.
    """

    group: str
    name: str
    causes: tuple[str, ...]
    signature: Signature
    changes: Changes | Callable[[int], Changes] = field(default_factory=dict)
    event: Event = "none"
    log: str = ""
    base: Changes = field(default_factory=dict)
    starts: tuple[int, ...] = _BOTH
    verdicts: tuple[Verdict, ...] | None = None
    equivalent: bool = False
    late_signature: Signature | None = None

    @property
    def half(self) -> Half:
        """The half that it belongs to, by its name only: stable when kinds are added."""
        digest = hashlib.sha256(self.name.encode()).digest()
        return "rules" if digest[0] % 2 else "held_out"

    @property
    def needs_training(self) -> bool:
        """Whether it needs a training run of its own, not only a modified log."""
        return bool(self.changes) or self.event != "none"

    def reference(self, seed: int) -> Settings:
        return Settings(seed=seed).changed(dict(self.base))

    def change(self, seed: int, since: int) -> Change:
        changes = self.changes(since) if callable(self.changes) else self.changes
        return Change(since, self.reference(seed).changed(dict(changes)), self.event)

    def signature_from(self, since: int) -> Signature:
        return self.late_signature if self.late_signature and since == LATE else self.signature


@cache
def all_kinds() -> dict[str, Kind]:
    kinds = [*_optimizer(), *_schedule(), *_data(), *_batches(), *_precision(), *_mesh()]
    kinds += [*_resume(), *_model(), *_seeds(), *_logging(), *_same()]
    found = {kind.name: kind for kind in kinds}
    assert len(found) == len(kinds)
    return found


def _optimizer() -> list[Kind]:
    def kind(name: str, *more: str, **changes: Any) -> Kind:
        return Kind("optimizer", name, ("optimizer", *more), "update", changes)

    return [
        kind("beta1_0.8", beta1=0.8),
        kind("beta2_0.99", beta2=0.99),
        kind("beta2_0.8", beta2=0.8),
        kind("eps_1e-4", eps=1e-4),
        kind("weight_decay_off", weight_decay=0.0),
        kind("weight_decay_tripled", weight_decay=0.3),
        kind("norms_decayed", decay_norms=True),
        kind("decay_by_l2", optimizer="adam_l2"),
        kind("no_bias_correction", bias_correction=False),
        kind("momentum", optimizer="momentum"),
        # The logged gradient norm is that before clipping.
        kind("clip_off", clip=None),
        kind("clip_halved", clip=0.4),
        kind("embedding_lr_halved", "lr", lr_of_embeddings=0.5),
        kind("moments_in_bf16", "precision", "rounding", moments="bf16"),
    ]


def _schedule() -> list[Kind]:
    def kind(name: str, starts: tuple[int, ...] = _BOTH, **changes: Any) -> Kind:
        return Kind("schedule", name, ("lr",), "schedule", changes, starts=starts)

    lr = Settings().lr
    return [
        kind("lr_plus_10", lr=1.1 * lr),
        kind("lr_minus_10", lr=0.9 * lr),
        kind("lr_doubled", lr=2 * lr),
        kind("warmup_doubled", (EARLY,), warmup=40),
        kind("warmup_off", (EARLY,), warmup=0),
        kind("decay_longer", decay_steps=320),
        kind("min_lr_raised", min_lr=0.5),
        kind("decay_linear", schedule="linear"),
        kind("lr_constant", schedule="constant"),
        kind("inverse_sqrt", schedule="inverse_sqrt"),
        Kind(
            "schedule", "schedule_restarted", ("lr",), "schedule",
            lambda since: {"schedule_start": since - 1}, starts=_RESUMED,
        ),
    ]  # fmt: skip


def _data() -> list[Kind]:
    def kind(name: str, *more: str, equivalent: bool = False, **changes: Any) -> Kind:
        # `batches`: compare's name for other data that only the curves show
        causes = ("data", "batches", *more)
        return Kind("data", name, causes, "forward", changes, equivalent=equivalent)

    return [
        kind("data_seed", "seed", equivalent=True, data_seed=99),
        kind("one_batch_ahead", equivalent=True, batch_offset=1),
        kind("far_ahead", equivalent=True, batch_offset=200),
        kind("batches_read_twice", equivalent=True, batches_repeated=True),
        kind("source_dropped", source_dropped=2),
        kind("ranks_read_the_same", "mesh", equivalent=True, rank_data_repeated=True),
        kind("seq_len_24", "model", seq_len=24),
        kind("padding_unmasked", mask_padding=False),
        kind("prompts_unmasked", mask_prompts=False),
        kind("label_shift", label_shift=1),
        kind("labels_not_shifted", label_shift=-1),
        kind("documents_joined", "model", separate_documents=False),
        kind("tokens_replaced", tokens_replaced=0.05),
    ]


def _batches() -> list[Kind]:
    # Of two micro batches each; the loss is logged over all of them.
    two = {"micro_batches": 2}

    def kind(name: str, **changes: Any) -> Kind:
        return Kind("batches", name, ("batches", "gradient"), "gradient", changes, base=two)

    halved, doubled = {"global_batch": 4}, {"global_batch": 16}
    return [
        Kind("batches", "global_batch_halved", ("batches",), "forward", halved, equivalent=True),
        Kind("batches", "global_batch_doubled", ("batches",), "forward", doubled, equivalent=True),
        kind("mean_of_micro_batch_means", micro_batch_means=True),
        kind("last_micro_batch_left_out", micro_batches_left_out=1),
        kind("first_micro_batch_twice", copy_of_first_micro_batch=True),
    ]


def _precision() -> list[Kind]:
    def kind(name: str, *more: str, **changes: Any) -> Kind:
        return Kind("precision", name, ("precision", "rounding", *more), "rounding", changes)

    return [
        kind("compute_in_bf16", compute="bf16"),
        kind("compute_in_fp16", compute="fp16"),
        kind("compute_in_tf32", compute="tf32"),
        kind("weights_in_bf16", weights="bf16"),
        kind("weights_rounded_stochastically", weights="bf16_stochastic"),
        kind("loss_in_bf16", loss_in_bf16=True),
        kind("gradients_reduced_in_bf16", "gradient", gradients_in_bf16=True),
    ]


def _mesh() -> list[Kind]:
    four = {"ranks": 4}

    def kind(name: str, *more: str, base: Changes | None = None, **changes: Any) -> Kind:
        causes = ("gradient", "mesh", *more)
        return Kind("mesh", name, causes, "gradient", changes, base=base or {})

    def forward(name: str, **changes: Any) -> Kind:
        return Kind("mesh", name, ("mesh", "model"), "forward", changes)

    return [
        kind("rank_dropped", gradient_fault="rank_dropped"),
        kind("rank_dropped_of_4", base=four, gradient_fault="rank_dropped"),
        kind("rank_scaled", gradient_fault="rank_scaled"),
        kind("rank_halved_of_4", base=four, gradient_fault="rank_halved"),
        kind("rank_stale", gradient_fault="rank_stale"),
        kind("gradients_summed", "batches", gradient_fault="summed"),
        kind("divided_by_wrong_world_size", "batches", gradient_fault="world_size"),
        kind("gradients_not_reduced", gradient_fault="not_reduced"),
        kind("bucket_not_reduced", gradient_fault="bucket_not_reduced"),
        kind("norms_not_reduced", "model", gradient_fault="norms_not_reduced"),
        kind("clipped_by_rank", "optimizer", gradient_fault="clipped_by_rank"),
        kind("element_flipped", gradient_fault="element_flipped"),
        # Biases are 0 at first: then only their gradients are twice as large.
        Kind(
            "mesh", "bias_added_by_each_rank", ("mesh", "model", "gradient"), "gradient",
            {"forward_fault": "bias_by_rank"}, late_signature="forward",
        ),
        forward("rank_of_heads_dropped", forward_fault="heads_dropped"),
        forward("rank_of_ffn_dropped", forward_fault="half_of_ffn_zero"),
        Kind(
            "mesh", "shard_not_updated", ("optimizer", "mesh"), "update",
            {"shard_not_updated": True},
        ),
        Kind(
            "mesh", "not_a_number", ("not_finite", "gradient"), "not_finite",
            {"gradient_fault": "not_a_number"},
        ),
    ]  # fmt: skip


def _resume() -> list[Kind]:
    def kind(name: str, causes: tuple[str, ...], signature: Signature, **more: Any) -> Kind:
        return Kind("resume", name, causes, signature, starts=_RESUMED, **more)

    return [
        kind("moments_lost", ("optimizer",), "update", event="lost_moments"),
        kind("update_count_lost", ("optimizer",), "update", event="lost_count"),
        kind("optimizer_lost", ("optimizer",), "update", event="lost_optimizer"),
        # No cause has a name for it: the weights of an older checkpoint.
        kind("old_weights", ("model", "optimizer", "unknown"), "forward", event="old_weights"),
        kind(
            "weights_through_bf16", ("precision", "rounding"), "rounding",
            event="weights_through_bf16",
        ),
        kind(
            "data_restarted", ("data", "batches"), "forward", equivalent=True,
            changes=lambda since: {"batch_offset": 1 - since},
        ),
        kind(
            "batches_skipped", ("data", "batches"), "forward", equivalent=True,
            changes={"batch_offset": 5},
        ),
        kind(
            "batches_again", ("data", "batches"), "forward", equivalent=True,
            changes={"batch_offset": -OLD_STEPS},
        ),
        kind(
            "dropout_state_lost", ("seed", "model"), "forward", equivalent=True,
            base={"dropout": 0.1}, changes={"dropout_seed": 55},
        ),
    ]  # fmt: skip


def _model() -> list[Kind]:
    def kind(name: str, signature: Signature = "forward", **changes: Any) -> Kind:
        return Kind("model", name, ("model",), signature, changes)

    def frozen(name: str, which: str) -> Kind:
        causes = ("model", "optimizer", "gradient")
        return Kind("model", name, causes, "gradient", {"frozen": which})

    return [
        kind("dropout", dropout=0.1),
        # From step k on the head is a copy of the embedding, whose gradient then has two parts.
        Kind("model", "untied", ("model",), "forward", {"tied": False}, late_signature="gradient"),
        Kind(
            "model", "init_scale", ("model", "seed"), "weights", {"init_scale": 1.2},
            starts=(EARLY,),
        ),
        # An approximation as close as a rounding
        Kind(
            "model", "gelu_by_tanh", ("model", "rounding"), "rounding",
            {"activation": "gelu_tanh"},
        ),
        kind("relu", activation="relu"),
        kind("silu", activation="silu"),
        kind("rope_base", rope_base=100.0),
        kind("norm_eps", norm_eps=1e-3),
        kind("residual_scale", residual_scale=0.7),
        kind("attention_scale", attention_scale=0.5),
        frozen("biases_frozen", "biases"),
        frozen("layer_frozen", "layer"),
        frozen("embeddings_frozen", "embeddings"),
    ]  # fmt: skip


def _seeds() -> list[Kind]:
    def kind(name: str, causes: tuple[str, ...], **more: Any) -> Kind:
        signature: Signature = "forward" if "base" in more else "weights"
        return Kind("seed", name, causes, signature, starts=(EARLY,), equivalent=True, **more)

    return [
        kind("other_seed", ("seed",), changes={"init_seed": 201, "data_seed": 202}),
        kind("init_seed", ("seed", "model"), changes={"init_seed": 203}),
        kind("dropout_seed", ("seed",), base={"dropout": 0.1}, changes={"dropout_seed": 204}),
    ]


def _logging() -> list[Kind]:
    def kind(log: str, **more: Any) -> Kind:
        return Kind("logging", log, ("logging",), "logging", log=log, **more)

    return [
        kind("grad_norm_after_clipping"),
        kind("grad_norm_without_embeddings"),
        kind("grad_norm_squared"),
        kind("loss_plus_half_percent"),
        kind("loss_summed_over_ranks"),
        kind("loss_of_one_rank", equivalent=True),
        kind("loss_in_bits"),
        kind("loss_smoothed", equivalent=True),
        kind("loss_one_step_late", equivalent=True),
        kind("lr_one_step_late", verdicts=("identical", "match")),
        kind("steps_from_0", starts=(EARLY,), verdicts=("identical", "match")),
        # Against a log of every step the same means can be made of it.
        kind("means_of_intervals", starts=(EARLY,), equivalent=True),
    ]


def _same() -> list[Kind]:
    def kind(name: str, *verdicts: Verdict, **more: Any) -> Kind:
        return Kind("sameness", name, (), "rounding", verdicts=verdicts, **more)

    start = (EARLY,)
    return [
        # The usual length, so that it is trained again and changes nothing
        kind("same_again", "identical", changes={"seq_len": 32}, starts=start),
        kind("exact_resume", "identical", event="exact_resume", starts=_RESUMED),
        kind("world_size_4", "match", changes={"ranks": 4}),
        kind("micro_batches_of_2", "match", changes={"micro_batches": 2}),
        kind("fused_kernels", "match", changes={"fused": True}),
        kind("sums_reversed", "match", base={"ranks": 4}, changes={"reversed_sums": True}),
        kind("six_digits_logged", "match", log="six_digits", starts=start),
        kind("four_digits_logged", "match", log="four_digits", starts=start),
        kind("noise_within_tolerance", "match", "equivalent", log="noise_weak", starts=start),
        kind("independent_noise", "equivalent", log="noise", starts=start),
        kind("strong_independent_noise", "equivalent", log="noise_strong", starts=start),
    ]
