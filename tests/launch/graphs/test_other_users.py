"""What other users plant for the compiled graphs, which are code: made as the user `nobody`."""

import fcntl
import grp
import json
import os
import pwd
import stat
import tempfile
from pathlib import Path

import pytest
from launch.graphs.test_fingerprint import run_with_graphs

from slurmllm.core.config.resolve import RunConfig, resolve
from slurmllm.core.errors import NodeError, RunError, StorageError
from slurmllm.core.run.artifact_records import GraphManifest
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.graphs import archive as graph_cache
from slurmllm.launch.graphs import merge, reuse
from slurmllm.launch.submit.prepare import RunRequest, _find_graphs, prepare
from slurmllm.launch.supervise import watchdog
from slurmllm.launch.supervise.watchdog import Heartbeats
from slurmllm.train.backends.environment import (
    broadcast_path,
    make_cache_folder,
    node_local_cache,
    remove_leftovers,
)

NOBODY = pwd.getpwnam("nobody")
GROUP = grp.getgrgid(NOBODY.pw_gid).gr_name
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
POISON = b"poison"


def give_away(*paths: Path) -> None:
    """To `nobody`: folders with all that is in them."""
    for path in paths:
        for inside in (path, *path.rglob("*")):
            os.chown(inside, NOBODY.pw_uid, NOBODY.pw_gid, follow_symlinks=False)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A node's own disk that all users write to."""
    folder = tmp_path / "disk"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def config_on(disk: Path, *more: str) -> RunConfig:
    return resolve("tiny_neox", overrides=[f"cluster.node_local={disk}", *more])


