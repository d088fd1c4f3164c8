"""tools/reproduce: its catalogue and claims hold together, and each figure is drawn."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from amounts import sample
from training_rows import MakeRun, make_row

from slurmllm.cli.main import cli
from slurmllm.core.config.resolve import resolve
from slurmllm.core.run.rundir import RunDir

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "developing"
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


def test_published_figures_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from reproduce.__main__ import main
    from reproduce.claims import MEASURED, by_id, read_claims, read_outcome

    measured = yaml.safe_load(MEASURED.read_text(encoding="utf-8"))
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
    for name, claim in by_id(read_claims()).items():
        if (
            claim.command.startswith("python tools/reproduce ")
            and claim.command.split()[2] in names
        ):
            ours = read_outcome(claim, result[claim.command.split()[2]]["output"][0])
            assert ours == pytest.approx(measured[name], rel=1e-3), name


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
    used = set()
    for figure in catalogue.figures.values():
        assert figure.post in catalogue.posts
        shown_by = (figure.published, figure.demonstration)
        assert bool(figure.commands) + sum(map(bool, shown_by)) == 1
        assert figure.published is None or callable(getattr(published, figure.published))
        assert figure.demonstration is None or getattr(demonstrations, figure.demonstration)
        for run in figure.runs:
            assert any(run in command.split() for command in figure.commands)
        for command in figure.commands:
            verb, *options = shlex.split(command) + ["--runs-dir", "x"] * bool(figure.runs)
            called = cli.get_command(click.Context(cli), verb)
            assert called is not None
            called.make_context(verb, options)
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


def test_the_tables_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    from reproduce.claims import MEASURED, SHOWN, by_id, main, read_claims, table

    documents, measured = read_claims(), yaml.safe_load(MEASURED.read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "developing" / "reproduce.md").read_text(encoding="utf-8")
    assert f"\n{table(documents, measured)}\n" in page, "python tools/reproduce claims --write"
    claims = by_id(documents)
    assert list(measured) == list(claims)
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert [n for n, c in claims.items() if f"\n     {c.command}\n" not in printed] == []
    assert {claim.shown for claim in claims.values()} == set(SHOWN)
    # A command that several claims share, such as that of a figure's runs, is counted once.
    assert sum({c.command: c.seconds for c in claims.values()}.values()) < TWO_CORES_S


def test_a_row_fails_with_another_published_number() -> None:
    from reproduce.claims import MEASURED, agreement, by_id, read_claims, read_outcome

    measured = yaml.safe_load(MEASURED.read_text(encoding="utf-8"))
    for name, claim in by_id(read_claims()).items():
        ours = measured[name]
        if ours is None:  # not run yet
            continue
        assert bool(claim.published) == ("{}" in claim.prints) == isinstance(ours, float), name
        if claim.published:
            bound = claim.published[0] if claim.published[0] in "<>" else ""
            others = {"": f"{3 * ours}", ">": f"> {3 * ours}", "<": f"< {ours / 3}"}
            assert not agreement(replace(claim, published=others[bound]), ours)[0], name
            assert agreement(replace(claim, published=f"{bound} {ours}"), ours)[0], name
        else:
            changed = re.sub(
                r"\d(?=\D*$)", lambda digit: str((int(digit[0]) + 1) % 10), claim.prints
            )
            assert read_outcome(claim, claim.prints.replace("#", "1")), name
            changed = changed.replace("#", "1")
            assert not re.search(r"\d", claim.prints) or not read_outcome(claim, changed), name


def test_every_command_exists() -> None:
    from reproduce.claims import by_id, read_claims
    from reproduce.figures import read_catalogue

    figures = read_catalogue().figures
    for name, claim in by_id(read_claims()).items():
        program, first, *rest = shlex.split(claim.command)
        if program == "slurmllm":
            verb = cli.get_command(click.Context(cli), first)
            assert verb is not None, name
            verb.make_context(first, list(rest))
        elif program == "python":
            assert (ROOT / first).exists(), name
            assert first != "tools/reproduce" or set(rest) <= set(figures), name
        else:
            assert program == "pytest", name
            path, _, test = first.partition("::")
            text = (ROOT / path).read_text(encoding="utf-8")
            tests = set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))
            assert not test or test in tests, name
            words = re.findall(r"[a-z_]{9,}", rest[1]) if rest else []
            assert all(any(word in known for known in tests) for word in words), name


@pytest.mark.parametrize(
    ("prints", "output", "outcome"),
    [
        ("1 passed", "1 passed in 2.1s", True),
        ("1 passed", "11 passed in 2.1s", False),
        ("1 passed", "2 passed, 1 failed", False),
        ("step 1.5", "step 1.55", False),
        ("a … d", "a b\nc d", True),
        ("a … d", "d c b a", False),
        ("64 212.0 {}", "4 13.6 13.6\n64  212.0  207.0", 207.0),
        ("utilization {} %", "utilization  98.81 %", 98.81),
        ("# days, {} node hours", "1.4 days, 31,000 node hours", 31000.0),
        ("a {} … b # {}", "a 2\nb 7 5", 2.5),
    ],
)
def test_what_is_printed(prints: str, output: str, outcome: float | bool) -> None:
    from reproduce.claims import Claim, read_outcome

    assert read_outcome(Claim("", "", prints, "works", 1), output) == outcome


@pytest.mark.parametrize(
    ("published", "ours", "text"),
    [
        ("7.1 h", 2.34, "no: 2.34 for 7.1 h, 3 × lower"),
        ("14.4 ×", 13.9, "yes: 13.9 for 14.4 ×, 3.5% lower"),
        ("> 98.81 %", 98.48, "no: 98.48 for > 98.81 %, 0.33 points lower"),
        ("> 98.81 %", 99.33, "yes: 99.33 for > 98.81 %, 0.52 points higher"),
        ("< 1 ×", 1.5, "no: 1.5 for < 1 ×, 1.5 × higher"),
        ("1,400 to 4,600 $", 4000.0, "yes: 4,000 for 1,400 to 4,600 $"),
        ("1,400 to 4,600 $", 700.0, "no: 700 for 1,400 to 4,600 $, 2 × lower"),
        ("1 h", False, "no"),
        ("", True, "yes"),
    ],
)
def test_agreement_is_computed(published: str, ours: float | bool, text: str) -> None:
    from reproduce.claims import Claim, verdict

    claim = Claim("", "", "", "plan", 1, published)
    assert verdict(claim, ours) == text
    assert verdict(replace(claim, why="then"), ours) == f"{text}; then"
    assert verdict(replace(claim, shown="needs Trainium"), ours).startswith("not shown")


def test_a_claim_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from reproduce import claims

    rows = [
        claims.Claim("a recipe", "slurmllm recipes tiny_neox", prints, "works", 2)
        for prints in ("family: neox", "family: llama")
    ]
    document = claims.Document("A post", "https://example.com", rows)
    monkeypatch.setattr(claims, "read_claims", lambda: {"N": document})
    assert claims.main(["--run", "N1"]) == 0
    assert claims.main(["--all"]) == 1
    out = capsys.readouterr().out
    assert "1 of 2 agree; not N2" in out
    assert "expected 'family: llama'" in out
    with pytest.raises(SystemExit):
        claims.main(["--run", "N9"])
    assert "no claim N9; there are N1, N2" in capsys.readouterr().err
