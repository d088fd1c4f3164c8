"""`data build`: contents of a corpus, cleaning of input, and unreadable input."""

from __future__ import annotations

import hashlib
import itertools
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest
import xxhash
from amounts import amount
from backports import zstd
from click.testing import CliRunner
from data.conftest import names_in
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmllm.cli.data import data
from slurmllm.corpus.build import BuildResult, CorpusManifest, build_corpus, manifest_path
from slurmllm.corpus.inputs import find_inputs
from slurmllm.corpus.options import ReadOptions
from slurmllm.data.sources.base import document_hash, prompt_hash
from slurmllm.display.progress import stage_progress
from slurmllm.errors import DataError, StorageError

PARAGRAPHS = ["one line", "two\nlines – größer", "東京\n  indented <|endoftext|>"]
TEXT = "\n \n" + "\n\n".join(PARAGRAPHS) + "\n\t\n\n"


def build(tmp_path: Path, *names: str, dedup: bool = False, **read: Any) -> BuildResult:
    files = find_inputs([str(tmp_path / name) for name in names])
    options = ReadOptions(**read)
    return build_corpus(files, tmp_path / "out.arrow", options, dedup=dedup, overwrite=True)


def corpus(tmp_path: Path) -> pa.RecordBatch:
    with pa.memory_map(str(tmp_path / "out.arrow")) as mapped:
        reader = pa.ipc.open_file(mapped)
        assert reader.num_record_batches == 1
        batch = reader.get_batch(0)
        batch.validate(full=True)
        return batch


def texts(tmp_path: Path) -> list[str]:
    column: list[str] = corpus(tmp_path)["text"].to_pylist()
    return column


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def json_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(texts)).encode()


def test_corpus_and_manifest(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", TEXT.encode())
    write(tmp_path / "a.jsonl", json_lines(["", "x", "  "]))
    write(tmp_path / "c.txt", b"\n")
    out = tmp_path / "out.arrow"
    build(tmp_path, "b.txt", "a.jsonl", "c.txt")
    batch = corpus(tmp_path)
    assert batch.schema == pa.schema(
        {
            "text": pa.large_string(),
            "id": pa.uint64(),
            "source": pa.dictionary(pa.int32(), pa.large_string()),
        }
    )
    assert batch["text"].to_pylist() == [*PARAGRAPHS, "x"]
    assert batch["id"].to_pylist() == [document_hash(t.encode()) for t in [*PARAGRAPHS, "x"]]
    sources = [Path(name).name for name in batch["source"].to_pylist()]
    assert sources == ["b.txt", "b.txt", "b.txt", "a.jsonl"]
    manifest = CorpusManifest.load(manifest_path(out))
    assert manifest.documents == 4
    assert manifest.text_bytes == len("".join(PARAGRAPHS).encode()) + 1
    assert manifest.columns == ("text", "id", "source")
    assert manifest.empty == 2
    assert [Path(entry.path).name for entry in manifest.inputs] == ["b.txt", "a.jsonl", "c.txt"]
    assert [entry.documents for entry in manifest.inputs] == [3, 1, 0]
    assert manifest.inputs[2].bytes == 1
    assert manifest.inputs[0].xxh3 == xxhash.xxh3_128_hexdigest(TEXT.encode())
    assert manifest.arrow_bytes == out.stat().st_size
    assert manifest.arrow_sha256 == hashlib.sha256(out.read_bytes()).hexdigest()
    assert names_in(tmp_path) == ["a.jsonl", "b.txt", "c.txt", "out.arrow", "out.arrow.json"]


@settings(max_examples=amount(7, of=30))
@given(
    st.lists(st.lists(st.text("aä\u0308 \n", max_size=4), max_size=8), min_size=1, max_size=4),
    st.booleans(),
)
def test_blank_documents_and_duplicates(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[str]], dedup: bool
) -> None:
    tmp_path = tmp_path_factory.mktemp("cleaning")
    names = [f"{index}.jsonl" for index in range(len(files))]
    for name, lines in zip(names, files, strict=True):
        write(tmp_path / name, json_lines(lines))
    filled = [text for text in itertools.chain(*files) if text and not text.isspace()]
    expected = list(dict.fromkeys(filled)) if dedup else filled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slurmllm.corpus.shard._LEAST_BYTES", 1)  # a shard a file
        patch.setattr("slurmllm.corpus.shard.CHUNK_BYTES", 20)
        patch.setattr("slurmllm.corpus.join._BUCKET_DOCUMENTS", 2)
        if not expected:
            with pytest.raises(DataError, match="no text in"):
                build(tmp_path, *names, dedup=dedup)
            return
        manifest = build(tmp_path, *names, dedup=dedup).manifest
    assert texts(tmp_path) == expected
    assert corpus(tmp_path)["id"].to_pylist() == [document_hash(t.encode()) for t in expected]
    assert manifest.duplicates == len(filled) - len(expected)
    assert manifest.empty == sum(map(len, files)) - len(filled)
    sources = corpus(tmp_path)["source"].to_pylist()
    assert [sources.count(entry.path) for entry in manifest.inputs] == [
        entry.documents for entry in manifest.inputs
    ]
    assert manifest.text_bytes == sum(len(text.encode()) for text in expected)


