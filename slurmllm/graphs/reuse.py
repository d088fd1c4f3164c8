"""Reuse of compiled graphs: those of an earlier submission, or of another run in the folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from slurmllm.config.resolve import RunConfig
from slurmllm.errors import SlurmllmError, StorageError
from slurmllm.graphs.archive import checksum
from slurmllm.graphs.fingerprint import graph_fingerprint
from slurmllm.plan.mesh import make_mesh
from slurmllm.records import GraphManifest, MicroBatchRecord
from slurmllm.rundir import RunDir, fsync_dir, is_run


def measured_micro_batch(run: RunDir) -> int | None:
    """The micro batch that an earlier precompile stage has measured, if any."""
    try:
        found = run.micro_batch.is_file()
        return MicroBatchRecord.load(run.micro_batch).micro_batch if found else None
    except StorageError:
        return None  # damaged: measure again


def serves(config: RunConfig, nodes: int, local: bool, own: RunDir, run: RunDir) -> bool:
    """Whether `run`, `own` or another, has all graphs that a configuration of `own` needs."""
    manifest = _manifest(run)
    if manifest is None or not manifest.complete:
        return False
    measured = measured_micro_batch(run)
    try:
        mesh = make_mesh(config, nodes, measured)
        fingerprint = graph_fingerprint(config, mesh, local, measured)
    except SlurmllmError:
        return False
    # An empty fingerprint: the nodes, whose versions differ from this machine's, compiled them.
    known = (fingerprint, "") if run == own else (fingerprint,)
    return fingerprint is not None and manifest.fingerprint in known


def usable(run: RunDir) -> bool:
    manifest = _manifest(run)
    return manifest is not None and run.graphs_archive(manifest.archive).is_file()


def find(config: RunConfig, nodes: int, local: bool, run: RunDir) -> RunDir | None:
    """The newest other run in the folder of runs that has all graphs; None if there is none."""
    root = run.path.parent
    if not root.is_dir():
        return None
    others = [RunDir(entry) for entry in root.iterdir() if entry != run.path and is_run(entry)]
    with_graphs = [other for other in others if other.graphs_manifest.is_file()]

    def modified_at(run: RunDir) -> float:
        with suppress(OSError):  # the other run may be removed meanwhile
            return run.graphs_manifest.stat().st_mtime
        return 0.0

    newest = sorted(with_graphs, key=modified_at, reverse=True)
    return next((other for other in newest if serves(config, nodes, local, run, other)), None)


def adopt(source: RunDir, run: RunDir) -> bool:
    """Link a run to the archive of another one, or copy it to another file system.

    Returns whether the archive is intact; if not, nothing is written. Two runs can share an
    archive because it is never changed.

    Raises:
        StorageError: The shared file system refuses.
    """
    manifest = _manifest(source)
    if manifest is None:
        return False
    archive = source.graphs_archive(manifest.archive)
    if not archive.is_file() or checksum(archive) != manifest.archive_sha256:
        return False
    try:
        run.graphs.mkdir(parents=True, exist_ok=True)
        _link_or_copy(archive, run.graphs_archive(manifest.archive))
        if source.micro_batch.is_file():
            MicroBatchRecord.load(source.micro_batch).save(run.micro_batch)
        # The manifest last: it makes the archive current. The origin is the run that compiled.
        origin = manifest.reused_from or source.name
        manifest.model_copy(update={"reused_from": origin}).save(run.graphs_manifest)
    except FileNotFoundError:  # the other run has just replaced its archive, or was removed
        return False
    except OSError as error:
        raise StorageError(
            f"cannot copy the graphs of {source.name} to {run.graphs}: "
            f"{error.strerror or error}; free space, or add --precompile always"
        ) from error
    return True


def _link_or_copy(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
        return
    except FileNotFoundError:
        raise
    except OSError:
        pass  # another file system, or one without hard links
    descriptor, name = tempfile.mkstemp(prefix=".graphs.", dir=target.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        shutil.copyfile(source, temporary)
        temporary.replace(target)
        fsync_dir(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def forget(run: RunDir) -> None:
    # Without a manifest the archive is unused, and the next precompile stage replaces it.
    run.graphs_manifest.unlink(missing_ok=True)


def _manifest(run: RunDir) -> GraphManifest | None:
    try:
        found = run.graphs_manifest.is_file()
        return GraphManifest.load(run.graphs_manifest) if found else None
    except StorageError:
        return None  # damaged: compile again
