import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from command_line import call, printed
from training_rows import MakeFile, MakeRun, Row, make_row

from slurmllm.analysis.spikes.analysis import Spike, SpikeAnalysis
from slurmllm.core.run.rundir import RunDir

Spikes = Callable[..., Result]


def rows(first: int, last: int, attempt: int = 0, **spikes: float) -> list[Row]:
    """Rows of a falling loss; `s30=2.0` adds 2 at step 30."""
    return [
        make_row(step, attempt, loss=2 + 6 * math.exp(-step / 30) + spikes.get(f"s{step}", 0.0))
        for step in range(first, last + 1)
    ]


@pytest.fixture
def spikes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spikes:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURMLLM_RUNS", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    # See test_picture.
    monkeypatch.setattr("slurmllm.analysis.spikes.plot._draw_run", lambda *_: None)

    def run(*arguments: object) -> Result:
        return call("spikes", *arguments)

    return run


@pytest.fixture
def spiky(make_run: MakeRun) -> RunDir:
    """Spikes at 60 (one step) and 101 (two steps, of a second attempt)."""
    return make_run("spiky", rows(1, 110, s60=2.0), rows(101, 200, 1, s101=1.0, s102=0.5))


def answer(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.stderr
    strict: dict[str, None] = {}  # what is no JSON, such as NaN, is no key of it
    document = json.loads(result.stdout, parse_constant=strict.__getitem__)
    assert set(document) == {"runs"}
    runs: list[dict[str, Any]] = document["runs"]
    return runs


def test_json(spikes: Spikes, spiky: RunDir) -> None:
    (run,) = answer(spikes("spiky", "--json"))
    assert set(run) == set(SpikeAnalysis.model_fields)
    assert (run["name"], run["state"], run["count"], run["one_step"]) == ("spiky", "passing", 2, 1)
    assert run["durations"] == {"1": 1, "2": 1}
    rows = [(s["step"], s["duration"], s["restart"]) for s in run["spikes"]]
    assert rows == [(60, 1, None), (101, 2, 101)]
    assert set(run["spikes"][0]) == set(Spike.model_fields)
    assert answer(spikes("spiky", "--threshold", 1, "--json", "--no-plot"))[0]["count"] == 1
    late = answer(spikes("spiky", "--from-step", 70, "--window", 30, "--json", "--no-plot"))[0]
    assert (late["first_step"], late["judged"], late["count"]) == (70, 101, 1)
    assert run["plot"] == str(spiky.reports / "spikes-spiky.png")
    assert Path(run["plot"]).is_file()


def test_table(spikes: Spikes, spiky: RunDir) -> None:
    shown = printed(spikes("spiky", "--no-plot"))
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "spiky: steps 1–200" in lines
    assert "last one step 50.0%" in lines
    definition = "loss is more than 0.1 above the mean of the 20 logged steps before it"
    assert f"loss spike: a step whose {definition}" in lines
    assert "60 1 1.638 4.812 1 × 1.08 -" in lines
    assert any(line.startswith("101 2 ") and line.endswith("restart at 101") for line in lines)
    assert "\nloss: passing: 2 spikes in 180 steps (11.1 per 1,000)" in shown
    assert not spiky.reports.exists()


def test_metrics(spikes: Spikes, make_run: MakeRun) -> None:
    rows = [make_row(step, grad_norm=4.0 if step == 80 else 2.0) for step in range(1, 151)]
    make_run("r", rows)
    (both,) = answer(spikes("r", "--json", "--no-plot"))
    (alone,) = answer(spikes("r", "--metric", "grad_norm", "--json", "--no-plot"))
    assert alone == both["grad_norm_spikes"]
    assert (both["count"], alone["metric"], alone["count"]) == (0, "grad_norm", 1)
    assert "80 1 2 4 1 × 2 -" in " ".join(spikes("r", "--no-plot").stdout.split())


def test_several_runs_in_one_picture(spikes: Spikes, spiky: RunDir, make_file: MakeFile) -> None:
    file = make_file("other", rows(1, 100))
    document = answer(spikes(spiky.path, file, "--plot", "both.png", "--json"))
    states = [(run["name"], run["state"]) for run in document]
    assert states == [("spiky", "passing"), ("other", "calm")]
    assert [run["plot"] for run in document] == ["both.png", "both.png"]
    assert Path("both.png").is_file()


def test_other_frameworks_strict_json(spikes: Spikes, tmp_path: Path, make_run: MakeRun) -> None:
    losses = [f"{step},{4.0 if step == 60 else 2.0}" for step in range(1, 101)]
    (tmp_path / "log.csv").write_text("\n".join(["step,my_loss", *losses]) + "\n")
    (run,) = answer(spikes("log.csv", "--tag", "loss=my_loss", "--json"))
    assert [(s["step"], s["height"]) for s in run["spikes"]] == [(60, 2.0)]
    assert (run["plot"], [*Path.cwd().glob("*.png")]) == (None, [])
    assert run["grad_norm"] is None
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xff.csv"))  # no UTF-8
    path.write_text("step,loss\n" + "".join(f"{step},3.0\n" for step in range(99)))
    assert json.loads(spikes(path, "--json", "--no-plot").stdout)["runs"][0]["path"] == str(path)
    make_run("nan", [make_row(step, loss=math.nan, grad_norm=math.inf) for step in range(1, 50)])
    (run,) = answer(spikes("nan", "--json", "--no-plot"))
    assert (run["state"], run["not_finite_steps"], run["growth"]) == ("not_finite", 49, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent"], "absent"),
        (["spiky", "--window", "0"], "window 0"),
        (["spiky", "--min-gap", "0"], "min-gap 0"),
        (["spiky", "--window", "500"], "steps before it; wait for more steps"),
        (["spiky", "--from-step", "900"], "its own are 1 to 200"),
        (["spiky", "--plot", "x.pdf"], "pictures are PNG files"),
        (["spiky", "--plot", "x.png", "--no-plot"], "exclude each other"),
        (["spiky", "--tag", "nonsense"], "nonsense"),
    ],
)
@pytest.mark.usefixtures("spiky")
def test_unusable_input_is_2(spikes: Spikes, arguments: list[str], message: str) -> None:
    result = spikes(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr


@pytest.mark.usefixtures("spiky")
def test_only_a_picture_asked_for_must_succeed(spikes: Spikes, spiky: RunDir) -> None:
    spiky.reports.write_text("no folder")
    (run,) = answer(spikes("spiky", "--json"))
    assert run["plot"] is None
    assert "cannot write the picture" in run["warnings"][-1]
    assert spikes("spiky", "--plot", spiky.reports / "x.png").exit_code == 4
