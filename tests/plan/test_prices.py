"""Prices of profiles, tables and AWS's list; tokens, time and dollars, as published."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurmllm.config.load import load as load_config
from slurmllm.config.profiles import available
from slurmllm.config.resolve import clusters_dir, resolve
from slurmllm.errors import ConfigError, UserError
from slurmllm.plan.estimate import LayoutEstimate, MemoryUse
from slurmllm.plan.mesh import make_mesh
from slurmllm.plan.prices import (
    NodePrice,
    PriceChoice,
    _shipped,
    cost,
    parse_dollars,
    parse_price,
    parse_tokens,
    read_prices,
    scaling,
    select_price,
)
from slurmllm.plan.step import StepTime

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
    assert (result.usd, result.region, result.date) == (usd, region, day)
    assert str(result).startswith(f"${usd:,.2f} per node hour, ")


def test_profiles_have_the_newest_prices_of_the_tables() -> None:
    for name in available(clusters_dir()):
        profile = cluster(name).cluster
        if profile.price is None or profile.instance_type is None:
            continue
        listed = select_price(cluster(name), PriceChoice(region="us-east-1"))
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
        return result.bills_waiting

    assert not any(billed(*item) for item in (("p5", None), ("p4d", "on_demand"), ("p5", "40")))
    assert all(billed(*item) for item in (("trn1", "3y"), ("p5", "capacity_block")))
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: p5\ndevices_per_node: 4\nprice: {on_demand: 20, date: 2026-11-20}\n")
    assert all(billed(str(mine), price) for price in (None, "12"))
    mine.write_text(mine.read_text() + "instance_type: p5.4xlarge\n")
    assert not billed(str(mine), None)


def test_an_unknown_price_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--price 1y: unknown for p5\.48xlarge; known: on_demand"
    ):
        select_price(cluster("p5"), parse_price("1y"))
    with pytest.raises(
        ConfigError, match="--price on_demand: unknown for local; no price is known"
    ):
        select_price(cluster("local"), parse_price("on_demand"))
    table = read_prices(write(tmp_path))
    result = select_price(cluster("p5"), parse_price("1y"), table)
    assert result == NodePrice(
        30.5, "1y", "eu-north-1", "2026-11-01", "our contract", "p5.48xlarge"
    )
    price = select_price(cluster("p4d", "name=mine"), None, table)  # by the profile's name
    assert price.usd == 11.0
    with pytest.raises(ConfigError, match="--price on_demand: unknown for p5"):
        select_price(cluster("p5"), None, table)  # neither the profile's nor a shipped one


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


RESERVED = 7.59  # trn1.32xlarge, dollars an hour: AWS's post of 2023-12-12


def candidate(recipe: str, nodes: int, seq_per_s: float, *overrides: str) -> LayoutEstimate:
    """A layout with a throughput that somebody has measured."""
    config = resolve(recipe, overrides=overrides)
    mesh = make_mesh(config, nodes)
    seconds = dict.fromkeys(StepTime.__dataclass_fields__, 0.0)
    seconds["compute"] = mesh.global_batch / seq_per_s
    return LayoutEstimate(config, mesh, MemoryUse({}, 1), StepTime(**seconds), 0.0)


def test_tokens_per_dollar_and_scaling_of_the_aws_post() -> None:
    """3.2 million for GPT-NeoX 20B, says the post, whose own throughput and price make 3.30."""
    neox = candidate("neox_20b", 4, 13.6)
    result = cost(neox, None, RESERVED)
    assert result.tokens_per_usd == pytest.approx(13.6 * 2048 * 3600 / (4 * 7.59))
    assert result.tokens_per_usd == pytest.approx(3.2e6, rel=0.04)
    assert result.usd_per_hour == pytest.approx(30.36)
    assert cost(neox, None, RESERVED, effective=0.9).tokens_per_usd == result.tokens_per_usd
    assert scaling([(1, 10.4), (4, 35.8)]) == pytest.approx([1.0, 0.86], abs=0.001)
    assert scaling([(16, 54.3), (4, 13.6)]) == pytest.approx([0.998, 1.0], abs=0.001)
    assert scaling([]) == []


def test_spare_nodes_cost_what_the_others_do() -> None:
    held = cost(candidate("neox_20b", 4, 13.6, "slurm.spare_nodes=1"), None, RESERVED)
    plain = cost(candidate("neox_20b", 4, 13.6), None, RESERVED)
    assert held.hours == plain.hours
    assert held.node_hours == pytest.approx(plain.node_hours * 5 / 4)
    assert held.usd_per_hour == pytest.approx(5 * 7.59)


@pytest.mark.parametrize(
    ("recipe", "nodes", "seq_per_s", "hours", "usd"),
    [
        ("pythia_6.9b", 1, 10.4, 13, 280),
        ("neox_20b", 4, 13.6, 10, 860),
        ("llama2_70b", 32, 17.86, 3.8, 2600),
    ],
)
def test_a_billion_tokens_on_demand(
    recipe: str, nodes: int, seq_per_s: float, hours: float, usd: float
) -> None:
    """Of throughputs that AWS published, at its price on demand."""
    layout = candidate(recipe, nodes, seq_per_s)
    result = cost(layout, 10**9, 21.50)
    assert result.hours == pytest.approx(hours, rel=0.05)
    assert result.usd == pytest.approx(usd, rel=0.03)
    a_step = layout.mesh.global_batch * layout.config.recipe.model.seq_len
    assert result.tokens == result.steps * a_step
    assert result.tokens - a_step < 10**9 <= result.tokens


def test_losses_are_bought_and_waits_where_nodes_are_paid_while_waiting() -> None:
    layout = candidate("neox_20b", 4, 13.6)
    free, lossy = cost(layout, None, 10.0), cost(layout, None, 10.0, effective=0.9, goodput=0.8)
    assert free.steps == layout.config.recipe.train.steps == 10_000
    assert free.tokens == 10_000 * layout.mesh.global_batch * 2048
    assert free.node_hours == pytest.approx(4 * free.hours)
    assert (lossy.node_hours, lossy.hours) == pytest.approx(
        (free.node_hours / 0.9, free.hours / 0.8)
    )
    assert lossy.usd == pytest.approx(lossy.node_hours * 10)
    assert cost(layout, None, 10.0, effective=0.9).hours == pytest.approx(free.hours / 0.9)
    free = cost(layout, None, RESERVED, 0.9, 0.8)
    paid = cost(layout, None, RESERVED, 0.9, 0.8, waits_are_paid=True)
    assert (free.waiting_usd, paid.hours) == (0, free.hours)
    assert paid.usd == pytest.approx(paid.hours * 4 * RESERVED)
    assert paid.waiting_usd == pytest.approx(paid.usd - free.usd)


def test_counts_of_tokens() -> None:
    counts = {"20B": 20 * 10**9, "1.5T": 15 * 10**11, "2e9": 2 * 10**9, " 3k ": 3000}
    counts |= {"20_000_000_000": 20 * 10**9, "1.5e+3M": 15 * 10**8, "1000000T": 10**18}
    for text, tokens in counts.items():
        assert parse_tokens(text) == tokens
    wrong = ["", "20 B", "B", "-5B", "0", "nan", "1.5", "1.2345K", "1e-3T", "1e999999999", "1__0"]
    for text in [*wrong, "1000001T", "٣B"]:
        with pytest.raises(UserError, match="375M") as caught:
            parse_tokens(text)
        assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("price.reserved=40", "price.reserved: 40 .*is above on_demand 21.5"),
        ("price.on_demand=cheap", "price.on_demand: 'cheap' .*must be a valid number"),
        ("price.date=2023-W50-2", "price.date: '2023-W50-2' .*must be a day"),
        ("price.monthly=3", "price.monthly: unknown field .*known here: on_demand, reserved"),
        ("hardware.matrix_efficiency=1.3", "matrix_efficiency: 1.3 .*less than or equal to 1"),
        ("hardware.network_gb_s=0", "network_gb_s: 0 .*greater than 0"),
        ("hardware.bf16_tflops=.inf", "bf16_tflops: inf .*finite"),
        ("hardware.reserved_gib=16", "reserved_gib: 16 .*leaves nothing of memory_gib 16"),
        ("price.date=2999-01-01", "in the future"),
    ],
)
def test_contradictory_profiles(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("neox_20b", "trn1", [f"cluster.{override}"])
    (fault,) = caught.value.faults
    assert fault.startswith("cluster.")
    assert re.search(message, fault), fault
