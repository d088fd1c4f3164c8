"""Where node hours go: parts that add up, lost steps, recoveries, the verb."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_slurm
import numpy as np
import pytest
from command_line import call
from fake_slurm import FakeSlurm
from hypothesis import given
from hypothesis import strategies as st
from made_records import make_attempt
from training_rows import MakeRun, make_row, make_rows, write_rows

from slurmllm.analysis.status.history import (
    Incarnation,
    RunHistory,
    Steps,
    read_history,
    read_incarnations,
)
from slurmllm.analysis.status.recoveries import find_recoveries, sum_by_ending
from slurmllm.analysis.status.utilization import (
    account_node_hours,
    break_down_time,
    sum_utilization,
)
from slurmllm.core.run.records import TIME_PARTS, AttemptRecord, Submission
from slurmllm.core.slurm.client import AccountingRow

HOUR_S = 3600.0


def attempt(number: int, started: float, ended: float | None, **changed: Any) -> AttemptRecord:
    """An attempt on four nodes; open where it has no end."""
    ending = None if ended is None else "node_failure"
    fields = {"started_at": started, "ended_at": ended, "ending": ending}
    return make_attempt(number, nodes=("n1", "n2", "n3", "n4"), **(fields | changed))


def steps(first: int, seconds: list[float], begin: float, gap_s: float = 0.0) -> Steps:
    taken = np.array(seconds)
    ends = begin + np.cumsum(taken) + gap_s * np.arange(len(taken))
    return Steps(np.arange(first, first + len(taken)), taken, ends)


def lost_and_resumed() -> RunHistory:
    """Steps 1 to 5, a checkpoint after 3, a failure, and steps 4 to 6 in the next attempt."""
    phases = {"preflight": 5.0, "cache": 1.0, "stopping": 2.0}
    done = {"ending": "done", "checkpoint_after": 6, "phases_s": {"preflight": 6.0, "cache": 0.0}}
    return RunHistory(
        name="r",
        attempts=[
            attempt(0, 100.0, 170.0, job_id="7", checkpoint_after=3, phases_s=phases),
            attempt(1, 200.0, 270.0, job_id="7", **done),
        ],
        steps={0: steps(1, [7.0, 4.0, 4.0, 4.0, 4.0], 120.0), 1: steps(4, [9.0, 4.0, 4.0], 230.0)},
        waited_s={0: 3.0, 1: 1.0},
        incarnations=[Incarnation("7", "train", 4, *span) for span in ((98, 180), (197, 271))],
        submissions=[90.0],
    )


def test_each_second_has_its_part() -> None:
    used = account_node_hours(lost_and_resumed())
    hours = {part: value * HOUR_S / 4 for part, value in used.parts.items() if value}
    assert hours == pytest.approx(
        {
            "productive": 3 * 4 + 3 * 4,  # steps 1–3, then 4–6
            "recomputation": 2 * 4,
            "saving": 4,
            "first_step": (7 - 4) + (9 - 4),
            "start_up": (120 - 98 - 6) + (230 - 197 - 6),
            "preflight": 11,
            "cache": 1,
            "idle": (180 - 143 - 3) + (271 - 247 - 1),
        }
    )
    assert used.node_hours * HOUR_S == pytest.approx(4 * (82 + 74))
    assert used.effective == pytest.approx(24 / 156)
    assert used.queue_hours * HOUR_S == pytest.approx(8 + 17)
    assert used.goodput == pytest.approx(24 / (156 + 25))
    assert used.uptime == pytest.approx((24 + 8 + 4) / (156 + 25))
    assert (used.steps, used.steps_lost, used.attempts) == (6, 2, 2)
    history = lost_and_resumed()
    compiled = attempt(0, 10.0, 20.0, stage="precompile", ending="done")
    both = account_node_hours(replace(history, attempts=[compiled, *history.attempts]))
    assert (both.steps, both.steps_lost, both.attempts) == (6, 2, 2)
    assert both.parts["precompile"] * HOUR_S == pytest.approx(4 * 10)
    twice = sum_utilization([used, used])
    assert twice.node_hours == 2 * used.node_hours
    assert twice.goodput == pytest.approx(used.goodput)
    assert (twice.steps, twice.usd, twice.wasted_usd) == (12, None, None)
    priced = account_node_hours(history, usd_per_node_hour=2.0)
    assert priced.usd == pytest.approx(2 * 4 * 156 / HOUR_S)
    assert priced.wasted_usd == pytest.approx(2 * 4 * (156 - 24) / HOUR_S)


def test_evaluations_are_a_part_of_their_own() -> None:
    history = lost_and_resumed()
    used = account_node_hours(replace(history, evaluated_s={0: 5.0, 1: 2.0}))
    without = account_node_hours(history)
    assert used.parts["evaluation"] * HOUR_S / 4 == pytest.approx(7)
    assert used.parts["idle"] == pytest.approx(without.parts["idle"] - 7 * 4 / HOUR_S)
    assert used.productive_hours == without.productive_hours


def test_an_excess_is_taken_from_the_waits_for_saves_first() -> None:
    """The wait for an asynchronous save may be within a step's time, which then stays whole."""
    alone = attempt(0, 100.0, 140.0, ending="done", checkpoint_after=5)
    history = RunHistory("r", [alone], {0: steps(1, [6.0] * 5, 108.0)}, waited_s={0: 5.0})
    (time,) = break_down_time(history)
    measured = {part: seconds for part, seconds in time.parts_s.items() if seconds}
    assert measured == pytest.approx({"productive": 30.0, "start_up": 8.0, "saving": 2.0})
    assert time.overlap_s == 0.0
    # More than the waits: all parts in proportion.
    (time,) = break_down_time(replace(history, evaluated_s={0: 10.0}))
    assert time.parts_s["saving"] == 0.0
    assert time.parts_s["productive"] == pytest.approx(30 * 40 / 48)
    assert time.overlap_s == pytest.approx(8.0)


