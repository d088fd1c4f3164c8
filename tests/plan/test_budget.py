"""Plans within a budget and a deadline: the limits, the front, the pictures."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from slurmllm.config.resolve import RunConfig, resolve
from slurmllm.display.pictures import write_picture
from slurmllm.errors import ConfigError, UserError
from slurmllm.plan.budget import Limits, PurchasePlan, parse_limits, purchase_plan, require_prices
from slurmllm.plan.estimate import MemoryUse
from slurmllm.plan.evidence import at_lower_end
from slurmllm.plan.plot import PlanCurve, draw_purchase, picture
from slurmllm.plan.prices import NodePrice
from slurmllm.plan.recipe_plan import RecipePlan, plan_recipe

pytestmark = pytest.mark.usefixtures("layouts_searched_once")


def anything(_: RunConfig) -> tuple[str, ...]:
    return ()


@cache
def plans(usd: tuple[float, float] = (20.0, 60.0)) -> tuple[RecipePlan, ...]:
    return tuple(
        plan_recipe(resolve("gpt3_125m", name), [1, 2, 4], anything, NodePrice(price), 10**10)
        for name, price in zip(("p4d", "p5"), usd, strict=True)
    )


def compared(usd: float | None = None, hours: float | None = None) -> PurchasePlan:
    return purchase_plan(plans(), Limits(usd, hours, f"{hours} h"))


@pytest.mark.parametrize(
    ("budget", "deadline", "limits"),
    [
        ("5000", None, Limits(5000, None)),
        ("$12,500.5", "90m", Limits(12500.5, 1.5)),
        ("1_000", "5400 s", Limits(1000, 1.5)),
        (None, "2d12h", Limits(None, 60)),
        (None, "1w 1 d 0.5h", Limits(None, 192.5)),
    ],
)
def test_limits(budget: str | None, deadline: str | None, limits: Limits) -> None:
    assert parse_limits(budget, deadline) == limits
    assert str(parse_limits("5K", "2d12h")) == "budget $5,000, deadline 2 d 12 h"
    assert str(parse_limits(None, "90m")) == "deadline 90 min"


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "1e400", "5 000", "21,50", "$", "5000 EUR"])
def test_what_is_no_limit(text: str) -> None:
    with pytest.raises(UserError, match="dollars above 0, such as 5000"):
        parse_limits(text, None)
    with pytest.raises(UserError, match=r"its units \(s, m, h, d or w\)"):
        parse_limits(None, text)
    with pytest.raises(UserError, match="its units"):
        parse_limits(None, "0h")


def test_the_front_has_every_plan_that_no_other_beats() -> None:
    result = compared()
    assert len(result.plans) == 6
    figures = [(item.hours, item.usd or 0.0) for item in result.plans]
    for item, (hours, usd) in zip(result.plans, figures, strict=True):
        beaten = any(
            other != (hours, usd) and other[0] <= hours and other[1] <= usd for other in figures
        )
        assert (item in result.front) == (not beaten)
    assert result.choices["fastest"] is min(result.plans, key=lambda item: item.hours)
    assert result.choices["cheapest"] is min(result.plans, key=lambda item: item.usd or 0.0)
    front = compared().front
    assert len(front) >= 3
    middle = front[1]
    within = compared(usd=middle.usd).choices
    assert within == {"fastest": middle, "cheapest": front[-1]}
    in_time = compared(hours=middle.hours).choices
    assert in_time == {"fastest": front[0], "cheapest": middle}
    both = compared(middle.usd, middle.hours)
    assert both.choices == {"fastest": middle, "cheapest": middle}
    assert [both.meets(item) for item in front[:3]] == ["over the budget", "yes", "too late"]
    assert not compared(middle.usd, front[0].hours).choices


def test_plans_that_cannot_be_compared() -> None:
    unpriced = plan_recipe(resolve("gpt3_125m", "p4d"), [1], anything, None, None)
    with pytest.raises(ConfigError, match="no price of p4d: plans cannot be compared with a bud"):
        require_prices([unpriced], Limits(1, None))
    require_prices([unpriced], Limits(None, 1))
    failing = resolve("gpt3_125m", "p4d", ["slurm.time=6"])
    endless = plan_recipe(failing, [1], anything, NodePrice(1.0), None)
    with pytest.raises(ConfigError, match="no plan reaches its end"):
        purchase_plan([endless], Limits(1, None))


def test_a_deadline_needs_no_price() -> None:
    some = [
        plan_recipe(resolve("gpt3_125m", name), [1, 2, 4], anything, price, 10**10)
        for name, price in (("p4d", NodePrice(20.0)), ("p5", None))
    ]
    every = purchase_plan(some, Limits(None, 1e6))
    nodes = [item.point.nodes for item in every.front]
    assert nodes == sorted(set(nodes), reverse=True)
    assert every.choices == {"fastest": every.front[0], "smallest": every.front[-1]}
    assert every.choices["smallest"].point.nodes == 1
    middle = purchase_plan(some, Limits(None, every.front[1].hours))
    assert middle.choices["smallest"] == every.front[1]
    row = every.rows()[0]
    assert (row["usd"], row["node_hours"] > 0) == (None, True)
    assert draw_purchase(every).axes[0].get_ylabel() == "nodes"
    late = str(purchase_plan(some, Limits(None, 0.001)).no_plan_error())
    assert "$" not in late
    assert re.search(r"the fastest is .*; --deadline [\d.]+m would do", late)


def test_rank_lower_compares_the_lower_end_of_the_interval() -> None:
    every = purchase_plan(plans(), Limits(None, 1e6), "lower")
    for item, row in zip(every.front, every.rows(), strict=True):
        assert row["hours_compared"] == item.hours
        slower = row["seq_per_s"] / row["seq_per_s_interval"][0]
        # What a run loses to start-ups does not grow with its steps.
        assert row["hours"] < item.hours < slower * row["hours"]
        assert row["usd"] < row["usd_compared"] < slower * row["usd"]
        assert every.table().rows[every.front.index(item)][-2] == f"{item.usd:,.0f}"
    late = purchase_plan(plans(), Limits(None, every.rows()[0]["hours"]), "lower")
    assert "within the limits at the lower end of the interval" in str(late.no_plan_error())
    # Without published runs, the prediction is compared.
    local = plan_recipe(resolve("tiny_neox", "p5"), [1], anything, None, None, "lower")
    candidate = local.points()[0].candidate
    cpu = replace(
        candidate.config, cluster=candidate.config.cluster.model_copy(update={"device": "cpu"})
    )
    unknown = replace(candidate, config=cpu)
    assert at_lower_end(unknown) is unknown


def test_the_picture_has_a_line_per_profile_and_the_limits() -> None:
    result = compared(50, 10)
    (axes,) = draw_purchase(result).axes
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    assert list(lines) == ["Pareto front", "p4d", "p5", "budget, $50", "deadline, 10 h"]
    p4d_plans = [item for item in result.plans if item.point.cluster == "p4d"]
    assert list(np.asarray(lines["p4d"].get_xdata())) == [item.hours for item in p4d_plans]
    assert list(np.asarray(lines["p4d"].get_ydata())) == [item.usd for item in p4d_plans]
    texts = [text.get_text() for text in axes.texts]
    assert texts[:6] == ["1", "2", "4"] * 2


GIB = 2**30
PARTS = {f"part_{number}": number * GIB for number in range(10)}  # more than there are colours
LAYOUTS = {
    "TP 8 $x$": MemoryUse(PARTS, 40 * GIB),
    "TP 1": MemoryUse({"part_3": 50 * GIB}, 40 * GIB),
}
PRICED = PlanCurve("a_$1", [1, 2, 4], [1e3, 1.9e3, 3.5e3], [10.0, 11.0, 12.0], [8.0, 4.2, 2.3])
UNPRICED = PlanCurve("b", [2, 4], [5e2, 9e2], None)
SINGLE = PlanCurve("c", [4], [1e3], [10.0])


@pytest.mark.parametrize(
    ("curves", "layouts", "panels"),
    [
        ([PRICED, UNPRICED], LAYOUTS, ["tokens/s", "time to the end", "dollars to the end", ""]),
        ([UNPRICED], {}, ["tokens/s"]),
        ([SINGLE], LAYOUTS, [""]),
    ],
)
def test_panels_that_apply(
    curves: list[PlanCurve], layouts: dict[str, MemoryUse], panels: list[str], tmp_path: Path
) -> None:
    figure = picture(curves, layouts)
    assert [axes.get_ylabel() for axes in figure.axes] == panels
    write_picture(figure, tmp_path / "plan.png", "")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_bars_add_up_and_the_limit_is_drawn() -> None:
    (axes,) = picture([], LAYOUTS).axes
    ends: dict[float, float] = {}
    bars = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
    for bar in bars:
        ends[bar.get_y()] = max(ends.get(bar.get_y(), 0.0), bar.get_x() + bar.get_width())
    assert list(ends.values()) == pytest.approx([45.0, 50.0])
    assert set(np.asarray(axes.lines[0].get_xdata())) == {40.0}
    looks = {(bar.get_facecolor(), bar.get_hatch()) for bar in bars}
    assert len(looks) == 9  # a part that is nothing has no bar


def test_the_dashed_line_has_no_loss() -> None:
    figure = picture([PRICED], {})
    measured, ideal = figure.axes[0].lines[:2]
    np.testing.assert_allclose(np.asarray(measured.get_ydata()), PRICED.tokens_per_s)
    np.testing.assert_allclose(np.asarray(ideal.get_ydata()), [1e3, 2e3, 4e3])
    time, ideal = figure.axes[1].lines[:2]
    np.testing.assert_allclose(np.asarray(time.get_ydata()), [8.0, 4.2, 2.3])
    np.testing.assert_allclose(np.asarray(ideal.get_ydata()), [8.0, 4.0, 2.0])
    assert [text.get_text() for text in figure.axes[1].get_yticklabels()] == ["2 h", "4 h", "8 h"]
