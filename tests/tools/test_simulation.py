"""A run in simulated time: its account, the policy that it runs, its interval, real runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from _month.scenario import (
    BLAMES_NODE,
    DAY_S,
    Failure,
    FailureKind,
    FailureQuery,
    RandomFailures,
    Scenario,
)
from _month.simulation import simulate
from hypothesis import example, given, settings
from hypothesis import strategies as st
from present import present

from slurmllm.analysis.status.history import RunHistory
from slurmllm.analysis.status.utilization import account_node_hours, break_down_time
from slurmllm.core.config.recipe import Recipe
from slurmllm.core.config.resolve import resolve
from slurmllm.plan.lost_time import HOUR_S, Durations, SaveCost, best_interval_s

QUICK = Durations(125.0, 15.0, 10.0, 120.0, 60.0, 5.0)


@dataclass(frozen=True)
class Scripted:
    """The failure of one attempt of a real run."""

    kind: FailureKind
    after_s: float  # of steps and saves if `training`, else from the attempt's start
    training: bool  # the extra time of the first step does not count
    node: int = 0  # index


@dataclass(frozen=True)
class ScriptedFailures:
    script: Sequence[Scripted]

    def following(self, query: FailureQuery, rng: np.random.Generator) -> Failure | None:
        if query.attempt >= len(self.script) or query.now > query.started:
            return None
        failure = self.script[query.attempt]
        early = min(query.started + failure.after_s, query.trains_at)
        at = query.trains_at + failure.after_s if failure.training else early
        node = query.nodes[failure.node % len(query.nodes)]
        return Failure(at, failure.kind, node if failure.kind in BLAMES_NODE else None)


def recipe(*overrides: str) -> Recipe:
    return resolve("tiny_llama", overrides=list(overrides)).recipe


def scenario(
    *overrides: str, rates: dict[FailureKind, float] | None = None, **changed: Any
) -> Scenario:
    """Sixteen nodes for two days; a node fails every 200 hours in a way that breaks it."""
    fields: dict[str, Any] = {
        "recipe": recipe(*(overrides or ("checkpoint.every_steps=60",))),
        "nodes": 16,
        "step_s": 10.0,
        "horizon_s": 2 * DAY_S,
        "durations": QUICK,
        "save": SaveCost(5.0, 30.0),
        "failures": RandomFailures(rates if rates is not None else {"device": 1 / 200}),
    }
    return Scenario(**(fields | changed))


def scripted(*script: Scripted, **changed: Any) -> RunHistory:
    return simulate(scenario(failures=ScriptedFailures(script), **changed), seed=0)


@example(rates={"signal": 0.1}, seed=504, steps=None)  # the month ends before preflight does
@settings(max_examples=15)
@given(
    st.dictionaries(
        st.sampled_from(["device", "node", "network", "hang", "storage", "software", "signal"]),
        st.floats(0, 0.1),
    ),
    st.integers(0, 2**20),
    st.sampled_from([None, 1, 500]),
)
def test_steps_count_once(rates: dict[FailureKind, float], seed: int, steps: int | None) -> None:
    planned = scenario(rates=rates, steps=steps, time_limit_s=8 * HOUR_S, horizon_s=DAY_S)
    history = simulate(planned, seed)
    used = account_node_hours(history)
    assert math.fsum(used.parts.values()) == pytest.approx(used.node_hours)
    assert not used.warnings
    made = np.concatenate([s.numbers for s in history.steps.values()] or [np.array([], int)])
    assert used.steps == (history.attempts[-1].checkpoint_after or 0)
    assert set(made) >= set(range(1, used.steps + 1))
    assert used.steps_lost == len(made) - used.steps
    assert steps is None or used.steps <= steps
    assert all((np.diff(s.ends) > 0).all() for s in history.steps.values())
    ends = [(a.started_at, a.ended_at) for a in history.attempts]
    assert all(begin <= end for begin, end in ends if end is not None)
    repeated = simulate(planned, seed)
    assert repeated.attempts == history.attempts


def test_a_failure_costs_what_it_costs() -> None:
    """After 75 steps: one save, after 60 of them; 14 whole steps since, and one under way."""
    at = 60 * 10 + 5 + 14 * 10 + 3  # steps, a wait, steps
    history = scripted(Scripted("device", at, training=True))
    first, second = history.attempts
    assert (first.last_step, first.checkpoint_after, first.steps_lost) == (74, 60, 14)
    assert (first.ending, first.action, first.backoff_s) == ("node_failure", "requeue", 0.0)
    assert first.ended_at == pytest.approx(145 + 60 + at + 15)  # start-up; noticed, closed
    assert second.started_at == pytest.approx(present(first.ended_at) + 125)
    assert first.blamed_nodes[0] not in second.nodes
    assert account_node_hours(history).steps_lost == 14
    history = scripted(Scripted("network", 60 * 10 + 20, training=True))
    assert history.attempts[0].checkpoint_after is None
    assert history.attempts[0].steps_lost == 61  # one step in what the save left free


def test_the_policy_is_the_supervisors() -> None:
    start = Scripted("network", 30, training=False)
    endings = [(a.ending, a.action) for a in scripted(start, start, start).attempts]
    assert endings[:3] == [
        ("node_failure", "restart"),
        ("node_failure", "requeue"),
        ("no_progress", "stop"),
    ]
    backoffs = [a.backoff_s for a in scripted(start, start).attempts]
    assert backoffs == [0.0, 60.0, 0.0]
    (stopped, after) = scripted(Scripted("software", 5000, training=True), engineer_s=999).attempts
    assert stopped.action == "stop"
    assert after.started_at - (stopped.ended_at or 0) == pytest.approx(999 + 125)


def test_a_job_restarts_with_its_healthy_nodes() -> None:
    """A spare node replaces a broken one, without a wait; the job's time limit goes on."""
    settings = ("checkpoint.every_steps=60", "slurm.spare_nodes=1")
    broken = [Scripted("device", 5000, training=True, node=3)] * 2
    history = scripted(
        *broken, recipe=recipe(*settings), time_limit_s=6 * HOUR_S, horizon_s=12 * HOUR_S
    )
    first, second, third, *_ = history.attempts
    assert [a.action for a in history.attempts[:3]] == ["restart", "requeue", "requeue"]
    assert second.started_at == first.ended_at
    assert set(second.nodes) - set(first.nodes) == {"n17"}
    assert (first.phases_s["cache"], second.phases_s["cache"]) == (10.0, 0.0)
    assert third.started_at == pytest.approx((second.ended_at or 0) + 125)
    # The third is the first of its job; a job of restarts has no time of its own.
    assert third.ending == "advance_signal"
    lead_s = recipe().slurm.signal_lead_s
    assert (third.ended_at or 0) - third.started_at == pytest.approx(6 * HOUR_S - lead_s, abs=60)
    limited = scripted(Scripted("network", 5000, training=True), time_limit_s=3 * HOUR_S)
    ends = [a.ended_at for a in limited.attempts if a.ending == "advance_signal"]
    assert ends[0] == pytest.approx(3 * HOUR_S - lead_s, abs=60)


