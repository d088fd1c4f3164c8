"""What another user can prepare on a shared disk, made by root as the user `nobody`."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

import pytest

from slurmllm.safe_files import (
    check_private_folder,
    make_private_folder,
    open_lock,
    open_trusted,
    read_limited,
    why_untrusted,
)

NOBODY = pwd.getpwnam("nobody")
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def test_a_pipe_a_device_and_a_large_file_are_refused_at_once(tmp_path: Path) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    large.write_bytes(b"x" * 11)
    for path, reason in ((pipe, "not a regular file"), (Path("/dev/zero"), "not a regular file")):
        with pytest.raises(OSError, match=reason):
            read_limited(path)
    with pytest.raises(OSError, match="larger than 10 bytes"):
        read_limited(large, 10)
    assert read_limited(large, 11) == b"x" * 11


def test_trusted_is_what_only_this_user_can_write(tmp_path: Path) -> None:
    own, link = tmp_path / "own", tmp_path / "link"
    own.write_text("mine")
    link.symlink_to(own)
    with open_trusted(own) as stream:
        assert stream.read() == b"mine"
    with pytest.raises(OSError, match="symbolic links"):
        open_trusted(link)
    own.chmod(0o646)
    with pytest.raises(PermissionError, match="every user may write to it"):
        open_trusted(own)


@only_root
def test_another_users_file_needs_a_group_that_is_trusted(tmp_path: Path) -> None:
    path = tmp_path / "planted"
    path.write_text("x")
    os.chown(path, NOBODY.pw_uid, NOBODY.pw_gid)
    group = grp.getgrgid(NOBODY.pw_gid).gr_name
    with pytest.raises(PermissionError, match=r"belongs to nobody .*, not to you:"):
        open_trusted(path)
    assert why_untrusted(path.stat(), group) == ""
    assert "not to you or the group sys" in why_untrusted(path.stat(), "sys")
    assert "not to you or the group no-such" in why_untrusted(path.stat(), "no-such")


@only_root
def test_a_lock_follows_no_link_and_belongs_to_one_user(tmp_path: Path) -> None:
    victim, link, planted = tmp_path / "victim", tmp_path / "link", tmp_path / "planted"
    victim.write_text("precious")
    link.symlink_to(victim)
    os.link(victim, tmp_path / "hard")
    planted.touch()
    os.chown(planted, NOBODY.pw_uid, -1)
    for path, reason in (
        (link, "symbolic links"), (tmp_path / "hard", "not a file of its own"),
        (planted, "belongs to nobody"),
    ):  # fmt: skip
        with pytest.raises(OSError, match=reason):
            open_lock(path)
    assert victim.read_text() == "precious"
    with open_lock(tmp_path / "lock") as lock:
        assert stat.S_IMODE(os.fstat(lock.fileno()).st_mode) == 0o600
    open_lock(tmp_path / "lock").close()


@only_root
def test_a_folder_that_somebody_else_made_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    os.chown(folder, NOBODY.pw_uid, -1)
    own = make_private_folder(folder)
    assert own != folder
    assert own.parent == tmp_path
    check_private_folder(own)
    link = tmp_path / "link"
    link.symlink_to(own)
    assert make_private_folder(link) not in (link, own)
    for path in (folder, link):
        with pytest.raises(PermissionError):
            check_private_folder(path)
    assert make_private_folder(tmp_path / "new") == tmp_path / "new"
    assert make_private_folder(tmp_path / "new") == tmp_path / "new"
