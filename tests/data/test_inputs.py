from __future__ import annotations

import typing
from pathlib import Path

import pytest

from slurmllm.cli import data as cli
from slurmllm.data.build import inputs
from slurmllm.data.build.inputs import find_inputs
from slurmllm.errors import DataError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ["b.txt", "a.md", "c.jsonl.gz", "sub/z.py", "sub/deep/y.txt.zst", "B.txt"]:
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    for name in ["no.csv", ".hidden.txt", ".git/config.txt", "old.arrow", "old.arrow.json"]:
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return tmp_path


def names(*arguments: str, **options: typing.Any) -> list[str]:
    return [file.name for file in find_inputs(arguments, **options)]


def test_folder_is_read_in_the_order_of_its_paths(folder: Path) -> None:
    expected = ["B.txt", "a.md", "b.txt", "c.jsonl.gz", "sub/deep/y.txt.zst", "sub/z.py"]
    assert names("in") == [f"in/{name}" for name in expected]


def test_format_and_compression_come_from_the_endings(folder: Path) -> None:
    found = {file.name: (file.format, file.compression) for file in find_inputs(["in"])}
    assert found["in/c.jsonl.gz"] == ("jsonl", "gzip")
    assert found["in/sub/deep/y.txt.zst"] == ("text", "zstd")
    assert found["in/sub/z.py"] == ("text", None)


def test_arguments_keep_their_order_and_files_count_once(folder: Path) -> None:
    assert names("in/b.txt", "in/a.md", "in/*.txt") == ["in/b.txt", "in/a.md", "in/B.txt"]


def test_globs_cross_folders(folder: Path) -> None:
    assert names("in/**/*.py") == ["in/sub/z.py"]


def test_format_text_takes_any_file(folder: Path) -> None:
    assert "in/no.csv" in names("in", format="text")
    assert "in/.hidden.txt" not in names("in", format="text")


def test_arrow_corpora_where_wanted(folder: Path) -> None:
    assert "in/old.arrow" in names("in", arrow=True)
    assert "in/old.arrow" not in names("in")
    with pytest.raises(DataError, match="ending does not say"):
        names("in/old.arrow")


def test_output_is_never_input(folder: Path) -> None:
    assert "in/b.txt" not in names("in", leave_out=[Path("in/b.txt")])


def test_odd_file_names_are_made_printable(tmp_path: Path) -> None:
    (tmp_path / "caf\udce9.txt").write_text("x")
    (file,) = find_inputs([str(tmp_path)])
    file.name.encode("utf-8")
    assert file.path.read_text() == "x"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("in/missing.txt", "cannot read in/missing.txt: No such file"),
        ("in/*.zip", r"in/\*.zip: no file to read there"),
        ("in/missing", "cannot read in/missing: No such file"),
        ("/dev/null", "/dev/null is not a regular file"),
        ("in/no.csv", "known endings are .txt"),
        ("empty", "empty: no file to read there"),
    ],
)
def test_bad_arguments(folder: Path, argument: str, message: str) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        find_inputs([argument])


def test_compressed_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet.gz").write_text("x")
    with pytest.raises(DataError, match="unpack it first"):
        find_inputs([str(tmp_path / "a.parquet.gz")])


def test_the_command_line_offers_what_there_is() -> None:
    choices = {
        option.name: tuple(option.type.choices)
        for option in cli.build.params
        if hasattr(option.type, "choices")
    }
    assert choices["format_"] == typing.get_args(inputs.FormatOption)
    assert choices["text_by"] == typing.get_args(inputs.TextBy)
