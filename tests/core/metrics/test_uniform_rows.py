"""The fast reader of our metrics files reads what the exact one reads."""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amounts import amount
from hypothesis import given, settings
from hypothesis import strategies as st
from training_rows import MakeRun, make_row, make_rows, write_rows

from slurmllm.core.errors import RunError
from slurmllm.core.metrics import attempt_metrics as reader
from slurmllm.core.metrics.attempt_metrics import read_uniform
from slurmllm.core.metrics.curves import Curve
from slurmllm.core.metrics.row_reader import last_row, read_rows
from slurmllm.core.metrics.source import read_curve
from slurmllm.core.run.records import MetricsRow

ODD_LINES = """\
{"step": 7, "lo
[1]
{"loss": 1.0}
{"step": "7"}
{"step": 3, "loss": null}
{"step": 3, "loss": NaN, "x": {}}
{"loss":2.5,"step":4}
{"step":5,"attempt":0,"loss":"high"}
{"step":5,"attempt":-1,"loss":1}
{"step":6,"loss":1e999}
{"step":6,"note":"a, b: c}"}
{"step":6,"loss":1,"loss":2}"""
odd_lines = st.sampled_from(["", "  ", "\0" * 20, *ODD_LINES.splitlines()])
values = st.floats() | st.integers(-(10**20), 10**20) | st.none()


def read_both(path: Path, lenient: bool) -> tuple[Curve | str, Curve | str]:
    """The file by the fast reader, in blocks of a few lines, and by the exact one."""
    curves: list[Curve | str] = []
    for small_bytes in (0, 1 << 30):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reader, "_SMALL_BYTES", small_bytes)
            patch.setattr(reader, "_BLOCK_BYTES", 300)
            try:
                curves.append(read_curve(path, lenient=lenient))
            except RunError as error:
                curves.append(str(error))
    return curves[0], curves[1]


def assert_same(fast: Curve | str, exact: Curve | str) -> None:
    if isinstance(fast, str) or isinstance(exact, str):
        assert fast == exact
        return
    assert (fast.warnings, fast.overlap_rows) == (exact.warnings, exact.overlap_rows)
    np.testing.assert_array_equal(fast.steps, exact.steps)
    np.testing.assert_array_equal(fast.attempts, exact.attempts)
    assert list(fast.columns) == list(exact.columns)
    assert list(fast.absent) == list(exact.absent)
    for key, column in fast.columns.items():
        np.testing.assert_array_equal(column, exact.columns[key])
    for key, flags in fast.absent.items():
        np.testing.assert_array_equal(flags, exact.absent[key])


@settings(max_examples=amount(15, of=60))
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), values, values), min_size=1, max_size=30),
    odd=st.lists(st.tuples(st.integers(0, 30), odd_lines), max_size=2),
    compact=st.booleans(),
    cut=st.integers(0, 60),
    lenient=st.booleans(),
)
def test_fast_and_exact_read_the_same(
    rows: list[tuple[int, Any, Any]],
    odd: list[tuple[int, str]],
    compact: bool,
    cut: int,
    lenient: bool,
) -> None:
    separators = (",", ":") if compact else (", ", ": ")
    lines = [
        json.dumps({"step": s, "attempt": 0, "loss": a, "lr": b, "more": 1}, separators=separators)
        for s, a, b in rows
    ]
    for place, line in odd:
        lines.insert(min(place, len(lines)), line)
    text = "\n".join(lines) + "\n"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.jsonl"
        path.write_text(text[: len(text) - cut] or "\n")
        if '"attempt": 0' in text or '"attempt":0' in text:
            assert_same(*read_both(path, lenient))


def test_rows_of_the_trainer_take_the_fast_way() -> None:
    rows = [MetricsRow(**make_row(step)) for step in range(1, 50)]
    rows[7] = rows[7].model_copy(update={"loss": math.nan})
    lines = "".join(row.model_dump_json(exclude_none=True) + "\n" for row in rows).encode()
    part = read_uniform(lines, 0)
    assert part.columns["tokens"].tolist() == [row.tokens for row in rows]
    np.testing.assert_array_equal(part.columns["loss"], [row.loss for row in rows])
    half = lines.index(b'{"step":25')
    row = lines[: lines.index(b"\n") + 1]
    odd_rows = [re.sub(rb'"lr":[^,]*', rb'"lr":' + name, row) for name in (b"Inf", b"-NaN")]
    odd_rows += [row.replace(b",", b",\n", 1), row + b"\0\n", b'{"step":9}\n', b'{"step":8.0}\n']
    for odd in (*odd_rows, b'{"step":8}{"step":9}\n', b'{"step":-1}\n'):
        assert read_uniform(lines[:half] + odd + lines[half:], 0) is None
    assert read_uniform(b'{"step":1,"\\ud800":2}\n', 0) is None
    assert read_uniform(b'{"step":1,"loss":2}{"step":2,"loss":2}\n\n', 0) is None


