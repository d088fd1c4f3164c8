"""Builds in pieces: in several processes, on Slurm, killed, continued, and never mixed up."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.conftest import names_in
from slurmllm.core.errors import CodeError, DataError, NodeError, StorageError
from slurmllm.core.run import safe_files
from slurmllm.data.corpus import build as build_module
from slurmllm.data.corpus.build import BuildResult, build_corpus
from slurmllm.data.corpus.inputs import find_inputs
from slurmllm.data.corpus.options import BuildOptions, ReadOptions, TokenizeOptions
from slurmllm.data.corpus.shard import load_shard, plan_shards, write_shard
from slurmllm.data.corpus.work_folder import WorkFolder
from slurmllm.data.tokenizer import TokenEncoder

FILES = 6
# The command line with a shard a file, and slow enough to be killed in the middle.
MAIN = """
import sys
from slurmllm.data.corpus import shard
shard._LEAST_BYTES = 1
from slurmllm.cli.main import main
main()
"""


@pytest.fixture(autouse=True)
def _a_shard_is_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurmllm.data.corpus.shard._LEAST_BYTES", 1)


def write_inputs(folder: Path, more: str = "") -> Path:
    folder.mkdir()
    for index in range(FILES):
        rows = [{"text": f"{number % 70} of {index % 4}"} for number in range(100)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{index}.jsonl").write_text(lines + more)
    return folder


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    return write_inputs(tmp_path / "in")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many documents as a build can be killed in the middle of."""
    folder = tmp_path_factory.mktemp("many") / "in"
    return write_inputs(folder, '{"text": "some more of it"}\n' * 75_000)


def build(inputs: Path, out: str = "out.arrow", **options: Any) -> BuildResult:
    read = options.pop("read", ReadOptions())
    path = inputs.parent / out
    return build_corpus(find_inputs([str(inputs)]), path, read, **{"dedup": True, **options})


def content(inputs: Path, out: str = "out.arrow") -> tuple[bytes, bytes]:
    path = inputs.parent / out
    return path.read_bytes(), path.with_name(path.name + ".json").read_bytes()


def fail(inputs: Path, bad_line: str = '{"text": "a"', **options: Any) -> None:
    (inputs / "9.jsonl").write_text(bad_line)
    with pytest.raises(DataError, match=r"9.jsonl:1"):
        build(inputs, **options)
    (inputs / "9.jsonl").unlink()


