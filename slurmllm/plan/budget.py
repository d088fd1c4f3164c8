"""Which cluster profile and number of nodes: plans within a budget and a deadline."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from slurmllm.display.tables import print_table
from slurmllm.errors import ConfigError, UserError
from slurmllm.format import format_count, format_days, format_number, format_plural
from slurmllm.plan.evidence import at_lower_end
from slurmllm.plan.output import PlanTable, point_cells, point_json, price_lines
from slurmllm.plan.prices import parse_dollars
from slurmllm.plan.recipe_plan import Rank, RecipePlan, ScalingPoint, TrainingForecast

NODES = tuple(1 << power for power in range(10))  # node counts without --nodes: 1 to 512
_UNITS = {"s": 1 / 3600, "m": 1 / 60, "h": 1.0, "d": 24.0, "w": 168.0}  # hours


@dataclass(frozen=True)
class Limits:
    """What a training may cost and take."""

    usd: float | None  # dollars to the end; None: any
    hours: float | None  # wall time to the end; None: any
    given: str = field(default="", compare=False)  # the time as given, such as `2 d 12 h`

    def __str__(self) -> str:
        budget = None if self.usd is None else f"budget ${self.usd:,.0f}"
        deadline = None if self.hours is None else f"deadline {self.deadline}"
        return ", ".join(filter(None, [budget, deadline]))

    @property
    def deadline(self) -> str:
        return self.given or ("" if self.hours is None else format_days(self.hours))


def parse_limits(budget: str | None, deadline: str | None) -> Limits:
    """Read --budget (dollars) and --deadline (a time with its unit).

    Raises:
        UserError: one of them is none.
    """
    usd = hours = None
    given = ""
    if budget is not None:
        usd = parse_dollars(budget)
        if usd is None:
            raise UserError(
                f"--budget {budget}: dollars above 0, such as 5000, 12.5K or 1e6 (convert other "
                "currencies)"
            )
    if deadline is not None:
        part = r"([0-9]+(?:\.[0-9]+)?) ?([smhdw])"
        whole = re.fullmatch(rf"(?:{part} ?)+", deadline.strip(), re.ASCII)
        parts = re.findall(part, deadline, re.ASCII) if whole else []
        hours = sum(float(number) * _UNITS[unit] for number, unit in parts)
        if not 0 < hours < math.inf:
            raise UserError(
                f"--deadline {deadline}: a time above 0 with its units (s, m, h, d or w), such as "
                "90m, 48h, 2d12h or 1w"
            )
        given = " ".join(f"{number} {'min' if unit == 'm' else unit}" for number, unit in parts)
    return Limits(usd, hours, given)


@dataclass(frozen=True)
class TimedPlan:
    """The best layout on some nodes of a profile, with time and cost to the end."""

    plan: RecipePlan
    point: ScalingPoint
    # What is compared with the limits: predicted, or at the lower end of the interval.
    hours: float
    usd: float | None  # None without a price

    @property
    def where(self) -> str:
        return f"{format_plural(self.point.nodes, 'node')} of {self.point.cluster}"

    def __str__(self) -> str:
        dollars = "" if self.usd is None else f" and ${self.usd:,.0f}"
        return f"{format_days(self.hours)}{dollars} on {self.where}"


@dataclass(frozen=True)
class PurchasePlan:
    """Plans of one recipe on several profiles and node counts, compared with the limits.

    They are compared by dollars, or by nodes if the price of any is unknown.
    """

    rank: Rank  # `lower`: time and dollars are those at the lower end of the interval
    limits: Limits
    plans: Sequence[TimedPlan]  # those that reach their end

    @property
    def where(self) -> str:
        """At which end of the interval time and dollars are compared with the limits."""
        return " at the lower end of the interval" if self.rank == "lower" else ""

    @property
    def priced(self) -> bool:
        return all(one.usd is not None for one in self.plans)

    def price(self, one: TimedPlan) -> float:
        """What plans are compared by: dollars, or nodes."""
        return one.usd if one.usd is not None and self.priced else one.point.nodes

    @property
    def front(self) -> list[TimedPlan]:
        """The plans that are cheaper (or smaller) than every faster one, fastest first."""
        found: list[TimedPlan] = []
        for one in sorted(self.plans, key=lambda one: (one.hours, self.price(one))):
            if not found or self.price(one) < self.price(found[-1]):
                found.append(one)
        return found

    def meets(self, one: TimedPlan) -> str:
        """`yes`, or which limit is exceeded."""
        over = self.limits.usd is not None and self.price(one) > self.limits.usd
        late = self.limits.hours is not None and one.hours > self.limits.hours
        return " and ".join(["over the budget"] * over + ["too late"] * late) or "yes"

    @property
    def choices(self) -> dict[str, TimedPlan]:
        """The fastest and the cheapest plan within the limits; none if nothing meets them."""
        meeting = [one for one in self.front if self.meets(one) == "yes"]
        least = "cheapest" if self.priced else "smallest"
        return {"fastest": meeting[0], least: meeting[-1]} if meeting else {}

    def table(self) -> PlanTable:
        """The Pareto front."""
        choices = self.choices
        rows = [
            (
                ", ".join(name for name, chosen in choices.items() if chosen is one),
                one.point.cluster,
                str(one.point.nodes),
                *self._shown(one),
                self.meets(one),
            )
            for one in self.front
        ]
        headings = (
            "", "cluster", "nodes", "TP", "PP", "DP", "micro", "checkpointing", "tokens/s", "seq/s",
            "90 %", "evidence", "$/h", "time", "node hours", "$",
            *(["time, lower end", "$, lower end"] if self.rank == "lower" else []),
            "within the limits",
        )  # fmt: skip
        return PlanTable(headings, rows)

    def _shown(self, one: TimedPlan) -> list[str]:
        cells = point_cells(one.point)
        assert one.point.forecast is not None, "it reaches its end"
        node_hours = format_number(one.point.forecast.cost.node_hours)
        shown = [*cells[:5], cells[8], *cells[5:8], cells[10], cells[14], node_hours, cells[15]]
        if self.rank == "lower":
            shown += [format_days(one.hours), "-" if one.usd is None else f"{one.usd:,.0f}"]
        return shown

    def rows(self) -> list[dict[str, Any]]:
        """The figures of the front, for JSON and CSV."""
        choices = self.choices
        return [
            {
                "choice": [name for name, chosen in choices.items() if chosen is one],
                **point_json(one.point),
                "hours_compared": one.hours,
                "usd_compared": one.usd,
                "within_limits": self.meets(one) == "yes",
            }
            for one in self.front
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "budget_usd": self.limits.usd, "deadline_hours": self.limits.hours, "rank": self.rank,
            "front": self.rows(),
        }  # fmt: skip

    def print(self) -> None:
        """Print the front; something meets the limits."""
        plan, cost = self.plans[0].plan, self.plans[0].point.forecast
        assert cost is not None, "a priced plan has a forecast"
        what = "cheaper than all faster ones"
        if not self.priced:
            what = "on fewer nodes than all faster ones, as a price is unknown"
        what += f"; time and dollars{self.where} are compared" * bool(self.where)
        click.echo(
            f"{plan.config.recipe.name}, {format_count(cost.cost.tokens)} tokens, {self.limits}: "
            f"{format_plural(len(self.plans), 'plan')}; those that are {what}"
        )
        print_table(*self.table())
        for line in price_lines(list({id(one.plan): one.plan for one in self.plans}.values())):
            click.echo(line)

    def no_plan_error(self) -> ConfigError:
        """What would meet the limits, if nothing does."""
        usd, hours, front = self.limits.usd, self.limits.hours, self.front
        in_time = [one for one in front if hours is None or one.hours <= hours]
        in_money = [one for one in front if usd is None or self.price(one) <= usd]
        faults = []
        if in_time:
            fault = f"the cheapest{' within the deadline' * (hours is not None)} is {in_time[-1]}"
            faults.append(f"{fault}; --budget {math.ceil(self.price(in_time[-1]))} would do")
        if in_money:
            within = " within the budget" * (usd is not None)
            fault = f"the fastest{within} is {in_money[0]}"
            faults.append(f"{fault}; --deadline {_up(in_money[0].hours)} would do")
        if not faults:
            for which, one in (("fastest", front[0]), ("cheapest", front[-1])):
                need = f"--deadline {_up(one.hours)}" if hours is not None else ""
                if usd is not None and self.price(one) > usd:
                    need = f"{need} --budget {math.ceil(self.price(one))}".strip()
                faults.append(f"the {which} of all is {one}; {need} would do")
        name = self.plans[0].plan.config.recipe.name
        title = f"no plan of {name} is within the limits{self.where}: {self.limits}"
        return ConfigError(title, faults)


def _up(hours: float) -> str:
    """The next tenth of an hour, or of a minute if that is below one."""
    if hours < 1:
        return f"{math.ceil(600 * hours) / 10:g}m"
    return f"{math.ceil(10 * hours) / 10:g}h"


def require_prices(plans: Sequence[RecipePlan], limits: Limits) -> None:
    """Raise ConfigError if prices are missing that a budget needs."""
    unpriced = sorted({p.config.cluster.name for p in plans if p.forecaster.price is None})
    if unpriced and limits.usd is not None:
        raise ConfigError(
            f"no price of {', '.join(unpriced)}: plans cannot be compared with a budget",
            ["give them with --price DOLLARS or --prices FILE"],
        )


def purchase_plan(
    plans: Sequence[RecipePlan], limits: Limits, rank: Rank = "speed"
) -> PurchasePlan:
    """Compare plans, of which one fits, with the limits.

    Args:
        rank: `lower` compares time and dollars at the lower end of the interval of throughput.

    Raises:
        ConfigError: nothing reaches its end.
    """
    found = [
        TimedPlan(plan, point, compared.hours, compared.usd)
        for plan in plans
        for point in plan.points()
        if (compared := _compared(plan, point, rank)) and compared.hours is not None
    ]
    if not found:
        reasons = [p.forecast.reason for plan in plans for p in plan.points() if p.forecast]
        raise ConfigError("no plan reaches its end", list(dict.fromkeys(reasons)))
    return PurchasePlan(rank, limits, found)


def _compared(plan: RecipePlan, point: ScalingPoint, rank: Rank) -> TrainingForecast | None:
    """The forecast that is compared with the limits; None if nothing fits."""
    if point.candidate is None or rank == "speed":
        return point.forecast
    return plan.forecaster.forecast(at_lower_end(point.candidate))
