"""Prices of profiles; tokens, time and dollars, as published."""

import datetime
import re
from pathlib import Path
from typing import Any

import pytest
from present import present

from slurmllm.core.config.profiles import available
from slurmllm.core.config.resolve import clusters_dir, resolve
from slurmllm.core.errors import ConfigError, UserError
from slurmllm.plan.mesh import make_mesh
from slurmllm.plan.prices import NodePrice, cost, parse_price, parse_tokens, select_price
from slurmllm.plan.search import LayoutEstimate, MemoryUse
from slurmllm.plan.step import StepTime


def cluster(name: str, *overrides: str) -> Any:
    return resolve("neox_20b", name, [f"cluster.{item}" for item in overrides])


def test_the_price_is_the_users_else_the_profiles() -> None:
    assert select_price(cluster("p5"), 19.25) == NodePrice(19.25)
    result = select_price(cluster("p4d"), None)
    assert result
    assert (result.usd, result.date) == (21.957642, "2026-11-09")
    assert str(result).startswith("$21.96 per node hour, 2026-11-09 (github.com")
    assert select_price(cluster("local"), None) is None
    assert select_price(cluster("p5", "price=null"), None) is None
    priced = {name for name in available(clusters_dir()) if select_price(cluster(name), None)}
    assert priced == {"p4d", "p4de", "p5", "p5en", "trn1", "trn1n"}


def test_owned_nodes_are_paid_while_a_run_waits(tmp_path: Path) -> None:
    assert not present(select_price(cluster("p5"), None)).bills_waiting
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: p5\ndevices_per_node: 4\nprice: {on_demand: 20, date: 2026-11-20}\n")
    assert all(present(select_price(cluster(str(mine)), usd)).bills_waiting for usd in (None, 12.0))
    mine.write_text(mine.read_text() + "instance_type: p5.4xlarge\n")
    assert not present(select_price(cluster(str(mine)), None)).bills_waiting


@pytest.mark.parametrize("value", ["", "$3", "-1", "nan", "inf", "0", "3y", "21,50"])
def test_a_price_that_is_not_a_number_above_0(value: str) -> None:
    with pytest.raises(UserError, match="dollars for an hour of one node, above 0"):
        parse_price(value)


def test_old_prices_are_warned_of() -> None:
    price = NodePrice(21.5, "2026-01-01", "a list")
    assert price.warnings("trn1", datetime.date(2026, 6, 1)) == []
    (warning,) = price.warnings("trn1", datetime.date(2026, 9, 1))
    assert warning.startswith("the price of trn1 is of 2026-01-01, 8 months ago; --price USD")
    assert NodePrice(21.5).warnings("trn1") == []


RESERVED = NodePrice(7.59)  # dollars for an hour of a trn1.32xlarge, for three years, by AWS's post


def candidate(recipe: str, nodes: int, seq_per_s: float, *overrides: str) -> LayoutEstimate:
    """A layout with a throughput that somebody has measured."""
    config = resolve(recipe, overrides=overrides)
    mesh = make_mesh(config, nodes)
    seconds = dict.fromkeys(StepTime.__dataclass_fields__, 0.0)
    seconds["compute"] = mesh.global_batch / seq_per_s
    return LayoutEstimate(config, mesh, MemoryUse({}, 1), StepTime(**seconds), 0.0)


def test_tokens_per_dollar_of_the_aws_post() -> None:
    """3.2 million for GPT-NeoX 20B, says the post, whose own throughput and price make 3.30."""
    neox = candidate("neox_20b", 4, 13.6)
    result = cost(neox, None, RESERVED)
    assert result.tokens_per_usd == pytest.approx(13.6 * 2048 * 3600 / (4 * 7.59))
    assert result.tokens_per_usd == pytest.approx(3.2e6, rel=0.04)
    assert result.usd_per_hour == pytest.approx(30.36)
    assert cost(neox, None, RESERVED, effective=0.9).tokens_per_usd == result.tokens_per_usd


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
    result = cost(layout, 10**9, NodePrice(21.50))
    assert result.hours == pytest.approx(hours, rel=0.05)
    assert result.usd == pytest.approx(usd, rel=0.03)
    a_step = layout.mesh.global_batch * layout.config.recipe.model.seq_len
    assert result.tokens == result.steps * a_step
    assert result.tokens - a_step < 10**9 <= result.tokens


def test_losses_are_bought_and_waits_where_nodes_are_paid_while_waiting() -> None:
    layout = candidate("neox_20b", 4, 13.6)
    price = NodePrice(10.0)
    free, lossy = cost(layout, None, price), cost(layout, None, price, effective=0.9, goodput=0.8)
    assert free.steps == layout.config.recipe.train.steps == 10_000
    assert free.tokens == 10_000 * layout.mesh.global_batch * 2048
    assert free.node_hours == pytest.approx(4 * free.hours)
    assert (lossy.node_hours, lossy.hours) == pytest.approx(
        (free.node_hours / 0.9, free.hours / 0.8)
    )
    assert lossy.usd == pytest.approx(lossy.node_hours * 10)
    assert cost(layout, None, price, effective=0.9).hours == pytest.approx(free.hours / 0.9)
    free = cost(layout, None, RESERVED, 0.9, 0.8)
    paid = cost(layout, None, NodePrice(7.59, bills_waiting=True), 0.9, 0.8)
    assert (free.waiting_usd, paid.hours) == (0, free.hours)
    assert paid.usd == pytest.approx(paid.hours * 4 * 7.59)
    assert paid.waiting_usd == pytest.approx(present(paid.usd) - present(free.usd))


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
        ("price.reserved=40", "price.reserved was removed; give the price"),
        ("price.on_demand=cheap", "price.on_demand: 'cheap' .*must be a valid number"),
        ("price.date=2023-W50-2", "price.date: '2023-W50-2' .*must be a day"),
        ("price.monthly=3", "price.monthly: unknown field .*known here: on_demand, date"),
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
