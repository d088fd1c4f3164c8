"""What another user can prepare on a shared disk, made by root as the user `nobody`."""

import errno
import grp
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmllm.core.config.operation import WatchdogConfig
from slurmllm.core.errors import StorageError
from slurmllm.core.run import safe_files
from slurmllm.core.run.records import Heartbeat
from slurmllm.core.run.rundir import RunDir, write_atomic
from slurmllm.core.run.worker_files import EventLog
from slurmllm.launch.supervise.watchdog import Heartbeats

NOBODY = pwd.getpwnam("nobody")
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def test_a_pipe_a_device_and_a_large_file_are_refused_at_once(tmp_path: Path) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    large.write_bytes(b"x" * 11)
    for path, reason in ((pipe, "not a regular file"), (Path("/dev/zero"), "not a regular file")):
        with pytest.raises(OSError, match=reason):
            safe_files.read_limited(path)
    with pytest.raises(OSError, match="larger than 10 bytes"):
        safe_files.read_limited(large, 10)
    assert safe_files.read_limited(large, 11) == b"x" * 11


def test_trusted_is_what_only_this_user_can_write(tmp_path: Path) -> None:
    private_folder, link = tmp_path / "own", tmp_path / "link"
    private_folder.write_text("mine")
    link.symlink_to(private_folder)
    with safe_files.open_trusted(private_folder) as stream:
        assert stream.read() == b"mine"
    with pytest.raises(OSError, match="symbolic links"):
        safe_files.open_trusted(link)
    private_folder.chmod(0o646)
    with pytest.raises(PermissionError, match="every user may write to it"):
        safe_files.open_trusted(private_folder)


@only_root
def test_another_users_file_needs_a_group_that_is_trusted(tmp_path: Path) -> None:
    path = tmp_path / "planted"
    path.write_text("x")
    os.chown(path, NOBODY.pw_uid, NOBODY.pw_gid)
    group = grp.getgrgid(NOBODY.pw_gid).gr_name
    with pytest.raises(PermissionError, match=r"belongs to nobody .*, not to you:"):
        safe_files.open_trusted(path)
    assert safe_files.untrusted_error(path.stat(), group) is None
    # In a setgid folder everybody's files have the folder's group.
    os.chown(path, NOBODY.pw_uid, grp.getgrnam("sys").gr_gid)
    assert "not to you or the group sys" in str(safe_files.untrusted_error(path.stat(), "sys"))
    assert "not to you or the group no-such" in str(
        safe_files.untrusted_error(path.stat(), "no-such")
    )


def test_a_user_whom_this_machine_does_not_know_is_not_trusted(tmp_path: Path) -> None:
    info = os.stat_result((0o100600, 0, 0, 1, 54321, 54321, 0, 0, 0, 0))
    assert safe_files.untrusted_error(info, "root") == (
        "it belongs to uid 54321, not to you or the group root"
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Path, "stat", lambda _: info)
        assert safe_files.replaceable_error(tmp_path) == (
            f"{tmp_path} belongs to uid 54321, who may replace what is in it"
        )


def test_a_refusal_names_the_owner_of_what_is_closed(tmp_path: Path) -> None:
    error = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "a" / "b"))
    owner = safe_files.user_name(os.geteuid())
    assert safe_files.os_error_text(error) == f"Permission denied; {tmp_path} belongs to {owner}"
    assert safe_files.os_error_text(OSError(errno.ENOSPC, "full", str(tmp_path))) == "full"
    assert safe_files.os_error_text(PermissionError(errno.EACCES, "no")) == "no"  # of no file
    assert safe_files.os_error_text(OSError("odd")) == "odd"


