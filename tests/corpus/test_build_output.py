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
from slurmllm.corpus.join import token_files
from slurmllm.corpus.work_folder import WorkFolder, output_files
from slurmllm.data.tokenizer import TokenEncoder
from slurmllm.errors import DataError

# Joins shards of 6 GB that are holes, into a file that keeps nothing, and prints the memory.
HUGE = """
import resource, sys
from pathlib import Path
from slurmllm.corpus import finished_shard, join
from slurmllm.corpus.shard import ColumnRecord, ShardInput, ShardRecord
from slurmllm.corpus.work_folder import WorkFolder

class Nothing:
    size_bytes = 0
    def write(self, data):
        self.size_bytes += memoryview(data).nbytes
        return memoryview(data).nbytes
    def tell(self):
        return self.size_bytes

rows, length = 1_000_000, 6000
finished_shard.xxhash.xxh3_128 = lambda: type(
    "", (), {"update": id, "hexdigest": lambda self: ""})()
finished_shard.FinishedShard.contents = lambda self, column, itemsize=1: (
    memoryview(bytes(length * 1000)) for _ in range(rows // 1000))
folder = Path(sys.argv[1])
(folder / "text.lengths").write_bytes(length.to_bytes(8, "little") * rows)
(folder / "id").write_bytes(bytes(rows * 8))
columns = {"text": rows * length, "text.lengths": rows * 8, "id": rows * 8}
record = ShardRecord(documents=rows, empty=0, short=0, bad=0, bad_examples=(), runs=(),
    inputs=(ShardInput(documents=rows, xxh3=None),),
    columns={name: ColumnRecord(bytes=size, xxh3="") for name, size in columns.items()})
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
file = Nothing()
join.write_arrow(file, [finished_shard.FinishedShard(folder, record, 0)], rows,
    {"text": rows * length}, ["a"], WorkFolder(folder), lambda done: None)
print(file.size_bytes, peak() - before)
"""


def test_the_join_holds_little_of_a_large_corpus(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HUGE, str(tmp_path)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    size, grown_mib = map(float, run.stdout.split())
    assert size > 6e9
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


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_token_files(tmp_path: Path, texts: list[str], tokenizer: Path, dtype: str) -> None:
    lines = [json.dumps({"text": text}) + "\n" for text in [*texts, texts[5]]]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    arguments = [str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "tokens.bin")]
    arguments += ["--tokenize", str(tokenizer), "--dtype", dtype, "--dedup", "--json"]
    run = CliRunner().invoke(data, ["build", *arguments], catch_exceptions=False)
    result = json.loads(run.stdout)
    encoder = TokenEncoder(tokenizer)
    expected = [encoder.encode(text).tolist() for text in texts]
    found, sizes, pointers, indices = read_index(tmp_path / "tokens.idx")
    assert found == np.dtype(dtype)
    assert sizes == [len(ids) for ids in expected]
    assert indices == list(range(len(texts) + 1))
    content = (tmp_path / "tokens.bin").read_bytes()
    for ids, size, pointer in zip(expected, sizes, pointers, strict=True):
        assert np.frombuffer(content, found, size, pointer).tolist() == ids
    assert result["bin_bytes"] == len(content) == sum(sizes) * found.itemsize
    assert (
        result["idx_sha256"] == hashlib.sha256((tmp_path / "tokens.idx").read_bytes()).hexdigest()
    )
    assert result["tokens"] == sum(sizes)
    assert result["text_bytes"] == sum(len(text.encode()) for text in texts)
    assert (result["duplicates"], result["dtype"]) == (1, dtype)
    assert result["tokenizer_fingerprint"] == encoder.fingerprint
    assert names_in(tmp_path) == ["a.jsonl", "tokens.bin", "tokens.bin.json", "tokens.idx"]
    run = CliRunner().invoke(data, ["build", *arguments])
    assert isinstance(run.exception, DataError)


def test_names_of_token_files() -> None:
    for name in ("a/b.bin", "a/b.idx", "a/b"):
        assert token_files(Path(name)) == (Path("a/b.bin"), Path("a/b.idx"))
    assert token_files(Path("my.corpus")) == (Path("my.corpus.bin"), Path("my.corpus.idx"))


def test_a_vocabulary_beyond_the_dtype(tmp_path: Path, tokenizer: Path) -> None:
    content = json.loads(tokenizer.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 70000, "content": "<big>"})
    content["model"]["vocab"]["<big>"] = 70000
    (tmp_path / "big.json").write_text(json.dumps(content))
    (tmp_path / "a.txt").write_text("x")
    arguments = ["build", str(tmp_path / "a.txt"), "--out", str(tmp_path / "t")]
    arguments += ["--tokenize", str(tmp_path / "big.json")]
    run = CliRunner().invoke(data, [*arguments, "--dtype", "uint16"])
    assert isinstance(run.exception, DataError)
    assert "big.json has ids up to 70000, and uint16 holds 65535" in str(run.exception)
    CliRunner().invoke(data, arguments, catch_exceptions=False)
    assert read_index(tmp_path / "t.idx")[0] == np.dtype("i4")


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
