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
from slurmllm.plan.recipe_plan import Rank, RecipePlan, ScalingPoint

NODES = tuple(1 << power for power in range(10))  # node counts without --nodes: 1 to 512
_HEADINGS = (
    *("TP", "PP", "DP", "micro", "checkpointing", "tokens/s", "seq/s", "90 %", "evidence", "$/h"),
    *("time", "node hours", "$"),
)
_UNITS = {"s": 1 / 3600, "m": 1 / 60, "h": 1.0, "d": 24.0, "w": 168.0}  # hours


@dataclass(frozen=True)
class Limits:
    """What a training may cost and take."""

    usd: float | None  # dollars to the end; None: any
    hours: float | None  # wall time to the end; None: any
    deadline: str = field(default="", compare=False)  # the time as the user wrote it: `2 d 12 h`

    def __str__(self) -> str:
        budget = None if self.usd is None else f"budget ${self.usd:,.0f}"
        deadline = None if self.hours is None else f"deadline {self.deadline}"
        return ", ".join(filter(None, [budget, deadline]))


def parse_limits(budget: str | None, deadline: str | None) -> Limits:
    """Read --budget (dollars) and --deadline (a time with its unit); raise UserError."""
    usd = hours = None
    text = ""
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
        text = " ".join(f"{number} {'min' if unit == 'm' else unit}" for number, unit in parts)
    return Limits(usd, hours, text)


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
        return all(plan.usd is not None for plan in self.plans)

    def price(self, plan: TimedPlan) -> float:
        """Return what plans are compared by: dollars, or nodes."""
        return plan.usd if plan.usd is not None and self.priced else plan.point.nodes

    @property
    def front(self) -> list[TimedPlan]:
        """The plans that are cheaper (or smaller) than every faster one, fastest first."""
        front: list[TimedPlan] = []
        for plan in sorted(self.plans, key=lambda plan: (plan.hours, self.price(plan))):
            if not front or self.price(plan) < self.price(front[-1]):
                front.append(plan)
        return front

    def meets(self, plan: TimedPlan) -> str:
        """Return `yes`, or which limit is exceeded."""
        over = self.limits.usd is not None and self.price(plan) > self.limits.usd
        late = self.limits.hours is not None and plan.hours > self.limits.hours
        return " and ".join(["over the budget"] * over + ["too late"] * late) or "yes"

    @property
    def choices(self) -> dict[str, TimedPlan]:
        """The fastest and the cheapest plan within the limits; none if nothing meets them."""
        meeting = [plan for plan in self.front if self.meets(plan) == "yes"]
        least = "cheapest" if self.priced else "smallest"
        return {"fastest": meeting[0], least: meeting[-1]} if meeting else {}

    def _choice_names(self, plan: TimedPlan) -> list[str]:
        return [name for name, choice in self.choices.items() if choice is plan]

    def table(self) -> PlanTable:
        rows = []
        for plan in self.front:
            cells, forecast = point_cells(plan.point), plan.point.forecast
            assert forecast is not None, "it reaches its end"
            cells["node hours"] = format_number(forecast.cost.node_hours)
            row = {
                "": ", ".join(self._choice_names(plan)),
                "cluster": plan.point.cluster,
                "nodes": str(plan.point.nodes),
                **{heading: cells[heading] for heading in _HEADINGS},
            }
            if self.rank == "lower":
                row["time, lower end"] = format_days(plan.hours)
                row["$, lower end"] = "-" if plan.usd is None else f"{plan.usd:,.0f}"
            rows.append({**row, "within the limits": self.meets(plan)})
        return PlanTable(list(rows[0]), [list(row.values()) for row in rows])

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "choice": self._choice_names(plan),
                **point_json(plan.point),
                "hours_compared": plan.hours,
                "usd_compared": plan.usd,
                "within_limits": self.meets(plan) == "yes",
            }
            for plan in self.front
        ]

    def as_json(self) -> dict[str, Any]:
        limits = {"budget_usd": self.limits.usd, "deadline_hours": self.limits.hours}
        return {**limits, "rank": self.rank, "front": self.rows()}

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
        for line in price_lines(
            list({id(timed.plan): timed.plan for timed in self.plans}.values())
        ):
            click.echo(line)

    def no_plan_error(self) -> ConfigError:
        """Return what would meet the limits, if nothing does."""
        usd, hours, front = self.limits.usd, self.limits.hours, self.front
        in_time = [plan for plan in front if hours is None or plan.hours <= hours]
        in_money = [plan for plan in front if usd is None or self.price(plan) <= usd]
        faults = []
        if in_time:
            fault = f"the cheapest{' within the deadline' * (hours is not None)} is {in_time[-1]}"
            faults.append(f"{fault}; --budget {math.ceil(self.price(in_time[-1]))} would do")
        if in_money:
            fault = f"the fastest{' within the budget' * (usd is not None)} is {in_money[0]}"
            faults.append(f"{fault}; --deadline {_up(in_money[0].hours)} would do")
        if not faults:
            for which, plan in (("fastest", front[0]), ("cheapest", front[-1])):
                needs = [f"--deadline {_up(plan.hours)}"] if hours is not None else []
                if usd is not None and self.price(plan) > usd:
                    needs.append(f"--budget {math.ceil(self.price(plan))}")
                faults.append(f"the {which} of all is {plan}; {' '.join(needs)} would do")
        name = self.plans[0].plan.config.recipe.name
        title = f"no plan of {name} is within the limits{self.where}: {self.limits}"
        return ConfigError(title, faults)


def _up(hours: float) -> str:
    """Return the next tenth of an hour, or of a minute if that is below one."""
    if hours < 1:
        return f"{math.ceil(600 * hours) / 10:g}m"
    return f"{math.ceil(10 * hours) / 10:.10g}h"


def require_prices(plans: Sequence[RecipePlan], limits: Limits) -> None:
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
    timed = []
    for plan in plans:
        for point in plan.points():
            compared = point.forecast  # None if nothing fits
            if point.candidate is not None and rank == "lower":
                compared = plan.forecaster.forecast(at_lower_end(point.candidate))
            if compared is not None and compared.hours is not None:
                timed.append(TimedPlan(plan, point, compared.hours, compared.usd))
    if not timed:
        reasons = [p.forecast.reason for plan in plans for p in plan.points() if p.forecast]
        raise ConfigError("no plan reaches its end", list(dict.fromkeys(reasons)))
    return PurchasePlan(rank, limits, timed)
