"""`submit --smoke`: a recipe shortened to a few steps, with a schedule in proportion."""

from __future__ import annotations

from typing import Any

from slurmllm.config.resolve import RunConfig, change
from slurmllm.errors import ConfigError

_STEPS = 20  # of --smoke
_SAVES = 2  # at most, and as many evaluations


def shorten(config: RunConfig, steps: int | None = None) -> RunConfig:
    """Return a configuration that trains `steps` steps, by default those of --smoke.

    Warm-up, decay, saves, evaluations and the profiled steps are scaled, except what --set fixes.

    Raises:
        ConfigError: --set fixes the steps, or what is impossible in so few; or the recipe has a
            command.
    """
    option = "--smoke" if steps is None else f"--steps {steps}"
    fix = "shorten it by its own arguments, and say so in command.steps"
    config.recipe.require_training(option, fix)
    if config.origins.get("train.steps", "").startswith("--set"):
        raise ConfigError(
            f"{option} and --set train.steps exclude each other; leave out train.steps"
        )
    steps, recipe, optim = steps or _STEPS, config.recipe, config.recipe.optim

    def scaled(step: int, least: int = 1) -> int:
        return max(least, round(step * steps / recipe.train.steps))

    every = max(1, steps // _SAVES)
    saves = recipe.checkpoint.every_steps
    values: dict[str, Any] = {
        "train.steps": steps,
        "checkpoint.every_steps": every
        if saves == "auto"
        else min(saves, max(scaled(saves), every)),
    }
    end = steps
    if optim.decay_steps is not None:
        values["optim.decay_steps"] = end = scaled(optim.decay_steps)
    if optim.warmup_steps:
        values["optim.warmup_steps"] = min(scaled(optim.warmup_steps), end - 1)
    if optim.decay_start is not None:
        start = scaled(optim.decay_start, values.get("optim.warmup_steps", optim.warmup(steps)))
        values["optim.decay_start"] = min(start, end if optim.decay_steps is None else end - 1)
    if recipe.eval.every_steps is not None:
        evaluations = recipe.eval.every_steps
        values["eval.every_steps"] = min(evaluations, max(scaled(evaluations), every))
    if recipe.profile.steps is not None and recipe.profile.steps[1] > steps:
        first, last = recipe.profile.steps
        values["profile.steps"] = (max(1, steps - (last - first)), steps)
    fixed = {path for path in values if config.origins.get(path, "").startswith("--set")}
    options = {path: (option, values[path]) for path in values if path not in fixed}
    return change(config, None, (), {**options, "train.steps": (option, steps)})
