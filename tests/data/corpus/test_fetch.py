"""Downloads of published data sets from servers that break off, lie, or send other bytes."""

import hashlib
import json
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import yaml
from command_line import call

from data.corpus.data_server import DataServer, data_server
from slurmllm.core.config.data_sources import MANIFEST, DataSource, read_source
from slurmllm.core.errors import ConfigError, DataError, InfrastructureError, StorageError
from slurmllm.data.corpus import addresses, fetch
from slurmllm.data.corpus.fetch import Fetch
from slurmllm.data.sources import open_all
from slurmllm.data.spec import StreamSpec
from slurmllm.data.tokenizer import TokenEncoder, tokenizer_of_vocabulary, train_tokenizer
from slurmllm.launch.submit.inputs import source_folder

CONTENT = random.Random(1).randbytes(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[DataServer]:
    monkeypatch.setattr(addresses, "_PAUSE_S", 0.0)
    with data_server() as server:
        server.files["a.bin"] = CONTENT
        yield server


def source(url: str, **published: Any) -> DataSource:
    values = {"description": "d", "origin": "o", "licence": "l", "corpus": "a.bin"}
    return DataSource.model_validate({**values, "files": [{"url": url, **published}]})


def download(server: DataServer, folder: Path, **published: Any) -> Path:
    Fetch("a", source(f"{server.url}a.bin", **published), folder).run()
    return folder / "a.bin"


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".part"))


def test_a_file_is_whole_and_recorded(server: DataServer, tmp_path: Path) -> None:
    path = download(server, tmp_path, size=len(CONTENT), sha256=SHA256)
    assert path.read_bytes() == CONTENT
    record = json.loads((tmp_path / MANIFEST).read_text())
    (file,) = record["files"]
    assert (file["name"], file["size_bytes"]) == ("a.bin", len(CONTENT))
    assert file["origins"][0]["sha256"] == SHA256
    asked = len(server.requests)
    download(server, tmp_path)  # again: nothing is asked
    assert len(server.requests) == asked
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    "faults",
    [
        {"break_at": [None, 100_000, 50_000, 1, None]},
        {"break_at": [None, 100_000, None], "no_range": True},
        {"break_at": [None, 100_000, 250_000, None], "no_range": True},
    ],
)
def test_a_broken_connection_is_continued(server: DataServer, tmp_path: Path, faults: Any) -> None:
    server.faults["a.bin"] = faults
    assert download(server, tmp_path, sha256=SHA256).read_bytes() == CONTENT
    size, begin, *continued = server.asked("a.bin")  # the first request asks for the size
    assert (size, begin) == (0, 0)
    assert continued == sorted(continued)
    if "no_range" in faults:
        assert not any(continued)
    else:  # of what was sent before the end of a connection, not all need be read
        assert 0 < continued[0] <= 100_000


def test_a_download_continues_in_another_process(server: DataServer, tmp_path: Path) -> None:
    server.faults["a.bin"] = {"break_at": [None, 200_000, 0, 0, 0, 0, 0]}
    with pytest.raises(InfrastructureError, match=r"failed 5 times: .* bytes are kept"):
        download(server, tmp_path)
    assert not (tmp_path / "a.bin").exists()
    (part,) = left_behind(tmp_path)
    size = (tmp_path / part).stat().st_size
    assert 0 < size <= 200_000
    server.requests.clear()
    assert download(server, tmp_path, sha256=SHA256).read_bytes() == CONTENT
    assert server.asked("a.bin") == [0, size]


def test_another_version_is_not_continued(server: DataServer, tmp_path: Path) -> None:
    server.faults["a.bin"] = {"break_at": [None, 200_000, 0, 0, 0, 0, 0]}
    with pytest.raises(InfrastructureError):
        download(server, tmp_path)
    server.files["a.bin"], server.etag = CONTENT[::-1], '"2"'
    assert download(server, tmp_path).read_bytes() == CONTENT[::-1]
    assert left_behind(tmp_path) == []


def test_a_change_while_it_is_fetched(server: DataServer, tmp_path: Path) -> None:
    server.faults["a.bin"] = {"break_at": [None, 200_000, None]}
    run = Fetch("a", source(f"{server.url}a.bin"), tmp_path)

    def change(stage: str, done: int, total: int) -> None:
        if done:
            server.etag = '"2"'

    run.on_progress = change
    with pytest.raises(DataError, match="was changed while it was fetched"):
        run.run()
    assert not (tmp_path / "a.bin").exists()