def test_a_recovery_has_its_phases() -> None:
    (lost,) = find_recoveries(lost_and_resumed())
    assert lost.seconds == pytest.approx(239 - 143)
    phases = {"noticing": 25, "stopping": 2, "requeue": 30}
    phases |= {"preflight": 6, "start_up": 24, "first_step": 9}
    assert {phase: s for phase, s in lost.phases_s.items() if s} == pytest.approx(phases)
    assert lost.beyond_requeue_s == pytest.approx(66)
    assert (lost.last_step, lost.steps_lost, lost.ending) == (5, 2, "node_failure")
    (loss,) = sum_by_ending([lost])
    assert loss.node_hours * HOUR_S == pytest.approx(4 * (96 + 8))


def test_a_failure_while_recovering_is_part_of_the_recovery() -> None:
    history = lost_and_resumed()
    first, last = history.attempts
    between = attempt(1, 175.0, 190.0, job_id="7", ending="hang")
    attempts = [first, between, last.model_copy(update={"attempt": 2})]
    made = {0: history.steps[0], 2: history.steps[1]}
    (lost,) = find_recoveries(replace(history, attempts=attempts, steps=made))
    assert lost.further == ("hang",)
    assert lost.phases_s["failed_attempts"] == 15
    assert lost.seconds == pytest.approx(96)


@pytest.mark.parametrize(
    ("ending", "ended", "num_kept"),
    [("node_failure", 150.0, 3), ("done", 150.0, 5), (None, None, 5)],
)
def test_without_a_later_attempt_the_checkpoint_tells(
    ending: str | None, ended: float | None, num_kept: int
) -> None:
    alone = attempt(0, 100.0, ended, ending=ending, checkpoint_after=3)
    history = RunHistory("r", [alone], {0: steps(1, [1.0] * 5, 120.0)})
    used = account_node_hours(replace(history, evaluated_s={0: 60.0}))
    assert (used.steps, used.steps_lost) == (num_kept, 5 - num_kept)
    text = "clocks" if ended else "no recorded end"  # what follows the last step is not known
    assert [text in line for line in used.warnings] == [True]


def test_the_end_of_an_open_attempt_is_slurm_s() -> None:
    alone = attempt(0, 100.0, None, job_id="1")
    job = Incarnation("1", "train", 1, 100.0, 300.0)
    history = RunHistory("r", [alone], {0: steps(1, [1000.0] * 5, -4800.0)}, incarnations=[job])
    assert any("check the nodes' clocks" in line for line in account_node_hours(history).warnings)


def test_a_resume_below_the_last_checkpoint_loses_what_lies_between() -> None:
    attempts = [attempt(0, 0.0, 50.0, checkpoint_after=5), attempt(1, 60.0, 90.0, ending="done")]
    made = {0: steps(1, [1.0] * 5, 10.0), 1: steps(3, [1.0] * 4, 70.0)}
    used = account_node_hours(RunHistory("r", attempts, made))
    assert (used.steps, used.steps_lost) == (6, 3)


_SECONDS = st.floats(0, 1e5, allow_nan=False)
_PHASES = ["preflight", "cache", "stopping"]


