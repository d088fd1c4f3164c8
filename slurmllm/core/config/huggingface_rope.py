"""Rotary positions of a Hugging Face config.json; no torch.

Version 4 of transformers has them at the top level and in `rope_scaling`, version 5 in
`rope_parameters`; both prefer `rope_scaling` (5.24, modeling_rope_utils.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmllm.core.config.families import Family
from slurmllm.core.config.recipe import SCALING_FIELDS, RopeScaling
from slurmllm.core.config.yaml_source import Values

# Keys besides a scaling's fields; `finetuned` is a note of the first YaRN models.
_SETTING_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
_SCALING_KEYS = {*_SETTING_KEYS, *RopeScaling.model_fields}
# transformers takes 0 as left out.
_ZERO_IS_NONE = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def rope_fields(values: Values, family: Family, faults: list[str]) -> Values:
    """Return rotary_pct, rotary_base and rope_scaling of our model section, not yet validated."""
    rope: Mapping[str, Any] = {}
    key = ""
    for name in ("rope_parameters", "rope_scaling"):
        inner = values.get(name) or {}
        if not isinstance(inner, Mapping):
            faults.append(f"{name}: must be a mapping, not {inner!r}")
        elif inner:
            rope = inner
            key = name
    settings = {k: v for k, v in (*values.items(), *rope.items()) if v is not None}
    longest = values.get(*family.hugging_face.keys["seq_len"])
    pct = settings.get("rotary_pct", family.defaults["rotary_pct"])
    return {
        "rotary_pct": settings.get("partial_rotary_factor", pct),
        "rotary_base": settings.get("rope_theta", settings.get("rotary_emb_base", 10000.0)),
        "rope_scaling": _scaling(key, rope, values, longest, faults),
    }


def _scaling(
    key: str, rope: Mapping[str, Any], values: Values, longest: Any, faults: list[str]
) -> Values | None:
    """Return the fields of `RopeScaling`, None for unscaled positions.

    `longest` is the number of tokens in the longest text.
    """
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    faults += [
        f"{key}.{name}: {value!r} is not known for {kind!r}; remove it if it has no effect"
        for name, value in rope.items()
        if name not in _SCALING_KEYS and value is not None and kind in ("default", *SCALING_FIELDS)
    ]
    if kind == "default":
        return None
    if kind not in SCALING_FIELDS:
        known = ", ".join(map(repr, ("default", *SCALING_FIELDS)))
        faults.append(f"{key}: positions scaled by {kind!r} are not supported; known are {known}")
        return None
    kind_fields = SCALING_FIELDS[kind]
    scaling = {name: rope[name] for name in kind_fields if rope.get(name) is not None}
    for name in _ZERO_IS_NONE:
        if scaling.get(name) == 0:
            del scaling[name]
    if not {"mscale", "mscale_all_dim"} <= scaling.keys():  # without effect
        scaling.pop("mscale", None)
        scaling.pop("mscale_all_dim", None)
    name = "original_max_position_embeddings"
    if name in kind_fields:
        scaling[name] = values.get(name) or scaling.get(name) or longest
        lengths = (longest, scaling[name])
        if (
            kind == "yarn"
            and "factor" not in scaling
            and all(type(n) is int and n for n in lengths)
        ):
            scaling["factor"] = lengths[0] / lengths[1]
    return {"kind": kind, **scaling}


def rope_settings(base: float, pct: float, scaling: RopeScaling | None) -> Values:
    """Return `rope_parameters` of version 5; `rope_scaling` of version 4 is a part of it."""
    return {
        "rope_type": "default",
        "rope_theta": base,
        "partial_rotary_factor": pct,
        **scaling_settings(scaling),
    }


def scaling_settings(scaling: RopeScaling | None) -> Values:
    if scaling is None:
        return {}
    settings = scaling.model_dump()
    settings["rope_type"] = settings.pop("kind")
    return settings
