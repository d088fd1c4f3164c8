"""Attention in a Hugging Face config.json: rotary positions, windows, kinds of layers; no torch.

Version 4 of transformers has rotary positions at the top level and in `rope_scaling`, version 5 in
`rope_parameters`, for some models by type of layer; both prefer `rope_scaling` (5.24,
modeling_rope_utils.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from slurmllm.core.config.families import FAMILIES, Family
from slurmllm.core.config.families.family import LayerKeys
from slurmllm.core.config.operation import LARGEST
from slurmllm.core.config.recipe import (
    FULL_ATTENTION,
    SCALING_FIELDS,
    LayerAttention,
    ModelConfig,
    RopeScaling,
)
from slurmllm.core.config.yaml_source import Values, without_nulls

# Keys besides a scaling's fields; `finetuned` is a note of the first YaRN models.
_SCALING_KEYS = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "finetuned",
    *RopeScaling.model_fields,
}
_KINDS: dict[str, Values] = {"default": {}, **SCALING_FIELDS}
_FULL = "full_attention"
_SLIDING = "sliding_attention"
_TYPES = (_SLIDING, _FULL)


class Rope(NamedTuple):
    """Rotary positions of a type of layer, not yet validated."""

    base: Any
    pct: Any
    scaling: Values | None


def attention_fields(values: Values, family: Family, count: Any, faults: list[str]) -> Values:
    """Return the fields of our model section about attention, not yet validated.

    `count` is the number of layers.
    """
    dialect = family.hugging_face
    layers: list[Values] = []
    if type(count) is int:
        count = min(count, 100_000)
        if dialect.layers is not None:
            layers = _layers(values, dialect.layers, count, faults)
        elif "use_sliding_window" in dialect.fixed and any(
            _flags(values, "layer_types", 1, _TYPES, count, faults)
        ):
            faults.append(f"layer_types: {_SLIDING} needs use_sliding_window; set {_FULL}")
    if family.positions != "rotary":
        return {"attention_pattern": layers}
    types = {_SLIDING if layer["window"] else _FULL for layer in layers} or {_FULL}
    ropes = _ropes(values, family, types, faults)
    # Scaled ones are the model's: a layer's own have only a base.
    scaled = [rope for rope in ropes.values() if rope.scaling is not None]
    if any(rope != scaled[0] for rope in scaled):
        faults.append("rope_parameters: only one type of layers may have scaled positions")
    shared = (scaled or [*ropes.values()])[0]
    for layer in layers:
        rope = ropes.get(_SLIDING if layer["window"] else _FULL, shared)
        if layer["rope"] is None and rope != shared:
            layer["rope"] = rope.base
    return {
        "attention_pattern": layers,
        "rotary_pct": next((rope.pct for rope in ropes.values() if rope.pct != 1), shared.pct),
        "rotary_base": shared.base,
        "rope_scaling": shared.scaling,
    }


def _layers(values: Values, keys: LayerKeys, count: int, faults: list[str]) -> list[Values]:
    """Return window and rope of each layer."""
    types = values.get("layer_types")
    window = values.get("sliding_window", keys.window)
    if window is not None and (type(window) is not int or window < 1):
        faults.append(f"sliding_window: {window!r} is not a number of tokens")
        return []
    rotated = windowed = [True for _ in range(count)]
    if keys.unrotated_every:
        every = values.get("no_rope_layer_interval", keys.unrotated_every)
        rotated = _flags(values, "no_rope_layers", every, (1, 0), count, faults)
        windowed = [not flag for flag in rotated]
        if not values.get("use_sliding_window", False):
            window = None
    if keys.full_every or (keys.unrotated_every and types is not None):
        every = values.get("sliding_window_pattern", keys.full_every)
        windowed = _flags(values, "layer_types", every, _TYPES, count, faults)
        if window is None and any(windowed):
            faults.append(f"layer_types: {_SLIDING} needs a sliding_window, which is not set")
        if types is None and values.get("_sliding_window_pattern", every) != every:
            faults.append("_sliding_window_pattern: is not read; set sliding_window_pattern")
    elif window is not None and types not in (None, [_SLIDING for _ in range(count)]):
        faults.append(
            f"layer_types: all layers have the sliding_window {window}; set it to null, or remove "
            "layer_types"
        )
    return [
        {"window": window if has_window else None, "rope": None if has_rope else "none"}
        for has_window, has_rope in zip(windowed, rotated, strict=False)
    ]


def _flags(
    values: Values, key: str, every: Any, names: tuple[Any, Any], count: int, faults: list[str]
) -> list[bool]:
    """Return for each layer whether its type is `names[0]`; by default all but every `every`-th."""
    stored = values.get(key)
    if stored is None and type(every) is int and every > 0:
        return [number % every != 0 for number in range(1, count + 1)]
    if stored is None:
        faults.append(f"{key}: is missing, and the interval is {every!r}; set a number above 0")
    elif not isinstance(stored, list) or len(stored) < count:
        faults.append(f"{key}: must be a list with {names[0]} or {names[1]} of {count} layers")
    elif unknown := [name for name in stored if name not in names]:
        faults.append(f"{key}: {unknown[0]!r} is not supported; only {names[0]} and {names[1]} are")
    else:
        return [name == names[0] for name in stored[:count]]
    return []


def _ropes(values: Values, family: Family, types: set[str], faults: list[str]) -> dict[str, Rope]:
    """Return the rotary positions of the types of layers, "" for those of all."""
    values = without_nulls(values)
    dialect = family.hugging_face
    bases = dialect.rope_bases
    longest = values.get(*dialect.keys["seq_len"])
    parameters = _mapping(values, "rope_parameters", faults)
    scaling = _mapping(values, "rope_scaling", faults)
    if "" not in bases:
        faults += [
            f"rope_parameters.{name}: is not a type of layer; give {' and '.join(bases)} a mapping"
            for name in parameters
            if name not in bases
        ]
    ropes = {}
    for name in [name for name in bases if name in types] or [""]:
        key, default = bases[name]
        path = f"rope_parameters.{name}".rstrip(".")
        settings = _mapping(parameters, name, faults) if name else parameters
        if scaling and name != _SLIDING:
            path = "rope_scaling"
            settings = {**settings, **scaling} if name else scaling
        pct = values.get("rotary_pct", family.defaults["rotary_pct"])
        pct = {**values, **settings}.get("partial_rotary_factor", pct)
        base = settings.get("rope_theta")
        if base is None and not key and values.get("rope_theta", default) != default:
            faults.append(
                f"rope_theta: {values['rope_theta']!r} is for all layers in version 4 of "
                "transformers, in version 5 not for those with a window; set rope_parameters"
            )
        if base is None:
            base = values.get(key, values.get("rotary_emb_base", default))
        ropes[name] = Rope(base, pct, _scaling(path, settings, values, longest, faults))
    return ropes


def _mapping(values: Values, key: str, faults: list[str]) -> Values:
    value = values.get(key) or {}
    if isinstance(value, dict):
        return without_nulls(value)
    faults.append(f"{key}: must be a mapping, not {value!r}")
    return {}


def _scaling(
    key: str, rope: Values, values: Values, longest: Any, faults: list[str]
) -> Values | None:
    """Return the fields of `RopeScaling`, None for unscaled positions.

    `longest` is the number of tokens in the longest text.
    """
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    kind_fields = _KINDS.get(kind)
    if kind_fields is None:
        names = ", ".join(map(repr, _KINDS))
        faults.append(f"{key}: positions scaled by {kind!r} are not supported; known are {names}")
        return None
    faults += [
        f"{key}.{name}: {value!r} is not known for {kind!r}; remove it if it has no effect"
        for name, value in rope.items()
        if name not in _SCALING_KEYS
    ]
    if not kind_fields:
        return None
    # transformers takes 0 as left out, but not false.
    scaling = {n: rope[n] for n in kind_fields if rope.get(n) or rope.get(n) is False}
    if not {"mscale", "mscale_all_dim"} <= scaling.keys():  # without effect
        scaling.pop("mscale", None)
        scaling.pop("mscale_all_dim", None)
    name = "original_max_position_embeddings"
    if name in kind_fields:
        scaling[name] = values.get(name) or scaling.get(name) or longest
        original = scaling[name]
        are_lengths = type(longest) is type(original) is int and longest and original
        if kind == "yarn" and "factor" not in scaling and are_lengths:
            # Other lengths, which may overflow, are faults of their own.
            scaling["factor"] = min(abs(longest), LARGEST) / original
    return {"kind": kind, **scaling}


def attention_settings(model: ModelConfig) -> Values:
    """Return the settings of a model about attention, for versions 4 and 5."""
    dialect = FAMILIES[model.family].hugging_face
    kinds = model.layer_kinds
    settings = _layer_settings(dialect.layers, kinds) if dialect.layers else {}
    if FAMILIES[model.family].positions != "rotary":
        return settings
    parameters = {}
    for name, (key, _) in dialect.rope_bases.items():
        same_type = (kind for kind in kinds if (kind.window is not None) == (name == _SLIDING))
        base, scaling = model.rotary_scheme(next(same_type, FULL_ATTENTION))
        scaled = {}
        if scaling is not None:
            scaled = scaling.model_dump()
            scaled["rope_type"] = scaled.pop("kind")
        parameters[name] = {
            "rope_type": "default",
            "rope_theta": base,
            "partial_rotary_factor": model.rotary_pct,
            **scaled,
        }
        if name and key:
            settings[key] = base
        if scaled and name != _SLIDING:
            settings["rope_scaling"] = scaled
    settings["rope_parameters"] = parameters.get("", parameters)
    return settings


def _layer_settings(keys: LayerKeys, kinds: Sequence[LayerAttention]) -> Values:
    window = next((kind.window for kind in kinds if kind.window is not None), None)
    if keys.full_every and window is None:  # transformers' mask needs one all the same
        window = keys.window
    settings: Values = {"sliding_window": window}
    if keys.full_every or keys.unrotated_every:
        settings["layer_types"] = [_FULL if kind.window is None else _SLIDING for kind in kinds]
    if keys.unrotated_every:
        settings["no_rope_layer_interval"] = keys.unrotated_every
        settings["no_rope_layers"] = [int(kind.rope != "none") for kind in kinds]
        settings["use_sliding_window"] = window is not None
    return settings