def test_prompts_and_completions(tmp_path: Path) -> None:
    rows = [("Why?", "Because."), ("", "Hm"), ("x", " "), ("Why?", "Because.")]
    lines = "".join(json.dumps({"p": p, "c": c}) + "\n" for p, c in rows)
    write(tmp_path / "a.jsonl", lines.encode())
    built = build(tmp_path, "a.jsonl", dedup=True, prompt_key="p", completion_key="c")
    batch = corpus(tmp_path)
    assert batch.schema.names == ["prompt", "completion", "id", "source"]
    assert list(zip(*batch.to_pydict().values(), strict=True)) == [
        (p, c, prompt_hash(p.encode(), c.encode()), str(tmp_path / "a.jsonl")) for p, c in rows[:2]
    ]
    assert (built.manifest.empty, built.manifest.duplicates) == (1, 1)


def test_conversations(tmp_path: Path) -> None:
    asked, answered = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    rows = [[asked, answered], [asked], [asked, answered], [asked, {**answered, "content": " "}]]
    lines = "".join(json.dumps({"messages": row}) + "\n" for row in rows)
    write(tmp_path / "a.jsonl", lines.encode())
    built = build(tmp_path, "a.jsonl", dedup=True, messages_key="messages")
    text = json.dumps({"messages": rows[0]}, separators=(",", ":"))
    assert corpus(tmp_path).select(["messages", "id"]).to_pylist() == [
        {"messages": text, "id": document_hash(text.encode())}
    ]
    assert (built.manifest.empty, built.manifest.duplicates) == (2, 1)


