"""The archives of staged environments, in a folder next to the runs, which all runs share.

`<fingerprint>.json` (`EnvironmentManifest`) names the archive `<fingerprint>-<token>.tar.zst`.
An environment is code: an archive is used only if its own user, or a member of
`cluster.trusted_group`, has written it, and its checksum is that of the manifest.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, cast

from slurmllm.errors import StorageError
from slurmllm.graphs.archive import checksum
from slurmllm.run.artifact_records import EnvironmentManifest
from slurmllm.run.rundir import fsync_dir
from slurmllm.run.safe_files import open_lock, open_trusted, os_error_text, own_folder, unpack_tar
from slurmllm.staging.contents import PYTHON, Contents, StagedFile, environment_contents

MAX_AGE_S = 30 * 86400.0  # of an archive that no attempt has used
MAX_BYTES = 50_000_000_000  # of all archives; the one in use is kept
_CODEC = "zstd"

log = logging.getLogger(__name__)


def ensure_archive(
    runs: Path, group: str | None = None, stop: Callable[[], bool] = lambda: False
) -> Path:
    """Return the manifest of this interpreter's environment, packed if no earlier attempt has.

    `stop` is polled while packing; True ends it with a StorageError.
    """
    folder = own_folder(runs, ".environments", group)
    try:
        contents = environment_contents()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{contents.fingerprint}.json"
        with _locked(folder / ".lock", stop):
            if not _is_complete(path, group):
                _pack(contents, path, stop)
            os.utime(path)  # by it the age of an archive is known
            _remove_old(folder, keep=path)
        return path
    except OSError as error:
        raise StorageError(
            f"cannot pack the Python environment into {folder}: {os_error_text(error)}; free space "
            "there, or set cluster.stage_environment=false"
        ) from error


@contextmanager
def _locked(path: Path, stop: Callable[[], bool]) -> Iterator[None]:
    """Let one of several runs that start at a time pack; without locks each of them packs."""
    with open_lock(path) as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if stop():
                    raise OSError(0, "stopped") from None
                time.sleep(0.2)
            except OSError:  # a file system without locks
                break
        yield


def _is_complete(path: Path, group: str | None) -> bool:
    try:
        manifest = EnvironmentManifest.load_trusted(path, group)
        with open_trusted(path.with_name(manifest.archive), group) as stream:
            return os.fstat(stream.fileno()).st_size == manifest.archive_bytes
    except (StorageError, OSError):
        return False


def _pack(contents: Contents, path: Path, stop: Callable[[], bool]) -> None:
    import pyarrow as pa

    compressed = pa.Codec.is_available(_CODEC)
    started = time.monotonic()
    token = secrets.token_hex(4)
    archive = path.with_name(f"{path.stem}-{token}.tar{'.zst' if compressed else ''}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    temporary = path.with_name(f".{archive.name}")
    try:
        with os.fdopen(os.open(temporary, flags, 0o644), "wb") as stream:
            # A duplicate: pyarrow closes its file.
            target = os.fdopen(os.dup(stream.fileno()), "wb")
            _write_tar(contents.files, target, compressed, stop)
            os.fsync(stream.fileno())
        # A file that was changed meanwhile would make an environment that never existed.
        if changed := contents.difference(environment_contents()):
            raise OSError(0, f"{changed} was changed while the environment was packed")
        size, digest = temporary.stat().st_size, checksum(temporary)
        temporary.replace(archive)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_dir(path.parent)
    # The manifest makes the archive the current one.
    EnvironmentManifest(
        **{name: value for name, value in vars(contents).items() if name != "files"},
        fingerprint=contents.fingerprint,
        archive=archive.name,
        archive_bytes=size,
        archive_sha256=digest,
        unpacked_bytes=contents.unpacked_bytes,
        num_files=len(contents.files),
        python=PYTHON,
    ).save(path)
    figures = len(contents.files), time.monotonic() - started, archive, size / 1e6
    log.info("environment: %d files packed in %.1f s into %s (%.0f MB)", *figures)


def _write_tar(
    files: tuple[StagedFile, ...], target: BinaryIO, compressed: bool, stop: Callable[[], bool]
) -> None:
    import pyarrow as pa

    stream: pa.NativeFile = pa.PythonFile(target, "w")
    if compressed:
        stream = pa.CompressedOutputStream(stream, _CODEC)
    binary = cast(BinaryIO, stream)
    with stream, tarfile.open(fileobj=binary, mode="w|", format=tarfile.GNU_FORMAT) as tar:
        for file in files:
            if stop():
                raise OSError(0, "stopped")
            info = tarfile.TarInfo(file.name)
            info.mode, info.mtime, info.size = file.mode, file.mtime, file.size
            if file.link:
                info.type, info.linkname, info.size = tarfile.SYMTYPE, file.link, 0
                tar.addfile(info)
                continue
            try:
                source = file.source.open("rb") if file.content is None else BytesIO(file.content)
                with source:
                    tar.addfile(info, source)
            except FileNotFoundError:
                if not file.name.endswith(".pyc"):  # a cache, which may vanish
                    raise


def unpack(stream: BinaryIO, name: str, folder: Path) -> None:
    """Unpack an archive that has been checked; its `name` has the compression."""
    import pyarrow as pa  # a third of a second, and most clusters stage no environment

    try:
        with stream:
            source: pa.NativeFile | BinaryIO = stream
            if name.endswith(".zst"):
                source = pa.CompressedInputStream(pa.PythonFile(stream, "r"), _CODEC)
            with tarfile.open(fileobj=cast(BinaryIO, source), mode="r|") as tar:
                unpack_tar(tar, folder)
    except (tarfile.TarError, EOFError) as error:
        raise OSError(0, f"the archive is damaged: {error}") from error


def _remove_old(folder: Path, keep: Path) -> None:
    """Remove archives by age and total size, and files that no manifest names."""
    manifests: dict[Path, EnvironmentManifest] = {}
    used: list[tuple[float, Path]] = []
    for path in folder.glob("*.json"):
        with suppress(OSError, StorageError):
            manifests[path] = EnvironmentManifest.load(path)
            used.append((path.stat().st_mtime, path))
    total = sum(manifest.archive_bytes for manifest in manifests.values())
    for used_at, path in sorted(used):
        if path != keep and (time.time() - used_at > MAX_AGE_S or total > MAX_BYTES):
            total -= manifests[path].archive_bytes
            archive = path.with_name(manifests[path].archive)
            with suppress(OSError):
                path.unlink()  # first: a manifest without its archive would be packed again
                archive.unlink()
                log.info("environment: removed the unused archive %s", archive)
    names = {manifest.archive for manifest in manifests.values()}
    for path in folder.glob("*.tar*"):
        with suppress(OSError):
            if path.name not in names and time.time() - path.stat().st_mtime > 86400.0:
                path.unlink()


def free_for(folder: Path, needed: int) -> None:
    """Raise an OSError if a disk has no room for `needed` bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            28, f"{folder} has {free / 1e9:.1f} GB free, the environment needs {needed / 1e9:.1f}"
        )
