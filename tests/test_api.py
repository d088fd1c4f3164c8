"""What `import slurmllm` has: the command line's results as records, without its output."""

import doctest
import inspect
import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fake_slurm import FakeSlurm

import slurmllm
from slurmllm.cli.main import cli
from slurmllm.core.errors import ConfigError, DivergenceError, OutOfMemoryError, RunError, UserError
from slurmllm.core.slurm import client
from slurmllm.launch.submit import launch

ROOT = Path(__file__).resolve().parent.parent
# In the order of their examples, which follow each other.
FUNCTIONS = [getattr(slurmllm, name) for name in slurmllm.__all__ if name != "SlurmllmError"]


def rehearsed(stdlib: tuple[Path, Path], **settings: object) -> slurmllm.RunConfig:
    """A recipe whose run takes seconds: everything but the arithmetic."""
    lean = {
        "backend": "rehearsal",
        "data.num_workers": 0,
        "cluster.health.enabled": False,
        "data.corpus": str(stdlib[0]),
        "data.tokenizer": str(stdlib[1]),
        "train.steps": 12,
    }
    return slurmllm.load_recipe("tiny_neox", settings={**lean, **settings})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, stdlib: tuple[Path, Path]) -> Path:
    """Two runs that have trained here, with different seeds."""
    folder = tmp_path_factory.mktemp("runs")
    for name, seed in (("a", 1), ("b", 2)):
        config = rehearsed(stdlib, **{"train.seed": seed})
        run = slurmllm.submit_run(config, name=name, local=True, runs_dir=folder)
        assert (run.exit_code, run.name, run.path) == (0, name, folder / name)
        assert run.to_dict()["exit_code"] == 0
    return folder


def printed(*arguments: str) -> Any:
    done = CliRunner().invoke(cli, [*arguments, "--json"])
    return json.loads(done.stdout)


def test_records_are_what_the_command_line_prints(runs: Path) -> None:
    state = slurmllm.read_status("a", runs_dir=runs).to_dict()
    shown = printed("status", "a", "--runs-dir", str(runs))
    assert state.keys() == shown.keys()
    assert (state["state"], state["step"], state["attempts"]) == ("done", 12, shown["attempts"])
    listed = slurmllm.read_statuses(runs_dir=runs)
    assert [run.name for run in listed] == ["a", "b"]
    rows = printed("status", "--runs-dir", str(runs))["runs"]
    assert [row["loss"] for row in listed.to_dict()["runs"]] == [row["loss"] for row in rows]
    compared = slurmllm.compare_runs("a", "b", runs_dir=runs).to_dict()
    assert compared == printed("compare", "a", "b", "--no-plot", "--runs-dir", str(runs))
    assert compared["verdict"] == "differ"
    exact = slurmllm.compare_runs(slurmllm.read_curves(runs / "a"), runs / "a", exact=True)
    assert (exact.verdict, exact.basis.kind) == ("identical", "exact")


def test_a_plan_is_what_the_command_line_prints_and_its_best_layout_is_submitted() -> None:
    config = slurmllm.load_recipe("neox_20b", cluster="trn1", settings={"optim.lr": 1e-4})
    plan = slurmllm.plan_run(config, [4, 2], tokens="2B", price="21.5")
    command = ["plan", "neox_20b", "--cluster", "trn1", "--set", "optim.lr=0.0001"]
    options = ["--nodes", "2,4", "--tokens", "2B", "--price", "21.5"]
    document = plan.to_dict()
    for changed in (document["candidates"][0]["memory"], document["refused"][0]["reasons"]):
        changed.clear()  # it is the caller's
    assert json.loads(json.dumps(plan.to_dict())) == printed(*command, *options)
    frame = plan.to_pandas()
    assert set(frame["nodes"]) == {2, 4}
    best = frame[(frame["nodes"] == 4) & frame["fits"]].iloc[0]
    dry = slurmllm.submit_run(plan.best_config(4), 4, dry_run=True)
    mesh = dry.prepared.mesh
    assert (mesh.tensor, mesh.data, mesh.micro_batch) == tuple(
        best[["tensor", "data", "micro_batch"]]
    )
    assert dry.to_dict()["config"]["optim"]["lr"] == 1e-4
    with pytest.raises(ConfigError, match="nothing was planned on 3 nodes; choose one of 2, 4"):
        plan.best(3)


