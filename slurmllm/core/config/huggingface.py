"""Converts a Hugging Face config.json to our `ModelConfig` and back; no torch.

Settings that our decoder or transformers' model of the family lacks are refused by name, all faults
at once. Keys of transformers 4 (rotary_pct, rope_theta, rope_scaling) and of 5 (rope_parameters)
are both read and both written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from slurmllm.core.config.families import FAMILIES
from slurmllm.core.config.families.family import REQUIRED, Activation, HuggingFaceModel
from slurmllm.core.config.recipe import ModelConfig, RopeScaling
from slurmllm.core.config.rules import broken_rules
from slurmllm.core.config.yaml_source import flatten
from slurmllm.core.errors import ConfigError
from slurmllm.core.format import format_plural
from slurmllm.core.run.safe_files import read_limited

CONFIG = "config.json"
ADAPTER = (
    "adapter_config.json: the folder has an adapter (LoRA), not a model; merge it with its base by "
    "peft: `PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(DIR)`"
)
# Ours → transformers' names, which are equal but for speed; an export writes the first.
ACTIVATION_NAMES: dict[Activation, tuple[str, ...]] = {
    "gelu": ("gelu",),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
    "silu": ("silu", "swish"),
}
_ACTIVATIONS = {theirs: ours for ours, names in ACTIVATION_NAMES.items() for theirs in names}
# Fields of `RopeScaling`, whose names are transformers'.
_SCALING = tuple(name for name in RopeScaling.model_fields if name != "kind")


@dataclass(frozen=True)
class SourceConfig:
    """A config.json that we can represent."""

    model: ModelConfig
    architecture: str  # the model's class in transformers
    bos_token_id: int | None  # token at the beginning of a text, if known
    eos_token_id: int | list[int] | None  # token at its end; some models have several


def read_model(path: Path) -> dict[str, Any]:
    """Return the model section of a config.json, given by its path or its folder."""
    folder, name = (path, CONFIG) if path.is_dir() else (path.parent, path.name)
    if not path.exists():
        raise ConfigError(
            f"model: {str(path)!r} does not exist; give the path of a Hugging Face config.json, or "
            "of its folder"
        )
    source, faults = read_config(folder, name)
    if source is None:
        count = format_plural(len(faults), "error")
        raise ConfigError(f"model: {path} cannot be used: {count}", faults)
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
        return None, [f"{name}: cannot be read: {error.strerror or error}"]
    except (ValueError, RecursionError) as error:  # untrusted: nested too deeply, not UTF-8
        return None, [f"{name}: is not JSON: {error}; fetch it again"]
    if not isinstance(values, dict):
        return None, [f"{name}: holds no mapping of settings; fetch it again"]
    family, faults = _find_family(values)
    if family is None:
        return None, faults
    dialect = FAMILIES[family].hugging_face
    faults += _unsupported(values, dialect)
    fields, field_faults = _model_fields(values, family)
    faults += field_faults
    model: ModelConfig | None = None
    if not field_faults:
        try:
            model = ModelConfig.model_validate(fields)
            faults += config_faults(model)
        except ValidationError as error:
            for fault in error.errors():
                name = str(fault["loc"][0]) if fault["loc"] else "family"
                key = dialect.keys.get(name, (name, None))[0]
                faults.append(f"{key}: {fault['input']!r}: {fault['msg']}")
    bos, eos = values.get("bos_token_id"), values.get("eos_token_id")
    for key, value in (("bos_token_id", bos), ("eos_token_id", eos)):
        tokens = value if isinstance(value, list) and key == "eos_token_id" else [value]
        # type() and not isinstance(): True is an int.
        if value is not None and any(type(token) is not int for token in tokens):
            faults.append(f"{key}: must be the number of a token, not {value!r}")
    if faults or model is None:
        return None, faults
    architecture = (values.get("architectures") or [dialect.causal])[0]
    return SourceConfig(model, architecture, bos, eos), []


def _find_family(values: Mapping[str, Any]) -> tuple[str | None, list[str]]:
    """Return the family that architectures and model_type agree on, and a line per fault."""
    model_type, architectures = values.get("model_type"), values.get("architectures") or []
    dialects = {name: family.hugging_face for name, family in FAMILIES.items()}
    classes = ", ".join(dialect.causal for dialect in dialects.values())
    if not isinstance(architectures, list) or not (architectures or model_type):
        return None, [f"architectures: must name the model's class; known are {classes}"]
    by_type = [name for name, d in dialects.items() if d.model_type == model_type]
    by_class = [
        name for name, d in dialects.items() if {d.causal, d.base} & {*map(str, architectures)}
    ]
    faults = []
    if model_type is not None and not by_type:
        types = ", ".join(d.model_type for d in dialects.values())
        faults.append(f"model_type: {model_type!r} is not known; known are {types}")
    if architectures and not by_class:
        faults.append(
            f"architectures: {', '.join(map(str, architectures))} is not known; known are {classes}"
        )
    if by_type and by_class and by_type != by_class:
        faults.append(
            f"model_type: {model_type!r} is not that of {', '.join(map(str, architectures))}; "
            f"that is {dialects[by_class[0]].model_type!r}"
        )
    return (None if faults else (by_class or by_type)[0]), faults


def _unsupported(values: Mapping[str, Any], dialect: HuggingFaceModel) -> list[str]:
    """Return a line for each setting that changes the model in a way our decoder lacks."""
    faults = [
        f"{key}: {values[key]!r} is not supported; it must be {only!r}"
        for key, only in dialect.fixed.items()
        if values.get(key, only) != only
    ]
    if values.get("quantization_config") is not None:
        method = values["quantization_config"]
        method = method.get("quant_method") if isinstance(method, Mapping) else method
        faults.append(
            f"quantization_config: quantized weights ({method}) cannot be trained; import the "
            "model that they were quantized from"
        )
    return faults


def _model_fields(values: Mapping[str, Any], family: str) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of our model section, not yet validated, and one line per fault."""
    dialect = FAMILIES[family].hugging_face
    fields: dict[str, Any] = {"family": family}
    faults = []
    for name, (key, default) in dialect.keys.items():
        if key not in values and default is REQUIRED:
            faults.append(f"{key}: is missing")
        fields[name] = values.get(key, default)
    activation = fields["activation"]
    fields["activation"] = _ACTIVATIONS.get(str(activation))
    if fields["activation"] is None:
        key = dialect.keys["activation"][0]
        faults.append(f"{key}: {activation!r} is not known; known are {', '.join(_ACTIVATIONS)}")
    hidden, heads = fields["hidden_size"], fields["num_heads"]
    if fields["ffn_hidden_size"] is None and isinstance(hidden, int):  # GPT-2's n_inner
        fields["ffn_hidden_size"] = 4 * hidden
    # Files of families without the key may have it too.
    head_dim = fields.setdefault("head_dim", values.get("head_dim"))
    if type(head_dim) is int and isinstance(heads, int) and head_dim * heads == hidden:
        fields["head_dim"] = None
    if FAMILIES[family].positions == "rotary":
        rotary, rotary_faults = _rotary_fields(values, family)
        fields.update(rotary)
        faults += rotary_faults
    return fields, faults


