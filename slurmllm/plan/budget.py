"""Which cluster profile and number of nodes: plans within a budget and a deadline."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from slurmllm.errors import ConfigError, UserError
from slurmllm.format import format_count, format_days, format_plural
from slurmllm.plan.output import PlanTable, point_cells, point_json, price_lines
from slurmllm.plan.recipe_plan import RecipePlan, ScalingPoint
from slurmllm.tables import print_table

NODES = tuple(1 << power for power in range(10))  # node counts without --nodes: 1 to 512
_UNITS = {"s": 1 / 3600, "m": 1 / 60, "h": 1.0, "d": 24.0, "w": 168.0}  # hours
_FACTORS = {"": 1.0, "K": 1e3, "M": 1e6}


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
        found = re.fullmatch(r"\$?([0-9][0-9_,]*(?:\.[0-9]+)?)([KMkm]?)", budget.strip(), re.ASCII)
        usd = float(re.sub("[_,]", "", found[1])) * _FACTORS[found[2].upper()] if found else 0.0
        if not 0 < usd < math.inf:
            raise UserError(f"--budget {budget}: dollars above 0, such as 5000 or 12.5K")
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
class PricedPlan:
    """The best layout on some nodes of a profile, with time and cost to the end."""

    plan: RecipePlan
    point: ScalingPoint
    hours: float
    usd: float

    @property
    def where(self) -> str:
        return f"{format_plural(self.point.nodes, 'node')} of {self.point.cluster}"


@dataclass(frozen=True)
class PurchasePlan:
    """Plans of one recipe on several profiles and node counts, compared with the limits."""

    limits: Limits
    plans: Sequence[PricedPlan]  # those that reach their end

    @property
    def front(self) -> list[PricedPlan]:
        """The plans that are cheaper than every faster one, fastest first."""
        found: list[PricedPlan] = []
        for one in sorted(self.plans, key=lambda one: (one.hours, one.usd)):
            if not found or one.usd < found[-1].usd:
                found.append(one)
        return found

    def meets(self, one: PricedPlan) -> str:
        """`yes`, or which limit is exceeded."""
        over = self.limits.usd is not None and one.usd > self.limits.usd
        late = self.limits.hours is not None and one.hours > self.limits.hours
        return " and ".join(["over the budget"] * over + ["too late"] * late) or "yes"

    @property
    def choices(self) -> dict[str, PricedPlan]:
        """The cheapest and the fastest plan within the limits; none if nothing meets them."""
        meeting = [one for one in self.front if self.meets(one) == "yes"]
        return {"fastest": meeting[0], "cheapest": meeting[-1]} if meeting else {}

    def table(self) -> PlanTable:
        """The Pareto front."""
        choices = self.choices
        rows = [
            (
                ", ".join(name for name, chosen in choices.items() if chosen is one),
                one.point.cluster,
                str(one.point.nodes),
                *_shown(one),
                self.meets(one),
            )
            for one in self.front
        ]
        headings = (
            "", "cluster", "nodes", "TP", "PP", "DP", "micro", "checkpointing", "tokens/s", "$/h",
            "time", "$", "within the limits",
        )  # fmt: skip
        return PlanTable(headings, rows)

    def rows(self) -> list[dict[str, Any]]:
        """The figures of the front, for JSON and CSV."""
        choices = self.choices
        return [
            {
                "choice": [name for name, chosen in choices.items() if chosen is one],
                **point_json(one.point),
                "within_limits": self.meets(one) == "yes",
            }
            for one in self.front
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "budget_usd": self.limits.usd, "deadline_hours": self.limits.hours,
            "front": self.rows(),
        }  # fmt: skip

    def print(self) -> None:
        """Print the front; something meets the limits."""
        plan, cost = self.plans[0].plan, self.plans[0].point.forecast
        assert cost is not None, "a priced plan has a forecast"
        click.echo(
            f"{plan.config.recipe.name}, {format_count(cost.cost.tokens)} tokens, {self.limits}: "
            f"{format_plural(len(self.plans), 'plan')}; those that are cheaper than all faster ones"
        )
        print_table(*self.table())
        for line in price_lines(list({id(one.plan): one.plan for one in self.plans}.values())):
            click.echo(line)

    def no_plan_error(self) -> ConfigError:
        """What would meet the limits, if nothing does."""
        usd, hours, front = self.limits.usd, self.limits.hours, self.front
        in_time = [one for one in front if hours is None or one.hours <= hours]
        in_money = [one for one in front if usd is None or one.usd <= usd]
        faults = []
        if in_time:
            fault = f"the cheapest{' in time' * (hours is not None)} is {_described(in_time[-1])}"
            faults.append(f"{fault}; --budget {math.ceil(in_time[-1].usd)} would do")
        if in_money:
            within = " within the budget" * (usd is not None)
            fault = f"the fastest{within} is {_described(in_money[0])}"
            faults.append(f"{fault}; --deadline {_up(in_money[0].hours)} would do")
        if not faults:
            for which, one in (("fastest", front[0]), ("cheapest", front[-1])):
                need = f"--deadline {_up(one.hours)}" if hours is not None else ""
                if usd is not None and one.usd > usd:
                    need = f"{need} --budget {math.ceil(one.usd)}".strip()
                faults.append(f"the {which} of all is {_described(one)}; {need} would do")
        name = self.plans[0].plan.config.recipe.name
        return ConfigError(f"no plan of {name} is within the limits: {self.limits}", faults)


def _shown(one: PricedPlan) -> list[str]:
    cells = point_cells(one.point)
    return [*cells[:5], cells[8], cells[10], *cells[14:]]


def _described(one: PricedPlan) -> str:
    return f"{format_days(one.hours)} and ${one.usd:,.0f} on {one.where}"


def _up(hours: float) -> str:
    """The next tenth of an hour, or of a minute if that is below one."""
    if hours < 1:
        return f"{math.ceil(600 * hours) / 10:g}m"
    return f"{math.ceil(10 * hours) / 10:g}h"


def purchase_plan(plans: Sequence[RecipePlan], limits: Limits) -> PurchasePlan:
    """Compare plans with the limits.

    Raises:
        ConfigError: nothing fits into memory or reaches its end, or prices are missing.
    """
    unpriced = sorted({p.config.cluster.name for p in plans if p.forecaster.price is None})
    if unpriced:
        raise ConfigError(
            f"no price of {', '.join(unpriced)}: plans cannot be compared by cost",
            ["give them with --price DOLLARS or --prices FILE"],
        )
    priced = [
        PricedPlan(plan, point, point.forecast.hours, point.forecast.usd)
        for plan in plans
        for point in plan.points()
        if point.forecast and point.forecast.hours is not None and point.forecast.usd is not None
    ]
    if not priced and any(plan.fits for plan in plans):
        reasons = [p.forecast.reason for plan in plans for p in plan.points() if p.forecast]
        raise ConfigError("no plan reaches its end", list(dict.fromkeys(reasons)))
    if not priced:
        raise plans[0].no_fit_error()
    return PurchasePlan(limits, priced)
