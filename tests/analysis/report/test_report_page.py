"""The page in a real browser, its texts, and where it is written."""

import json
import math
import re
from pathlib import Path

import pytest
from browser import open_report, require_sound
from click.testing import Result
from command_line import call
from reported_runs import add_scores, make_reported_run
from training_rows import make_row, write_rows
from worker_events import evaluation

from slurmllm.analysis.evaluate.scores import ScoreRow, ScoreTable
from slurmllm.analysis.report.facts import RunFacts
from slurmllm.analysis.report.tables import scores_table
from slurmllm.analysis.report.write import default_path
from slurmllm.core.run.rundir import RunDir

EVIL = "<script>alert(1)<b>&"
KEYS = {
    *("recipe", "parameters", "nodes", "mesh", "steps", "planned_steps", "tokens", "loss"),
    *("seq_per_s", "tokens_per_s", "seq_per_s_first_500", "tokens_per_usd", "mfu", "usd"),
    *("restarts", "checkpoints", "evaluations", "warnings", "name", "utilization", "recoveries"),
    "endings",
}


def report(tmp_path: Path, *arguments: str) -> Result:
    return call("report", *arguments, "--runs-dir", tmp_path / "runs")


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
    for step in (20, 40, 60):
        evaluation(runs[0], step // 50, step, held_out=7.0 - step / 20, wiki=8.0 - step / 20)
    done = report(tmp_path, "small", EVIL, str(log), "--price", "7.59", "--out", str(page))
    assert done.exit_code == 0, done.output
    opened = open_report(page, tmp_path)
    require_sound(opened)
    plots = opened.seen["plots"]
    names = "loss grad_norm param_norm lr seq_per_s step_time_s parts-0 memory utilization scaling"
    assert set(plots) >= {*names.split(), "scores-0", "val_loss"}
    assert "attempt 0 ended: node_failure" in plots["loss"]["hover"]
    assert plots["lr"]["points"] == 2  # a restart of each run
    assert set(opened.seen["axes"]) == {"step", "tokens", "hours"}
    assert opened.text.count("&lt;script&gt;alert(1)") > 3
    assert "alert(1)<b>" not in opened.text
    text = page.read_text()
    outside = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.findall(r"(?:src|href)\s*=\s*[\"']?(?:https?:)?//", outside)
    assert len(text) < 200_000
    assert sorted(path.name for path in tmp_path.glob("*.js")) == ["plotly.min.js"]
    for words in ("99.8 %", "3.3M", "13.6", "node_failure", "0.6 ± 0.01"):
        assert words in text, words


def test_a_comparison_as_a_page(tmp_path: Path) -> None:
    rows = [make_row(step) for step in range(1, 61)]
    changed = [row | {"loss": row["loss"] * (1.1 if row["step"] > 40 else 1)} for row in rows]
    names = ("a", "b", "c")
    for name, of_run in zip(names, (rows, rows, changed), strict=True):
        write_rows(tmp_path / f"{name}.jsonl", of_run)
    page = tmp_path / "page.html"
    files = [str(tmp_path / f"{name}.jsonl") for name in names]
    done = call("compare", *files, "--no-plot", "--html", page)
    assert (done.exit_code, f"page: {page}" in done.output) == (1, True), done.output
    opened = open_report(page, tmp_path)
    require_sound(opened)
    assert set(opened.seen["plots"]) >= {"loss", "grad_norm", "lr", "difference-loss"}
    assert re.search(r"differ: loss diverges at step 41.*<th[^>]*>metric", opened.text, re.DOTALL)
    assert "the tolerance, 0.001." in opened.text
    assert "prefers-color-scheme: dark" in opened.text


def test_a_log_on_a_narrow_page(tmp_path: Path) -> None:
    """A log from step 0, with a constant learning rate and a first step that compiles."""
    log = tmp_path / "gpt" / "lightning_logs" / "version_0" / "metrics.csv"
    log.parent.mkdir(parents=True)
    rows = [f"{20_000 + i},{8 - i / 50},0.0003,{40 if i == 0 else 0.5}" for i in range(60)]
    log.write_text("\n".join(["step,train_loss,lr,step_time_s", *rows]) + "\n")
    page = tmp_path / "page.html"
    assert report(tmp_path, str(log.parent), "--out", str(page)).exit_code == 0
    opened = open_report(page, tmp_path, 500)
    require_sound(opened)
    plots = opened.seen["plots"]
    assert plots["lr"]["range"] == pytest.approx([0, 0.0006])
    assert "0.0003" in plots["lr"]["ticks"]
    assert plots["step_time_s"]["range"] == [0, 0.75]
    assert any(re.fullmatch(r"20,0\d\d", tick) for tick in plots["loss"]["ticks"])
    assert "<h1>Report of gpt</h1>" in page.read_text()


def test_several_runs_are_compared(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    first = make_reported_run(RunDir(runs / "first"))
    second = make_reported_run(RunDir(runs / "second"))
    text = second.config.read_text()
    assert "  seed: 1234\n" in text
    second.config.write_text(text.replace("  seed: 1234\n", "  seed: 7\n"))
    rows = [make_row(step, loss=5.0 + step / 100) for step in range(1, 61)]
    third = write_rows(tmp_path / "third.jsonl", rows)
    short = write_rows(tmp_path / "late.jsonl", [make_row(step) for step in range(900, 910)])
    out = report(tmp_path, "first", "second", str(third), str(short), "--out", str(runs / "p.html"))
    assert out.exit_code == 0, out.output
    text = (runs / "p.html").read_text()
    assert re.search(r"second \(B\) compared with first \(A\):</strong> (match|identical): ", text)
    assert re.search(r"third \(C\) compared with first \(A\):</strong> differ: ", text)
    assert re.search(r"late \(D\) .*:</strong> .*(900|step)", text)
    assert "late (D) compared with first (A):</strong> differ" not in text
    assert re.search(r"<td>train.seed</td><td[^>]*>1234</td><td[^>]*>7</td>", text)
    assert "second (B) compared with first (A): " in out.output
    runs = json.loads(report(tmp_path, "first", "second", "--no-files", "--json").stdout)["runs"]
    assert runs[0]["comparison"] is None
    assert runs[1]["comparison"]["verdict"] in ("match", "identical")
    assert first.path.is_dir()


def test_warnings_about_spikes_are_shown(tmp_path: Path) -> None:
    rows = [make_row(step, loss=3 + 0.2 * (-1) ** step) for step in range(100)]
    log = write_rows(tmp_path / "noisy.jsonl", rows)
    done = report(tmp_path, str(log), "--out", str(tmp_path / "p.html"))
    assert (done.exit_code, "noisy: steps 0 to 99 in noisy.jsonl" in done.output) == (0, True)
    text = (tmp_path / "p.html").read_text()
    assert "may be noise" in text
    assert "more than 0.1 above the mean of the 20 logged steps" in text
    assert text.count("over 86%") <= 1  # with the gradient norm only


def test_json_and_places(tmp_path: Path, runs: tuple[RunDir, RunDir]) -> None:
    small = runs[0].reports
    add_scores(runs[0], 60)
    document = json.loads(report(tmp_path, "small", "--price", "10", "--json").stdout)
    assert set(document) == {"runs", "total", "scaling", "report"}
    assert document["report"] == {"html": str(small / "report.html")}
    (run,) = document["runs"]
    assert set(run) >= KEYS
    assert (run["nodes"], run["steps"], run["restarts"], run["mesh"]["tensor"]) == (4, 60, 1, 8)
    (suite,) = run["evaluations"]
    assert suite["suite"] == "hlat"
    assert suite["rows"][0]["scores"] == {"60": 0.6}
    assert document["scaling"][0]["scaling_efficiency"] == 1.0
    shown = report(tmp_path, "small", EVIL)
    assert (small / f"report-small-{re.sub('[^a-z0-9]', '_', EVIL)}.html").is_file()
    assert "scaling" in shown.output
    (small / "report.html").unlink()
    nothing = json.loads(report(tmp_path, "small", "--no-files", "--json").stdout)["report"]
    assert nothing == {"html": None}
    assert not (small / "report.html").exists()


def test_a_place_that_cannot_be_written(tmp_path: Path, runs: tuple[RunDir, RunDir]) -> None:
    runs[0].reports.write_text("a file where the folder should be")
    shown = report(tmp_path, "small")
    assert shown.exit_code == 4
    assert "error: cannot write" in shown.output
    assert "--no-files" in shown.output
    assert "node hours" in shown.stdout  # the tables
    result = report(tmp_path, "small", "--json")
    assert result.exit_code == 4
    assert json.loads(result.stdout)["report"] == {"html": None}
    assert report(tmp_path, "small", "--no-files").exit_code == 0
    assert report(tmp_path, "small", "--out", str(runs[0].reports / "x.html")).exit_code == 4


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        (math.nan, range(1, 20)),
        (-math.inf, range(2**53 - 2, 2**53)),
        (1e308, range(2**53 - 2, 2**53)),
        (0.0, range(1, 20)),
    ],
)
def test_no_value_is_finite(tmp_path: Path, values: float, steps: range) -> None:
    no_time = {"step_time_s": 0.0, "data_wait_s": 0.0} if values == 0 else {}
    rows = [{"step": s, "attempt": 0, "loss": values, "grad_norm": values} | no_time for s in steps]
    log = write_rows(tmp_path / "odd.jsonl", rows)
    shown = report(tmp_path, str(log), "--out", str(tmp_path / "p.html"))
    assert shown.exit_code == 0, shown.output
    assert ("plotly-graph-div" in (tmp_path / "p.html").read_text()) == math.isfinite(values)


