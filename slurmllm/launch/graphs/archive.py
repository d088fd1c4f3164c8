"""The archive of compiled graphs: packed by precompile, installed on every node's own disk.

A cache folder that came from an archive holds the archive's checksum in `.archive`; it is unpacked
next to its final name and renamed: it is either complete or absent. An archive is never changed:
new graphs make another one, and the manifest, which names the current archive, is replaced last.

Graphs are code: an archive is used only if its own user, or a member of `cluster.trusted_group`
(`group` below), has written it, and its checksum is that of the descriptor that is then unpacked.
On a node it is unpacked in a folder that only the user may enter; whatever is complete there is
this user's own, so its files are not checked again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Literal

from slurmllm.core.errors import NodeError, RunError, StorageError
from slurmllm.core.run.artifact_records import GraphFile, GraphManifest, GraphState
from slurmllm.core.run.records import Lines, Versions
from slurmllm.core.run.rundir import RunDir, fsync_dir, storage_errors, write_atomic
from slurmllm.core.run.safe_files import (
    check_private_folder,
    open_lock,
    open_trusted,
    os_error_text,
    read_limited,
)
from slurmllm.core.slurm.client import Names
from slurmllm.train.backends.environment import load_environment, node_disk

_MARKER = ".archive"
_MAX_GRAPHS = 4  # named in one message


def empty_cache(cache: Path) -> None:
    """Make an empty cache folder, removing an old one; NodeError if the node's disk refuses."""
    with node_disk(f"make {cache}"):
        check_private_folder(cache.parent)
        if cache.exists():
            shutil.rmtree(cache)
        cache.mkdir()


