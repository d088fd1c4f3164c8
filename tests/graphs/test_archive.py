"""Compiled graphs: packed, checked, unpacked whole or not at all."""

from __future__ import annotations

import functools
import tarfile
import threading
from pathlib import Path

import pytest

from slurmllm.config.resolve import resolve
from slurmllm.errors import NodeError, StorageError
from slurmllm.graphs import archive as graph_cache
from slurmllm.graphs.archive import faults
from slurmllm.run.artifact_records import GraphManifest
from slurmllm.run.rundir import RunDir
from slurmllm.supervise.allocation import LocalAllocation
from slurmllm.supervise.supervisor import Supervisor

VERSIONS = {"torch": "2.9", "cpu_capability": "AVX2"}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "r")


@pytest.fixture
def manifest(run: RunDir, tmp_path: Path) -> GraphManifest:
    """Of an archive with two graphs and a kernel."""
    filled = tmp_path / "filled"
    for name in ("inductor/fxgraph/ab/abc/x", "inductor/fxgraph/cd/cde/y", "inductor/k/kernel.so"):
        path = filled / name
        path.parent.mkdir(parents=True)
        path.write_bytes(name.encode() * 100)
    return graph_cache.pack_archive(filled, run, "native", 9.5, versions=VERSIONS)


def test_the_manifest_tells_what_the_archive_holds(run: RunDir, manifest: GraphManifest) -> None:
    assert GraphManifest.load(run.graphs_manifest) == manifest
    assert manifest.complete
    assert manifest.graphs == 2
    assert manifest.archive_bytes == run.graphs_archive().stat().st_size
    assert [file.path for file in manifest.files][-1] == "inductor/k/kernel.so"
    assert "torch" in manifest.versions
    assert not list(run.graphs.glob(".graphs*"))


def test_a_node_gets_the_graphs_once(run: RunDir, manifest: GraphManifest, tmp_path: Path) -> None:
    node = tmp_path / "node" / "cache"
    node.parent.mkdir(mode=0o700)
    assert graph_cache.install_archive(node, run, manifest) == "shared"
    assert (node / "inductor/k/kernel.so").read_bytes() == b"inductor/k/kernel.so" * 100
    assert graph_cache.install_archive(node, run, manifest) == "present"


def test_the_broadcast_archive_comes_first(
    run: RunDir, manifest: GraphManifest, tmp_path: Path
) -> None:
    node = tmp_path / "node" / "cache"
    node.parent.mkdir(mode=0o700)
    sent = run.graphs_archive().rename(tmp_path / "sent.tar")
    assert graph_cache.install_archive(node, run, manifest, sent) == "broadcast"


def test_a_broken_broadcast_falls_back_to_the_shared_archive(
    run: RunDir, manifest: GraphManifest, tmp_path: Path
) -> None:
    node = tmp_path / "node" / "cache"
    node.parent.mkdir(mode=0o700)
    sent = tmp_path / "sent.tar"
    sent.write_bytes(b"half of it")
    assert graph_cache.install_archive(node, run, manifest, sent) == "shared"


def test_a_stale_cache_is_replaced(run: RunDir, manifest: GraphManifest, tmp_path: Path) -> None:
    node = tmp_path / "node" / "cache"
    node.parent.mkdir(mode=0o700)
    node.mkdir()
    (node / ".archive").write_text("another archive's checksum")
    (node / "old").write_text("graph")
    assert graph_cache.install_archive(node, run, manifest) == "shared"
    assert not (node / "old").exists()


def test_a_damaged_archive_is_refused(run: RunDir, manifest: GraphManifest, tmp_path: Path) -> None:
    data = bytearray(run.graphs_archive().read_bytes())
    data[700] ^= 1
    run.graphs_archive().write_bytes(data)
    node = tmp_path / "node" / "cache"
    node.parent.mkdir(mode=0o700)
    with pytest.raises(NodeError, match="does not match its manifest"):
        graph_cache.install_archive(node, run, manifest)
    assert not node.exists()


def test_a_node_without_its_disk_is_named(run: RunDir, manifest: GraphManifest) -> None:
    with pytest.raises(NodeError, match=r"set cluster\.node_local"):
        graph_cache.install_archive(Path("/proc/nowhere/cache"), run, manifest)
    with pytest.raises(NodeError, match=r"cluster\.node_local"):
        graph_cache.empty_cache(Path("/proc/nowhere/cache"))


