"""`data build`: contents of a corpus, cleaning of input, and unreadable input."""

import hashlib
import io
import itertools
import json
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest
import xxhash
from amounts import amount
from backports import zstd
from click.testing import CliRunner
from command_line import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from data.conftest import names_in
from slurmllm.cli.data import data
from slurmllm.core.display.progress import stage_progress
from slurmllm.core.errors import DataError, StorageError
from slurmllm.data.corpus.build import (
    BuildResult,
    CorpusManifest,
    build_corpus,
    manifest_path,
    output_paths,
)
from slurmllm.data.corpus.inputs import find_inputs
from slurmllm.data.corpus.options import ReadOptions
from slurmllm.data.corpus.work_folder import WorkFolder, output_files
from slurmllm.data.sources.base import document_hash, prompt_content
from slurmllm.data.tokenizer import TokenEncoder

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
        patch.setattr("slurmllm.data.corpus.shard._LEAST_BYTES", 1)  # a shard a file
        patch.setattr("slurmllm.data.corpus.shard.CHUNK_BYTES", 20)
        patch.setattr("slurmllm.data.corpus.join._BUCKET_DOCUMENTS", 2)
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
    build(tmp_path, "a.jsonl", prompt_key="p", completion_key="p")  # the same twice
    built = build(tmp_path, "a.jsonl", dedup=True, prompt_key="p", completion_key="c")
    batch = corpus(tmp_path)
    assert batch.schema.names == ["prompt", "completion", "id", "source"]
    assert list(zip(*batch.to_pydict().values(), strict=True)) == [
        (p, c, document_hash(prompt_content(p.encode(), c.encode())), str(tmp_path / "a.jsonl"))
        for p, c in rows[:2]
    ]
    assert (built.manifest.empty, built.manifest.duplicates) == (1, 1)


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
    monkeypatch.setattr("slurmllm.data.corpus.shard._LEAST_BYTES", 1)
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
    (tmp_path / "a.txt.zst").write_bytes(zstd.compress(paragraph * 1_000_000))  # 187 MB
    script = "from slurmllm.cli.main import main; main()"
    arguments = ["data", "build", str(tmp_path), "--out", str(tmp_path / "out.arrow"), "--json"]
    run = subprocess.run(
        [sys.executable, "-c", script, *arguments], check=True, capture_output=True, text=True
    )
    result = json.loads(run.stdout)
    assert result["text_bytes"] > 180e6
    assert result["peak_memory_bytes"] < 250e6


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
        (["a.txt", "--time", "60"], "--time applies to Slurm jobs; add --slurm"),
    ],
)
def test_options_that_do_not_fit(arguments: list[str], message: str) -> None:
    assert message in refused(CliRunner().invoke(data, ["build", *arguments, "--out", "c.arrow"]))


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


# Joins a shard of 1.5 GB into a file that keeps nothing, and prints the memory.
HUGE = """
import resource, sys
from pathlib import Path
import numpy as np, pyarrow as pa
from slurmllm.data.corpus import join
from slurmllm.data.corpus.work_folder import WorkFolder

class Nothing:
    size_bytes = 0
    def write(self, data):
        self.size_bytes += memoryview(data).nbytes

class Shard:
    class record:
        inputs = [None]
    def batches(self, name):
        columns = {"id": pa.array(np.zeros(1000, np.uint64)),
            "file": pa.array(np.zeros(1000, np.int32)),
            "text": pa.array(["x" * length] * 1000, pa.large_string())}
        for _ in range(rows // 1000):
            yield pa.RecordBatch.from_arrays([columns[name]], [name])

rows, length = 250_000, 6000
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
file = Nothing()
work = WorkFolder(Path(sys.argv[1]))
join.write_arrow(file, [Shard()], rows, {"text": rows * length}, ["a"], work)
print(file.size_bytes, peak() - before)
"""


