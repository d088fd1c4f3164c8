"""What a node costs: tables of prices by region and purchase option, each with date and source."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from slurmllm.config.cluster import Cluster, in_the_future
from slurmllm.config.profiles import shipped_dir
from slurmllm.config.resolve import RunConfig
from slurmllm.config.yaml_source import read_yaml
from slurmllm.errors import ConfigError, UserError
from slurmllm.format import printable

OPTIONS = {
    "on_demand": "on demand", "capacity_block": "capacity block", "1y": "1 year", "3y": "3 years",
}  # fmt: skip
_ALIASES = {"reserved": "3y", "1yr": "1y", "3yr": "3y", "capacity_blocks": "capacity_block"}
_FIRST_REGION = "us-east-1"  # whose price is used if no region is given
_OLD_DAYS = 183  # AWS changed prices of GPU nodes by up to 44 % within a year (June 2025)
_REGION = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+")
# Commas only between thousands: 21,50 would be 2,150.
_DOLLARS = re.compile(
    r"\$?([0-9]{1,3}(?:,[0-9]{3})+|[0-9_]*)((?:\.[0-9]*)?(?:e[+-]?[0-9]{1,3})?)([km]?)",
    re.ASCII | re.IGNORECASE,
)
_FACTORS = {"": 1.0, "K": 1e3, "M": 1e6}
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
        return {
            "usd_per_node_hour": self.usd, "option": self.option, "region": self.region,
            "date": self.date, "source": self.source,
        }  # fmt: skip

    def warning(self, cluster: str, today: datetime.date | None = None) -> str | None:
        """A warning if the price is older than six months."""
        days = 0 if self.date is None else ((today or datetime.date.today()) - _day(self.date)).days
        if days <= _OLD_DAYS:
            return None
        return (
            f"the price of {cluster} is of {self.date}, {days // 30} months ago; --price DOLLARS "
            "or --prices FILE gives today's"
        )


def _day(text: str) -> datetime.date:
    day = datetime.date.fromisoformat(text)
    if day.isoformat() != text:
        raise ValueError(text)
    return day


@dataclass(frozen=True)
class PriceChoice:
    """Which price to plan with: the value of --price."""

    usd: float | None = None
    option: str = "on_demand"
    region: str | None = None


def parse_dollars(text: str) -> float | None:
    """Dollars above 0: 21.50, $1,000, 12.5K, 1e9; None if it is anything else."""
    found = _DOLLARS.fullmatch(text.strip())
    try:
        usd = float(f"{found[1].replace(',', '')}{found[2]}") if found else 0.0
    except ValueError:  # no digit
        return None
    usd *= _FACTORS[found[3].upper()] if found else 1
    return usd if 0 < usd < math.inf else None


def parse_price(text: str) -> PriceChoice:
    """Read --price: dollars for a node hour, OPTION, REGION or REGION/OPTION.

    Raises:
        UserError: it is none of them.
    """
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
    """The price of a node of a run's cluster.

    Without a table it is the profile's own, else the shipped tables': of the given region, else of
    us-east-1, else of any; the newest. With `price: null` in the profile it is in no shipped table.

    Args:
        choice: None: on demand, if there is such a price.
        table: Prices that are used in place of the profile's and the shipped ones.

    Raises:
        ConfigError: there is no such price.
    """
    wanted, cluster = choice or PriceChoice(), config.cluster
    if wanted.usd is not None:
        return NodePrice(wanted.usd, owned=cluster.instance_type is None)
    own = [] if table is not None else _own(cluster)
    names = {cluster.instance_type, cluster.name}
    shipped = () if cluster.price is None and config.is_set("cluster.price") else _shipped()
    listed = [one for one in (shipped if table is None else table) if one.node in names]
    if wanted.region is None and (found := [p for p in own if p.option == wanted.option]):
        return found[0]
    found = [
        one for one in listed if one.option == wanted.option and wanted.region in (None, one.region)
    ]
    if found:
        return max(found, key=lambda one: (one.region == _FIRST_REGION, one.date or ""))
    if choice is None and table is None:
        return None
    known = dict.fromkeys(
        f"{one.region}/{one.option}" if one.region else one.option for one in [*own, *listed]
    )
    name = f"{wanted.region}/{wanted.option}" if wanted.region else wanted.option
    what = cluster.instance_type or cluster.name
    raise ConfigError(
        f"cluster profile {cluster.name} has no such price",
        [
            f"--price {name}: unknown for {what}; {'known: ' if known else 'no price is known'}"
            f"{', '.join(sorted(known))}; or give dollars with --price, or a table with --prices"
        ],
    )


def _own(cluster: Cluster) -> list[NodePrice]:
    """The prices in the cluster profile itself."""
    price = cluster.price
    if price is None:
        return []
    values = {"on_demand": price.on_demand, "3y": price.reserved}
    return [
        NodePrice(
            usd, option, None, price.date, price.source or f"profile {cluster.name}",
            owned=cluster.instance_type is None,
        )
        for option, usd in values.items()
        if usd is not None
    ]  # fmt: skip


@cache
def _shipped() -> tuple[NodePrice, ...]:
    folder = shipped_dir() / "configs" / "prices"
    return tuple(one for path in sorted(folder.glob("*.yaml")) for one in read_prices(path))


def read_prices(path: Path) -> list[NodePrice]:
    """Read a table of prices.

    Raises:
        ConfigError: it cannot be read, or has faults.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--prices {path}: a table of prices is YAML; its name must end in .yaml")
    tree = read_yaml(path, form=f"a table of prices has {', '.join(_KEYS)}")[0]
    faults = list(_faults(tree))
    if faults:
        raise ConfigError(f"{path}: {len(faults)} fault(s) in the prices", faults)
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
        _day(day if isinstance(day, str) else "")
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
            if _option(str(option)) is None or not isinstance(nodes, Mapping):
                yield (
                    f"prices.{region}.{option}: must be one of {', '.join(OPTIONS)}, with "
                    "{instance type: dollars}"
                )
                continue
            for node, usd in nodes.items():
                number = type(usd) in (int, float)
                if not number or not 0 < usd < math.inf:
                    yield (
                        f"prices.{region}.{option}.{node}: {usd!r}: must be dollars for an hour of "
                        "one node, above 0"
                    )
