"""Files of other people's tools: padding, cuts, long windows, one array, nulls, bombs."""

import bz2
import gzip
import io
import json
import lzma
import re
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from amounts import amount
from backports import zstd
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmllm.cli.main import cli
from slurmllm.core.errors import DataError
from slurmllm.data.corpus.inputs import FormatOption, input_file
from slurmllm.data.corpus.options import InputErrors, ReadOptions
from slurmllm.data.corpus.readers import DocumentReader
from slurmllm.data.corpus.readers.base import drop_blank
from slurmllm.data.corpus.readers.columns import _ROWS

PACKERS = {".gz": gzip.compress, ".zst": zstd.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
LINES = [json.dumps({"text": f"größer {n} " + str(n) * 50}) for n in range(8_000)]
DATA = ("\n".join(LINES) + "\n").encode()


def read(path: Path, format: FormatOption = "auto", **options: Any) -> tuple[list[str], list[str]]:
    """Return the documents with text, and the errors."""
    errors = InputErrors(skip_bad=True)
    reader = DocumentReader(input_file(path, format), ReadOptions(**options), errors.add)
    texts = [text for chunk in reader for text in drop_blank(chunk)[0].to_pylist()]
    return texts, errors.examples


def window_of_2_gib(data: bytes) -> bytes:
    parameter = zstd.CompressionParameter
    compressor = zstd.ZstdCompressor(options={parameter.window_log: 31, parameter.checksum_flag: 1})
    return compressor.compress(data) + compressor.flush()


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize("zeros", [1, 200_000])
def test_zeros_after_the_last_stream_are_no_damage(tmp_path: Path, ending: str, zeros: int) -> None:
    path = tmp_path / f"a.jsonl{ending}"
    half = len(DATA) // 2
    packed = PACKERS[ending](DATA[:half]) + b"\0" * 4 + PACKERS[ending](DATA[half:])
    path.write_bytes(packed + b"\0" * zeros)
    texts, errors = read(path)
    assert (len(texts), errors) == (len(LINES), [])
    path.write_bytes(packed + b"\0" * zeros + b"of another program")
    texts, (error,) = read(path)
    assert len(texts) == len(LINES), "all text before it is read"
    assert "or damaged" in error


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz", "a.txt.gz", "a.jsonl.zst"])
def test_a_cut_member_gives_all_text_before_the_cut(tmp_path: Path, name: str) -> None:
    lines = [json.loads(line)["text"] for line in LINES]
    data = DATA if "jsonl" in name else ("text\n" * ("csv" in name) + "\n".join(lines)).encode()
    first, second = data[: len(data) // 2], data[len(data) // 2 :]
    pack = PACKERS[Path(name).suffix]
    cut = pack(second)[: int(len(pack(second)) * 0.7)]
    path = tmp_path / name
    path.write_bytes(pack(first) + cut)
    if name.endswith("gz"):
        visible = first + zlib.decompressobj(31).decompress(cut)
    else:
        visible = first + zstd.ZstdDecompressor().decompress(cut)
    expected = visible.count(b"\n") - ("csv" in name)
    texts, (error,) = read(path, text_by="line")
    lost = expected % _ROWS if "csv" in name else 0
    assert texts == lines[: expected - lost]
    assert "Truncated compressed stream" in error
    if "txt" in name:
        (text,), _ = read(path, text_by="paragraph")
        assert text == "\n".join(lines[:expected])
        (text,), _ = read(path, text_by="document")
        assert text == "\n".join(lines[:expected]) + "\n"


def test_long_zstd_windows_need_an_option_that_the_message_names(tmp_path: Path) -> None:
    path, out = tmp_path / "a.jsonl.zst", tmp_path / "out.arrow"
    path.write_bytes(zstd.compress(DATA[:1000]) + window_of_2_gib(DATA[1000:]))
    arguments = ["data", "build", str(path), "--out", str(out)]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 2
    assert "its zstd window is larger than 2^27 bytes" in done.output
    assert "--zstd-long 31" in done.output
    done = CliRunner().invoke(cli, [*arguments, "--zstd-long", "30"])
    assert "larger than 2^30 bytes" in done.output
    done = CliRunner().invoke(cli, [*arguments, "--zstd-long", "31", "--json"])
    assert json.loads(done.output)["documents"] == len(LINES)
    manifest = out.with_name("out.arrow.json").read_text()
    assert "zstd_long" not in manifest, "it changes nothing that is read"


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_small_file_of_endless_line_ends_is_an_error(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurmllm.data.corpus.decompress._MOST_BLANK_BYTES", 4 << 20)
    first = {"a.jsonl": b'{"text": "a"}\n', "a.txt": b"a\n\n"}[name]
    path = tmp_path / f"{name}.zst"
    path.write_bytes(zstd.compress(first + b"\n" * (16 << 20)))
    texts, (error,) = read(path)
    assert texts == ["a"]
    assert "without a document" in error
    path.write_bytes(zstd.compress((first + b"\n" * (2 << 20)) * (5 if name == "a.txt" else 1)))
    assert read(path)[1] == [], "the limit is that of one document"


def test_a_short_column_of_a_wide_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurmllm.data.corpus.decompress._MOST_BLANK_BYTES", 8 << 20)
    path = tmp_path / "a.csv.zst"
    path.write_bytes(zstd.compress(b"text,page\n" + (b"a," + b"x" * 10_000 + b"\n") * 2000))
    assert read(path) == (["a"] * 2000, [])


RECORDS = st.lists(
    st.dictionaries(st.sampled_from(["text", "x"]), st.text() | st.none() | st.lists(st.text())),
    max_size=8,
)


@settings(max_examples=amount(30, of=120))
@given(records=RECORDS, indent=st.sampled_from([None, 0, 2]), block=st.integers(1, 60))
def test_an_array_is_read_as_its_lines(
    records: list[Any], indent: int | None, block: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("in")
    (folder / "a.json").write_text(json.dumps(records, indent=indent))
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slurmllm.data.corpus.readers.base.CHUNK_BYTES", block)
        texts, errors = read(folder / "a.json")
    expected, by_line = read(folder / "a.jsonl")
    assert texts == expected
    assert [error.split(": ", 2)[2] for error in errors] == [
        error.split(": ", 1)[1] for error in by_line
    ]


@pytest.mark.parametrize(
    ("content", "texts", "reason"),
    [
        (b'[{"text": "a"}, {"text": "b"', ["a"], "element 2 of the array: not JSON"),
        (b'[{"text": "a"}, 5]', ["a"], "element 2: a JSON int, not an object"),
        (b'[\n{"text": "a"}\n]\n{"text": "b"}', ["a"], "more text after the end of its JSON array"),
        (b'[\n{"text": "a"},\n{"text": "\xff"}]', ["a"], "not UTF-8"),
        (b'["a"]\n{"text": "b"}\n', ["b"], "a.json:1: a JSON list, not an object"),
        (b"[" * 100_000, [], "element 1 of the array: not JSON"),
    ],
)
def test_arrays_that_are_damaged(
    tmp_path: Path, content: bytes, texts: list[str], reason: str
) -> None:
    (tmp_path / "a.json").write_bytes(content)
    documents, (error,) = read(tmp_path / "a.json")
    assert reason in error
    assert documents == texts or reason == "not UTF-8"


@pytest.mark.parametrize("keys", [{}, {"prompt_key": "x", "completion_key": "text"}])
def test_null_is_an_empty_text_in_all_formats(tmp_path: Path, keys: dict[str, str]) -> None:
    rows = [{"x": "a", "text": "b"}, {"x": "c", "text": None}, {"x": None, "text": "d"}]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as stream:
        stream.write_table(table)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.csv").write_text("x,text\na,b\nc,\n,d\n")
    for ending in ("parquet", "arrow", "jsonl", "json", "csv"):
        errors = InputErrors(skip_bad=True)
        reader = DocumentReader(
            input_file(tmp_path / f"a.{ending}"), ReadOptions(**keys), errors.add
        )
        columns = [column.to_pylist() for chunk in reader for column in drop_blank(chunk)]
        assert columns == [["a", ""], ["b", "d"]][-len(columns) :], ending
        assert errors.count == 0


def tar(data: bytes) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.addfile(member := tarfile.TarInfo("0.txt"), io.BytesIO(data[: member.size]))
    return content.getvalue()


def zipped(data: bytes) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("0.txt", data)
    return content.getvalue()


FOREIGN = {
    "UTF-16 text": lambda data: data.decode().encode("utf-16"),
    "UTF-16 text.*UTF-16BE": lambda data: data.decode().encode("utf-16-be"),
    "UTF-32 text": lambda data: data.decode().encode("utf-32"),
    "gzip.*mv .*gz": gzip.compress,
    "Zstandard.*mv .*zst": zstd.compress,
    "xz": lzma.compress,
    "bzip2": bz2.compress,
    "Parquet.*mv ": lambda data: b"PAR1\x15" + data,
    "a tar archive.*tar -xf": tar,
    "a zip archive.*unzip": zipped,
    "a NumPy array.*data.corpus": lambda data: b"\x93NUMPY\x01\x00v" + data,
    "llm.c.*offset=1024": lambda data: struct.pack("<iii", 20240520, 1, 8) + data,
    "PDF.*pdftotext": lambda data: b"%PDF-1.7\n" + data,
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt", "a.parquet", "a.bin", "a.json.gz"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_first_bytes_tell_a_format_whatever_the_name(kind: str, name: str, tmp_path: Path) -> None:
    data = FOREIGN[kind](b'{"text": "a text"}\n' * 30)
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    if kind.startswith("Parquet") and name == "a.parquet":
        kind = "not a readable Parquet file"
    errors = InputErrors(False, only=True)
    with pytest.raises(DataError, match=f"{name}(: | is ){kind}") as raised:
        list(DocumentReader(input_file(path), ReadOptions(), errors.add))
    assert "--skip-bad" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "format", "skipping_helps"),
    [
        (b"a\n\nb \0\0\0\0\0\0\n", "text", True),
        (b"\3\0\0\0\0\0xxx\n", "text", False),
        (b'{"text": 1}\n{"text": "a"}\n', "jsonl", True),
        (b'{"body": "a"}\n{"body": "b"}\n', "jsonl", False),
        (b"caf\xe9\n", "text", False),
        (b"caf\xe9\n\na\n", "text", True),
        (b"body\na\n", "csv", False),
    ],
)
def test_skip_bad_is_named_only_if_a_document_is_good(
    content: bytes, format: FormatOption, skipping_helps: bool, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    arguments = ["data", "build", "--format", format, "--out", str(tmp_path / "out.arrow")]
    done = CliRunner().invoke(cli, [*arguments, str(path)])
    assert (done.exit_code, "--skip-bad" in done.output) == (2, skipping_helps)
    (tmp_path / "b").write_bytes(content)
    done = CliRunner().invoke(cli, [*arguments, str(path), str(tmp_path / "b")])
    assert (done.exit_code, "--skip-bad" in done.output) == (2, True), "the other may be good"


def test_shards_of_other_packages_are_named(tmp_path: Path) -> None:
    for package, key in (("MosaicML", "shards"), ("litdata", "chunks")):
        folder = tmp_path / package
        folder.mkdir()
        (folder / "index.json").write_text(json.dumps({key: [], "version": 2}))
        (folder / "shard.00000.mds").write_bytes(b"\3\0\0\0")
        out = ["--out", str(tmp_path / "out.arrow")]
        done = CliRunner().invoke(cli, ["data", "build", str(folder), *out])
        assert (done.exit_code, "--skip-bad" in done.output) == (2, False)
        assert re.search(rf"is the index of {package}.*python -c", done.output)


@pytest.mark.parametrize("ends", ["\r", "\r\n", "\n"])
@pytest.mark.parametrize("text_by", ["line", "paragraph", "document"])
def test_a_carriage_return_ends_a_line(ends: str, text_by: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"a{ends}b{ends}{ends}c{ends}", newline="")
    expected = {"line": ["a", "b", "c"], "paragraph": ["a\nb", "c"], "document": ["a\nb\n\nc\n"]}
    assert read(tmp_path / "a.txt", text_by=text_by) == (expected[text_by], [])
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a"}}{ends}{{"text": "b"}}{ends}', newline="")
    assert read(tmp_path / "a.jsonl") == (["a", "b"], [])
