"""What a training costs: the price of a node hour, time and dollars to the end."""

from __future__ import annotations

import datetime
import math
import re
from dataclasses import dataclass
from decimal import Decimal

from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import UserError
from slurmllm.core.format import Json, printable
from slurmllm.plan.search import LayoutEstimate

_HOUR_S = 3600.0
_OLD_DAYS = 183  # AWS changed prices of GPU nodes by up to 44 % within a year (June 2025)
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
# Digits in groups of any length, a fraction, an exponent that stays a number, a suffix.
_COUNT = re.compile(
    r"(?P<number>[0-9]+(?:[_,][0-9]+)*(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?)(?P<suffix>[KMBTkmbt]?)"
)
MOST_TOKENS = 10**18


@dataclass(frozen=True)
class NodePrice:
    """What one node costs, by one source."""

    usd: float  # dollars for an hour of one node
    date: str | None = None  # when this was the price; None with --price
    source: str = "--price"
    # Whether nodes are paid while a run is pending: those of a profile without an instance type.
    bills_waiting: bool = False

    def __str__(self) -> str:
        dated = f", {self.date}" if self.date else ""
        return printable(f"${self.usd:,.2f} per node hour{dated} ({self.source})")

    def as_json(self) -> Json:
        return {"usd_per_node_hour": self.usd, "date": self.date, "source": self.source}

    def warnings(self, cluster: str, today: datetime.date | None = None) -> list[str]:
        """Return a warning if the price is older than six months."""
        if self.date is None:
            return []
        age = (today or datetime.date.today()) - datetime.date.fromisoformat(self.date)
        old = (
            f"the price of {cluster} is of {self.date}, {age.days // 30} months ago; --price USD "
            "sets today's"
        )
        return [old] if age.days > _OLD_DAYS else []


def parse_price(value: str | float) -> float:
    """Return dollars for an hour of one node; raise UserError unless it is a number above 0."""
    try:
        usd = float(value)
    except ValueError:
        usd = math.nan
    if 0 < usd < 1e15:
        return usd
    raise UserError(
        f"--price {value}: must be dollars for an hour of one node, above 0, such as 21.50"
    )


def select_price(config: RunConfig, usd: float | None) -> NodePrice | None:
    """Return the price of a node: `usd` if it is given, else the profile's on-demand price."""
    cluster = config.cluster
    owned = cluster.instance_type is None
    if usd is not None:
        return NodePrice(usd, bills_waiting=owned)
    section = cluster.price
    if section is None:
        return None
    source = section.source or f"profile {cluster.name}"
    return NodePrice(section.on_demand, section.date, source, bills_waiting=owned)


@dataclass(frozen=True)
class Cost:
    """Time and cost of a run to its end; dollars are None without a price."""

    steps: int  # optimizer steps, whole ones
    tokens: int  # tokens of those steps, at least the requested number
    hours: float  # wall time, lost time and waits in the queue included
    node_hours: float  # lost time and spare nodes included
    usd: float | None  # waits in the queue included if they are paid
    waiting_usd: float | None  # of that, for waits in the queue; 0 if they are not paid
    usd_per_hour: float | None  # price of all nodes for an hour, spare ones included
    # Tokens per dollar without lost time, as AWS defines it in "Frugality meets accuracy:
    # Cost-efficient training of GPT NeoX and Pythia models with AWS Trainium" (2023-12-12).
    tokens_per_usd: float | None


def cost(
    candidate: LayoutEstimate,
    tokens: int | None,
    price: NodePrice | None,
    effective: float = 1.0,
    goodput: float | None = None,
) -> Cost:
    """Return time and dollars of training one layout.

    Args:
        tokens: Tokens to train on; None: the recipe's `train.steps`.
        effective: Share of the node hours that trains, by `plan.lost_time`.
        goodput: Share of the wall time that trains; None: no wait in the queue, as `effective`.
    """
    goodput = effective if goodput is None else goodput
    recipe = candidate.config.recipe
    nodes = candidate.mesh.nodes + recipe.slurm.spare_nodes
    a_step = candidate.mesh.global_batch * recipe.model.seq_len
    steps = recipe.train.steps if tokens is None else -(-tokens // a_step)
    training_h = steps * candidate.step.total / _HOUR_S
    node_hours = nodes * training_h / effective
    hours = training_h / goodput
    usd = waiting_usd = usd_per_hour = tokens_per_usd = None
    if price is not None:
        usd_per_hour = nodes * price.usd
        waiting_h = hours - training_h / effective if price.bills_waiting else 0.0
        waiting_usd = waiting_h * usd_per_hour
        usd = node_hours * price.usd + waiting_usd
        tokens_per_usd = candidate.tokens_per_s * _HOUR_S / usd_per_hour
    return Cost(
        steps, steps * a_step, hours, node_hours, usd, waiting_usd, usd_per_hour, tokens_per_usd
    )


def parse_tokens(value: str) -> int:
    """Read --tokens: 375M, 20B, 1.5T (powers of 10), 2e9 or 20_000_000_000; raises UserError."""
    match = _COUNT.fullmatch(value.strip())
    if match is None:
        raise UserError(
            f"--tokens {value!r} is not a count of tokens; write for instance 375M, 20B, 1.5T "
            "or 2e9"
        )
    # Exact: a float product may miss a whole number by its rounding error.
    number = Decimal(re.sub("[_,]", "", match["number"])) * _FACTORS[match["suffix"].upper()]
    if not 1 <= number <= MOST_TOKENS or number != int(number):
        raise UserError(
            f"--tokens {value!r} must be a whole number of tokens from 1 to {MOST_TOKENS:.0e}; "
            "write for instance 375M, 20B or 1.5T"
        )
    return int(number)