def _rotary_fields(values: Mapping[str, Any], family: str) -> tuple[dict[str, Any], list[str]]:
    faults = []
    # Version 5 has the settings in rope_parameters, 4 at the top level; both prefer rope_scaling.
    rope: Mapping[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        inner = values.get(key) or {}
        if not isinstance(inner, Mapping):
            faults.append(f"{key}: must be a mapping, not {inner!r}")
            continue
        kind = inner.get("rope_type", inner.get("type", "default"))
        if kind not in ("default", "llama3"):
            faults.append(
                f"{key}: positions scaled by {kind!r} are not supported; only 'default' and "
                "'llama3' are"
            )
        rope = inner or rope

    def first(keys: tuple[str, ...], default: Any) -> Any:
        values_of_keys = (source.get(key) for source in (rope, values) for key in keys)
        return next((value for value in values_of_keys if value is not None), default)

    default_pct = FAMILIES[family].defaults["rotary_pct"]
    fields = {
        "rotary_pct": first(("partial_rotary_factor", "rotary_pct"), default_pct),
        "rotary_base": first(("rope_theta", "rotary_emb_base"), 10000.0),
    }
    if rope.get("rope_type", rope.get("type")) == "llama3":
        scaling = {name: rope[name] for name in _SCALING if name in rope}
        fields["rope_scaling"] = {"kind": "llama3", **scaling}
        faults += [f"rope_scaling: {name} is missing" for name in _SCALING if name not in rope]
    return fields, faults


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
    values: dict[str, Any] = {"architectures": [dialect.causal], "model_type": dialect.model_type}
    resolved = {"num_kv_heads": model.kv_heads, "head_dim": model.head_width}
    for name, (key, _) in dialect.keys.items():
        values[key] = resolved.get(name, getattr(model, name))
    values[dialect.keys["activation"][0]] = ACTIVATION_NAMES[model.activation][0]
    values.update(dialect.written)
    values.update({key: getattr(model, name) for name, key in dialect.rotary_keys.items()})
    if FAMILIES[model.family].positions == "rotary":
        values["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": model.rotary_base,
            "partial_rotary_factor": model.rotary_pct,
        }
    if model.rope_scaling is not None:
        scaling = model.rope_scaling.model_dump(exclude={"kind"})
        scaling["rope_type"] = model.rope_scaling.kind
        values["rope_parameters"] |= scaling
        values["rope_scaling"] = scaling
    # Written even if None: otherwise transformers takes the ids of its own tokenizers.
    values.update(bos_token_id=bos_token_id, eos_token_id=eos_token_id)
    values.update(torch_dtype=dtype, use_cache=True)
    path.write_text(json.dumps(dict(sorted(values.items())), indent=2) + "\n", encoding="utf-8")
