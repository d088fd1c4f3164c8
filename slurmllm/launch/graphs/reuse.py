"""Reuse of compiled graphs: those of an earlier submission, or of another run in the folder.

Runs of equal fingerprints have equal graphs. A fingerprint is computed on the login node before a
submission, and again on the nodes that compile; it covers everything that may change a graph, so
that in doubt the graphs are compiled again.

Graphs are code: those of other users are used only if they are members of `cluster.trusted_group`
(`group` below). Each file is checked on its descriptor. The folders need no check: whoever can
write to one can only choose among files that trusted users wrote.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import SlurmllmError, StorageError
from slurmllm.core.run.artifact_records import GraphManifest, MicroBatchRecord
from slurmllm.core.run.records import Versions
from slurmllm.core.run.rundir import RunDir, fsync_dir, root_of, run_folders
from slurmllm.core.run.safe_files import open_trusted, os_error_text
from slurmllm.launch.graphs.archive import checksum, make_own_folder
from slurmllm.plan.mesh import Mesh, make_mesh
from slurmllm.train.backends.environment import load_environment

_THREADS = "OMP_NUM_THREADS"
_PACKAGE = Path(__file__).resolve().parents[2]
_GRAPH_FOLDERS = ("train/model", "core/config/families")
# The modules outside these folders and the backend that decide graphs. The rest of plan/
# (search, cost, tables) chooses a mesh, which is in the fingerprint itself; nothing of plan/ but
# these two may be imported by the code that builds the model.
GRAPH_MODULES = ("plan/mesh.py", "plan/parameters.py")


def graph_fingerprint(
    config: RunConfig,
    mesh: Mesh,
    local: bool,
    measured: int | None = None,
) -> str | None:
    """Return a digest of everything that decides a run's graphs; None if that is not measured yet.

    `mesh` is of the train stage. `measured` is the micro batch of a recipe with `auto`, of which
    precompile's graphs are for every node count.
    """
    micro = config.recipe.train.micro_batch
    if micro == "auto":
        if measured is None:
            return None
        mesh = replace(mesh, micro_batch=measured, global_batch=mesh.data * measured)
    environment = load_environment(config.backend)
    if config.cluster.container is not None:
        versions = {"image": config.cluster.container.image}  # theirs are not known out here
    else:  # nor the processors of nodes: each compares its own
        versions = {**environment.versions(), **(node_processor(config) if local else {})}
    parts = {
        "backend": config.backend,
        "versions": versions,
        "sources": sources(config.backend),
        "graphs": environment.graph_inputs(config, mesh, worker_threads(config, mesh, local)),
        # The fastest micro batch is a measurement on one kind of node.
        "measured_on": config.cluster.name if micro == "auto" else None,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def node_processor(config: RunConfig) -> Versions:
    """Return what graphs compiled by this machine's workers are made for; empty: any processor."""
    return load_environment(config.backend).processor(
        config.cluster.device, {**os.environ, **config.cluster.env, **config.recipe.env}
    )


