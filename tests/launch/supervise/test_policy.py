"""The action after an ending: budgets, backoff, and the nodes to exclude."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch.supervise.starts import attempt_record

from slurmllm.core.config.recipe import Recipe
from slurmllm.core.config.resolve import resolve
from slurmllm.core.run.records import AttemptRecord, EndingClass
from slurmllm.launch.supervise.policy import decide, exclusion_hours, failing_nodes, is_transient

HOUR_S = 3600.0
FULL = "cannot save /r: No space left on device; 0.0 MB are free there"


def recipe(*overrides: str) -> Recipe:
    return resolve("tiny_neox", overrides=overrides).recipe


RECIPE = recipe("slurm.no_progress_limit=100")
SHORT = recipe("slurm.no_progress_limit=3", "slurm.failure_budget=99", "slurm.hang_budget=99")


def attempt(number: int, ending: EndingClass, gained: int = 0, **more: Any) -> AttemptRecord:
    times = {"started_at": number * HOUR_S, "ended_at": (number + 1) * HOUR_S}
    fields: dict[str, Any] = {"attempt": number, "class": ending, "steps_gained": gained, **times}
    return attempt_record(**{**fields, **more})


def play(endings: list[AttemptRecord], of: Recipe = RECIPE) -> list[AttemptRecord]:
    """The attempts as decided one after the other."""
    closed: list[AttemptRecord] = []
    for row in endings:
        closed.append(decide(row, closed, of))
    return closed


@pytest.mark.parametrize(
    ("ending", "budget", "field"),
    [("node_failure", 20, "failure"), ("hang", 5, "hang"), ("storage_failure", 3, "storage")],
)
def test_a_budget_counts_within_its_hours(ending: EndingClass, budget: int, field: str) -> None:
    close = [attempt(n, ending, 10, ended_at=60.0 * n, evidence=(FULL,)) for n in range(budget + 1)]
    decisions = play(close)
    assert [a.action for a in decisions] == ["requeue"] * budget + ["stop"]
    assert f"slurm.{field}_budget is {budget}" in decisions[-1].evidence[-1]
    assert decisions[-1].ending == ending
    # One every five hours, for a week.
    far = [attempt(n, ending, 10, ended_at=5 * HOUR_S * n, evidence=(FULL,)) for n in range(34)]
    assert {a.action for a in play(far)} == ({"requeue"} if budget > 3 else {"requeue", "stop"})


def test_backoff_doubles_while_nothing_is_gained() -> None:
    idle = [attempt(n, "node_failure", ended_at=4 * HOUR_S * n) for n in range(9)]
    decisions = play([*idle, attempt(9, "hang", 5), attempt(10, "hang")])
    assert [a.backoff_s for a in decisions] == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600, 0, 30]
    assert play([attempt(0, "advance_signal")])[0].backoff_s == 0


ENDINGS = st.sampled_from(["node_failure", "hang", "advance_signal"])
GAINS = st.sampled_from([0, 0, 7])


@given(st.lists(st.tuples(ENDINGS, GAINS), min_size=1, max_size=30))
def test_as_many_idle_attempts_in_a_row_as_the_limit_stop_the_run(
    history: list[tuple[EndingClass, int]],
) -> None:
    decisions = play([attempt(n, *row) for n, row in enumerate(history)], SHORT)
    for at, row in enumerate(decisions):
        idle = at >= 2 and not any(a.steps_gained for a in decisions[at - 2 : at + 1])
        assert (row.action == "stop") == idle == (row.ending == "no_progress")


@pytest.mark.parametrize(
    "evidence", ["Slurm: the job is PREEMPTED", "Slurm: PREEMPTED; the supervisor on n1 ended"]
)
def test_preemptions_never_end_a_run(evidence: str) -> None:
    idle = [attempt(n, "advance_signal", evidence=(evidence, "SIGTERM")) for n in range(9)]
    decisions = play([*idle, attempt(9, "hang"), attempt(10, "hang"), idle[0]], SHORT)
    assert {row.action for row in decisions} == {"requeue"}
    assert play([*decisions, attempt(11, "hang")], SHORT)[-1].ending == "no_progress"


def test_a_roll_back_goes_on_and_is_no_idle_attempt() -> None:
    limits = recipe("slurm.no_progress_limit=2")
    diverged = attempt(0, "divergence")
    assert decide(diverged, [], limits).action == "stop"
    back = decide(diverged, [], limits, rolled_back=True)
    assert (back.action, back.backoff_s) == ("requeue", 0.0)
    repeated = decide(attempt(1, "divergence"), [back], limits, rolled_back=True)
    assert repeated.action == "requeue"
    assert decide(attempt(2, "node_failure"), [back, repeated], limits).action == "requeue"


def test_stale_graphs_are_tried_anew_and_a_divergence_after_that_stops_the_run() -> None:
    stale = decide(attempt(0, "stale_graphs"), [], recipe())
    assert (stale.action, stale.backoff_s) == ("requeue", 0.0)
    inside = decide(attempt(0, "stale_graphs"), [], recipe(), in_allocation=True)
    assert inside.action == "restart"
    assert decide(attempt(1, "divergence"), [stale], recipe()).action == "stop"
    # If the graphs could not be rejected, as on a full file system.
    last = play([attempt(number, "stale_graphs") for number in range(3)], SHORT)[-1]
    assert (last.action, last.ending) == ("stop", "no_progress")


@pytest.mark.parametrize(
    ("evidence", "passes"),
    [
        (FULL, True),
        ("cannot write /r/x: Read-only file system", True),
        ("OSError: [Errno 116] Stale file handle", True),
        ("rank 0 on n1 ended with exit code 4 and could not write why", True),
        ("none of the checkpoints in /r verifies: step 10: a.pt has another checksum", False),
        ("cannot save /r: Disk quota exceeded; 5000.0 MB are free there", False),
        ("attempt.json is damaged: nodes: field required", False),
    ],
)
def test_transient_storage_failures(evidence: str, passes: bool) -> None:
    assert is_transient([evidence]) is passes
    closed = decide(attempt(0, "storage_failure", evidence=(evidence,)), [], RECIPE)
    assert closed.action == ("requeue" if passes else "stop")


def blamed(number: int, *names: str, nodes: tuple[str, ...] = ("n1", "n2")) -> AttemptRecord:
    closed = attempt(number, "node_failure", blamed_nodes=names, evidence=("n10: y", "n1 said x"))
    return closed.model_copy(update={"nodes": nodes})


@pytest.mark.parametrize(
    ("earlier", "excluded"),
    [
        ([], False),
        ([blamed(0, "n1")], True),
        ([blamed(0, "n1"), blamed(1)], False),  # not in a row
        ([blamed(0, "n1"), blamed(1, nodes=("n2", "n3"))], True),  # n1 had no part in the last one
        ([blamed(0, "n1", "n2")], False),  # all nodes were blamed: none is special
        ([blamed(0, "n1", nodes=("n1",))], True),
    ],
)
def test_without_evidence_the_second_failure_in_a_row_counts(
    earlier: list[AttemptRecord], excluded: bool
) -> None:
    failing = failing_nodes(blamed(7, "n1"), earlier, {})
    assert [fault.evidence for fault in failing.values()] == ["repeated"] * excluded
    alone = [a.model_copy(update={"nodes": ("n1",)}) for a in (*earlier, blamed(7, "n1"))]
    assert failing_nodes(alone[-1], alone[:-1], {}) == {}  # nothing worked elsewhere
    checked = failing_nodes(blamed(7, "n1"), earlier, {"n1": "check"})
    assert checked == {"n1": ("check", "n1 said x", ())}


def test_bad_nodes_one_after_the_other_do_not_end_a_run() -> None:
    def lost(number: int, *excluded: str) -> AttemptRecord:
        return attempt(number, "node_failure", excluded_nodes=excluded)

    assert play([lost(n, f"n{n}") for n in range(6)], SHORT)[-1].action == "requeue"
    # Blamed twice each, and without evidence the first time.
    pairs = play([lost(n, *[f"n{n}"] * (n % 2)) for n in range(4)], SHORT)
    assert pairs[-1].action == "requeue"
    # The job cannot start without it.
    again = play([lost(n, "n1") for n in range(4)], SHORT)
    assert [a.ending for a in again] == [*["node_failure"] * 3, "no_progress"]


def test_each_exclusion_takes_four_times_as_long() -> None:
    hours = [exclusion_hours("slurm", count, 24.0) for count in (1, 2, 3, 4, 999)]
    assert hours == [(1, 1), (4, 4), (16, 16), (24, 24), (24, 24)]
    assert exclusion_hours("hardware", 1, 24.0) == (1, 24)
    assert exclusion_hours("slow", 2, 24.0) == (4, 1)
    assert exclusion_hours("slurm", 1, 0.5) == (0.5, 0.5)


@pytest.mark.parametrize("ending", ["node_failure", "hang"])
def test_a_job_with_enough_nodes_goes_on_if_it_gained_something(ending: EndingClass) -> None:
    def action(row: AttemptRecord, *earlier: AttemptRecord) -> tuple[str | None, float]:
        decided = decide(row, earlier, RECIPE, in_allocation=True)
        return decided.action, decided.backoff_s

    assert action(attempt(1, ending, 5)) == ("restart", 0)
    assert action(attempt(1, ending)) == ("restart", 0)
    assert action(attempt(1, ending), attempt(0, ending)) == ("requeue", 60)
    assert action(attempt(2, ending, 5), attempt(1, ending), attempt(0, ending))[0] == "restart"
    full = [attempt(n, ending, 5, ended_at=60.0 * n) for n in range(20)]
    assert action(attempt(20, ending, 5, ended_at=1200.0), *full)[0] == "stop"
    assert action(attempt(0, "advance_signal", 5)) == ("requeue", 0)
    for stopping in ("superseded", "code_error", "cancelled", "out_of_memory"):
        assert action(attempt(0, stopping, 10)) == ("stop", 0)


def test_what_takes_the_place_of_a_requeue() -> None:
    left = attempt(0, "advance_signal", 5)
    assert decide(left, (), RECIPE, restart_mode="chain").action == "chain"
    stopped = decide(left, (), RECIPE, restart_mode="none", in_allocation=True)
    assert stopped.action == "stop"
    assert "`slurmllm resume` continues the run" in stopped.evidence[-1]
    failed = attempt(0, "node_failure")
    assert decide(failed, (), RECIPE, restart_mode="chain").backoff_s == 30
    assert decide(failed, (), RECIPE, restart_mode="chain", in_allocation=True).action == "restart"
