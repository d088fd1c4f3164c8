"""tools/reproduce: its catalogue and claims hold together, and each figure is drawn."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from amounts import sample
from training_rows import MakeRun, make_row

from slurmllm.cli.main import cli
from slurmllm.core.config.resolve import resolve
from slurmllm.core.run.rundir import RunDir

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PNG = b"\x89PNG"
EVALUATED = ("validation_loss", "accuracy")  # of checkpoints: they need a training


@pytest.fixture(autouse=True)
def _tools(monkeypatch: pytest.MonkeyPatch) -> None:
    # After tests/, which has packages of the same names as tools/.
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "tools")])


def reproduce(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "reproduce"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def made_up(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All runs of the catalogue, made up; none is trained."""
    from reproduce import runs
    from reproduce.figures import read_catalogue

    for number, name in enumerate(read_catalogue().runs):
        rows = [make_row(step) for step in range(1, 81)]
        for row in rows:
            row["loss"] *= 1 + 1e-5 * number
            row["grad_norm"] += 3.0 * (row["step"] in (40, 60, 61))
        make_run(name, rows)
    monkeypatch.setattr(runs, "train_missing", lambda *_: None)
    return tmp_path / "runs"


def drawn_figures() -> list[str]:
    sys.path.append(str(ROOT / "tools"))
    try:
        from reproduce.figures import read_catalogue
    finally:
        sys.path.pop()
    figures = read_catalogue().figures.items()
    return [name for name, figure in figures if figure.runs and name not in EVALUATED]


@pytest.mark.parametrize("name", sample(3, drawn_figures()))
def test_a_figure_of_made_up_runs(name: str, made_up: Path, tmp_path: Path) -> None:
    from reproduce.figures import draw_figure, read_catalogue

    result = draw_figure(read_catalogue(), name, tmp_path, made_up)
    assert all(output for output in result["output"])
    for run in read_catalogue().figures[name].runs:
        assert run in result["output"][0], "the verb answers about the run"
    if result["picture"]:
        assert Path(result["picture"]).read_bytes().startswith(PNG)


