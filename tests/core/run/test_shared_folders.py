"""What other users put into folders that we share: it does not run, and nothing is overwritten."""

import hashlib
import json
import os
import pwd
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import call
from made_records import make_run

from slurmllm.analysis.calibrate import node as calibrating
from slurmllm.core.config.data_sources import MANIFEST, DataSource
from slurmllm.core.config.operation import CheckpointConfig
from slurmllm.core.config.resolve import resolve
from slurmllm.core.errors import NodeError, StorageError
from slurmllm.core.run.records import JobsRecord, Submission
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.run.safe_files import read_limited
from slurmllm.data.corpus.fetch import Fetch
from slurmllm.data.corpus.work_folder import WorkFolder, output_files
from slurmllm.launch.diagnose.login_node import import_torch
from slurmllm.launch.submit import inputs
from slurmllm.launch.submit.launch import LocalJob
from slurmllm.launch.supervise.attempts import process_identity
from slurmllm.train.backends.environment import make_cache_folder
from slurmllm.train.checkpoint.replicas import open_replica

NOBODY = pwd.getpwnam("nobody")
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def give_away(path: Path, mode: int = 0o777) -> None:
    path.chmod(mode)
    os.chown(path, NOBODY.pw_uid, NOBODY.pw_gid)


def test_doctor_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    import_torch()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["fifo", "writable", "own"])
def test_pictures_read_no_settings_of_other_users(tmp_path: Path, kind: str) -> None:
    settings = tmp_path / "matplotlibrc"
    if kind == "fifo":
        os.mkfifo(settings)
    else:
        settings.write_text("font.size: 11\n")
        settings.chmod(0o666 if kind == "writable" else 0o644)
    command = [sys.executable, "-P", "-c", "import slurmllm.analysis.compare.plot"]
    done = subprocess.run(command, cwd=tmp_path, timeout=60, capture_output=True, text=True)
    assert (done.returncode == 0) is (kind == "own"), done.stderr
    assert kind == "own" or "remove it, work in another directory" in done.stderr


def test_measuring_workers_compile_in_a_folder_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch's default is /tmp/torchinductor_USER, and it runs the libraries that it finds there.
    worker = tmp_path / "measuring_worker.py"
    worker.write_text(
        "import os, json, pathlib, sys\n"
        "names = 'TORCHINDUCTOR_CACHE_DIR', 'TRITON_CACHE_DIR'\n"
        "folders = [os.path.dirname(os.environ[name]) for name in names]\n"
        "found = [folders, [os.stat(folder).st_mode & 0o777 for folder in folders]]\n"
        f"pathlib.Path({str(tmp_path / 'found')!r}).write_text(json.dumps(found))\n"
    )
    monkeypatch.setattr(calibrating, "_WORKER", "measuring_worker")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sizes = dict.fromkeys(("nodes", "workers", "sharing", "cpus", "port"), 1)
    names = {"device": "cpu", "address": "127.0.0.1", "precision": "fp32"}
    fields = {**sizes, **names, "compiled": True, "variables": {}}
    task = calibrating.Task.model_validate(fields)
    assert calibrating.main(task.model_dump_json()) == 0
    folders, modes = json.loads((tmp_path / "found").read_text())
    assert modes == [0o700, 0o700]
    assert not any(Path(folder).exists() for folder in folders)


@only_root
def test_a_build_uses_no_work_folder_of_another_user(tmp_path: Path) -> None:
    precious, out = tmp_path / "precious", tmp_path / "c.arrow"
    precious.write_text("precious")
    precious.chmod(0o600)
    (tmp_path / "a.txt").write_text("some text\n" * 100)
    work = WorkFolder.of(out)
    work.path.mkdir()
    work.scratch(out.name).symlink_to(precious)
    give_away(work.path)
    result = call("data", "build", tmp_path / "a.txt", "--out", out, "--format", "text")
    assert (result.exit_code, "belongs to nobody" in " ".join(result.output.split())) == (4, True)
    assert (precious.read_text(), precious.stat().st_mode & 0o777) == ("precious", 0o600)


def test_a_build_writes_through_no_link(tmp_path: Path) -> None:
    precious, out = tmp_path / "precious", tmp_path / "c.arrow"
    precious.write_text("precious")
    work = WorkFolder.of(out)
    with work.lock():
        assert work.path.stat().st_mode & 0o777 == 0o700
        # As if somebody who may rename the work folder had put another in its place.
        work.scratch(out.name).symlink_to(precious)
        with output_files([out, out.with_suffix(".json")], work) as files:
            files[0].write(b"corpus")
    assert (precious.read_text(), out.read_text()) == ("precious", "corpus")


@only_root
def test_builtin_data_of_others_are_unused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Path] = []

    def refuse(folder: Path, vocab_size: int) -> tuple[Path, Path]:
        used.append(folder)
        raise StorageError("far enough")

    monkeypatch.setattr("slurmllm.data.corpus.builtin.ensure_stdlib", refuse)
    config, planted = resolve("tiny_neox"), tmp_path / ".data"
    for mode in (None, 0o777):
        if mode is not None:
            planted.mkdir(exist_ok=True)
            give_away(planted, mode)
        with pytest.raises(StorageError, match="far enough"):
            inputs.resolve_inputs(config, tmp_path, build=True)
    user_folder = tmp_path / f".data-{os.geteuid()}"
    assert used == [planted, user_folder]
    assert user_folder.stat().st_mode & 0o777 == 0o700