@st.composite
def histories(draw: st.DrawFn) -> RunHistory:
    """Whatever records may hold: overlaps, clocks that are off, absurd phases."""
    attempts, made, waited, spans = [], {}, {}, []
    for number in range(draw(st.integers(0, 4))):
        started = draw(_SECONDS)
        ended = draw(st.none() | st.floats(0, 1e5).map(started.__add__))
        stage = draw(st.sampled_from(["train", "precompile"]))
        fields = {
            "job_id": draw(st.sampled_from([None, "1"])),
            "checkpoint_after": draw(st.none() | st.integers(0, 9)),
            "phases_s": draw(st.dictionaries(st.sampled_from(_PHASES), _SECONDS)),
        }
        attempts.append(attempt(number, started, ended, stage=stage, **fields))
        seconds = draw(st.lists(st.floats(0, 1e4), max_size=4))
        if seconds and stage == "train":
            made[number] = steps(draw(st.integers(1, 9)), seconds, draw(_SECONDS))
            waited[number] = draw(_SECONDS)
        if draw(st.booleans()):
            begin = started + draw(st.floats(-5, 5))
            spans.append(Incarnation("1", "train", 3, begin, begin + draw(_SECONDS)))
    return RunHistory("r", attempts, made, waited, incarnations=spans, submissions=[0.0])


@given(histories())
def test_parts_add_up(history: RunHistory) -> None:
    used = account_node_hours(history)
    assert all(hours >= 0 for hours in used.parts.values())
    assert math.isclose(math.fsum(used.parts.values()), used.node_hours, rel_tol=1e-9, abs_tol=1e-9)
    allocations = break_down_time(history)
    assert used.node_hours == pytest.approx(
        sum(time.nodes * (time.end - time.start) for time in allocations) / HOUR_S
    )
    assert len(allocations) >= max(len(history.attempts), len(history.incarnations))
    assert used.productive_hours <= used.training_hours + 1e-9
    for lost in find_recoveries(history):
        assert all(seconds >= 0 for seconds in lost.phases_s.values())
        if lost.seconds is not None:
            assert math.isclose(sum(lost.phases_s.values()), lost.seconds, abs_tol=1e-6)


def test_what_can_be_read_is_read(make_run: MakeRun) -> None:
    run = make_run("r", make_rows(1, 5), make_rows(4, 6, attempt=1))
    begin = 1.7e9
    attempt(0, begin - 9, begin + 3, checkpoint_after=3).save(run.attempt("train", 0).record)
    run.attempt("train", 1).record.parent.mkdir(parents=True)
    run.attempt("train", 1).record.write_text("{")
    with run.metrics(0).open("a") as stream:
        stream.write('{"step": 6, "att')
    saved = {"kind": "save", "step": 3, "attempt": 0, "time": begin, "waited_s": 0.25, "seconds": 1}
    endless = saved | {"waited_s": 1e308}  # two of them have no finite sum
    with write_rows(run.events(0), [saved, endless, endless]).open("a") as stream:
        stream.write('{"kind": "sa')
    history = read_history(run)
    assert history.waited_s == {0: 0.25}
    assert history.saves == [(0.25, 1.0)]
    warnings = "\n".join(history.warnings)
    assert "skipped the truncated last line" in warnings
    assert "is damaged" in warnings
    assert "no attempt record of attempt 1" in warnings
    assert account_node_hours(history).steps == 3


def test_a_trainer_that_logs_its_first_step_and_every_tenth(make_run: MakeRun) -> None:
    rows = [make_row(step, step_time_s=2.0, time=1.7e9 + 2 * step) for step in (1, 11, 21)]
    run = make_run("r", rows)
    for resumed in (0, 95):  # it began anew all the same
        record = attempt(0, 1.7e9, None, checkpoint_before=resumed)
        record.save(run.attempt("train", 0).record)
        (steps,) = read_history(run).steps.values()
        assert steps.numbers.tolist() == list(range(1, 22))


def test_an_attempt_of_a_newer_version_counts(make_run: MakeRun) -> None:
    run = make_run("r", make_rows(1, 5))
    path = run.attempt("train", 0).record
    attempt(0, 1.7e9 - 9, 1.7e9 + 3, checkpoint_after=3).save(path)
    held = json.loads(path.read_text())
    path.write_text(json.dumps(held | {"class": "preempted_kindly", "mood": "calm"}))
    history = read_history(run)
    assert [(a.ended_at, a.ending) for a in history.attempts] == [(1.7e9 + 3, None)]
    assert history.warnings[0].startswith(f"{path}: class is 'preempted_kindly'; ignoring these")
    path.write_text(json.dumps(held | {"nodes": "n1"}))
    assert "is damaged: nodes" in read_history(run).warnings[0]


