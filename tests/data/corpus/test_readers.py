"""All formats and compressions: what is read, and how damage is named."""

import bz2
import gzip
import io
import json
import lzma
import os
import re
import struct
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import zstandard
from amounts import amount
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurmllm.core.errors import DataError
from slurmllm.data.corpus.inputs import FormatOption, input_file
from slurmllm.data.corpus.options import InputErrors, ReadOptions
from slurmllm.data.corpus.readers import DocumentReader

PACKERS = {
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
PARAGRAPHS = ["one line", "two\nlines – größer", "東京\n  indented <|endoftext|>"]


def read(
    path: Path, format: FormatOption = "auto", skip: bool = False, **options: Any
) -> tuple[list[Any], list[str]]:
    """The documents (tuples if there are several columns), and the errors."""
    errors = InputErrors(skip)
    read = ReadOptions(**options)
    documents: list[Any] = []
    for chunk in DocumentReader(input_file(path, format), read, errors.add):
        for column in chunk:
            column.validate(full=True)
            assert column.null_count == 0
        columns = [column.to_pylist() for column in chunk]
        documents += columns[0] if len(columns) == 1 else zip(*columns, strict=True)
    return documents, errors.examples


def texts(path: Path, **options: Any) -> list[Any]:
    return read(path, **options)[0]


def json_lines(texts: list[str], key: str = "text") -> bytes:
    return "".join(json.dumps({"id": i, key: t}) + "\n" for i, t in enumerate(texts)).encode()


def arrow_table(texts: list[str], kind: pa.DataType, key: str = "text") -> pa.Table:
    return pa.table({"id": range(len(texts)), key: pa.array(texts, kind)})


def arrow_stream(table: pa.Table, file: bool = False) -> bytes:
    sink = io.BytesIO()
    new = pa.ipc.new_file if file else pa.ipc.new_stream
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    return sink.getvalue()


@pytest.mark.parametrize("ending", ["", *PACKERS])
def test_all_formats_hold_the_same(tmp_path: Path, ending: str) -> None:
    rows = "".join(f'{i},"{text}"\r\n' for i, text in enumerate(PARAGRAPHS))
    table = arrow_table(PARAGRAPHS, pa.string())
    contents = {
        "a.txt": "\n \n" + "\n\n".join(PARAGRAPHS) + "\n\t\n\n",
        "a.jsonl": json_lines(PARAGRAPHS),
        "a.csv": "id,text\r\n" + rows,
        "a.tsv": "id\ttext\n" + rows.replace(",", "\t", 3),
        "a.arrow": arrow_stream(table),
        "b.arrow": arrow_stream(table, file=True),
    }
    for name, content in contents.items():
        data = content.encode() if isinstance(content, str) else content
        path = tmp_path / (name + ending)
        path.write_bytes(PACKERS[ending](data) if ending else data)
        assert texts(path) == PARAGRAPHS, name


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
)
def test_string_columns_of_all_kinds(
    tmp_path: Path, kind: pa.DataType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurmllm.data.corpus.readers.columns.CHUNK_BYTES", 1000)
    monkeypatch.setattr("slurmllm.data.corpus.readers.columns._MOST_ROWS", 70)
    many = PARAGRAPHS * 300
    table = arrow_table(many, kind, key="body")
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    (tmp_path / "a.arrow").write_bytes(arrow_stream(table))
    for name in ("a.parquet", "a.arrow"):
        assert texts(tmp_path / name, text_key="body") == many


@pytest.mark.parametrize("kind", [pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_damaged_indices_do_not_end_the_interpreter(tmp_path: Path, kind: pa.DataType) -> None:
    long = ["a text of more than twelve bytes", "another of that kind"]
    long = [long[at] for at in (0, 1, 0, 0, 1)]
    path = tmp_path / "a.arrow"
    content = arrow_stream(arrow_table(long, kind), file=True)
    if pa.types.is_dictionary(kind):
        old, new = struct.pack("<5i", 0, 1, 0, 0, 1), struct.pack("<5i", 0, 1, 0, 0, 1 << 30)
    else:  # size, first four bytes, buffer and offset
        old, new = struct.pack("<i4si", 20, b"anot", 0), struct.pack("<i4si", 20, b"anot", 99)
    assert old in content
    path.write_bytes(content.replace(old, new))
    with pytest.raises(DataError, match="not a readable Arrow file"):
        texts(path)


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_a_row_that_is_not_utf8_is_left_out_alone(tmp_path: Path, kind: pa.DataType) -> None:
    rows = ["a text of more than twelve bytes", "another of that kind", "and a third one of them"]
    content = arrow_stream(arrow_table(rows, kind), file=True)
    path = tmp_path / "a.arrow"
    path.write_bytes(content.replace(b"er of that kind", b"er of \xff\xfeat kind"))
    documents, (error,) = read(path, skip=True)
    assert documents == [rows[0], rows[2]]
    assert error.endswith("a.arrow: row 2 of column 'text' is not UTF-8")


def test_a_repeated_text_is_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dictionary of one text stands for gigabytes."""
    monkeypatch.setattr("slurmllm.data.corpus.readers.columns.CHUNK_BYTES", 1 << 20)
    indices = pa.array(np.array([1] + [0] * 4000 + [1] * 64, np.int32))
    column = pa.DictionaryArray.from_arrays(indices, pa.array(["", "x" * (1 << 20)]))
    (tmp_path / "a.arrow").write_bytes(arrow_stream(pa.table({"text": column})))
    documents = DocumentReader(
        input_file(tmp_path / "a.arrow"), ReadOptions(), InputErrors(False).add
    )
    assert max(chunk.nbytes for (chunk,) in documents) < 3 << 20


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize("keep", [0.5, 0])
def test_cut_compressed_files(tmp_path: Path, ending: str, keep: float) -> None:
    packed = PACKERS[ending](json_lines([os.urandom(90).hex() for _ in range(2000)]))
    packed = packed[: int(len(packed) * keep)]
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(packed)
    with pytest.raises(DataError, match=f"a.jsonl{ending}: cannot be read to its end: Truncated"):
        texts(path)
    documents, (error,) = read(path, skip=True)
    size = f"{len(packed):,}"
    assert error.endswith(
        f"near byte {size} of {size} on disk, after {len(documents):,} documents)"
    )
    if ending != ".bz2":  # whose blocks hold 900 kB each
        assert 2000 * keep - 1000 < len(documents) < 2000


@pytest.mark.parametrize("ending", PACKERS)
def test_corrupt_archives(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurmllm.data.corpus.options.ERROR_EXAMPLES", 10**6)
    packed = bytearray(PACKERS[ending](json_lines([os.urandom(90).hex() for _ in range(2000)])))
    middle = len(packed) // 2
    packed[middle : middle + 20] = b"\0" * 20
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(packed)
    documents, errors = read(path, skip=True)
    assert "cannot be read to its end" in errors[-1]
    assert len(documents) < 2000
    path.write_bytes(b"no such thing" * 100)
    for name in ("a.jsonl", "a.arrow"):
        (tmp_path / f"{name}{ending}").write_bytes(b"no such thing" * 100)
        with pytest.raises(DataError, match=r"it is not \w+, or damaged: .*near byte .* of 1,300"):
            texts(tmp_path / f"{name}{ending}")


def by_lines(data: bytes, text_by: str) -> list[str]:
    data = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if text_by == "document":
        return [data.decode()]
    documents: list[bytes] = []
    block: list[bytes] = []
    for line in [*io.BytesIO(data), b"\n"]:
        if not line.isspace():
            block.append(line)
        if block and (line.isspace() or text_by == "line"):
            documents.append(b"".join(block))
            block.clear()
    return [text.decode().strip("\n") for text in documents]


PIECES = [*"a \t\n\r\x0b\x1c\xa0", "größe", "\n\n", "\r\n", "東京", "\x00a"]


@settings(max_examples=amount(25, of=100))
@given(st.lists(st.sampled_from(PIECES), max_size=40), st.booleans(), st.integers(1, 9))
@example(["a", "\n", "\n", " "], False, 2)
def test_text_means_the_same_in_any_blocks(pieces: list[str], mark: bool, block: int) -> None:
    data = b"\xef\xbb\xbf" * mark + "".join(pieces).encode()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("slurmllm.data.corpus.readers.base.CHUNK_BYTES", max(block, 3))
        path = Path(folder) / "a.txt"
        path.write_bytes(data)
        for text_by in ("paragraph", "line", "document"):
            assert texts(path, text_by=text_by) == by_lines(data, text_by)


def one_by_one(data: bytes) -> list[str]:
    documents = []
    for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        try:
            row = json.loads(line.decode())
            text = "" if row["text"] is None else row["text"]
            text.encode()
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        documents.append(text)
    return documents


ODD_LINES = r"""
¦ ¦{"text": "a"} ¦{"text": "a"} {"text": "b"}¦{"text": 1}¦{"text": null}¦{"body": "a"}¦
{"text": "a", "text": "b"}¦["a"]¦"a"¦{¦}¦{"text": "\ud800"}¦{"x": "\udc00", "text": "a"}¦
{"x": NaN, "text": "a"}¦{"text": "a",}¦{"x": {"text": "b"}, "text": "a"}¦{"x":¦{"text": "a\u0000"}¦
{"te\u0078t": "a"}¦{"x": [{}]¦{"text": {"text": "a"}}
"""
LINES = st.one_of(
    st.builds(lambda text, more: json.dumps({"x": more, "text": text}), st.text(), st.text()),
    st.builds(lambda text: json.dumps({"text": text}, ensure_ascii=False), st.text(max_size=9)),
    st.sampled_from(
        [*ODD_LINES.replace("\n", "").split("¦"), '{"text": "a"}\r', '{"text": "a\tb"}']
    ),
)


@settings(max_examples=amount(20, of=80))
@given(st.lists(LINES, max_size=6), st.booleans(), st.integers(3, 100))
def test_json_lines_mean_the_same_in_any_blocks(lines: list[str], mark: bool, block: int) -> None:
    # Another first line: a list would be a file of one array, as far as a block shows.
    text = "\n".join(line.replace("\udc00", "") for line in ['{"text": "a"}', *lines])
    data = b"\xef\xbb\xbf" * mark + text.encode("utf-8", "surrogatepass")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("slurmllm.data.corpus.readers.base.CHUNK_BYTES", block)
        path = Path(folder) / "a.jsonl"
        path.write_bytes(data)
        documents, errors = read(path, skip=True)
    assert documents == one_by_one(data)
    filled = [line for line in text.split("\n") if line and not line.isspace()]
    assert len(documents) + len(errors) == len(filled)


def test_faults_name_the_line_in_later_blocks_and_the_row_of_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurmllm.data.corpus.readers.base.CHUNK_BYTES", 200)
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines(["x"] * 100) + b'{"text": 5}\n' + json_lines(["y"] * 100))
    documents, (error,) = read(path, skip=True)
    assert documents == ["x"] * 100 + ["y"] * 100
    assert error.endswith("a.jsonl:101: field 'text' is 5, not a string")
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\n\n" * 100 + b"b\xe9d\n\n" + b"good\n\n" * 100)
    documents, (error,) = read(path, skip=True)
    assert documents == ["good"] * 200
    assert error.endswith("a.txt: byte 601 is not UTF-8 (0xe9)")
    bad = pa.array([b"a", None, b"\xff", b"b"], pa.binary()).view(pa.string())
    table = pa.table({"text": bad, "number": [1, 2, 3, 4]})
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "a.arrow").write_bytes(arrow_stream(table))
    for name in ("a.parquet", "a.arrow"):
        with pytest.raises(DataError, match=rf"{name}: row 3 of column 'text' is not UTF-8"):
            texts(tmp_path / name)
        documents, (error,) = read(tmp_path / name, skip=True)
        assert documents == ["a", "", "b"]
        assert error.endswith("row 3 of column 'text' is not UTF-8")
        with pytest.raises(DataError, match=r"no column 'body' \(columns: text, number\)"):
            texts(tmp_path / name, text_key="body")
        with pytest.raises(DataError, match=r"column 'number' is int64, not strings"):
            texts(tmp_path / name, text_key="number")
        content = (tmp_path / name).read_bytes()
        twice = pa.Table.from_arrays([bad, bad], ["text", "text"])
        if name == "a.parquet":
            pq.write_table(twice, tmp_path / name)
        else:
            (tmp_path / name).write_bytes(arrow_stream(twice))
        with pytest.raises(DataError, match="2 columns are called 'text'; rename one of them"):
            texts(tmp_path / name)
        for damaged in (b"", b"no such thing", content[: len(content) // 2], b"FEA1" + content):
            (tmp_path / name).write_bytes(damaged)
            with pytest.raises(DataError, match=rf"{name}.*[^.]\. Fix the file, or .* such files "):
                texts(tmp_path / name)


CSV_FAULTS = {
    "cells": (b"1,one\n2,a,b\n3,three", "Expected 2 fields in line 3, saw 3"),
    "utf8": (b"1,one\n2,\xff", "codec can't decode byte 0xff"),
    "quote": (b'1,one\n2,"never\nclosed', "EOF inside string starting at row"),
    "index": (b"1,one,\n2,two,", "rows have more columns than the header"),
}


@pytest.mark.parametrize("fault", CSV_FAULTS)
def test_rows_of_a_csv_that_cannot_be_read(tmp_path: Path, fault: str) -> None:
    rows, reason = CSV_FAULTS[fault]
    path = tmp_path / "a.csv"
    path.write_bytes(b"id,text\n" + rows)
    with pytest.raises(DataError, match=re.escape(reason)):
        texts(path)
    assert reason in read(path, skip=True)[1][0]


def test_columns_of_a_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbf"id",text\n1,"on\ne"\n\n2,007\n3,NA\n4\n5,true')
    assert texts(path) == ["on\ne", "007", "NA", "", "true"]
    with pytest.raises(DataError, match=r"no column 'body' \(columns: id, text\).* skip such"):
        texts(path, text_key="body")
    path.write_bytes(b"id,text\r" + b"1,one\r" * 4000)
    assert texts(path) == ["one"] * 4000
    path.write_bytes(b"")
    with pytest.raises(DataError, match="an empty file"):
        texts(path)


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.txt", "x", "a text file has no fields"),
        ("a.jsonl", '{"q": "x"}', r"a.jsonl:1: no field 'a' .*--completion-key"),
    ],
)
def test_keys_that_a_document_lacks(tmp_path: Path, name: str, content: str, error: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=error):
        texts(tmp_path / name, prompt_key="q", completion_key="a")


@pytest.mark.parametrize(
    ("text_by", "errors", "good"),
    [
        ("jsonl", [":2: a line of", ":4: not JSON"], ["one", "two"]),
        ("line", [":2: a line of"], ["one", "two", "{"]),
        ("paragraph", [": near byte 6,"], ["one", "two", "{"]),
        ("document", [": a document of"], []),
    ],
)
def test_what_is_too_long_is_skipped_without_being_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text_by: str, errors: list[str], good: Any
) -> None:
    monkeypatch.setattr("slurmllm.data.corpus.readers.base.LARGEST_DOCUMENT", 5 << 20)
    first, second = ['{"text": "one"}', '{"text": "two"}'] if text_by == "jsonl" else ["one", "two"]
    long = "\n".join(["a" * 999] * 20_000) if text_by == "paragraph" else "a" * (20 << 20)
    path = tmp_path / f"in.{'jsonl' if text_by == 'jsonl' else 'txt'}.gz"
    gap = "\n\n" if text_by == "paragraph" else "\n"
    path.write_bytes(gzip.compress(gap.join([first, long, second, "{"]).encode(), 1))
    tracemalloc.start()
    documents, messages = read(
        path, skip=True, **{} if text_by == "jsonl" else {"text_by": text_by}
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 << 20, "chunks of 2 MiB, and what is held up to the limit"
    assert documents == good
    assert len(messages) == len(errors)
    for message, error in zip(messages, errors, strict=True):
        assert error in message
    assert "of more than 5 MiB, the largest that is read" in messages[0]
