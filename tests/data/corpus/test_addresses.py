"""`data build` of files that are elsewhere: `hf://`, `https://` and other addresses of fsspec."""

import gzip
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.conftest import some_texts
from data.corpus.data_server import DataServer, data_server
from slurmllm.core.errors import DataError, InfrastructureError
from slurmllm.data.corpus import addresses
from slurmllm.data.corpus.build import build_corpus
from slurmllm.data.corpus.inputs import find_inputs
from slurmllm.data.corpus.options import BuildOptions, ReadOptions
from slurmllm.data.corpus.shard import plan_shards

HUB = "datasets/org/name/resolve/main/"
CARD = (
    b"---\nconfigs:\n- config_name: default\n  data_files:\n  - {split: train, path: 'a*/*'}\n---\n"
)


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    """Return a file of each format; the README names those of `a` as its training split."""
    texts = some_texts(300)
    table = pa.table({"text": texts[:50]})
    parquet, arrow = io.BytesIO(), io.BytesIO()
    pq.write_table(table, parquet, row_group_size=10)
    with pa.ipc.new_file(arrow, table.schema) as out:
        out.write_table(table, max_chunksize=7)
    return {
        "README.md": CARD,
        "a/1.parquet": parquet.getvalue(),
        "a/2.jsonl": lines(texts[50:150]),
        "a/3.json.gz": gzip.compress(lines(texts[150:200])),
        "a/4.arrow": arrow.getvalue(),
        "a/5.csv": b"text\n" + "".join(f'"{text[:9]}"\n' for text in texts[200:]).encode(),
        "b/test.jsonl": lines(["of another split"]),
    }


@pytest.fixture
def server(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[DataServer]:
    monkeypatch.setattr(addresses, "_PAUSE_S", 0.0)
    with data_server() as server:
        server.files |= {HUB + name: body for name, body in files.items()}
        yield server


def texts_of(corpus: Path) -> list[str]:
    with pa.ipc.open_file(corpus) as reader:
        texts: list[str] = reader.read_all()["text"].to_pylist()
    return texts


def test_a_folder_gives_the_corpus_of_its_files(files: dict[str, bytes], tmp_path: Path) -> None:
    """The same texts in the same order as of a local copy, and the split that its README names."""
    memory = fsspec.filesystem("memory")
    for name, body in files.items():
        memory.pipe(f"/set/{name}", body)
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_bytes(body)
    notes: list[str] = []
    inputs = find_inputs(["memory://set"], on_note=notes.append)
    assert [file.name for file in inputs] == [f"memory://set/{n}" for n in files if n[0] == "a"]
    assert "left out b/test.jsonl" in notes[-1]
    result = build_corpus(inputs, tmp_path / "far.arrow", ReadOptions())
    build_corpus(find_inputs([str(tmp_path / "set")]), tmp_path / "near.arrow", ReadOptions())
    assert texts_of(tmp_path / "far.arrow") == texts_of(tmp_path / "near.arrow")
    assert [file.bytes for file in result.manifest.inputs] == [file.size_bytes for file in inputs]
    assert len(find_inputs(["memory://set/a/*.json*"])) == 2
    assert len(find_inputs(["memory://set"], split="all")) == 6


def test_a_hub_folder_by_one_and_by_two_processes(server: DataServer, tmp_path: Path) -> None:
    corpora = []
    for workers in "12":
        out = tmp_path / f"{workers}.arrow"
        command = [sys.executable, "-m", "slurmllm", "data", "build", "hf://datasets/org/name"]
        environment = {"HF_ENDPOINT": server.url.rstrip("/"), "HF_HOME": str(tmp_path)}
        subprocess.run([*command, "--out", out, "--workers", workers], check=True, env=environment)
        corpora.append((out.read_bytes(), json.loads((tmp_path / f"{out}.json").read_text())))
    assert corpora[0] == corpora[1]
    assert len(texts_of(out)) == 350
    names = [file["path"] for file in corpora[0][1]["inputs"]]
    assert names[0] == "hf://datasets/org/name/a/1.parquet"


def test_a_connection_that_breaks_is_continued(server: DataServer, tmp_path: Path) -> None:
    url = f"{server.url}{HUB}a/2.jsonl"
    server.faults[f"{HUB}a/2.jsonl"] = {"break_at": [None, 500, 1000]}
    result = build_corpus(find_inputs([url]), tmp_path / "a.arrow", ReadOptions())
    assert result.manifest.documents == 100
    server.faults[f"{HUB}a/2.jsonl"] = {"status": 503}
    with pytest.raises(InfrastructureError, match=r"failed 5 times: 503.*or download it"):
        find_inputs([url])


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (f"{HUB}none.jsonl", r"none.jsonl does not exist \(404\); download it"),
        (f"{HUB}none.pdf", "none.pdf does not exist"),
        ("s3://bucket/a.jsonl", "s3://bucket/a.jsonl cannot be opened here.*pip install s3fs"),
        ("gs://bucket/a.jsonl", "pip install gcsfs"),
        ("nosuch://a/b.jsonl", "nosuch://a/b.jsonl cannot be opened here: must begin with https"),
        ("memory://none", "memory://none does not exist"),
    ],
)
def test_what_is_not_there(
    server: DataServer, url: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("s3fs", "gcsfs"):
        monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=message):
        find_inputs([url if "://" in url else server.url + url])


def test_a_file_that_changes_is_refused(server: DataServer, tmp_path: Path) -> None:
    inputs = find_inputs([f"{server.url}{HUB}a/2.jsonl"])
    (shard,) = plan_shards(inputs, BuildOptions(ReadOptions()))
    server.etag = '"2"'
    (changed,) = plan_shards(find_inputs([inputs[0].name]), BuildOptions(ReadOptions()))
    assert shard.name != changed.name
    with pytest.raises(DataError, match="has changed since the build began"):
        build_corpus(inputs, tmp_path / "a.arrow", ReadOptions())
