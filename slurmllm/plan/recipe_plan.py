"""What `slurmllm plan` works out before it prints: layouts, the recipe's own, costs, scaling."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from slurmllm.backends.environment import load_environment
from slurmllm.config.resolve import RunConfig
from slurmllm.errors import ConfigError
from slurmllm.plan.cost import Cost, PriceKind, cost, node_price, scaling
from slurmllm.plan.estimate import LayoutEstimate
from slurmllm.plan.explain import describe, differs, why_too_large
from slurmllm.plan.loss_assumptions import losses
from slurmllm.plan.losses import Losses
from slurmllm.plan.mesh import make_mesh
from slurmllm.plan.predict import predict
from slurmllm.plan.search import LARGEST, VARIED, SearchResult, Unsupported, search, smallest_nodes


@dataclass(frozen=True)
class RecipeLayout:
    """The recipe's own layout on a number of nodes.

    Attributes:
        candidate: What is predicted of it; None where it cannot be made of these nodes.
        fault: Why it cannot.
    """

    candidate: LayoutEstimate | None
    fault: str = ""


@dataclass(frozen=True)
class NodePlan:
    """A recipe on a number of nodes.

    Attributes:
        plan: What the search found.
        written: The recipe's own layout; None where the recipe leaves it to the planner.
        fitting: All layouts that fit, the recipe's own among them, fastest first.
        too_large: Those that do not, the least memory first.
    """

    plan: SearchResult
    written: RecipeLayout | None
    fitting: tuple[LayoutEstimate, ...]
    too_large: tuple[LayoutEstimate, ...]

    @property
    def best(self) -> LayoutEstimate | None:
        """The fastest that fits."""
        return self.fitting[0] if self.fitting else None

    def rank(self, candidate: LayoutEstimate) -> int:
        """Of a layout that fits; 1 is the fastest."""
        return 1 + next(i for i, one in enumerate(self.fitting) if one is candidate)

    def is_written(self, candidate: LayoutEstimate) -> bool:
        """Whether a layout is the recipe's own."""
        return self.written is not None and candidate is self.written.candidate


@dataclass(frozen=True)
class TrainingForecast:
    """What the training costs on a layout.

    Attributes:
        cost: Time and dollars to the end; without losses where it never comes to one.
        losses: Of node hours, to failures, saves and start-ups; None where nothing is left of them.
        fault: Why nothing is.
    """

    cost: Cost
    losses: Losses | None
    fault: str = ""

    @property
    def hours(self) -> float | None:
        """Wall time to the end, losses included; None where it never comes."""
        return self.cost.hours if self.losses else None

    @property
    def usd(self) -> float | None:
        """Dollars to the end; None where it never comes, or no price is known."""
        return self.cost.usd if self.losses else None


class Forecaster:
    """Time, dollars and losses of layouts of one recipe.

    Args:
        config: The recipe's.
        price: Which of the profile's prices counts.
        tokens: To train on; None: the recipe's own steps.

    Raises:
        ConfigError: the profile does not have that price.
    """

    def __init__(self, config: RunConfig, price: PriceKind, tokens: int | None) -> None:
        self.usd_per_node_hour = node_price(config.cluster, price)
        self.tokens = tokens

    def of(self, candidate: LayoutEstimate) -> TrainingForecast:
        """To the end of the training."""
        price = self.usd_per_node_hour
        found = cost(candidate, self.tokens, price)
        try:
            lost = losses(candidate.config, candidate.mesh.nodes, candidate.step.total, found.steps)
        except ConfigError as error:
            return TrainingForecast(found, None, "; ".join(error.faults))
        return TrainingForecast(
            cost(candidate, self.tokens, price, lost.effective, lost.goodput), lost
        )

    def auto_steps(self, candidate: LayoutEstimate) -> int:
        """Steps between two checkpoints that `checkpoint.every_steps: auto` would choose."""
        config, nodes = candidate.config, candidate.mesh.nodes
        auto = config.recipe.checkpoint.model_copy(update={"every_steps": "auto"})
        changed = replace(config, recipe=config.recipe.model_copy(update={"checkpoint": auto}))
        return losses(changed, nodes, candidate.step.total).interval_steps


