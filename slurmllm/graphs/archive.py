"""The compiled graphs of a run: packed once by precompile, put onto every node's own disk.

A cache folder that came from an archive carries the archive's checksum in `.archive`; it is
unpacked beside its final name and renamed, so that a folder is whole or absent. An archive is
never changed: graphs that come later make a new one under another name, and the manifest, which
names the archive in force, is replaced last.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Literal

from slurmllm.backends.environment import Graph, load_environment
from slurmllm.errors import NodeError, StorageError
from slurmllm.records import GraphFile, GraphManifest, GraphState
from slurmllm.rundir import RunDir, fsync_dir, write_atomic

_MARKER = ".archive"
_POLL_S = 0.5


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


def pack(
    cache: Path,
    run: RunDir,
    backend: str,
    cold_first_step_s: float,
    *,
    compile_s: float = 0.0,
    fingerprint: str | None = None,
    expected: bool = True,
    absent: Sequence[str] = (),
) -> GraphManifest:
    """Judge a filled cache by its files and archive what is compiled; the manifest comes last.

    Args:
        cache: The node-local folder, with the graphs of all nodes.
        run: The run.
        backend: Whose cache it is.
        cold_first_step_s: First step with an empty cache, s.
        compile_s: Seconds of the compiler after the workers' steps.
        fingerprint: Of the run, see `fingerprint.graph_fingerprint`.
        expected: Whether a cache without any graph is a fault.
        absent: Nodes that handed nothing in.

    Raises:
        StorageError: the shared file system refuses.
    """
    environment = load_environment(backend)
    graphs = environment.graphs(cache)
    try:
        states = _keep_logs(graphs, run)
        uncompiled = {graph.folder for graph in graphs if graph.state != "compiled"}
        archive = run.graphs_archive()
        files = write_archive(cache, archive, without=uncompiled)
        compiled = len(graphs) - len(uncompiled)
        manifest = GraphManifest(
            complete=not uncompiled and not absent and (compiled > 0 or not expected),
            backend=backend,
            versions=environment.versions(),
            graphs=compiled,
            archive=archive.name,
            archive_bytes=archive.stat().st_size,
            archive_sha256=checksum(archive),
            cold_first_step_s=cold_first_step_s,
            compile_s=compile_s,
            files=files,
            states=states,
            absent_nodes=tuple(absent),
            fingerprint=fingerprint or "",
        )
    except OSError as error:
        raise cannot_archive(run, error) from error
    manifest.save(run.graphs_manifest)
    forget_archives(run, manifest.archive)
    return manifest


def forget_archives(run: RunDir, but: str) -> None:
    """Remove the archives that the manifest no longer names."""
    for old in run.graphs.glob("graphs*.tar"):
        if old.name != but:
            old.unlink(missing_ok=True)


def _keep_logs(graphs: Sequence[Graph], run: RunDir) -> tuple[GraphState, ...]:
    """The states of graphs; what the compiler wrote of failed ones goes into the run directory."""
    shutil.rmtree(run.graph_log("").parent, ignore_errors=True)
    states = []
    for graph in graphs:
        log = None
        if graph.log is not None:
            kept = run.graph_log(graph.name)
            write_atomic(kept, graph.log.read_text(encoding="utf-8", errors="replace"))
            log = str(kept.relative_to(run.path))
        states.append(
            GraphState(
                name=graph.name, folder=graph.folder, state=graph.state, compiler=graph.compiler,
                log=log,
            )
        )  # fmt: skip
    return tuple(states)


def hand_in(cache: Path, run: RunDir, node: str, without: Iterable[str] = ()) -> None:
    """Leave a node's graphs for the first precompile node, which packs those of all of them.

    Args:
        cache: The node's.
        run: The run.
        node: Its name.
        without: Folders of graphs that another node hands in.

    Raises:
        StorageError: the shared file system refuses.
    """
    try:
        write_archive(cache, run.graphs_of_node(node), without=without)
    except OSError as error:
        raise cannot_archive(run, error) from error


def take_in(
    cache: Path, run: RunDir, nodes: Sequence[str], given_up: Callable[[str], bool]
) -> list[str]:
    """Add the graphs that other nodes handed in.

    Args:
        cache: The first node's.
        run: The run.
        nodes: The other nodes.
        given_up: Whether a node need not be waited for any longer. Compilers take hours and not
            the same time everywhere, so there is no limit else.

    Returns:
        The nodes that left nothing.

    Raises:
        StorageError: the shared file system refuses.
    """
    absent = []
    for node in nodes:
        source = run.graphs_of_node(node)
        while not source.is_file() and not given_up(node):
            time.sleep(_POLL_S)
        if not source.is_file():
            absent.append(node)
            continue
        try:
            with tarfile.open(source) as archive:
                # Equal names are equal graphs: they are named by their content.
                new = [member for member in archive if not (cache / member.name).exists()]
                archive.extractall(cache, members=new, filter="data")
            source.unlink()
        except OSError as error:
            raise cannot_archive(run, error) from error
    return absent


def forget_handed_in(run: RunDir, nodes: Sequence[str]) -> None:
    """Remove what other nodes handed in for an attempt that did not come to its end."""
    for node in nodes:
        run.graphs_of_node(node).unlink(missing_ok=True)


def files_of(cache: Path, without: Iterable[str] = ()) -> list[Path]:
    """The files of a cache folder that an archive keeps: no locks, nothing of some folders."""
    left_out = frozenset(without)
    found = []
    for path in sorted(cache.rglob("*")):
        inside = PurePosixPath(path.relative_to(cache))
        if path.name == _MARKER or path.suffix == ".lock" or not path.is_file():
            continue
        if left_out.isdisjoint(str(parent) for parent in inside.parents):
            found.append(path)
    return found


def write_archive(
    cache: Path, target: Path, without: Iterable[str] = (), only: Iterable[Path] | None = None
) -> tuple[GraphFile, ...]:
    """Write the files of a cache folder into one, whole or not at all.

    Args:
        cache: The folder.
        target: The archive.
        without: Folders inside it that are left out.
        only: These files, where not all of the others.

    Returns:
        What the archive holds.

    Raises:
        OSError: a disk refuses.
    """
    files = files_of(cache, without) if only is None else only

    def fill(archive: tarfile.TarFile) -> tuple[GraphFile, ...]:
        held = []
        for path in files:
            name = str(path.relative_to(cache))
            with suppress(FileNotFoundError), path.open("rb") as stream:  # else a temporary file
                info = archive.gettarinfo(fileobj=stream, arcname=name)
                info.type, info.size = tarfile.REGTYPE, path.stat().st_size  # no hard links
                archive.addfile(info, stream)
                held.append(GraphFile(path=name, bytes=info.size))
        return tuple(held)

    return write_tar(target, fill)


def write_tar(
    target: Path, fill: Callable[[tarfile.TarFile], tuple[GraphFile, ...]]
) -> tuple[GraphFile, ...]:
    """Write a tar file under a temporary name, fsync it and rename it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # Not compressed: the files are small beside a checkpoint, and unpacking is on the way to the
    # first step of every attempt.
    descriptor, name = tempfile.mkstemp(prefix=".graphs.", dir=target.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            with tarfile.open(fileobj=stream, mode="w") as archive:
                held = fill(archive)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_dir(target.parent)
    return held


def cannot_archive(run: RunDir, error: OSError) -> StorageError:
    """What to tell when the shared file system refuses."""
    return StorageError(
        f"cannot archive the compiled graphs into {run.graphs}: {error.strerror or error}; "
        "free space and `slurmllm resume`"
    )


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


def without_archive(cache: Path, attempt: str) -> None:
    """Make sure that this node's cache folder holds no archive's graphs.

    Args:
        cache: The folder.
        attempt: What this attempt is called: the launchers of --local empty the folder once.

    Raises:
        NodeError: the node-local disk refuses.
    """
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with cache.with_name(f"{cache.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _marked(cache) != attempt:
                fresh_cache(cache)
                (cache / _MARKER).write_text(attempt, encoding="utf-8")
    except OSError as error:
        raise NodeError(
            f"cannot empty {cache} on {os.uname().nodename}: {error.strerror or error}; "
            "free space there or set cluster.node_local"
        ) from error


def _unpack(cache: Path, run: RunDir, manifest: GraphManifest) -> Literal["broadcast", "shared"]:
    source = broadcast_path(cache)
    origin: Literal["broadcast", "shared"] = "broadcast"
    if not (source.is_file() and checksum(source) == manifest.archive_sha256):
        source, origin = run.graphs_archive(manifest.archive), "shared"
        if not (source.is_file() and checksum(source) == manifest.archive_sha256):
            raise NodeError(
                f"{source} does not match its manifest; `slurmllm resume {run.name} --precompile "
                "always` compiles the graphs again"
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
