"""Converts a Hugging Face config.json to our `ModelConfig` and back; no torch.

Settings that our decoder or transformers' model of the family lacks are refused by name, all faults
at once. Keys of transformers 4 (rotary_pct, rope_theta, rope_scaling) and of 5 (rope_parameters)
are both read and both written.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from slurmllm.core.config.families import FAMILIES, Activation, Family
from slurmllm.core.config.families.family import REQUIRED
from slurmllm.core.config.huggingface_attention import attention_fields, attention_settings
from slurmllm.core.config.recipe import ModelConfig
from slurmllm.core.config.rules import broken_rules
from slurmllm.core.config.yaml_source import Values, flatten
from slurmllm.core.errors import ConfigError
from slurmllm.core.format import Texts, format_plural
from slurmllm.core.run.safe_files import os_error_text, read_limited

log = logging.getLogger(__name__)

CONFIG = "config.json"
ADAPTER = (
    "adapter_config.json: the folder has an adapter (LoRA), not a model; merge it with its base by "
    "peft: `PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(DIR)`"
)
# Ours → transformers' names, which are equal but for speed; an export writes the first.
ACTIVATION_NAMES: dict[Activation, Texts] = {
    "gelu": ("gelu",),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
    "silu": ("silu", "swish"),
    "relu2": ("relu2",),
}
# Settings that a part of the model's own goes with, if they are set and not 0.
_UNSUPPORTED = {
    "num_local_experts": "mixture of experts",
    "num_experts": "mixture of experts",
    "n_routed_experts": "mixture of experts",
    "kv_lora_rank": "latent attention (MLA)",
    "add_cross_attention": "cross attention",
    "cross_attention_layers": "cross attention",
    "is_encoder_decoder": "encoder",
    "use_bidirectional_attention": "attention to later tokens",
    "vision_config": "images",
    "audio_config": "sound",
    "use_value_embeddings": "value embeddings (later nanochat)",
}
# Settings of a model of images and text that are its text model's too.
_SHARED_WITH_TEXT = ("bos_token_id", "eos_token_id", "quantization_config", "tie_word_embeddings")
_ACTIVATIONS = {theirs: ours for ours, names in ACTIVATION_NAMES.items() for theirs in names}


@dataclass(frozen=True)
class SourceConfig:
    """A config.json that we can represent."""

    model: ModelConfig
    architecture: str  # the model's class in transformers
    bos_token_id: int | None  # token at the beginning of a text, if known
    eos_token_id: int | list[int] | None  # token at its end; some models have several


def read_model(path: Path) -> Values:
    """Return the model section of a config.json, given by its path or its folder."""
    folder, name = (path, CONFIG) if path.is_dir() else (path.parent, path.name)
    if not path.exists():
        raise ConfigError(
            f"model: {str(path)!r} does not exist; give the path of a Hugging Face config.json, or "
            "of its folder"
        )
    source, faults = read_config(folder, name)
    if source is None:
        raise ConfigError(
            f"model: {path} cannot be used: {format_plural(len(faults), 'error')}", faults
        )
    return source.model.model_dump(mode="json")


def read_config(directory: Path, name: str = CONFIG) -> tuple[SourceConfig | None, list[str]]:
    """Return a model's config.json, None if it has faults, and one line per fault."""
    try:
        values = json.loads(read_limited(directory / name))
    except FileNotFoundError:
        if (directory / "adapter_config.json").is_file():
            return None, [ADAPTER]
        return None, [f"{name}: is missing; is this the folder of a Hugging Face model?"]
    except OSError as error:
        return None, [f"{name}: cannot be read: {os_error_text(error)}"]
    except (ValueError, RecursionError) as error:  # untrusted: nested too deeply, not UTF-8
        return None, [f"{name}: is not JSON: {error}; fetch it again"]
    if not isinstance(values, dict):
        return None, [f"{name}: holds no mapping of settings; fetch it again"]
    faults: list[str] = []
    values = _text_config(values)
    family = _find_family(values, faults)
    faults += [
        f"{key}: {repr(values[key])[:40]} is not supported: the decoder has no {feature}"
        for key, feature in _UNSUPPORTED.items()
        if values.get(key)
    ]
    if family is None:
        return None, faults
    dialect = family.hugging_face
    faults += [
        f"{key}: {values[key]!r} is not supported; it must be {only!r}"
        for key, only in dialect.fixed.items()
        if values.get(key, only) != only and (values[key] is not None or only)
    ]
    if (method := values.get("quantization_config")) is not None:
        method = method.get("quant_method") if isinstance(method, Mapping) else method
        faults.append(
            f"quantization_config: quantized weights ({method}) cannot be trained; import the "
            "model that they were quantized from"
        )
    fields = _model_fields(values, family, faults)
    model: ModelConfig | None = None
    try:
        model = ModelConfig.model_validate(fields)
        faults += config_faults(model)
    except ValidationError as error:
        faults += _field_faults(error, family)
    for key in ("bos_token_id", "eos_token_id"):
        value = values.get(key)
        tokens = value if isinstance(value, list) and key == "eos_token_id" else [value]
        # type() and not isinstance(): True is an int.
        if value is not None and any(type(token) is not int for token in tokens):
            faults.append(f"{key}: must be the number of a token, not {value!r}")
    if faults or model is None:
        return None, faults
    architecture = (values.get("architectures") or [dialect.causal])[0]
    bos, eos = values.get("bos_token_id"), values.get("eos_token_id")
    return SourceConfig(model, architecture, bos, eos), []


