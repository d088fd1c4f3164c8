"""Compiled graphs: packed, checked, unpacked whole or not at all."""

from __future__ import annotations

import functools
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slurmllm.core.config.resolve import resolve
from slurmllm.core.errors import NodeError, StorageError
from slurmllm.core.run.artifact_records import GraphManifest
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.graphs import archive as graph_cache
from slurmllm.launch.graphs.archive import faults
from slurmllm.launch.supervise.allocation import LocalAllocation
from slurmllm.launch.supervise.supervisor import Supervisor

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


@pytest.fixture
def node(tmp_path: Path) -> Path:
    (tmp_path / "node").mkdir(mode=0o700)
    return tmp_path / "node" / "cache"


def test_a_node_gets_the_graphs_once(
    run: RunDir, manifest: GraphManifest, node: Path, tmp_path: Path
) -> None:
    assert GraphManifest.load(run.graphs_manifest) == manifest
    assert (manifest.complete, manifest.graphs) == (True, 2)
    assert manifest.archive_bytes == run.graphs_archive().stat().st_size
    assert not list(run.graphs.glob(".graphs*"))
    node.mkdir()
    (node / ".archive").write_text("another archive's checksum")
    (node / "old").write_text("graph")
    sent = tmp_path / "sent.tar"
    sent.write_bytes(b"half of it")
    assert graph_cache.install_archive(node, run, manifest, sent) == "shared"
    assert not (node / "old").exists()
    assert (node / "inductor/k/kernel.so").read_bytes() == b"inductor/k/kernel.so" * 100
    assert graph_cache.install_archive(node, run, manifest) == "present"
    graph_cache.empty_cache(node)
    assert list(node.iterdir()) == []
    run.graphs_archive().rename(sent)
    assert graph_cache.install_archive(node, run, manifest, sent) == "broadcast"


def test_a_damaged_archive_is_refused(run: RunDir, manifest: GraphManifest, node: Path) -> None:
    data = bytearray(run.graphs_archive().read_bytes())
    data[700] ^= 1
    run.graphs_archive().write_bytes(data)
    with pytest.raises(NodeError, match="does not match its manifest"):
        graph_cache.install_archive(node, run, manifest)
    assert not node.exists()


def test_a_node_without_its_disk_is_named(run: RunDir, manifest: GraphManifest) -> None:
    with pytest.raises(NodeError, match=r"set cluster\.node_local"):
        graph_cache.install_archive(Path("/proc/nowhere/cache"), run, manifest)
    with pytest.raises(NodeError, match=r"cluster\.node_local"):
        graph_cache.empty_cache(Path("/proc/nowhere/cache"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("../x", "REGTYPE"),
        ("a/../../x", "REGTYPE"),
        ("/x", "REGTYPE"),
        *(("x", f"{kind}TYPE") for kind in ("SYM", "LNK", "FIFO", "CHR", "DIR")),
    ],
)
def test_nothing_but_files_inside_is_unpacked(tmp_path: Path, name: str, kind: str) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    member = tarfile.TarInfo(name)
    member.type, member.linkname = getattr(tarfile, kind), "/etc"
    with tarfile.open(tmp_path / "tar", "w") as archive:
        archive.addfile(member)
    with tarfile.open(tmp_path / "tar") as archive, pytest.raises(tarfile.ExtractError):
        graph_cache._unpack(archive, folder, archive)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "tar"]


def test_launchers_of_one_machine_do_not_collide(
    run: RunDir, manifest: GraphManifest, node: Path
) -> None:
    with ThreadPoolExecutor(8) as pool:
        install = functools.partial(graph_cache.install_archive, node, run)
        results = list(pool.map(install, [manifest] * 8))
    assert sorted(results) == ["present"] * 7 + ["shared"]


def test_graphs_of_several_nodes_come_into_one_archive(run: RunDir, tmp_path: Path) -> None:
    for node, names in (("n1", ("a", "both")), ("n2", ("both", "b"))):
        for name in names:
            path = tmp_path / node / "inductor" / "fxgraph" / "aa" / name / "x"
            path.parent.mkdir(parents=True)
            path.write_text(node)
    for name in ("k.lock", "fxgraph/aa/other/x"):
        (tmp_path / "n2/inductor" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "n2/inductor" / name).write_text("")
    others = {"inductor/fxgraph/aa/other"}  # which a third node submits
    graph_cache.submit_graphs(tmp_path / "n2", run, "n2", without=others)
    assert graph_cache.collect_graphs(tmp_path / "n1", run, ["n2"], lambda node: False) == []
    manifest = graph_cache.pack_archive(tmp_path / "n1", run, "native", 1.0, versions=VERSIONS)
    assert manifest.graphs == 3
    assert not (tmp_path / "n1/inductor/k.lock").exists()
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
    run.graphs_of_node("n2").unlink()
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
