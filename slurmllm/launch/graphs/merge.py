"""Graphs compiled in training: submitted by each node, merged into the archive.

    launcher    graphs/new/NNN_<node>.tar, then NNN_<node>.json, which makes it valid
    supervisor  at the run's end or the next attempt's start: a new archive, then the manifest

A node that dies in between leaves an archive without its record, or a temporary file; both are
ignored, and the next merge removes them. The current archive stays valid until the manifest names
another one.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from slurmllm.core.errors import StorageError
from slurmllm.core.format import Texts
from slurmllm.core.run.artifact_records import GraphManifest, GraphState, NewGraphs
from slurmllm.core.run.records import Versions
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.slurm.client import Names
from slurmllm.launch.graphs.archive import (
    archive_files,
    archiving,
    checksum,
    open_archive,
    remove_old_archives,
    write_archive,
    write_tar,
)
from slurmllm.train.backends.environment import load_environment


def submit_new_graphs(
    cache: Path,
    run: RunDir,
    attempt: int,
    nodes: Names,
    node: str,
    manifest: GraphManifest,
    versions: Versions,
) -> Texts:
    """Submit the graphs that a node's cache has and the archive lacks; returns their names.

    `nodes` are of the attempt, which began with `manifest`; `versions` are of this node, with what
    its graphs are made for.
    """
    compiled = set() if manifest.unusable(versions) else _compiled(manifest.states)
    graphs = load_environment(manifest.backend).graphs(cache)
    states = tuple(
        GraphState.model_validate(g._asdict())
        for g in graphs
        if g.state == "compiled" and g.folder not in compiled
    )
    if not states:
        return ()
    other_folders = {g.folder for g in graphs} - {state.folder for state in states}
    archived = {file.path for file in manifest.files} if compiled else set()
    new = [
        f for f in archive_files(cache, other_folders) if str(f.relative_to(cache)) not in archived
    ]
    record = run.new_graphs / f"{attempt:03d}_{node}.json"
    archive = record.with_suffix(".tar")
    with archiving(run):
        # The archive before its record: without a record it is ignored.
        files = write_archive(cache, archive, new)
        NewGraphs(
            node=node,
            attempt=attempt,
            nodes=tuple(nodes),
            versions=dict(versions),
            archive_sha256=checksum(archive),
            files=files,
            states=states,
        ).save(record)
    return tuple(state.name for state in states)


def merge_new_graphs(run: RunDir, group: str | None = None) -> Texts:
    """Merge the submitted graphs into the archive; returns the names of those that it lacked.

    No launcher may be running. Files of others than this user and the trusted `group` are ignored.
    """
    folder = run.new_graphs
    if not folder.is_dir() or folder.is_symlink() or not run.graphs_manifest.is_file():
        return ()
    manifest = GraphManifest.load(run.graphs_manifest, trusted=True, group=group)
    submitted = []
    with ExitStack() as stack:
        for path in sorted(folder.glob("*.json")):
            # A damaged record or archive is ignored: its graphs can be compiled again.
            with suppress(StorageError, OSError, ValueError):
                graphs = NewGraphs.load(path, trusted=True, group=group)
                tar = open_archive(path.with_suffix(".tar"), graphs.archive_sha256, group)
                submitted.append((graphs, stack.enter_context(tar)))
        usable, base = _matching([graphs for graphs, _ in submitted], manifest)
        compiled = _compiled(base.states)
        new: dict[str, GraphState] = {}
        for graphs in usable:
            for state in graphs.states:
                if state.folder not in compiled:
                    new.setdefault(state.folder, state)
        with archiving(run):
            if new:
                tars = [tar for graphs, tar in submitted if graphs in usable]
                if base.files:
                    tars.insert(
                        0,
                        stack.enter_context(
                            open_archive(
                                run.graphs_archive(base.archive), base.archive_sha256, group
                            )
                        ),
                    )
                merged = _merge(run, base, tars, new)
                merged.save(run.graphs_manifest)
                remove_old_archives(run, merged.archive)
            shutil.rmtree(folder)
    return tuple(state.name for state in new.values())


def _matching(
    submitted: Sequence[NewGraphs], manifest: GraphManifest
) -> tuple[list[NewGraphs], GraphManifest]:
    """Return the graphs of the archive's versions, and the manifest to extend.

    If all nodes of the newest attempt agree on other versions, or the archive is rejected, no node
    can use it any longer: their graphs replace it.
    """
    newest = max((graphs.attempt for graphs in submitted), default=None)
    last = [graphs for graphs in submitted if graphs.attempt == newest]
    if last and {graphs.node for graphs in last} == set(last[0].nodes):
        versions = last[0].versions
        if manifest.unusable(versions) and all(g.versions == versions for g in last):
            return last, manifest.model_copy(
                update={
                    **dict.fromkeys(("files", "states", "missing_nodes"), ()),
                    **dict.fromkeys(("fingerprint", "rejected"), ""),
                    "reused_from": None,
                    "versions": versions,
                    "graphs": 0,
                }
            )
    return [graphs for graphs in submitted if not manifest.unusable(graphs.versions)], manifest


def reject_graphs(run: RunDir, why: str) -> None:
    """Have no attempt use the run's graphs any longer; those of the next one replace them."""
    GraphManifest.load(run.graphs_manifest).model_copy(update={"rejected": why}).save(
        run.graphs_manifest
    )
    shutil.rmtree(run.new_graphs, ignore_errors=True)  # of workers that used the others


def _merge(
    run: RunDir, base: GraphManifest, tars: Sequence[BinaryIO], new: Mapping[str, GraphState]
) -> GraphManifest:
    """Write the archive of old and new files; returns its manifest."""
    # A graph that failed in precompile is compiled now.
    states = {**{state.folder: state for state in base.states}, **new}

    def fill(archive: tarfile.TarFile) -> None:
        names = set()
        with ExitStack() as stack:
            for source in tars:
                opened = stack.enter_context(tarfile.open(fileobj=source))
                for member in opened:
                    if member.isreg() and member.name not in names:
                        names.add(member.name)
                        archive.addfile(member, opened.extractfile(member))

    # Another name than the old archive's, which is valid until the manifest is replaced.
    temporary = run.graphs_archive("graphs.new.tar")
    files = write_tar(temporary, fill)
    digest = checksum(temporary)
    archive = run.graphs_archive(f"graphs-{digest[:12]}.tar")
    temporary.replace(archive)
    compiled = sum(state.state == "compiled" for state in states.values())
    return base.model_copy(
        update={
            "complete": compiled == len(states) and not base.missing_nodes,
            "graphs": compiled,
            "archive": archive.name,
            "archive_bytes": archive.stat().st_size,
            "archive_sha256": digest,
            "files": files,
            "states": tuple(states[folder] for folder in sorted(states)),
        }
    )


def _compiled(states: Sequence[GraphState]) -> set[str]:
    return {state.folder for state in states if state.state == "compiled"}
