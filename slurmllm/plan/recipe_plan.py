"""The result of `slurmllm plan`: all layouts of a recipe on each node count, with time and cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import ConfigError, UserError
from slurmllm.core.format import Texts, format_plural
from slurmllm.plan.evidence import evidence
from slurmllm.plan.explain import (
    SettingSuggestion,
    differing_settings,
    explain,
    fitting_changes,
    memory_shortfall,
    misfit_reasons,
    why_too_large,
)
from slurmllm.plan.lost_time import LostTime, lost_time
from slurmllm.plan.memory import dense_mask_warning
from slurmllm.plan.mesh import make_mesh
from slurmllm.plan.prices import Cost, NodePrice, cost
from slurmllm.plan.search import (
    VARIED,
    LayoutEstimate,
    SearchResult,
    Unsupported,
    known_hardware,
    order,
    predict,
    search,
)

Rank = Literal["speed", "lower"]
_MOST_NODES = 65536


@dataclass(frozen=True)
class NodePlan(SearchResult):
    """All layouts of a recipe on one number of nodes, the recipe's own included."""

    nodes: int
    # The recipe's own layout; why it is impossible; None if the recipe leaves it to the planner.
    recipe_layout: LayoutEstimate | str | None
    nearest: Sequence[SettingSuggestion]  # what would fit; empty if a layout does

    @property
    def best(self) -> LayoutEstimate | None:
        return self.fitting[0] if self.fitting else None

    @property
    def recipe_rank(self) -> int | None:
        """Position of the recipe's own layout among the fitting ones, from 1; None: not there."""
        ranked = enumerate(self.fitting, 1)
        return next((rank for rank, layout in ranked if layout is self.recipe_layout), None)

    @property
    def recipe_fault(self) -> str | None:
        """Why the recipe's own layout cannot be used; None if it fits or there is none."""
        layout = self.recipe_layout
        if isinstance(layout, LayoutEstimate):
            return None if layout.fits else why_too_large(layout.memory)
        return layout

    def top(self, count: int) -> list[tuple[int, LayoutEstimate]]:
        """Return `count` layouts for a table as (rank, layout), by rank.

        The best layout of each pair of tensor and pipeline degree is preferred to further layouts
        of the same pair. The recipe's own layout is always included, if necessary in addition.
        """
        ranked = list(enumerate(self.fitting, 1))
        firsts = set({_degrees(layout): rank for rank, layout in reversed(ranked)}.values())
        preferred = sorted(ranked, key=lambda row: row[0] not in firsts)
        rows = preferred[:count]
        rows += [row for row in preferred[count:] if row[1] is self.recipe_layout]
        return sorted(rows, key=lambda row: row[0])

    def explain(self) -> list[str]:
        """Return lines on why the first layout is the best."""
        runners_up = [layout for _, layout in self.top(3)[1:]]
        return list(explain(self, runners_up))

    @property
    def meshes_too_large(self) -> list[str]:
        """The meshes of which no layout fits, those closest to fitting first."""
        fitting = {_degrees(layout) for layout in self.fitting}
        smallest: dict[tuple[int, int], LayoutEstimate] = {}
        for layout in self.too_large:
            smallest.setdefault(_degrees(layout), layout)
        return [
            f"{layout.description}: {why_too_large(layout.memory)}"
            for degrees, layout in smallest.items()
            if degrees not in fitting
        ]


def _degrees(layout: LayoutEstimate) -> tuple[int, int]:
    return layout.mesh.tensor, layout.mesh.pipeline


@dataclass(frozen=True)
class TrainingForecast:
    """Time and cost of the whole training on one layout."""

    # Time and dollars to the last step; includes `lost_time`, unless that is None.
    cost: Cost
    # Time lost to failures, saves and start-ups; None if no progress is possible.
    lost_time: LostTime | None
    reason: str = ""  # why no progress is possible

    @property
    def hours(self) -> float | None:
        """Wall time to the last step, lost time included, h; None if it is never reached."""
        return self.cost.hours if self.lost_time else None

    @property
    def usd(self) -> float | None:
        """Dollars to the last step; None if it is never reached or the profile has no price."""
        return self.cost.usd if self.lost_time else None


@dataclass(frozen=True)
class ScalingPoint:
    """A layout of a recipe on a number of nodes."""

    node_plan: NodePlan
    rank: int = 1  # 1: the fastest on these nodes
    row: int = 1  # its number among those that are shown of these nodes
    candidate: LayoutEstimate | None = None  # None if nothing fits
    # Throughput per node, relative to that on the smallest node count on which a layout fits.
    efficiency: float = 0.0


