"""Prices: the shipped tables, which one is used, a user's table, and AWS's price list."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from slurmllm.config.load import load as load_config
from slurmllm.config.profiles import available
from slurmllm.config.resolve import clusters_dir, resolve
from slurmllm.errors import ConfigError, UserError
from slurmllm.plan import aws_price_list
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
    "date": "2026-11-01", "currency": "USD", "source": "our contract",
    "prices": {"eu-north-1": {"1y": {"p5.48xlarge": 30.5, "mine": 9}, "on-demand": {"mine": 11.0}}},
}  # fmt: skip


def cluster(name: str, *overrides: str) -> Any:
    return resolve("neox_20b", name, [f"cluster.{one}" for one in overrides])


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
        ("p4d", "us-east-1", 21.957642, "us-east-1", "2026-11-09"),
        ("p4d", "us-west-2/capacity_block", 14.75, "us-west-2", "2024-12-31"),
        ("p5", "on-demand", 55.04, None, "2026-11-09"),
        ("p5", "Capacity-Block", 39.33, "us-east-1", "2024-12-31"),
        ("p5", "19.25", 19.25, None, None),
    ],
)
def test_which_price_is_used(
    profile: str, price: str | None, usd: float, region: str | None, day: str | None
) -> None:
    found = select_price(cluster(profile), None if price is None else parse_price(price))
    assert found is not None
    assert (found.usd, found.region, found.date) == (usd, region, day)
    assert str(found).startswith(f"${usd:,.2f} per node hour, ")


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
    assert all(0 < one.usd < 1000 and one.source and one.date for one in _shipped())


def test_a_profile_without_a_price_has_that_of_its_instance_type(tmp_path: Path) -> None:
    values = yaml.safe_load((clusters_dir() / "p4d.yaml").read_text("utf-8"))
    del values["price"]
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    found = select_price(cluster(str(path)), None)
    assert found is not None
    assert (found.usd, found.region) == (21.957642, "us-east-1")


@pytest.mark.parametrize("own", ["", "instance_type: p5.48xlarge\n", "devices_per_node: 4\n"])
def test_null_is_no_price(tmp_path: Path, own: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: p5\nprice: null\n{own}")
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
    (tmp_path / "two.yaml").write_text("extends: p5\n")
    assert select_price(cluster(str(tmp_path / "two.yaml")), None) is not None
    assert select_price(cluster("p5", "price=null"), None) is None


def test_which_nodes_are_paid_while_they_wait(tmp_path: Path) -> None:
    def billed(profile: str, price: str | None) -> bool:
        found = select_price(cluster(profile), None if price is None else parse_price(price))
        assert found is not None
        return found.bills_waiting

    assert not any(billed(*one) for one in (("p5", None), ("p4d", "on_demand"), ("p5", "40")))
    assert all(billed(*one) for one in (("trn1", "3y"), ("p5", "capacity_block")))
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


@pytest.mark.parametrize(
    ("text", "usd"),
    [("21.5", 21.5), ("$21.5", 21.5), ("1,000", 1000), ("$1,234,567.8", 1234567.8), ("1e9", 1e9),
     ("5k", 5000), ("1.5M", 1.5e6), ("1_000", 1000), (".5", 0.5), ("2.", 2), (" 3 ", 3)],
)  # fmt: skip
def test_amounts_of_dollars(text: str, usd: float) -> None:
    assert parse_dollars(text) == usd
    assert parse_price(text) == PriceChoice(usd)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-1",
        "0",
        "nan",
        "inf",
        "2y",
        "us-east-1/2y",
        "/1y",
        "a b/1y",
        "us_east",
        "€20",
        "21,50",
        "1,00,000",
        "$",
        ".",
        "1e400",
        "20 EUR",
    ],
)
def test_what_is_no_price(text: str) -> None:
    with pytest.raises(UserError, match="dollars for an hour of one node, above 0"):
        parse_price(text)


@given(st.text())
def test_any_text_is_a_price_or_a_fault(text: str) -> None:
    try:
        found = parse_price(text)
    except UserError:
        return
    assert found.usd is None or found.usd > 0


def test_old_prices_are_warned_of() -> None:
    price, day = NodePrice(1.0, "on_demand", None, "2026-01-01"), datetime.date
    assert price.warning("p5", day(2026, 6, 30)) is None
    assert "of 2026-01-01, 7 months ago" in (price.warning("p5", day(2026, 8, 1)) or "")
    assert NodePrice(1.0).warning("p5") is None


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    table = read_prices(write(tmp_path))
    found = select_price(cluster("p5"), parse_price("1y"), table)
    assert found == NodePrice(30.5, "1y", "eu-north-1", "2026-11-01", "our contract", "p5.48xlarge")
    own = select_price(cluster("p4d", "name=mine"), None, table)  # by the profile's name
    assert own is not None
    assert own.usd == 11.0
    with pytest.raises(ConfigError, match="--price on_demand: unknown for p5"):
        select_price(cluster("p5"), None, table)  # neither the profile's nor a shipped one


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"date": None}, "date: missing; write when these were the prices"),
        ({"date": "2026-13-01"}, "date: '2026-13-01': no day"),
        ({"date": "2999-01-01"}, "date: 2999-01-01 is in the future"),
        ({"currency": "EUR"}, "currency: 'EUR': costs are in dollars; convert"),
        ({"currency": None}, "currency: missing"),
        ({"source": None}, "source: missing"),
        ({"prices": None}, "prices: missing"),
        ({"prices": {"r-1": 3}}, "prices.r-1: 3: must be"),
        ({"prices": {"r-1": {"2y": {"x": 1}}}}, "prices.r-1.2y: must be one of on_demand"),
        ({"prices": {"r-1": {"1y": {"x.y": -3}}}}, "1y.x.y: -3: must be dollars .*above 0"),
        ({"prices": {"r-1": {"1y": {"x": float("nan")}}}}, "nan: must be dollars"),
        ({"prices": {"r-1": {"1y": {"x": True}}}}, "True: must be dollars"),
        ({"regions": {}}, "regions: unknown; known here: date"),
    ],
)  # fmt: skip
def test_faults_of_a_table(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_prices(write(tmp_path, **changes))


# --- AWS's price list, in the form of AWS Billing's user guide.


def product(sku: str, node: str, **changes: str) -> dict[str, Any]:
    attributes = {
        "servicecode": "AmazonEC2", "location": "US East (N. Virginia)", "regionCode": "us-east-1",
        "locationType": "AWS Region", "instanceType": node, "operatingSystem": "Linux",
        "tenancy": "Shared", "preInstalledSw": "NA", "capacitystatus": "Used",
    }  # fmt: skip
    return {"sku": sku, "productFamily": "Compute Instance", "attributes": attributes | changes}


def term(sku: str, number: int, *dimensions: tuple[str, str], **attributes: str) -> dict[str, Any]:
    code = f"{sku}.T{number}"
    return {
        code: {
            "offerTermCode": f"T{number}", "sku": sku, "effectiveDate": "2026-10-01T00:00:00Z",
            "priceDimensions": {
                f"{code}.{at}": {
                    "rateCode": f"{code}.{at}", "unit": unit, "description": "…",
                    "appliesTo": [], "pricePerUnit": {"USD": usd},
                }
                for at, (unit, usd) in enumerate(dimensions)
            },
            "termAttributes": attributes,
        }
    }  # fmt: skip


def offer() -> dict[str, Any]:
    three = {"LeaseContractLength": "3yr", "OfferingClass": "standard"}
    return {
        "formatVersion": "v1.0", "disclaimer": "…", "offerCode": "AmazonEC2",
        "version": "20261120000000", "publicationDate": "2026-11-20T03:04:05Z",
        "products": {
            "A": product("A", "p5.48xlarge"),
            "B": product("B", "p5.48xlarge", operatingSystem="Windows"),
            "C": product("C", "p5.48xlarge", capacitystatus="UnusedCapacityReservation"),
            "D": product("D", "p5.48xlarge", regionCode="eu-north-1"),
            "E": {"sku": "E", "productFamily": "Data Transfer", "attributes": {"group": "…"}},
        },
        "terms": {
            "OnDemand": {
                "A": term("A", 1, ("Hrs", "54.1000000000")),
                "B": term("B", 1, ("Hrs", "99.0")),
                "C": term("C", 1, ("Hrs", "0.0000000000")),
                "D": term("D", 1, ("Hrs", "60.5")),
                "E": term("E", 1, ("GB", "0.02")),
            },
            "Reserved": {
                "A": {
                    **term("A", 2, ("Hrs", "30.0"), PurchaseOption="No Upfront", **three),
                    **term("A", 3, ("Quantity", "657000"), ("Hrs", "0.0"),
                           PurchaseOption="All Upfront", **three),
                    **term("A", 4, ("Hrs", "40.0"), LeaseContractLength="1yr"),
                },
            },
        },
    }  # fmt: skip


def write_offer(folder: Path, content: Any) -> Path:
    path = folder / "index.json"
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
    return path


@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_awss_price_list(tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aws_price_list, "_CHUNK", chunk)
    table = read_prices(write_offer(tmp_path, offer()))
    found = {(one.region, one.option): one.usd for one in table}
    assert found == {
        ("us-east-1", "on_demand"): 54.1, ("eu-north-1", "on_demand"): 60.5,
        ("us-east-1", "3y"): pytest.approx(657000 / (3 * 8760)), ("us-east-1", "1y"): 40.0,
    }  # fmt: skip
    price = select_price(cluster("p5"), parse_price("3y"), table)
    assert price is not None
    assert str(price) == (
        "$25.00 per node hour, 3 years in us-east-1, 2026-11-20 (AWS's price list, index.json)"
    )


def test_awss_price_list_with_faults(tmp_path: Path) -> None:
    def refused(content: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            read_prices(write_offer(tmp_path, content))

    undated, other, empty, negative, yuan = (offer() for _ in range(5))
    del undated["publicationDate"]
    refused(undated, "no publicationDate, so its prices have no date")
    refused({**other, "offerCode": "AmazonS3"}, "offerCode is 'AmazonS3', not 'AmazonEC2'")
    empty["products"] = {}
    refused(empty, "no price of a Linux node")
    terms = negative["terms"]["OnDemand"]
    terms["A"] = term("A", 1, ("Hrs", "-3"))
    refused(negative, "p5.48xlarge costs -3: a price is 0 or more")
    for one in yuan["terms"]["OnDemand"]["A"].values():
        one["priceDimensions"]["A.T1.0"]["pricePerUnit"] = {"CNY": "3"}
    refused(yuan, "prices in CNY, not in USD: use a list in dollars")
    refused({"terms": {}, "products": {}}, "its terms come before its products")
    refused([1], r"'\[' in place of '\{'")
    path = write_offer(tmp_path, offer())
    path.write_text(path.read_text("utf-8")[:-40], encoding="utf-8")
    with pytest.raises(ConfigError, match="AmazonEC2 in JSON: it ends early; download"):
        read_prices(path)
    path.write_text('{"products": {"A": {x}}}', encoding="utf-8")
    with pytest.raises(ConfigError, match="in JSON: Expecting property name"):
        read_prices(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prices(tmp_path / "missing.json")
