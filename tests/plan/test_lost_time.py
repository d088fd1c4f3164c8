"""What runs lose on average: the formulas against the simulation, Young's, and the presets."""

import math
from dataclasses import asdict

import month
import numpy as np
import pytest
from _month.scenario import DAY_S, RandomFailures, Scenario
from _month.simulation import simulate
from amounts import sample

from slurmllm.analysis.status.utilization import account_node_hours
from slurmllm.core.config.resolve import resolve
from slurmllm.core.errors import ConfigError
from slurmllm.plan.lost_time import (
    HOUR_S,
    DetectionDelay,
    Durations,
    LostTime,
    SaveCost,
    assumed,
    best_interval_s,
    expected_losses,
    lost_time,
    mtbf_s,
    noticing,
    published_failures,
    restarts,
)
from slurmllm.plan.parameters import parameters

USUAL = Durations(125.0, 15.0, 10.0, 450.0, 60.0, 10.0)
# Drawn in the simulation
DRAWN = {"start_up": (400.0, 500.0), "noticing": (30.0, 50.0)}
NOTICED = DetectionDelay(40.0, 40.0)
NOTHING, AT_ONCE = Durations(0.0, 0.0, 0.0, 0.0, 0.0, 0.0), DetectionDelay(0.0, 0.0)
STEP_S = 14.3
LIMITS = ("failure_budget", "hang_budget", "no_progress_limit")
NO_STOPS = tuple(f"slurm.{limit}=1000000" for limit in LIMITS)


@pytest.mark.parametrize(
    ("nodes", "every", "save", "limit_h"),
    sample(
        1,
        [
            (4096, 50, SaveCost(30.0, 400.0), None),
            (64, 100, SaveCost(60.0, 60.0), 12),
            (512, 150, SaveCost(2.0, 60.0), 3),
            (4, None, SaveCost(2.0, 60.0), 48),
        ],
        arguments=4,
    ),
)
def test_the_simulation_comes_to_the_same(
    nodes: int, every: int | None, save: SaveCost, limit_h: int | None
) -> None:
    """Within half a point of the node hours, or 1.5 where less than 80 % of them train."""
    mtbf_hours = 3300 / nodes
    no_restarts = "slurm.restart_in_allocation=false"
    config = resolve(
        "tiny_llama",
        overrides=[f"checkpoint.every_steps={every or 'auto'}", no_restarts, *NO_STOPS],
    )
    scenario = Scenario(
        # Two nodes that fail as often as all of them keep the simulation quick.
        config.recipe,
        2,
        STEP_S,
        min(500 * mtbf_hours * HOUR_S, 200 * DAY_S),
        USUAL,
        save,
        RandomFailures({"network": 1 / (2 * mtbf_hours)}),
        DRAWN,
        node_mtbf_hours=2 * mtbf_hours,
        time_limit_s=limit_h and limit_h * HOUR_S,
    )
    many = [simulate(scenario, seed) for seed in range(2)]
    used = [account_node_hours(history) for history in many]
    failed = sum(a.ending == "node_failure" for history in many for a in history.attempts)
    # At the rate that was drawn.
    seen_hours = sum(item.node_hours for item in used) / 2 * nodes / max(failed, 1)
    leaves_s = (limit_h or math.inf) * HOUR_S - config.recipe.slurm.signal_lead_s
    result = expected_losses(
        nodes, STEP_S, save, USUAL, seen_hours, every, leaves_s, noticing=NOTICED
    )
    tolerance = 0.005 if result.effective > 0.8 else 0.015
    for part, share in result.shares.items():
        assert share == pytest.approx(np.mean([u.shares[part] for u in used]), abs=tolerance), part
    assert result.goodput == pytest.approx(np.mean([u.goodput for u in used]), abs=tolerance)