@only_root
def test_a_lock_follows_no_link_and_belongs_to_one_user(tmp_path: Path) -> None:
    victim, link, planted = tmp_path / "victim", tmp_path / "link", tmp_path / "planted"
    victim.write_text("precious")
    link.symlink_to(victim)
    os.link(victim, tmp_path / "hard")
    planted.touch()
    os.chown(planted, NOBODY.pw_uid, -1)
    for path, reason in (
        *((link, "symbolic links"), (tmp_path / "hard", "not a file of its own")),
        (planted, "belongs to nobody"),
    ):
        with pytest.raises(OSError, match=reason):
            safe_files.open_lock(path)
    assert victim.read_text() == "precious"
    with safe_files.open_lock(tmp_path / "lock") as lock:
        assert stat.S_IMODE(os.fstat(lock.fileno()).st_mode) == 0o600
    safe_files.open_lock(tmp_path / "lock").close()


@only_root
def test_a_folder_that_somebody_else_made_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    os.chown(folder, NOBODY.pw_uid, -1)
    private_folder = safe_files.make_private_folder(folder)
    assert private_folder != folder
    assert private_folder.parent == tmp_path
    safe_files.check_private_folder(private_folder)
    link = tmp_path / "link"
    link.symlink_to(private_folder)
    assert safe_files.make_private_folder(link) not in (link, private_folder)
    for path in (folder, link):
        with pytest.raises(PermissionError):
            safe_files.check_private_folder(path)
    assert safe_files.make_private_folder(tmp_path / "new") == tmp_path / "new"
    assert safe_files.make_private_folder(tmp_path / "new") == tmp_path / "new"


RACE = """
import os, sys, time
folder, victim, uid = sys.argv[1], sys.argv[2], int(sys.argv[3])
os.setgroups([])
os.setgid(uid)
os.setuid(uid)
os.chdir(folder)
os.umask(0)
taken, deadline = 0, time.monotonic() + 3
def attempt(function, *arguments):
    try:
        function(*arguments)
        return 1
    except OSError:
        return 0
print("ready", flush=True)
while time.monotonic() < deadline and not os.path.exists("stop"):
    for name in ["cache", "cache-12345678", *os.listdir(".")]:
        attempt(os.rename, name, "away")
        attempt(os.rmdir, name)
        attempt(os.unlink, name)
        taken += attempt(os.symlink, victim, name)
        attempt(os.unlink, name)
        taken += attempt(os.mkdir, name, 0o777)
        attempt(os.symlink, victim, name + "/x")
        attempt(os.chmod, name, 0o700)
print(taken)
"""


