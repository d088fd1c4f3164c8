from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from amounts import amount
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from slurmllm.data.sources import open_source, text
from slurmllm.data.sources.base import BEGINS, Source, document_hash, fingerprint
from slurmllm.data.tokenizer import TokenEncoder
from slurmllm.errors import DataError, StorageError

from .corpora import write_table, write_texts


def whole(source: Source, document: int) -> list[int]:
    pieces = [(document, piece) for piece in range(source.num_pieces(document))]
    return [int(token) for token in source.read(pieces).tokens]


@pytest.mark.parametrize("piece_bytes", [700, 4096])
def test_pieces_of_real_text_give_the_tokens_of_the_whole(
    tmp_path: Path, wikitext: Path, gpt2: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(text, "PIECE_BYTES", piece_bytes)
    content = wikitext.read_text()[:300_000]
    source = open_source(write_texts(tmp_path / "c.arrow", [content]), TokenEncoder(gpt2), None)
    assert source.num_pieces(0) == -(-len(content.encode()) // piece_bytes) > 50
    expected = Tokenizer.from_file(str(gpt2)).encode(content).ids
    assert whole(source, 0) == [*expected, 50256]


@settings(max_examples=amount(10, of=40))
@given(content=st.text(alphabet="ab é東🙂\n", max_size=300), piece_bytes=st.integers(8, 60))
def test_pieces_of_any_text_hold_all_of_it(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Path, content: str, piece_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    encoder = TokenEncoder(tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "PIECE_BYTES", piece_bytes)
        source = open_source(write_texts(folder / "c.arrow", [content]), encoder, None)
        tokens = whole(source, 0)
        assert tokens[-1] == encoder.end_of_document
        assert encoder.decode(np.array(tokens[:-1])) == content
        last = (0, source.num_pieces(0) - 1)
        assert source.read([last]).tokens[-1] == encoder.end_of_document


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


def test_corpora_in_one_batch_or_many_are_equal(tmp_path: Path, tokenizer: Path) -> None:
    texts = [f"number {i}" for i in range(10)]
    sources = [
        open_source(
            write_texts(tmp_path / f"{rows}.arrow", texts, rows_per_batch=rows),
            TokenEncoder(tokenizer),
            None,
        )
        for rows in (10, 3)
    ]
    documents = np.array([9, 0, 5])
    assert whole(sources[0], 9) == whole(sources[1], 9)
    for source in sources:
        assert source.total_size == sum(map(len, texts))
        expected = [document_hash(texts[document].encode()) for document in documents]
        assert source.document_hashes(documents).tolist() == expected


def test_hashes_do_not_need_the_column(tmp_path: Path, tokenizer: Path) -> None:
    encoder, documents = TokenEncoder(tokenizer), np.arange(3)
    a, b = (
        open_source(write_texts(tmp_path / f"{ids}.arrow", ["x", "", "é"], ids=ids), encoder, None)
        for ids in (True, False)
    )
    assert np.array_equal(a.document_hashes(documents), b.document_hashes(documents))


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
    for content in (b"", b"a", b"b", b"a" * 10_000, b"a" * 9_999 + b"b", b"a" * 10_001):
        path.write_bytes(content)
        actual |= {fingerprint([path]), fingerprint([path], "kind")}
    assert len(actual) == 12
    size = 64 << 20
    with path.open("wb") as stream:
        stream.truncate(size)
    before = fingerprint([path])
    with path.open("r+b") as stream:
        stream.seek(size // 63)  # of 64 samples the second begins just before
        stream.write(b"x")
    assert fingerprint([path]) != before
    with pytest.raises(StorageError, match=r"cannot read .*none"):
        fingerprint([tmp_path / "none"])


def save(path: Path, tokens: Sequence[int] | np.ndarray, dtype: str) -> Path:
    np.save(path, np.array(tokens, dtype=dtype))
    return path


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64", ">u4"])
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


def test_numpy_rows_are_documents(tmp_path: Path) -> None:
    source = open_source(save(tmp_path / "t.npy", np.arange(12).reshape(4, 3), "uint8"), None, 12)
    assert len(source) == 4
    assert whole(source, 2) == [6, 7, 8]
    assert source.read([(2, 0), (0, 0)]).marks.tolist() == [1, 0, 0, 1, 0, 0]
    assert len(set(source.document_hashes(np.arange(4)).tolist())) == 4


def test_invalid_numpy_files(tmp_path: Path) -> None:
    def refused(path: Path, message: str) -> None:
        with pytest.raises(DataError, match=message):
            open_source(path, None, 100)

    refused(tmp_path / "none.npy", "no corpus .*none.npy")
    refused(save(tmp_path / "f.npy", [1.5], "float32"), r"float32 of shape \[1\]; .* integers")
    refused(save(tmp_path / "e.npy", [], "int32"), r"int32 of shape \[0\]")
    refused(save(tmp_path / "3.npy", np.ones((2, 2, 2)), "int32"), r"shape \[2, 2, 2\]")
    path = save(tmp_path / "cut.npy", range(1000), "int32")
    path.write_bytes(path.read_bytes()[:-8])
    refused(path, "cut.npy is not a whole .npy file")
    path.write_bytes(b"text")
    refused(path, "cut.npy is not a whole .npy file")
    for bad in (100, -1):
        source = open_source(save(tmp_path / "b.npy", [1] * 5000 + [bad], "int64"), None, 100)
        message = rf"token 904 of document 1 of .*b\.npy is {bad}, .*model.vocab_size is 100"
        with pytest.raises(DataError, match=message):
            source.read([(1, 0)])
        assert len(source.read([(0, 0)]).tokens) == 4096


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"c\.arrow has text, and no tokenizer is set"):
        open_source(write_texts(tmp_path / "c.arrow", ["a"]), None, None)


def test_ids_of_another_tool_are_not_hashes(tmp_path: Path, tokenizer: Path) -> None:
    for kind in (pa.int64(), pa.string()):
        ids = pa.array([7]).cast(kind)
        path = write_table(tmp_path / "c.arrow", {"id": ids, "text": ["a"]})
        assert len(whole(open_source(path, TokenEncoder(tokenizer), None), 0)) == 2
