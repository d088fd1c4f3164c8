"""Published data sets, downloaded: resumed where they broke off, verified, renamed when whole.

A file is written as `.<name>.<key>.part`, whose key stands for what is at the address (addresses,
sizes, versions): what is there of another version is never continued. It gets its name when all its
bytes have arrived and fit the published size and sum, so a file of the final name is whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from slurmllm.config.data_sources import DataSource, PublishedFile
from slurmllm.corpus.build import build_corpus
from slurmllm.corpus.inputs import find_inputs
from slurmllm.corpus.join import BuildCallbacks
from slurmllm.corpus.options import ReadOptions
from slurmllm.data.tokenizer import tokenizer_of_vocabulary
from slurmllm.errors import DataError, InfrastructureError, SlurmllmError, StorageError
from slurmllm.progress import OnStage
from slurmllm.records import Record
from slurmllm.rundir import fsync_dir, read_all, write_atomic
from slurmllm.safe_files import open_lock, reason

MANIFEST = "fetched.json"
_CHUNK = 1 << 22  # bytes that are read at a time
_BLOCK = 1 << 25  # bytes of one request, if a file system reads by requests
_TRIES = 5  # without a byte in between
_PAUSE_S = 1.0  # before the second try; doubled for each further one
_SILENCE_S = 60  # after which a connection counts as broken
_WORKERS = 4
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FileOrigin(Record):
    """What came from one address."""

    url: str
    size_bytes: int
    sha256: str


class FetchedFile(Record):
    """A file of a fetched data set."""

    name: str
    size_bytes: int
    origins: tuple[FileOrigin, ...]  # several, if it was joined


class FetchManifest(Record):
    """What was fetched (`fetched.json` in the data set's folder)."""

    name: str
    parts: int | None = None  # only so many files of each pattern
    files: tuple[FetchedFile, ...]


@dataclass(frozen=True)
class _Remote:
    """What is at an address."""

    url: str
    file_system: Any  # of fsspec
    path: str
    size: int | None
    version: str  # changes if the content changes, as far as the server says
    sha256: str | None = None  # published, or stated by the server


@dataclass(frozen=True)
class _Target:
    """A file to write: one address, or several that are joined."""

    name: str
    remotes: tuple[_Remote, ...]

    @property
    def size(self) -> int | None:
        sizes = [remote.size for remote in self.remotes]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def part(self, folder: Path) -> Path:
        keys = repr([(r.url, r.size, r.version) for r in self.remotes])
        key = hashlib.sha256(keys.encode()).hexdigest()[:8]
        path = folder / self.name
        return path.with_name(f".{path.name}.{key}.part")


@dataclass
class Fetch:
    """A download of one data set into a folder.

    Attributes:
        mirrors: Begin of an address → what replaces it.
        parts: Fetch only so many files of each pattern.
        on_progress: Called with the stage, the bytes done and the total.
        on_note: Called with a line for the user.
    """

    name: str
    source: DataSource
    folder: Path
    mirrors: Mapping[str, str] = field(default_factory=dict)
    parts: int | None = None
    on_progress: OnStage = lambda stage, done, total: None
    on_note: Callable[[str], None] = lambda note: None

    def run(self) -> FetchManifest:
        """Fetch what is missing, then build the corpus if the data set has texts.

        Raises:
            DataError: nothing is at an address, it may not be read, or other data are there.
            InfrastructureError: the connection breaks again and again.
            StorageError: the disk is full or refuses.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _locked(self.folder, self.on_note):
                manifest = self._fetched() or self._download_all()
                self._make_inputs(manifest)
        except OSError as error:
            raise _storage_error(self.folder, error) from error
        return manifest

    def _fetched(self) -> FetchManifest | None:
        """What an earlier fetch has completed; None if a file is missing or has another size."""
        with contextlib.suppress(OSError, SlurmllmError, ValueError):
            manifest = FetchManifest.load(self.folder / MANIFEST)
            files = manifest.files
            sizes = {file.name: (self.folder / file.name).stat().st_size for file in files}
            if manifest.parts == self.parts and sizes == {f.name: f.size_bytes for f in files}:
                return manifest
        return None

    def _download_all(self) -> FetchManifest:
        targets = [target for file in self.source.files for target in self._targets(file)]
        total = sum(target.size or 0 for target in targets) or int(1e9 * (self.source.gigabytes or 0))
        done = sum(_bytes_of(self.folder / t.name) or _bytes_of(t.part(self.folder)) for t in targets)
        free = shutil.disk_usage(self.folder).free
        if total - done > free:
            raise StorageError(
                f"{self.name} needs {(total - done) / 1e9:,.2f} GB more in {self.folder}, where "
                f"{free / 1e9:,.2f} GB are free; free space, or choose another folder with --to"
            )
        before, files = 0, []
        for target in targets:

            def show(target_bytes: int, before: int = before) -> None:
                self.on_progress(f"fetching {self.name}", before + target_bytes, total)

            files.append(self._download(target, show))
            before += files[-1].size_bytes
        manifest = FetchManifest(name=self.name, parts=self.parts, files=tuple(files))
        manifest.save(self.folder / MANIFEST)
        return manifest

    def _targets(self, file: PublishedFile) -> list[_Target]:
        url = _mirrored(file.url, self.mirrors)
        file_system, path = _open_file_system(url, anonymous=url == file.url)
        paths = [path]
        if "*" in PurePosixPath(path).name:
            try:
                paths = sorted(map(str, file_system.glob(path)))[: self.parts]
            except Exception as error:  # each fsspec file system raises errors of its own
                raise _refusal(url, error) or _unreachable(url, error) from error
            if not paths:
                raise DataError(f"{url}: no file of this pattern; {_OTHER_ADDRESS}")
        expected = file if len(paths) == 1 else file.model_copy(update={"size": None})
        remotes = read_all(lambda one: _inspect(url, file_system, one, expected), paths)
        if file.name is not None:
            return [_Target(file.name, tuple(remotes))]
        return [_Target(PurePosixPath(remote.path).name, (remote,)) for remote in remotes]

    def _download(self, target: _Target, on_bytes: Callable[[int], None]) -> FetchedFile:
        path = self.folder / target.name
        file = part = target.part(self.folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        for other in path.parent.glob(f".{path.name}.*.part"):
            if other != part:  # of another version
                other.unlink()
        if path.is_file():
            file = path
            if target.size not in (None, path.stat().st_size):
                raise DataError(
                    f"{path} has {path.stat().st_size:,} bytes, and {target.remotes[0].url} has "
                    f"{target.size:,}: another version; remove the file to fetch it again"
                )
        ends = [0]
        with part.open("a+b") if file is part else contextlib.nullcontext() as out:
            for remote in target.remotes:
                end = ends[-1] + (remote.size or 0) or file.stat().st_size
                ends.append(end if out is None else _append(remote, out, ends[-1], on_bytes))
            if out is not None:
                os.fsync(out.fileno())
        origins = []
        for remote, begin, end in zip(target.remotes, ends[:-1], ends[1:], strict=True):
            sha256 = _digest(file, begin, end, on_bytes)
            if remote.sha256 not in (None, sha256):
                if file is part:
                    part.unlink()
                kept = f"remove {path}" if file is path else "the download was deleted"
                raise DataError(
                    f"{remote.url}: its sha256 is {sha256}, and {remote.sha256} is published: "
                    f"damaged on the way, or other data; {kept}, then {_AGAIN}, or {_OTHER_ADDRESS}"
                )
            origins.append(FileOrigin(url=remote.url, size_bytes=end - begin, sha256=sha256))
        if file is part:
            part.replace(path)
            fsync_dir(path.parent)
        return FetchedFile(name=target.name, size_bytes=ends[-1], origins=tuple(origins))

    def _make_inputs(self, manifest: FetchManifest) -> None:
        """Build the corpus of texts, and a tokenizer.json from two vocabulary files."""
        names = [file.name for file in manifest.files]
        source, build = self.source, self.source.build
        if source.corpus is not None and build is not None:
            out = self.folder / source.corpus
            inputs = [str(self.folder / n) for n in names if not n.startswith("tokenizer")]
            if not out.is_file():
                files = find_inputs(inputs)
                total = sum(file.size_bytes for file in files)
                build_corpus(
                    files,
                    out,
                    ReadOptions("document", **build.model_dump()),
                    workers=min(len(os.sched_getaffinity(0)), _WORKERS),
                    callbacks=BuildCallbacks(
                        on_read=lambda done: self.on_progress("reading the texts", done, total),
                        on_join=lambda done, of: self.on_progress("writing the corpus", done, of),
                        on_note=self.on_note,
                    ),
                )
        if source.tokenizer is not None and source.tokenizer not in names:
            out = self.folder / source.tokenizer
            vocab, merges = (
                next(self.folder / name for name in names if name.endswith(end))
                for end in ("vocab.json", "merges.txt")
            )
            if not out.is_file():
                write_atomic(out, tokenizer_of_vocabulary(vocab, merges))


_AGAIN = "run `slurmllm data fetch` again"
_OTHER_ADDRESS = "cluster.data_mirrors names another address (docs/data.md#what-a-site-has-already)"


def _bytes_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _mirrored(url: str, mirrors: Mapping[str, str]) -> str:
    """The address with the longest begin that has a mirror replaced by it."""
    begin = max((one for one in mirrors if url.startswith(one)), key=len, default="")
    return mirrors.get(begin, "") + url.removeprefix(begin)


def _open_file_system(url: str, anonymous: bool) -> tuple[Any, str]:
    """The file system of an address, and the path in it.

    Without s3fs, a public bucket is read over https, which is the same request.
    """
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    protocol = url.partition("://")[0]
    options: dict[str, Any] = {"anon": anonymous} if protocol == "s3" else {}
    try:
        if protocol == "s3" and anonymous and not _has_s3fs():
            bucket, _, key = url.removeprefix("s3://").partition("/")
            url, protocol = f"https://{bucket}.s3.amazonaws.com/{key}", "https"
            options = {}
        if protocol in ("http", "https"):
            from aiohttp import ClientTimeout

            timeout = ClientTimeout(total=None, sock_connect=_SILENCE_S, sock_read=_SILENCE_S)
            options = {"client_kwargs": {"timeout": timeout, "trust_env": True}}
        file_system, path = url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        from fsspec.registry import known_implementations  # type: ignore[import-untyped]

        package = {"http": "aiohttp", "https": "aiohttp", "s3": "s3fs", "hf": "huggingface_hub"}
        fix = f"`pip install {package[protocol]}`" if protocol in package else _OTHER_ADDRESS
        hint = known_implementations.get(protocol, {}).get("err", str(error))
        raise DataError(f"{url} cannot be opened here: {hint}; {fix}") from error
    return file_system, str(path)


def _has_s3fs() -> bool:
    from importlib.util import find_spec

    return find_spec("s3fs") is not None


def _over_http(file_system: Any) -> bool:
    return "http" in str(file_system.protocol)


def _inspect(url: str, file_system: Any, path: str, published: PublishedFile) -> _Remote:
    """Ask what is at an address; refuses what has another size than the published one."""
    url = path if _over_http(file_system) else file_system.unstrip_protocol(path)
    remote = _Remote(url, file_system, path, published.size, "", published.sha256)
    for number in range(_TRIES):
        try:
            if _over_http(file_system):
                # Not by HEAD: some servers answer it differently.
                with _open_http(remote, 0) as stream:
                    headers = stream.r.headers
                    text = headers.get("Content-Length")
                    size = None if text is None else int(text)
                    version, sha256 = headers.get("ETag") or headers.get("Last-Modified", ""), None
            else:
                info = file_system.info(path)
                size, sha256 = info.get("size"), getattr(info.get("lfs"), "sha256", None)
                keys = ("ETag", "etag", "blob_id", "LastModified", "mtime")
                version = str(next((info[key] for key in keys if info.get(key)), ""))
            break
        except Exception as error:  # each fsspec file system raises errors of its own
            if refusal := _refusal(url, error):
                raise refusal from error
            if number == _TRIES - 1:
                raise _unreachable(url, error) from error
            time.sleep(_PAUSE_S * 2**number)
    if None not in (size, published.size) and size != published.size:
        raise DataError(
            f"{url} has {size:,} bytes, and {published.size:,} are published: other data, or cut "
            f"off; {_OTHER_ADDRESS}"
        )
    found = published.size if size is None else size
    return _Remote(url, file_system, path, found, version, published.sha256 or sha256)


def _open_http(remote: _Remote, offset: int) -> Any:
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={offset}-"} if offset else {})
    # With a size, fsspec asks for none; blocks of 0 are one answer, read as it comes.
    return remote.file_system.open(remote.path, block_size=0, size=1, headers=headers)


@contextlib.contextmanager
def _reader(remote: _Remote, offset: int) -> Iterator[tuple[Any, int]]:
    """Open an address from `offset`; yields the stream and where it begins, 0 if the server cannot.

    Raises:
        DataError: there is another file now than at the begin.
    """
    if not _over_http(remote.file_system):
        with remote.file_system.open(remote.path, "rb", block_size=_BLOCK) as stream:
            stream.seek(offset)
            yield stream, offset
        return
    with _open_http(remote, offset) as stream:
        answer = stream.r
        partial = answer.status == 206
        total = answer.headers.get("Content-Range" if partial else "Content-Length", "")
        version = answer.headers.get("ETag") or answer.headers.get("Last-Modified", "")
        if version != remote.version or str(remote.size) not in (total.rpartition("/")[2], "None"):
            raise DataError(f"{remote.url} was changed while it was fetched; fetch it again")
        yield stream, offset if partial else 0


def _append(remote: _Remote, out: BinaryIO, begin: int, on_bytes: Callable[[int], None]) -> int:
    """Append what is missing of an address whose bytes begin at `begin`; returns where they end."""
    done, failures = max(0, out.seek(0, os.SEEK_END) - begin), 0
    if remote.size is not None:
        done = min(done, remote.size)
    while remote.size is None or done < remote.size:
        before = done
        try:
            with _reader(remote, done) as (stream, first):
                if first < done:  # the server cannot continue
                    done = first
                    out.truncate(begin + done)
                while chunk := stream.read(_CHUNK):
                    _write(out, chunk)
                    done += len(chunk)
                    on_bytes(begin + done)
            if remote.size is None:
                break
            if done > remote.size:
                raise DataError(f"{remote.url} sends more than its {remote.size:,} bytes; {_AGAIN}")
            if done < remote.size:
                raise ConnectionError(f"sent {done:,} of {remote.size:,} bytes")
        except SlurmllmError:
            raise
        except Exception as error:  # each fsspec file system raises errors of its own
            if refusal := _refusal(remote.url, error):
                raise refusal from error
            failures = 0 if done > before else failures + 1
            if failures >= _TRIES:
                raise _unreachable(remote.url, error, done) from error
            time.sleep(_PAUSE_S * 2**failures)
    return begin + done


def _write(out: BinaryIO, chunk: bytes) -> None:
    """Write to the disk; its errors are not those of the connection."""
    try:
        out.write(chunk)
        out.flush()
    except OSError as error:
        raise _storage_error(Path(out.name).parent, error) from error


def _digest(path: Path, begin: int, end: int, on_bytes: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        stream.seek(begin)
        while begin < end and (chunk := stream.read(min(_CHUNK, end - begin))):
            digest.update(chunk)
            begin += len(chunk)
            on_bytes(begin)
    return digest.hexdigest()


def _refusal(url: str, error: BaseException) -> SlurmllmError | None:
    """The error of an address that will not answer otherwise later; None of a broken connection."""
    response = getattr(error, "response", None)
    status = getattr(error, "status", None) or getattr(response, "status_code", None)
    if status in (401, 403) or isinstance(error, PermissionError):
        return DataError(
            f"{url} may not be read ({status or 'access denied'}): log in (Hugging Face: accept the "
            "terms on the page of the data set or model, and set HF_TOKEN; S3: `pip install s3fs` "
            f"and credentials), or {_OTHER_ADDRESS}"
        )
    if status in (404, 410) or (isinstance(error, FileNotFoundError) and error.__cause__ is None):
        return DataError(f"{url} does not exist (404); {_OTHER_ADDRESS}")
    if isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429):
        return DataError(f"{url} is refused ({status}): {error}; {_OTHER_ADDRESS}")
    return None


def _unreachable(url: str, error: BaseException, done: int = 0) -> InfrastructureError:
    cause = str(error) or type(error).__name__
    there = f" {done:,} bytes are kept and continued." if done else ""
    return InfrastructureError(
        f"{url}: the connection failed {_TRIES} times: {cause}.{there} {_AGAIN[0].upper()}"
        f"{_AGAIN[1:]} later; if this machine has no way to the internet, set HTTPS_PROXY, or "
        f"{_OTHER_ADDRESS}"
    )


def _storage_error(folder: Path, error: OSError) -> StorageError:
    fix = "check the folder, or choose another one with --to"
    if error.errno in _NO_ROOM:
        fix = f"free space, then {_AGAIN}: what has arrived is kept"
    return StorageError(f"cannot write to {folder}: {reason(error)}; {fix}")


@contextlib.contextmanager
def _locked(folder: Path, on_note: Callable[[str], None]) -> Iterator[None]:
    """Hold the folder's lock; waits for another fetch. Without locks, as on some file systems, two
    fetches at once would spoil each other's part: then it is refused by the verification."""
    with open_lock(folder / ".fetch.lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_note(f"waiting for another fetch into {folder}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise
        yield