@only_root
def test_an_attacker_in_a_race_gets_no_folder_of_ours() -> None:
    with tempfile.TemporaryDirectory() as name:  # not tmp_path, which is closed to others
        disk, victim = Path(name) / "disk", Path(name) / "victim"
        Path(name).chmod(0o755)
        for folder in (disk, victim):
            folder.mkdir()
            folder.chmod(0o1777)
        attacker = subprocess.Popen(
            [sys.executable, "-I", "-c", RACE, str(disk), str(victim), str(NOBODY.pw_uid)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert attacker.stdout is not None
            assert attacker.stdout.readline() == "ready\n"
            second_names = 0
            for _ in range(200):
                made = safe_files.make_private_folder(disk / "cache")
                info = made.lstat()
                assert stat.S_ISDIR(info.st_mode)
                assert (info.st_uid, stat.S_IMODE(info.st_mode)) == (os.geteuid(), 0o700)
                (made / "graph").write_text("ours")
                safe_files.check_private_folder(made)
                assert [path.name for path in made.iterdir()] == ["graph"]
                second_names += made.name != "cache"
                shutil.rmtree(made)
            (disk / "stop").touch()
            assert int(attacker.communicate()[0]) > 0
        finally:
            attacker.kill()
            attacker.wait()
        assert second_names > 0, "the attacker was never first"
        assert list(victim.iterdir()) == []


@only_root
def test_nothing_is_written_through_another_users_link(tmp_path: Path) -> None:
    run, victim = RunDir(tmp_path / "shared" / "run"), tmp_path / "victim"
    paths = run.attempt("train", 0)
    paths.path.mkdir(parents=True)
    victim.mkdir()
    for inside in ("heartbeats", "nodes", "stacks"):
        (paths.path / inside).symlink_to(victim)
    for inside in ("events", "metrics"):
        (run.path / inside).symlink_to(victim)
    (paths.path / "health").symlink_to(victim / "missing")
    (paths.path / ".attempt.json.tmp").symlink_to(victim / "x")
    for link in run.path.rglob("*"):
        if link.is_symlink():
            os.chown(link, NOBODY.pw_uid, NOBODY.pw_gid, follow_symlinks=False)
    for path in (paths.node("n1"), paths.health("n1")):
        with pytest.raises(StorageError, match=r"(nodes|health) is a link of nobody .*; remove"):
            write_atomic(path, "{}")
    beats = Heartbeats(paths, "n1", WatchdogConfig())
    beats.update({0: os.getpid()})
    beats.dump_stacks({})
    beats.close()
    EventLog(run.events(0), 0).add("save", 1)
    with pytest.raises(PermissionError, match="metrics is a link of nobody"):
        safe_files.open_append(run.metrics(0))
    assert list(victim.iterdir()) == []
    # One's own links, as to a larger disk, are followed; missing folders are made.
    (run.path / "checkpoints").symlink_to(victim)
    write_atomic(run.checkpoint(3) / "manifest.json", "{}")
    assert (victim / "step_00000003" / "manifest.json").read_text() == "{}"


def test_temporary_names_cannot_be_planted(tmp_path: Path) -> None:
    victim, paths = tmp_path / "victim", RunDir(tmp_path / "run").attempt("train", 0)
    victim.write_text("precious")
    heartbeat = paths.heartbeat("n1")
    heartbeat.parent.mkdir(parents=True)
    heartbeat.with_name(".n1.json.tmp").symlink_to(victim)
    beats = Heartbeats(paths, "n1", WatchdogConfig())
    beats.update({})
    beats.close()
    assert Heartbeat.load(heartbeat).node == "n1"
    assert victim.read_text() == "precious"


def test_a_chain_of_links_ends(tmp_path: Path) -> None:
    for first, other in (("a", "b"), ("b", "a")):
        (tmp_path / first).symlink_to(other)
    with pytest.raises(OSError, match="too many links"):
        safe_files.open_append(tmp_path / "a" / "x")
    (tmp_path / "0").symlink_to(tmp_path)
    for number in range(1, 41):
        (tmp_path / str(number)).symlink_to(str(number - 1))
    os.close(safe_files.open_append(tmp_path / "39" / "x"))  # forty links
    with pytest.raises(OSError, match="too many links"):
        safe_files.open_append(tmp_path / "40" / "x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError):
        safe_files.open_append(tmp_path / "file" / "x")


def test_pieces_have_whole_lines_and_each_line_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for before in range(0, 40, 3):  # the long line begins anywhere in a piece of 20 bytes
        for length, fits in ((29, True), (30, True), (31, False)):
            content = b"x\n" * before + b"y" * (length - 1) + b"\nz\nend"
            path.write_bytes(content)
            with path.open("rb") as stream:
                if fits:
                    *pieces, last = safe_files.read_pieces(stream, 20, 30)
                    assert b"".join((*pieces, last)) == content
                    assert all(piece.endswith(b"\n") for piece in pieces)
                else:
                    with pytest.raises(OSError, match="a line of more than 30 bytes"):
                        list(safe_files.read_pieces(stream, 20, 30))


def test_an_error_names_the_path_of_the_file(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        safe_files.write_whole(path, b"")

    (tmp_path / "x").mkdir()
    calls: list[Callable[[Path], object]] = [safe_files.open_append, safe_files.open_update, write]
    for call in calls:
        with pytest.raises(IsADirectoryError) as raised:
            call(tmp_path / "x")
        assert str(raised.value) == f"[Errno 21] Is a directory: '{tmp_path / 'x'}'"
