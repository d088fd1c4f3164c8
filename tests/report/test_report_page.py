"""The page in a real browser, the Markdown beside it, and where they lie."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from browser import open_report, require_sound
from click.testing import CliRunner, Result
from reported_runs import add_scores, make_reported_run
from training_rows import make_row, write_rows

from slurmllm.cli.main import cli
from slurmllm.evaluate.scores import ScoreRow, ScoreTable
from slurmllm.report.blocks import Bullets, Paragraph, ReportSection, Table, default_path
from slurmllm.report.facts import RunFacts
from slurmllm.report.tables import scores_table
from slurmllm.report.write import to_markdown
from slurmllm.rundir import RunDir

EVIL = "<script>alert(1)<b>&"
KEYS = {
    "recipe", "parameters", "nodes", "mesh", "steps", "planned_steps", "tokens", "loss",
    "seq_per_s", "tokens_per_s", "seq_per_s_first_500", "tokens_per_usd", "mfu", "usd", "restarts",
    "checkpoints", "evaluations", "warnings", "name", "utilization", "recoveries", "endings",
}  # fmt: skip


def call(tmp_path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["report", *arguments, "--runs-dir", str(tmp_path / "runs")])


@pytest.fixture
def runs(tmp_path: Path) -> tuple[RunDir, RunDir]:
    """Two sizes of one model; the second's name and evidence would be HTML."""
    folder = tmp_path / "runs"
    return (
        make_reported_run(RunDir(folder / "small"), nodes=4, seq_per_s=13.6),
        make_reported_run(RunDir(folder / EVIL), nodes=16, seq_per_s=54.3),
    )


def test_the_page_in_a_browser(tmp_path: Path, runs: tuple[RunDir, RunDir]) -> None:
    log = write_rows(tmp_path / "other.jsonl", [make_row(s) for s in range(1, 50)])
    page = tmp_path / "page.html"
    add_scores(runs[0], 30, 60)
    done = call(tmp_path, "small", EVIL, str(log), "--price", "reserved", "--out", str(page))
    assert done.exit_code == 0, done.output
    opened = open_report(page, tmp_path)
    require_sound(opened)
    plots = opened.seen["plots"]
    assert set(plots) >= {
        "loss", "grad_norm", "param_norm", "lr", "seq_per_s", "step_time_s", "parts-0", "memory",
        "utilization", "scaling", "scores-0",
    }  # fmt: skip
    assert "attempt 0 ended: node_failure" in plots["loss"]["hover"]
    assert plots["lr"]["points"] == 2  # a restart of each run
    assert set(opened.seen["axes"]) == {"step", "tokens", "hours"}
    assert opened.text.count("&lt;script&gt;alert(1)") > 3
    assert "alert(1)<b>" not in opened.text
    text = page.read_text()
    outside = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.findall(r"(?:src|href)\s*=\s*[\"']?(?:https?:)?//", outside)
    assert len(text) < 6e6
    markdown = page.with_suffix(".md").read_text()
    for picture in ("curves", "utilization", "scaling", "scores-0-hlat"):
        assert f"(page_files/{picture}.png)" in markdown
        assert (tmp_path / "page_files" / f"{picture}.png").read_bytes().startswith(b"\x89PNG")
    assert "&lt;script&gt;alert(1)" in markdown
    assert "<script>" not in markdown
    for part in ("99.8 %", "3.3M", "13.6", "node\\_failure", "0.6 ± 0.01"):
        assert part in markdown, part


def test_json_and_places(tmp_path: Path, runs: tuple[RunDir, RunDir]) -> None:
    small = runs[0].reports
    add_scores(runs[0], 60)
    found = json.loads(call(tmp_path, "small", "--price", "10", "--json").stdout)
    assert set(found) == {"runs", "total", "scaling", "report"}
    assert found["report"] == {
        "html": str(small / "report.html"), "markdown": str(small / "report.md")
    }  # fmt: skip
    (run,) = found["runs"]
    assert set(run) >= KEYS
    assert (run["nodes"], run["steps"], run["restarts"], run["mesh"]["tensor"]) == (4, 60, 1, 8)
    (suite,) = run["evaluations"]
    assert suite["suite"] == "hlat"
    assert suite["rows"][0]["scores"] == {"60": 0.6}
    assert found["scaling"][0]["scaling_efficiency"] == 1.0
    shown = call(tmp_path, "small", EVIL)
    assert (small / f"report-small-{re.sub('[^a-z0-9]', '_', EVIL)}.html").is_file()
    assert "scaling" in shown.output
    (small / "report.html").unlink()
    alone = json.loads(call(tmp_path, "small", "--no-html", "--json").stdout)["report"]
    assert alone == {"html": None, "markdown": str(small / "report.md")}
    assert not (small / "report.html").exists()
    none = json.loads(call(tmp_path, "small", "--no-files", "--json").stdout)["report"]
    assert none == {"html": None, "markdown": None}


def test_a_place_that_cannot_be_written(tmp_path: Path, runs: tuple[RunDir, RunDir]) -> None:
    runs[0].reports.write_text("a file where the folder should be")
    shown = call(tmp_path, "small")
    assert shown.exit_code == 0
    assert "warning: cannot write" in shown.output
    assert call(tmp_path, "small", "--out", str(runs[0].reports / "x.html")).exit_code == 4


@pytest.mark.parametrize(
    "arguments",
    [("--price", "-1"), ("--price", "free"), ("--out", "x.pdf"), ("--out", "x.html", "--no-files"),
     ("--plot", "p.pdf")],
)  # fmt: skip
def test_unusable_options(
    tmp_path: Path, runs: tuple[RunDir, RunDir], arguments: tuple[str, ...]
) -> None:
    assert call(tmp_path, "small", *arguments).exit_code == 2


def test_names_are_safe_and_bounded() -> None:
    facts = [RunFacts(f"{'x' * 300}/../{i}", Path("x.csv"), "csv") for i in range(9)]
    name = default_path(facts).name
    assert len(name) < 200
    assert name.endswith("-and-5-more.html")


def test_markdown_is_escaped() -> None:
    blocks = [
        Paragraph("a|b *c*\n<d>", strong="_x_"),
        Bullets(["[l](u)"]),
        Table(("", "n"), [("  a|", "1")]),
    ]
    text = to_markdown("t", [ReportSection("s", "S", blocks)], {}, "now")
    assert "**\\_x\\_:** a\\|b \\*c\\* &lt;d&gt;" in text
    assert "- \\[l\\](u)" in text
    assert "| &nbsp;&nbsp;a\\| | 1 |" in text
    assert "|---|---:|" in text


def test_scores_stand_beside_published_ones() -> None:
    row = ScoreRow(
        group="", name="piqa", shots=0, metric="acc", scores={10: 0.5, 20: 0.625},
        errors={20: 0.01}, references={"Pythia": 0.75},
    )  # fmt: skip
    table = scores_table(ScoreTable("pythia", (row,), (10, 20), {20: 10**9}, {"Pythia": "a paper"}))
    assert table.headings[-3:] == ("step 10", "step 20", "Pythia")
    assert table.rows[0][-3:] == ("0.5", "0.625 ± 0.01", "0.75")
    assert table.caption == "step 20: 1B tokens. Pythia: a paper"
