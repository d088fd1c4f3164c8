import json
import math
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from amounts import amount
from command_line import call
from hypothesis import given, settings
from hypothesis import strategies as st
from made_records import save_attempt
from training_rows import MakeFile, MakeRun, make_row, make_rows, write_rows
from worker_events import evaluation

from slurmllm.analysis.track.sync import Session, TrackerRecord, step_values
from slurmllm.core.config.load import load, save
from slurmllm.core.config.resolve import resolve
from slurmllm.core.errors import RunError
from slurmllm.core.metrics.curves import COLUMNS, Curve, describe_ranges, relative_difference
from slurmllm.core.metrics.row_reader import last_evaluation, read_evaluations
from slurmllm.core.metrics.source import read_curve, read_run
from slurmllm.core.run.records import NodeRecord
from slurmllm.core.run.rundir import RunDir

floats = st.floats(allow_nan=True, allow_infinity=True)


def overlap(curve: Curve) -> tuple[int, bool | None, float | None]:
    return curve.overlap_rows, curve.overlap_identical, curve.overlap_max_rel_diff


def test_an_unbroken_run(make_run: MakeRun) -> None:
    curve = read_curve(make_run("r", make_rows(1, 20)).path)
    assert curve.name == "r"
    assert curve.steps.tolist() == list(range(1, 21))
    assert curve.columns["loss"].tolist() == [make_row(step)["loss"] for step in range(1, 21)]
    assert set(curve.columns) == set(COLUMNS) - {"samples", "val_loss"}
    assert overlap(curve) == (0, None, None)
    assert not curve.gaps
    assert not curve.warnings
    assert not curve.restarts.size


def test_overlap_is_counted_once_and_the_latest_attempt_stands(make_run: MakeRun) -> None:
    second = [make_row(step, 1, loss=1.0) for step in range(9, 16)]
    curve = read_curve(make_run("r", make_rows(1, 12), second, make_rows(13, 20, 2)).path)
    assert curve.steps.tolist() == list(range(1, 21))
    assert curve.attempts.tolist() == [0] * 8 + [1] * 4 + [2] * 8
    assert curve.columns["loss"][8:12].tolist() == [1.0] * 4
    assert curve.restarts.tolist() == [9, 13]
    assert curve.overlap_rows == 4 + 3
    assert curve.overlap_identical is False
    losses = [make_row(step)["loss"] for step in range(9, 16)]
    assert curve.overlap_max_rel_diff == pytest.approx(max((x - 1) / x for x in losses))


def test_one_differing_bit_in_the_overlap_is_seen(make_run: MakeRun) -> None:
    rows = make_rows(9, 20, 1)
    rows[0]["param_norm"] = math.nextafter(rows[0]["param_norm"], math.inf)
    curve = read_curve(make_run("r", make_rows(1, 12), rows).path)
    assert curve.overlap_identical is False
    assert 0 < (curve.overlap_max_rel_diff or 0) < 1e-15


def test_a_run_that_fell_back_and_has_not_caught_up(make_run: MakeRun) -> None:
    curve = read_curve(make_run("r", make_rows(1, 20), make_rows(6, 10, 1)).path)
    assert curve.attempts.tolist() == [0] * 5 + [1] * 5 + [0] * 10
    assert curve.warnings == (
        "steps from 11 are of attempt 0; the later attempt 1 has only reached step 10",
    )


def test_a_broken_line_elsewhere_is_an_error_with_its_place(make_run: MakeRun) -> None:
    run = make_run("r", make_rows(1, 12))
    lines = run.metrics(0).read_text().splitlines(keepends=True)
    run.metrics(0).write_text("".join([*lines[:6], lines[6][:30] + "\n", *lines[7:]]))
    with pytest.raises(RunError, match=r"attempt_000\.jsonl:7: "):
        read_curve(run.path)