def test_launchers_of_one_machine_do_not_collide(
    run: RunDir, manifest: GraphManifest, tmp_path: Path
) -> None:
    node = tmp_path / "node" / "cache"
    node.parent.mkdir(mode=0o700)
    results: list[str] = []

    def launcher() -> None:
        results.append(graph_cache.install_archive(node, run, manifest))

    threads = [threading.Thread(target=launcher) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["present"] * 7 + ["shared"]


def test_graphs_of_several_nodes_come_into_one_archive(run: RunDir, tmp_path: Path) -> None:
    for node, names in (("n1", ("a", "both")), ("n2", ("both", "b"))):
        for name in names:
            path = tmp_path / node / "inductor" / "fxgraph" / "aa" / name / "x"
            path.parent.mkdir(parents=True)
            path.write_text(node)
    graph_cache.submit_graphs(tmp_path / "n2", run, "n2")
    assert graph_cache.collect_graphs(tmp_path / "n1", run, ["n2"], lambda node: False) == []
    manifest = graph_cache.pack_archive(tmp_path / "n1", run, "native", 1.0, versions=VERSIONS)
    assert manifest.graphs == 3
    assert (tmp_path / "n1/inductor/fxgraph/aa/both/x").read_text() == "n1"
    assert sorted(path.name for path in run.graphs.iterdir()) == ["graphs.tar", "manifest.json"]


def test_a_node_that_hands_nothing_in_makes_the_archive_incomplete(
    run: RunDir, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    kernel = cache / "inductor/fxgraph/aa/abc/x"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("x")
    graph_cache.submit_graphs(cache, run, "n2")
    graph_cache.remove_submitted(run, ["n1", "n2"])
    missing = graph_cache.collect_graphs(cache, run, ["n2"], lambda node: node == "n2")
    assert missing == ["n2"]
    manifest = graph_cache.pack_archive(
        cache, run, "native", 1.0, versions=VERSIONS, missing_nodes=missing
    )
    assert not manifest.complete
    assert faults(manifest, run) == ("no graphs from n2",)


def test_a_cache_without_graphs_is_incomplete_where_some_are_expected(
    run: RunDir, tmp_path: Path
) -> None:
    pack = functools.partial(graph_cache.pack_archive, tmp_path, run, "native", 1.0)
    assert pack(versions=VERSIONS, expected=False).complete
    manifest = pack(versions=VERSIONS, expected=True)
    assert not manifest.complete
    assert "left no compiled graph" in faults(manifest, run)[0]


def test_graphs_that_another_node_hands_in_are_left_out(run: RunDir, tmp_path: Path) -> None:
    for name in ("ab/abc", "cd/cde"):
        path = tmp_path / "n2/inductor/fxgraph" / name / "x"
        path.parent.mkdir(parents=True)
        path.write_text("x")
    (tmp_path / "n2/inductor/k.lock").write_text("")
    graph_cache.submit_graphs(tmp_path / "n2", run, "n2", without={"inductor/fxgraph/ab/abc"})
    with tarfile.open(run.graphs_of_node("n2")) as archive:
        assert archive.getnames() == ["inductor/fxgraph/cd/cde/x"]


def test_a_fresh_cache_is_empty(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "old").write_text("x")
    graph_cache.empty_cache(cache)
    assert list(cache.iterdir()) == []


def test_only_a_run_with_graphs_needs_an_archive_to_train(run: RunDir, tmp_path: Path) -> None:
    run.path.mkdir()
    supervisors = []
    for compiled in ("true", "false"):
        overrides = [f"train.compile={compiled}", f"cluster.node_local={tmp_path / compiled}"]
        run.config.write_text(resolve("tiny_neox", overrides=overrides).to_yaml())
        supervisors.append(Supervisor(run, "train", LocalAllocation()))
    with pytest.raises(StorageError, match=r"the precompile stage did not finish.*resume r"):
        supervisors[0]._preparation._broadcast_graphs(lambda: False)
    assert supervisors[1]._preparation._broadcast_graphs(lambda: False) == {}
