"""`parallel: auto`: the planner's choice of the degrees that a recipe leaves open; torch-free."""

from __future__ import annotations

from dataclasses import replace

from slurmllm.config.resolve import PLANNER, RunConfig
from slurmllm.errors import ConfigError
from slurmllm.plan.explain import why_too_large
from slurmllm.plan.mesh import measures_micro_batch
from slurmllm.plan.search import VARIED, SearchResult, Unsupported, search
from slurmllm.plan.suggestions import layout_text, suggest_fixes

DEGREES = tuple(path for path in VARIED if path.startswith("parallel."))
_MICRO_BATCH, _CHECKPOINTING = "train.micro_batch", "train.activation_checkpointing"
_REASONS = 3  # the most that are named of those that ruled layouts out


def choose_parallel(config: RunConfig, nodes: int, unsupported: Unsupported) -> RunConfig:
    """Choose what `parallel.auto` leaves open: the fastest layout that fits.

    Args:
        config: With `parallel.auto`; degrees that somebody set stay.
        nodes: Of the train stage.
        unsupported: As for `search`.

    Returns:
        The configuration with all degrees and without `auto`; the sources say what was chosen.
        The micro batch is chosen too where it is `auto` and nothing can measure it.

    Raises:
        ConfigError: nothing fits, or the profile says nothing of its hardware.
    """
    fixed = [path for path in DEGREES if config.is_set(path)] + fixed_training(config)
    found = search(config, nodes, unsupported, fixed)
    if not found.fitting:
        raise ConfigError(
            f"no layout of {config.recipe.name} fits {_nodes(nodes)} of {config.cluster.name}",
            [*_nearest(found), *suggest_fixes(config, nodes, unsupported, fixed)],
        )
    return _settled(config, found, fixed)


def fixed_training(config: RunConfig) -> list[str]:
    """The training settings that the planner leaves as they are.

    A micro batch that is `auto`, or that the planner chose for another mesh, is not one of them.
    """
    chosen = config.origins.get(_MICRO_BATCH, "").startswith(PLANNER)
    free = config.recipe.train.micro_batch == "auto" or chosen
    return [_CHECKPOINTING] if free else [_CHECKPOINTING, _MICRO_BATCH]


def _settled(config: RunConfig, found: SearchResult, fixed: list[str]) -> RunConfig:
    recipe, chosen = config.recipe, found.fitting[0].config.recipe
    asked = config.origins.get("parallel.auto", "default")
    how = f"{PLANNER}best of {len(found.fitting)} layouts that fit {_nodes(found.nodes)}"
    origins = {
        **config.origins,
        **{path: how for path in DEGREES if path not in fixed},
        "parallel.auto": f"{PLANNER}settled; auto by {asked}",
    }
    train = recipe.train
    if _MICRO_BATCH not in fixed and not measures_micro_batch(config):
        train = train.model_copy(update={"micro_batch": chosen.train.micro_batch})
        origins[_MICRO_BATCH] = how
    parallel = chosen.parallel.model_copy(update={"auto": False})
    settled = recipe.model_copy(update={"parallel": parallel, "train": train})
    return replace(config, recipe=settled, origins=origins)


def _nearest(found: SearchResult) -> list[str]:
    """The layout that lacks the least memory; where there is none, why there is none."""
    if not found.too_large:
        reasons, total = list(found.refused.items())[:_REASONS], sum(found.refused.values())
        return [f"{reason} ({count} of {total} layouts)" for reason, count in reasons]
    nearest = found.too_large[0]
    return [f"the nearest, {layout_text(nearest)}, needs {why_too_large(nearest.memory)}"]


def _nodes(count: int) -> str:
    return f"{count} {'node' if count == 1 else 'nodes'}"