def test_files_with_several_attempts_gaps_and_rows_that_lack_a_metric(make_file: MakeFile) -> None:
    curve = read_curve(make_file("all", [*make_rows(4, 9, 1), *make_rows(1, 5, 0)]))
    assert curve.attempts.tolist() == [0] * 3 + [1] * 6
    assert curve.overlap_rows == 2
    rows = [make_row(step) for step in (1, 2, 3, 5, 6, 7, 11, 12)]
    curve = read_curve(make_file("m", rows))
    assert curve.gaps == ((4, 4), (8, 10))
    assert describe_ranges(curve.gaps) == "4, 8–10"
    tenth = [make_row(step) for step in (10, 20, 30, 60, 70, 80)]
    assert read_curve(make_file("m", tenth)).gaps == ((40, 50),)
    rows = make_rows(1, 6)
    for row in rows[::2]:
        del row["grad_norm"]
    for row in rows:
        del row["param_norm"]
        row["of_a_newer_version"] = {"a": 1}
    curve = read_curve(make_file("m", rows))
    steps, values = curve.series("grad_norm")
    assert steps.tolist() == [2, 4, 6]
    assert np.isfinite(values).all()
    assert curve.series("param_norm")[0].size == 0
    assert curve.series("loss")[0].size == 6


def test_rows_without_an_attempt_belong_to_their_file(make_run: MakeRun) -> None:
    files = [[make_row(step) for step in span] for span in (range(1, 8), (), range(5, 11))]
    for row in (*files[0], *files[2]):
        del row["attempt"]
    curve = read_curve(make_run("r", *files).path)  # the second ended before its first step
    assert (curve.attempts[-1], curve.restarts.tolist(), curve.warnings) == (2, [5], ())


def test_values_that_are_no_finite_number(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    words = 'NaN Infinity -Infinity null "NaN" "Infinity" 1e999'
    spelt = [*words.split(), "1" + "0" * 400]
    rows = (f'{{"step": {i}, "attempt": 0, "loss": {v}}}\n' for i, v in enumerate(spelt))
    path.write_text("".join(rows))
    nan, inf = math.nan, math.inf
    expected = np.array([nan, inf, -inf, nan, nan, inf, inf, inf])
    np.testing.assert_array_equal(read_curve(path).columns["loss"], expected)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        *((f'"loss": {value}', "loss is .*, not a number") for value in ('"high"', "true", "{}")),
        *((f'"attempt": {a}, "loss": 2', "attempt is") for a in ("-1", "1.5", '"a"', "null")),
        (f'"attempt": {2**60}, "loss": 2', "attempt is"),
    ],
)
def test_values_that_are_no_number_at_all(tmp_path: Path, row: str, fault: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(f'{{"step": 1, "attempt": 0}}\n{{"step": 2, {row}}}\n')
    with pytest.raises(RunError, match=rf"m\.jsonl:2: {fault}"):
        read_curve(path)


@given(st.lists(st.tuples(floats, floats), min_size=1))
def test_relative_difference_is_symmetric_and_bounded(pairs: list[tuple[float, float]]) -> None:
    a, b = (np.array(column, dtype=np.float64) for column in zip(*pairs, strict=True))
    difference = relative_difference(a, b)
    np.testing.assert_array_equal(difference, relative_difference(b, a))
    finite = np.isfinite(a) & np.isfinite(b)
    assert (np.isnan(difference) == ~finite).all()
    assert ((difference[finite] >= 0) & (difference[finite] <= 2)).all()
    assert ((difference[finite] == 0) <= (a[finite] == b[finite])).all()


def test_versions_of_a_run_without_graphs_are_those_of_its_last_attempt(make_run: MakeRun) -> None:
    run = make_run("r", make_rows(1, 4), make_rows(5, 8))
    for number, torch in enumerate(("2.9", "2.13")):
        save_attempt(run, number)
        node = NodeRecord(node="n1", versions={"torch": torch})
        node.save(run.attempt("train", number).node("n1"))
    assert read_curve(run.path).settings["versions.torch"] == "2.13"


@settings(max_examples=amount(15, of=60))
@given(
    resumes=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), max_size=4),
    cut=st.integers(0, 200),
)
def test_any_history_of_exact_resumes_is_one_run(resumes: list[tuple[int, int]], cut: int) -> None:
    """Attempts begin at or before where the last one ended; each may leave a cut line."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder) / "r")
        reached, made = 0, 0
        for number, (back, steps) in enumerate([(0, 10), *resumes]):
            first = max(1, reached + 1 - back)
            last = max(reached + 1, first + steps - 1)
            path = write_rows(run.metrics(number), make_rows(first, last, number))
            line = json.dumps(make_row(last + 1, number))
            with path.open("a") as stream:
                stream.write(line[: min(cut, len(line) - 1)])
            reached, made = last, made + last - first + 1
        curve = read_curve(run.path)
    assert curve.steps.tolist() == list(range(1, reached + 1))
    assert curve.columns["loss"].tolist() == [make_row(s)["loss"] for s in range(1, reached + 1)]
    assert curve.overlap_rows == made - reached
    assert curve.overlap_identical in (None, True)
    assert len(curve.warnings) == (len(resumes) + 1 if cut else 0)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Two attempts; the second one evaluated step 20 again, and has not evaluated step 30 yet."""
    run_dir = RunDir(tmp_path / "runs" / "demo")
    run_dir.logs.mkdir(parents=True)
    settings = ("trackers=[wandb]", "eval.every_steps=10", "eval.corpora={wiki: wiki.npy}")
    save(resolve("tiny_neox", "local", [*settings, "data.validation=0.1"]), run_dir)
    write_rows(run_dir.metrics(0), make_rows(1, 25))
    write_rows(run_dir.metrics(1), make_rows(16, 30, attempt=1))
    evaluation(run_dir, 0, 10, held_out=5.0, wiki=6.0)
    evaluation(run_dir, 0, 20, held_out=1.0, wiki=2.0)
    evaluation(run_dir, 1, 20, held_out=4.0, wiki=5.5)
    evaluation(run_dir, 1, 40, held_out=0.0)  # its row was lost
    return run_dir


