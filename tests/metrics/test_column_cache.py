"""Long metrics files are read a second time from the columns kept beside them."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_rows import make_row, make_rows, write_rows

from slurmllm.metrics import attempt_metrics as reader
from slurmllm.metrics import column_cache
from slurmllm.metrics.source import read_curve

HOUR = 3600.0


@pytest.fixture(autouse=True)
def _short_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_cache, "MIN_BYTES", 1)
    monkeypatch.setattr(reader, "_SMALL_BYTES", 0)
    monkeypatch.setattr(reader, "_BLOCK_BYTES", 700)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a restart whose files nobody has written to for an hour."""
    metrics = tmp_path / "r" / "metrics"
    metrics.mkdir(parents=True)
    rows = [*make_rows(1, 40), make_row(41, grad_norm=None)]
    lines = (json.dumps(row, separators=(",", ":")) + "\n" for row in rows)  # as the trainer does
    (metrics / "attempt_000.jsonl").write_text("".join(lines))
    write_rows(metrics / "attempt_001.jsonl", make_rows(31, 60, attempt=1))
    age(tmp_path / "r")
    return tmp_path / "r"


def age(run: Path) -> None:
    for path in (run / "metrics").glob("*.jsonl"):
        os.utime(path, (time.time() - HOUR, path.stat().st_mtime - HOUR))


def beside(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "metrics").glob(".*"))


def test_the_second_reading_is_the_first(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read_curve(run)
    assert beside(run) == [".attempt_000.jsonl.arrow", ".attempt_001.jsonl.arrow"]
    with monkeypatch.context() as patch:
        patch.setattr(reader, "_read_block", None)  # no block may be read
        second = read_curve(run)
    assert list(second.columns) == list(first.columns)
    for name, column in first.columns.items():
        assert column.tobytes() == second.columns[name].tobytes()
    assert np.array_equal(first.steps, second.steps)
    assert np.array_equal(first.attempts, second.attempts)
    assert (second.overlap_rows, second.overlap_identical) == (11, False)
    assert second.warnings == first.warnings == ()


@pytest.mark.parametrize(
    "how", ["changed", "dated back", "longer", "cut columns", "zeros in columns", "no columns"]
)
def test_what_does_not_count_is_read_again(run: Path, how: str) -> None:
    first = read_curve(run)
    file = run / "metrics" / "attempt_001.jsonl"
    columns = file.with_name(f".{file.name}.arrow")
    was, text = file.stat(), columns.read_bytes()
    match how:
        case "changed" | "dated back":
            file.write_text(file.read_text().replace('"step": 60', '"step": 99'))
            if how == "dated back":
                os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
        case "longer":
            write_rows(file, make_rows(31, 99, attempt=1))
        case "cut columns":
            columns.write_bytes(text[:-9])
        case "zeros in columns":
            columns.write_bytes(text[:9000] + bytes(999) + text[9999:])
        case "no columns":
            columns.write_bytes(b"")
    again = read_curve(run)
    assert again.steps[-1] == (60 if "columns" in how else 99)
    if "columns" in how:
        assert again.columns["loss"].tobytes() == first.columns["loss"].tobytes()
        assert columns.read_bytes() == text  # kept anew


@given(data=st.data())
def test_damaged_columns_are_no_columns(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    file = tmp_path_factory.getbasetemp() / "metrics.jsonl"
    write_rows(file, make_rows(1, 9))
    os.utime(file, (1.7e9, 1.7e9))
    columns = file.with_name(f".{file.name}.arrow")
    columns.unlink(missing_ok=True)
    read_curve(file)
    text = columns.read_bytes()
    at = data.draw(st.integers(0, len(text) - 1))
    more = data.draw(st.binary(max_size=9))
    columns.write_bytes(text[:at] + more + text[at + data.draw(st.sampled_from([0, len(more)])) :])
    rows = column_cache.load_columns(file, 0, file.stat())
    if rows is not None:
        found = [loss for part in rows for loss in part.columns["loss"].tolist()]
        assert found == [row["loss"] for row in make_rows(1, 9)]


def test_columns_of_a_version_that_knew_fewer_metrics(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(column_cache, "COLUMNS", ("loss",))
        read_curve(run)
    monkeypatch.setattr(reader, "_read_block", None)
    with pytest.raises(TypeError):  # it is read again
        read_curve(run)


def test_they_may_be_read_by_whom_the_metrics_may(run: Path) -> None:
    (run / "metrics" / "attempt_000.jsonl").chmod(0o600)
    read_curve(run)
    assert (run / "metrics" / ".attempt_000.jsonl.arrow").stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_written_to_is_not_kept(run: Path) -> None:
    os.utime(run / "metrics" / "attempt_001.jsonl")
    read_curve(run)
    assert beside(run) == [".attempt_000.jsonl.arrow"]


def test_an_uneven_file_is_not_kept_and_warns_again(run: Path) -> None:
    with (run / "metrics" / "attempt_001.jsonl").open("a") as stream:
        stream.write('{"step": 61, "lo')
    age(run)
    for _ in range(2):
        assert "skipped the truncated last line" in read_curve(run, lenient=True).warnings[0]
    assert beside(run) == [".attempt_000.jsonl.arrow"]


def test_a_folder_that_refuses_is_no_fault(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    assert len(read_curve(run).steps) == 60
    assert beside(run) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("how", ["of another user", "writable by a group", "a link", "a pipe"])
def test_columns_that_another_user_may_have_written_are_not_used(run: Path, how: str) -> None:
    first = read_curve(run)
    planted = run / "metrics" / ".attempt_000.jsonl.arrow"
    content = planted.read_bytes()
    planted.unlink()
    false = content.replace(first.columns["loss"][:1].tobytes(), np.array([99.0]).tobytes())
    body = false[:-4]
    forged = run / "forged"
    forged.write_bytes(body + column_cache._checksum(body))
    match how:
        case "of another user":
            forged.rename(planted)
            os.chown(planted, 54321, 54321)
        case "writable by a group":
            forged.rename(planted)
            planted.chmod(0o664)
        case "a link":
            planted.symlink_to(forged)
        case "a pipe":
            os.mkfifo(planted)
    assert read_curve(run).columns["loss"].tobytes() == first.columns["loss"].tobytes()


def test_columns_of_terabytes_are_not_read(tmp_path: Path) -> None:
    file = tmp_path / "attempt_000.jsonl"
    for path in (file, file.with_name(f".{file.name}.arrow")):
        path.touch()
        os.truncate(path, 1 << 40)  # sparse: it takes no space, and all memory when it is read
    assert column_cache.load_columns(file, 0, file.stat()) is None