def test_workers_make_the_same_corpus(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listings, names = [0], WorkFolder.shard_names
    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "shard_names", lambda w: listings.append(1) or names(w))
        alone = build(inputs, "one.arrow")
    assert sum(listings) < FILES, "the folder is not listed for each file"
    two = build(inputs, "two.arrow", workers=2)
    assert (alone.shards, alone.manifest) == (FILES, two.manifest)
    assert content(inputs, "one.arrow") == content(inputs, "two.arrow")
    assert two.peak_memory_bytes > alone.peak_memory_bytes
    assert alone.manifest.duplicates == FILES * 100 - 4 * 70
    assert names_in(inputs.parent) == sorted(
        ["in", *(name + end for name in ("one.arrow", "two.arrow") for end in ("", ".json"))]
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_finished_shards_are_not_read_again(inputs: Path, workers: int) -> None:
    build(inputs, "whole.arrow")
    fail(inputs, workers=workers)
    assert WorkFolder.of(inputs.parent / "out.arrow").shard_names()
    notes: list[str] = []
    built = build(inputs, read=ReadOptions(skip_bad=True), on_note=notes.append)
    assert notes == [f"continuing: {built.continued} of {FILES} shards are finished"]
    assert built.continued > 0
    assert content(inputs) == content(inputs, "whole.arrow")


def test_other_options_or_inputs_start_anew(inputs: Path) -> None:
    notes: list[str] = []
    fail(inputs)
    assert build(inputs, dedup=False, on_note=notes.append).continued == 0
    assert notes[0].startswith(f"starting over: the {FILES} shards in ")
    fail(inputs, overwrite=True)
    (inputs / "3.jsonl").write_text('{"text": "fixed"}')
    assert build(inputs, overwrite=True).continued == FILES - 1


def test_a_shard_with_errors_is_reused_only_with_skip_bad(inputs: Path) -> None:
    (inputs / "0.jsonl").write_text('{"text": "a"}\n{')
    shard = plan_shards(find_inputs([str(inputs)]), BuildOptions(ReadOptions(skip_bad=True)))[0]
    work = WorkFolder(inputs.parent / "work")
    write_shard(shard, work)
    assert load_shard(work.shard(shard.name), skip_bad=False) is None
    assert load_shard(work.shard(shard.name), skip_bad=True).bad == 1


def test_damaged_shards_are_read_again(inputs: Path) -> None:
    build(inputs, "whole.arrow")
    fail(inputs)
    work = WorkFolder.of(inputs.parent / "out.arrow")
    first, second, *_ = (work.path / name / "documents.arrow" for name in work.shard_names())
    first.write_bytes(first.read_bytes()[:-1])
    second.write_bytes(second.read_bytes().replace(b"of", b"or", 1))
    assert build(inputs).continued == FILES - 2
    assert content(inputs) == content(inputs, "whole.arrow")


def test_shards_damaged_before_the_join_are_named(
    inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = build_module._write_missing_shards

    def write_and_damage(shards: Any, *arguments: Any) -> Any:
        peaks = write(shards, *arguments)
        path = arguments[1].shard(shards[0].name) / "documents.arrow"
        path.write_bytes(path.read_bytes().replace(b"of", b"or", 1))
        return peaks

    with monkeypatch.context() as patch:
        patch.setattr(build_module, "_write_missing_shards", write_and_damage)
        with pytest.raises(StorageError, match="differs from what was written"):
            build(inputs)
    assert not (inputs.parent / "out.arrow").exists()
    assert build(inputs).continued == FILES - 1


def test_inputs_that_change_are_named(inputs: Path) -> None:
    (shard, *_) = plan_shards(find_inputs([str(inputs)]), BuildOptions())
    (inputs / "0.jsonl").write_text('{"text": "changed"}')
    with pytest.raises(DataError, match=r"0.jsonl has changed since the build began"):
        write_shard(shard, WorkFolder(inputs.parent / "work"))


def test_two_builds_to_one_name(inputs: Path) -> None:
    work = WorkFolder.of(inputs.parent / "out.arrow")
    work.path.mkdir()
    with (work.path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"another `data build` is writing out.arrow"):
            build(inputs)
    work.path.chmod(0o777)
    with pytest.raises(StorageError, match=r"every user may write to it; remove .*\.build if it"):
        build(inputs)
    work.path.chmod(0o755)
    build(inputs)


def children(pid: int) -> list[int]:
    ps = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(child) for child in ps.stdout.split()]


def wait_for(condition: Callable[[], Any], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start(inputs: Path, out: str, *options: str) -> subprocess.Popen[bytes]:
    arguments = ["data", "build", str(inputs), "--out", str(inputs.parent / out)]
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, *arguments, "--dedup", "--workers", "2", *options],
        start_new_session=True,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize("how", ["parent", "interrupt", "worker"])
def test_a_killed_build_continues(many: Path, how: str) -> None:
    out = f"{how}.arrow"
    process = start(many, out)
    assert process.stderr is not None
    work = WorkFolder.of(many.parent / out)
    wait_for(lambda: work.path.exists() and work.shard_names())
    workers = children(process.pid)
    assert len(workers) == 2
    with pytest.raises(DataError, match="another `data build`"):
        build(many, out)
    if how == "parent":
        os.kill(process.pid, signal.SIGKILL)
    elif how == "interrupt":
        os.killpg(process.pid, signal.SIGINT)
    else:
        os.kill(workers[0], signal.SIGKILL)
    code = process.wait(30)
    stderr = process.stderr.read().decode()
    process.stderr.close()
    wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers), 10)
    assert code == {"interrupt": 130, "worker": NodeError.exit_code}.get(how, -9), stderr
    assert ("was killed by SIGKILL" in stderr) == (how == "worker")
    assert not (many.parent / out).exists()
    assert build(many, out).continued > 0
    if not (many.parent / "whole.arrow").exists():
        build(many, "whole.arrow")
    assert content(many, out) == content(many, "whole.arrow")