@pytest.fixture(scope="module")
def data(inputs: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(option.removeprefix("--set=") for option in inputs)


def prepare_new(root: Path, *overrides: str) -> str | None:
    """Run `submit` up to the jobs; returns the run whose graphs it takes."""
    config = resolve("tiny_neox", overrides=overrides)
    return prepare(RunRequest(config, 2, root, name="mine")).graphs_from


# --- archives of other runs


@only_root
def test_an_archive_of_another_user_is_not_taken(
    tmp_path: Path, data: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    give_away(run_with_graphs(tmp_path, "planted").path)
    assert prepare_new(tmp_path, *data) is None
    assert not list((tmp_path / "mine").rglob("*.tar"))
    (line,) = caplog.messages
    assert "run 'planted', which has them: it belongs to nobody" in line
    assert "--set cluster.trusted_group=GROUP" in line


@only_root
def test_members_of_the_trusted_group_share_their_archives(
    tmp_path: Path, data: tuple[str, ...]
) -> None:
    source = run_with_graphs(tmp_path, "colleague")
    give_away(source.path)
    assert prepare_new(tmp_path, *data, f"cluster.trusted_group={GROUP}") == "colleague"
    mine = RunDir(tmp_path / "mine").graphs_archive()
    assert mine.read_bytes() == source.graphs_archive().read_bytes()
    # A copy: the colleague could change the file later.
    assert not mine.samefile(source.graphs_archive())
    assert mine.stat().st_uid == os.geteuid()


@only_root
@pytest.mark.parametrize("part", ["graphs/manifest.json", "graphs/graphs.tar"])
def test_each_file_must_be_trusted_by_itself(tmp_path: Path, part: str) -> None:
    source = run_with_graphs(tmp_path, "half")
    give_away(source.path / part)
    assert "belongs to nobody" in str(reuse.link_or_copy_graphs(source, RunDir(tmp_path / "mine")))
    assert not (tmp_path / "mine").exists()


def test_an_archive_is_a_bare_name_in_its_own_folder(tmp_path: Path) -> None:
    source = run_with_graphs(tmp_path, "sly")
    outside = source.graphs_archive().rename(tmp_path / "graphs.tar")
    fields = json.loads(source.graphs_manifest.read_text())
    for name in ("../../graphs.tar", str(outside), "", "manifest.json"):
        source.graphs_manifest.write_text(json.dumps({**fields, "archive": name}))
        assert list(reuse.find(resolve("tiny_neox"), 2, False, RunDir(tmp_path / "mine"))) == []
        error = reuse.link_or_copy_graphs(source, RunDir(tmp_path / "mine"))
        assert "damaged: archive" in str(error)
    source.graphs_manifest.write_text(json.dumps(fields))
    source.graphs_archive().symlink_to(outside)
    assert "symbolic links" in str(reuse.link_or_copy_graphs(source, RunDir(tmp_path / "mine")))


def test_paths_of_a_manifest_stay_inside_the_run(tmp_path: Path) -> None:
    source = run_with_graphs(tmp_path, "sly")
    fields = json.loads(source.graphs_manifest.read_text())
    for harm in (
        {"states": [{**fields["states"][0], "log": "../../etc/passwd"}]},
        {"files": [{"path": "/etc/passwd", "bytes": 1}]},
        {"reused_from": "../other"},
        {"reused_from": "a\x1b[2Jb"},
    ):
        source.graphs_manifest.write_text(json.dumps({**fields, **harm}))
        with pytest.raises(StorageError, match="damaged"):
            GraphManifest.load(source.graphs_manifest)


@only_root
def test_unreadable_runs_of_colleagues_do_not_stop_a_submit() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o777)
        for name, part in (("private", "."), ("closed", "graphs"), ("secret", "graphs/graphs.tar")):
            (run_with_graphs(root, name).path / part).chmod(0)
        config, run = resolve("tiny_neox"), RunDir(root / "mine")
        request = RunRequest(config, 2, root, name="mine")
        os.seteuid(NOBODY.pw_uid)  # root reads everything
        try:
            assert _find_graphs(request, 2, config, run) is None
        finally:
            os.seteuid(0)


@only_root
def test_a_run_of_another_user_is_not_resumed(tmp_path: Path) -> None:
    run = run_with_graphs(tmp_path, "planted")
    give_away(run.path)
    request = RunRequest(resolve("tiny_neox"), 2, tmp_path, run=run)
    with pytest.raises(RunError, match=r"belongs to nobody .* would run as you; start a run of"):
        prepare(request)


# --- the run's own folder


@pytest.mark.parametrize("harm", ["folder", "other type", "no archive"])
def test_a_damaged_manifest_is_forgotten_and_the_graphs_compiled_again(
    tmp_path: Path, data: tuple[str, ...], harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    prepare_new(tmp_path, *data)
    run = RunDir(tmp_path / "mine")
    made = run_with_graphs(tmp_path / "elsewhere", "made")
    made.graphs.rename(run.graphs)
    config = resolve("tiny_neox", overrides=data)
    repeated = RunRequest(config, 2, tmp_path, run=run)
    assert prepare(repeated).graphs_from == "mine"
    if harm == "no archive":
        run.graphs_archive().unlink()
    else:
        run.graphs_manifest.unlink()
        if harm == "folder":
            run.graphs_manifest.mkdir()
        else:
            run.graphs_manifest.write_text("[1]")
    assert prepare(repeated).graphs_from is None
    assert caplog.messages[-1].startswith("ignoring the compiled graphs of mine: ")
    assert not run.graphs_manifest.exists()


@only_root
def test_graphs_that_others_put_into_a_run_are_ignored(tmp_path: Path, disk: Path) -> None:
    run = run_with_graphs(tmp_path, "r")
    manifest = graph_cache.load_manifest(run)
    new = tmp_path / "new" / "inductor/fxgraph/cd/cde/x"
    new.parent.mkdir(parents=True)
    new.write_bytes(POISON)
    merge.submit_new_graphs(tmp_path / "new", run, 0, ("n1",), "n1", manifest, {})
    give_away(*run.new_graphs.iterdir())
    assert merge.merge_new_graphs(run) == ()
    graph_cache.submit_graphs(tmp_path / "new", run, "n2")
    give_away(run.graphs_of_node("n2"))
    cache = make_cache_folder(config_on(disk), run)
    with pytest.raises(StorageError, match="belongs to nobody"):
        graph_cache.collect_graphs(cache, run, ["n2"], lambda node: False)
    give_away(run.graphs_archive())
    with pytest.raises(NodeError, match=r"graphs\.tar is not used: it belongs to nobody"):
        graph_cache.install_archive(cache, run, manifest)
    give_away(run.graphs_manifest)
    with pytest.raises(StorageError, match=r"belongs to nobody.*`slurmllm resume r --precompile"):
        graph_cache.load_manifest(run)
    assert not cache.exists()


def test_nothing_is_written_or_removed_through_a_link(tmp_path: Path) -> None:
    run, victim = run_with_graphs(tmp_path, "r"), tmp_path / "victim"
    victim.mkdir()
    (victim / "000_n1.json").write_text("precious")
    run.new_graphs.symlink_to(victim)
    merge.merge_new_graphs(run)
    assert (victim / "000_n1.json").read_text() == "precious"
    with pytest.raises(OSError, match="is a link, not a folder of the run"):
        graph_cache.write_archive(tmp_path / ".cache-r", run.new_graphs / "x.tar", ())
    assert len(list(victim.iterdir())) == 1


# --- the disks of the nodes


@only_root
def test_a_cache_that_another_user_prepared_is_not_used(tmp_path: Path, disk: Path) -> None:
    run, config = run_with_graphs(tmp_path, "r"), config_on(disk)
    manifest = GraphManifest.load(run.graphs_manifest)
    planned = Path(node_local_cache(config, run))
    planned.mkdir(parents=True)
    planned.parent.chmod(0o777)
    (planned / ".archive").write_text(manifest.archive_sha256)
    (planned / "graph").write_bytes(POISON)
    give_away(planned.parent)
    cache = make_cache_folder(config, run)
    assert cache.parent != planned.parent
    assert graph_cache.install_archive(cache, run, manifest) == "shared"
    assert not (cache / "graph").exists()
    assert stat.S_IMODE(cache.parent.stat().st_mode) == 0o700
    # The next attempt finds it: the disk does not fill up with folders.
    repeated = make_cache_folder(config, run)
    assert graph_cache.install_archive(repeated, run, manifest) == "present"
    assert len(list(disk.iterdir())) == 2
    with pytest.raises(NodeError, match="belongs to nobody"):
        graph_cache.install_archive(planned, run, manifest)
    assert (planned / "graph").read_bytes() == POISON


def test_a_disk_on_which_others_may_rename_is_refused(tmp_path: Path, disk: Path) -> None:
    disk.chmod(0o777)
    with pytest.raises(NodeError, match=r"every user may replace .*no sticky bit \(`chmod"):
        make_cache_folder(config_on(disk), RunDir(tmp_path / "r"))
    assert list(disk.iterdir()) == []


@only_root
def test_a_broadcast_archive_of_another_user_is_not_unpacked(tmp_path: Path, disk: Path) -> None:
    run, config = run_with_graphs(tmp_path, "r"), config_on(disk)
    planned = Path(node_local_cache(config, run))
    sent, other = broadcast_path(planned), broadcast_path(planned)
    assert sent.parent == disk
    assert sent != other, "nobody can guess it"
    for path in (sent, other):
        path.write_bytes(run.graphs_archive().read_bytes())
    give_away(sent)
    cache, manifest = make_cache_folder(config, run), graph_cache.load_manifest(run)
    assert graph_cache.install_archive(cache, run, manifest, sent) == "shared"
    remove_leftovers(planned)
    assert not other.exists()
    assert sent.exists(), "not ours to remove"


@only_root
def test_a_planted_lock_empties_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, victim = RunDir(tmp_path / "r"), tmp_path / "precious"
    victim.write_text("precious")
    planted = tmp_path / "shm" / "slurmllm-phases-x"
    planted.mkdir(parents=True)
    (planted / "lock").symlink_to(victim)
    give_away(planted)
    monkeypatch.setattr(watchdog.tempfile, "gettempdir", lambda: str(tmp_path / "shm"))
    beats = Heartbeats(run.attempt("train", 0), "n1", resolve("tiny_neox").recipe.watchdog)
    beats.close()
    assert victim.read_text() == "precious"
    # One of a launcher that was killed is still removed.
    left = tmp_path / "shm" / "slurmllm-phases-y"
    left.mkdir(mode=0o700)
    (left / "lock").touch(mode=0o600)
    with (left / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        Heartbeats(run.attempt("train", 0), "n1", resolve("tiny_neox").recipe.watchdog).close()
        assert left.exists()
    Heartbeats(run.attempt("train", 0), "n1", resolve("tiny_neox").recipe.watchdog).close()
    assert not left.exists()
    assert planted.exists()