def _field_faults(error: ValidationError, family: Family) -> list[str]:
    """Return one line for each key with a wrong value, however many layers it affects."""
    dialect = family.hugging_face
    keys = {**{name: key for name, (key, _) in dialect.keys.items()}, **dialect.rotary_keys}
    keys["attention_pattern.window"] = "sliding_window"
    keys["attention_pattern.rope"] = dialect.rope_bases.get("sliding_attention", ("",))[0]
    lines: dict[str, None] = {}
    for fault in error.errors():
        path = ".".join(name for name in fault["loc"] if isinstance(name, str))
        problem = f"{fault['input']!r}: {fault['msg'].removeprefix('Value error, ')}"
        if fault["type"] == "missing":
            problem = "is missing"
        lines[f"{keys.get(path) or path}: {problem}"] = None
    return [*lines]


def _text_config(values: Values) -> Values:
    """Return the settings of the text model, which a model of images and text holds."""
    text_config = values.get("text_config")
    for family in FAMILIES.values():
        dialect = family.hugging_face
        if values.get("model_type") == dialect.wrapper != "" and isinstance(text_config, dict):
            log.warning("%s: only its text model is read, a %s", dialect.wrapper, dialect.causal)
            shared = {key: values[key] for key in _SHARED_WITH_TEXT if key in values}
            return {**text_config, **shared, "model_type": dialect.model_type}
    return values


def _find_family(values: Values, faults: list[str]) -> Family | None:
    """Return the family that architectures and model_type agree on."""
    model_type = values.get("model_type")
    architectures = values.get("architectures") or []
    families = FAMILIES.values()
    classes = ", ".join(family.hugging_face.causal for family in families)
    if not isinstance(architectures, list) or not (architectures or model_type):
        faults.append(f"architectures: must name the model's class; known are {classes}")
        return None
    names = list(map(str, architectures))
    by_type = [family for family in families if family.hugging_face.model_type == model_type]
    by_class = [
        family
        for family in families
        if {family.hugging_face.causal, family.hugging_face.base} & {*names}
    ]
    if model_type is not None and not by_type:
        types = ", ".join(family.hugging_face.model_type for family in families)
        faults.append(f"model_type: {model_type!r} is not known; known are {types}")
    if names and not by_class:
        faults.append(f"architectures: {', '.join(names)} is not known; known are {classes}")
    if by_type and by_class and by_type != by_class:
        faults.append(
            f"model_type: {model_type!r} is not that of {', '.join(names)}; that is "
            f"{by_class[0].hugging_face.model_type!r}"
        )
    return None if faults else (by_class or by_type)[0]


def _model_fields(values: Values, family: Family, faults: list[str]) -> Values:
    """Return the fields of our model section, not yet validated."""
    keys = family.hugging_face.keys
    fields: Values = {"family": family.name}
    for name, (key, default) in keys.items():
        if key in values or default is not REQUIRED:
            fields[name] = values.get(key, default)
    activation = str(fields["activation"])
    fields["activation"] = _ACTIVATIONS.get(activation, family.defaults["activation"])
    if activation not in _ACTIVATIONS:
        names = ", ".join(_ACTIVATIONS)
        faults.append(f"{keys['activation'][0]}: {activation!r} is not known; known are {names}")
    hidden = fields.get("hidden_size")
    heads = fields.get("num_heads")
    if fields.get("ffn_hidden_size", ...) is None and isinstance(hidden, int):  # GPT-2's n_inner
        fields["ffn_hidden_size"] = 4 * hidden
    # Files of families without the key may have it too.
    head_dim = fields.setdefault("head_dim", values.get("head_dim"))
    if type(head_dim) is int and isinstance(heads, int) and head_dim * heads == hidden:
        fields["head_dim"] = None
    return {**fields, **attention_fields(values, family, fields.get("num_layers"), faults)}


def config_faults(model: ModelConfig) -> list[str]:
    """Return the reasons why transformers' model of the family cannot be this one."""
    faults = list(broken_rules(flatten(model.model_dump(), "model.")))
    if model.activation not in ACTIVATION_NAMES:
        faults.append(
            f"model.activation: {model.activation!r} has no name in transformers; add it to "
            "ACTIVATION_NAMES in slurmllm/core/config/huggingface.py"
        )
    return faults


def write_config(
    model: ModelConfig,
    path: Path,
    *,
    dtype: str,
    bos_token_id: int | None,
    eos_token_id: int | list[int] | None,
) -> None:
    """Write a config.json; `dtype` is the weights' type by torch's name (`bfloat16`)."""
    dialect = FAMILIES[model.family].hugging_face
    resolved = {
        **dict(model),
        "num_kv_heads": model.kv_heads,
        "query_pre_attn_scalar": model.query_pre_attn_scalar or model.head_width,
        "head_dim": model.head_width,
        "activation": ACTIVATION_NAMES[model.activation][0],
    }
    # Token ids even if None: otherwise transformers takes those of its own tokenizers.
    values: Values = {
        "architectures": [dialect.causal],
        "model_type": dialect.model_type,
        **{key: resolved[name] for name, (key, _) in dialect.keys.items()},
        "pad_token_id": None,
        **dialect.written,
        **{key: resolved[name] for name, key in dialect.rotary_keys.items()},
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "torch_dtype": dtype,
        "use_cache": True,
        **attention_settings(model),
    }
    path.write_text(json.dumps(dict(sorted(values.items())), indent=2) + "\n", encoding="utf-8")