@dataclass(frozen=True)
class RecipePlan:
    """The plans of one recipe."""

    config: RunConfig
    unsupported: Unsupported  # returns why the backend cannot train a configuration
    price: NodePrice | None  # what a node costs; None if that is unknown
    tokens: int | None  # tokens to train on; None: the recipe's own steps
    node_plans: Sequence[NodePlan]  # one for each node count, ascending
    # How the command line names recipe and profile; None: the default profile.
    recipe: str = ""
    cluster: str | None = None

    @property
    def fits(self) -> bool:
        return any(plan.fitting for plan in self.node_plans)

    def choice(self, nodes: int) -> LayoutEstimate:
        """Return the layout that `submit` would choose on a number of nodes on which one fits."""
        fitting = next(plan.fitting for plan in self.node_plans if plan.nodes == nodes)
        return min(fitting, key=order)

    def forecast(self, candidate: LayoutEstimate) -> TrainingForecast:
        # Lost time depends on the number of steps: count these without it first.
        ideal = cost(candidate, self.tokens, self.price)
        try:
            lost = lost_time(
                candidate.config, candidate.mesh.nodes, candidate.step.total, ideal.steps
            )
        except ConfigError as error:
            return TrainingForecast(ideal, None, "; ".join(error.faults))
        real = cost(candidate, self.tokens, self.price, lost.effective, lost.goodput)
        return TrainingForecast(real, lost)

    @property
    def warnings(self) -> list[str]:
        name, warnings = self.config.cluster.name, list[str]()
        if known_hardware(self.config).rough:
            warnings.append(
                f"the hardware figures of profile {name} are a guess: measure them with `slurmllm "
                f"calibrate --cluster {name} --out FILE.yaml`, then plan with --cluster FILE.yaml"
            )
        if self.price is not None:
            warnings += self.price.warnings(name)
        return warnings + dense_mask_warning(self.config)

    @property
    def assumed(self) -> dict[str, float]:
        """Name → value of the hardware constants that were never measured on this hardware."""
        hardware = known_hardware(self.config)
        return {name: float(getattr(hardware, name)) for name in hardware.assumed}

    def points(self, top: int = 1) -> list[ScalingPoint]:
        """Return the `top` layouts on each node count."""
        points: list[ScalingPoint] = []
        base: float | None = None  # sequences/s of a node
        for plan in self.node_plans:
            ranked = plan.top(top) if top > 1 else enumerate(plan.fitting[:1], 1)
            for row, (rank, layout) in enumerate(ranked, 1):
                speed = layout.seq_per_s / plan.nodes
                base = speed if base is None else base
                points.append(ScalingPoint(plan, rank, row, layout, speed / base))
            if not plan.fitting:
                points.append(ScalingPoint(plan))
        return points

    def no_fit_error(self) -> ConfigError:
        """Return the error for a plan in which no layout fits on any node count."""
        config, last = self.config, self.node_plans[-1]
        fixed = fixed_settings(config)
        counts = [plan.nodes for plan in self.node_plans]
        near = [
            f"{format_plural(plan.nodes, 'node')}: {change}" if len(counts) > 1 else str(change)
            for plan in self.node_plans
            for change in plan.nearest
        ]
        if not near:
            near = memory_shortfall(config, last.nodes, self.unsupported, fixed)
            fixes = [f"leave {path} to the planner" for path in fixed]
            near.append("; or ".join([*fixes, "choose another --cluster"]))
        noun = "node" if counts == [1] else "nodes"
        return ConfigError(
            f"no layout of {config.recipe.name} fits on {', '.join(map(str, counts))} "
            f"{noun} of {config.cluster.name}",
            [*self._misfit_reasons(fixed), *dense_mask_warning(config), *near],
        )

    def _misfit_reasons(self, fixed: Sequence[str]) -> Sequence[str]:
        large = [plan for plan in self.node_plans if plan.too_large]
        plan = min(large, key=lambda p: p.too_large[0].memory.peak, default=self.node_plans[-1])
        if not large and {"parallel.tensor", "parallel.pipeline"} <= set(fixed):
            try:
                make_mesh(self.config, plan.nodes)
            except ConfigError as error:
                return error.faults
        return misfit_reasons(plan)


Plans = Sequence[RecipePlan]


