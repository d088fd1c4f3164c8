from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from amounts import amount
from hypothesis import given, settings
from hypothesis import strategies as st
from made_records import save_attempt
from training_rows import MakeFile, MakeRun, make_row, make_rows, write_rows

from slurmllm.errors import RunError
from slurmllm.metrics.curves import COLUMNS, Curve, describe_ranges, relative_difference
from slurmllm.metrics.source import read_curve
from slurmllm.run.records import NodeRecord
from slurmllm.run.rundir import RunDir

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
    spelt = [
        "NaN",
        "Infinity",
        "-Infinity",
        "null",
        '"NaN"',
        '"Infinity"',
        "1e999",
        "1" + "0" * 400,
    ]
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
def test_any_history_of_exact_resumes_reads_as_the_unbroken_run(
    resumes: list[tuple[int, int]], cut: int
) -> None:
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