def test_lenient_reading_leaves_damage_out(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "r" / "metrics" / "attempt_000.jsonl"
    write_rows(path, make_rows(1, 20))
    lines = path.read_text().splitlines()
    lines[4], lines[9] = lines[4][:30], "[]"
    lines[6] = json.dumps(make_row(7, loss={"mean": 2.0, "std": 0.1}))
    path.write_text("\n".join(lines) + "\n" + "\0" * 64)
    (path.parent / "metrics.v2.jsonl").write_text("{}")
    curve = read_curve(path.parents[1], lenient=True)
    assert curve.steps.tolist() == [step for step in range(1, 21) if step not in (5, 10)]
    assert np.flatnonzero(curve.absent["loss"]).tolist() == [5]
    unknown, broken, newer, cut = curve.warnings
    assert "ignoring metrics.v2.jsonl" in unknown
    assert broken.startswith(f"{path}:5: ")
    assert "skipped this line and 1 other invalid line" in broken
    assert newer.startswith(f"{path}:7: loss is ")
    assert "newer version" in newer
    assert cut == f"{path}:21: skipped the truncated last line"
    with pytest.raises(RunError, match=r"attempt_000\.jsonl:5: "):
        read_curve(path.parents[1])


def test_what_a_run_directory_tells_of_the_training(tmp_path: Path) -> None:
    run = tmp_path / "r"
    write_rows(run / "metrics" / "attempt_000.jsonl", make_rows(1, 5))
    (run / "config.yaml").write_text(
        "model: {seq_len: 256}\ntrain: {precision: fp32}\noptim: {lr: 1.0e-3, betas: [0.9, 0.95]}\n"
        "of_a_newer_version: {deep: {er: 1}}\nbackend: native\ncluster: {name: local, health: {}}\n"
        "origin: {optim.lr: default}\n"
    )
    (run / "attempts" / "000").mkdir(parents=True)
    (run / "attempts" / "000" / "attempt.json").write_text('{"nodes": ["n1", "n2"], "new": 1}')
    curve = read_curve(run)
    assert curve.settings == {
        "model.seq_len": 256,
        "train.precision": "fp32",
        "optim.lr": 1e-3,
        "optim.betas": "[0.9, 0.95]",
        "of_a_newer_version.deep.er": 1,
        "backend": "native",
        "cluster.name": "local",
        **dict.fromkeys(("cluster.device", "cluster.devices_per_node", "cluster.instance_type")),
    }
    assert curve.nodes == {0: ("n1", "n2")}
    assert curve.positions("samples").tolist() == [16.0 * step for step in range(1, 6)]
    (run / "config.yaml").write_text("model: [unclosed\n")
    (run / "attempts" / "000" / "attempt.json").write_text("{")
    damaged = read_curve(run)
    assert (damaged.settings, damaged.nodes) == ({}, {})
    assert "config.yaml is damaged" in damaged.warnings[0]
    assert "attempt.json is damaged" in damaged.warnings[1]


def test_last_row_is_the_newest(make_run: MakeRun) -> None:
    assert last_row(make_run("none")) is None
    run = make_run("r", make_rows(1, 20), make_rows(16, 18, attempt=1))
    assert last_row(run) == make_row(18, attempt=1)


def test_last_row_passes_over_a_cut_line_and_an_attempt_without_steps(make_run: MakeRun) -> None:
    run = make_run("r", make_rows(1, 5), [])
    with run.metrics(0).open("a") as stream:
        stream.write('{"step": 6, "lo')
    assert last_row(run) == make_row(5)
    run.metrics(1).write_bytes(b"\0" * 512)
    assert last_row(run) == make_row(5)


def test_last_row_finds_a_row_longer_than_the_tail(make_run: MakeRun) -> None:
    run = make_run("r", [make_row(1), make_row(2, note="x" * 100_000)])
    assert (last_row(run) or {})["step"] == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "not one whole JSON value"),
        ("[1, 2]", "a JSON list, not an object"),
        ('{"loss": 1.0}', "step is absent"),
        ('{"step": "7"}', "step is '7'"),
        ('{"step": true}', "step is True"),
        ('{"step": -1}', "step is -1"),
        ("[" * 100_000, "not one whole JSON value"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(RunError, match=r"m\.jsonl:2: ") as caught:
        list(read_rows(path))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "tail", [b'{"step": 3, "l', b'{"step": 3, "l\n', b"\0" * 40, b'{"a\xc3', b""]
)
def test_a_cut_last_line_is_left_out(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n\n{"step": 2}\n' + tail)
    assert list(read_rows(path)) == [(1, {"step": 1}), (3, {"step": 2})]


def test_status_can_read_a_row_without_numpy() -> None:
    code = (
        "import sys, slurmllm.core.metrics.row_reader\n"
        "found = {'numpy', 'torch', 'pydantic', 'matplotlib'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": "."})