def test_a_run_is_resumed_and_its_logs_are_read(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "a", tmp_path / "a")
    run = slurmllm.resume_run("a", settings={"train.steps": 14}, runs_dir=tmp_path)
    assert (run.exit_code, run.prepared.changes) == (0, {"train.steps": (12, 14)})
    logs = slurmllm.read_logs("a", stage="train", runs_dir=tmp_path)
    arguments = ["logs", "a", "--stage", "train", "--runs-dir", str(tmp_path)]
    assert f"{logs}\n" == CliRunner().invoke(cli, arguments).stdout
    assert {line["attempt"] for line in logs.to_dict()["lines"]} == {0, 1}
    assert slurmllm.cancel_run("a", tmp_path).jobs == ()


def test_tables(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curves = slurmllm.read_curves("a", runs_dir=runs)
    frame = curves.to_pandas()
    assert list(frame.index) == list(range(1, 13))
    assert list(frame["loss"]) == curves.to_dict()["metrics"]["loss"]
    assert list(slurmllm.read_statuses(runs_dir=runs).to_pandas()["step"]) == [12, 12]
    none = slurmllm.read_statuses(runs / "none").to_pandas()
    assert (len(none), {"name", "state", "loss"} - {*none.columns}) == (0, set())
    compared = slurmllm.compare_runs("a", "b", runs_dir=runs).to_pandas()
    assert list(compared.index) == ["loss", "grad_norm"]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="`pip install pandas`, or use `to_dict"):
        curves.to_pandas()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stdlib: tuple[Path, Path]) -> Path:
    """The working directory, with the built-in data already made."""
    shutil.copytree(stdlib[0].parent, tmp_path / "runs" / ".data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_s_example_submits_jobs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeSlurm([f"n{number}" for number in range(8)])
    cluster.partition, cluster.cpus, cluster.gres = "gpu", 192, "gpu:8"
    monkeypatch.setattr(client, "SlurmClient", lambda: cluster)
    monkeypatch.setattr(launch, "SlurmClient", lambda: cluster)
    variables: dict[str, Any] = {}
    first, nightly = re.findall("```python\n(.+?)```", (ROOT / "docs/api.md").read_text(), re.S)
    exec(first, variables)
    run = variables["run"]
    assert run.to_dict()["jobs"]["train"] == run.sent.train_job
    assert "--partition=gpu" in run.scripts["train"]
    assert run.prepared.mesh.tensor == variables["plan"].best(8).mesh.tensor
    assert variables["state"] == "queued"
    assert repr(run) == "<SubmittedRun first on 8 nodes, train job 2>"
    plan = r"<Plan of llama3_8b on p5; 4 nodes: [\d.]+ seq/s, .* days .*; 8 nodes: .*>"
    assert re.fullmatch(plan, repr(variables["plan"]))
    layout = (
        "<LayoutEstimate of llama3_8b on 8 nodes of p5: TP 2 × PP 1 × DP 32, micro batch 2, .* "
    )
    assert re.match(layout + "GiB, [0-9.]+ seq/s, MFU", repr(variables["plan"].best(8)))
    run.prepared.run.stage_log("train").write_text("why\n")
    cluster.finish("1", "NODE_FAIL")
    exec(nightly, variables)
    assert "#SBATCH --nodes=4-8\n" in (run.path / "scripts" / "train.sbatch").read_text()
    cancelled = slurmllm.cancel_run("first").to_dict()["jobs"]
    assert [(job["job"], job["action"]) for job in cancelled] == [
        ("3", "cancelled"),
        ("4", "cancelled"),
    ]
    ranged = slurmllm.submit_run(variables["config"], "2-8", dry_run=True)
    assert "#SBATCH --nodes=2-8\n" in ranged.scripts["train"]


def test_errors_are_raised_and_not_printed(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for call, kind, text in (
        (lambda: slurmllm.load_recipe("tiny_neo"), ConfigError, "did you mean 'tiny_neox'"),
        (lambda: slurmllm.plan_run("llama2_70b", 0), UserError, "whole numbers from 1"),
        (lambda: slurmllm.plan_run("llama2_70b", 1).best(), ConfigError, "no layout of"),
        (lambda: slurmllm.submit_run("tiny_neox", 0, runs_dir=runs), UserError, "nodes"),
        (lambda: slurmllm.read_status("c", runs_dir=runs), RunError, "no run 'c'"),
        (lambda: slurmllm.read_curves("c", runs_dir=runs), RunError, "no run 'c'"),
        (lambda: slurmllm.resume_run("a", runs_dir=runs), RunError, "trained all its 12 steps"),
        (lambda: slurmllm.export_checkpoint("a", "x", dtype="int4"), UserError, "source or fp32"),
        (lambda: slurmllm.read_logs("a", stage="x"), UserError, "stage 'x': give precompile"),
        (lambda: compare(tolerance=-1), UserError, "0 or more"),
        (lambda: compare(tolerance=1, exact=True), UserError, "tolerance 1 and exact exclude"),
        (lambda: compare(exact=True, seeds=["b"]), UserError, "leave out exact and tolerance"),
    ):
        with pytest.raises(kind, match=re.escape(text)):
            call()
    assert capfd.readouterr() == ("", "")


def compare(**options: Any) -> object:
    return slurmllm.compare_runs("a", "b", **options)


def test_a_local_run_that_fails_raises_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stdlib: tuple[Path, Path]
) -> None:
    for kind, name in ((DivergenceError, "bad"), (OutOfMemoryError, "large")):
        monkeypatch.setattr(launch, "run_locally", lambda *_, code=kind.exit_code, **__: code)
        with pytest.raises(kind, match=f"`slurmllm logs {name}` shows more"):
            slurmllm.submit_run(rehearsed(stdlib), name=name, local=True, runs_dir=tmp_path)
    raised: list[BaseException] = []

    def submit() -> None:
        try:
            slurmllm.submit_run(rehearsed(stdlib), local=True, runs_dir=tmp_path)
        except UserError as error:
            raised.append(error)

    thread = threading.Thread(target=submit)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])