def test_slurms_own_node_hours() -> None:
    slurm = FakeSlurm(["n1", "n2", "n3"])
    slurm.jobs["7"] = job = fake_slurm._Job("7", "#SBATCH --nodes=3\n", None)
    for state, nodes, start, end in (
        ("NODE_FAIL", "n[1-3]", "2026-01-01T10:00:00", "2026-01-01T11:00:00"),
        ("CANCELLED", "None assigned", "None", "2026-01-01T11:30:00"),
        ("RUNNING", "n2,n3", "2026-01-01T12:00:00", "Unknown"),
    ):
        job.incarnations.append(AccountingRow("7", state, "0:0", nodes, start, end))
    job.state = "COMPLETED"
    sent = Submission(submitted_at=0.0, nodes=3, local=False, first_attempt=0, train_job="7")
    first, second = read_incarnations([sent], slurm)
    assert (first.nodes, first.end - first.start, first.running) == (3, HOUR_S, False)
    assert (second.nodes, second.running) == (2, True)


def test_attempts_of_one_job_start_share_its_time_and_spare_nodes_are_idle() -> None:
    """A job of five nodes, one of them spare; a crash and a restart in the allocation."""
    history = lost_and_resumed()
    held = replace(history, incarnations=[Incarnation("7", "train", 5, 98.0, 271.0)])
    first, second = break_down_time(held)
    assert (first.start, first.end, second.start, second.end) == (98.0, 200.0, 200.0, 271.0)
    assert (first.nodes, first.spare_nodes) == (4, 1)
    used = account_node_hours(held)
    assert used.node_hours * HOUR_S == pytest.approx(5 * 173)
    assert math.fsum(used.parts.values()) == pytest.approx(used.node_hours)
    assert used.parts["productive"] * HOUR_S == pytest.approx(4 * 24)
    assert used.parts["idle"] * HOUR_S >= 173
    # It gave a node up: for accounting the job goes on as another start, without a gap.
    parts = [Incarnation("7", "train", n, *span) for n, span in ((5, (98, 171)), (4, (171, 271)))]
    first, second = break_down_time(replace(history, incarnations=parts))
    assert (first.start, first.end, first.spare_nodes) == (98, 171, 1)
    assert (second.start, second.end, second.spare_nodes) == (171, 271, 0)
    # Accounting that lags behind a requeue has no start for the second attempt yet.
    requeued = [history.attempts[0], history.attempts[1].model_copy(update={"restart_count": 1})]
    late = replace(history, attempts=requeued, incarnations=history.incarnations[:1])
    first, second = break_down_time(late)
    assert (first.end, second.start, second.nodes) == (180.0, 200.0, 4)


def test_the_verb(make_run: MakeRun, tmp_path: Path) -> None:
    begin = 1.7e9
    for name in ("a", "b"):
        run = make_run(name, make_rows(1, 5), make_rows(4, 6, attempt=1))
        attempt(0, begin - 9, begin + 3, checkpoint_after=3).save(run.attempt("train", 0).record)
        write_rows(run.metrics(1), [make_row(s, 1, time=begin + 20 + 0.5 * s) for s in (4, 5, 6)])
        attempt(1, begin + 10, begin + 30, ending="done").save(run.attempt("train", 1).record)
    common = ["report", "a", "b", "--runs-dir", str(tmp_path / "runs"), "--price", "21.5"]
    shown = call(*common, "--no-files")
    assert shown.exit_code == 0, shown.output
    assert "effective utilization" in shown.output
    assert "node_failure" in shown.output
    document = json.loads(call(*common, "--json").output)
    assert [run["name"] for run in document["runs"]] == ["a", "b"]
    used = document["runs"][0]["utilization"]
    assert set(used["parts"]) == set(TIME_PARTS)
    assert document["total"]["node_hours"] == pytest.approx(2 * used["node_hours"])
    assert document["total"]["usd"] == pytest.approx(43 * used["node_hours"])
    assert document["runs"][0]["recoveries"][0]["class"] == "node_failure"


def test_a_run_without_anything_has_nothing(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("empty")
    shown = call("report", "empty", "--runs-dir", tmp_path / "runs")
    assert (shown.exit_code, "0.0000" in shown.output) == (0, True), shown.output