def test_unusable_options(tmp_path: Path) -> None:
    log = str(write_rows(tmp_path / "log.jsonl", [make_row(1), make_row(2)]))
    for arguments, message in (
        (("--price", "-1"), "dollars for an hour"),
        (("--out", "x.pdf"), "name it x.html"),
        (("--out", "x.html", "--no-files"), "exclude each other"),
        (("--plot", "p.png"), "was removed"),
        (("--no-html",), "was removed"),
    ):
        done = report(tmp_path, log, *arguments)
        assert (done.exit_code, message in done.stderr) == (2, True), done.output


def test_the_name_of_a_page_of_many_runs() -> None:
    facts = [RunFacts(f"{'x' * 300}/../{i}", Path("x.csv"), "csv") for i in range(9)]
    name = default_path(facts).name
    assert len(name) < 200
    assert name.endswith("-and-5-more.html")


def test_scores_stand_beside_published_ones() -> None:
    scores, references = {10: 0.5, 20: 0.625}, {"Pythia": 0.75}
    row = ScoreRow("", "piqa", 0, "acc", scores, {20: 0.01}, references)
    table = scores_table(ScoreTable("pythia", (row,), (10, 20), {20: 10**9}, {"Pythia": "a paper"}))
    assert table.headings[-3:] == ("step 10", "step 20", "Pythia")
    assert table.rows[0][-3:] == ("0.5", "0.625 ± 0.01", "0.75 (-12.5 SE)")
    assert table.numeric[-3:] == [True] * 3
    assert table.caption == (
        "step 20: 1B tokens. Pythia: a paper. "
        "SE: newest score less published one, in standard errors of the two"
    )
