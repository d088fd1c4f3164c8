"""Arrow streams and folders of Hugging Face datasets as corpora, and ours in their readers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest

from slurmllm.core.errors import DataError, StorageError
from slurmllm.data.corpus.inputs import input_file
from slurmllm.data.corpus.options import InputErrors
from slurmllm.data.corpus.readers import DocumentReader, ReadOptions
from slurmllm.data.sources import arrow, open_source
from slurmllm.data.sources.arrow import ArrowFile
from slurmllm.data.sources.base import Source
from slurmllm.data.tokenizer import TokenEncoder

from .conftest import make_corpus

TEXTS = ["one", "größer", "", "three words here", "one", "🙂 " * 30, "last"]


def write(path: Path, table: pa.Table, rows: int, stream: bool = True, **options: Any) -> Path:
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(str(path), table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, rows)
    return path


def whole(source: Source, document: int) -> list[int]:
    pieces = [(document, piece) for piece in range(source.num_pieces(document))]
    return [int(token) for token in source.read(pieces).tokens]


def built(path: Path, skip_bad: bool = False) -> tuple[list[str | None], list[str]]:
    """The documents that `data build` reads, and the errors."""
    errors = InputErrors(skip_bad)
    reader = DocumentReader(input_file(path), ReadOptions(), errors.add)
    return [text for (chunk,) in reader for text in chunk.to_pylist()], errors.examples


STRINGS = {"string": pa.string(), "large_string": pa.large_string()}


@pytest.mark.parametrize("kind", STRINGS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_streams_and_files_of_the_same_rows_are_equal(
    tmp_path: Path, tokenizer: Path, kind: str, rows: int, compression: str | None
) -> None:
    column = pa.array(TEXTS, STRINGS[kind])
    table = pa.table({"n": list(range(len(TEXTS))), "text": column})
    encoder = TokenEncoder(tokenizer)
    expected = [[*encoder.encode(text)] for text in TEXTS]
    for stream in (True, False):
        path = write(tmp_path / f"{stream}.arrow", table, rows, stream, compression=compression)
        source = open_source(path, encoder, None)
        order = [3, 0, 6, 5, 1, 2, 4, 0]  # not that of the file
        assert [whole(source, row) for row in order] == [expected[row] for row in order]
        assert len(source) == len(TEXTS)
        assert source.total_size == sum(len(text.encode()) for text in TEXTS)
        assert built(path) == (TEXTS, [])


@pytest.mark.parametrize("kind", [pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_other_strings_are_only_built(tmp_path: Path, tokenizer: Path, kind: pa.DataType) -> None:
    path = write(tmp_path / "d.arrow", pa.table({"text": pa.array(TEXTS, kind)}), 3)
    with pytest.raises(DataError, match=r"no column 'text' of the type string .*`slurmllm data b"):
        open_source(path, TokenEncoder(tokenizer), None)
    assert built(path) == (TEXTS, [])


@pytest.mark.parametrize("deltas", [False, True])
def test_dictionaries_that_change(tmp_path: Path, deltas: bool) -> None:
    parts = [["a", "b", "a"], ["c", "b"], ["c", "d", "a"]]
    path = tmp_path / "d.arrow"
    schema = pa.schema({"text": pa.dictionary(pa.int32(), pa.string())})
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=deltas)
    words: list[str] = []
    with pa.ipc.new_stream(str(path), schema, options=options) as writer:
        for part in parts:
            # Longer than the one before, or another one.
            words = [*words, *sorted({*part} - {*words})] if deltas else sorted({*part})
            indices = pa.array([words.index(word) for word in part], pa.int32())
            column = pa.DictionaryArray.from_arrays(indices, pa.array(words))
            writer.write_batch(pa.record_batch([column], schema=schema))
    assert built(path)[0] == [text for part in parts for text in part]


@pytest.mark.parametrize("kind", STRINGS)
def test_null_rows_and_batches_without_rows(tmp_path: Path, tokenizer: Path, kind: str) -> None:
    texts = ["one", None, "two", None]
    table = pa.table({"text": pa.array(texts, STRINGS[kind])})
    path = tmp_path / "n.arrow"
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        empty = pa.RecordBatch.from_pylist([], schema=table.schema)
        for batch in table.to_batches(max_chunksize=3):
            writer.write_batch(empty)
            writer.write_batch(batch)
        writer.write_batch(empty)
    encoder = TokenEncoder(tokenizer)
    source = open_source(path, encoder, None)
    assert [len(whole(source, row)) for row in range(4)] == [
        len(encoder.encode(text or "")) for text in texts
    ]
    assert built(path)[0] == ["one", "", "two", ""]


def test_truncated_streams(tmp_path: Path, tokenizer: Path) -> None:
    """An error that says what is the matter, and --skip-bad reads what is whole."""
    content = write(tmp_path / "s.arrow", pa.table({"text": TEXTS}), 2).read_bytes()
    begins = [
        index for index in range(0, len(content), 8) if content[index : index + 4] == b"\xff" * 4
    ]
    path, encoder = tmp_path / "cut.arrow", TokenEncoder(tokenizer)
    for size in {*range(0, len(content), 67), *begins, *(begin + 4 for begin in begins)}:
        path.write_bytes(content[:size])
        with pytest.raises(DataError, match=r"cut\.arrow is not a complete Arrow file: "):
            open_source(path, encoder, None)
        with pytest.raises(DataError, match=r"not a readable Arrow file|not an Arrow file"):
            built(path)
        whole_batches = max(0, sum(begin <= size for begin in begins) - 2)
        documents, errors = built(path, skip_bad=True)
        assert documents == TEXTS[: 2 * whole_batches]
        assert len(errors) == 1
    for data, message in (
        (content[: begins[3]], r"no end marker: it was cut off, .* 2 batches, 4 rows"),
        (content[: begins[3] - 8], r"for message body, got .* 1 batches, 2 rows"),
        (content + content, r"bytes follow its end marker"),
        (b"PAR1 and the rest of some other file", "is not a complete Arrow file"),
        (b"PAR1\x15\x04\x15", "is Parquet; it is read as such if"),
        (b"ARROW", "is not a complete Arrow file"),
    ):
        path.write_bytes(data)
        with pytest.raises(DataError, match=message):
            open_source(path, encoder, None)


def test_damage_in_a_later_batch_or_an_offset(tmp_path: Path, tokenizer: Path) -> None:
    path = write(tmp_path / "s.arrow", pa.table({"text": TEXTS * 46}), 161)
    node = b"".join(number.to_bytes(8, "little") for number in (161, 0))  # rows and nulls
    content = path.read_bytes()
    assert content.count(node) == 2
    at = content.rfind(node)
    path.write_bytes(content[:at] + (1 << 20).to_bytes(8, "little") + content[at + 8 :])
    with pytest.raises(DataError, match=r"is not a complete Arrow file: .*length"):
        open_source(path, TokenEncoder(tokenizer), None)
    path = write(tmp_path / "s.arrow", pa.table({"text": ["a", "b", "a"]}), 3)
    content = path.read_bytes()
    at = content.rfind(np.array([0, 1, 2, 3], np.int32).tobytes()) + 4
    for offset in (4, -1, 1 << 30):
        path.write_bytes(content[:at] + np.int32(offset).tobytes() + content[at + 4 :])
        source = open_source(path, TokenEncoder(tokenizer), None)
        with pytest.raises(StorageError, match=r"document 1 of .* is damaged"):
            whole(source, 1)
        assert len(whole(source, 2)) == 2


LISTS: dict[str, Callable[[], pa.DataType]] = {
    "list": lambda: pa.list_(pa.int32()),
    "large_list": lambda: pa.large_list(pa.int64()),
    "uint16": lambda: pa.list_(pa.uint16()),
    "fixed": lambda: pa.list_(pa.int64(), 3),
}


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_lists_of_token_ids(tmp_path: Path, kind: str, compression: str | None) -> None:
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]
    if kind != "fixed":
        rows[1:3] = [[], [7]]
    table = pa.table({"input_ids": pa.array(rows, LISTS[kind]()), "length": [1, 2, 3, 4]})
    for stream in (True, False):
        path = write(tmp_path / "t.arrow", table, 2, stream, compression=compression)
        source = open_source(path, None, 20)
        assert [whole(source, row) for row in (3, 0, 2, 1)] == [rows[row] for row in (3, 0, 2, 1)]
        assert source.total_size == sum(map(len, rows))
        assert (source.size_unit, source.knows_documents) == ("tokens", True)
        with pytest.raises(DataError, match=r"token 0 of document 3 of .* is 10, .*0 … 9"):
            whole(open_source(path, None, 10), 3)


def test_nulls_of_ids_and_a_large_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rows, whole_rows in (([[1], None, [2]], [[1], [], [2]]), ([[1, None, 2]], None)):
        table = pa.table({"input_ids": pa.array(rows, pa.list_(pa.int32()))})
        source = open_source(write(tmp_path / "n.arrow", table, 2), None, 20)
        if whole_rows is None:
            with pytest.raises(DataError, match="has null among the token ids of column 'input_"):
                whole(source, 0)
        else:
            assert [whole(source, row) for row in range(3)] == whole_rows
    monkeypatch.setattr(arrow, "_LARGEST_COPY", 1000)
    texts = pa.table({"text": np.random.default_rng(1).bytes(4000).hex()[:4000].split("0")})
    path = write(tmp_path / "c.arrow", texts, 10_000, compression="zstd")
    with pytest.raises(DataError, match=r"c\.arrow is compressed, .* takes more than .* build it"):
        ArrowFile(path)
    with pytest.raises(DataError, match=r"c\.arrow is compressed, .* takes more than .* build it"):
        ArrowFile(write(path, texts, 20, compression="zstd"))
    assert len(ArrowFile(write(path, texts, 10_000))) == len(texts)


def test_opening_reads_headers_and_reading_one_batch(tmp_path: Path) -> None:
    """A hundred megabytes in 400 batches: neither copied nor read."""
    table = pa.table({"text": ["x" * 250_000]})
    path = tmp_path / "m.arrow"
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        for _ in range(400):
            writer.write_table(table)
    before = pa.total_allocated_bytes()
    column = ArrowFile(path).strings("text")
    assert [len(column.data(row)) for row in (399, 0, 200)] == [250_000] * 3
    assert column.total_size == 100_000_000
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_ours_open_in_all_readers(tmp_path: Path, texts: list[str], tokenizer: Path) -> None:
    path = make_corpus(tmp_path, texts)
    streamed = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    as_file = pa.ipc.open_file(pa.memory_map(str(path)))
    assert as_file.num_record_batches == 1
    assert streamed.equals(as_file.read_all())
    assert streamed["text"].to_pylist() == texts
    assert {*streamed["source"].to_pylist()} == {str(tmp_path / "corpus.jsonl")}
    source, encoder = open_source(path, TokenEncoder(tokenizer), None), TokenEncoder(tokenizer)
    assert all(whole(source, row) == [*encoder.encode(texts[row])] for row in range(20))
    assert built(path)[0] == texts
    datasets = pytest.importorskip("datasets")
    ours = datasets.Dataset.from_file(str(path))
    assert ours["text"][:] == texts
    assert ours["id"][:] == streamed["id"].to_pylist()
    lengths = ours.map(lambda row: {"length": len(row["text"])}, cache_file_name=None)
    assert lengths["length"][:] == [len(text) for text in texts]


@pytest.fixture
def dataset(texts: list[str]) -> Any:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    return datasets.Dataset.from_dict({"text": texts, "n": list(range(len(texts)))})


def test_saved_datasets(tmp_path: Path, texts: list[str], tokenizer: Path, dataset: Any) -> None:
    encoder = TokenEncoder(tokenizer)
    dataset.save_to_disk(tmp_path / "d", num_shards=3)
    source = open_source(tmp_path / "d", encoder, None)
    for row in (96, 0, 50, 31, 32, 33, 65):
        assert whole(source, row) == [*encoder.encode(texts[row])]
    assert len(source) == len(texts)
    other = open_source(tmp_path / "d", encoder, None)
    assert source.fingerprint == other.fingerprint
    assert len({*source.document_hashes(np.arange(97)).tolist()}) == 97
    tokens = dataset.map(
        lambda row: {"input_ids": encoder.encode(row["text"]).tolist()}, remove_columns=["text"]
    )
    tokens.save_to_disk(tmp_path / "t")
    ids = open_source(tmp_path / "t", None, 320)
    assert [whole(ids, row) for row in (96, 3)] == [whole(source, row) for row in (96, 3)]
    shard = sorted((tmp_path / "d").glob("*.arrow"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    with pytest.raises(DataError, match=rf"{shard.name} is not a complete Arrow file"):
        open_source(tmp_path / "d", encoder, None)
    write(shard, pa.table({"text": [1]}), 1)
    with pytest.raises(DataError, match=rf"{shard.name} has other columns than data-00000"):
        open_source(tmp_path / "d", encoder, None)