def test_locks_a_folder_removed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, check = WorkFolder(tmp_path / ".out.build"), safe_files._check_own

    def check_removed(descriptor: int, path: Path) -> int:
        monkeypatch.undo()
        work.remove()
        return check(descriptor, path)

    monkeypatch.setattr(safe_files, "_check_own", check_removed)
    with work.lock():
        assert names_in(work.path) == ["lock"]


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("old", [False, True])
def test_interrupted_between_the_renames(
    inputs: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, old: bool, place: int
) -> None:
    tokenize = TokenizeOptions(tokenizer, TokenEncoder(tokenizer).fingerprint, "uint16")
    names = ["out.bin", "out.bin.json", "out.idx"]
    if old:
        build(inputs, "out", tokenize=tokenize)
        corpus = (inputs.parent / "out.bin").read_bytes()
        (inputs / "6.jsonl").write_text('{"text": "new"}\n')
    real, places = Path.replace, iter(range(3))

    def replace(path: Path, target: Path) -> Path:
        if target.name in names and next(places) == place:
            raise KeyboardInterrupt
        return real(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            build(inputs, "out", tokenize=tokenize, overwrite=old)
    if old:
        assert not (inputs.parent / "out.bin.json").exists()
        assert ((inputs.parent / "out.bin").read_bytes() == corpus) == (place == 0)
    else:
        assert not (inputs.parent / "out.bin").exists()
    assert build(inputs, "out", tokenize=tokenize, overwrite=old).continued == FILES + old
    assert names_in(inputs.parent) == ["in", *names]


def test_a_worker_that_fails_with_an_error(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CodeError, match=r"\d\.jsonl, failed: its process ended with exit code 1"):
        build(inputs, workers=2)


@pytest.mark.slurm
def test_shards_on_slurm(inputs: Path, slurm: Any) -> None:
    arguments = ["data", "build", str(inputs), "--dedup", "--slurm", "--workers", "3", "--json"]

    def build_there(*more: str) -> subprocess.CompletedProcess[str]:
        out = str(inputs.parent / "out.arrow")
        command = [sys.executable, "-c", MAIN, *arguments, "--out", out, *more]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    refused = build_there("--partition", "none")
    assert refused.returncode == 3, refused.stderr
    assert "Slurm refused the jobs" in refused.stderr
    (inputs / "9.jsonl").write_text("{")
    failed = build_there()
    assert failed.returncode == 2, failed.stderr
    assert "9.jsonl:1: not JSON" in failed.stderr
    (inputs / "9.jsonl").unlink()
    done = build_there("--time", "0:05:00")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["shards"], result["workers"]) == (FILES, 3)
    assert result["continued"] > 0
    build(inputs, "here.arrow")
    assert content(inputs) == content(inputs, "here.arrow")
    assert names_in(inputs.parent) == sorted(
        ["in", *(name + end for name in ("out.arrow", "here.arrow") for end in ("", ".json"))]
    )


@pytest.mark.slurm
@pytest.mark.parametrize("how", ["scancel", "interrupt"])
def test_jobs_that_end_early(many: Path, slurm: Any, how: str) -> None:
    process = start(many, f"slurm-{how}.arrow", "--slurm")
    array = process.stderr.readline().decode().split()[2].strip(":")
    work = WorkFolder.of(many.parent / f"slurm-{how}.arrow")
    wait_for(lambda: work.path.exists() and (work.running() or work.shard_names()))
    if how == "scancel":
        subprocess.run(["scancel", array], check=True)
    else:
        process.send_signal(signal.SIGINT)
    stderr = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait() == {"scancel": 3, "interrupt": 130}[how], stderr
    if how == "scancel":
        assert f"Slurm job {array}_" in stderr
        assert "ended in state CANCELLED" in stderr
        (logs,) = work.logs.iterdir()
        assert f"see {logs}/{array}_" in stderr or "it never started" in stderr
        assert list(logs.glob("*.err"))
    queue = ["squeue", "--noheader", "--states=PENDING,RUNNING", "--jobs", array]
    wait_for(lambda: not subprocess.run(queue, capture_output=True, check=False).stdout)
    assert not (many.parent / f"slurm-{how}.arrow").exists()