def plan_warnings(plans: Plans) -> list[str]:
    """Return the warnings of all plans, and one if they compare software of different years."""
    warnings = [warning for plan in plans for warning in plan.warnings]
    profiles: dict[str, list[str]] = {}  # generation of software → profiles of GPUs
    for name, config in {plan.config.cluster.name: plan.config for plan in plans}.items():
        software = known_hardware(config).software
        if software and config.cluster.device == "cuda":
            profiles.setdefault(software, []).append(name)
    if len(profiles) > 1:
        years = "; ".join(
            f"{', '.join(names)}: {software}" for software, names in sorted(profiles.items())
        )
        warnings.append(
            "these profiles were fitted to software of different years, and newer software is "
            f"faster, so that their speeds cannot be compared: {years}"
        )
    return list(dict.fromkeys(warnings))


def node_counts(texts: Iterable[str]) -> list[int]:
    """Return the counts of --nodes, each once, ascending; raise UserError if one is not a count."""
    value = ",".join(texts)
    items = [item.strip() for item in value.split(",")]
    counts = [int(item) for item in items if item.isascii() and item.isdigit()]
    if len(counts) < len(items) or not all(1 <= count <= _MOST_NODES for count in counts):
        raise UserError(
            f"--nodes {value!r}: whole numbers from 1 to {_MOST_NODES} with commas between; write "
            "for instance 16 or 4,8,16"
        )
    return sorted(set(counts))


def plan_recipe(
    config: RunConfig,
    counts: Sequence[int],
    unsupported: Unsupported,
    price: NodePrice | None,
    tokens: int | None,
    rank: Rank = "speed",
    on_planned: Callable[[], object] = lambda: None,
) -> RecipePlan:
    """Plan a recipe on each of several node counts, ascending.

    Args:
        rank: What layouts are ranked by: predicted throughput, or the lower end of its interval.
        on_planned: Called after each node count.

    Raises:
        ConfigError: the profile lacks hardware figures, or the recipe has a command.
    """
    config.recipe.require_training("plan", "name a recipe with one (`slurmllm recipes`)")
    node_plans = []
    for count in counts:
        node_plans.append(_plan_nodes(config, count, unsupported, rank))
        on_planned()
    return RecipePlan(config, unsupported, price, tokens, node_plans)


def _plan_nodes(config: RunConfig, nodes: int, unsupported: Unsupported, rank: Rank) -> NodePlan:
    fixed = fixed_settings(config)
    result = search(config, nodes, unsupported, fixed)
    layout = (
        None if config.recipe.parallel.auto else _recipe_layout(config, nodes, result, unsupported)
    )
    fitting, too_large = [*result.fitting], [*result.too_large]
    searched = any(other is layout for other in (*fitting, *too_large))
    if isinstance(layout, LayoutEstimate) and not searched:
        (fitting if layout.fits else too_large).append(layout)
        fitting.sort(key=order)
        too_large.sort(key=lambda layout: layout.memory.peak)
    if rank == "lower":
        # Stable: without published runs, the order of the predictions is kept.
        fitting.sort(key=lambda layout: -((evidence(layout).interval or (0.0,))[0]))
    near = [] if fitting else fitting_changes(config, nodes, unsupported, fixed)
    return NodePlan(fitting, too_large, result.refused, nodes, layout, near)


def _recipe_layout(
    config: RunConfig, nodes: int, result: SearchResult, unsupported: Unsupported
) -> LayoutEstimate | str:
    """Return the recipe's own layout, or why it is impossible."""
    try:
        mesh = make_mesh(config, nodes)
    except ConfigError as error:
        return "; ".join(error.faults) or error.title
    reasons = unsupported(config)
    if reasons:
        return reasons[0]
    predicted = predict(config, mesh)
    open_settings = {"micro_batch"} if mesh.unmeasured else set()
    layouts = (*result.fitting, *result.too_large)
    same = [layout for layout in layouts if differing_settings(layout, predicted) <= open_settings]
    # `train.micro_batch: auto` is measured later; the fastest one that fits will be chosen.
    fitting = [layout for layout in same if layout.fits]
    return max(fitting or same or [predicted], key=lambda layout: layout.seq_per_s)


def fixed_settings(config: RunConfig) -> Texts:
    """Return the settings of `VARIED` that the user has fixed, which the search does not vary.

    A setting is fixed by --set or, in a recipe with `parallel: auto`, by a value of its own there.
    `train.micro_batch: auto` never counts as fixed.
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
