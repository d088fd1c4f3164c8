"""Sweeps on the fake cluster: one precompile job, lanes, their table, and bad input."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import call as invoke
from command_line import fails
from fake_slurm import FakeSlurm
from launch.submit.commands import Inputs
from training_rows import make_row, write_rows

from slurmllm.analysis.status.runs import list_runs, run_states
from slurmllm.core.config.load import load
from slurmllm.core.errors import UserError
from slurmllm.core.run.records import JobsRecord
from slurmllm.core.run.rundir import RunDir, SweepDir, find_run
from slurmllm.launch.graphs import reuse
from slurmllm.launch.submit.sweep import Case, grid, name_cases, read_cases

GRID = ("--sweep", "optim.lr=3e-4,1e-3", "--sweep", "train.seed=1,2")
NAMES = ["s-lr3e-4-seed1", "s-lr3e-4-seed2", "s-lr1e-3-seed1", "s-lr1e-3-seed2"]


@pytest.fixture
def fake(fake: FakeSlurm) -> FakeSlurm:
    fake.states |= dict.fromkeys(("n5", "n6"), "idle")
    return fake


def call(*arguments: str, code: int = 0) -> str:
    return fails(code, *arguments) if code else invoke(*arguments).stdout


def submit(inputs: Inputs, *more: str) -> dict[str, Any]:
    arguments = ("submit", "tiny_neox", "--nodes=2", "--name=s", *inputs, *more)
    return dict(json.loads(call(*arguments, "--json")))


def states(*more: str) -> dict[str, str]:
    runs = json.loads(call("status", *more, "--json"))["runs"]
    return {run["name"]: run["state"] for run in runs}


def test_runs_share_one_precompile_job(fake: FakeSlurm, inputs: Inputs) -> None:
    dry = call("submit", "tiny_neox", "--nodes=2", "--name=s", *inputs, *GRID, "--dry-run")
    assert "one precompile stage, for 4 runs" in dry
    assert all(name in dry for name in NAMES)
    assert (fake.jobs, Path("runs").exists()) == ({}, False)
    sent = submit(inputs, *GRID)
    assert [run["run"] for run in sent["runs"]] == NAMES
    assert [run["train_job"] for run in sent["runs"]] == ["2", "3", "4", "5"]
    assert [graphs["precompile_job"] for graphs in sent["graphs"]] == ["1"]
    assert all(fake.jobs[run["train_job"]].after_ok == "1" for run in sent["runs"])
    run = find_run("s-lr1e-3-seed2", Path("runs"))
    assert run.path == Path("runs/s/s-lr1e-3-seed2")
    last = JobsRecord.load(run.jobs).last
    assert (last.graphs_of, last.precompile_job, last.own_jobs) == ("s-graphs-1", "1", ["5"])
    assert "seed: 2" in run.config.read_text()
    assert set(states()) == set(NAMES)
    # Other shapes have other graphs.
    more = submit(inputs, "--name=t", "--sweep=model.num_layers=2,3", "--sweep=train.seed=1,2")
    assert [run["graphs"][-8:] for run in more["runs"]] == ["graphs-1"] * 2 + ["graphs-2"] * 2
    # Runs without graphs wait for no job.
    eager = submit(inputs, "--name=u", "--sweep=train.compile=true,false")
    (precompile,) = (graphs["precompile_job"] for graphs in eager["graphs"])
    assert [run["graphs"] for run in eager["runs"]] == ["u-graphs-1", None]
    assert [fake.jobs[run["train_job"]].after_ok for run in eager["runs"]] == [precompile, None]


def test_graphs_of_a_sweep_are_reused_by_later_runs(
    fake: FakeSlurm, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(inputs, *GRID)
    compiled, later = (RunDir(Path(f"runs/s/{name}").absolute()) for name in (NAMES[0], NAMES[3]))
    monkeypatch.setattr(reuse, "has_all_graphs", lambda *needs, **_: needs[-1] == compiled)
    compiled.graphs.mkdir()
    compiled.graphs_manifest.write_text("{}")
    for run in (later, RunDir(Path("runs/s/graphs/s-graphs-1").absolute())):
        assert list(reuse.find(load(run.config), 2, False, run)) == [compiled]


def test_two_at_a_time_whatever_ends_or_is_cancelled(fake: FakeSlurm, inputs: Inputs) -> None:
    jobs = [run["train_job"] for run in submit(inputs, *GRID, "--max-running=2")["runs"]]

    def running() -> list[str]:
        for job in jobs:
            fake.start(job)
        states = zip("abcd", (fake.jobs[job].state for job in jobs), strict=True)
        return [name for name, state in states if state == "RUNNING"]

    fake.start("1")
    fake.finish("1")
    assert running() == ["a", "b"]
    fake.requeue(jobs[0])
    assert running() == ["a", "b"]
    call("cancel", "s-lr1e-3-seed1")  # c, which is pending behind a
    assert running() == ["a", "b"]
    assert states("s")["s-lr1e-3-seed1"] == "cancelled"
    fake.finish(jobs[1], "FAILED")
    assert running() == ["a", "d"]
    assert fake.jobs["1"].state == "COMPLETED"
    call("cancel", "s")
    assert not running()
    assert {fake.jobs[job].state for job in jobs} == {"CANCELLED", "FAILED"}


def test_a_cancelled_run_leaves_its_precompile_to_others(fake: FakeSlurm, inputs: Inputs) -> None:
    submit(inputs, *GRID)
    fake.start("1")
    call("cancel", "s-lr3e-4-seed1")
    assert fake.jobs["1"].state == "RUNNING"
    assert states("s") == dict.fromkeys(NAMES, "precompiling") | {NAMES[0]: "cancelled"}
    fake.finish("1", "FAILED")
    runs = run_states(list_runs(Path("runs")), fake)
    reasons = {run.name: run.reason for run in runs if run.state == "stopped"}
    log = "runs/s/graphs/s-graphs-1/logs/precompile.log"
    assert reasons == dict.fromkeys(NAMES[1:], f"precompile job FAILED; see {log}")


def test_a_refusal_leaves_nothing_behind(
    fake: FakeSlurm, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = fake.submit

    def refuse_the_third(script: str, *more: Any, **named: Any) -> str:
        fake.refuse = "Job violates accounting/QOS policy" if len(fake.jobs) == 3 else None
        return accept(script, *more, **named)

    monkeypatch.setattr(fake, "submit", refuse_the_third)
    arguments = ("submit", "tiny_neox", "--nodes=2", "--name=s", *inputs, *GRID)
    assert "QOS policy" in call(*arguments, code=3)
    assert {job.state for job in fake.jobs.values()} == {"CANCELLED"}
    assert not Path("runs/s").exists()


def test_the_table_has_the_best_run_first(fake: FakeSlurm, inputs: Inputs) -> None:
    submit(inputs, *GRID)
    sweep = SweepDir(Path("runs/s"))
    for place, name in enumerate(NAMES[:3]):
        loss = [3.0, 2.0, float("nan")][place]
        # The last step alone would rank them the other way round.
        rows = [make_row(step, loss=loss if step < 100 else 4 - loss) for step in range(1, 101)]
        write_rows(sweep.run(name).metrics(0), rows)
    ranking = json.loads(call("compare", "s", "--json"))
    ranks = [(run["rank"], run["run"]) for run in ranking["runs"]]
    assert ranks[:2] == [(1, NAMES[1]), (2, NAMES[0])]
    assert [run["loss"] for run in ranking["runs"]] == [2.0, 2.8, None, None]
    assert ranking["runs"][0]["values"] == {"optim.lr": "3e-4", "train.seed": "2"}
    lines = call("compare", "s").splitlines()
    assert lines[1].split()[:5] == ["rank", "run", "lr", "seed", "state"]
    assert lines[2].split()[:4] == ["1", NAMES[1], "3e-4", "2"]
    report = json.loads(call("report", "s", "--json"))
    assert report["sweeps"][0]["runs"] == ranking["runs"]
    page = (sweep.reports / "report.html").read_text()
    headings = ("Loss", "Runs by rank", "Summary")
    places = [page.index(f"<h2>{heading}</h2>") for heading in headings]
    assert places == sorted(places)
    assert f"<td>{NAMES[1]}</td>" in page
    assert "no sweep" in call("compare", NAMES[0], code=2)
    assert "is a sweep" in call("compare", "s", "--exact", code=2)
    assert "is a sweep" in call("logs", "s", code=2)


def test_an_interrupted_sweep_names_what_it_has_not_started(
    fake: FakeSlurm, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurmllm.launch.submit.sweep.run_locally", lambda *_: 130)
    options = ("--local", "--nodes=2", "--name=s", "--precompile=never", "--sweep=train.seed=1,2")
    ended, last = invoke("submit", "tiny_neox", *inputs, *options), "slurmllm resume s-seed"
    lines = [f"not started  {last}2 --nodes 2 --local", f"interrupted  {last}1 --nodes 2 --local"]
    assert (ended.exit_code, ended.stderr.splitlines()[-2:]) == (130, lines)
    assert f"never submitted; `{last}2 --nodes 2 --local` starts it" in call("compare", "s")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--sweep", "optim.lrr=1e-4,1e-3"), "unknown field"),
        (("--sweep", "optim.lr"), "expected path=value,value"),
        (("--sweep", "train.seed=1,1"), "1 is given twice"),
        (("--sweep", "env.API_TOKEN=a,b"), "may not hold secrets"),
        (("--sweep", f"train.seed={','.join(map(str, range(101)))}"), "--yes"),
        (("--sweep", "train.seed=1,2", "--max-running", "0"), "must be 1 or more"),
        (("--max-running", "2"), "is for sweeps"),
        (("--sweep", "train.seed=1,2", "--name", "a/b"), "must be letters"),
        (("--sweep", "train.global_batch=8,6"), "not a multiple"),
    ],
)
def test_bad_input_submits_nothing(
    fake: FakeSlurm, inputs: Inputs, options: tuple[str, ...], text: str
) -> None:
    message = call("submit", "tiny_neox", "--nodes=2", *inputs, *options, code=2)
    assert text in " ".join(message.split())
    assert not fake.jobs
    assert not Path("runs").exists() or not any(Path("runs").iterdir())


def test_a_grid_splits_at_commas_between_values() -> None:
    cases = grid(["optim.betas=[0.9, 0.95],[0.9, 0.99]", "data.mask='a,b',none"])
    assert [tuple(case.values.values()) for case in cases] == [
        *(("[0.9, 0.95]", "'a,b'"), ("[0.9, 0.95]", "none")),
        *(("[0.9, 0.99]", "'a,b'"), ("[0.9, 0.99]", "none")),
    ]
    assert name_cases("s", cases)[0].run == "s-betas_0.9_0.95_-mask_a_b_"
    with pytest.raises(UserError, match="10,000 at most"):
        grid([f"train.seed={','.join(map(str, range(10001)))}"])


def test_a_file_names_its_cases(tmp_path: Path) -> None:
    file = tmp_path / "cases.yaml"
    file.write_text(
        "low: {optim.lr: 1e-4, optim.betas: [0.9, 0.99]}\nwide: {model: {num_layers: 2}}\n"
    )
    low, wide = read_cases(file)
    assert low == Case({"optim.lr": "0.0001", "optim.betas": "[0.9, 0.99]"}, "low")
    assert wide == Case({"model.num_layers": "2"}, "wide")
    for content, text in (
        ("a: {x.y: 1}\na: {x.y: 2}\n", "written twice"),
        ("a: 1\n", "a case is a name"),
        ("a: {env.LD_PRELOAD: x.so}\n", r"env\.LD_PRELOAD \(cases.yaml\).* for tuning"),
        ("a: {env: '{LD_PRELOAD: x.so}'}\n", "variables for tuning"),
        ("a: {cluster: {setup: [/x]}}\n", "belongs in a profile"),
        ("- {x.y: 1}\n", "no mapping"),
    ):
        file.write_text(content)
        with pytest.raises(UserError, match=text):
            read_cases(file)


def test_names_that_are_too_long_or_ambiguous_are_numbers() -> None:
    for values in (["a" * 99, "b" * 99], ["a/b", "a b"]):
        cases = name_cases("s", [Case({"x.y": value}) for value in values])
        assert [case.run for case in cases] == ["s-001", "s-002"]
    with pytest.raises(UserError, match="are equal"):
        name_cases("s", [Case({"x.y": "1"}, "a"), Case({"x.y": "1"}, "b")])
