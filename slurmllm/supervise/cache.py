"""The compiled graphs of a run: packed once by precompile, put onto every node's own disk.

A cache folder that came from an archive carries the archive's checksum in `.archive`; it is
unpacked beside its final name and renamed, so that a folder is whole or absent.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Literal

from slurmllm.backends.environment import load_environment
from slurmllm.errors import NodeError, StorageError
from slurmllm.records import GraphFile, GraphManifest
from slurmllm.rundir import RunDir, fsync_dir

_MARKER = ".archive"


def fresh_cache(cache: Path) -> None:
    """Make an empty cache folder, whatever was there.

    Raises:
        NodeError: the node-local disk refuses.
    """
    try:
        if cache.exists():
            shutil.rmtree(cache)
        cache.mkdir(parents=True)
    except OSError as error:
        raise NodeError(
            f"cannot make {cache} on {os.uname().nodename}: {error.strerror or error}; "
            "is cluster.node_local a folder that you may write to on every node?"
        ) from error


def pack(cache: Path, run: RunDir, backend: str, cold_first_step_s: float) -> GraphManifest:
    """Archive a filled cache into the run directory; the manifest comes last.

    Raises:
        StorageError: the shared file system refuses.
    """
    environment = load_environment(backend)
    files = sorted(path for path in cache.rglob("*") if path.is_file() and path.name != _MARKER)
    try:
        run.graphs.mkdir(parents=True, exist_ok=True)
        # Not compressed: the files are small beside a checkpoint, and unpacking is on the way
        # to the first step of every attempt.
        descriptor, name = tempfile.mkstemp(prefix=".graphs.", dir=run.graphs)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                with tarfile.open(fileobj=stream, mode="w") as archive:
                    for path in files:
                        archive.add(path, arcname=str(path.relative_to(cache)), recursive=False)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(run.graphs_archive)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_dir(run.graphs)
        manifest = GraphManifest(
            complete=True,
            backend=backend,
            versions=environment.versions(),
            graphs=environment.count_graphs(cache),
            archive_bytes=run.graphs_archive.stat().st_size,
            archive_sha256=checksum(run.graphs_archive),
            cold_first_step_s=cold_first_step_s,
            files=tuple(
                GraphFile(path=str(path.relative_to(cache)), bytes=path.stat().st_size)
                for path in files
            ),
        )
    except OSError as error:
        raise StorageError(
            f"cannot archive the compiled graphs into {run.graphs}: {error.strerror or error}; "
            "free space and `slurmllm resume`"
        ) from error
    manifest.save(run.graphs_manifest)
    return manifest


def checksum(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def broadcast_path(cache: Path) -> Path:
    """Where the archive lies on a node after the broadcast, beside the cache folder.

    Not inside it: sbcast makes no folders.
    """
    return cache.with_name(f"{cache.name}.tar")


def put_in_place(
    cache: Path, run: RunDir, manifest: GraphManifest
) -> Literal["present", "broadcast", "shared"]:
    """Make sure that this node's cache folder holds the archive's graphs.

    Returns:
        Where they came from: this disk already, the broadcast archive, the shared one.

    Raises:
        NodeError: neither archive is whole, or the node-local disk refuses.
    """
    try:
        with cache.with_name(f"{cache.name}.lock").open("w") as lock:
            # The launchers of --local share one disk: one unpacks, the others find it present.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _marked(cache) == manifest.archive_sha256:
                return "present"
            return _unpack(cache, run, manifest)
    except OSError as error:
        raise NodeError(
            f"cannot unpack the compiled graphs into {cache} on {os.uname().nodename}: "
            f"{error.strerror or error}; free space there or set cluster.node_local"
        ) from error


def _unpack(cache: Path, run: RunDir, manifest: GraphManifest) -> Literal["broadcast", "shared"]:
    source = broadcast_path(cache)
    origin: Literal["broadcast", "shared"] = "broadcast"
    if not (source.is_file() and checksum(source) == manifest.archive_sha256):
        source, origin = run.graphs_archive, "shared"
        if not (source.is_file() and checksum(source) == manifest.archive_sha256):
            raise NodeError(
                f"{source} does not match its manifest; remove {run.graphs_manifest} and "
                "`slurmllm resume` to compile the graphs again"
            )
    unpacked = Path(tempfile.mkdtemp(prefix=f".{cache.name}.", dir=cache.parent))
    try:
        with tarfile.open(source) as archive:
            archive.extractall(unpacked, filter="data")
        (unpacked / _MARKER).write_text(manifest.archive_sha256, encoding="utf-8")
        if cache.exists():
            shutil.rmtree(cache)
        unpacked.replace(cache)
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)
    return origin


def _marked(cache: Path) -> str | None:
    marker = cache / _MARKER
    return marker.read_text(encoding="utf-8") if marker.is_file() else None