def fixed_settings(config: RunConfig) -> tuple[str, ...]:
    """Of what the planner varies, what --set fixes, or a recipe that says `parallel: auto`.

    A micro batch of `auto` is none: it is varied all the same.
    """
    recipe, auto = config.recipe, config.recipe.parallel.auto
    return tuple(
        path
        for path in VARIED
        if not (path == "train.micro_batch" and recipe.train.micro_batch == "auto")
        and (
            config.origins.get(path, "").startswith("--set")
            or (auto and path.startswith("parallel.") and config.is_set(path))
        )
    )


def _unsupported(config: RunConfig) -> Unsupported:
    return load_environment(config.backend).unsupported


def plan_nodes(config: RunConfig, nodes: int) -> NodePlan:
    """Predict every layout of a recipe on a number of nodes, and its own.

    Raises:
        ConfigError: no hardware figures.
    """
    found = search(config, nodes, _unsupported(config), fixed_settings(config))
    written = None if config.recipe.parallel.auto else _written(config, nodes, found)
    fitting, too_large = [*found.fitting], [*found.too_large]
    own = None if written is None else written.candidate
    if own is not None and not any(one is own for one in (*fitting, *too_large)):
        (fitting if own.fits else too_large).append(own)
        fitting.sort(key=lambda one: (-one.seq_per_s, one.memory.peak))
        too_large.sort(key=lambda one: one.memory.peak)
    return NodePlan(found, written, tuple(fitting), tuple(too_large))


def _written(config: RunConfig, nodes: int, found: SearchResult) -> RecipeLayout:
    try:
        mesh = make_mesh(config, nodes)
    except ConfigError as error:
        return RecipeLayout(None, "; ".join(error.faults) or error.title)
    reasons = _unsupported(config)(config)
    if reasons:
        return RecipeLayout(None, reasons[0])
    own = predict(config, mesh)
    leaves = {"micro_batch"} if mesh.unmeasured else set()
    alike = [one for one in (*found.fitting, *found.too_large) if differs(one, own) <= leaves]
    fits = [one for one in alike if one.fits]
    # The measurement chooses the fastest micro batch that fits.
    return RecipeLayout(max(fits or alike or [own], key=lambda one: one.seq_per_s))


def table_rows(planned: NodePlan, top: int) -> list[tuple[int, LayoutEstimate]]:
    """(rank, layout) of the rows of a table: the best of each mesh before others of the same mesh.

    Args:
        planned: With layouts that fit.
        top: Rows at most; the recipe's own layout comes on top of them.
    """
    ranked = list(enumerate(planned.fitting, 1))
    firsts: dict[tuple[int, int], int] = {}
    for rank, candidate in ranked:
        firsts.setdefault((candidate.mesh.tensor, candidate.mesh.pipeline), rank)
    order = sorted(ranked, key=lambda row: row[0] not in firsts.values())
    rows = order[:top] + [row for row in order[top:] if planned.is_written(row[1])]
    return sorted(rows, key=lambda row: row[0])


def nothing_fits(found: RecipePlan) -> ConfigError:
    """What to say where no layout fits on any of the node counts."""
    config, fixed = found.config, fixed_settings(found.config)
    counts = [one.plan.nodes for one in found.planned]
    title = (
        f"no layout of {config.recipe.name} fits on {', '.join(map(str, counts))} "
        f"node{'s' * (counts != [1])} of {config.cluster.name}"
    )
    nearest = [one.too_large[0] for one in found.planned if one.too_large]
    if nearest:
        closest = min(nearest, key=lambda one: one.memory.peak)
        faults = [f"the nearest: {describe(closest)}: {why_too_large(closest.memory)}"]
    else:
        faults = _impossible(found.planned[-1])
    enough = smallest_nodes(config, counts[-1], _unsupported(config), fixed)
    if enough is not None:
        # Where it is memory that lacks, fewer nodes lack more.
        least = "is the fewest that do" if nearest and enough > counts[-1] else "would do"
        return ConfigError(title, [*faults, f"--nodes: {enough} {least}"])
    freed = [f"leave {path} to the planner" for path in fixed]
    remedy = "; or ".join([*freed, "choose another --cluster"])
    return ConfigError(title, [*faults, f"no number of nodes up to {LARGEST} would do: {remedy}"])