@functools.cache
def sources(backend: str, package: Path = _PACKAGE) -> str:
    """Return a digest of the code that decides graphs: model, mesh and backend."""
    digest = hashlib.sha256()  # a checkout changes without a new version number
    folders = [package / name for name in (*_GRAPH_FOLDERS, f"train/backends/{backend}")]
    assert all(folder.is_dir() for folder in folders), folders  # rglob finds nothing in others
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    for file in (*files, *(package / module for module in GRAPH_MODULES)):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{file.relative_to(package).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def worker_threads(config: RunConfig, mesh: Mesh, local: bool) -> int | None:
    """Return the CPU threads of a worker; None if only the nodes know their number of CPUs."""
    variables = {**config.cluster.env, **config.recipe.env}
    threads = variables.get(_THREADS) or os.environ.get(_THREADS, "")
    if threads.isdigit():
        return int(threads)
    cpus = config.cluster.cpus_per_node
    if cpus is None and local:
        cpus = len(os.sched_getaffinity(0))
    return None if cpus is None else threads_of(cpus, mesh, local)


def threads_of(cpus: int, mesh: Mesh, local: bool) -> int:
    return max(1, cpus // sharing(mesh, local))


def sharing(mesh: Mesh, local: bool) -> int:
    """Return the number of workers that share a machine's CPUs and memory."""
    # The nodes of --local are all on this machine, in both stages alike.
    return mesh.devices_per_node * (mesh.nodes if local else 1)


def measured_micro_batch(run: RunDir) -> int | None:
    """Return the micro batch that an earlier precompile stage has measured, if any."""
    record = MicroBatchRecord.find_readable(run.micro_batch)  # damaged: measure again
    return None if record is None else record.micro_batch


def make_run_mesh(config: RunConfig, nodes: int, run: RunDir) -> Mesh:
    """Return the mesh of a run, of a measured micro batch if it has one; MeshError."""
    return make_mesh(config, nodes, measured_micro_batch(run))


def has_all_graphs(
    config: RunConfig, nodes: int, local: bool, run: RunDir, is_other: bool = False
) -> bool:
    """Return whether a run has all graphs that a configuration needs, its own or another run's."""
    manifest = GraphManifest.find_readable(run.graphs_manifest)  # damaged: compile again
    if not manifest or not manifest.complete or manifest.rejected:
        return False
    fingerprint = None
    with suppress(SlurmllmError):
        measured = measured_micro_batch(run)
        fingerprint = graph_fingerprint(config, make_mesh(config, nodes, measured), local, measured)
    # Empty: the run's own nodes, whose versions differ from this machine's, compiled them.
    is_unknown = manifest.fingerprint == "" and not is_other
    return fingerprint is not None and (is_unknown or manifest.fingerprint == fingerprint)


def find(config: RunConfig, nodes: int, local: bool, run: RunDir) -> Iterator[RunDir]:
    """Yield the other runs in the folder of runs that have all graphs, newest first."""
    modified_at = {}
    root = root_of(run)
    for entry in run_folders(root) if root.is_dir() else ():
        with suppress(OSError):  # no run, just removed, or not this user's to read
            if entry != run.path and (entry / "config.yaml").is_file():
                other = RunDir(entry)
                modified_at[other] = other.graphs_manifest.stat().st_mtime
    for other in sorted(modified_at, key=lambda other: modified_at[other], reverse=True):
        if has_all_graphs(config, nodes, local, other, is_other=True):
            yield other


def link_or_copy_graphs(source: RunDir, run: RunDir, group: str | None = None) -> str | None:
    """Link a run to the archive of another one, or copy it; return why not, or None.

    Two runs of one user can share an archive because it is never changed; another user could
    change it. Nothing is written if it is not used.
    """
    try:
        manifest = GraphManifest.load(source.graphs_manifest, trusted=True, group=group)
        measured = None
        if source.micro_batch.exists():
            measured = MicroBatchRecord.load(source.micro_batch, trusted=True, group=group)
        archive = source.graphs_archive(manifest.archive)
        open_trusted(archive, group).close()
    except (StorageError, OSError) as error:
        return getattr(error.__cause__ or error, "strerror", None) or str(error)
    try:
        make_own_folder(run.graphs)
        with tempfile.TemporaryDirectory(prefix=".graphs.", dir=run.graphs) as folder:
            copy = Path(folder) / archive.name
            try:
                os.link(archive, copy, follow_symlinks=False)
                # Only this user's own file: its owner can change it later.
                open_trusted(copy).close()
            except OSError:  # another user's, on another file system, or on one without hard links
                copy.unlink(missing_ok=True)
                with open_trusted(archive, group) as stream, copy.open("xb") as target:
                    shutil.copyfileobj(stream, target)
                copy.chmod(0o644)
            # Of the copy, which nobody else can change.
            if checksum(copy) != manifest.archive_sha256:
                return "its archive does not match its manifest"
            copy.replace(run.graphs_archive(manifest.archive))
        fsync_dir(run.graphs)
        if measured is not None:
            measured.save(run.micro_batch)
        # The manifest last: it makes the archive current. The origin is the run that compiled.
        manifest.model_copy(update={"reused_from": manifest.reused_from or source.name}).save(
            run.graphs_manifest
        )
    except (FileNotFoundError, PermissionError):
        return "it has just replaced its archive, or was removed"
    except OSError as error:
        raise StorageError(
            f"cannot copy the graphs of {source.name} to {run.graphs}: "
            f"{os_error_text(error)}; free space, or add --precompile always"
        ) from error
    return None


def delete_manifest(run: RunDir) -> None:
    # The archive is then unused, and the next precompile stage replaces it.
    if run.graphs_manifest.is_dir():
        shutil.rmtree(run.graphs_manifest)
    else:
        run.graphs_manifest.unlink(missing_ok=True)
