"""The model families; torch-free.

`FAMILIES` holds what each is and what a recipe may leave to it; `sharding_plan` maps a family's
matrices to their tensor-parallel sharding. The decoder, the backends, the planner and the
conversion of checkpoints read both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

from slurmllm.core import plugins
from slurmllm.core.config.families.family import CHOSEN as CHOSEN
from slurmllm.core.config.families.family import EXTRAS as EXTRAS
from slurmllm.core.config.families.family import Activation as Activation
from slurmllm.core.config.families.family import Family as Family
from slurmllm.core.config.families.family import Sharding as Sharding
from slurmllm.core.config.families.family import gate_block as gate_block
from slurmllm.core.config.families.gemma3 import GEMMA3
from slurmllm.core.config.families.gpt3 import GPT3
from slurmllm.core.config.families.llama import LLAMA, MISTRAL
from slurmllm.core.config.families.nanochat import NANOCHAT
from slurmllm.core.config.families.neox import NEOX
from slurmllm.core.config.families.olmo3 import OLMO3
from slurmllm.core.config.families.qwen3 import QWEN3
from slurmllm.core.config.families.smollm3 import SMOLLM3
from slurmllm.core.errors import ConfigError

FAMILIES: dict[str, Family] = {}


def register(family: Family) -> None:
    """Make a family known by its name; raise ValueError if its name or defaults are wrong."""
    missing = [name for name in CHOSEN if name not in family.defaults]
    fault = ""
    if FAMILIES.get(family.name, family) is not family:
        fault = "already registered; rename one of them"
    elif missing:
        fault = f"no default of {', '.join(missing)}"
    elif family.norm_weight == "one_plus" and family.norm != "rms":
        fault = "norm_weight one_plus is only for RMSNorm; set norm=rms"
    elif family.qk_norm_over == "vector" and family.norm_weight != "plain":
        fault = "a norm of all heads together has a plain weight; set norm_weight=plain"
    if fault:
        raise ValueError(f"model family {family.name!r}: {fault}")
    FAMILIES[family.name] = family


for _family in (NEOX, LLAMA, GPT3, QWEN3, MISTRAL, SMOLLM3, OLMO3, GEMMA3, NANOCHAT):
    register(_family)
BUILT_IN = frozenset(FAMILIES)


def find_family(name: str, modules: Sequence[str] = ()) -> Family | None:
    """Return a family, of another package too, which is imported at first; None if unknown.

    Args:
        modules: The recipe's `plugins`.

    Raises:
        ConfigError: The family's module cannot be imported, or what it holds is not a family.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    if not plugins.is_known("models", name):
        plugins.import_modules(modules)
        if not plugins.is_known("models", name):
            return None
    family = plugins.find("models", name, "model.family")
    if not isinstance(family, Family) or family.name != name:
        raise ConfigError(
            f"model.family: {name!r} is {family!r}, and must be a Family of this name"
        )
    try:
        register(family)
    except ValueError as error:
        raise ConfigError(f"model.family: {error}") from error
    return family


def _known(name: str) -> str:
    try:
        family = find_family(name)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    if family is None:
        names = list(map(repr, FAMILIES))
        raise ValueError(
            f"must be {', '.join(names[:-1])} or {names[-1]}, or a family of an installed package "
            "or of a module in plugins"
        )
    return name


FamilyName = Annotated[str, AfterValidator(_known)]

_BLOCK: dict[str, Sharding] = {
    "attention_norm": "sequence",
    "attention.qkv": "column",
    "attention.q_norm": "head",
    "attention.k_norm": "head",
    "attention.out": "row",
    "attention_out_norm": "sequence",
    "mlp_norm": "sequence",
    "mlp.up": "column",
    "mlp.gate_up": "column",
    "mlp.down": "row",
    "mlp_out_norm": "sequence",
}
_QK_NORMS = ("attention.q_norm", "attention.k_norm")
# Family's `norm_places` → the norms that its blocks have.
BLOCK_NORMS = {
    "before": ("attention_norm", "mlp_norm"),
    "after": ("attention_out_norm", "mlp_out_norm"),
    "both": ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"),
}


@dataclass(frozen=True)
class ShardingPlan:
    """Module name → how tensor parallelism shares its parameters, in the order of the modules."""

    block: Mapping[str, Sharding]  # names inside a decoder layer, whatever its number
    outside: Mapping[str, Sharding]  # names outside the layers


def sharding_plan(family: str, tied_embeddings: bool, qk_norm: bool) -> ShardingPlan:
    """Return the one sharding plan of a family, for every backend.

    Biases of column-parallel modules are shared with their rows; those of row-parallel ones are
    whole on every worker and are added once, after the sum.
    """
    kind = FAMILIES[family]
    absent = {"mlp.up" if kind.gated else "mlp.gate_up"}
    absent |= {*BLOCK_NORMS["both"]} - {*BLOCK_NORMS[kind.norm_places]}
    if not qk_norm:
        absent.update(_QK_NORMS)
    block = {name: how for name, how in _BLOCK.items() if name not in absent}
    if kind.qk_norm_over == "vector":
        block |= {name: "heads" for name in _QK_NORMS if name in block}
    outside: dict[str, Sharding] = {"embed": "vocabulary"}
    if kind.positions == "learned":
        outside["positions"] = "vocabulary"
    if kind.embedding_norm:
        outside["embedding_norm"] = "sequence"
    outside["final_norm"] = "sequence"
    if not tied_embeddings:
        outside["head"] = "vocabulary"
    return ShardingPlan(block, outside)
