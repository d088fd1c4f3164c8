"""Compiled graphs: packed, checked, unpacked whole or not at all."""

import functools
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from launch.graphs.conftest import compile_graphs, pack

from slurmllm.core.config.resolve import resolve
from slurmllm.core.errors import NodeError, StorageError
from slurmllm.core.run.artifact_records import GraphManifest
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.graphs import archive as graph_cache
from slurmllm.launch.graphs.archive import faults
from slurmllm.launch.supervise.allocation import LocalAllocation
from slurmllm.launch.supervise.supervisor import Supervisor


@pytest.fixture
def manifest(run: RunDir, tmp_path: Path) -> GraphManifest:
    """Of an archive with two graphs."""
    return pack(tmp_path / "filled", run, "abc", "cde")


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
    assert (node / "inductor/k/abc.so").read_bytes() == b"abc" * 100
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


OUTSIDE, KINDS = ("../x", "a/../../x", "/x"), ("SYM", "LNK", "FIFO", "CHR", "DIR")


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "REGTYPE") for name in OUTSIDE), *(("x", f"{kind}TYPE") for kind in KINDS)],
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


def test_launchers_of_a_machine_are_apart(run: RunDir, manifest: GraphManifest, node: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        install = functools.partial(graph_cache.install_archive, node, run)
        results = list(pool.map(install, [manifest] * 8))
    assert sorted(results) == ["present"] * 7 + ["shared"]


def test_graphs_of_several_nodes_come_into_one_archive(run: RunDir, tmp_path: Path) -> None:
    compile_graphs(tmp_path / "n1", "a", "both")
    compile_graphs(tmp_path / "n2", "both", "b", "other")
    (tmp_path / "n2/inductor/k.lock").touch()
    (tmp_path / "n1/inductor/k/both.so").write_text("n1")
    others = {"inductor/fxgraph/ot/other"}  # which a third node submits
    graph_cache.submit_graphs(tmp_path / "n2", run, "n2", without=others)
    # The third one fails before.
    collected = graph_cache.collect_graphs(
        tmp_path / "n1", run, ["n2", "n3"], lambda node: node == "n3"
    )
    assert collected == ["n3"]
    manifest = pack(tmp_path / "n1", run, missing_nodes=["n3"])
    assert (manifest.graphs, manifest.complete) == (3, False)
    assert faults(manifest, run) == ("no graphs from n3",)
    assert not (tmp_path / "n1/inductor/k.lock").exists()
    assert (tmp_path / "n1/inductor/k/both.so").read_text() == "n1"
    assert sorted(path.name for path in run.graphs.iterdir()) == ["graphs.tar", "manifest.json"]
    # Without any graph, an archive is incomplete where some are expected.
    (tmp_path / "empty").mkdir()
    assert pack(tmp_path / "empty", run, expected=False).complete
    manifest = pack(tmp_path / "empty", run)
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
