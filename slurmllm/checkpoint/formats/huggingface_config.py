"""Converts a Hugging Face config.json to our `ModelConfig` and back; no torch.

Settings that our decoder or transformers' model of the family lacks are refused by name, all faults
at once. Keys of transformers 4 (rotary_pct, rope_theta, rope_scaling) and of 5 (rope_parameters)
are both read and both written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from slurmllm.config.families import FAMILIES
from slurmllm.config.recipe import ModelConfig
from slurmllm.config.rules import broken_rules
from slurmllm.safe_files import read_limited

CONFIG = "config.json"
_REQUIRED = object()


@dataclass(frozen=True)
class Dialect:
    """transformers' configuration of a family."""

    model_type: str
    causal: str  # the class with a head
    base: str  # the class without a head; its weights are complete if the head is tied
    keys: Mapping[str, tuple[str, Any]]  # our field → (their key, transformers' default)
    fixed: Mapping[str, Any] = field(default_factory=dict)  # their key → only supported value


_SHARED_KEYS = {
    "vocab_size": ("vocab_size", _REQUIRED),
    "init_std": ("initializer_range", 0.02),
}
# GPT-2 has names of its own, later models agree on these.
_LATER_KEYS = {
    **_SHARED_KEYS,
    "num_layers": ("num_hidden_layers", _REQUIRED),
    "hidden_size": ("hidden_size", _REQUIRED),
    "num_heads": ("num_attention_heads", _REQUIRED),
    "ffn_hidden_size": ("intermediate_size", _REQUIRED),
    "seq_len": ("max_position_embeddings", 2048),
    "tied_embeddings": ("tie_word_embeddings", False),
}
# Defaults: the configuration classes of transformers 4.45 and 5.23, which agree.
DIALECTS: dict[str, Dialect] = {
    "neox": Dialect(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        "GPTNeoXModel",
        _LATER_KEYS
        | {
            "activation": ("hidden_act", "gelu"),
            "attention_bias": ("attention_bias", True),
            "parallel_residual": ("use_parallel_residual", True),
            "norm_eps": ("layer_norm_eps", 1e-5),
        },
    ),
    "llama": Dialect(
        "llama",
        "LlamaForCausalLM",
        "LlamaModel",
        _LATER_KEYS
        | {
            "num_kv_heads": ("num_key_value_heads", None),
            "activation": ("hidden_act", "silu"),
            "attention_bias": ("attention_bias", False),
            "mlp_bias": ("mlp_bias", False),
            "norm_eps": ("rms_norm_eps", 1e-6),
        },
    ),
    "gpt3": Dialect(
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Model",
        _SHARED_KEYS
        | {
            "num_layers": ("n_layer", _REQUIRED),
            "hidden_size": ("n_embd", _REQUIRED),
            "num_heads": ("n_head", _REQUIRED),
            "ffn_hidden_size": ("n_inner", None),
            "seq_len": ("n_positions", 1024),
            "activation": ("activation_function", "gelu_new"),
            "tied_embeddings": ("tie_word_embeddings", True),
            "norm_eps": ("layer_norm_epsilon", 1e-5),
        },
        {
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    ),
}
# transformers has three names for GELU by tanh, which differ only in speed.
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
_THEIR_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "silu": "silu"}


@dataclass(frozen=True)
class SourceConfig:
    """A config.json that we can represent."""

    model: ModelConfig
    architecture: str  # the model's class in transformers
    bos_token_id: int | None  # token at the beginning of a text, if known
    eos_token_id: int | list[int] | None  # token at its end; some models have several


def read_config(directory: Path) -> tuple[SourceConfig | None, list[str]]:
    """Returns a model's config.json, None if it has faults, and one line per fault."""
    try:
        values = json.loads(read_limited(directory / CONFIG))
    except FileNotFoundError:
        return None, [f"{CONFIG}: is missing; is this the folder of a Hugging Face model?"]
    except OSError as error:
        return None, [f"{CONFIG}: cannot be read: {error.strerror or error}"]
    except (ValueError, RecursionError) as error:  # untrusted: nested too deeply, not UTF-8
        return None, [f"{CONFIG}: is not JSON: {error}; fetch it again"]
    if not isinstance(values, dict):
        return None, [f"{CONFIG}: holds no mapping of settings; fetch it again"]
    family, faults = _find_family(values)
    if family is None:
        return None, faults
    dialect = DIALECTS[family]
    faults += _unsupported(values, dialect)
    fields, found = _model_fields(values, family)
    faults += found
    model: ModelConfig | None = None
    if not found:
        try:
            model = ModelConfig.model_validate(fields)
            faults += config_faults(model)
        except ValidationError as error:
            for one in error.errors():
                name = str(one["loc"][0]) if one["loc"] else "family"
                key = dialect.keys.get(name, (name, None))[0]
                faults.append(f"{key}: {one['input']!r}: {one['msg']}")
    bos, eos = values.get("bos_token_id"), values.get("eos_token_id")
    for key, value in (("bos_token_id", bos), ("eos_token_id", eos)):
        several = value if isinstance(value, list) and key == "eos_token_id" else [value]
        # type() and not isinstance(): True is an int.
        if value is not None and any(type(one) is not int for one in several):
            faults.append(f"{key}: must be the number of a token, not {value!r}")
    if faults or model is None:
        return None, faults
    architecture = (values.get("architectures") or [dialect.causal])[0]
    return SourceConfig(model, architecture, bos, eos), []


