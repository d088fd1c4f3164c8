"""Folders as downloaded from the Hub: data, its splits and its documentation."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from slurmllm.corpus.inputs import find_inputs
from slurmllm.errors import DataError

CONFIGS = """---
license: mit
configs:
- config_name: {name}
  data_files:
  - split: {split}
    path: "en/*.jsonl"
  - split: held_out
    path: ["x/*.jsonl", "y.jsonl"]
---
# Card
---
"""


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")


def read(folder: Path, split: str | None = None) -> tuple[list[str], list[str]]:
    """The files, below the folder, and the notes."""
    notes: list[str] = []
    files = find_inputs([str(folder)], split=split, on_note=notes.append)
    return [file.path.relative_to(folder).as_posix() for file in files], notes


@pytest.mark.parametrize(
    ("names", "train", "held_out"),
    [
        # As the Hub's own conversion, C4, the web form, WikiText, ultrachat, and folders have them.
        ("data/train-00000-of-00001.parquet", None, "data/test-00000-of-00001.parquet"),
        ("en/c4-train.00000-of-01024.json.gz", None, "en/c4-validation.00000-of-00008.json.gz"),
        ("train.csv", None, "dev.csv"),
        ("wiki.train.txt", None, "wiki.valid.txt"),
        ("training/a.jsonl", None, "evaluation/a.jsonl"),
        ("a.jsonl", None, "test.jsonl"),
        ("part-0.jsonl", None, "heldout.jsonl"),
        ("part-0.jsonl", None, "my-held_out.jsonl"),
        ("x-train.arrow", None, "x-test.arrow"),
        (
            "data/train_sft-00000-of-00003.parquet",
            "train_sft",
            "data/test_sft-00000-of-00001.parquet",
        ),
    ],
)
@pytest.mark.parametrize("documentation", ["dataset_infos.json", "load.py"])
def test_the_training_split_is_read_and_said(
    names: str, train: str | None, held_out: str, documentation: str, tmp_path: Path
) -> None:
    write(tmp_path, names, held_out, ".gitattributes")
    tables = not names.endswith(".txt")
    if documentation != "load.py" or tables:
        write(tmp_path, documentation, "LICENSE.txt", "CITATION.rst")
    files, notes = read(tmp_path, train)
    assert files == [names]
    assert any("left out" in note and held_out in note for note in notes)
    assert any("documentation" in note for note in notes) or not (tmp_path / documentation).exists()
    every, _ = read(tmp_path, "all")
    assert sorted(every) == sorted([names, held_out])
    with pytest.raises(DataError, match=r"has no split 'other' but .*choose one with --split"):
        read(tmp_path, "other")


def test_splits_without_a_training_split_are_chosen_by_the_user(tmp_path: Path) -> None:
    write(tmp_path, "test.jsonl", "validation.jsonl")
    with pytest.raises(DataError, match=r"has no split 'train' but test, validation; choose one"):
        read(tmp_path)
    assert read(tmp_path, "validation")[0] == ["validation.jsonl"]
    (tmp_path / "validation.jsonl").unlink()
    assert read(tmp_path) == (["test.jsonl"], [f"{tmp_path} has only the split test"])


def test_a_card_names_splits_of_any_name(tmp_path: Path) -> None:
    write(tmp_path, "en/test-1.jsonl", "x/train.jsonl", "y.jsonl", "not/listed.jsonl")
    (tmp_path / "README.md").write_text(CONFIGS.format(name="default", split="train"))
    files, notes = read(tmp_path)
    assert files == ["en/test-1.jsonl"]
    assert "3 files such as not/listed.jsonl; --split chooses (held_out, train, all)" in notes[1]
    assert read(tmp_path, "held_out")[0] == ["x/train.jsonl", "y.jsonl"]
    for damaged in ("[a\n---\n", "5\n---", "[{data_files: 5}]\n"):
        (tmp_path / "README.md").write_text(f"---\nconfigs: {damaged}")
        read(tmp_path, "all")


@pytest.mark.parametrize(
    "names",
    [
        ["src/train.py", "tests/test_train.py", "README.md", "docs/test.rst"],
        ["a.txt", "Test.txt", "2019-test-cricket.txt"],
        ["a.jsonl", "contest.jsonl", "retrained.jsonl", "latest-news.jsonl"],
        ["part-00000-of-00002.parquet", "part-00001-of-00002.parquet"],
    ],
)
def test_code_and_texts_have_no_splits(names: list[str], tmp_path: Path) -> None:
    write(tmp_path, *names)
    files, notes = read(tmp_path)
    assert sorted(files) == sorted(names)
    assert notes == ["README.md: documentation that is read as text too"] * ("README.md" in names)


def test_documentation_that_is_named_is_read(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", "README.md")
    assert len(find_inputs([str(tmp_path), str(tmp_path / "README.md")])) == 2
    (tmp_path / "a.jsonl").unlink()
    assert read(tmp_path) == (["README.md"], [])


def test_a_cache_s_splits_are_those_that_its_record_names(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    table = pa.table({"text": ["a"]})
    for name in ("x-sft", "x-gen-00000-of-00002", "x-gen-00001-of-00002", "cache-1"):
        with pa.ipc.new_stream(str(folder / f"{name}.arrow"), table.schema) as stream:
            stream.write_table(table)
    (folder / "dataset_info.json").write_text('{"splits": {"sft": {}, "gen": {}}}')
    with pytest.raises(DataError, match=r"several splits \(sft, gen\)"):
        read(folder)
    assert len(read(folder, "gen")[0]) == 2
    assert len(read(tmp_path, "all")[0]) == 3