def test_the_import_is_light_and_no_function_loads_torch(runs: Path) -> None:
    script = (
        "import sys, slurmllm\n"
        "heavy = {'click', 'numpy', 'pydantic', 'torch', 'yaml', 'rich'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
        "from slurmllm import *\n"
        "assert read_status('a').state == 'done' and len(read_statuses()) == 2\n"
        "assert len(read_curves('a').steps) == 12 and not compare_runs('a', 'b').match\n"
        "plan_run('gpt3_125m', 1)\n"
        "submit_run(load_recipe('neox_20b', data='builtin'), 4, dry_run=True)\n"
        "assert not {'torch', 'matplotlib', 'pandas'} & sys.modules.keys()\n"
    )
    environment = {"SLURMLLM_RUNS": str(runs), "PATH": ""}
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_is_public_is_documented() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    described = set(re.findall(r"^::: slurmllm\.(?:\w+\.)*([A-Za-z_]+)$", page, re.MULTILINE))
    assert described == {*slurmllm._MODULES, "errors"} - {"SlurmllmError"}
    assert {*slurmllm.__all__} < {*slurmllm._MODULES} <= {*dir(slurmllm)}
    for function in FUNCTIONS:
        _, _, example = (inspect.getdoc(function) or "").partition(">>>")
        assert f"slurmllm.{function.__name__}(" in example
        assert f"\n    {function.__name__} " in str(slurmllm.__doc__)
    with pytest.raises(AttributeError, match="no attribute 'plan_runs'"):
        _ = slurmllm.plan_runs  # type: ignore[attr-defined]


@pytest.mark.long
def test_examples(folder: Path) -> None:
    variables: dict[str, Any] = {"slurmllm": slurmllm}
    runner = doctest.DocTestRunner()
    report: list[str] = []
    for function in FUNCTIONS:
        text = inspect.getdoc(function) or ""
        example = doctest.DocTestParser().get_doctest(text, variables, function.__name__, None, 0)
        assert example.examples
        runner.run(example, out=report.append, clear_globs=False)
        variables = example.globs
    assert report == []