@pytest.mark.long  # test_figures.py has what the formula gives
@pytest.mark.parametrize(
    ("mtbf_hours", "spares", "limit_h", "least"),
    [(10, 2, 48, 0.5), (4, 4, 12, 0.7), (10, 0, 48, 0.1), (20, 8, 24, 0.75), (20, 2, 336, 0.5)],
)
def test_restarts_in_the_job(mtbf_hours: float, spares: int, limit_h: int, least: float) -> None:
    """With Llama 3's mix: the share of restarts, and what they save and cost, as simulated."""
    config = resolve(
        "tiny_llama",
        overrides=[
            "checkpoint.every_steps=auto",
            f"slurm.time={limit_h}:00:00",
            f"slurm.spare_nodes={spares}",
            f"cluster.node_mtbf_hours={16 * mtbf_hours}",
            *NO_STOPS,
        ],
    )
    counts, save = published_failures()["llama3"]["counts"], SaveCost(2.0, 60.0)
    total_hours = 16 * mtbf_hours * sum(counts.values())
    scenario = Scenario(
        config.recipe,
        16,
        STEP_S,
        300 * mtbf_hours * HOUR_S,
        USUAL,
        save,
        RandomFailures({kind: count / total_hours for kind, count in counts.items()}),
        DRAWN,
        node_mtbf_hours=16 * mtbf_hours,
        time_limit_s=limit_h * HOUR_S,
        engineer_s=0.0,
        repair_s=HOUR_S,
    )
    histories = [simulate(scenario, seed) for seed in range(2)]
    used = [account_node_hours(history) for history in histories]
    actions = [
        attempt.action
        for history in histories
        for attempt in history.attempts
        if attempt.ending not in ("advance_signal", "done")
    ]
    leaves_s = limit_h * HOUR_S - config.recipe.slurm.signal_lead_s
    share = restarts(config, 16, leaves_s)
    assert least < share < 1
    assert share == pytest.approx(actions.count("restart") / len(actions), abs=0.06)
    seen_hours = sum(history.node_hours for history in used) / len(actions)  # as it was drawn

    def losses(restarts: float) -> LostTime:
        return expected_losses(
            16, STEP_S, save, USUAL, seen_hours, None, leaves_s, noticing=NOTICED, restarts=restarts
        )

    for figure in ("effective", "goodput"):
        mean = np.mean([getattr(history, figure) for history in used])
        assert getattr(losses(share), figure) == pytest.approx(mean, abs=0.004), figure
    # Each restart spares the run a wait, and adds a start-up at the end of the job's time.
    waits = [1 - lost.goodput / lost.effective for lost in map(losses, (0.0, share))]
    assert waits[1] < waits[0]
    assert losses(share).shares["start_up"] >= losses(0.0).shares["start_up"]


def test_youngs_formula() -> None:
    """A save an interval and half an interval a failure: sqrt(2·cost/MTBF) at the best."""
    result = expected_losses(100, 0.1, SaveCost(10.0, 10.0), NOTHING, 10_000, noticing=AT_ONCE)
    assert 1 - result.effective == pytest.approx((2 * 10 / (100 * HOUR_S)) ** 0.5, rel=0.01)
    assert result.auto_steps == pytest.approx(best_interval_s(10.0, 100 * HOUR_S) / 0.1, rel=1e-4)
    halves = [
        expected_losses(
            100,
            0.1,
            SaveCost(10.0, 10.0),
            NOTHING,
            10_000,
            round(result.auto_steps * factor),
            noticing=AT_ONCE,
        )
        for factor in (0.5, 0.9, 1.1, 2)
    ]
    assert result.effective > max(item.effective for item in halves)