def test_a_file_that_is_there_is_verified_and_kept(server: DataServer, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(CONTENT)
    download(server, tmp_path, sha256=SHA256)
    assert server.asked("a.bin") == [0]  # its size only
    (tmp_path / MANIFEST).unlink()
    path.write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(DataError, match=f"remove {path}, then"):
        download(server, tmp_path, sha256=SHA256)
    assert path.exists()  # it may be the user's own
    path.write_bytes(b"short")
    with pytest.raises(DataError, match=r"has 5 bytes, and .* has 300,000: another version"):
        download(server, tmp_path)


@pytest.mark.parametrize(
    ("faults", "published", "message"),
    [
        ({"status": 404}, {}, r"does not exist \(404\).*data_mirrors"),
        ({"status": 403}, {}, r"may not be read \(403\).*HF_TOKEN"),
        ({"status": 400}, {}, r"is refused \(400\)"),
        ({"status": 503}, {}, "failed 5 times: 503"),
        ({"length": 301_000}, {"size": 300_000}, "has 301,000 bytes, and 300,000 are published"),
        ({"length": 299_000}, {"size": 300_000}, "has 299,000 bytes, and 300,000 are published"),
        ({"length": 301_000}, {}, "the connection failed 5 times"),
        ({}, {"sha256": "0" * 64}, f"sha256 is {SHA256}, and 0+ is published: damaged on the way"),
    ],
)
def test_what_is_refused_leaves_no_file(
    server: DataServer, tmp_path: Path, faults: Any, published: Any, message: str
) -> None:
    server.faults["a.bin"] = faults
    kind = InfrastructureError if "failed 5 times" in message else DataError
    with pytest.raises(kind, match=message):
        download(server, tmp_path, **published)
    assert not (tmp_path / "a.bin").exists()
    assert not left_behind(tmp_path) or faults == {"length": 301_000}


@pytest.mark.parametrize(
    ("published", "outcome"),
    [
        ("", "downloaded; nothing is published to compare"),
        ("    size: 300000\n", "verified"),
        (f'    sha256: "{SHA256}"\n', "verified"),
        ("    size: 300000\n  - url: {url}b.bin\n", "1 of 2 verified; nothing is published"),
    ],
)
def test_only_what_was_compared_is_verified(
    server: DataServer, tmp_path: Path, published: str, outcome: str
) -> None:
    server.files["b.bin"] = b"b"
    data_set, data = tmp_path / "set.yaml", tmp_path / "to"
    head = "description: d\norigin: o\nlicence: l\nfiles:\n"
    data_set.write_text(f"{head}  - url: {server.url}a.bin\n{published.format(url=server.url)}")
    command = ("data", "fetch", str(data_set), "--to", str(data))
    assert outcome in call(*command, catch_exceptions=False).output
    path = data / "set" / "a.bin"
    path.write_bytes(CONTENT[:-1] + b"x")
    assert "there since the last fetch, not read again" in call(*command).output
    path.with_name(MANIFEST).write_text('{"name": "x", "parts": null, "files": []}')
    result = call(*command)
    assert ("is published: damaged" in result.output) is ("sha256" in published)
    assert result.exit_code == 2 * ("sha256" in published)


@pytest.mark.parametrize(
    ("faults", "published", "message"),
    [
        (
            {"length": 0, "no_range": True},
            {"size": 300_001},
            "failed 5 times: sent 300,000 of 300,001 bytes",
        ),
        ({"length": 0}, {"size": 299_999}, "sends more than 299,999 bytes"),
        ({"length": 0}, {"gigabytes": 1e-4}, "sends more than 200,000 bytes"),
        ({}, {"gigabytes": 1e-4}, "has 300,000 bytes, more than twice the `gigabytes`"),
        ({"headers": {"Content-Encoding": "gzip"}}, {}, r"sends it encoded \(gzip\)"),
        (
            {"break_at": [None, 100_000, None], "range_from": 0},
            {},
            "the server answers with 'bytes 0-299999/300000'",
        ),
        ({"location": "file:///etc/passwd"}, {}, "redirects to file:///etc/passwd"),
        ({"location": "ftp://127.0.0.1/x"}, {}, "redirects to ftp://127.0.0.1/x"),
        ({"location": "http://127.0.0.1:9/x"}, {}, "redirects to 127.0.0.1, inside the network"),
        ({"location": "http://[::1]/x"}, {}, "redirects to ::1, inside"),
        ({"location": "http://169.254.169.254/latest"}, {}, "redirects to 169.254.169.254"),
        ({"location": "//10.0.0.1/x"}, {}, "redirects to 10.0.0.1, inside"),
        ({"location": "http://localhost:9/x"}, {}, "redirects to localhost, inside"),
        ({"headers": {"Content-Length": "9" * 5000}}, {}, r"refused \(400\): .{200,400}…; set"),
    ],
)
def test_a_server_that_lies(
    server: DataServer, tmp_path: Path, faults: Any, published: Any, message: str
) -> None:
    server.faults["a.bin"] = faults
    gigabytes = published.pop("gigabytes", None)
    data_set = source(f"{server.url}a.bin", **published).model_copy(update={"gigabytes": gigabytes})
    with pytest.raises((InfrastructureError, DataError), match=message):
        Fetch("a", data_set, tmp_path).run()
    assert not (tmp_path / "a.bin").exists()
    assert not left_behind(tmp_path) or "failed 5 times" in message


def test_a_mirror_may_redirect_into_the_network(server: DataServer, tmp_path: Path) -> None:
    with data_server() as store:
        store.files["x"] = CONTENT
        server.faults["a.bin"] = {"location": f"{store.url}x"}
        mirrors = {"https://far/": server.url}
        Fetch("a", source("https://far/a.bin"), tmp_path, mirrors).run()
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_no_password_of_an_address_is_shown(server: DataServer, tmp_path: Path) -> None:
    address, notes = server.url.replace("//", "//user:PASS@WORD@"), list[str]()
    for name, message in (("a.bin", ""), ("none.bin", "//[*][*][*]@127.0.0.1.*does not exist")):
        run = Fetch("a", source(f"https://x/{name}"), tmp_path, {"https://x/": address})
        run.on_note = notes.append
        with pytest.raises(DataError, match=message) if message else nullcontext() as caught:
            run.run()
        shown = f"{caught and caught.value}{notes}{(tmp_path / MANIFEST).read_text()}"
        assert "***@" in shown
        assert "WORD" not in shown
        (tmp_path / "a.bin").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({"url": f"{url}://x/a"}, "must begin with") for url in ("ftp", "github", "sftp", "zip")),
        ({"url": "reference://x::https://x/a.json"}, "a single address"),
        ({"url": "simplecache::https://x/a"}, "a single address"),
        ({"url": "data:text/plain,hello"}, "must begin with"),
        ({"url": "a.jsonl"}, "must begin with"),
        *(({"name": name}, "inside the folder") for name in ("../x", "/x", "a\0b", "", "a/../b")),
        *(({"name": name}, "inside the folder") for name in (".fetch.lock", "a/.b", "x\ny")),
        *(({"name": name}, "which slurmllm writes") for name in ("fetched.json", "fetched.json/x")),
    ],
)
def test_addresses_and_names_of_a_data_set(
    tmp_path: Path, change: dict[str, str], message: str
) -> None:
    values = {"description": "d", "origin": "o", "licence": "l"}
    path = tmp_path / "set.yaml"
    path.write_text(yaml.safe_dump({**values, "files": [{"url": "https://x/a", **change}]}))
    with pytest.raises(ConfigError, match=message):
        read_source(str(path))


