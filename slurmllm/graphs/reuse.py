"""Reuse of compiled graphs: those of an earlier submission, or of another run in the folder.

Graphs are code: those of other users are used only if they are members of `cluster.trusted_group`
(`group` below). Each file is checked on its descriptor. The folders need no check: whoever can
write to one can only choose among files that trusted users wrote.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from slurmllm.backends.environment import load_environment
from slurmllm.config.resolve import RunConfig
from slurmllm.errors import SlurmllmError, StorageError
from slurmllm.graphs.archive import checksum, make_own_folder
from slurmllm.graphs.fingerprint import graph_fingerprint, node_processor
from slurmllm.plan.mesh import make_mesh
from slurmllm.run.artifact_records import GraphManifest, MicroBatchRecord
from slurmllm.run.rundir import RunDir, fsync_dir, root_of, run_folders
from slurmllm.run.safe_files import open_trusted


def measured_micro_batch(run: RunDir) -> int | None:
    """Return the micro batch that an earlier precompile stage has measured, if any."""
    with suppress(StorageError):  # damaged: measure again
        if record := MicroBatchRecord.find(run.micro_batch):
            return record.micro_batch
    return None


def has_all_graphs(
    config: RunConfig, nodes: int, local: bool, run: RunDir, is_other: bool = False
) -> bool:
    """Return whether a run has all graphs that a configuration needs, its own or another run's."""
    manifest = _manifest(run)
    if manifest is None:
        return False
    fingerprint = _fingerprint(config, nodes, local, run)
    # Empty: the run's own nodes, whose versions differ from this machine's, compiled them.
    is_unknown = manifest.fingerprint == "" and not is_other
    return fingerprint is not None and (is_unknown or manifest.fingerprint == fingerprint)


def _fingerprint(
    config: RunConfig, nodes: int, local: bool, run: RunDir, versions: dict[str, str] | None = None
) -> str | None:
    """Return the fingerprint of a configuration with the micro batch that `run` has measured."""
    measured = measured_micro_batch(run)
    with suppress(SlurmllmError):
        mesh = make_mesh(config, nodes, measured)
        return graph_fingerprint(config, mesh, local, measured, versions)
    return None


def other_processor(config: RunConfig, nodes: int, local: bool, run: RunDir) -> str | None:
    """Return why the newest run with all graphs, but for another processor or torch, is not used.

    None if there is none, or `local` is False: which processor a job gets is not known.
    """
    if not local:
        return None
    here = {**load_environment(config.backend).versions(), **node_processor(config)}
    for other in (run, *_newest_first(run)):
        manifest = _manifest(other)
        if manifest is not None and (reason := manifest.unusable(here)):
            then = _fingerprint(config, nodes, local, other, manifest.versions)
            if manifest.fingerprint == then:
                return f"run {other.name!r}: {reason}"
    return None


def find(config: RunConfig, nodes: int, local: bool, run: RunDir) -> Iterator[RunDir]:
    """Yield the other runs in the folder of runs that have all graphs, newest first."""
    others = _newest_first(run)
    return (r for r in others if has_all_graphs(config, nodes, local, r, is_other=True))


def _newest_first(run: RunDir) -> list[RunDir]:
    """Return the other runs in the folder of runs that have graphs."""
    modified_at: dict[RunDir, float] = {}
    root = root_of(run)
    for entry in run_folders(root) if root.is_dir() else ():
        with suppress(OSError):  # no run, just removed, or not this user's to read
            if entry != run.path and (entry / "config.yaml").is_file():
                other = RunDir(entry)
                modified_at[other] = other.graphs_manifest.stat().st_mtime
    return sorted(modified_at, key=lambda other: modified_at[other], reverse=True)


def link_or_copy_graphs(source: RunDir, run: RunDir, group: str | None = None) -> str | None:
    """Link a run to the archive of another one, or copy it.

    Two runs of one user can share an archive because it is never changed; another user could
    change it.

    Returns:
        Why that archive is not used, and then nothing is written; None if it is.
    """
    try:
        manifest = GraphManifest.load_trusted(source.graphs_manifest, group)
        measured = None
        if source.micro_batch.exists():
            measured = MicroBatchRecord.load_trusted(source.micro_batch, group)
        archive = source.graphs_archive(manifest.archive)
        open_trusted(archive, group).close()
    except (StorageError, OSError) as error:
        return getattr(error.__cause__ or error, "strerror", None) or str(error)
    try:
        make_own_folder(run.graphs)
        with tempfile.TemporaryDirectory(prefix=".graphs.", dir=run.graphs) as folder:
            copy = Path(folder) / archive.name
            _link_or_copy(archive, copy, group)
            # Of the copy, which nobody else can change.
            if checksum(copy) != manifest.archive_sha256:
                return "its archive does not match its manifest"
            copy.replace(run.graphs_archive(manifest.archive))
        fsync_dir(run.graphs)
        if measured is not None:
            measured.save(run.micro_batch)
        # The manifest last: it makes the archive current. The origin is the run that compiled.
        origin = manifest.reused_from or source.name
        manifest.model_copy(update={"reused_from": origin}).save(run.graphs_manifest)
    except (FileNotFoundError, PermissionError):
        return "it has just replaced its archive, or was removed"
    except OSError as error:
        raise StorageError(
            f"cannot copy the graphs of {source.name} to {run.graphs}: "
            f"{error.strerror or error}; free space, or add --precompile always"
        ) from error
    return None


def _link_or_copy(source: Path, target: Path, group: str | None) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
        # Only this user's own file: its owner can change it later.
        open_trusted(target).close()
        return
    except OSError:  # another user's, on another file system, or on one without hard links
        target.unlink(missing_ok=True)
    with open_trusted(source, group) as stream, target.open("xb") as copy:
        shutil.copyfileobj(stream, copy)
    target.chmod(0o644)


def delete_manifest(run: RunDir) -> None:
    # The archive is then unused, and the next precompile stage replaces it.
    if run.graphs_manifest.is_dir():
        shutil.rmtree(run.graphs_manifest)
    else:
        run.graphs_manifest.unlink(missing_ok=True)


def _manifest(run: RunDir) -> GraphManifest | None:
    """Return the manifest of a complete archive whose graphs may be used, None without one."""
    with suppress(StorageError):  # damaged: compile again
        manifest = GraphManifest.find(run.graphs_manifest)
        if manifest is not None and manifest.complete and not manifest.rejected:
            return manifest
    return None
