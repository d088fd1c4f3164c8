from __future__ import annotations

import io
import json
import typing
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pytest

from slurmllm.corpus.inputs import find_inputs, read_list
from slurmllm.data.sources.dataset_folder import corpus_files
from slurmllm.errors import DataError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ["b.txt", "a.txt", "c.jsonl.gz", "sub/z.csv", "sub/deep/y.txt.zst", "B.txt"]:
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    for name in ["no.pdf", ".hidden.txt", ".git/config.txt", "old.arrow", "old.arrow.json"]:
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return tmp_path


def names(*arguments: str, **options: typing.Any) -> list[str]:
    return [file.name for file in find_inputs(arguments, **options)]


def test_what_is_read_in_which_order(folder: Path) -> None:
    expected = ["B.txt", "a.txt", "b.txt", "c.jsonl.gz", "old.arrow", "sub/deep/y.txt.zst"]
    assert names("in") == [f"in/{name}" for name in [*expected, "sub/z.csv"]]
    assert names("in/b.txt", "in/a.txt", "in/*.txt") == ["in/b.txt", "in/a.txt", "in/B.txt"]
    assert names("in/**/*.csv") == ["in/sub/z.csv"]
    any_file = names("in", format="text")
    assert "in/no.pdf" in any_file
    assert "in/.hidden.txt" not in any_file
    left = names("in", exclude=[Path("in/b.txt"), Path("in/sub")])
    assert left == ["in/B.txt", "in/a.txt", "in/c.jsonl.gz", "in/old.arrow"]
    with pytest.raises(DataError, match=r"in/b.txt: input and output are the same file; choose"):
        names("in/a.txt", "./in/b.txt", exclude=[Path("in/b.txt").absolute()])
    actual = {file.name: (file.format, file.compression) for file in find_inputs(["in"])}
    assert actual["in/c.jsonl.gz"] == ("jsonl", "gzip")
    assert actual["in/sub/deep/y.txt.zst"] == ("text", "zstd")


def test_what_is_passed_over_is_said_and_broken_links_are_refused(folder: Path) -> None:
    notes: list[str] = []
    find_inputs(["in", "in/sub"], on_note=notes.append)
    assert notes == [
        "ignored 1 file with an unknown ending, such as in/no.pdf; --format names their format"
    ]
    Path("in/a.doc").touch()
    find_inputs(["in"], on_note=notes.append)
    assert notes[1].startswith("ignored 2 files with unknown endings, such as in/a.doc; ")
    find_inputs(["in"], "text", on_note=notes.append)
    find_inputs(["in"], exclude=[Path("in/no.pdf"), Path("in/a.doc")], on_note=notes.append)
    assert len(notes) == 2
    Path("in/c.txt").symlink_to("gone.txt")
    for argument in ("in", "in/*.txt"):
        with pytest.raises(DataError, match=r"in/c.txt is a link to gone.txt, .*: No such file"):
            names(argument)
    Path("in/gone.txt").touch()
    assert "in/c.txt" in names("in")


def test_lists(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("list").write_text("in/b.txt\n\n# more\n  in/a.txt\r\n")
    assert read_list("list") == ["in/b.txt", "in/a.txt"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"in/b.txt")))
    assert read_list("-") == ["in/b.txt"]
    Path("list").write_text("\n")
    with pytest.raises(DataError, match="--files-from list names no file"):
        read_list("list")
    with pytest.raises(DataError, match="cannot read the list in"):
        read_list("in")


def save_dataset(folder: Path, texts: list[list[str]]) -> None:
    """A folder as of `Dataset.save_to_disk`, one file per list, with a file of cached results."""
    folder.mkdir(parents=True)
    files = [f"data-{index:05d}-of-{len(texts):05d}.arrow" for index in range(len(texts))]
    for name, part in [*zip(files, texts, strict=True), ("cache-0123456789abcdef.arrow", ["no"])]:
        table = pa.table({"text": part})
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table)
    state = {"_data_files": [{"filename": name} for name in files], "_fingerprint": "0123"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))


def test_saved_datasets_and_their_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parts = [[str(index)] for index in range(3)]
    save_dataset(tmp_path / "in" / "d", parts)
    (tmp_path / "in" / "e.txt").write_text("x")
    (tmp_path / "in" / "c.txt").write_text("x")
    files = [f"in/d/data-0000{index}-of-00003.arrow" for index in range(3)]
    assert names("in/d") == files
    assert names("in") == ["in/c.txt", *files, "in/e.txt"]
    state = {"_data_files": [{"filename": Path(name).name} for name in reversed(files)]}
    (tmp_path / "in" / "d" / "state.json").write_text(json.dumps(state))
    assert names("in/d") == files[::-1]
    assert not {"in/d/state.json", "in/d/dataset_info.json"} & set(names("in/d/*"))
    (tmp_path / files[1]).unlink()
    with pytest.raises(
        DataError, match=r"state.json names data-00001-of-00003.arrow, which is missing"
    ):
        names("in")
    for split in ("train", "test"):
        save_dataset(tmp_path / "d" / split, [[split]])
    (tmp_path / "d" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    notes: list[str] = []
    assert names(str(tmp_path / "d"), on_note=notes.append) == names(str(tmp_path / "d" / "train"))
    assert notes == [f"read the split train of {tmp_path / 'd'}; left out test; --split chooses"]
    assert names(str(tmp_path / "d"), split="test") == names(str(tmp_path / "d" / "test"))
    assert len(names(str(tmp_path / "d"), split="all")) == 2
    with pytest.raises(DataError, match=r"several splits \(train, test\); build a corpus of one"):
        names(str(tmp_path / "d"), split="dev")
    with pytest.raises(DataError, match=r"several splits \(train, test\)"):
        corpus_files(tmp_path / "d")
    assert len(names(str(tmp_path / "d" / "train"))) == 1
    (tmp_path / "d" / "dataset_dict.json").write_text(json.dumps({"splits": ["test"]}))
    assert names(str(tmp_path / "d")) == names(str(tmp_path / "d" / "test"))
    (tmp_path / "d" / "dataset_dict.json").write_text(json.dumps({"splits": ["gone"]}))
    with pytest.raises(DataError, match="names the split gone, which is missing"):
        names(str(tmp_path / "d"))


def test_odd_file_names_are_made_printable(tmp_path: Path) -> None:
    (tmp_path / "caf\udce9.txt").write_text("x")
    (file,) = find_inputs([str(tmp_path)])
    file.name.encode("utf-8")
    assert file.path.read_text() == "x"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("in/missing.txt", "cannot read in/missing.txt: No such file"),
        ("in/*.zip", r"in/\*.zip: no file to read"),
        ("/dev/null", "/dev/null is not a regular file"),
        ("in/no.pdf", "known endings are .txt"),
        ("empty", "empty: no file to read"),
        ("empty.parquet.gz", "unpack it first"),
    ],
)
def test_bad_arguments(folder: Path, argument: str, message: str) -> None:
    (folder / "empty").mkdir()
    (folder / "empty.parquet.gz").write_text("x")
    with pytest.raises(DataError, match=message):
        find_inputs([argument])