@pytest.mark.parametrize("name", ["...yaml", "..yaml", ".yaml", "....yml"])
def test_a_data_set_has_a_folder_of_its_own(tmp_path: Path, name: str) -> None:
    assert source_folder(tmp_path, name).parent == tmp_path
    assert source_folder(tmp_path, name) == source_folder(tmp_path, name).resolve()


def test_servers_that_are_not_there_or_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: DataServer
) -> None:
    monkeypatch.setattr(addresses, "_PAUSE_S", 0.0)
    with pytest.raises(InfrastructureError, match=r"HTTPS_PROXY, or set cluster.data_mirrors"):
        Fetch("a", source("http://127.0.0.1:9/a.bin"), tmp_path).run()
    monkeypatch.setattr(addresses, "_SILENCE_S", 0.2)
    monkeypatch.setattr(addresses, "_TRIES", 2)
    server.faults["a.bin"] = {"slow": 0.6}
    with pytest.raises(InfrastructureError, match="the connection failed 2 times"):
        download(server, tmp_path)


def test_a_gated_hub(server: DataServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's file system reports a gated repository as a file that is not there."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url.rstrip("/"))
    server.faults["api/models/org/gated"] = {"status": 401}
    with pytest.raises(DataError, match=r"may not be read \(401\).*accept the terms.*HF_TOKEN"):
        Fetch("a", source("hf://org/gated/a.bin"), tmp_path).run()
    with pytest.raises(DataError, match="cannot be read: Repository id must be"):
        Fetch("a", source("hf://org"), tmp_path).run()


def test_a_sum_that_the_hub_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    info = MemoryFileSystem.info
    for stated in (SHA256, SHA256[::-1]):
        large_file = SimpleNamespace(sha256=stated)
        monkeypatch.setattr(
            MemoryFileSystem, "info", lambda *path, lfs=large_file: info(*path) | {"lfs": lfs}
        )
        fsspec.filesystem("memory").pipe("/hub/a.bin", CONTENT)
        run = Fetch("a", source("memory://hub/a.bin"), tmp_path / stated)
        if stated == SHA256:
            run.run()
            continue
        with pytest.raises(DataError, match=f"and {stated} is published"):
            run.run()


def test_two_fetches_at_once(server: DataServer, tmp_path: Path) -> None:
    server.faults["a.bin"] = {"slow": 0.006}
    code = (
        "import sys; from pathlib import Path; from slurmllm.data.corpus.fetch import Fetch;"
        "from slurmllm.core.config.data_sources import DataSource;"
        "Fetch('a', DataSource(description='d', origin='o', licence='l',"
        "files=[{'url': sys.argv[1]}]), Path(sys.argv[2]), on_note=print).run()"
    )
    command = [sys.executable, "-c", code, f"{server.url}a.bin", str(tmp_path / "data")]
    with ThreadPoolExecutor() as pool:
        done = list(
            pool.map(
                lambda _: subprocess.run(command, capture_output=True, text=True, check=False),
                range(2),
            )
        )
    assert [process.returncode for process in done] == [0, 0], done
    assert (tmp_path / "data" / "a.bin").read_bytes() == CONTENT
    assert server.asked("a.bin") == [0, 0]  # size and content, by the first of them
    assert sum("waiting for another fetch" in process.stdout for process in done) == 1


def test_no_room_beforehand(server: DataServer, tmp_path: Path, monkeypatch: Any) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=200_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StorageError, match=r"needs 0.0003 GB more, and has 0.0002 GB free.* --to"):
        download(server, tmp_path)
    assert server.asked("a.bin") == [0]  # nothing was downloaded
    many = source(f"{server.url}*.bin").model_copy(update={"gigabytes": 0.001})
    with pytest.raises(StorageError, match=r"needs 0.001 GB more"):
        Fetch("a", many, tmp_path).run()
    server.files["a.bin"] = CONTENT[:1000]
    Fetch("a", many, tmp_path, parts=1).run()  # a part of the data set has room
    assert (tmp_path / "a.bin").read_bytes() == CONTENT[:1000]


