"""What the join writes: an Arrow file larger than memory allows, and Megatron's two files."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from data.conftest import names_in

from slurmllm.cli.data import data
from slurmllm.corpus.build import output_paths
from slurmllm.corpus.work_folder import WorkFolder, output_files
from slurmllm.data.tokenizer import TokenEncoder
from slurmllm.errors import DataError

# Joins a shard of 1.5 GB into a file that keeps nothing, and prints the memory.
HUGE = """
import resource, sys
from pathlib import Path
import numpy as np, pyarrow as pa
from slurmllm.corpus import join
from slurmllm.corpus.work_folder import WorkFolder

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


def test_names_of_token_files() -> None:
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
    work.path.mkdir(0o700)
    with pytest.raises(TypeError), output_files(paths, work) as files:
        files[0].write("no bytes")
    assert [path.read_bytes() for path in paths] == [b"old"] * 3
    with output_files(paths, work) as files:
        for file in files:
            file.write(b"new" * 10**6)
    assert [path.read_bytes() for path in paths] == [b"new" * 10**6] * 3
    assert not names_in(work.path)
    assert files[0].sha256 == hashlib.sha256(b"new" * 10**6).hexdigest()