@only_root
@pytest.mark.parametrize("trap", ["link", "folder", "writable", "part", "manifest", "pipe"])
def test_a_download_follows_no_link_and_believes_no_record(tmp_path: Path, trap: str) -> None:
    source, folder, private = tmp_path / "a.jsonl", tmp_path / "set", tmp_path / "private"
    source.write_text("published")
    private.mkdir(mode=0o700)
    (private / "a.jsonl").write_text("precious")
    if trap == "link":
        folder.symlink_to(private)
        os.lchown(folder, NOBODY.pw_uid, NOBODY.pw_gid)
    else:
        folder.mkdir()
    file = {"name": "../private/a.jsonl", "size_bytes": 9, "origins": []}
    manifest = {"name": "set", "parts": None, "files": [file]}
    planted = folder / MANIFEST
    if trap == "pipe":
        os.mkfifo(planted)
    elif trap == "part":
        version = repr([(9, str(source.stat().st_mtime))])
        planted = folder / f".a.jsonl.{hashlib.sha256(version.encode()).hexdigest()[:8]}.part"
        planted.symlink_to(private / "a.jsonl")
    elif trap != "link":
        planted.write_text(json.dumps(manifest))
    if trap in ("folder", "manifest"):
        give_away(folder if trap == "folder" else planted, 0o755)
    elif trap == "writable":
        folder.chmod(0o777)
    values = {"description": "d", "origin": "o", "licence": "l"}
    data_set = DataSource.model_validate({**values, "files": [{"url": f"file://{source}"}]})
    fetch = Fetch("set", data_set, folder)
    if trap in ("manifest", "pipe"):
        assert [file.name for file in fetch.run()] == ["a.jsonl"]
    else:
        with pytest.raises(StorageError, match=r"belongs to|is a link|may write|symbolic links"):
            fetch.run()
    assert [(path.name, path.read_text()) for path in private.iterdir()] == [
        ("a.jsonl", "precious")
    ]


@only_root
def test_a_run_of_another_user_cancels_nothing_of_ours(tmp_path: Path) -> None:
    run = make_run(tmp_path / "theirs")
    command = [sys.executable, "-c", "import time; time.sleep(60)", "slurmllm"]
    with subprocess.Popen(command) as ours:
        sent = Submission(submitted_at=1.0, nodes=1, local=True, first_attempt=0, pid=ours.pid)
        place = {"process": process_identity(ours.pid), "host": socket.gethostname()}
        JobsRecord(submissions=(sent.model_copy(update=place),)).save(run.jobs)
        give_away(run.jobs, 0o644)
        result = call("cancel", "theirs", "--runs-dir", tmp_path)
        alive = ours.poll() is None
        ours.kill()
    assert (result.exit_code, alive) == (2, True)
    assert "belongs to nobody" in " ".join(result.output.split())


@only_root
@pytest.mark.parametrize("below", [False, True])
def test_a_nodes_disk_of_another_user_is_refused(tmp_path: Path, below: bool) -> None:
    disk = tmp_path / "disk"
    inner = disk / "inner" if below else disk
    inner.mkdir(parents=True)
    inner.chmod(0o1777)
    give_away(disk, 0o1777)  # whose owner may rename what is in it all the same
    config = resolve("tiny_neox", overrides=[f"cluster.node_local={inner}"])
    with pytest.raises(NodeError, match="belongs to nobody"):
        make_cache_folder(config, RunDir(tmp_path / "r"))
    assert list(disk.iterdir()) == ([inner] if below else [])


@only_root
def test_replicas_of_another_user_are_neither_restored_nor_written(tmp_path: Path) -> None:
    for name in ("folder", "link", "own"):
        replica = open_replica(CheckpointConfig(replica=str(tmp_path)), name)
        assert replica is not None
        path = tmp_path / name
        if name == "folder":
            path.mkdir()
            give_away(path)
        elif name == "link":
            path.symlink_to(tmp_path / "folder")
        if name == "own":
            replica.make_folder(None)
            assert path.is_dir()
        else:
            with pytest.raises(StorageError, match=r"belongs to nobody|it is a link"):
                replica.make_folder(None)


@only_root
def test_links_of_others_lead_to_files_of_theirs_alone(tmp_path: Path) -> None:
    private, user_folder, public = tmp_path / "private", tmp_path / "own", tmp_path / "public"
    for path, mode in ((private, 0o600), (user_folder, 0o600), (public, 0o644)):
        path.write_text(path.name)
        path.chmod(mode)
    os.chown(user_folder, NOBODY.pw_uid, -1)
    for path in (private, user_folder, public):
        link = tmp_path / f"to_{path.name}"
        link.symlink_to(path.name)
        os.lchown(link, NOBODY.pw_uid, -1)
    second = tmp_path / "second"
    second.symlink_to("to_private")  # this user's, to the other's
    assert read_limited(tmp_path / "to_own") == b"own"
    assert read_limited(tmp_path / "to_public") == b"public"
    for path in (tmp_path / "to_private", second):
        with pytest.raises(PermissionError, match=r"a link of nobody .* to a file of root"):
            read_limited(path)


def test_a_script_that_is_replaced_is_not_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    run.script("train").parent.mkdir(parents=True)
    run.script("train").write_text(f"touch {tmp_path}/planted\n")
    job = LocalJob(run, "train", f"touch {tmp_path}/trained\n", 1, quiet=True)
    assert job.run_to_end() == 0
    assert [(tmp_path / name).exists() for name in ("trained", "planted")] == [True, False]