def test_the_storage_is_missed_at_the_next_save() -> None:
    history = scripted(Scripted("storage", 590, training=True))
    assert history.attempts[0].ending == "storage_failure"
    assert history.attempts[0].last_step == 60
    unnoticed = scripted(Scripted("storage", 640, training=True), outage_s=300)
    assert [a.ending for a in unnoticed.attempts] == ["done"]
    history = scripted(Scripted("device", 999, training=True), spares=0, repair_s=HOUR_S)
    first, second = break_down_time(history)
    assert second.start - first.end == pytest.approx(HOUR_S)


@settings(max_examples=3)
@given(st.floats(20, 60), st.floats(2, 8))
def test_the_formulas_interval_is_the_best_one(cost_s: float, mtbf_hours: float) -> None:
    """Within 2 % of the best of a grid of intervals around it, in utilization.

    A hundred simulated failures leave the lost time, 15 % at most, uncertain by a tenth.
    """
    best = best_interval_s(cost_s, mtbf_hours * HOUR_S) / 10
    base = scenario(
        horizon_s=100 * mtbf_hours * HOUR_S,
        save=SaveCost(cost_s, cost_s),
        rates={"network": 1 / (16 * mtbf_hours)},
    )

    def effective(factor: float) -> float:
        near_best = recipe(f"checkpoint.every_steps={max(1, round(best * factor))}")
        return (
            account_node_hours(simulate(replace(base, recipe=near_best), seed=1)).effective or 0.0
        )

    utilizations = {factor: effective(factor) for factor in (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)}
    assert utilizations[1.0] >= max(utilizations.values()) - 0.02
    assert utilizations[0.25] < utilizations[1.0] > utilizations[4.0]


def test_auto_learns_the_rate() -> None:
    """Where the profile is far too hopeful, the run saves oftener once nodes have failed."""
    hopeful = scenario("checkpoint.every_steps=auto", node_mtbf_hours=1e6, horizon_s=20 * DAY_S)
    fixed = replace(hopeful, recipe=recipe("checkpoint.every_steps=2000"))
    auto, rare = (
        fmean(present(account_node_hours(simulate(s, seed)).effective) for seed in range(3))
        for s in (hopeful, fixed)
    )
    assert auto > rare + 0.03
