"""Prices: the shipped tables, which one is used, a user's table, and AWS's price list."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurmllm.config.load import load as load_config
from slurmllm.config.profiles import available
from slurmllm.config.resolve import clusters_dir, resolve
from slurmllm.errors import ConfigError, UserError
from slurmllm.plan.prices import (
    NodePrice,
    PriceChoice,
    _shipped,
    parse_dollars,
    parse_price,
    read_prices,
    select_price,
)

TABLE: dict[str, Any] = {
    "date": "2026-11-01",
    "currency": "USD",
    "source": "our contract",
    "prices": {"eu-north-1": {"1y": {"p5.48xlarge": 30.5, "mine": 9}, "on-demand": {"mine": 11.0}}},
}


def cluster(name: str, *overrides: str) -> Any:
    return resolve("neox_20b", name, [f"cluster.{item}" for item in overrides])


def write(folder: Path, **changes: Any) -> Path:
    table = {key: value for key, value in {**TABLE, **changes}.items() if value is not None}
    path = folder / "prices.yaml"
    path.write_text(yaml.safe_dump(table), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("profile", "price", "usd", "region", "day"),
    [
        ("trn1", None, 21.50, None, "2023-12-12"),
        ("trn1", "reserved", 7.59, None, "2023-12-12"),
        ("trn1", "us-east-1/3yr", 7.59, "us-east-1", "2023-12-12"),
        ("trn1", "capacity-block", 15.49, "ap-southeast-4", "2024-12-31"),
        ("p4d", None, 21.957642, None, "2026-11-09"),
        ("p4d", "us-west-2/capacity_block", 14.75, "us-west-2", "2024-12-31"),
        ("p5", "Capacity-Block", 39.33, "us-east-1", "2024-12-31"),
        ("p5", "19.25", 19.25, None, None),
    ],
)
def test_which_price_is_used(
    profile: str, price: str | None, usd: float, region: str | None, day: str | None
) -> None:
    result = select_price(cluster(profile), None if price is None else parse_price(price))
    assert result is not None
    assert (result.usd, result.region, result.date) == (usd, region, day)
    assert str(result).startswith(f"${usd:,.2f} per node hour, ")


def test_profiles_have_the_newest_prices_of_the_tables() -> None:
    for name in available(clusters_dir()):
        profile = cluster(name).cluster
        if profile.price is None or profile.instance_type is None:
            continue
        listed = select_price(cluster(name), PriceChoice(region="us-east-1"))
        assert listed is not None
        assert (profile.price.on_demand, profile.price.date) == (listed.usd, listed.date), name
        assert profile.price.source
    assert select_price(cluster("local"), None) is None
    assert all(0 < item.usd < 1000 and item.source and item.date for item in _shipped())


def test_a_profile_without_a_price_and_null(tmp_path: Path) -> None:
    values = yaml.safe_load((clusters_dir() / "p4d.yaml").read_text("utf-8"))
    del values["price"]
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    result = select_price(cluster(str(path)), None)
    assert result is not None
    assert (result.usd, result.region) == (21.957642, "us-east-1")
    path.write_text("extends: p5\nprice: null\ninstance_type: p5.48xlarge\n")
    config = cluster(str(path))
    assert select_price(config, None) is None
    with pytest.raises(ConfigError, match="no price is known"):
        select_price(config, parse_price("on_demand"))
    assert select_price(config, parse_price("9")) is not None
    # A run's config.yaml is read with the same price.
    stored = tmp_path / "config.yaml"
    stored.write_text(config.to_yaml())
    assert select_price(load_config(stored), None) is None
    (tmp_path / "two.yaml").write_text("extends: mine.yaml\n")
    assert select_price(cluster(str(tmp_path / "two.yaml")), None) is None
    (tmp_path / "two.yaml").write_text("extends: mine.yaml\ninstance_type: p5.48xlarge\n")
    assert select_price(cluster(str(tmp_path / "two.yaml")), None) is not None
    assert select_price(cluster("p5", "price=null"), None) is None


def test_which_nodes_are_paid_while_they_wait(tmp_path: Path) -> None:
    def billed(profile: str, price: str | None) -> bool:
        result = select_price(cluster(profile), None if price is None else parse_price(price))
        assert result is not None
        return result.bills_waiting

    assert not any(billed(*item) for item in (("p5", None), ("p4d", "on_demand"), ("p5", "40")))
    assert all(billed(*item) for item in (("trn1", "3y"), ("p5", "capacity_block")))
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: p5\ndevices_per_node: 4\nprice: {on_demand: 20, date: 2026-11-20}\n")
    assert all(billed(str(mine), price) for price in (None, "12"))
    mine.write_text(mine.read_text() + "instance_type: p5.4xlarge\n")
    assert not billed(str(mine), None)


def test_an_unknown_price_names_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"--price 1y: unknown for p5\.48xlarge; known: on_demand"
    ):
        select_price(cluster("p5"), parse_price("1y"))
    with pytest.raises(
        ConfigError, match="--price on_demand: unknown for local; no price is known"
    ):
        select_price(cluster("local"), parse_price("on_demand"))


def test_amounts_of_dollars() -> None:
    amounts = {"21.5": 21.5, "$1,234,567.8": 1234567.8, "1e9": 1e9, "1.5M": 1.5e6, "1_000": 1000}
    for text, usd in (amounts | {".5": 0.5, " 3 ": 3}).items():
        assert parse_dollars(text) == usd
        assert parse_price(text) == PriceChoice(usd)
    wrong = ["", "$", "-1", "nan", "us-east-1/2y", "/1y", "us_east", "21,50", "1,00,000", "1e400"]
    for text in wrong:
        with pytest.raises(UserError, match="dollars for an hour of one node, above 0"):
            parse_price(text)


def test_old_prices_are_warned_of() -> None:
    price, day = NodePrice(1.0, "on_demand", None, "2026-01-01"), datetime.date
    assert price.warning("p5", day(2026, 6, 30)) is None
    assert "of 2026-01-01, 7 months ago" in (price.warning("p5", day(2026, 8, 1)) or "")
    assert NodePrice(1.0).warning("p5") is None


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    table = read_prices(write(tmp_path))
    result = select_price(cluster("p5"), parse_price("1y"), table)
    assert result == NodePrice(
        30.5, "1y", "eu-north-1", "2026-11-01", "our contract", "p5.48xlarge"
    )
    price = select_price(cluster("p4d", "name=mine"), None, table)  # by the profile's name
    assert price is not None
    assert price.usd == 11.0
    with pytest.raises(ConfigError, match="--price on_demand: unknown for p5"):
        select_price(cluster("p5"), None, table)  # neither the profile's nor a shipped one


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"date": None}, "date: missing; write when these were the prices"),
        ({"date": "2026-13-01"}, "date: '2026-13-01': no day"),
        ({"date": "2999-01-01"}, "date: 2999-01-01 is in the future"),
        ({"currency": "EUR"}, "currency: 'EUR': costs are in dollars; convert"),
        ({"source": None}, "source: missing"),
        ({"prices": None}, "prices: missing"),
        ({"prices": {"r-1": 3}}, "prices.r-1: 3: must be"),
        ({"prices": {"r-1": {"2y": {"x": 1}}}}, "prices.r-1.2y: must be one of on_demand"),
        ({"prices": {"r-1": {"1y": {"x.y": -3}}}}, "1y.x.y: -3: must be dollars .*above 0"),
        ({"prices": {"r-1": {"1y": {"x": True}}}}, "True: must be dollars"),
        ({"regions": {}}, "regions: unknown; known here: date"),
    ],
)
def test_faults_of_a_table(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_prices(write(tmp_path, **changes))