def test_the_join_holds_little_of_a_large_corpus(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HUGE, str(tmp_path)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    size, grown_mib = map(float, run.stdout.split())
    assert size > 1.5e9
    assert grown_mib < 60


def read_index(path: Path) -> tuple[np.dtype, list[int], list[int], list[int]]:
    """dtype, sizes, pointers and document indices of an .idx file."""
    content = path.read_bytes()
    assert content[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, documents = struct.unpack_from("<QBQQ", content, 9)
    assert version == 1
    body = io.BytesIO(content[34:])
    sizes = np.frombuffer(body.read(4 * sequences), np.int32)
    pointers = np.frombuffer(body.read(8 * sequences), np.int64)
    indices = np.frombuffer(body.read(8 * documents), np.int64)
    assert not body.read()
    return np.dtype({8: "u2", 4: "i4"}[code]), sizes.tolist(), pointers.tolist(), indices.tolist()


def test_token_files(tmp_path: Path, texts: list[str], tokenizer: Path) -> None:
    lines = [json.dumps({"text": text}) + "\n" for text in [*texts, texts[5]]]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    arguments = [str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "tokens.bin")]
    arguments += ["--tokenize", str(tokenizer), "--dedup", "--json"]
    run = CliRunner().invoke(data, ["build", *arguments], catch_exceptions=False)
    result = json.loads(run.stdout)
    encoder = TokenEncoder(tokenizer)
    expected = [encoder.encode(text).tolist() for text in texts]
    dtype, sizes, pointers, indices = read_index(tmp_path / "tokens.idx")
    assert dtype == np.dtype("u2")
    assert sizes == [len(ids) for ids in expected]
    assert indices == list(range(len(texts) + 1))
    content = (tmp_path / "tokens.bin").read_bytes()
    for ids, size, pointer in zip(expected, sizes, pointers, strict=True):
        assert np.frombuffer(content, dtype, size, pointer).tolist() == ids
    assert result["bin_bytes"] == len(content) == sum(sizes) * 2
    assert (
        result["idx_sha256"] == hashlib.sha256((tmp_path / "tokens.idx").read_bytes()).hexdigest()
    )
    assert result["tokens"] == sum(sizes)
    assert result["text_bytes"] == sum(len(text.encode()) for text in texts)
    assert (result["duplicates"], result["dtype"]) == (1, "uint16")
    assert result["tokenizer_fingerprint"] == encoder.fingerprint
    assert names_in(tmp_path) == ["a.jsonl", "tokens.bin", "tokens.bin.json", "tokens.idx"]
    run = CliRunner().invoke(data, ["build", *arguments])
    assert isinstance(run.exception, DataError)
    for name in ("a/b.bin", "a/b.idx", "a/b"):
        assert output_paths(Path(name), tokenize=True) == (Path("a/b.bin"), Path("a/b.idx"))
    files = output_paths(Path("my.corpus"), tokenize=True)
    assert files == (Path("my.corpus.bin"), Path("my.corpus.idx"))


def test_a_vocabulary_beyond_uint16(tmp_path: Path, tokenizer: Path) -> None:
    content = json.loads(tokenizer.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 70000, "content": "<big>"})
    content["model"]["vocab"]["<big>"] = 70000
    (tmp_path / "big.json").write_text(json.dumps(content))
    (tmp_path / "a.txt").write_text("x")
    arguments = ["build", str(tmp_path / "a.txt"), "--out", str(tmp_path / "t")]
    arguments += ["--tokenize", str(tmp_path / "big.json")]
    CliRunner().invoke(data, arguments, catch_exceptions=False)
    dtype, sizes, *_ = read_index(tmp_path / "t.idx")
    assert dtype == np.dtype("i4")
    ids = TokenEncoder(tmp_path / "big.json").encode("x")
    assert np.frombuffer((tmp_path / "t.bin").read_bytes(), dtype).tolist() == ids.tolist()
    assert sizes == [len(ids)]


def test_files_that_fail_leave_what_was_there(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.bin", "a.idx", "a.bin.json")]
    for path in paths:
        path.write_bytes(b"old")
    work = WorkFolder(tmp_path / "work")
    work.path.mkdir()
    with pytest.raises(TypeError), output_files(paths, work) as files:
        files[0].write("no bytes")
    assert [path.read_bytes() for path in paths] == [b"old"] * 3
    with output_files(paths, work) as files:
        for file in files:
            file.write(b"new" * 10**6)
    assert [path.read_bytes() for path in paths] == [b"new" * 10**6] * 3
    assert not names_in(work.path)
    assert files[0].sha256 == hashlib.sha256(b"new" * 10**6).hexdigest()
