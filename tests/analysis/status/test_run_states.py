"""Where runs stand and what they have cost, from their records and one question to Slurm."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm
from made_records import make_run, save_attempt, save_manifest, save_skips, save_submission
from present import present
from training_rows import make_row, write_rows

from slurmllm.analysis.status.runs import node_hours, run_state, run_states
from slurmllm.core.config.load import read_summary
from slurmllm.core.errors import ConfigError, SlurmError
from slurmllm.core.metrics.step_time import read_pace
from slurmllm.core.run.records import AttemptRecord, Event, Heartbeat
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.slurm.client import AccountingRow, QueuedJob

PRICE = "cluster.price={on_demand: 20.0, date: '2026-01-01'}"


class CountingSlurm(FakeSlurm):
    """Counts the queries; has job 7 as running, and no other."""

    def __init__(self, silent: bool = False) -> None:
        super().__init__()
        self.silent, self.queues, self.accountings = silent, 0, 0

    def queue(self, job_ids: Sequence[str]) -> dict[str, QueuedJob]:
        self.queues += 1
        if self.silent:
            raise SlurmError("squeue did not answer")
        return {job: QueuedJob(job, "RUNNING", "None", "n[1-2]") for job in job_ids if job == "7"}

    def accounting(self, *job_ids: str) -> list[AccountingRow]:
        self.accountings += 1
        return []


def make(folder: Path, name: str = "r", job: str = "7", *overrides: str) -> RunDir:
    run = make_run(folder / name, "train.steps=100", *overrides)
    save_submission(run, nodes=2, precompile_job="6", train_job=job)
    return run


def attempt(run: RunDir, number: int, began: float, ended: float | None, **more: Any) -> None:
    values = {"job_id": "7", "nodes": ("n1", "n2"), "started_at": began, "ended_at": ended}
    save_attempt(run, number, **(values | more))


def steps(run: RunDir, number: int, first: int, last: int, step_s: float = 2.0) -> None:
    rates = {"loss": 5.0, "seq_per_s": 8 / step_s, "tokens_per_s": 80 / step_s}
    rows = []
    for step in range(first, last + 1):
        times = {"time": 1000.0 + step, "step_time_s": 60.0 if step == first else step_s}
        rows.append(make_row(step, number, tokens=10 * step, **rates, **times))
    with write_rows(run.metrics(number), rows).open("a") as stream:
        stream.write('{"step": 9')


def test_a_run_that_trains(tmp_path: Path) -> None:
    run, now = make(tmp_path, "r", "7", PRICE), time.time()
    attempt(run, 0, now - 7200, now - 3600, ending="node_failure", action="requeue")
    attempt(run, 0, now - 9000, now - 7200, stage="precompile", nodes=("n1",))
    attempt(run, 1, now - 1800, None, checkpoint_before=20)
    steps(run, 0, 1, 25, step_s=9.0)
    steps(run, 1, 21, 40)
    save = Event(kind="save", step=30, attempt=1, time=now, waited_s=10.0)
    run.events(1).parent.mkdir()
    run.events(1).write_text(save.model_dump_json() + "\n")
    save_manifest(run, 30, attempt=1, saved_at=now - 60)
    (run.checkpoints / "step_00000040").mkdir()  # a save that goes on
    state = run_state(run, CountingSlurm())
    assert (state.state, state.step, state.loss, state.tokens) == ("training", 40, 5.0, 400)
    assert state.seq_per_s == 4.0
    # 60 steps of 2 s, and of 10 s of waiting for a save in 20 steps.
    assert state.eta_s == pytest.approx(60 * 2.5)
    assert state.finish_at == pytest.approx(now + 150, abs=5)
    checkpoint = present(state.last_checkpoint)
    assert (checkpoint.step, state.restarts) == (30, 1)
    assert checkpoint.age_s == pytest.approx(60, abs=5)
    assert state.node_hours == pytest.approx(0.5 + 2.0 + 1.0, abs=0.01)
    assert state.usd == pytest.approx(20 * state.node_hours)


def test_an_attempt_without_a_step_recomputes_the_lost_ones(tmp_path: Path) -> None:
    run = make(tmp_path)
    attempt(run, 0, 1.0, 2.0, ending="node_failure", action="requeue")
    attempt(run, 1, 3.0, None, checkpoint_before=20)
    steps(run, 0, 1, 25)
    state = run_state(run, CountingSlurm())
    assert state.step == 25
    assert state.eta_s == pytest.approx(80 * 2.0)
    attempt(run, 1, 3.0, None, checkpoint_before=20, world_size=1)
    assert run_state(run, CountingSlurm()).eta_s is None  # nothing is known of so few workers


@pytest.mark.parametrize(
    ("line", "late", "state"),
    [
        ("n2: cluster.setup: line 1 failed with exit code 3: . x", False, "stopped"),
        ("error: n2 has no interpreter /x/python; install it there", False, "stopped"),
        ("n2: cluster.setup: line 1 failed with exit code 3: . x", True, "interrupted"),
        ("step 7 loss 2.0", False, "interrupted"),
    ],
)
def test_a_script_that_ended_before_its_supervisor(
    tmp_path: Path, line: str, late: bool, state: str
) -> None:
    run, slurm = make(tmp_path, job="8"), FakeSlurm()
    run.logs.mkdir(exist_ok=True)
    run.stage_log("train").write_text(f"{line}\n")
    if late:  # of an earlier submission
        os.utime(run.stage_log("train"), (1.0, 1.0))
    job, now = slurm.submit("#!/bin/bash\n"), time.time()
    save_submission(run, nodes=2, train_job=job, submitted_at=now)
    slurm.start(job)
    slurm.finish(job, "FAILED")
    found = run_state(run, slurm)
    assert found.state == state
    reason = f"bad_configuration: {line.removeprefix('error: ')}"
    assert (found.reason == reason) is (state == "stopped")


@pytest.mark.parametrize(
    ("ending", "text"),
    [("FAILED", "FAILED before its script printed a line"), ("NODE_FAIL", "train job NODE_FAIL")],
)
def test_a_script_that_a_signal_ended_at_its_start(ending: str, text: str, tmp_path: Path) -> None:
    run, slurm = make(tmp_path, job="8"), FakeSlurm()
    run.logs.mkdir(exist_ok=True)
    run.stage_log("train").touch()
    job = slurm.submit("#!/bin/bash\n")
    save_submission(run, nodes=2, train_job=job, submitted_at=time.time())
    slurm.start(job)
    slurm.finish(job, ending)
    found = run_state(run, slurm)
    assert (found.state, text in found.reason) == ("interrupted", True)
    assert ("slurm.signal_lead_s" in found.reason) is (ending == "FAILED")


def test_one_slow_step_does_not_change_the_pace(tmp_path: Path) -> None:
    run = make(tmp_path)
    steps(run, 0, 1, 500)
    lines = run.metrics(0).read_text().splitlines()
    lines[-2] = lines[-2].replace('"step_time_s": 2.0', '"step_time_s": 300.0')
    run.metrics(0).write_text("\n".join(lines))
    pace = present(read_pace(run, []))
    assert (pace.step_s, pace.seq_per_s, pace.seconds(10)) == (2.0, 4.0, 20.0)


def test_rates_are_medians_of_rows_that_came_at_once_too(tmp_path: Path) -> None:
    run = make(tmp_path)
    steps(run, 0, 1, 50)
    *lines, last, _ = run.metrics(0).read_text().splitlines()
    lines = [line.replace('"step_time_s"', '"_"') for line in lines]
    last = last.replace('"seq_per_s": 4.0', '"seq_per_s": 1.0')
    run.metrics(0).write_text("\n".join([*lines, last, ""]))
    assert present(read_pace(run, [])).seq_per_s == 4.0


def test_an_invalidated_checkpoint_is_not_the_last(tmp_path: Path) -> None:
    run = make(tmp_path)
    for step in (10, 20):
        save_manifest(run, step)
    save_skips(run, onset=15)
    assert present(run_state(run, CountingSlurm()).last_checkpoint).step == 10


def test_an_attempt_without_an_end_counts_up_to_its_last_sign_of_life(tmp_path: Path) -> None:
    run = make(tmp_path)
    attempt(run, 0, 1000.0, None)
    Heartbeat(node="n2", written_at=2800.0, ranks={}).save(run.attempt("train", 0).heartbeat("n2"))
    records = [AttemptRecord.load(run.attempt("train", 0).record)]
    assert node_hours(run, records, running=False, now=9e9) == pytest.approx(2 * 0.5)
    assert node_hours(run, records, running=True, now=4600.0) == pytest.approx(2 * 1.0)


def test_slurm_is_queried_once_and_only_for_runs_that_have_not_ended(tmp_path: Path) -> None:
    for action, ending in (("finish", "done"), ("stop", "code_error")):
        run = make(tmp_path, action, "5")
        attempt(run, 0, 1.0, 2.0, action=action, ending=ending, evidence=("why",))
    attempt(make(tmp_path, "runs"), 0, 1.0, None)
    make(tmp_path, "damaged").jobs.write_text("{")
    make(tmp_path, "gone").config.unlink()
    names = ("finish", "stop", "runs", "damaged", "gone")
    runs, slurm = [RunDir(tmp_path / name) for name in names], CountingSlurm()
    states = {state.name: state for state in run_states(runs, slurm)}
    shown = [state.state for state in states.values()]
    assert shown == ["done", "stopped", "training", "damaged", "damaged"]
    assert (slurm.queues, slurm.accountings) == (1, 0)
    assert states["stop"].reason == "code_error: why"
    assert "jobs.json is damaged" in states["damaged"].reason
    silent = {state.name: state for state in run_states(runs, CountingSlurm(silent=True))}
    assert (silent["finish"].state, silent["stop"].state) == ("done", "stopped")
    assert silent["runs"].slurm_unreachable


@pytest.mark.parametrize(
    ("local", "cancelled_at", "silent", "state"),
    [
        (True, 5.0, False, "cancelled"),
        (True, None, False, "interrupted"),
        (False, 5.0, False, "cancelled"),  # Slurm has forgotten the job
        (False, 5.0, True, "unknown"),
    ],
)
def test_a_run_that_was_cancelled_between_attempts(
    local: bool, cancelled_at: float | None, silent: bool, state: str, tmp_path: Path
) -> None:
    run = make(tmp_path, "r", "5")
    save_submission(run, train_job="5", local=local, cancelled_at=cancelled_at)
    attempt(run, 0, 1.0, 2.0, ending="node_failure", action="requeue")
    assert run_state(run, CountingSlurm(silent)).state == state


@pytest.mark.parametrize("overrides", [(), (PRICE,)])
def test_the_summary_equals_the_configuration(overrides: tuple[str, ...], tmp_path: Path) -> None:
    summary = read_summary(make(tmp_path, "r", "7", *overrides).config)
    usd = 20.0 if overrides else None
    assert (summary.recipe, summary.steps, summary.usd_per_node_hour) == ("tiny_neox", 100, usd)


@pytest.mark.parametrize(
    ("before", "after"), [("steps: 100", "steps: 0"), ("on_demand: 20.0", "on_demand: .inf")]
)
def test_a_summary_of_wrong_figures_is_refused(before: str, after: str, tmp_path: Path) -> None:
    config = make(tmp_path, "r", "7", PRICE).config
    text = config.read_text()
    assert text.count(f" {before}\n") == 1
    config.write_text(text.replace(before, after))
    with pytest.raises(ConfigError, match=before.partition(":")[0]):
        read_summary(config)


@pytest.mark.parametrize("folder", [False, True])
def test_a_damaged_manifest_of_graphs_is_a_line_of_status(tmp_path: Path, folder: bool) -> None:
    run = make(tmp_path)
    run.graphs.mkdir()
    run.micro_batch.write_text("{")
    if folder:
        run.graphs_manifest.mkdir()
    else:
        run.graphs_manifest.write_text('{"complete": true,')
    details = present(run_state(run, CountingSlurm()).details)
    assert (details.graphs, details.micro_batch) == (None, None)
    (line,) = details.uncompiled
    assert "manifest.json" in line
    assert line.endswith("`slurmllm resume r` compiles the graphs again")
