"""What a training costs: prices of nodes with date and source, time and dollars to the end."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

from slurmllm.config.cluster import check_day, in_the_future
from slurmllm.config.profiles import shipped_dir
from slurmllm.config.resolve import RunConfig
from slurmllm.config.yaml_source import read_yaml
from slurmllm.errors import ConfigError, UserError
from slurmllm.format import format_plural, printable
from slurmllm.plan.estimate import LayoutEstimate

_HOUR_S = 3600.0
OPTIONS = {
    "on_demand": "on demand",
    "capacity_block": "capacity block",
    "1y": "1 year",
    "3y": "3 years",
}
_ALIASES = {"reserved": "3y", "1yr": "1y", "3yr": "3y", "capacity_blocks": "capacity_block"}
_FIRST_REGION = "us-east-1"  # whose price is used if no region is given
_OLD_DAYS = 183  # AWS changed prices of GPU nodes by up to 44 % within a year (June 2025)
_REGION = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+")
# Commas only between thousands: 21,50 would be 2,150.
_DOLLARS = re.compile(
    r"\$?([0-9]{1,3}(?:,[0-9]{3})+|[0-9_]*)((?:\.[0-9]*)?(?:e[+-]?[0-9]{1,3})?)([km]?)",
    re.ASCII | re.IGNORECASE,
)
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
# Digits in groups of any length, a fraction, an exponent that stays a number, a suffix.
_COUNT = re.compile(
    r"(?P<number>[0-9]+(?:[_,][0-9]+)*(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?)(?P<suffix>[KMBTkmbt]?)"
)
MOST_TOKENS = 10**18
_KEYS = ("date", "currency", "source", "prices")


@dataclass(frozen=True)
class NodePrice:
    """What one node costs, by one source."""

    usd: float  # dollars for an hour of one node
    option: str = "given"  # one of OPTIONS; "given" with --price
    region: str | None = None  # None: a cluster profile's or the user's
    date: str | None = None  # when this was the price; None with --price
    source: str = "--price"
    node: str = ""  # instance type, or name of a cluster profile
    owned: bool = False  # nodes of a profile without an instance type

    @property
    def bills_waiting(self) -> bool:
        """Whether nodes are paid while a run waits in the queue for its next attempt.

        Nodes on demand are started for a job. Those of a capacity block and reserved ones are paid
        for the whole term, and owned ones anyway.
        """
        return self.owned or self.option in ("capacity_block", "1y", "3y")

    @property
    def waiting_term(self) -> str:
        """What nodes are paid while they wait, for messages."""
        return "owned nodes" if self.owned else f"nodes at the price {self.option}"

    def __str__(self) -> str:
        where = f" in {self.region}" if self.region else ""
        what = f", {OPTIONS.get(self.option, self.option)}{where}"
        dated = f", {self.date}" if self.date else ""
        return printable(f"${self.usd:,.2f} per node hour{what}{dated} ({self.source})")

    def as_json(self) -> dict[str, Any]:
        names = ("option", "region", "date", "source")
        return {"usd_per_node_hour": self.usd} | {name: getattr(self, name) for name in names}

    def warning(self, cluster: str, today: datetime.date | None = None) -> str | None:
        """Return a warning if the price is older than six months."""
        if self.date is None:
            return None
        age = (today or datetime.date.today()) - datetime.date.fromisoformat(self.date)
        if age.days <= _OLD_DAYS:
            return None
        return (
            f"the price of {cluster} is of {self.date}, {age.days // 30} months ago; --price "
            "DOLLARS or --prices FILE gives today's"
        )


@dataclass(frozen=True)
class PriceChoice:
    """Which price to plan with: the value of --price."""

    usd: float | None = None
    option: str = "on_demand"
    region: str | None = None


def parse_dollars(text: str) -> float | None:
    """Return dollars above 0 (21.50, $1,000, 12.5K, 1e9); None if it is anything else."""
    match = _DOLLARS.fullmatch(text.strip())
    if match is None:
        return None
    try:
        usd = float(f"{match[1].replace(',', '')}{match[2]}") * _FACTORS[match[3].upper()]
    except ValueError:  # no digit
        return None
    return usd if 0 < usd < 1e15 else None


def parse_price(text: str) -> PriceChoice:
    """Read --price: dollars for a node hour, OPTION, REGION or REGION/OPTION; raises UserError."""
    if (usd := parse_dollars(text)) is not None:
        return PriceChoice(usd)
    region, slash, name = text.strip().rpartition("/")
    if not slash and _REGION.fullmatch(name) and _option(name) is None:
        region, name = name, "on_demand"
    option = _option(name)
    if option is not None and (not slash or _REGION.fullmatch(region)):
        return PriceChoice(option=option, region=region or None)
    raise UserError(
        f"--price {text}: dollars for an hour of one node, above 0, such as 21.50 (convert other "
        f"currencies); or one of {', '.join(OPTIONS)}, with a region before it, such as "
        "us-east-1/1y"
    )


def _option(name: str) -> str | None:
    name = name.lower().replace("-", "_")
    name = _ALIASES.get(name, name)
    return name if name in OPTIONS else None


def select_price(
    config: RunConfig, choice: PriceChoice | None, table: Sequence[NodePrice] | None = None
) -> NodePrice | None:
    """Return the price of a node of a run's cluster.

    Without a table it is the profile's own, else the shipped tables': of the given region, else of
    us-east-1, else of any; the newest. With `price: null` in the profile it is in no shipped table.

    Args:
        choice: None: on demand, if there is such a price.
        table: Prices that are used in place of the profile's and the shipped ones.

    Raises:
        ConfigError: there is no such price.
    """
    request, cluster = choice or PriceChoice(), config.cluster
    if request.usd is not None:
        return NodePrice(request.usd, owned=cluster.instance_type is None)
    of_profile: list[NodePrice] = []
    if table is None and (section := cluster.price) is not None:
        source, owned = section.source or f"profile {cluster.name}", cluster.instance_type is None
        of_profile = [
            NodePrice(usd, option, None, section.date, source, owned=owned)
            for option, usd in (("on_demand", section.on_demand), ("3y", section.reserved))
            if usd is not None
        ]
    names = {cluster.instance_type, cluster.name}
    shipped = () if cluster.price is None and config.is_set("cluster.price") else _shipped()
    listed = [price for price in (shipped if table is None else table) if price.node in names]
    candidates = [*of_profile, *listed]
    matching = [price for price in candidates if price.option == request.option]
    if request.region is not None:
        matching = [price for price in matching if price.region == request.region]
    if matching:
        in_profile = [price for price in matching if price in of_profile]
        return max(in_profile or matching, key=lambda p: (p.region == _FIRST_REGION, p.date or ""))
    if choice is None and table is None:
        return None
    names_of_prices = sorted({_price_name(price.region, price.option) for price in candidates})
    available = f"known: {', '.join(names_of_prices)}" if candidates else "no price is known"
    raise ConfigError(
        f"cluster profile {cluster.name} has no such price",
        [
            f"--price {_price_name(request.region, request.option)}: unknown for "
            f"{cluster.instance_type or cluster.name}; {available}; or give dollars with --price, "
            "or a table with --prices"
        ],
    )


def _price_name(region: str | None, option: str) -> str:
    return f"{region}/{option}" if region else option


@cache
def _shipped() -> tuple[NodePrice, ...]:
    folder = shipped_dir() / "configs" / "prices"
    return tuple(price for path in sorted(folder.glob("*.yaml")) for price in read_prices(path))


def read_prices(path: Path) -> list[NodePrice]:
    """Read a table of prices; raise ConfigError if it cannot be read or has faults."""
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--prices {path}: a table of prices is YAML; its name must end in .yaml")
    tree = read_yaml(path, form=f"a table of prices has {', '.join(_KEYS)}")[0]
    faults = list(_faults(tree))
    if faults:
        raise ConfigError(f"{path}: {format_plural(len(faults), 'error')} in the prices", faults)
    return [
        NodePrice(float(usd), str(_option(option)), region, tree["date"], tree["source"], node)
        for region, options in tree["prices"].items()
        for option, nodes in options.items()
        for node, usd in nodes.items()
    ]


def _faults(tree: Mapping[str, Any]) -> Iterable[str]:
    for key in tree.keys() - set(_KEYS):
        yield f"{key}: unknown; known here: {', '.join(_KEYS)}"
    day, currency, source = (tree.get(key) for key in _KEYS[:3])
    try:
        check_day(str(day))
    except ValueError:
        what = "missing" if day is None else f"{day!r}: no day"
        yield f"date: {what}; write when these were the prices, such as 2026-11-09"
    else:
        if in_the_future(str(day)):
            yield f"date: {day} is in the future; write when these were the prices"
    if currency != "USD":
        what = "missing" if currency is None else f"{currency!r}: costs are in dollars"
        yield f"currency: {what}; convert the prices, and write USD"
    if not isinstance(source, str) or not source.strip():
        yield "source: missing; write where the prices come from"
    regions = tree.get("prices")
    if not isinstance(regions, Mapping) or not regions:
        yield "prices: missing; write region: {option: {instance type: dollars per node hour}}"
        return
    for region, options in regions.items():
        if not isinstance(options, Mapping):
            yield f"prices.{region}: {options!r}: must be option: {{instance type: dollars}}"
            continue
        for option, nodes in options.items():
            path = f"prices.{region}.{option}"
            if _option(str(option)) is None or not isinstance(nodes, Mapping):
                choices = ", ".join(OPTIONS)
                yield f"{path}: must be one of {choices}, with {{instance type: dollars}}"
                continue
            for node, usd in nodes.items():
                if type(usd) not in (int, float) or not 0 < usd < math.inf:
                    rule = "must be dollars for an hour of one node, above 0"
                    yield f"{path}.{node}: {usd!r}: {rule}"


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
    usd_per_node_hour: float | None,
    effective: float = 1.0,
    goodput: float | None = None,
    waits_are_paid: bool = False,
) -> Cost:
    """Return time and dollars of training one layout.

    Args:
        tokens: Tokens to train on; None: the recipe's `train.steps`.
        effective: Share of the node hours that trains, by `plan.lost_time`.
        goodput: Share of the wall time that trains; None: no wait in the queue, as `effective`.
        waits_are_paid: Whether nodes cost the same while the run waits in the queue.
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
    if usd_per_node_hour is not None:
        usd_per_hour = nodes * usd_per_node_hour
        waiting_usd = (hours - training_h / effective) * usd_per_hour if waits_are_paid else 0.0
        usd = node_hours * usd_per_node_hour + waiting_usd
        tokens_per_usd = candidate.tokens_per_s * _HOUR_S / usd_per_hour
    return Cost(
        steps, steps * a_step, hours, node_hours, usd, waiting_usd, usd_per_hour, tokens_per_usd
    )


def scaling(rows: Sequence[tuple[int, float]]) -> list[float]:
    """Return throughput per node relative to the fewest nodes', of (nodes, throughput of all)."""
    if not rows:
        return []
    fewest, base = min(rows)
    return [throughput / nodes * fewest / base for nodes, throughput in rows]


def parse_tokens(text: str) -> int:
    """Read --tokens: 375M, 20B, 1.5T (powers of 10), 2e9 or 20_000_000_000; raises UserError."""
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise UserError(
            f"--tokens {text!r} is no count of tokens; write for instance 375M, 20B, 1.5T or 2e9"
        )
    # Exact: a float product may miss a whole number by its rounding error.
    number = Decimal(re.sub("[_,]", "", match["number"])) * _FACTORS[match["suffix"].upper()]
    if not 1 <= number <= MOST_TOKENS or number != int(number):
        raise UserError(
            f"--tokens {text!r} must be a whole number of tokens from 1 to {MOST_TOKENS:.0e}; "
            "write for instance 375M, 20B or 1.5T"
        )
    return int(number)
