"""Graphs compiled while training come into the archive, whole or not at all."""

import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from launch.graphs.conftest import VERSIONS, compile_graphs, pack

from slurmllm.core.run.artifact_records import GraphManifest, NewGraphs
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.graphs import archive as graph_cache
from slurmllm.launch.graphs import merge
from slurmllm.train.backends.native import environment

NODES = ("n1", "n2")


@pytest.fixture
def manifest(run: RunDir, tmp_path: Path) -> GraphManifest:
    """Of an archive with graph `aaa`, as precompile left it; each node has it on its disk."""
    manifest = pack(tmp_path / "precompile", run, "aaa", fingerprint="f")
    for node in NODES:
        graph_cache.install_archive(tmp_path / node, run, manifest)
    return manifest


Submit = Callable[..., tuple[str, ...]]


@pytest.fixture
def submit(run: RunDir, tmp_path: Path) -> Submit:
    """Submit what a node has and a manifest's archive lacks, in attempt 0."""

    def call(
        node: str, manifest: GraphManifest, versions: Mapping[str, str] = VERSIONS
    ) -> tuple[str, ...]:
        return merge.submit_new_graphs(tmp_path / node, run, 0, NODES, node, manifest, versions)

    return call


def test_new_graphs_of_all_nodes_are_merged(
    run: RunDir, tmp_path: Path, manifest: GraphManifest, submit: Submit
) -> None:
    assert submit("n1", manifest) == ()
    assert not run.new_graphs.exists()
    compile_graphs(tmp_path / "n1", "bbb", "both")
    compile_graphs(tmp_path / "n2", "both", "ccc")
    assert submit("n1", manifest) == ("bbb", "both")
    assert submit("n2", manifest) == ("both", "ccc")
    with tarfile.open(run.new_graphs / "000_n1.tar") as archive:
        assert not [name for name in archive.getnames() if "aaa" in name]
    assert sorted(merge.merge_new_graphs(run)) == ["bbb", "both", "ccc"]
    merged = GraphManifest.load(run.graphs_manifest)
    assert (merged.graphs, merged.complete, merged.fingerprint) == (4, True, "f")
    assert [state.name for state in merged.states] == ["aaa", "bbb", "both", "ccc"]
    names = sorted(path.name for path in run.graphs.iterdir())
    assert names == [merged.archive, "manifest.json"]
    assert merged.archive != manifest.archive

    node = tmp_path / "n9"
    graph_cache.install_archive(node, run, merged)
    assert len(environment.graphs(node)) == 4
    for name in ("aaa", "bbb", "both", "ccc"):
        assert (node / f"inductor/k/{name}.so").read_bytes() == name.encode() * 100
    assert merge.submit_new_graphs(node, run, 1, NODES, "n9", merged, VERSIONS) == ()
    assert merge.merge_new_graphs(run) == ()


def test_a_graph_that_failed_in_precompile_is_compiled_in_training(
    run: RunDir, tmp_path: Path, manifest: GraphManifest, submit: Submit
) -> None:
    (compiled,) = manifest.states
    changes = {"name": "bbb", "folder": "inductor/fxgraph/bb/bbb", "state": "failed"}
    failed = compiled.model_copy(update=changes)
    manifest = manifest.model_copy(update={"states": (compiled, failed), "complete": False})
    manifest.save(run.graphs_manifest)
    compile_graphs(tmp_path / "n1", "bbb")
    assert submit("n1", manifest) == merge.merge_new_graphs(run) == ("bbb",)
    assert GraphManifest.load(run.graphs_manifest).complete


