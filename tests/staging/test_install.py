"""Packing, installing and removing an environment, with a few files in place of a real one."""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmllm.errors import StorageError
from slurmllm.run.artifact_records import EnvironmentManifest
from slurmllm.run.safe_files import open_lock
from slurmllm.staging import archive, install
from slurmllm.staging.archive import ensure_archive
from slurmllm.staging.contents import Contents, StagedFile, environment_contents
from slurmllm.staging.install import MARKER, install_environment, read_marker


class Site:
    """A folder of runs, a node's private folder, and the sources of an environment."""

    def __init__(self, folder: Path) -> None:
        self.runs, self.sources = folder / "runs", folder / "sources"
        self.private = folder / "node" / "slurmllm-user"
        for path in (self.runs, self.sources, self.private):
            path.mkdir(parents=True)
        self.private.chmod(0o700)
        (self.sources / "module.py").write_text("value = 1\n")
        self.tested: list[Path] = []
        self.installed: list[install.Staged] = []

    def contents(self) -> Contents:
        files = []
        for path in sorted(self.sources.rglob("*")):
            info = path.stat()
            name = f"path/0/{path.relative_to(self.sources)}"
            files.append(StagedFile(name, path, info.st_size, int(info.st_mtime), 0o644))
        return Contents(tuple(files), "env", "/usr/bin", False, ())

    def install(self, manifest: Path, broadcast: Path | None = None) -> install.Staged:
        folder = self.private / "environments"
        self.installed.append(install_environment(folder, manifest, "native", broadcast))
        return self.installed[-1]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    site = Site(tmp_path)
    monkeypatch.setattr(archive, "environment_contents", site.contents)
    monkeypatch.setattr(install, "_test", lambda staged, backend: site.tested.append(staged.root))
    yield site
    for staged in site.installed:
        staged.use.close()


def change(site: Site, value: int) -> Path:
    """Make another environment, and its archive."""
    (site.sources / "module.py").write_text(f"value = {value}\n")
    return ensure_archive(site.runs)


def archive_of(manifest: Path) -> Path:
    return manifest.with_name(EnvironmentManifest.load(manifest).archive)


def test_an_environment_is_packed_and_installed_once(site: Site) -> None:
    manifest = ensure_archive(site.runs)
    packed = archive_of(manifest).stat()
    assert ensure_archive(site.runs) == manifest
    assert archive_of(manifest).stat().st_mtime_ns == packed.st_mtime_ns
    first = site.install(manifest)
    assert first.origin == "archive"
    module = first.root / "path" / "0" / "module.py"
    assert module.read_text() == "value = 1\n"
    # A .pyc file names the time of its source, in whole seconds.
    assert int(module.stat().st_mtime) == int((site.sources / "module.py").stat().st_mtime)
    assert site.install(manifest).origin == "present"
    assert site.tested == [first.root]


def test_a_source_that_changes_while_it_is_packed_is_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    listings = iter((site.contents(), site.contents()))
    monkeypatch.setattr(archive, "environment_contents", lambda: next(listings))
    monkeypatch.setattr(Contents, "difference", lambda *_: "path/0/module.py")
    with pytest.raises(StorageError, match=r"path/0/module\.py was changed while"):
        ensure_archive(site.runs)
    assert list((site.runs / ".environments").glob("*.tar*")) == []


def test_a_damaged_broadcast_is_replaced_by_the_shared_archive(
    site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = ensure_archive(site.runs)
    broadcast = tmp_path / "broadcast.tar.zst"
    broadcast.write_bytes(archive_of(manifest).read_bytes()[:-1])
    first = site.install(manifest, broadcast)
    assert first.origin == "archive"
    assert "does not match its manifest" in caplog.text
    manifest = change(site, 22)
    archive_of(manifest).rename(broadcast)
    second = site.install(manifest, broadcast)
    assert second.origin == "broadcast"
    values = [(staged.root / "path/0/module.py").read_text() for staged in (first, second)]
    assert values == ["value = 1\n", "value = 22\n"]


def test_an_archive_of_others_is_refused_and_a_damaged_one_packed_again(site: Site) -> None:
    manifest = ensure_archive(site.runs)
    path = archive_of(manifest)
    path.chmod(0o666)
    with pytest.raises(StorageError, match="every user may write to it"):
        site.install(manifest)
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)  # of the same size, so that only its checksum shows it
    with pytest.raises(StorageError, match="is damaged"):
        site.install(manifest)
    assert [p.name for p in (site.private / "environments").glob("[!.]*/")] == []
    assert site.install(ensure_archive(site.runs)).origin == "archive"


def test_an_environment_whose_interpreter_fails_is_not_used(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(staged: install.Staged, backend: str) -> None:
        raise OSError(0, "its interpreter fails with exit code 1: no module torch")

    monkeypatch.setattr(install, "_test", fails)
    manifest = ensure_archive(site.runs)
    with pytest.raises(StorageError, match="no module torch"):
        site.install(manifest)
    assert read_marker(site.private / "environments" / manifest.stem) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, as root")
def test_a_full_disk_of_the_node_is_named(site: Site) -> None:
    (site.sources / "large.bin").write_bytes(os.urandom(3_000_000))
    manifest = ensure_archive(site.runs)
    folder = site.private / "environments"
    folder.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        with pytest.raises(StorageError, match=r"GB free, the environment needs"):
            site.install(manifest)
        # Also if the disk fills up while the archive is unpacked.
        install.free_for, original = lambda folder, needed: None, install.free_for
        try:
            with pytest.raises(StorageError, match="No space left on device"):
                site.install(manifest)
        finally:
            install.free_for = original
        assert list(folder.glob("[!.]*/")) == list(folder.glob(".*/")) == []
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_old_environments_are_removed_unless_they_are_in_use(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = []
    for value in (1, 11, 111):
        staged = site.install(change(site, value))
        roots.append(staged.root)
        staged.use.close()
    ago = time.time() - install.MAX_AGE_S - 60
    for root in roots[:2]:
        os.utime(root / MARKER, (ago, ago))
    with open_lock(roots[0].with_name(f"{roots[0].name}.use")) as use:
        fcntl.flock(use, fcntl.LOCK_SH)
        newest = site.install(change(site, 55555))
    assert [root.exists() for root in roots] == [True, False, True]
    newest.use.close()
    monkeypatch.setattr(install, "MAX_BYTES", 1)  # now all but the one that is installed go
    last = site.install(change(site, 666666))
    assert [root.exists() for root in (*roots, newest.root)] == [False] * 4
    assert read_marker(last.root) is not None


def test_old_archives_are_removed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ensure_archive(site.runs)
    ago = time.time() - archive.MAX_AGE_S - 60
    os.utime(first, (ago, ago))
    second = change(site, 22)
    assert not first.exists()
    assert len(list(second.parent.glob("*.tar*"))) == 1
    monkeypatch.setattr(archive, "MAX_BYTES", 1)
    third = change(site, 333)
    assert not second.exists()
    assert archive_of(third).is_file()


def test_the_own_environment_has_what_a_worker_needs() -> None:
    names = {file.name for file in environment_contents().files}
    ours = ("/slurmllm/train/worker.py", "/slurmllm/run/error_patterns.yaml")
    for needed in (*ours, "/numpy/__init__.py", "/os.py"):
        assert any(name.endswith(needed) for name in names)
    assert not any("/tests/staging/" in name for name in names)  # of the checkout, only packages
