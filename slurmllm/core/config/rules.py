"""Rules between the fields of a recipe.

A rule names the dotted paths that it reads and is skipped if one of them is invalid in itself, so
that all faults of a file are reported at once and each of them once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from slurmllm.core.config.data_sources import known_address
from slurmllm.core.config.families import CHOSEN, EXTRAS, FAMILIES, gate_block
from slurmllm.core.config.recipe import MUON, OptimConfig, num_warmup_steps
from slurmllm.core.config.variables import has_password
from slurmllm.core.config.yaml_source import Values
from slurmllm.core.format import Texts

Check = Callable[..., str]  # returns a fault, or an empty text
Rule = tuple[Texts, Check]  # dotted paths, and the check of their values, in order
RULES: list[Rule] = []  # in the order in which faults are reported


def _rule(*paths: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        RULES.append((paths, check))
        return check

    return register


def _require(*paths: str, holds: Callable[..., bool], fault: str) -> None:
    """Add a rule whose fault has the values in the order of the paths."""
    RULES.append((paths, lambda *values: "" if holds(*values) else fault.format(*values)))


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, smallest first."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def choose(options: list[int]) -> str:
    """Return `choose 1, 2, 4 or 8`, the end of an error message, from the valid values."""
    return f"choose {_alternatives(options)}"


def _alternatives(options: Iterable[Any]) -> str:
    *names, last = map(yaml_text, options)
    return f"{', '.join(names)} or {last}" if names else last


def yaml_text(value: object) -> str:
    """Return a value as `--set` takes it, without blanks."""
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return f"[{','.join(map(yaml_text, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _possible_in_family(name: str, family: str, value: Any) -> str:
    choices = FAMILIES[family].choices.get(name)
    if choices is None or value in choices:
        return ""
    return (
        f"model.{name}: {yaml_text(value)} does not go with model.family {family}; "
        f"set {_alternatives(choices)}, or leave it out"
    )


for _name in sorted(CHOSEN):
    RULES.append((("model.family", f"model.{_name}"), partial(_possible_in_family, _name)))


@_rule("model.num_heads", "model.hidden_size", "model.head_dim")
def heads_divide_hidden(heads: int, hidden: int, head_dim: int | None) -> str:
    if head_dim is not None or hidden % heads == 0:
        return ""
    near = [d for d in divisors(hidden) if heads / 4 <= d <= heads * 4] or divisors(hidden)
    return f"model.num_heads: {heads} does not divide model.hidden_size {hidden}; {choose(near)}"


@_rule("model.num_heads", "model.hidden_size", "model.head_dim", "model.rotary_pct")
def rotary_dimensions_are_pairs(heads: int, hidden: int, head_dim: int | None, pct: float) -> str:
    if head_dim is None and hidden % heads:
        return ""  # a fault of its own
    width = head_dim or hidden // heads
    rotary = int(width * pct)
    if pct and width % 2 and head_dim is not None:
        return (
            f"model.head_dim: {head_dim} is odd, but rotary positions need pairs of dimensions; "
            f"{choose([head_dim - 1 or 2, head_dim + 1])}"
        )
    if pct and width % 2:
        return (
            f"model.num_heads: {heads} heads of {hidden} give {width} dimensions a head, "
            "but rotary positions need pairs; choose an even head width"
        )
    if rotary % 2 == 0:
        return ""
    return (
        f"model.rotary_pct: {pct} of a head of {width} rotates {rotary} dimensions, "
        f"an odd number; choose {math.ceil((rotary + 1) / width * 1e4) / 1e4:g}"
    )


@_rule("model.family", "model.head_dim", "model.num_heads", "model.hidden_size")
def family_has_head_dim(family: str, head_dim: int | None, heads: int, hidden: int) -> str:
    if head_dim is None or "head_dim" in FAMILIES[family].optional or head_dim * heads == hidden:
        return ""
    return (
        f"model.head_dim: {head_dim} times {heads} heads is not model.hidden_size {hidden}, as "
        f"model.family {family} needs; leave it out, or choose {_with_option('head_dim')}"
    )


@_rule("model.family", "model.rope_scaling.factor")
def family_has_rope_scaling(family: str, factor: float) -> str:
    if "rope_scaling" in FAMILIES[family].optional:
        return ""
    return (
        f"model.rope_scaling: model.family {family} has no scaled positions; leave it out, or "
        f"choose {_with_option('rope_scaling')}"
    )


def _family_has_extra(name: str, family: str, value: Any) -> str:
    is_full = isinstance(value, list | tuple) and not any(value)  # [{}] is full attention
    if name in FAMILIES[family].optional or value is None or is_full:
        return ""
    return (
        f"model.{name}: model.family {family} has none; leave it out, or choose "
        f"{_with_option(name)}"
    )


for _name in EXTRAS:
    RULES.append((("model.family", f"model.{_name}"), partial(_family_has_extra, _name)))


@_rule("model.family", "model.rotary_pct", "model.attention_pattern")
def rotary_patterns_need_rotary_positions(family: str, pct: float, pattern: Any) -> str:
    rotates = FAMILIES[family].positions == "rotary" and pct > 0
    if rotates or all(kind.get("rope") is None for kind in pattern):
        return ""
    return (
        "model.attention_pattern: rope is only for rotary positions, which the model does not "
        "have; leave rope out"
    )


@_rule("model.family", "model.attention_pattern", "model.num_layers")
def family_allows_attention_pattern(family: str, pattern: Any, count: int) -> str:
    keys = FAMILIES[family].hugging_face.layers
    if keys is None or not (fault := keys.fault(pattern[:count])):
        return ""
    return f"model.attention_pattern: {fault} (model.family {family})"


_require(
    "model.family",
    "model.rope_scaling.truncate",
    holds=lambda family, truncate: (
        truncate is not False or "" in FAMILIES[family].hugging_face.rope_bases
    ),
    fault="model.rope_scaling.truncate: transformers' model of the family {0} always rounds; leave "
    "it out",
)


def _with_option(name: str) -> str:
    families = [family.name for family in FAMILIES.values() if name in family.optional]
    return f"model.family {_alternatives(families)}" if families else "a family that has it"


_require(
    "model.rope_scaling.low_freq_factor",
    "model.rope_scaling.high_freq_factor",
    holds=lambda low, high: None in (low, high) or low < high,
    fault="model.rope_scaling.low_freq_factor: {:g} is not less than high_freq_factor {:g}; choose "
    "a smaller low_freq_factor, such as 1 and 4 (Llama 3.1)",
)
_require(
    "model.rope_scaling.kind",
    "model.rotary_base",
    holds=lambda kind, base: kind != "yarn" or base > 1,
    fault="model.rotary_base: {1:g} does not go with the scaling yarn; choose a base above 1",
)


_require(
    "model.family",
    "model.num_kv_heads",
    "model.num_heads",
    holds=lambda family, kv_heads, heads: (
        "num_kv_heads" in FAMILIES[family].optional
        or kv_heads in (None, heads)
        or heads % kv_heads != 0
    ),
    fault="model.num_kv_heads: {1}: model.family {0} has as many key and value heads as attention "
    "heads; set {2} or leave it out",
)
_require(
    "model.output_init_std",
    "model.scaled_init",
    holds=lambda std, scaled: std is None or not scaled,
    fault="model.output_init_std: {:g} and model.scaled_init both set the standard deviation of "
    "the output matrices; leave one of them out",
)


def _divides(path: str, noun: str, number: int | str | None, whole: int) -> str:
    if not isinstance(number, int) or whole % number == 0:  # auto is measured later
        return ""
    return f"{path}: {number} does not divide {noun.format(whole)}; {choose(divisors(whole))}"


for _path, _whole, _noun in (
    ("model.num_kv_heads", "model.num_heads", "model.num_heads {}"),
    ("parallel.tensor", "model.num_heads", "{} attention heads"),
    ("parallel.pipeline", "model.num_layers", "{} layers"),
    ("train.micro_batch", "train.global_batch", "train.global_batch {}"),
):
    RULES.append(((_path, _whole), partial(_divides, _path, _noun)))


@_rule("parallel.tensor", "model.num_kv_heads", "model.num_heads")
def tensor_fits_kv_heads(tensor: int, kv_heads: int | None, heads: int) -> str:
    if kv_heads is None or heads % kv_heads or heads % tensor:
        return ""
    if kv_heads % tensor == 0 or tensor % kv_heads == 0:
        return ""
    fitting = [d for d in divisors(heads) if kv_heads % d == 0 or d % kv_heads == 0]
    return (
        f"parallel.tensor: {tensor} neither divides model.num_kv_heads {kv_heads} nor is a "
        f"multiple of it; {choose(fitting)}"
    )


@_rule("parallel.tensor", "model.ffn_hidden_size", "model.family", "model.num_heads")
def tensor_divides_ffn(tensor: int, ffn: int, family: str, heads: int) -> str:
    block = gate_block(ffn) if FAMILIES[family].gated else 1
    if ffn // block % tensor == 0:
        return ""
    blocks = f"the {ffn // block} blocks of {block} gates of " if block > 1 else ""
    return (
        f"parallel.tensor: {tensor} does not divide {blocks}model.ffn_hidden_size {ffn}; "
        f"{choose(divisors(math.gcd(heads, ffn // block)))}"
    )


@_rule("parallel.tensor", "model.vocab_size", "model.vocab_pad_multiple")
def tensor_divides_vocab(tensor: int, vocab: int, multiple: int) -> str:
    padded = (vocab + multiple - 1) // multiple * multiple
    if padded % tensor == 0:
        return ""
    return (
        f"parallel.tensor: {tensor} does not divide the padded vocabulary {padded}; "
        f"set model.vocab_pad_multiple to a multiple of {tensor}"
    )


@_rule("parallel.tensor", "model.seq_len", "model.family")
def tensor_divides_positions(tensor: int, seq_len: int, family: str) -> str:
    if FAMILIES[family].positions != "learned" or seq_len % tensor == 0:
        return ""
    return (
        f"parallel.tensor: {tensor} does not divide model.seq_len {seq_len}, the rows of the "
        f"table of positions; {choose([d for d in divisors(seq_len) if d <= 2 * tensor])}"
    )


@_rule("parallel.pipeline", "parallel.virtual_pipeline", "model.num_layers")
def virtual_stages_divide_layers(pipeline: int, virtual: int, layers: int) -> str:
    if virtual == 1 or layers % pipeline:
        return ""
    if pipeline == 1:
        return (
            f"parallel.virtual_pipeline: {virtual} chunks a stage need more stages than one; set "
            "parallel.pipeline, or leave it out"
        )
    if layers % (pipeline * virtual) == 0:
        return ""
    return (
        f"parallel.virtual_pipeline: {virtual} does not divide the {layers // pipeline} layers of "
        f"each of {pipeline} pipeline stages; {choose(divisors(layers // pipeline))}"
    )


_require(
    "model.seq_len",
    "parallel.tensor",
    "parallel.sequence",
    holds=lambda seq_len, tensor, sequence: not sequence or seq_len % tensor == 0,
    fault="parallel.sequence: model.seq_len {} is not a multiple of parallel.tensor {}; change one "
    "of them or set parallel.sequence=false",
)
_require(
    "parallel.shard_nodes",
    "parallel.zero",
    holds=lambda shard_nodes, zero: shard_nodes is None or zero > 0,
    fault="parallel.shard_nodes: {}, but parallel.zero 0 shards nothing; set parallel.zero to 1, 2 "
    "or 3, or parallel.shard_nodes=null",
)
_require(
    "optim.min_lr",
    "optim.lr",
    holds=lambda min_lr, lr: min_lr <= lr,
    fault="optim.min_lr: {:g} is above optim.lr {:g}; choose less",
)
_require(
    "optim.warmup_ratio",
    "optim.warmup_steps",
    holds=lambda ratio, warmup: ratio is None or warmup == 0,
    fault="optim.warmup_ratio: {:g}, and optim.warmup_steps is {}: they exclude each other; set "
    "optim.warmup_steps=0 or optim.warmup_ratio=null",
)


def _require_choice(path: str, default: Any, needs: str, choice: str) -> None:
    """Add the rule that a setting has its default unless `needs` is `choice`, which uses it."""

    def check(chosen: str, value: Any) -> str:
        if value == default or chosen == choice:
            return ""
        return (
            f"{path}: {yaml_text(value)} is for {needs} {choice}, and {needs} is {chosen}; leave "
            f"it out (of a run: --set {path}={yaml_text(default)}), or set {needs}={choice}"
        )

    RULES.append(((needs, path), check))


for _name in ("adamw_lr", "momentum", "nesterov", "ns_steps", "adjust_lr_fn"):
    _require_choice(f"optim.{_name}", OptimConfig.model_fields[_name].default, "optim.name", MUON)
_require_choice("train.fp8_recipe", "tensorwise", "train.precision", "fp8_mixed")


@_rule("optim.warmup_steps", "optim.warmup_ratio", "optim.decay_steps", "train.steps")
def warmup_before_decay_ends(
    warmup: int, ratio: float | None, decay_steps: int | None, steps: int
) -> str:
    end = decay_steps or steps
    warmup = num_warmup_steps(warmup, ratio, steps)
    if warmup < end:
        return ""
    rule = f"not less than {end}, the step at which the schedule ends; choose less than"
    if ratio is None:
        shorter = "; `submit --steps N` scales the schedule" if decay_steps is None else ""
        return f"optim.warmup_steps: {warmup} is {rule} {end}{shorter}"
    return (
        f"optim.warmup_ratio: {ratio:g} of train.steps {steps} is {warmup} steps of warm-up, "
        f"{rule} {end / steps:g}"
    )


@_rule(
    "optim.decay_start",
    "optim.decay",
    "optim.decay_steps",
    "optim.warmup_steps",
    "optim.warmup_ratio",
    "train.steps",
)
def decay_starts_in_between(
    start: int | None,
    decay: str,
    decay_steps: int | None,
    warmup: int,
    ratio: float | None,
    steps: int,
) -> str:
    if start is None:
        return ""
    warmup = num_warmup_steps(warmup, ratio, steps)
    if decay == "constant":
        reason = (
            "optim.decay is constant, which has no decay; set optim.decay=1-sqrt, linear or "
            "cosine, or optim.decay_start=null"
        )
    elif start < warmup:
        reason = f"the warm-up ends only at step {warmup}; choose {warmup} or more"
    elif start > steps:
        reason = (
            f"the decay would start after the last step (train.steps {steps}); choose less, or "
            f"{steps} to decay later, at a resume"
        )
    elif decay_steps is not None and start >= decay_steps:
        reason = (
            f"the decay ends at step {decay_steps} (optim.decay_steps); choose less, or "
            "optim.decay_steps=null to end it at train.steps"
        )
    else:
        return ""
    return f"optim.decay_start: {start}: {reason}"


MOST_PROFILED = 100  # steps; a trace has some MB for each


@_rule("profile.steps", "train.steps")
def profiled_steps_are_trained(profiled: tuple[int, int] | None, steps: int) -> str:
    if profiled is None:
        return ""
    first, last = profiled
    if first > last:
        return f"profile.steps: the first step {first} is after the last, {last}; swap them"
    if last > steps:
        return (
            f"profile.steps: {list(profiled)}: step {last} is after the last of train.steps "
            f"{steps}; choose steps up to {steps}"
        )
    if last - first >= MOST_PROFILED:
        return (
            f"profile.steps: {list(profiled)} are {last - first + 1} steps, and traces grow with "
            f"each; choose {MOST_PROFILED} or fewer, such as [{first}, {first + 2}]"
        )
    return ""


def minutes_of(time: str) -> float:
    """Return minutes of a Slurm time (`90`, `1:30:00`, `1-00:00:00`; see sbatch(1), --time)."""
    days, dash, clock = time.rpartition("-")
    parts = [int(field) for field in clock.split(":")]
    if dash:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:  # minutes[:seconds]
        hours = 0
        minutes, seconds = [*parts, 0][:2]
    return int(days or 0) * 1440 + hours * 60 + minutes + seconds / 60


@_rule("slurm.signal_lead_s", "slurm.time")
def lead_fits_time(lead_s: int, time: str | int) -> str:
    limit_s = minutes_of(str(time)) * 60
    if limit_s == 0:
        return f"slurm.time: {time} allows no time; write for instance 8:00:00"
    if lead_s < limit_s:
        return ""
    return (
        f"slurm.signal_lead_s: {lead_s} s is not less than the time limit {time} "
        f"({limit_s:.0f} s); choose a smaller lead or a longer slurm.time"
    )


@_rule("checkpoint.replica")
def replica_can_be_opened(location: str | None) -> str:
    if location is None or has_password(location):
        return ""
    from fsspec.registry import get_filesystem_class

    try:
        protocol, separator, _ = known_address(location).partition("://")
        get_filesystem_class(protocol if separator else "file")
    except (ImportError, ValueError) as error:
        return f"checkpoint.replica: {location} cannot be opened here: {error}"
    return ""


def broken_rules(values: Values) -> Iterator[str]:
    """Yield a message for each rule that is broken.

    Args:
        values: Dotted path → value, of the fields that are valid in themselves.
    """
    for paths, check in RULES:
        if all(path in values for path in paths) and (fault := check(*map(values.get, paths))):
            yield fault


# Skipped if corpora are named: a mapping has a value of its own only if it is empty.
_require(
    "eval.every_steps",
    "eval.corpora",
    "data.validation",
    holds=lambda every, corpora, validation: every is None or bool(corpora or validation),
    fault="eval.every_steps: {}, but no text is held out; set data.validation=0.01, or name a "
    "corpus: eval.corpora={{NAME: FILE}}",
)
