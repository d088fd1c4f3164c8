"""Published data sets, downloaded: resumed where they broke off, verified, renamed when whole.

A file is written as `.<name>.<version>.part` and renamed when all its bytes have arrived and fit
the published size and sum: a file of the final name is whole. Others may not write to the folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal, NamedTuple

from slurmllm.core.config.data_sources import MANIFEST, DataSource, FileName, PublishedFile, inside
from slurmllm.core.config.variables import hide_passwords
from slurmllm.core.display.progress import OnNote, OnProgress, OnStage
from slurmllm.core.errors import DataError, StorageError
from slurmllm.core.run.records import Record
from slurmllm.core.run.rundir import fsync_dir, write_atomic
from slurmllm.core.run.safe_files import (
    make_own_folder,
    open_lock,
    open_regular,
    open_update,
    os_error_text,
)
from slurmllm.data.corpus.addresses import AGAIN, MIRROR, Address, address_of, retry, version_of
from slurmllm.data.corpus.build import build_corpus
from slurmllm.data.corpus.inputs import find_inputs
from slurmllm.data.corpus.options import ReadOptions
from slurmllm.data.corpus.work_folder import flock
from slurmllm.data.sources.base import short_digest
from slurmllm.data.tokenizer import tokenizer_of_vocabulary

_CHUNK = 1 << 22  # bytes that are read at a time
_BLOCK = 1 << 25  # bytes of one request, if a file system reads by requests
_WORKERS = 4
_TOLERANCE = 2  # times the gigabytes of a data set
_UNKNOWN_BYTES = 10_000_000_000  # of a data set of which no size is known


class _Opened(NamedTuple):
    """An open address."""

    stream: Any
    first: int  # the byte that the stream begins with: 0 if the server cannot continue
    size: int | None  # of the whole file
    version: str  # changes with the content, as far as the server says
    sha256: str | None  # as the server states it


class _Origin(Record):
    url: str
    size_bytes: int
    sha256: str
    # What was published, and compared with the bytes.
    compared: Literal["sha256", "size"] | None = None


class FetchedFile(Record):
    """A file of a data set."""

    name: FileName
    size_bytes: int
    origins: tuple[_Origin, ...]


class _Manifest(Record):
    """`fetched.json`."""

    name: str
    parts: int | None
    files: tuple[FetchedFile, ...]


@dataclass
class Fetch:
    """A download of one data set into a folder.

    Attributes:
        is_earlier: Whether the files are those of an earlier fetch, and were not read again.
    """

    name: str
    source: DataSource
    folder: Path
    # Begin of an address → what replaces it.
    mirrors: Mapping[str, str] = field(default_factory=dict)
    parts: int | None = None  # fetch only so many files of each pattern
    group: str | None = None  # whose members are trusted
    on_progress: OnStage = lambda stage, done, total: None
    on_note: OnNote = lambda note: None
    is_earlier: bool = False
    _num_bytes: int = 0

    def run(self) -> Sequence[FetchedFile]:
        """Fetch what is missing and build the corpus; return the files.

        Raises:
            DataError: nothing is at an address, it may not be read, or other data are there.
            InfrastructureError: the connection breaks again and again.
            StorageError: the disk is full or refuses.
        """
        try:
            make_own_folder(self.folder, self.group)
            with open_lock(self.folder / ".fetch.lock") as lock:
                try:
                    flock(lock)  # without locks, the verification refuses what two wrote
                except BlockingIOError:
                    self.on_note(f"waiting for another fetch into {self.folder}")
                    flock(lock, wait=True)
                files = self._fetched()
                self.is_earlier = files is not None
                if files is None:
                    if self.parts is None:
                        present_bytes = sum(path.stat().st_size for path in self.folder.iterdir())
                        _require_space(
                            self.folder, int(1e9 * (self.source.gigabytes or 0)) - present_bytes
                        )
                    files = [file for each in self.source.files for file in self._download(each)]
                    if self.source.corpus and self.source.build and self._manifest.exists():
                        # Built from the files of an earlier fetch, with other --parts.
                        (self.folder / self.source.corpus).unlink(missing_ok=True)
                    _Manifest(name=self.name, parts=self.parts, files=files).save(self._manifest)
                self._make_inputs([file.name for file in files])
        except OSError as error:
            raise _storage_error(self.folder, error) from error
        return files

    @property
    def _manifest(self) -> Path:
        return self.folder / MANIFEST

    def _fetched(self) -> Sequence[FetchedFile] | None:
        """Return the files of an earlier fetch; None if it was another one or a file has gone."""
        if not os.path.lexists(self._manifest):
            return None
        try:
            manifest = _Manifest.load(self._manifest, trusted=True, group=self.group)
            sizes = [(self.folder / file.name).stat().st_size for file in manifest.files]
        except FileNotFoundError:
            return None
        except StorageError as error:
            self.on_note(f"fetching again: {error}")
            return None
        names = {file.name for file in manifest.files}
        sums = {origin.sha256 for file in manifest.files for origin in file.origins}
        has_all = len(names) >= len(self.source.files) and all(
            ("*" in file.url or (file.name or PurePosixPath(file.url).name) in names)
            and file.sha256 in (None, *sums)
            for file in self.source.files
        )
        is_same = manifest.parts == self.parts
        is_same &= sizes == [file.size_bytes for file in manifest.files]
        return manifest.files if has_all and is_same else None

    def _download(self, file: PublishedFile) -> Iterator[FetchedFile]:
        """Fetch a file, or all of a pattern, each under its own name or joined."""
        url = _mirrored(file.url, self.mirrors)
        address = address_of(url, anonymous=url == file.url)
        url = hide_passwords(url)
        if address.url != url:
            self.on_note(f"{url} is read as {address.url}, because s3fs is not installed")
        addresses = [address]
        if "*" in PurePosixPath(address.path).name:
            system = address.file_system
            paths = sorted(map(str, retry(url, partial(system.glob, address.path))))
            if not paths:
                raise DataError(f"{url}: no file of this pattern; {MIRROR}")
            addresses = [
                Address(hide_passwords(str(system.unstrip_protocol(path))), system, path)
                for path in paths[: self.parts]
            ]
        if file.name is not None:
            yield self._write(file.name, addresses, file)
            return
        for address in addresses:
            try:
                name = inside(PurePosixPath(address.path).name)
            except ValueError as error:
                raise DataError(
                    f"{address.url}: its name {error}; set the file's `name`"
                ) from error
            yield self._write(name, [address], file)

    def _states(self, addresses: Sequence[Address], published: PublishedFile) -> list[_Opened]:
        """Ask for sizes and versions; DataError if another size is published."""

        def state_of(address: Address) -> _Opened:
            with _open(address, 0) as opened:
                return opened

        states = []
        for address in addresses:
            state = retry(address.url, partial(state_of, address))
            if published.size is not None and state.size not in (None, published.size):
                raise DataError(
                    f"{address.url} has {state.size:,} bytes, and {published.size:,} are published:"
                    f" other data, or cut off; {MIRROR}"
                )
            states.append(state._replace(size=published.size) if state.size is None else state)
        total = sum(state.size or 0 for state in states)
        if published.size is not None or self.source.gigabytes is None or total <= self._budget:
            return states
        raise DataError(
            f"{addresses[0].url} has {total:,} bytes, more than twice the `gigabytes` of the data "
            f"set; set the file's `size` if that is right, or {MIRROR}"
        )

    @property
    def _budget(self) -> int:
        """Bytes that may still come from servers that state no size."""
        gigabytes = self.source.gigabytes
        limit = _UNKNOWN_BYTES if gigabytes is None else int(_TOLERANCE * 1e9 * gigabytes)
        return max(0, limit - self._num_bytes)

    def _write(
        self, name: str, addresses: Sequence[Address], published: PublishedFile
    ) -> FetchedFile:
        path = self.folder / name
        make_own_folder(path.parent, self.group)
        states = self._states(addresses, published)
        total = sum(state.size or 0 for state in states)
        key = short_digest(repr([(state.size, state.version) for state in states]))[:8]
        part_file = path.with_name(f".{path.name}.{key}.part")
        for other in path.parent.glob(f".{path.name}.*.part"):
            if other != part_file:  # of another version
                other.unlink()
        is_present = path.exists() and all(state.size is not None for state in states)
        if is_present and (num_bytes := path.stat().st_size) != total:
            raise DataError(
                f"{path} has {num_bytes:,} bytes, and {addresses[0].url} has {total:,}: another "
                "version; remove the file to fetch it again"
            )
        if not is_present:
            present_bytes = part_file.lstat().st_size if os.path.lexists(part_file) else 0
            _require_space(self.folder, total - present_bytes)
        begin = 0
        origins = []
        partial_file = None if is_present else os.fdopen(open_update(part_file), "r+b")
        with partial_file or open_regular(path) as stream:
            for address, state in zip(addresses, states, strict=True):
                end = begin + (state.size or 0)
                try:
                    if partial_file is not None:
                        end = self._append(
                            address,
                            state,
                            partial_file,
                            begin,
                            lambda done: self.on_progress(f"fetching {name}", done, total),
                        )
                    origins.append(_compared(address, state, published, stream, (begin, end)))
                except DataError as error:
                    if partial_file is None:
                        raise DataError(f"{error}; remove {path}, then {AGAIN}") from error
                    part_file.unlink()
                    raise DataError(
                        f"{error}; the download was deleted; {AGAIN}, or {MIRROR}"
                    ) from error
                begin = end
            if partial_file is not None:
                os.fsync(partial_file.fileno())
        if partial_file is not None:
            part_file.replace(path)
            fsync_dir(path.parent)
        self._num_bytes += begin
        return FetchedFile(name=name, size_bytes=begin, origins=origins)

    def _append(
        self,
        address: Address,
        state: _Opened,
        out: BinaryIO,
        begin: int,
        on_bytes: OnProgress,
    ) -> int:
        """Append what is missing of an address whose bytes begin at `begin`; return where they end.

        No more is written than was announced.
        """
        limit = self._budget if state.size is None else state.size
        # Without a size, nothing says where to continue.
        done = min(max(0, out.seek(0, os.SEEK_END) - begin), state.size or 0)
        if state.size is None:
            out.truncate(begin)

        def read() -> None:
            nonlocal done
            with _open(address, done) as opened:
                if opened.size not in (None, state.size) or opened.version != state.version:
                    raise DataError(f"{address.url} was changed while it was fetched")
                if opened.first < done:
                    done = 0
                    out.truncate(begin)
                out.seek(begin + done)
                while chunk := opened.stream.read(_CHUNK):
                    if done + len(chunk) > limit:
                        raise DataError(
                            f"{address.url} sends more than {limit:,} bytes, and no more are "
                            "published or announced; set the file's `size` if it is larger"
                        )
                    try:
                        out.write(chunk)
                        out.flush()
                    except OSError as error:  # of the disk, not of the connection
                        raise _storage_error(self.folder, error) from error
                    done += len(chunk)
                    on_bytes(begin + done)
            if state.size not in (None, done):
                raise ConnectionError(f"sent {done:,} of {state.size:,} bytes")

        if done != state.size:
            retry(address.url, read, lambda: done)
        return begin + done

    def _make_inputs(self, names: list[str]) -> None:
        """Build the corpus of texts, and a tokenizer.json of two vocabulary files, if missing."""
        source = self.source
        folder = self.folder
        if source.corpus and source.build and not (out := folder / source.corpus).is_file():
            build_corpus(
                find_inputs([str(folder / n) for n in names if not n.startswith("tokenizer")]),
                out,
                ReadOptions("document", **source.build.model_dump()),
                workers=min(len(os.sched_getaffinity(0)), _WORKERS),
                on_progress=self.on_progress,
                on_note=self.on_note,
            )
        if source.tokenizer and not (out := folder / source.tokenizer).is_file():
            vocab, merges = (
                next(folder / name for name in names if name.endswith(end))
                for end in ("vocab.json", "merges.txt")
            )
            write_atomic(out, tokenizer_of_vocabulary(vocab, merges))


def _mirrored(url: str, mirrors: Mapping[str, str]) -> str:
    """Return an address with the longest begin that has a mirror replaced by it."""
    begin = max(filter(url.startswith, mirrors), key=len, default="")
    return mirrors.get(begin, "") + url.removeprefix(begin)


@contextlib.contextmanager
def _open(address: Address, offset: int) -> Iterator[_Opened]:
    file_system = address.file_system
    path = address.path
    if "http" not in str(file_system.protocol):
        info = file_system.info(path)
        version = version_of(info)
        with file_system.open(path, "rb", block_size=_BLOCK) as stream:
            stream.seek(offset)
            sha256 = getattr(info.get("lfs"), "sha256", None)
            yield _Opened(stream, offset, info.get("size"), version, sha256)
        return
    # The size is that of the answer: some servers answer HEAD, which fsspec asks without a size,
    # differently. With blocks of 0 an answer is read as it comes.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={offset}-"} if offset else {})
    with file_system.open(path, block_size=0, size=1, headers=headers) as stream:
        answer = stream.r
        encoding = answer.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise DataError(
                f"{address.url}: the server sends it encoded ({encoding[:20]}), without being asked"
                f" to: neither size nor sum can be compared; {MIRROR}"
            )
        continues = answer.status == 206
        length = answer.headers.get("Content-Range" if continues else "Content-Length", "")
        size = length.rpartition("/")[2]
        version = answer.headers.get("ETag") or answer.headers.get("Last-Modified", "")
        if continues and not length.startswith(f"bytes {offset}-"):
            raise DataError(
                f"{address.url}: asked for bytes from {offset:,} on, the server answers with "
                f"{length[:60]!r}"
            )
        first = offset if continues else 0
        yield _Opened(stream, first, int(size) if size.isdecimal() else None, version, None)


def _compared(
    address: Address,
    state: _Opened,
    published: PublishedFile,
    stream: BinaryIO,
    span: tuple[int, int],
) -> _Origin:
    """Return the record of an address's bytes; DataError if another sum is published."""
    begin, end = span
    digest = hashlib.sha256()
    stated = published.sha256 or state.sha256
    stream.seek(begin)
    while chunk := stream.read(min(_CHUNK, end - stream.tell())):
        digest.update(chunk)
    sha256 = digest.hexdigest()
    if stated not in (None, sha256):
        raise DataError(
            f"{address.url}: its sha256 is {sha256}, and {stated} is published: damaged on the way,"
            " or other data"
        )
    return _Origin(
        url=address.url,
        size_bytes=span[1] - span[0],
        sha256=sha256,
        compared="sha256" if stated else "size" if published.size else None,
    )


def _require_space(folder: Path, missing_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if missing_bytes > free:
        raise StorageError(
            f"{folder} needs {missing_bytes / 1e9:,.3g} GB more, and has {free / 1e9:,.3g} GB free;"
            " free space, or choose another folder with --to"
        )


def _storage_error(folder: Path, error: OSError) -> StorageError:
    fix = "check the folder, or choose another one with --to"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        fix = f"free space, then {AGAIN}: what has arrived is kept"
    return StorageError(f"cannot write to {folder}: {os_error_text(error)}; {fix}")