def test_published_figures_are_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from reproduce.__main__ import main

    names = ("table1", "time_and_cost", "scaling", "time_to_train")
    assert main([*names, "--json", "--out", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out)
    for figure in result.values():
        assert Path(figure["picture"]).read_bytes().startswith(PNG)
    lines = result["table1"]["output"][0].splitlines()
    table = [line.split() for line in lines[1:]]
    # Sequences a second and millions of tokens a dollar, as the post prints them.
    assert [(row[0], row[1], row[4], row[7]) for row in table] == [
        ("Pythia-6.9B", "1", "10.4", "10.1M"),
        ("Pythia-6.9B", "4", "35.8", "8.69M"),
        ("GPT-NeoX-20B", "4", "13.6", "3.3M"),
        ("GPT-NeoX-20B", "8", "26.8", "3.25M"),
        ("GPT-NeoX-20B", "16", "54.3", "3.3M"),
        ("GPT-NeoX-20B", "32", "107.5", "3.26M"),
        ("GPT-NeoX-20B", "64", "212.0", "3.22M"),
    ]
    assert all(0.98 < float(row[6]) < 1.02 for row in table), "predicted over published"
    costs = result["time_and_cost"]["output"][0].splitlines()
    (seven,) = [line.split() for line in costs if line.startswith("MPT-7b ")]
    # 20 tokens for each of 6.6589e9 parameters at 463,749 tokens/s; 16 nodes at $32.77.
    days = 20 * 6.6589e9 / 463749 / 86400
    assert float(seven[3]) == pytest.approx(days, rel=2e-3)
    assert float(seven[5].strip("$").replace(",", "")) == pytest.approx(
        days * 24 * 16 * 32.77, rel=2e-3
    )
    # AWS's post: over 90 % of linear scaling to 64 nodes for 70B.
    lines = result["scaling"]["output"][0].splitlines()[1:]
    layouts = [re.split(" {2,}", line) for line in lines]
    (of_70b,) = [row for row in layouts if row[:2] == ["Llama 2 70B, batch 1,024", "64"]]
    assert 90 < float(of_70b[2].rstrip(" %")) < 95
    times = [line.split() for line in result["time_to_train"]["output"][0].splitlines()[1:]]
    of_1b = {row[1]: row for row in times if row[0] == "gpt3_1.3b"}
    assert (of_1b["8"][3], of_1b["128"][3]) == ("7.1", "0.493")
    assert float(of_1b["8"][2]) < float(of_1b["8"][4]) < 7.1 / 2


def test_unknown_figures() -> None:
    unknown = reproduce("figure1", "figure9")
    assert unknown.returncode == 2
    assert "no figure 'figure9'; choose of table1, " in unknown.stderr


def test_the_catalogue_holds_together() -> None:
    from reproduce import demonstrations, published
    from reproduce.figures import read_catalogue

    from slurmllm.cli.main import cli

    catalogue = read_catalogue()
    for spec in catalogue.runs.values():
        settings = [*catalogue.common, *spec.set, *spec.also]
        resolve(spec.recipe, None, settings)  # raises for a setting that is none
        assert spec.after is None or spec.after in catalogue.runs
    used, verbs = set(), {*cli.list_commands(click.Context(cli))}
    for figure in catalogue.figures.values():
        assert figure.post in catalogue.posts
        shown_by = (figure.published, figure.demonstration)
        assert bool(figure.commands) + sum(map(bool, shown_by)) == 1
        assert figure.published is None or callable(getattr(published, figure.published))
        assert figure.demonstration is None or getattr(demonstrations, figure.demonstration)
        for run in figure.runs:
            assert any(run in command.split() for command in figure.commands)
        assert {command.split()[0] for command in figure.commands} <= verbs
        used |= {*figure.runs}
    assert used == set(catalogue.runs)

    page = (DOCS / "reproduce.md").read_text(encoding="utf-8")
    for name, figure in read_catalogue().figures.items():
        assert re.search(rf"\bpython tools/reproduce {name}[`\n]", page), name
        if figure.picture and not figure.demonstration:
            picture = f"images/reproduce/{name}.png"
            assert f"]({picture})" in page
            assert (DOCS / picture).stat().st_size < 120_000


HARNESS = all(importlib.util.find_spec(name) for name in ("lm_eval", "accelerate"))
OF_HARNESS = [pytest.mark.long, pytest.mark.skipif(not HARNESS, reason="lm_eval is missing")]


@pytest.mark.parametrize(
    ("name", "run_name"),
    [
        # Runs that train: end_to_end/test_local.py; scores kept: evaluate/test_evaluate_command.py.
        pytest.param("validation_loss", "llama", marks=pytest.mark.long),
        pytest.param("accuracy", "smoke", marks=OF_HARNESS),
    ],
)
def test_a_run_is_trained_once_and_evaluated(name: str, run_name: str, tmp_path: Path) -> None:
    where = ("--out", str(tmp_path / "out"), "--runs-dir", str(tmp_path / "runs"))

    def draw() -> dict[str, Any]:
        done = reproduce(name, *where, "--steps", "2", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        return dict(json.loads(done.stdout))

    first = draw()
    run = RunDir(tmp_path / "runs" / run_name)
    trained = run.metrics(0).stat().st_mtime_ns
    assert len(run.metrics(0).read_text().splitlines()) == 2
    assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(PNG)
    assert "step 2" in first[name]["output"][0]
    redrawn = draw()
    assert run.metrics(0).stat().st_mtime_ns == trained
    assert "0 tasks evaluated" in redrawn[name]["output"][0]


def test_a_run_that_fails_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from reproduce.__main__ import main

    path = tmp_path / "figures.yaml"
    path.write_text(
        "common: []\nposts: {a: A post}\n"
        "runs: {bad: {recipe: tiny_neox, set: [optim.lrr=1]}}\n"
        "figures: {one: {title: One, post: a, runs: [bad], commands: [report bad]}}\n"
    )
    folders = ["--out", str(tmp_path), "--runs-dir", str(tmp_path / "r")]
    monkeypatch.setattr("reproduce.figures.CATALOGUE", path)
    assert main(["one", *folders]) == 1
    message = capsys.readouterr().err
    assert "error: one: slurmllm submit tiny_neox failed" in message
    assert "optim.lrr: unknown field" in message


@pytest.mark.long  # tests/launch/supervise/test_recovery.py has one
def test_a_frozen_worker_is_missed(tmp_path: Path) -> None:
    done = reproduce("watchdog", "--runs-dir", str(tmp_path), "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\n0 .* 1–2\d .* hang +requeue +no progress for 3 s .* rank 1: ", done.stdout)
    assert re.search(r"\n1 .* 21–60 .* done +finish", done.stdout)
    assert "attempt 0, rank 1, differs from the others\nno answer; state T" in done.stdout


TWO_CORES_S = 3600  # all commands together


def test_the_table_of_the_page() -> None:
    from reproduce.claims import VERDICTS, read_claims, table

    documents = read_claims()
    page = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    assert f"\n{table(documents)}\n" in page, "python tools/reproduce claims --write"
    claims = [claim for document in documents.values() for claim in document.claims]
    assert len(claims) == 61
    assert {claim.verdict for claim in claims} == set(VERDICTS)
    # A command that several claims share, such as that of a figure's runs, is counted once.
    assert sum({claim.command: claim.seconds for claim in claims}.values()) < TWO_CORES_S
    for claim in claims:
        assert not (claim.tolerance and "…" in claim.prints), claim.id


def test_every_command_exists() -> None:
    from reproduce.claims import read_claims
    from reproduce.figures import read_catalogue

    figures = read_catalogue().figures
    for document in read_claims().values():
        for claim in document.claims:
            program, first, *rest = shlex.split(claim.command)
            if program == "slurmllm":
                verb = cli.get_command(click.Context(cli), first)
                assert verb is not None, claim.id
                verb.make_context(first, list(rest))
            elif program == "python":
                assert (ROOT / first).exists(), claim.id
                assert first != "tools/reproduce" or set(rest) <= set(figures), claim.id
            else:
                assert program == "pytest", claim.id
                path, _, name = first.partition("::")
                text = (ROOT / path).read_text(encoding="utf-8")
                tests = set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))
                assert not name or name in tests, claim.id
                words = re.findall(r"[a-z_]{9,}", rest[1]) if rest else []
                assert all(any(word in test for test in tests) for word in words), claim.id