def empty_cache_once(cache: Path, attempt: str) -> None:
    """Empty a node's cache, which the launchers of --local share, once in an attempt."""
    with node_disk(f"empty {cache}"), _locked(cache):
        if _read_marker(cache) != attempt:
            empty_cache(cache)
            (cache / _MARKER).write_text(attempt, "utf-8")


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """Lock a cache, in a folder that only this user may enter, against the other launchers."""
    check_private_folder(cache.parent)
    with open_lock(cache.with_name(f"{cache.name}.lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def pack_archive(
    cache: Path,
    run: RunDir,
    backend: str,
    cold_first_step_s: float,
    *,
    versions: Versions,
    compile_s: float = 0.0,
    fingerprint: str | None = None,
    expected: bool = True,
    missing_nodes: Names = (),
) -> GraphManifest:
    """Archive the compiled graphs of a cache, which are those of all nodes; write the manifest.

    `versions` are of this node, with what its graphs are made for; `expected`: whether an archive
    without any graph is incomplete.
    """
    graphs = load_environment(backend).graphs(cache)
    with archiving(run):
        shutil.rmtree(run.graph_log("").parent, ignore_errors=True)
        states = []
        for graph in graphs:
            log = None
            if graph.log is not None:  # the node's disk may be gone when the user reads it
                copy = run.graph_log(graph.name)
                write_atomic(copy, graph.log.read_text("utf-8", "replace"))
                log = str(copy.relative_to(run.path))
            states.append(GraphState.model_validate({**graph._asdict(), "log": log}))
        uncompiled = {graph.folder for graph in graphs if graph.state != "compiled"}
        archive = run.graphs_archive()
        files = write_archive(cache, archive, archive_files(cache, uncompiled))
        compiled = len(graphs) - len(uncompiled)
        manifest = GraphManifest(
            complete=not uncompiled and not missing_nodes and (compiled > 0 or not expected),
            backend=backend,
            versions=dict(versions),
            graphs=compiled,
            archive=archive.name,
            archive_bytes=archive.stat().st_size,
            archive_sha256=checksum(archive),
            cold_first_step_s=cold_first_step_s,
            compile_s=compile_s,
            files=files,
            states=tuple(states),
            missing_nodes=tuple(missing_nodes),
            fingerprint=fingerprint or "",
        )
    # The manifest makes the archive current; the old ones go after it.
    manifest.save(run.graphs_manifest)
    remove_old_archives(run, manifest.archive)
    return manifest


def remove_old_archives(run: RunDir, current: str) -> None:
    for old in run.graphs.glob("graphs*.tar"):
        if old.name != current:
            old.unlink(missing_ok=True)


def submit_graphs(cache: Path, run: RunDir, node: str, without: Iterable[str] = ()) -> None:
    """Leave a node's graphs for the first precompile node, except folders that another submits."""
    with archiving(run):
        write_archive(cache, run.graphs_of_node(node), archive_files(cache, without))


def collect_graphs(
    cache: Path,
    run: RunDir,
    nodes: Names,
    has_failed: Callable[[str], bool],
    group: str | None = None,
) -> list[str]:
    """Unpack the graphs that other nodes submit; returns the nodes that submitted nothing.

    There is no time limit, because compilers take hours, and not equally long on all nodes:
    `has_failed` returns whether a node will submit nothing.
    """
    missing = []
    for node in nodes:
        source = run.graphs_of_node(node)
        while not source.is_file() and not has_failed(node):
            time.sleep(0.5)
        if not source.is_file():
            missing.append(node)
            continue
        with archiving(run):
            with open_trusted(source, group) as stream, tarfile.open(fileobj=stream) as archive:
                # Equal names are equal graphs: names are digests of the content.
                _unpack(
                    archive,
                    cache,
                    [member for member in archive if not (cache / member.name).exists()],
                )
            source.unlink()
    return missing


def archive_files(cache: Path, without: Iterable[str]) -> list[Path]:
    """Return the files of a cache for an archive: no locks, and nothing in `without`."""
    excluded = {cache / folder for folder in without}
    files = (p for p in sorted(cache.rglob("*")) if p.name != _MARKER and p.suffix != ".lock")
    return [path for path in files if path.is_file() and excluded.isdisjoint(path.parents)]


def write_archive(cache: Path, target: Path, files: Iterable[Path]) -> tuple[GraphFile, ...]:
    """Write files of a cache to an archive, atomically."""

    def fill(archive: tarfile.TarFile) -> None:
        for path in files:
            # A compiler's temporary file may vanish between listing and opening.
            with suppress(FileNotFoundError), path.open("rb") as stream:
                info = archive.gettarinfo(fileobj=stream, arcname=str(path.relative_to(cache)))
                info.type, info.size = tarfile.REGTYPE, path.stat().st_size  # no hard links
                archive.addfile(info, stream)

    return write_tar(target, fill)


def write_tar(target: Path, fill: Callable[[tarfile.TarFile], None]) -> tuple[GraphFile, ...]:
    """Write a tar file under a temporary name, fsync it and rename it; return its files."""
    make_own_folder(target.parent)
    # Not compressed: graphs are small compared with a checkpoint, and unpacking delays the first
    # step of every attempt.
    descriptor, name = tempfile.mkstemp(prefix=".graphs.", dir=target.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            with tarfile.open(fileobj=stream, mode="w") as archive:
                fill(archive)
                files = tuple(GraphFile(path=m.name, bytes=m.size) for m in archive.getmembers())
            stream.flush()
            os.fchmod(stream.fileno(), 0o644)
            os.fsync(stream.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_dir(target.parent)
    return files


def _unpack(archive: tarfile.TarFile, folder: Path, members: Iterable[tarfile.TarInfo]) -> None:
    """Unpack files into a folder that only this user may enter; TarError for what is no file."""
    for member in members:
        name = PurePosixPath(member.name)
        if not member.isreg() or name.is_absolute() or ".." in name.parts:
            raise tarfile.ExtractError(f"{member.name!r} is not a file inside the folder")
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        source = archive.extractfile(member)
        assert source is not None, "it is a regular file"
        with source, path.open("xb") as target:
            shutil.copyfileobj(source, target)
        path.chmod(member.mode & 0o755 | 0o600)
        os.utime(path, (member.mtime, member.mtime))


def make_own_folder(folder: Path) -> None:
    """Make a folder of a run; OSError if it is a link, through which others would be changed."""
    folder.mkdir(parents=True, exist_ok=True)
    if folder.is_symlink():
        raise OSError(errno.ELOOP, f"{folder} is a link, not a folder of the run; remove it")


def load_manifest(run: RunDir, group: str | None = None) -> GraphManifest:
    """Return the manifest of a run's own archive; StorageError if one of both is unusable."""
    try:
        manifest = GraphManifest.load(run.graphs_manifest, trusted=True, group=group)
        open_trusted(run.graphs_archive(manifest.archive), group).close()
        return manifest
    except StorageError as error:
        raise StorageError(f"{error}; {_compile_again(run)}") from error
    except OSError as error:
        raise StorageError(
            f"cannot use {error.filename}: {error.strerror}; {_compile_again(run)}"
        ) from error


def _compile_again(run: RunDir) -> str:
    return f"`slurmllm resume {run.name} --precompile always` compiles the graphs again"


def archiving(run: RunDir) -> AbstractContextManager[None]:
    return storage_errors(
        f"cannot archive the compiled graphs into {run.graphs}", "free space and `slurmllm resume`"
    )


def checksum(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def open_archive(path: Path, digest: str, group: str | None = None) -> BufferedReader:
    """Open a trusted archive of this checksum; of a regular file the checked bytes are read again.

    Raises a ValueError for another checksum, an OSError if it cannot be read or is not trusted.
    """
    stream = open_trusted(path, group)
    if hashlib.file_digest(stream, "sha256").hexdigest() != digest:
        stream.close()
        raise ValueError("it does not match its manifest")
    stream.seek(0)
    return stream


def install_archive(
    cache: Path,
    run: RunDir,
    manifest: GraphManifest,
    broadcast: Path | None = None,
    group: str | None = None,
) -> Literal["present", "broadcast", "shared"]:
    """Fill this node's cache, in the user's private folder, with the archive's graphs.

    Returns their source: the folder itself, the archive that was `broadcast` to this node's own
    disk, or the shared one. Raises a NodeError if neither is intact, or the node's disk refuses.
    """
    # The launchers of --local share one disk: one unpacks, the others find it present.
    with node_disk(f"unpack the compiled graphs into {cache}"), _locked(cache):
        if _read_marker(cache) == manifest.archive_sha256:
            return "present"
        stream: BufferedReader | None = None
        origin: Literal["broadcast", "shared"] = "broadcast"
        if broadcast:
            with suppress(OSError, ValueError):  # missing, partial or another's
                stream = open_archive(broadcast, manifest.archive_sha256)
        if not stream:
            source = run.graphs_archive(manifest.archive)
            origin = "shared"
            try:
                stream = open_archive(source, manifest.archive_sha256, group)
            except (OSError, ValueError) as error:
                raise NodeError(
                    f"{source} is not used: {os_error_text(error)}; {_compile_again(run)}"
                ) from error
        unpacked = Path(tempfile.mkdtemp(prefix=f".{cache.name}.", dir=cache.parent))
        try:
            with stream, tarfile.open(fileobj=stream) as archive:
                _unpack(archive, unpacked, archive)
            (unpacked / _MARKER).write_text(manifest.archive_sha256, encoding="utf-8")
            if cache.exists():
                shutil.rmtree(cache)
            unpacked.replace(cache)
        finally:
            shutil.rmtree(unpacked, ignore_errors=True)
        return origin


@contextmanager
def installing(cache: Path, node: str, attempt: int) -> Iterator[Path]:
    """Yield a file for which the workers of a node wait, written when the cache is installed."""
    # A name by node, as the launchers of --local share a disk, and by attempt, as a superseded
    # attempt's launcher may remove its file when the next attempt has begun.
    installed = cache.with_name(f"{cache.name}.installed-{node}-{attempt:03d}")
    installed.unlink(missing_ok=True)
    try:
        yield installed
    finally:
        with suppress(OSError):
            installed.unlink()


def _read_marker(cache: Path) -> str | None:
    marker = cache / _MARKER
    return marker.read_text("utf-8") if marker.is_file() else None


class IncompleteGraphsError(RunError):
    """Graphs of the run are not compiled, and the recipe does not allow training without them."""


def faults(manifest: GraphManifest, run: RunDir) -> Lines:
    """Return why an archive is incomplete, one line each."""
    if manifest.complete:
        return ()
    lines = []
    bad = [state for state in manifest.states if state.state != "compiled"]
    for state in bad[:_MAX_GRAPHS]:
        if state.log is None:
            lines.append(f"{state.name} {state.state}: the compiler left no artifact and no log")
            continue
        last = "the log is gone"
        with suppress(OSError):
            log_lines = read_limited(run.path / state.log).decode(errors="replace").strip()
            last = log_lines.rpartition("\n")[2].strip()[:200] or "the compiler wrote nothing"
        lines.append(f"{state.name} failed: {last}; {state.log}")
    if len(bad) > _MAX_GRAPHS:
        names = ", ".join(state.name for state in bad[_MAX_GRAPHS:])
        lines.append(f"{len(bad) - _MAX_GRAPHS} more: {names}")
    if manifest.missing_nodes:
        lines.append(f"no graphs from {', '.join(manifest.missing_nodes)}")
    return tuple(lines) or ("the workers' steps left no compiled graph in the cache",)


def require_complete(manifest: GraphManifest, run: RunDir, incomplete_graphs: str) -> None:
    """Raise IncompleteGraphsError if the archive is incomplete and the recipe requires it."""
    if manifest.complete or incomplete_graphs == "compile":
        return
    lines = "\n  ".join(faults(manifest, run))
    raise IncompleteGraphsError(
        f"{run.name} cannot start: its graphs are not all compiled\n  {lines}\n"
        f"  `slurmllm resume {run.name}` compiles these again; to train all the same and compile "
        f"them in training, `slurmllm resume {run.name} --set train.incomplete_graphs=compile`"
    )