@pytest.mark.parametrize(
    ("mtbf_hours", "save"),
    [(0.1, SaveCost(10.0, 10.0)), (10.0, SaveCost(1.0, 900.0)), (1e4, SaveCost(2.0, 60.0))],
)
def test_saves_are_summed_one_by_one(mtbf_hours: float, save: SaveCost) -> None:
    """Without a limit, an interval is kept if its save counts before the failure."""
    interval_s, between_s = 300.0, mtbf_hours * HOUR_S
    cycle_s = max(interval_s + save.waited_s, save.total_s)
    counts_s = interval_s + save.total_s + cycle_s * np.arange(45 * between_s // cycle_s)
    kept_s = interval_s * math.fsum(np.exp(-counts_s / between_s))
    result = expected_losses(1, 0.1, save, NOTHING, mtbf_hours, 3000, noticing=AT_ONCE)
    assert result.effective == pytest.approx(kept_s / between_s, rel=1e-9)


def test_a_run_that_is_soon_done_has_paid_for_its_start_up() -> None:
    def effective(hours: float) -> float:
        quiet = (SaveCost(0.0, 0.0), USUAL, 1e9)
        return expected_losses(
            4, 1.0, *quiet, leaves_s=47 * HOUR_S, training_s=hours * HOUR_S, noticing=NOTICED
        ).effective

    assert effective(1) == pytest.approx(3600 / (3600 + 15 + 10 + 450 + 60 + 10), rel=1e-3)
    assert effective(1) < effective(10) < effective(47) == effective(1000)


# Durations, asynchronous and blocking save, step time. 7B: AWS has 95.14 seq/s on 16 nodes.
SMALL = Durations(125.0, 15.0, 5.0, 180.0, 30.0, 10.0)
PRESETS = {
    month.MODEL: (month.DURATIONS, [*month.SAVES.values()], month.STEP_S),
    "llama2_7b": (SMALL, [SaveCost(0.5, 10.0), SaveCost(10.0, 10.0)], 1.35),
}


@pytest.mark.parametrize("model", PRESETS)
def test_the_months_presets(model: str) -> None:
    """Assumed by size as they were written down for 128 nodes; the lost time within 0.1 points."""
    preset, saves, step_s = PRESETS[model]
    count = parameters(resolve(model, "trn1").recipe.model)
    for asynchronous, save in zip((True, False), saves, strict=True):
        durations, cost = assumed(count, 128, asynchronous=asynchronous)
        assert asdict(cost) == pytest.approx(asdict(save), rel=0.12)
        for phase, values in asdict(preset).items():
            assert asdict(durations)[phase] == pytest.approx(values, rel=0.03), phase
        theirs, ours = (
            expected_losses(128, step_s, saved, phases, 3300, leaves_s=2 * DAY_S)
            for saved, phases in ((save, preset), (cost, durations))
        )
        assert ours.effective == pytest.approx(theirs.effective, abs=0.001)


def test_the_month_as_it_was_simulated() -> None:
    """The rows of the month: Llama 3's rates, then OPT's."""
    config, leaves_s = resolve(month.MODEL, "trn1"), 2 * DAY_S - 300
    for rates, rows in (("llama3", (98.92, 96.82, 98.50)), ("opt", (97.69, 93.93, 95.58))):
        asynchronous, blocking = month.SAVES.values()
        saves = ((asynchronous, None), (blocking, None), (asynchronous, 200))
        mtbf_hours = 1 / sum(month.published_rates(rates).values())
        for (save, every), row in zip(saves, rows, strict=True):
            result = expected_losses(
                128,
                14.3,
                save,
                month.DURATIONS,
                mtbf_hours,
                every,
                leaves_s,
                noticing=noticing(config, 14.3),
                restarts=restarts(config, 128, leaves_s),
            )
            assert result.effective == pytest.approx(row / 100, abs=0.001)


def test_no_time_to_train() -> None:
    def run_lost_time(*overrides: str) -> LostTime:
        return lost_time(resolve("llama2_70b", "trn1", overrides), 64, 30.0)

    with pytest.raises(ConfigError, match=r"slurm\.time: 0:35:00 less .* choose a longer"):
        run_lost_time("slurm.time=0:35:00")
    with pytest.raises(ConfigError, match=r"node_mtbf_hours: 0\.001 is a failure every 0\.056 s"):
        run_lost_time("cluster.node_mtbf_hours=0.001")
    tiny = lost_time(resolve("tiny_llama", overrides=["slurm.time=0:10:00"]), 1, 0.5)
    assert tiny.effective > 0.3


def test_intervals_and_rates_at_their_extremes() -> None:
    assert best_interval_s(100, 50) == 50
    assert best_interval_s(1e9, 50) == 50
    assert best_interval_s(0, 3600) == 0
    assert best_interval_s(1, math.inf) == math.inf
    with pytest.raises(ValueError, match="above 0"):
        best_interval_s(1, 0)
    assert mtbf_s(128, 0, 0.0, 3300) == pytest.approx(3300 * HOUR_S / 128)
    month = 30 * 24 * 128 * HOUR_S
    assert mtbf_s(128, 59, month, 3300) == pytest.approx((3300 + 30 * 24 * 128) * HOUR_S / 60 / 128)
    assert mtbf_s(128, 0, month, 3300) > mtbf_s(128, 0, 0.0, 3300)
