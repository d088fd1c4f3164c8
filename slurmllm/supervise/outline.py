"""The few values of a run's configuration that a list of runs shows, read in a millisecond.

`config.resolve.load` validates every value and knows its origin, which takes 20 ms: of 200 runs
that is what `status` would take. What is odd here is left to `load` to name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import yaml

from slurmllm.config.resolve import RunConfig, load
from slurmllm.rundir import RunDir

# What comes of a tree that is not as `load` would have it.
_ODD = (LookupError, AttributeError, TypeError, ValueError)
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Outline:
    """What a run is.

    Attributes:
        recipe: Its recipe's name.
        steps: How many it is to train.
        usd_per_node_hour: By the cluster profile, on demand; None: it has no price.
    """

    recipe: str
    steps: int
    usd_per_node_hour: float | None


def outline(config: RunConfig) -> Outline:
    """The outline of a configuration that is loaded already."""
    price = config.cluster.price
    usd = price.on_demand if price is not None else None
    return Outline(config.recipe.name, config.recipe.train.steps, usd)


def read_outline(run: RunDir) -> Outline:
    """The outline of a run.

    Raises:
        ConfigError: its configuration is unreadable or no longer valid.
    """
    try:
        # The sources of the values, which nobody asks for here, are the longer half.
        tree = yaml.load(run.config.read_bytes().partition(b"\norigin:")[0], _Loader)
        price = tree["cluster"].get("price")
        name, steps = tree["name"], tree["train"]["steps"]
        usd = None if price is None else float(price["on_demand"])
    except (OSError, yaml.YAMLError, RecursionError, *_ODD):
        return outline(load(run.config))
    sound = type(name) is str and type(steps) is int and steps > 0
    if not sound or (usd is not None and not 0 < usd < math.inf):
        return outline(load(run.config))
    return Outline(name, steps, usd)
