"""The names that frameworks give to what we call loss, gradient norm, learning rate, …

Each framework is a small table, with the source file that defines the names. The framework
is recognized by the name of its loss; its names come first, then those that mean the same in all
frameworks (`throughput` does not: in Megatron-LM it is TFLOP/s).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmllm.errors import RunError, UserError
from slurmllm.metrics.curves import COLUMNS

METRICS = ("step", *COLUMNS)
Names = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Framework:
    """Names of a framework's metrics: metric → names, the preferred one first.

    A name that ends in `*` matches all names with that prefix. Names are compared ignoring case,
    with `_`, `-` and space as equal.
    """

    name: str
    names: Names
    mark: str = ""  # another tag that must be present


@dataclass(frozen=True)
class TagChoice:
    """The tags (columns, keys) that hold the metrics of a log."""

    tags: Mapping[str, str]  # by metric
    others: Mapping[str, tuple[str, ...]]  # metric → other tags that match
    missing: tuple[str, ...]  # warnings: tags that the user named and the log lacks


FRAMEWORKS = (
    # slurmllm/train/hooks/tensorboard.py, and our rows (records.MetricsRow)
    Framework(
        "slurmllm",
        {
            "loss": ("train/loss",),
            "grad_norm": ("train/grad_norm",),
            "param_norm": ("train/param_norm",),
            "lr": ("train/lr",),
            "tokens": ("train/tokens",),
            "seq_per_s": ("throughput/seq_per_s",),
            "tokens_per_s": ("throughput/tokens_per_s",),
            "step_time_s": ("time/step_time_s",),
            "data_wait_s": ("time/data_wait_s",),
            "forward_backward_s": ("time/forward_backward_s",),
            "optimizer_s": ("time/optimizer_s",),
        },
        mark="train/tokens",
    ),
    # NVIDIA/NeMo nemo/collections/nlp/models/language_modeling/megatron_gpt_model.py;
    # aws-neuron/neuronx-distributed-training lightning_modules/model/base.py (log_metrics)
    Framework(
        "NeMo or NxD Training",
        {
            "loss": ("reduced_train_loss",),
            "grad_norm": ("gradient_norm", "grad_norm"),
            "param_norm": ("parameter_norm", "param_norm"),
            "lr": ("lr", "learning_rate"),
            "samples": ("consumed_samples",),
            "seq_per_s": ("throughput",),
            "step_time_s": ("train_step_timing", "train_step_timing in s", "iteration_time"),
            "val_loss": ("val_loss",),
        },
    ),
    # pytorch/torchtitan torchtitan/components/metrics.py
    Framework(
        "torchtitan",
        {
            "loss": ("loss_metrics/global_avg_loss",),
            "grad_norm": ("grad_norm",),
            "lr": ("lr",),
            "tokens": ("ntokens_seen", "n_tokens_seen"),
            "tokens_per_s": ("throughput(tps)",),
            "step_time_s": ("time_metrics/end_to_end(s)",),
            "data_wait_s": ("time_metrics/data_loading(s)",),
            "val_loss": ("validation_metrics/loss",),
        },
    ),
    # mosaicml/composer composer/loggers/logger.py, composer/callbacks/speed_monitor.py,
    # lr_monitor.py and optimizer_monitor.py; mosaicml/llm-foundry logs through them
    Framework(
        "Composer or LLM Foundry",
        {
            "loss": (
                "loss/train/total",
                "metrics/train/LanguageCrossEntropy",
                "metrics/train/CrossEntropy",
                "loss/train/*",
            ),
            "grad_norm": ("l2_norm/grad/global",),
            "param_norm": ("l2_norm/param/global",),
            "lr": ("lr-*",),
            "tokens": ("time/token",),
            "samples": ("time/sample",),
            "seq_per_s": ("throughput/samples_per_sec",),
            "tokens_per_s": ("throughput/tokens_per_sec",),
            "val_loss": ("metrics/eval/LanguageCrossEntropy", "metrics/eval/CrossEntropy"),
        },
    ),
    # microsoft/Megatron-DeepSpeed and bigscience-workshop megatron/training.py
    Framework(
        "Megatron-DeepSpeed",
        {
            "loss": ("lm-loss-training/lm loss",),
            "grad_norm": ("grad-norm/grad-norm", "loss/grad_norm"),
            "param_norm": ("params-norm/params-norm",),
            "lr": ("learning-rate/learning-rate",),
            "tokens": ("lm-loss-training/consumed_train_tokens",),
            "seq_per_s": ("iteration-time/samples per second",),
            "tokens_per_s": ("iteration-time/tokens per second",),
            "step_time_s": ("iteration-time/iteration-time",),
            "val_loss": ("lm-loss-validation/lm loss validation",),
        },
    ),
    # EleutherAI/gpt-neox megatron/logging.py
    Framework(
        "gpt-neox",
        {
            "loss": ("train/lm_loss",),
            "lr": ("train/learning_rate",),
            "grad_norm": ("train/grad_norm", "train/global_grad_norm"),
            "seq_per_s": ("runtime/samples_per_sec",),
            "step_time_s": ("runtime/iteration_time",),
            "val_loss": ("validation/lm_loss",),
        },
    ),
    # NVIDIA/Megatron-LM megatron/training/training.py (training_log); `throughput` is TFLOP/s there
    Framework(
        "Megatron-LM",
        {
            "loss": ("lm loss",),
            "grad_norm": ("grad-norm",),
            "param_norm": ("params-norm",),
            "lr": ("learning-rate",),
            "samples": ("consumed samples",),
            "step_time_s": ("iteration-time",),
            "val_loss": ("lm loss validation",),
        },
    ),
    # aws-neuron/neuronx-distributed examples/training/llama/*/logger.py,
    # examples/training/tp_dp_gpt_neox_hf_pretrain/*/*.py
    Framework(
        "NxD's examples",
        {
            "loss": ("step loss",),
            "grad_norm": ("global_norm", "grad-norm"),
            "lr": ("learning rate", "lr"),
            "seq_per_s": ("throughput",),
            "step_time_s": ("step_time", "iteration_time"),
        },
    ),
    # aws-neuron/neuronx-distributed examples/training/llama/lightning/module_llama.py
    Framework(
        "NxD's examples with Lightning",
        {
            "loss": ("loss",),
            "grad_norm": ("grad-norm",),
            "lr": ("lr",),
            "seq_per_s": ("throughput",),
        },
        mark="input_ids",
    ),
    # huggingface/transformers src/transformers/trainer.py and integrations/integration_utils.py
    # (rewrite_logs); trainer_state.json has the same without `train/`
    Framework(
        "Hugging Face Trainer",
        {
            "loss": ("train/loss",),
            "grad_norm": ("train/grad_norm",),
            "lr": ("train/learning_rate",),
            "tokens": ("train/num_input_tokens_seen", "num_input_tokens_seen"),
            "val_loss": ("eval/loss", "eval_loss"),
        },
    ),
    # huggingface/nanotron src/nanotron/trainer.py (train_step_logs)
    Framework(
        "nanotron",
        {
            "loss": ("lm_loss", "train/lm_loss"),
            "lr": ("lr",),
            "tokens": ("consumed_tokens",),
            "tokens_per_s": ("tokens_per_sec",),
        },
    ),
    # Lightning-AI/pytorch-lightning: names are the user's; these are its tutorials', and
    # callbacks/lr_monitor.py. What `self.log` takes on_step and on_epoch gets a suffix.
    Framework(
        "Lightning",
        {
            "loss": (
                *("train_loss", "train_loss_step", "training_loss", "training_loss_step"),
                *("train/loss_step", "loss", "loss_step", "train_loss_epoch"),
            ),
            "grad_norm": ("grad_norm", "grad_norm_step", "grad_2.0_norm_total"),
            "lr": ("lr-*", "lr", "learning_rate"),
            "val_loss": ("val_loss", "val/loss", "valid_loss", "validation_loss"),
        },
    ),
)

# Names that mean the same in all frameworks
_COMMON: Names = {
    "loss": ("loss", "train/loss", "train_loss", "training/loss", "step_loss", "lm_loss"),
    "grad_norm": (
        *("grad_norm", "gradient_norm", "global_grad_norm", "global_norm", "norm"),
        *("train/grad_norm", "optim/total_grad_norm", "total_grad_norm"),
    ),
    "param_norm": ("param_norm", "parameter_norm", "params_norm", "train/param_norm"),
    "lr": ("lr", "learning_rate", "train/lr", "train/learning_rate", "lr-*"),
    "tokens": (
        *("tokens", "tokens_seen", "ntokens_seen", "num_tokens", "consumed_tokens", "train/tokens"),
        *("num_input_tokens_seen", "total_tokens", "throughput/total_tokens"),
    ),
    "samples": ("samples", "consumed_samples", "samples_seen", "num_samples"),
    "seq_per_s": (
        *("seq_per_s", "seqs_per_s", "samples_per_s", "samples_per_sec", "samples_per_second"),
        *("seq/s", "samples/sec", "samples/s", "train_samples_per_second"),
    ),
    "tokens_per_s": (
        *("tokens_per_s", "tokens_per_sec", "tokens_per_second", "tokens/s", "tokens/sec"),
        *("throughput(tps)", "tps", "tok/s", "train_tokens_per_second"),
    ),
    "step_time_s": (
        *("step_time_s", "step_time", "time_per_step", "iteration_time", "iter_time"),
        *("train_step_timing", "train_step_time"),
    ),
    "data_wait_s": ("data_wait_s",),
    "forward_backward_s": ("forward_backward_s",),
    "optimizer_s": ("optimizer_s",),
    "time": ("time", "_timestamp", "timestamp", "wall_time", "created_at"),
    "val_loss": (
        *("val_loss", "eval_loss", "valid_loss", "validation_loss", "test_loss"),
        *("val/loss", "eval/loss", "valid/loss", "validation/loss", "lm loss validation"),
    ),
}
STEPS = (
    *("step", "global_step", "train/global_step", "trainer/global_step", "train_step"),
    *("train/step", "iteration", "iter", "_step", "steps", "optimizer_step", "time/batch", "batch"),
)
# pytorch/torchtitan components/metrics.py: tokens per second per device
_PER_DEVICE = ("throughput(tps)", "tps")


def parse_tags(values: Sequence[str]) -> dict[str, str]:
    """Parse the values of `--tag METRIC=TAG`: metric (or `step`) → tag, column or key.

    Raises:
        UserError: one is not METRIC=TAG, names no metric of ours, or names one a second time.
    """
    tags: dict[str, str] = {}
    for value in values:
        metric, equals, tag = (part.strip() for part in value.partition("="))
        if not (equals and metric and tag):
            raise UserError(f"--tag {value!r}: give METRIC=TAG, such as loss=train/my_loss")
        if metric not in METRICS:
            raise UserError(f"--tag {value!r}: no metric {metric!r}; one of {', '.join(METRICS)}")
        if tags.get(metric, tag) != tag:
            raise UserError(
                f"--tag {value!r}: {metric} is {tags[metric]!r} already; give each metric once"
            )
        tags[metric] = tag
    return tags


def choose_tags(counts: Mapping[str, int], requested: Mapping[str, str], source: Path) -> TagChoice:
    """Choose the tags of a log (tag → number of values) that hold the metrics.

    Tags that the user requested, by metric, may be of another of several logs.

    Raises:
        RunError: no tag is the loss or the gradient norm, or a requested tag is missing and no
            other matches.
    """
    names = _NormalizedTags(counts)
    chosen = {m: tag for m, tag in requested.items() if tag in counts and m != "step"}
    framework = None
    for candidate in FRAMEWORKS:
        marked = not candidate.mark or names.find(candidate.mark)
        if marked and any(names.find(name) for name in candidate.names["loss"]):
            framework = candidate
            break
    others: dict[str, tuple[str, ...]] = {}
    missing: list[str] = []
    for metric in COLUMNS:
        if metric in chosen:
            continue
        own = framework.names.get(metric, ()) if framework is not None else ()
        fitting = dict.fromkeys(
            tag for name in (*own, *_COMMON.get(metric, ())) for tag in names.find(name)
        )
        free = [tag for tag in fitting if tag not in chosen.values()]
        # A mean at the end, or by epoch, is no alternative to values of every step.
        most = max((counts[tag] for tag in free), default=0)
        free = [tag for tag in free if 2 * counts[tag] > most]
        if free:
            chosen[metric] = free[0]
            others[metric] = tuple(free[1:])
        if metric in requested:
            what = f"{source} has no {requested[metric]!r} (--tag {metric}={requested[metric]})"
            if not free:
                raise RunError(f"{what}; there are {list_tags(counts)}")
            missing.append(f"{what}; {metric} is taken from {free[0]!r}")
    if not {"loss", "grad_norm"} & chosen.keys():  # `spikes` works with either
        raise RunError(
            f"no loss in {source}: none of its tags is known; there are "
            f"{list_tags(counts)}; name it with --tag loss=TAG"
        )
    return TagChoice(chosen, others, tuple(missing))


def step_keys(tags: Collection[str], requested: Mapping[str, str]) -> list[str]:
    """Returns the keys or columns that may hold the step, the likeliest first."""
    if requested.get("step") in tags:
        return [requested["step"]]
    names = _NormalizedTags(tags)
    return list(dict.fromkeys(tag for name in STEPS for tag in names.find(name)))


def per_device(tag: str) -> bool:
    """Whether a throughput is that of one device, not of the whole run."""
    return tag in _PER_DEVICE or "/device/" in tag


def list_tags(tags: Collection[str], limit: int = 20) -> str:
    """Format tags for a message."""
    if not tags:
        return "none at all"
    shown = ", ".join(repr(tag)[1:-1] for tag in sorted(tags)[:limit])
    return shown + (f" and {len(tags) - limit} more" if len(tags) > limit else "")


class _NormalizedTags:
    """Tags by their names in the form in which these are compared."""

    def __init__(self, tags: Collection[str]) -> None:
        self._by_name: dict[str, list[str]] = {}
        for tag in tags:
            self._by_name.setdefault(_normalize(tag), []).append(tag)

    def find(self, name: str) -> list[str]:
        if not name.endswith("*"):
            return self._by_name.get(_normalize(name), [])
        prefix = _normalize(name[:-1])
        return [
            tag for key, tags in self._by_name.items() if key.startswith(prefix) for tag in tags
        ]


def _normalize(name: str) -> str:
    return re.sub(r"[\s_-]+", "_", name.strip().lower())
