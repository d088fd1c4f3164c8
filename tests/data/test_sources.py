from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from slurmllm.data.sources import open_source, text
from slurmllm.data.sources.base import BEGINS, Source, document_hash, fingerprint
from slurmllm.data.tokenizer import TokenEncoder
from slurmllm.errors import DataError, StorageError

from .corpora import write_table, write_texts


def whole(source: Source, document: int) -> list[int]:
    pieces = [(document, piece) for piece in range(source.num_pieces(document))]
    return [int(token) for token in source.read(pieces).tokens]


def test_documents_read_together_equal_those_read_singly(
    tmp_path: Path, tokenizer: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["", *texts[:20], "", "last"]
    source = open_source(write_texts(tmp_path / "c.arrow", texts), TokenEncoder(tokenizer), None)
    monkeypatch.setattr(text, "_CALL_BYTES", 500)
    together = source.read([(document, 0) for document in range(len(texts))])
    ends = together.ends.tolist()
    encoder = TokenEncoder(tokenizer)
    for begin, end, document in zip([0, *ends], ends, texts, strict=False):
        assert np.array_equal(together.tokens[begin:end], encoder.encode(document))
        assert together.marks[begin:end].tolist() == [BEGINS] + [0] * (end - begin - 1)


def test_hashes_without_their_column_and_rows_of_numpy(tmp_path: Path, tokenizer: Path) -> None:
    texts = ["x", "", "é"]
    paths = [write_texts(tmp_path / f"{ids}.arrow", texts, ids=ids) for ids in (True, False)]
    # Of another tool.
    paths += [write_table(tmp_path / "c.arrow", {"id": list("abc"), "text": texts})]
    for path in paths:
        source = open_source(path, TokenEncoder(tokenizer), None)
        hashes = [document_hash(text.encode()) for text in texts]
        assert source.document_hashes(np.arange(3)).tolist() == hashes
        assert len(whole(source, 0)) == 2
    source = open_source(save(tmp_path / "t.npy", np.arange(12).reshape(4, 3), "uint8"), None, 12)
    assert len(source) == 4
    assert source.read([(2, 0), (0, 0)]).tokens.tolist() == [6, 7, 8, 0, 1, 2]
    assert source.read([(2, 0), (0, 0)]).marks.tolist() == [1, 0, 0, 1, 0, 0]


def damaged(path: Path, old: bytes, new: bytes) -> Path:
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    return path


def test_bytes_that_are_no_text(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "PIECE_BYTES", 40)
    long = "some words " * 10 + "and THIS"
    path = damaged(write_texts(tmp_path / "c.arrow", ["fine", long]), b"THIS", b"TH\xffS")
    source = open_source(path, TokenEncoder(tokenizer), None)
    with pytest.raises(StorageError, match=r"document 1 of .*c\.arrow .*byte 116 .*\(0xff\)"):
        whole(source, 1)
    assert len(whole(source, 0)) > 1


@pytest.mark.parametrize("last", [-1, 2, 1 << 30])
def test_damaged_offsets_and_lengths(tmp_path: Path, tokenizer: Path, last: int) -> None:
    path = tmp_path / "c.arrow"
    table = pa.table({"text": pa.array(["one", "two words"], pa.large_string())})
    write_table(path, table)
    damaged(path, struct.pack("<3q", 0, 3, 12), struct.pack("<3q", 0, 3, last))
    with pytest.raises((DataError, StorageError), match=r"damaged|not a complete Arrow file"):
        whole(open_source(path, TokenEncoder(tokenizer), None), 1)
    write_table(path, table)
    node = struct.pack("<2q", 2, 0)  # rows and nulls of the column
    content = path.read_bytes()
    path.write_bytes(content.replace(node, struct.pack("<2q", 1 << 20, 0)))
    with pytest.raises(DataError, match="Array length did not match"):
        open_source(path, TokenEncoder(tokenizer), None)
    os.mkfifo(tmp_path / "fifo.arrow")
    with pytest.raises(DataError, match="not a regular file"):
        open_source(tmp_path / "fifo.arrow", TokenEncoder(tokenizer), None)


def test_a_document_changed_since_the_build(tmp_path: Path, tokenizer: Path) -> None:
    path = damaged(write_texts(tmp_path / "c.arrow", ["first", "the old one"]), b"old", b"new")
    source = open_source(path, TokenEncoder(tokenizer), None)
    with pytest.raises(
        StorageError, match=r"document 1 of .*c\.arrow was changed or damaged since"
    ):
        source.read([(0, 0), (1, 0)])


def test_fingerprints_see_size_and_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    actual = set()
    for content in (b"", b"a", b"b", b"a" * 9_999 + b"b", b"a" * 10_001):
        path.write_bytes(content)
        actual |= {fingerprint([path]), fingerprint([path], "kind")}
    size = 64 << 20
    with path.open("wb") as stream:
        stream.truncate(size)
    actual.add(fingerprint([path]))
    with path.open("r+b") as stream:
        stream.seek(size // 63)  # of 64 samples the second begins just before
        stream.write(b"x")
    actual.add(fingerprint([path]))
    assert len(actual) == 12
    with pytest.raises(StorageError, match=r"cannot read .*none"):
        fingerprint([tmp_path / "none"])


def save(path: Path, tokens: Sequence[int] | np.ndarray, dtype: str) -> Path:
    np.save(path, np.array(tokens, dtype=dtype))
    return path


@pytest.mark.parametrize("dtype", ["uint16", ">u4"])
def test_numpy_tokens_in_blocks(tmp_path: Path, tokenizer: Path, dtype: str) -> None:
    tokens = np.random.default_rng(1).integers(0, 300, 10_000)
    encoder = TokenEncoder(tokenizer)
    source = open_source(save(tmp_path / "t.npy", tokens, dtype), encoder, 300)
    assert (len(source), source.total_size) == (3, 10_000)
    read = source.read([(0, 0), (1, 0), (2, 0)])
    assert read.ends.tolist() == [4096, 8192, 10_000]
    assert np.array_equal(read.tokens, tokens)
    begins = [0, 4096, 8192, *(np.flatnonzero(tokens[:-1] == encoder.end_of_document) + 1)]
    assert np.flatnonzero(read.marks == BEGINS).tolist() == sorted(set(begins))


@pytest.mark.parametrize(
    ("tokens", "dtype", "message"),
    [
        (None, "", "no corpus .*t.npy"),
        ([1.5], "float32", r"float32 of shape \[1\]; .* integers"),
        ([], "int32", r"int32 of shape \[0\]"),
        (np.ones((2, 2, 2)), "int32", r"shape \[2, 2, 2\]"),
        (b"text", "", "t.npy is not a whole .npy file"),
        ([1] * 5000 + [100], "int64", r"token 904 of document 1 .* is 100, .*vocab_size is 100"),
        ([1] * 5000 + [-1], "int64", r"token 904 of document 1 .* is -1, .*vocab_size is 100"),
    ],
)
def test_invalid_numpy_files(tmp_path: Path, tokens: Any, dtype: str, message: str) -> None:
    path = tmp_path / "t.npy"
    if isinstance(tokens, bytes):
        path.write_bytes(tokens)
    elif tokens is not None:
        save(path, tokens, dtype)
    with pytest.raises(DataError, match=message):
        open_source(path, None, 100).read([(1, 0)])
