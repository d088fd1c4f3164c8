"""The plan of a drill: kinds, steps, faults, the run as its own reference."""

from dataclasses import replace
from pathlib import Path

import pytest
from amounts import amount
from fake_slurm import FakeSlurm
from hypothesis import given, settings
from hypothesis import strategies as st
from made_records import save_attempt, save_submission

from slurmllm.analysis.compare.result import Tolerances
from slurmllm.analysis.drill.checks import DrillResult
from slurmllm.analysis.drill.drill import Drill, SlurmRunner
from slurmllm.analysis.drill.injector import FAULT_KINDS, FAULTS, FaultKind
from slurmllm.analysis.drill.plan import DrillPlan, make_plan, parse_kinds, why_no_reference
from slurmllm.cli.drill import _echo_row
from slurmllm.core.config.resolve import change, resolve
from slurmllm.core.run.records import JobsRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.graphs import reuse
from slurmllm.train.schedules import learning_rate

OUR_KINDS = tuple(kind for kind in FAULT_KINDS if not FAULTS[kind].of_commands)
CONFIG = resolve("tiny_neox", "local", ["checkpoint.replica=/elsewhere", "slurm.drain=true"])


def plan_of(
    folder: Path,
    steps: int | None = None,
    seed: int = 0,
    nodes: int = 2,
    overrides: tuple[str, ...] = (),
) -> DrillPlan:
    run = RunDir(folder / "r")
    run.path.mkdir(exist_ok=True)
    kinds = FAULT_KINDS
    return make_plan(run, CONFIG, nodes, True, kinds, steps=steps, seed=seed, overrides=overrides)


@pytest.mark.parametrize(
    ("text", "nodes", "names"),
    [
        ("all", 2, OUR_KINDS),
        ("all", 1, tuple(name for name in OUR_KINDS if name != "node")),
        ("save, worker", 1, ("worker", "save")),
    ],
)
def test_kinds_are_chosen(text: str, nodes: int, names: tuple[FaultKind, ...]) -> None:
    assert parse_kinds(text, nodes) == names


@settings(max_examples=amount(7, of=30), derandomize=True)
@given(steps=st.integers(3, 120), seed=st.integers(), nodes=st.sampled_from([2, 4]))
def test_faults_come_between_checkpoints(
    tmp_path_factory: pytest.TempPathFactory, steps: int, seed: int, nodes: int
) -> None:
    plan = plan_of(tmp_path_factory.mktemp("plan"), steps, seed, nodes)
    names = [f"n{index}" for index in range(nodes)]
    for kind in FAULT_KINDS:
        spec = plan.fault(kind, names)
        assert spec == plan.fault(kind, names)
        assert spec.node == names[spec.rank]  # one worker a node
        assert plan.every_steps < spec.at_step <= 2 * plan.every_steps < steps
        assert (spec.node == "n0") >= (kind in ("first_node", "time_limit", "save"))
        assert (spec.node == "n0") <= (kind != "node")


@pytest.mark.parametrize(
    "schedule",
    [
        (),
        ("optim.decay_start=110", "optim.decay=1-sqrt"),
        ("optim.warmup_steps=0", "optim.warmup_ratio=0.6", "optim.decay_start=110"),
    ],
)
def test_learning_rates_are_the_runs_own(tmp_path: Path, schedule: tuple[str, ...]) -> None:
    plan = plan_of(tmp_path, overrides=schedule)
    drilled = plan.config.recipe
    assert (drilled.checkpoint.replica, drilled.slurm.drain) == (None, False)
    assert plan.config_of("hang").recipe.watchdog.min_step_s == 20.0
    assert plan.config_of("worker") is plan.config_of(None) is plan.config
    changed = change(CONFIG, None, schedule).recipe
    assert drilled.train.steps < changed.train.steps
    for step in range(1, drilled.train.steps + 1):
        assert learning_rate(drilled.optim, drilled.train.steps, step) == learning_rate(
            changed.optim, changed.train.steps, step
        )


def test_the_steps_follow_from_the_pace_of_the_run_and_drills_are_numbered(tmp_path: Path) -> None:
    assert plan_of(tmp_path).every_steps == 20  # as the recipe: nothing is known
    metrics = RunDir(tmp_path / "r").metrics(0)
    metrics.parent.mkdir(parents=True)
    for step_s, every in ((30.0, 4), (0.25, 8), (0.001, 20)):
        times = (100.0, step_s, step_s, 50 * step_s)  # the first step compiles
        rows = (f'{{"step":{step},"step_time_s":{s}}}\n' for step, s in enumerate(times, 1))
        metrics.write_text("".join(rows))
        plan = plan_of(tmp_path)
        assert (plan.every_steps, plan.steps) == (every, 3 * every)
    # Drills are numbered.
    (tmp_path / "r-drill-7-save").mkdir()
    assert plan_of(tmp_path).name("worker") == "r-drill-8-worker"
    (results := plan_of(tmp_path).results).parent.mkdir()
    results.touch()  # of a drill whose copies are gone
    assert plan_of(tmp_path).results.name == "drill-9.jsonl"


def test_a_killed_drill_has_the_rows_of_the_copies_that_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = replace(plan_of(tmp_path), kinds=("worker", "time_limit", "hang"))
    drill = Drill(plan, SlurmRunner(FakeSlurm()), FakeSlurm(), Tolerances(), True, print, _echo_row)

    def run_to_end(run: RunDir, kind: FaultKind | None, copy: str) -> None:
        if kind == "hang":
            raise KeyboardInterrupt

    monkeypatch.setattr(drill, "_run_to_end", run_to_end)
    _echo_row(None)
    with pytest.raises(KeyboardInterrupt):
        drill.run(keep=False)
    lines = plan.results.read_text().splitlines()
    kinds = [DrillResult.model_validate_json(line).kind for line in lines]
    assert kinds == ["worker", "time_limit"]
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.endswith(("verdict", "tested"))]
    assert [row.split()[0] for row in rows] == ["kind", "worker", "time_limit"]
    assert {row.rindex("  ") for row in rows} == {rows[0].rindex("  ")}  # aligned
    assert "worker: not tested: no fault was injected (the injector never started there)" in lines


def test_an_unbroken_run_is_a_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "has_all_graphs", lambda *_: True)
    plan = plan_of(tmp_path)
    run = plan.run
    assert "never submitted" in str(why_no_reference(plan, ()))
    sent = save_submission(run, nodes=2, local=True)
    assert "did not complete steps 1 to 60" in str(why_no_reference(plan, ()))
    save_attempt(run, nodes=("local0", "local1"), first_step=1, last_step=60)
    assert "metrics file is missing" in str(why_no_reference(plan, ()))
    run.metrics(0).parent.mkdir()
    run.metrics(0).write_text("")
    assert why_no_reference(plan, ()) is None
    assert "--set" in str(why_no_reference(plan, ["train.seed=1"]))
    monkeypatch.setattr(reuse, "has_all_graphs", lambda *_: False)
    assert "have changed" in str(why_no_reference(plan, ()))
    JobsRecord(submissions=(sent, sent)).save(run.jobs)
    assert "resumed by hand" in str(why_no_reference(plan, ()))
    save_submission(run, nodes=3, local=True)
    assert "other nodes" in str(why_no_reference(plan, ()))
