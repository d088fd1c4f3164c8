from __future__ import annotations

import gzip
import hashlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from click.testing import CliRunner

from slurmllm.cli.data import data
from slurmllm.data.build.corpus import build_corpus
from slurmllm.data.build.inputs import find_inputs
from slurmllm.data.build.manifest import CorpusManifest, manifest_path
from slurmllm.data.build.readers import ReadOptions
from slurmllm.data.sources.arrow import Corpus
from slurmllm.errors import DataError, StorageError

from .conftest import names_in

PARAGRAPHS = ["one line", "two\nlines – größer", "東京\n  indented <|endoftext|>"]
TEXT = "\n \n" + "\n\n".join(PARAGRAPHS) + "\n\t\n\n"


def build(tmp_path: Path, *names: str, **options: object) -> list[str]:
    out = tmp_path / "out.arrow"
    files = find_inputs([str(tmp_path / name) for name in names], options.pop("format", "auto"))  # type: ignore[arg-type]
    build_corpus(files, out, ReadOptions(**options), overwrite=True)  # type: ignore[arg-type]
    return list(Corpus(out))


def write(path: Path, content: bytes) -> Path:
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        content = zstandard.compress(content)
    path.write_bytes(content)
    return path


def json_lines(texts: list[str], key: str = "text") -> bytes:
    return "".join(json.dumps({"id": i, key: t}) + "\n" for i, t in enumerate(texts)).encode()


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_text_and_json_lines_hold_the_same(tmp_path: Path, ending: str) -> None:
    write(tmp_path / f"a.txt{ending}", TEXT.encode())
    write(tmp_path / f"a.jsonl{ending}", json_lines(PARAGRAPHS))
    assert build(tmp_path, f"a.txt{ending}") == PARAGRAPHS
    assert build(tmp_path, f"a.jsonl{ending}") == PARAGRAPHS


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_parquet_holds_the_same(tmp_path: Path, kind: pa.DataType) -> None:
    many = PARAGRAPHS * 300
    table = pa.table({"id": range(len(many)), "body": pa.array(many, kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    assert build(tmp_path, "a.parquet", text_key="body") == many


def test_joined_compressed_streams_are_read_to_their_end(tmp_path: Path) -> None:
    # What `cat a.gz b.gz` makes.
    for ending, pack in ((".gz", gzip.compress), (".zst", zstandard.compress)):
        (tmp_path / f"a.txt{ending}").write_bytes(pack(b"first\n\n") + pack(b"second\n"))
        assert build(tmp_path, f"a.txt{ending}") == ["first", "second"]


def test_text_by(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", TEXT.encode())
    assert build(tmp_path, "a.txt", text_by="document") == [TEXT]
    lines = [line for line in TEXT.split("\n") if line.strip()]
    assert build(tmp_path, "a.txt", text_by="line") == lines


def test_line_ends_and_byte_order_marks(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\nline\r\n\r\ntwo\r\n")
    write(tmp_path / "b.jsonl", b"\xef\xbb\xbf" + json_lines(["one\r\nline"]))
    assert build(tmp_path, "a.txt") == ["one\nline", "two"]
    assert build(tmp_path, "a.txt", text_by="document") == ["one\nline\n\ntwo\n"]
    assert build(tmp_path, "b.jsonl") == ["one\r\nline"]


def test_manifest_and_sources(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", TEXT.encode())
    write(tmp_path / "a.jsonl", json_lines(["", "x", "  "]))
    write(tmp_path / "c.txt", b"\n")
    out = tmp_path / "out.arrow"
    build(tmp_path, "b.txt", "a.jsonl", "c.txt")
    manifest = CorpusManifest.load(manifest_path(out))
    assert manifest.documents == 4
    assert manifest.text_bytes == len("".join(PARAGRAPHS).encode()) + 1
    assert manifest.text_bytes == Corpus(out).text_bytes
    assert manifest.empty == 2
    assert [Path(entry.path).name for entry in manifest.inputs] == ["b.txt", "a.jsonl", "c.txt"]
    assert [entry.documents for entry in manifest.inputs] == [3, 1, 0]
    assert [entry.bytes for entry in manifest.inputs][2] == 1
    assert manifest.arrow_bytes == out.stat().st_size
    assert manifest.arrow_sha256 == hashlib.sha256(out.read_bytes()).hexdigest()
    table = pa.ipc.open_file(out).read_all()
    assert table.schema.field("text").type == pa.large_string()
    sources = [Path(name).name for name in table["source"].to_pylist()]
    assert sources == ["b.txt", "b.txt", "b.txt", "a.jsonl"]


def test_many_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurmllm.data.build.corpus._BATCH_ROWS", 7)
    monkeypatch.setattr("slurmllm.data.build.corpus._BATCH_CHARS", 100)
    texts = [f"{i} " + "x" * (i % 40) for i in range(100)] + ["long " * 100]
    write(tmp_path / "a.jsonl", json_lines(texts))
    write(tmp_path / "b.txt", b"from another file")
    assert build(tmp_path, "a.jsonl", "b.txt") == [*texts, "from another file"]
    out = tmp_path / "out.arrow"
    assert pa.ipc.open_file(out).num_record_batches > 14
    assert Corpus(out).text_bytes == sum(map(len, texts)) + 17


def test_same_input_same_bytes(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", TEXT.encode())
    out = tmp_path / "out.arrow"
    build(tmp_path, "a.txt")
    first = out.read_bytes(), manifest_path(out).read_bytes()
    build(tmp_path, "a.txt")
    assert first == (out.read_bytes(), manifest_path(out).read_bytes())


BAD = {
    "latin.txt": ("café\n\ngood".encode("latin-1"), r"latin.txt: byte 3 is not UTF-8 \(0xe9\)"),
    "after.txt": (b"good\n\nmore\n\xff", r"after.txt: byte 11 is not UTF-8 \(0xff\)"),
    "cut.jsonl": (b'{"text": "good"}\n{"text": "b', r"cut.jsonl:2: not JSON: .*one whole object"),
    "array.json": (b'["a"]\n{"text": "good"}', r"array.json:1: a JSON list, not an object"),
    "key.jsonl": (b'{"body": "x"}\n{"text": "good"}', r":1: no field 'text' \(there is body\)"),
    "null.jsonl": (b'{"text": null}\n{"text": "good"}', r"field 'text' is null, not a string"),
    "utf8.jsonl": (b'{"text": "\xe9"}\n{"text": "good"}', r":1: byte 10 of the line is not UTF-8"),
    "half.jsonl": (b'{"text": "\\ud800"}\n{"text": "good"}', r":1: .* half a surrogate pair"),
    "deep.jsonl": (b"[" * 10**5 + b'\n{"text": "good"}', r"deep.jsonl:1: not JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_documents_are_errors_or_counted(tmp_path: Path, name: str) -> None:
    content, message = BAD[name]
    write(tmp_path / name, content)
    with pytest.raises(DataError, match=message):
        build(tmp_path, name)
    assert names_in(tmp_path) == [name]
    assert "good" in build(tmp_path, name, skip_bad=True)
    manifest = CorpusManifest.load(tmp_path / "out.arrow.json")
    assert manifest.bad == 1
    assert name in manifest.bad_examples[0]


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.txt.zst", "a.jsonl.zst"])
@pytest.mark.parametrize("keep", [0.5, 0.999, 0.0005])
def test_cut_compressed_files(tmp_path: Path, name: str, keep: float) -> None:
    whole = write(tmp_path / name, json_lines([os.urandom(9).hex() for _ in range(5000)]))
    data = whole.read_bytes()
    whole.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(DataError, match=f"{name}: cannot be read to its end: Truncated"):
        build(tmp_path, name)


def test_corrupt_files(tmp_path: Path) -> None:
    for name in ("a.txt.gz", "a.txt.zst", "a.parquet"):
        (tmp_path / name).write_bytes(b"no such thing" * 100)
        with pytest.raises(DataError, match=name):
            build(tmp_path, name)


def test_parquet_faults(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", None, "b"], "number": [1, 2, 3]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet: row 2 of column 'text' is null"):
        build(tmp_path, "a.parquet")
    assert build(tmp_path, "a.parquet", skip_bad=True) == ["a", "b"]
    with pytest.raises(DataError, match=r"no column 'body' \(there is text, number\)"):
        build(tmp_path, "a.parquet", text_key="body")
    with pytest.raises(DataError, match=r"column 'number' is int64, not strings"):
        build(tmp_path, "a.parquet", text_key="number")


def test_no_text_at_all(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", b" \n\n \n")
    with pytest.raises(DataError, match="no text in 1 input file"):
        build(tmp_path, "a.txt")
    assert names_in(tmp_path) == ["a.txt"]


def test_existing_output_is_kept(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", TEXT.encode())
    out = write(tmp_path / "out.arrow", b"precious")
    files = find_inputs([str(source)])
    with pytest.raises(DataError, match=r"already there; .*--overwrite"):
        build_corpus(files, out, ReadOptions())
    assert out.read_bytes() == b"precious"
    with pytest.raises(DataError, match="is a folder"):
        build_corpus(files, tmp_path, ReadOptions(), overwrite=True)


def test_failed_overwrite_keeps_the_old_corpus(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", TEXT.encode())
    build(tmp_path, "a.txt")
    write(tmp_path / "b.txt", b"\xff")
    with pytest.raises(DataError):
        build(tmp_path, "a.txt", "b.txt")
    assert list(Corpus(tmp_path / "out.arrow")) == PARAGRAPHS
    assert manifest_path(tmp_path / "out.arrow").exists()


def test_full_disk(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", b"0123456789\n\n" * 50000)
    files = find_inputs([str(source)])
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(StorageError, match=r"cannot write .*out.arrow: File too large; free"):
            build_corpus(files, tmp_path / "out.arrow", ReadOptions())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names_in(tmp_path) == ["a.txt"]


def test_memory_is_bounded(tmp_path: Path) -> None:
    paragraph = b"some words that make a line of text of no great length at all\n" * 3 + b"\n"
    with zstandard.open(tmp_path / "a.txt.zst", "wb") as stream:
        for _ in range(2000):
            stream.write(paragraph * 500)  # 185 MB
    script = (
        "import resource, sys; from pathlib import Path; from slurmllm.data.build.corpus import *;"
        "from slurmllm.data.build.inputs import find_inputs;"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024;"
        "before = peak(); files = find_inputs([sys.argv[1]]);"
        "m = build_corpus(files, Path(sys.argv[2]), ReadOptions());"
        "print(m.text_bytes, peak() - before)"
    )
    arguments = [str(tmp_path / "a.txt.zst"), str(tmp_path / "out.arrow")]
    run = subprocess.run(
        [sys.executable, "-c", script, *arguments], check=True, capture_output=True, text=True
    )
    text_bytes, grown_mib = map(float, run.stdout.split())
    assert text_bytes > 180e6
    assert grown_mib < 130


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.txt", TEXT.encode())
    write(tmp_path / "b.jsonl", b"{")
    run = CliRunner().invoke(data, ["build", "a.txt", "--out", "c.arrow"])
    assert run.exit_code == 0, run.output
    assert run.stdout.startswith("c.arrow: 3 documents, 0.0 MB of text from 1 file in ")
    run = CliRunner().invoke(data, ["build", "a.txt", "--out", "c.arrow"])
    assert isinstance(run.exception, DataError)
    run = CliRunner().invoke(
        data,
        ["build", "*.txt", "b.jsonl", "--out", "c.arrow", "--overwrite", "--skip-bad", "--json"],
        catch_exceptions=False,
    )
    summary = json.loads(run.stdout)
    assert summary["documents"] == 3
    assert summary["inputs"] == 2
    assert summary["bad"] == 1
    assert "b.jsonl:1: not JSON" in run.stderr
    assert "slurmllm" not in click.unstyle(run.stderr)


def test_progress_is_quiet_without_a_terminal(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", TEXT.encode())
    script = "from slurmllm.cli.data import data; data()"
    arguments = ["build", str(tmp_path / "a.txt"), "--out", str(tmp_path / "c.arrow")]
    run = subprocess.run(
        [sys.executable, "-c", script, *arguments], check=True, capture_output=True, text=True
    )
    assert run.stderr == ""