def test_the_newest_attempt_s_value_of_a_step(run: RunDir) -> None:
    evaluations = read_evaluations(run, run.metrics_files())
    losses = [(e.step, e.attempt, e.values["held_out"]) for e in evaluations.values()]
    assert losses == [(10, 0, 5.0), (20, 1, 4.0), (40, 1, 0.0)]
    assert last_evaluation(run).step == 40
    curve = read_run(run.path)
    assert curve.validation == {"val_loss": "held_out", "val_loss/wiki": "wiki"}
    for metric, expected in (("val_loss", [5.0, 4.0]), ("val_loss/wiki", [6.0, 5.5])):
        steps, values = curve.series(metric)
        assert (steps.tolist(), values.tolist()) == ([10, 20], expected)
    assert len(curve.columns["val_loss"]) == 30


def test_a_tracker_waits_for_the_evaluation_of_the_last_step(run: RunDir) -> None:
    session = Session(run, load(run.config), "wandb")
    sent: list[int] = []

    class Memory:
        def log(self, steps: list[object]) -> None:
            sent.extend(step.step for step in steps)  # type: ignore[attr-defined]

    session._tracker = Memory()  # type: ignore[assignment]
    for _ in range(2):
        session.send(read_run(run.path), last=False)
    assert sent == [*range(1, 30)]
    evaluation(run, 1, 30, held_out=3.0, wiki=3.5)
    curve = read_run(run.path)
    session.send(curve)
    assert sent == [*range(1, 31)]
    values = step_values(curve, 29).values
    assert values["eval/wiki/loss"] == 3.5
    assert values["eval/held_out/perplexity"] == math.exp(3.0)
    assert not [tag for tag in step_values(curve, 28).values if tag.startswith("eval/")]
    assert TrackerRecord.load(run.tracker("wandb")).last_step == 30


def test_compare_and_status(run: RunDir, tmp_path: Path) -> None:
    other = RunDir(tmp_path / "runs" / "other")
    other.logs.mkdir(parents=True)
    save(load(run.config), other)
    write_rows(other.metrics(0), [make_row(step) for step in range(1, 31)])
    evaluation(other, 0, 20, held_out=4.0, wiki=5.0)
    root = ("--runs-dir", str(tmp_path / "runs"))
    done = call("compare", "demo", "other", "--json", "--no-plot", *root)
    assert done.exit_code == 0, done.output
    statistics = json.loads(done.stdout)["statistics"]
    assert (statistics["val_loss"]["points"], statistics["val_loss"]["max_rel_diff"]) == (1, 0)
    assert statistics["val_loss/wiki"]["max_rel_diff"] == pytest.approx(0.5 / 5.5)
    picture = str(tmp_path / "compared.png")
    shown = call("compare", "demo", "other", "--plot", picture, *root).output
    assert (tmp_path / "compared.png").stat().st_size > 10_000
    assert re.search(r"val_loss/wiki +1 ", shown)
    status = call("status", "other", *root)
    text = "held_out 4.0000, perplexity 54.60; wiki 5.0000, perplexity 148.41 (step 20)"
    assert text in " ".join(status.output.split())
    status = call("status", "other", "--json", *root)
    texts = json.loads(status.stdout)["evaluation"]["texts"]
    assert texts["wiki"] == {"loss": 5.0, "perplexity": math.exp(5.0)}