def test_a_disk_that_fills_up(server: DataServer, tmp_path: Path) -> None:
    """As a quota does it: the file may not grow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(StorageError, match="File too large; free space, then") as caught:
            download(server, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.exit_code == 4
    assert not (tmp_path / "a.bin").exists()
    assert download(server, tmp_path, sha256=SHA256).read_bytes() == CONTENT  # continued


def test_patterns_and_joined_parts(server: DataServer, tmp_path: Path) -> None:
    parts = [CONTENT[:1000], CONTENT[1000:5000], CONTENT[5000:9000]]
    server.files |= {f"p-{number}.bin": part for number, part in enumerate(parts)}
    joined = source(f"{server.url}p-*.bin", name="whole.bin")
    server.faults["p-1.bin"] = {"break_at": [None, 10, None]}
    Fetch("a", joined, tmp_path / "joined").run()
    assert (tmp_path / "joined" / "whole.bin").read_bytes() == CONTENT[:9000]
    Fetch("a", source(f"{server.url}p-*.bin"), tmp_path / "apart", parts=2).run()
    names = sorted(path.name for path in (tmp_path / "apart").iterdir() if path.suffix == ".bin")
    assert names == ["p-0.bin", "p-1.bin"]
    with pytest.raises(DataError, match="no file of this pattern"):
        Fetch("a", source(f"{server.url}q-*.bin"), tmp_path / "none").run()


def test_mirrors_replace_the_longest_begin() -> None:
    mirrors = {"s3://": "http://far/", "s3://neuron-s3/": "http://near/", "hf://": "http://hub/"}
    assert fetch._mirrored("s3://neuron-s3/a/b.bin", mirrors) == "http://near/a/b.bin"
    assert fetch._mirrored("s3://other/b.bin", mirrors) == "http://far/other/b.bin"
    assert fetch._mirrored("https://x/b.bin", mirrors) == "https://x/b.bin"


def test_a_public_bucket_needs_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # type: ignore[arg-type]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    address = addresses.address_of("s3://neuron-s3/gpt/a.bin", anonymous=True)
    assert address.path == "https://neuron-s3.s3.amazonaws.com/gpt/a.bin"
    notes: list[str] = []
    file = fetch.FetchedFile(name="a.bin", size_bytes=1, origins=())
    monkeypatch.setattr(Fetch, "_write", lambda *_: file)
    Fetch("a", source("s3://neuron-s3/gpt/a.bin"), tmp_path, on_note=notes.append).run()
    assert notes == [
        f"s3://neuron-s3/gpt/a.bin is read as {address.path}, because s3fs is not installed"
    ]


@pytest.mark.parametrize(
    ("url", "fix"), [("s3://mine/a", "pip install s3fs"), ("nosuch://a/b", "data_mirrors")]
)
def test_a_missing_package(url: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=fix):
        addresses.address_of(url, anonymous=False)


def test_the_texts_become_a_corpus(server: DataServer, tmp_path: Path) -> None:
    lines = [json.dumps({"instruction": f"q{n}?", "response": f"answer {n}"}) for n in range(50)]
    server.files["d.jsonl"] = "\n".join(lines).encode()
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(train_tokenizer(lines, 300))
    values = source(f"{server.url}*.jsonl").model_dump()
    values |= {"corpus": "d.arrow", "build": {"prompt_key": "instruction"}}
    values["build"]["completion_key"] = "response"
    for _ in range(2):  # the second one finds the corpus
        Fetch("a", DataSource.model_validate(values), tmp_path, parts=1).run()
    (reader,), _ = open_all(StreamSpec([(tmp_path / "d.arrow", 1.0)], tokenizer, 8, 1, 1, 300))
    assert len(reader) == 50
    assert not reader.trains_every_token
    server.files["e.jsonl"] = server.files["d.jsonl"]
    Fetch("a", DataSource.model_validate(values), tmp_path).run()  # the other part too
    (reader,), _ = open_all(StreamSpec([(tmp_path / "d.arrow", 1.0)], tokenizer, 8, 1, 1, 300))
    assert len(reader) == 100


def test_vocabulary_files_become_a_tokenizer(server: DataServer, tmp_path: Path) -> None:
    texts = [f"the quick brown fox, no. {number}, jumps" for number in range(99)]
    trained = json.loads(train_tokenizer(texts, 320))
    merges = "\n".join(" ".join(pair) for pair in trained["model"]["merges"])
    server.files["gpt2-vocab.json"] = json.dumps(trained["model"]["vocab"]).encode()
    server.files["gpt2-merges.txt"] = f"#version: 0.2\n{merges}\n".encode()
    files = [{"url": f"{server.url}gpt2-{name}"} for name in ("vocab.json", "merges.txt")]
    values = {"description": "d", "origin": "o", "licence": "l", "tokenizer": "tokenizer.json"}
    Fetch("a", DataSource.model_validate({**values, "files": files}), tmp_path).run()
    made, path = TokenEncoder(tmp_path / "tokenizer.json"), tmp_path / "trained.json"
    path.write_text(json.dumps(trained))
    text = "the lazy fox\n\n  jumps over 17 naïve dogs"
    assert made.encode(text).tolist() == TokenEncoder(path).encode(text).tolist()
    (tmp_path / "gpt2-merges.txt").write_text("no merges at all")
    with pytest.raises(DataError, match="are not GPT-2's vocabulary files"):
        tokenizer_of_vocabulary(tmp_path / "gpt2-vocab.json", tmp_path / "gpt2-merges.txt")


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_other_file_systems(tmp_path: Path, protocol: str) -> None:
    """As s3 and hf are read: by requests, from any place."""
    folder = tmp_path / "there"
    files = fsspec.filesystem(protocol)
    files.makedirs(str(folder), exist_ok=True)
    for number in range(2):
        files.pipe(f"{folder}/{number}.bin", CONTENT[number * 100_000 : (number + 1) * 100_000])
    joined = source(f"{protocol}://{folder}/*.bin", name="whole.bin")
    Fetch("a", joined, tmp_path / "data").run()
    assert (tmp_path / "data" / "whole.bin").read_bytes() == CONTENT[:200_000]
    (tmp_path / "data" / MANIFEST).unlink()
    (tmp_path / "data" / "whole.bin").unlink()
    with pytest.raises(DataError, match="does not exist"):
        Fetch("a", source(f"{protocol}://{folder}/nosuch.bin"), tmp_path / "data").run()