@pytest.mark.parametrize(
    ("prints", "output", "tolerance", "printed"),
    [
        ("1 passed", "1 passed in 2.1s", 0.0, True),
        ("1 passed", "11 passed in 2.1s", 0.0, False),
        ("1 passed", "2 passed, 1 failed", 0.0, False),
        ("step 1.5", "step 1.55", 0.0, False),
        ("a … d", "a b\nc d", 0.0, True),
        ("a … d", "d c b a", 0.0, False),
        ("64 212.0 209.4", "4 13.6 13.6\n64  212.0  207.0", 0.02, True),
        ("64 212.0 209.4", "64 212.0 199.0", 0.02, False),
        ("utilization 99.34 %", "utilization  98.81 %", 0.002, False),
        ("31,317 node hours", "31,000 node hours", 0.02, True),
    ],
)
def test_what_is_printed(prints: str, output: str, tolerance: float, printed: bool) -> None:
    from reproduce.claims import is_printed

    assert is_printed(prints, output, tolerance) == printed


def test_a_claim_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from reproduce import claims

    rows = [
        claims.Claim(f"N{i}", "a recipe", "slurmllm recipes tiny_neox", prints, "works", 2)
        for i, prints in enumerate(("family: neox", "family: llama"), 1)
    ]
    document = claims.Document("A post", "https://example.com", rows)
    monkeypatch.setattr(claims, "read_claims", lambda: {"N": document})
    assert claims.main(["--run", "N1"]) == 0
    assert claims.main(["--all"]) == 1
    out = capsys.readouterr().out
    assert "1 of 2 print what the table has" in out
    assert "expected 'family: llama'" in out
    with pytest.raises(SystemExit):
        claims.main(["--run", "N9"])
    assert "no claim N9; there are N1, N2" in capsys.readouterr().err
