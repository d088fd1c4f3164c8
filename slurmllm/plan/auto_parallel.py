"""`parallel: auto`: the planner chooses the degrees that a recipe leaves open; torch-free."""

from __future__ import annotations

from dataclasses import replace

from slurmllm.config.resolve import PLANNER, RunConfig
from slurmllm.errors import ConfigError
from slurmllm.format import format_plural
from slurmllm.plan.explain import why_too_large
from slurmllm.plan.mesh import measures_micro_batch
from slurmllm.plan.search import VARIED, Unsupported, search
from slurmllm.plan.suggestions import layout_text, suggest_fixes

DEGREES = tuple(path for path in VARIED if path.startswith("parallel."))
_MICRO_BATCH, _CHECKPOINTING = "train.micro_batch", "train.activation_checkpointing"
_MAX_REASONS = 3  # reasons against layouts that an error names


def choose_parallel(config: RunConfig, nodes: int, unsupported: Unsupported) -> RunConfig:
    """Choose the degrees that `parallel.auto` leaves open: those of the fastest layout that fits.

    Args:
        config: A configuration with `parallel.auto`; degrees that are set are kept.
        nodes: Nodes of the train stage.
        unsupported: As for `search`.

    Returns:
        The configuration with all degrees set and without `auto`; the origins name the planner. A
        micro batch of `auto` is chosen too if the device cannot measure it.

    Raises:
        ConfigError: nothing fits, or the profile has no hardware figures.
    """
    fixed = [path for path in DEGREES if config.is_set(path)] + fixed_training(config)
    found = search(config, nodes, unsupported, fixed)
    where = format_plural(nodes, "node")
    if not found.fitting:
        if found.too_large:
            smallest = found.too_large[0]
            why = [f"the nearest, {layout_text(smallest)}, needs {why_too_large(smallest.memory)}"]
        else:
            total = sum(found.refused.values())
            reasons = list(found.refused.items())[:_MAX_REASONS]
            why = [f"{reason} ({count} of {total} layouts)" for reason, count in reasons]
        raise ConfigError(
            f"no layout of {config.recipe.name} fits {where} of {config.cluster.name}",
            [*why, *suggest_fixes(config, nodes, unsupported, fixed)],
        )
    recipe, best = config.recipe, found.fitting[0].config.recipe
    requested = config.origins.get("parallel.auto", "default")
    source = f"{PLANNER}best of {len(found.fitting)} layouts that fit {where}"
    origins = {
        **config.origins,
        **{path: source for path in DEGREES if path not in fixed},
        "parallel.auto": f"{PLANNER}resolved; auto by {requested}",
    }
    train = recipe.train
    if _MICRO_BATCH not in fixed and not measures_micro_batch(config):
        train = train.model_copy(update={"micro_batch": best.train.micro_batch})
        origins[_MICRO_BATCH] = source
    parallel = best.parallel.model_copy(update={"auto": False})
    resolved = recipe.model_copy(update={"parallel": parallel, "train": train})
    return replace(config, recipe=resolved, origins=origins)


def fixed_training(config: RunConfig) -> list[str]:
    """The training settings that the planner does not vary.

    A micro batch that is `auto`, or that the planner chose for another mesh, is varied.
    """
    chosen = config.origins.get(_MICRO_BATCH, "").startswith(PLANNER)
    free = config.recipe.train.micro_batch == "auto" or chosen
    return [_CHECKPOINTING] if free else [_CHECKPOINTING, _MICRO_BATCH]