def _find_family(values: Mapping[str, Any]) -> tuple[str | None, list[str]]:
    """Returns the family that architectures and model_type agree on, and one line per fault."""
    model_type, architectures = values.get("model_type"), values.get("architectures") or []
    known = ", ".join(dialect.causal for dialect in DIALECTS.values())
    if not isinstance(architectures, list) or not (architectures or model_type):
        return None, [f"architectures: must name the model's class; known are {known}"]
    by_type = [name for name, d in DIALECTS.items() if d.model_type == model_type]
    by_class = [
        name for name, d in DIALECTS.items() if {d.causal, d.base} & {*map(str, architectures)}
    ]
    faults = []
    if model_type is not None and not by_type:
        types = ", ".join(d.model_type for d in DIALECTS.values())
        faults.append(f"model_type: {model_type!r} is not known; known are {types}")
    if architectures and not by_class:
        faults.append(
            f"architectures: {', '.join(map(str, architectures))} is not known; known are {known}"
        )
    if by_type and by_class and by_type != by_class:
        faults.append(
            f"model_type: {model_type!r} is not that of {', '.join(map(str, architectures))}; "
            f"that is {DIALECTS[by_class[0]].model_type!r}"
        )
    return (None if faults else (by_class or by_type)[0]), faults


def _unsupported(values: Mapping[str, Any], dialect: Dialect) -> list[str]:
    """Returns one line for each setting that changes the model in a way our decoder lacks."""
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
    """Returns the fields of our model section, not yet validated, and one line per fault."""
    dialect = DIALECTS[family]
    fields: dict[str, Any] = {"family": family}
    faults = []
    for name, (key, default) in dialect.keys.items():
        if key not in values and default is _REQUIRED:
            faults.append(f"{key}: is missing")
        fields[name] = values.get(key, default)
    activation = fields["activation"]
    fields["activation"] = _ACTIVATIONS.get(str(activation))
    if fields["activation"] is None:
        key = dialect.keys["activation"][0]
        faults.append(f"{key}: {activation!r} is not known; known are {', '.join(_ACTIVATIONS)}")
    hidden, heads = fields["hidden_size"], fields["num_heads"]
    if family == "gpt3" and fields["ffn_hidden_size"] is None and isinstance(hidden, int):
        fields["ffn_hidden_size"] = 4 * hidden
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        head_dim = values.get("head_dim")
        if head_dim is not None and (type(head_dim) is not int or head_dim * heads != hidden):
            faults.append(
                f"head_dim: {head_dim!r} times {heads} heads is not the hidden size {hidden}; "
                f"only {hidden / heads:g} is supported"
            )
    if FAMILIES[family].positions == "rotary":
        rotary, found = _rotary_fields(values, family)
        fields.update(rotary)
        faults += found
    return fields, faults


def _rotary_fields(values: Mapping[str, Any], family: str) -> tuple[dict[str, Any], list[str]]:
    faults = []
    rope: dict[str, Any] = {}  # version 5 has the settings in rope_parameters, 4 at the top level
    for key in ("rope_scaling", "rope_parameters"):
        inner = values.get(key) or {}
        if not isinstance(inner, Mapping):
            faults.append(f"{key}: must be a mapping, not {inner!r}")
            continue
        kind = inner.get("rope_type", inner.get("type", "default"))
        if kind != "default":
            faults.append(
                f"{key}: positions scaled by {kind!r} are not supported; only 'default' is"
            )
        rope.update({name: value for name, value in inner.items() if value is not None})

    def first(keys: tuple[str, ...], default: Any) -> Any:
        found = (source.get(key) for source in (rope, values) for key in keys)
        return next((value for value in found if value is not None), default)

    default_pct = FAMILIES[family].defaults["rotary_pct"]
    fields = {
        "rotary_pct": first(("partial_rotary_factor", "rotary_pct"), default_pct),
        "rotary_base": first(("rope_theta", "rotary_emb_base"), 10000.0),
    }
    return fields, faults


def config_faults(model: ModelConfig) -> list[str]:
    """Returns one line for each reason why transformers' model of the family cannot be this one."""
    return list(broken_rules({f"model.{k}": v for k, v in model.model_dump().items()}))


def write_config(
    model: ModelConfig,
    path: Path,
    *,
    dtype: str,
    bos_token_id: int | None,
    eos_token_id: int | list[int] | None,
) -> None:
    """Writes a config.json; `dtype` is the weights' type by torch's name (`bfloat16`)."""
    dialect = DIALECTS[model.family]
    values: dict[str, Any] = {"architectures": [dialect.causal], "model_type": dialect.model_type}
    values.update({key: getattr(model, name) for name, (key, _) in dialect.keys.items()})
    values[dialect.keys["activation"][0]] = _THEIR_ACTIVATIONS[model.activation]
    # Dropouts are written as 0: some configuration classes default to more.
    if model.family == "neox":
        values.update(rotary_pct=model.rotary_pct, rotary_emb_base=model.rotary_base)
        values.update(attention_dropout=0.0, hidden_dropout=0.0)
    if model.family == "llama":
        values.update(num_key_value_heads=model.kv_heads, head_dim=model.head_dim)
        values.update(rope_theta=model.rotary_base, attention_dropout=0.0)
    if FAMILIES[model.family].positions == "rotary":
        values["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": model.rotary_base,
            "partial_rotary_factor": model.rotary_pct,
        }
    if model.family == "gpt3":
        values.update(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    # Written even if None: otherwise transformers takes the ids of its own tokenizers.
    values.update(bos_token_id=bos_token_id, eos_token_id=eos_token_id)
    values.update(torch_dtype=dtype, use_cache=True)
    path.write_text(json.dumps(dict(sorted(values.items())), indent=2) + "\n", encoding="utf-8")
