import io
import json
import typing
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pytest

from slurmllm.core.errors import DataError
from slurmllm.data.corpus.inputs import find_inputs, read_list
from slurmllm.data.sources.dataset_folder import corpus_files


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
        ("en/c4-train.00000-of-00001.json.gz", None, "en/c4-validation.00000-of-00001.json.gz"),
        ("train.csv", None, "dev.csv"),
        ("wiki.train.txt", None, "wiki.valid.txt"),
        ("training/a.jsonl", None, "evaluation/a.jsonl"),
        ("a.jsonl", "train", "test.jsonl"),
        ("x-train.arrow", None, "x-test.arrow"),
        ("data/train_sft-00001-of-00001.parquet", "train_sft", "data/test_sft-0-of-1.parquet"),
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
    assert read(tmp_path) == (
        ["test.jsonl"],
        [f"{tmp_path} has only the split test, which is read"],
    )


@pytest.mark.parametrize(
    ("names", "unnamed"),
    [
        (["training_day.txt", "the_test_of_time.txt", "book.txt"], "book.txt"),
        (["train.txt", "bus.txt", "plane.txt", "test.txt"], "bus.txt"),
        (["train-1.jsonl", "notes.jsonl"], "notes.jsonl"),
        (["a.jsonl", "test.jsonl"], "a.jsonl"),
        (["valid/a.csv", "more/b.csv", "train/c.csv"], "more/b.csv"),
    ],
)
def test_names_are_splits_only_if_all_are(names: list[str], unnamed: str, tmp_path: Path) -> None:
    write(tmp_path, *names)
    with pytest.raises(DataError, match=rf"/{unnamed}, do not; choose with --split \("):
        read(tmp_path)
    assert len(read(tmp_path, "all")[0]) == len(names)
    assert 0 < len(read(tmp_path, "train")[0]) < len(names)


@pytest.mark.parametrize("name", ["test.txt", "dev/a.jsonl", "evaluation.csv"])
def test_a_folder_of_held_out_data_alone_is_said(name: str, tmp_path: Path) -> None:
    write(tmp_path, name)
    (note,) = read(tmp_path)[1]
    assert "has only the split" in note


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        (["a-00000-of-00003.csv", "a-00002-of-00003.csv"], ["a-00001-of-00003.csv"]),
        (["a-1-of-2.csv", "a-2-of-2.csv"], []),
        (["2-of-3.txt", "3-of-3.txt"], ["1-of-3.txt"]),
        (["b_0_of_2.jsonl.gz", "c_0_of_1.jsonl.gz"], ["b_1_of_2.jsonl.gz"]),
        (["x/p-0of3.txt", "x/p-1of3.txt", "y/p-2of3.txt"], ["x/p-2of3.txt", "y/p-0of3.txt"]),
        (["10-offset-3.txt", "2019-12-01.txt"], []),
    ],
)
def test_shards_that_are_missing_by_the_names_of_others(
    there: list[str], missing: list[str], tmp_path: Path
) -> None:
    write(tmp_path, *there)
    if missing:
        with pytest.raises(DataError, match=rf"^missing .*{tmp_path}/{missing[0]}; copy"):
            read(tmp_path)
    else:
        assert len(read(tmp_path)[0]) == len(there)
    notes: list[str] = []
    files = find_inputs([f"{tmp_path}/**/*.*"], on_note=notes.append)
    assert len(files) == len(there)
    assert [missing[0] in note for note in notes] == [True][: len(missing)]


def test_a_card_names_splits_of_any_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "en/test-1.jsonl", "x/train.jsonl", "y.jsonl", "not/listed.jsonl")
    (tmp_path / "README.md").write_text(CONFIGS.format(name="default", split="train"))
    files, notes = read(tmp_path)
    assert files == ["en/test-1.jsonl"]
    assert "3 files such as not/listed.jsonl; --split chooses (held_out, train, all)" in notes[1]
    assert read(tmp_path, "held_out")[0] == ["x/train.jsonl", "y.jsonl"]
    for damaged in ("[a\n---\n", "5\n---", "[{data_files: 5}]\n"):
        (tmp_path / "README.md").write_text(f"---\nconfigs: {damaged}")
        caplog.clear()
        read(tmp_path, "all")
        assert "metadata" in caplog.text  # our warning, or that of huggingface_hub


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