def _impossible(planned: NodePlan) -> list[str]:
    """Why there is no layout to look at."""
    config = planned.plan.config
    if {"parallel.tensor", "parallel.pipeline"} <= set(fixed_settings(config)):
        try:
            make_mesh(config, planned.plan.nodes)
        except ConfigError as error:
            return list(error.faults)
    refused = most_refused(planned.plan.refused)
    return [f"{count} layout{'s' * (count != 1)}: {reason}" for reason, count in refused]


def most_refused(refused: Mapping[str, int], most: int = 4) -> list[tuple[str, int]]:
    """(reason, layouts) of the reasons that ruled out the most; alike but for numbers they are one.

    Args:
        refused: Reason → layouts.
        most: Rows, before one for all others.
    """
    alike: dict[str, list[tuple[str, int]]] = {}
    for reason, count in refused.items():
        alike.setdefault(re.sub(r"\d+", "#", reason), []).append((reason, count))
    rows = []
    for group in alike.values():
        more = f" (and {len(group) - 1} more like this)" if len(group) > 1 else ""
        rows.append((group[0][0] + more, sum(count for _, count in group)))
    rows.sort(key=lambda row: -row[1])
    rest = rows[most:]
    return rows[:most] + ([("other reasons", sum(count for _, count in rest))] if rest else [])


@dataclass(frozen=True)
class ScalingPoint:
    """A recipe's best layout on a number of nodes.

    Attributes:
        candidate: None where nothing fits.
        prospects: Likewise.
        efficiency: Throughput of a node, relative to that on the fewest nodes that hold the model.
    """

    recipe: str
    nodes: int
    candidate: LayoutEstimate | None
    prospects: TrainingForecast | None
    efficiency: float | None


@dataclass(frozen=True)
class RecipePlan:
    """One recipe on the node counts that were asked for.

    Attributes:
        config: The recipe's.
        foresight: Of its time and dollars.
        planned: By node count, ascending.
    """

    config: RunConfig
    foresight: Forecaster
    planned: tuple[NodePlan, ...]

    @property
    def fits(self) -> bool:
        """Whether some layout does, on some node count."""
        return any(one.fitting for one in self.planned)

    @property
    def warnings(self) -> list[str]:
        """What the figures are not to be trusted with."""
        hardware, name = self.config.cluster.hardware, self.config.cluster.name
        if hardware is None or not hardware.rough:
            return []
        return [
            f"the figures of profile {name} are a guess: `slurmllm plan --calibrate --cluster "
            f"{name} --out FILE.yaml` measures them, --cluster FILE.yaml plans with them"
        ]

    def points(self) -> list[ScalingPoint]:
        """The best layout on each node count."""
        fit = [(one.plan.nodes, one.best.seq_per_s) for one in self.planned if one.best]
        efficiency = dict(zip((nodes for nodes, _ in fit), scaling(fit), strict=True))
        return [
            ScalingPoint(
                self.config.recipe.name,
                one.plan.nodes,
                one.best,
                self.foresight.of(one.best) if one.best else None,
                efficiency.get(one.plan.nodes),
            )
            for one in self.planned
        ]


def plan_recipe(
    config: RunConfig, counts: Sequence[int], price: PriceKind, tokens: int | None
) -> RecipePlan:
    """Plan a recipe on each of some node counts.

    Args:
        config: The recipe's.
        counts: Ascending.
        price: Which of the profile's prices counts.
        tokens: To train on; None: the recipe's own steps.

    Raises:
        ConfigError: no hardware figures, or not that price.
    """
    foresight = Forecaster(config, price, tokens)
    return RecipePlan(config, foresight, tuple(plan_nodes(config, count) for count in counts))
