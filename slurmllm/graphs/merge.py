"""Graphs compiled while training: left by each node at the attempt's end, merged into the archive.

    launcher    graphs/added/NNN_<node>.tar, then NNN_<node>.json, which makes it count
    supervisor  at the run's end or the next attempt's start: a new archive, then the manifest

A node that dies on the way leaves a file without its record, or a temporary one; neither counts,
and the next merge removes them. The archive in force stays whole until the manifest names another.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from slurmllm.backends.environment import load_environment
from slurmllm.errors import StorageError
from slurmllm.graphs.archive import (
    cannot_archive,
    checksum,
    files_of,
    forget_archives,
    write_archive,
    write_tar,
)
from slurmllm.records import AddedGraphs, GraphFile, GraphManifest, GraphState
from slurmllm.rundir import RunDir


def hand_in_added(
    cache: Path, run: RunDir, attempt: int, nodes: Sequence[str], node: str, manifest: GraphManifest
) -> tuple[str, ...]:
    """Leave the graphs that a node's cache has and the archive has not.

    Args:
        cache: The node's.
        run: The run.
        attempt: Number of the train attempt.
        nodes: All of the attempt's.
        node: This one.
        manifest: As it was when the attempt began.

    Returns:
        The names of the graphs.

    Raises:
        StorageError: the shared file system refuses.
    """
    environment = load_environment(manifest.backend)
    versions = environment.versions()
    known = _compiled(manifest.states) if versions == manifest.versions else set()
    graphs = environment.graphs(cache)
    states = tuple(
        GraphState(name=g.name, folder=g.folder, state="compiled", compiler=g.compiler)
        for g in graphs
        if g.state == "compiled" and g.folder not in known
    )
    if not states:
        return ()
    others = {g.folder for g in graphs} - {state.folder for state in states}
    there = {file.path for file in manifest.files} if known else set()
    new = [f for f in files_of(cache, others) if str(f.relative_to(cache)) not in there]
    record = run.graphs_added / f"{attempt:03d}_{node}.json"
    archive = record.with_suffix(".tar")
    try:
        files = write_archive(cache, archive, only=new)
        AddedGraphs(
            node=node, attempt=attempt, nodes=tuple(nodes), versions=versions,
            archive_sha256=checksum(archive), files=files, states=states,
        ).save(record)  # fmt: skip
    except OSError as error:
        raise cannot_archive(run, error) from error
    return tuple(state.name for state in states)


def merge_added(run: RunDir) -> tuple[str, ...]:
    """Put what was handed in into the archive; nobody may be handing in meanwhile.

    Returns:
        The names of the graphs that the archive did not have.

    Raises:
        StorageError: the shared file system refuses.
    """
    folder = run.graphs_added
    if not folder.is_dir() or not run.graphs_manifest.is_file():
        return ()
    manifest = GraphManifest.load(run.graphs_manifest)
    handed = _whole(folder)
    fitting, base = _fitting(list(handed.values()), manifest)
    new = _new_states(fitting, base)
    try:
        if new:
            tars = [path.with_suffix(".tar") for path, a in handed.items() if a in fitting]
            merged = _merge(run, base, tars, new)
            merged.save(run.graphs_manifest)
            forget_archives(run, merged.archive)
        for path in folder.iterdir():
            path.unlink(missing_ok=True)
        folder.rmdir()
    except OSError as error:
        raise cannot_archive(run, error) from error
    return tuple(state.name for state in new)


def _whole(folder: Path) -> dict[Path, AddedGraphs]:
    """What counts: records whose archive is there and as it was written."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            added, archive = AddedGraphs.load(path), path.with_suffix(".tar")
            if archive.is_file() and checksum(archive) == added.archive_sha256:
                found[path] = added
        except (StorageError, OSError):
            continue  # graphs can be compiled again; a run must not stop for them
    return found


def _fitting(
    handed: Sequence[AddedGraphs], manifest: GraphManifest
) -> tuple[list[AddedGraphs], GraphManifest]:
    """What is of the archive's versions, and the manifest to add to.

    Where all nodes of the newest attempt have other versions than the archive, they agree, and
    the archive serves nobody any longer: theirs takes its place.
    """
    newest = max((added.attempt for added in handed), default=None)
    last = [added for added in handed if added.attempt == newest]
    if last and {added.node for added in last} == set(last[0].nodes):
        versions = last[0].versions
        if versions != manifest.versions and all(a.versions == versions for a in last):
            empty = {
                "versions": versions, "files": (), "states": (), "absent_nodes": (),
                "graphs": 0, "fingerprint": "", "taken_from": None,
            }  # fmt: skip
            return last, manifest.model_copy(update=empty)
    return [added for added in handed if added.versions == manifest.versions], manifest


def _new_states(handed: Sequence[AddedGraphs], base: GraphManifest) -> list[GraphState]:
    known = _compiled(base.states)
    new: dict[str, GraphState] = {}
    for added in handed:
        for state in added.states:
            if state.folder not in known:
                new.setdefault(state.folder, state)
    return list(new.values())


def _merge(
    run: RunDir, base: GraphManifest, tars: Sequence[Path], new: Sequence[GraphState]
) -> GraphManifest:
    """Write the archive of old and new files, and its manifest."""
    old = [run.graphs_archive(base.archive)] if base.files else []
    # Compiled now, whatever precompile made of them.
    states: dict[str, GraphState] = {s.folder: s for s in base.states} | {s.folder: s for s in new}

    def fill(archive: tarfile.TarFile) -> tuple[GraphFile, ...]:
        held: dict[str, GraphFile] = {}
        with ExitStack() as stack:
            for source in [*old, *tars]:
                opened = stack.enter_context(tarfile.open(source))
                for member in opened:
                    if member.isreg() and member.name not in held:
                        archive.addfile(member, opened.extractfile(member))
                        held[member.name] = GraphFile(path=member.name, bytes=member.size)
        return tuple(held[name] for name in sorted(held))

    temporary = run.graphs_archive("graphs.new.tar")
    files = write_tar(temporary, fill)
    digest = checksum(temporary)
    archive = run.graphs_archive(f"graphs-{digest[:12]}.tar")
    temporary.replace(archive)
    compiled = sum(state.state == "compiled" for state in states.values())
    return base.model_copy(
        update={
            "complete": compiled == len(states) and not base.absent_nodes,
            "graphs": compiled,
            "archive": archive.name,
            "archive_bytes": archive.stat().st_size,
            "archive_sha256": digest,
            "files": files,
            "states": tuple(states[folder] for folder in sorted(states)),
        }
    )


def added_by(nodes: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """The names that nodes handed in, each once."""
    return tuple(sorted({name for names in nodes for name in names}))


def _compiled(states: Sequence[GraphState]) -> set[str]:
    return {state.folder for state in states if state.state == "compiled"}