BAD = {
    "latin.txt": ("café\n\ngood".encode("latin-1"), r"latin.txt: byte 3 is not UTF-8 \(0xe9\)"),
    "after.txt": (b"good\n\nmore\n\xff", r"after.txt: byte 11 is not UTF-8 \(0xff\)"),
    "cut.jsonl": (b'{"text": "good"}\n{"text": "b', r"cut.jsonl:2: not JSON: .*one whole object"),
    "array.json": (b'["a"]\n{"text": "good"}', r"array.json:1: a JSON list, not an object"),
    "key.jsonl": (b'{"body": "x"}\n{"text": "good"}', r":1: no field 'text' \(fields: body\)"),
    "list.jsonl": (b'{"text": []}\n{"text": "good"}', r"field 'text' is \[\], not a string"),
    "utf8.jsonl": (b'{"text": "\xe9"}\n{"text": "good"}', r":1: byte 10 of the line is not UTF-8"),
    "half.jsonl": (b'{"text": "\\ud800"}\n{"text": "good"}', r":1: .* half a surrogate pair"),
    "deep.jsonl": (b'{"a": ' * 10**5 + b'\n{"text": "good"}', r"deep.jsonl:1: not JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_documents_are_errors_or_counted(tmp_path: Path, name: str) -> None:
    content, message = BAD[name]
    write(tmp_path / name, content)
    with pytest.raises(DataError, match=message):
        build(tmp_path, name)
    assert names_in(tmp_path) == [name]
    manifest = build(tmp_path, name, skip_bad=True).manifest
    assert "good" in texts(tmp_path)
    assert manifest.bad == 1
    assert name in manifest.bad_examples[0]


@pytest.mark.parametrize("limit", [100_000, 1_000_000])
def test_full_disk(tmp_path: Path, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # A shard takes 750 kB, the corpus of both 1.5 MB: the limits meet a shard and the join.
    monkeypatch.setattr("slurmllm.corpus.shard._LEAST_BYTES", 1)
    for name in ("a.txt", "b.txt"):
        write(tmp_path / name, b"0123456789\n\n" * 25000)
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(StorageError, match=r"cannot write .*out.arrow.*: File too large; free"):
            build(tmp_path, "a.txt", "b.txt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    joins = limit > 750_000
    assert names_in(tmp_path) == [*[".out.arrow.build"] * joins, "a.txt", "b.txt"]
    assert build(tmp_path, "a.txt", "b.txt").continued == 2 * joins
    assert len(texts(tmp_path)) == 50000


def test_memory_is_bounded(tmp_path: Path) -> None:
    paragraph = b"some words that make a line of text of no great length at all\n" * 3 + b"\n"
    (tmp_path / "a.txt.zst").write_bytes(zstd.compress(paragraph * 500_000))  # 93 MB
    script = "from slurmllm.cli.main import main; main()"
    arguments = ["data", "build", str(tmp_path), "--out", str(tmp_path / "out.arrow"), "--json"]
    run = subprocess.run(
        [sys.executable, "-c", script, *arguments], check=True, capture_output=True, text=True
    )
    result = json.loads(run.stdout)
    assert result["text_bytes"] > 90e6
    assert result["peak_memory_bytes"] < 160e6


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.txt", TEXT.encode())
    write(tmp_path / "b.jsonl", b"{")
    write(tmp_path / "list", b"b.jsonl\n")
    run = CliRunner().invoke(data, ["build", "a.txt", "--out", "c.arrow"])
    assert (run.exit_code, run.stderr) == (0, ""), run.output
    assert run.stdout.startswith("c.arrow: 3 documents, 0.0 MB of text from 1 file in ")
    for out, message in (("c.arrow", r"already exists; .*--overwrite"), (".", "is a folder")):
        with pytest.raises(DataError, match=message):
            CliRunner().invoke(data, ["build", "a.txt", "--out", out], catch_exceptions=False)
    arguments = ["build", "*.txt", "--files-from", "list", "--out", "c.arrow", "--overwrite"]
    run = CliRunner().invoke(data, [*arguments, "--skip-bad", "--json"], catch_exceptions=False)
    summary = json.loads(run.stdout)
    counts = {name: summary[name] for name in ("documents", "inputs", "bad", "shards")}
    assert counts == {"documents": 3, "inputs": 2, "bad": 1, "shards": 1}
    assert "b.jsonl:1: not JSON" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name an INPUT"),
        (["a.txt", "--prompt-key", "p"], "go together"),
        (
            ["a.jsonl", "--prompt-key", "p", "--completion-key", "c", "--tokenize", "t"],
            "plain text",
        ),
        (["a.jsonl", "--messages-key", "m", "--tokenize", "t"], "--tokenize does not apply"),
        (["a.txt", "--time", "60"], "--time applies to Slurm jobs; add --slurm"),
    ],
)
def test_options_that_do_not_fit(arguments: list[str], message: str) -> None:
    run = CliRunner().invoke(data, ["build", *arguments, "--out", "c.arrow"])
    assert run.exit_code == 2
    assert message in run.stderr


def test_a_log_gets_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter([0.0, 59.0, 60.0, 61.0, 125.0])
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    with stage_progress() as show:
        for done in (0, 1, 3_000_000, 4_000_000):
            show("reading", done, 9_000_000)
        show("writing", 0, 10)
    assert capsys.readouterr().err == "reading: 3.0 MB of 9.0 MB, 50.0 kB/s, 0:02:00 left\n"
