"""`status`: columns that fit, runs that wait or run, drawn again."""

import json
import re
import time
from io import StringIO
from pathlib import Path
from shutil import rmtree

import pytest
from click.testing import Result
from command_line import call, printed
from fake_slurm import FakeSlurm
from made_records import make_run, save_attempt
from rich.console import Console

from slurmllm.analysis.status import runs
from slurmllm.analysis.status.runs import RunState, SavedCheckpoint
from slurmllm.cli.status_tables import runs_view
from slurmllm.core.run.records import Heartbeat, WorkerPhase
from slurmllm.core.run.rundir import RunDir, Stage
from slurmllm.core.slurm import client


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(client, "SlurmClient", FakeSlurm)
    monkeypatch.chdir(tmp_path)


def status(*arguments: str) -> Result:
    return call("status", *arguments)


def make(name: str, ended: bool = True) -> RunDir:
    run = make_run(Path("runs") / name)
    ending, action = ("done", "finish") if ended else ("code_error", "stop")
    save_attempt(run, ended_at=1800.0, ending=ending, action=action)
    run.metrics(0).parent.mkdir()
    run.metrics(0).write_text('{"step": 5, "loss": NaN, "seq_per_s": "x"}\n')
    return run


STATE = RunState(
    name="pretraining-gpt-neox-20b-third-attempt",
    run_dir="/r",
    recipe="neox_20b",
    state="precompiling",
    reason="waiting for Resources and for whatever else there is to be had",
    last_checkpoint=SavedCheckpoint(123000, 0.0, 400.0),
    **{"nodes": 128, "step": 123456, "steps": 500000, "loss": 2.3456, "seq_per_s": 1234.5},
    **{"eta_s": 12 * 3600.0, "restarts": 17, "node_hours": 123456.7, "usd": 2654321.09},
)


@pytest.mark.parametrize("width", [60, 80, 160])
def test_no_number_is_cut_at_any_width(width: int) -> None:
    console = Console(width=width, record=True, file=StringIO())
    for part in runs_view([STATE, STATE], console):
        console.print(part, soft_wrap=True)
    text = console.export_text()
    shown = ["123456/500000", "precompiling", "2.3456"]
    shown += ["1234.5", "12:00:00"] if width >= 80 else ["no room for"]
    shown += ["123000, 7 min ago", "123,456.7"] if width >= 160 else ["waiting for Resources"]
    shown += ["2,654,321.09", "17", "128"] if width >= 160 else ["no room for"]
    assert [message for message in shown if message not in text] == []
    table = text.split("no room for")[0].splitlines()[:4]
    assert max(len(line.rstrip()) for line in table) <= width


def test_older_runs_give_way_to_those_that_run() -> None:
    console = Console(width=240)
    states = [RunState(str(n), "/r", state="done") for n in range(9)]
    view = [*runs_view([RunState("a", "/r", state="training"), *states], console, height=3)]
    _, *lines = view[0].plain.splitlines()
    assert [line.split()[0] for line in lines] == ["a", "7", "8"]
    assert "7 older" in view[-1].plain


def test_json_has_the_figures_and_is_json() -> None:
    make("r")
    state = json.loads(status("r", "--json").stdout, parse_constant=pytest.fail)
    assert (state["state"], state["loss"], state["seq_per_s"]) == ("done", None, None)
    assert (state["node_hours"], state["usd"], state["restarts"]) == (0.5, None, 0)
    assert (state["last_checkpoint"], state["finish_at"], state["eta_s"]) == (None, None, None)
    (row,) = json.loads(status("--json").stdout)["runs"]
    assert row == {key: value for key, value in state.items() if key in row}


def test_several_are_a_list() -> None:
    for name in ("a", "b", "caf\udce9"):
        make(name)
    state, everything = json.loads(status("a", "--json").stdout), status("--json").stdout
    assert (state["name"], "runs" in state) == ("a", False)
    rows = {row["name"]: row for row in json.loads(everything)["runs"]}
    shown = json.loads(status("caf\udce9", "a", "caf\udce9", "--json").stdout)
    assert shown == {"runs": [rows["caf\udce9"], rows["a"]]}
    assert "/runs/caf\ufffd\n" in status("caf\udce9").stdout
    table = status("a", "b").stdout
    assert [line.split()[0] for line in table.splitlines()[1:3]] == ["a", "b"]
    assert "no run 'nosuch'" in status("a", "nosuch").stderr


def test_only_active_ones() -> None:
    make("r")
    assert "none of the 1 runs" in status("--active").stdout
    assert json.loads(status("--active", "--json").stdout) == {"runs": []}
    assert status("r", "--active").exit_code == 2


def test_watch_ends_with_the_run_and_takes_seconds_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("nothing goes on"))
    make("r", ended=False)
    for arguments in (("--watch", "r"), ("--watch", "1", "r"), ("r", "--watch=1"), ("--watch",)):
        assert "r" in printed(status(*arguments)).splitlines()[1]
    assert len(status("--watch", "r", "--json").stdout.splitlines()) == 1
    assert status("--watch", "0", "r").exit_code == 2


def test_ctrl_c_leaves_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    looks = [RunState("r", "/r", state="training"), RunState("r", "/r", state="training")]
    monkeypatch.setattr("slurmllm.analysis.status.runs.run_state", lambda *_: looks.pop())
    monkeypatch.setattr(time, "sleep", interrupt)
    make("r")
    result = status("r", "--watch", "1")
    assert (result.exit_code, result.stderr, len(looks)) == (130, "", 1)


@pytest.mark.parametrize("stage", ["precompile", "train"])
def test_a_compiling_step_has_the_time_so_far(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, begin = make("r"), time.time() - 60
    rmtree(run.attempt("train", 0).path)
    save_attempt(run, stage=stage, started_at=begin)
    if stage == "train":
        beat = WorkerPhase(phase="first_step", step=0, since=begin)
        heartbeat = Heartbeat(node="n1", written_at=time.time(), ranks={0: beat})
        heartbeat.save(run.attempt("train", 0).heartbeat("n1"))
    state = "training" if stage == "train" else "precompiling"
    monkeypatch.setattr(runs, "derive_state", lambda *_: (state, ""))
    text = status("r").output
    assert re.search(r"workers +compiling the first step …, 0:01:0\d so far", text), text
    assert 60 <= json.loads(status("r", "--json").stdout)["compiling_s"] < 70


def test_no_message_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "derive_state", lambda *_: ("stopped", "code_error: rank 3"))
    run = make("r", ended=False)
    save_attempt(run, 1, ended_at=1900.0, ending="code_error", action="stop", evidence=("rank 3",))
    text = status("r").output
    assert "stopped  (code_error: rank 3)" in text
    assert text.count("rank 3") == 1
