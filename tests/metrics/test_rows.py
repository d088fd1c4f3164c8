from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from training_rows import MakeRun, make_row, make_rows

from slurmllm.errors import RunError
from slurmllm.metrics.row_reader import last_row, read_rows


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
        "import sys, slurmllm.metrics.row_reader\n"
        "found = {'numpy', 'torch', 'pydantic', 'matplotlib'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": "."})