@pytest.mark.parametrize("harm", ["cut archive", "cut record", "no record"])
def test_a_node_that_dies_while_handing_in_does_no_harm(
    run: RunDir, tmp_path: Path, manifest: GraphManifest, submit: Submit, harm: str
) -> None:
    for node, graph in (("n1", "bbb"), ("n2", "ccc")):
        compile_graphs(tmp_path / node, graph)
        submit(node, manifest)
    record, archive = run.new_graphs / "000_n2.json", run.new_graphs / "000_n2.tar"
    if harm.startswith("cut"):
        path = archive if harm == "cut archive" else record
        path.write_bytes(path.read_bytes()[:40])
    else:
        record.unlink()
        archive.rename(run.new_graphs / ".graphs.abc")
    assert merge.merge_new_graphs(run) == ("bbb",)
    merged = GraphManifest.load(run.graphs_manifest)
    assert graph_cache.install_archive(tmp_path / "n9", run, merged) == "shared"
    assert len(environment.graphs(tmp_path / "n9")) == 2
    assert not run.new_graphs.exists()


def test_the_old_archive_serves_until_the_manifest_names_the_new_one(
    run: RunDir,
    tmp_path: Path,
    manifest: GraphManifest,
    submit: Submit,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_graphs(tmp_path / "n1", "bbb")
    submit("n1", manifest)

    def killed(record: GraphManifest, path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(GraphManifest, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            merge.merge_new_graphs(run)
    assert graph_cache.install_archive(tmp_path / "n8", run, manifest) == "shared"
    assert merge.merge_new_graphs(run) == ("bbb",), "nothing of it is lost"
    left = sorted(path.name for path in run.graphs.iterdir())
    assert left == [GraphManifest.load(run.graphs_manifest).archive, "manifest.json"]


def test_graphs_of_other_versions_do_not_mix(
    run: RunDir, tmp_path: Path, manifest: GraphManifest, submit: Submit
) -> None:
    other = {**VERSIONS, "cpu_features": "other"}
    compile_graphs(tmp_path / "n1", "bbb")
    compile_graphs(tmp_path / "n2", "ccc")
    submit("n1", manifest)
    assert submit("n2", manifest, other) == ("aaa", "ccc"), "all that it has"
    assert NewGraphs.load(run.new_graphs / "000_n2.json").versions == other
    assert merge.merge_new_graphs(run) == ("bbb",)


def test_where_every_node_has_other_versions_theirs_take_the_archives_place(
    run: RunDir, tmp_path: Path, manifest: GraphManifest, submit: Submit
) -> None:
    for node in NODES:
        graph_cache.empty_cache_once(tmp_path / node, "attempt 0")
        compile_graphs(tmp_path / node, "ddd")
        submit(node, manifest, {"torch": "9.9"})
    assert merge.merge_new_graphs(run) == ("ddd",)
    merged = GraphManifest.load(run.graphs_manifest)
    assert (merged.versions, merged.graphs, merged.fingerprint) == ({"torch": "9.9"}, 1, "")
    assert {Path(f.path).stem for f in merged.files} == {"x", "ddd"}
    assert len(list(run.graphs.glob("graphs*.tar"))) == 1


def test_rejected_graphs_are_replaced_by_those_of_the_next_attempt(
    run: RunDir, tmp_path: Path, manifest: GraphManifest, submit: Submit
) -> None:
    compile_graphs(tmp_path / "n1", "bbb")
    submit("n1", manifest)
    merge.reject_graphs(run, "train attempt 0 failed with it")
    assert merge.merge_new_graphs(run) == (), "not those of the attempt that failed"
    rejected = GraphManifest.load(run.graphs_manifest)
    assert rejected.unusable(VERSIONS) == "train attempt 0 failed with it"
    for node in NODES:  # aaa as well: the graphs compiled anew have the old names
        assert submit(node, rejected)[0] == "aaa"
    merge.merge_new_graphs(run)
    merged = GraphManifest.load(run.graphs_manifest)
    assert merged.unusable(VERSIONS) is None
    assert [state.name for state in merged.states] == ["aaa", "bbb"]


def test_the_launchers_of_one_machine_empty_the_folder_once(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    compile_graphs(cache, "old")
    graph_cache.empty_cache_once(cache, "attempt 0")
    assert len(environment.graphs(cache)) == 0
    compile_graphs(cache, "new")
    graph_cache.empty_cache_once(cache, "attempt 0")
    assert len(environment.graphs(cache)) == 1
