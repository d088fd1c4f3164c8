"""`submit`, `status`, `cancel`, `resume` on the fake cluster, and bad input."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from slurmllm.cli import submission
from slurmllm.cli.main import cli
from slurmllm.errors import SlurmError
from slurmllm.records import GraphManifest, JobsRecord
from slurmllm.rundir import RunDir
from slurmllm.slurm import client
from slurmllm.slurm.fake import FakeSlurm


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeSlurm:
    cluster = FakeSlurm()
    monkeypatch.setattr(client, "SlurmCommands", lambda: cluster)
    monkeypatch.setattr(submission, "SlurmCommands", lambda: cluster)
    monkeypatch.chdir(tmp_path)
    return cluster


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A small corpus and a tokenizer, as --set options."""
    folder = tmp_path_factory.mktemp("inputs")
    text = folder / "text.txt"
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "the",
        "lazy",
        "dog",
        "and",
        "runs",
        "away",
        "from",
        "them",
        "all",
    ]
    lines = (" ".join(words[i % 7 :] + words[: i % 11]) for i in range(3000))
    text.write_text("\n\n".join(lines))
    for arguments in (
        ("data", "build", str(text), "--out", str(folder / "c.arrow")),
        ("tokenizer", "train", str(text), "--out", str(folder / "t.json"), "--vocab-size", "300"),
    ):
        assert call(*arguments).exit_code == 0
    corpus, tokenizer = f"data.corpus={folder}/c.arrow", f"data.tokenizer={folder}/t.json"
    return ("--set", corpus, "--set", tokenizer)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def fails(code: int, *arguments: str) -> str:
    result = call(*arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert result.stderr.startswith("error: ") or "Usage:" in result.stderr
    return result.stderr


def submitted(fake: FakeSlurm, inputs: tuple[str, ...], *more: str) -> dict[str, object]:
    result = call("submit", "tiny_neox", "--nodes", "4", *inputs, "--json", *more)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_submit_writes_the_run_and_two_jobs(fake: FakeSlurm, inputs: tuple[str, ...]) -> None:
    sent = submitted(fake, inputs, "--partition", "main", "--account", "ml", "--time", "8:00:00")
    run = RunDir(Path(str(sent["run_dir"])))
    assert sent["run"] == "tiny_neox-001"
    assert sent["jobs"] == {"precompile": "1", "train": "2"}
    assert fake.jobs["2"].after_ok == "1"
    assert fake.jobs["2"].script == run.script("train").read_text()
    assert "#SBATCH --partition=main\n" in fake.jobs["1"].script
    assert "#SBATCH --time=8:00:00\n" in fake.jobs["2"].script
    config = yaml.safe_load(run.config.read_text())
    assert config["train"]["steps"] == 120
    assert config["origin"]["slurm.partition"] == "--partition"
    assert json.loads(run.plan.read_text())["data"] == 4
    assert JobsRecord.load(run.jobs).submissions[0].train_job == "2"
    assert submitted(fake, inputs)["run"] == "tiny_neox-002"


def test_submit_tells_what_to_type_next(fake: FakeSlurm, inputs: tuple[str, ...]) -> None:
    text = call("submit", "tiny_neox", "--nodes", "2", "--name", "first", *inputs).stdout
    for words in ("precompile job 1, then train job 2", "slurmllm logs -f first", "data 2"):
        assert words in text


def test_a_job_that_cannot_be_taken_back_is_named(
    fake: FakeSlurm, inputs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = fake.submit

    def refuse_the_second(script: Path, after_ok: str | None = None) -> str:
        fake.refuse = None if after_ok is None else "QOSMaxSubmitJobPerUserLimit"
        return submit(script, after_ok)

    def cannot_cancel(job_ids: object) -> None:
        raise SlurmError("scancel failed with exit code 1: down")

    monkeypatch.setattr(fake, "submit", refuse_the_second)
    words = fails(3, "submit", "tiny_neox", "--name", "r", *inputs)
    assert "QOSMaxSubmitJobPerUserLimit" in words
    assert fake.jobs["1"].state == "CANCELLED"
    assert not Path("runs/r").exists()
    monkeypatch.setattr(fake, "cancel", cannot_cancel)
    words = fails(3, "submit", "tiny_neox", "--name", "r", *inputs)
    assert "QOSMaxSubmitJobPerUserLimit" in words
    assert "`scancel 2` ends it" in words
    assert JobsRecord.load(RunDir(Path("runs/r")).jobs).submissions[0].precompile_job == "2"


def test_two_submits_at_the_same_moment_get_two_names(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with ThreadPoolExecutor(8) as pool:
        claims = [pool.submit(submission.claim_run, runs, None, "tiny_neox") for _ in range(8)]
        names = sorted(claim.result().name for claim in claims)
    assert names == [f"tiny_neox-{number:03d}" for number in range(1, 9)]


def test_a_damaged_run_does_not_hide_the_others(fake: FakeSlurm, inputs: tuple[str, ...]) -> None:
    submitted(fake, inputs, "--name", "whole")
    sent = submitted(fake, inputs, "--name", "broken")
    RunDir(Path(str(sent["run_dir"]))).jobs.write_text("{")
    states = {run["name"]: run for run in json.loads(call("status", "--json").stdout)["runs"]}
    assert states["whole"]["state"] == "queued"
    assert states["broken"]["state"] == "damaged"
    assert "jobs.json" in states["broken"]["why"]


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("python -m slurmllm recipes neox_20b | head -1; exit ${PIPESTATUS[0]}", (0, 141)),
        ("python -m slurmllm recipes > /dev/full", (4,)),
        ("python -m slurmllm nosuch", (2,)),
    ],
)
def test_only_compare_answers_with_exit_code_1(script: str, code: tuple[int, ...]) -> None:
    script = script.replace("python", sys.executable, 1)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode in code, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("recipe", ["neox_20b", "tiny_neox", "pythia_6.9b"])
def test_dry_run_prints_and_touches_nothing(fake: FakeSlurm, tmp_path: Path, recipe: str) -> None:
    result = call("submit", recipe, "--nodes", "4", "--dry-run")
    assert result.exit_code == 0
    assert result.stdout.count("#!/bin/bash") == 2
    assert "#SBATCH --nodes=4" in result.stdout
    assert not list(tmp_path.iterdir())
    assert not fake.jobs


def test_status_follows_the_jobs(fake: FakeSlurm, inputs: tuple[str, ...]) -> None:
    submitted(fake, inputs, "--name", "r")

    def state() -> str:
        return str(json.loads(call("status", "r", "--json").stdout)["state"])

    assert state() == "queued"
    fake.start("1")
    assert state() == "precompiling"
    fake.finish("1")
    fake.start("2")
    assert state() == "training"
    fake.fail_node("n1")
    assert state() == "queued"  # no attempt left a record
    assert call("cancel", "r").exit_code == 0
    assert state() == "cancelled"
    assert "nothing to cancel" in call("cancel", "r").stdout
    assert json.loads(call("status", "--json").stdout)["runs"][0]["name"] == "r"


def test_a_failed_precompile_job_is_named(fake: FakeSlurm, inputs: tuple[str, ...]) -> None:
    submitted(fake, inputs, "--name", "r")
    fake.start("1")
    fake.finish("1", "FAILED")
    shown = json.loads(call("status", "r", "--json").stdout)
    assert shown["state"] == "stopped"
    assert "precompile job FAILED" in shown["why"]


def test_resume_submits_again_in_the_same_directory(
    fake: FakeSlurm, inputs: tuple[str, ...]
) -> None:
    sent = submitted(fake, inputs, "--name", "r")
    assert "still waits or runs" in fails(2, "resume", "r")
    call("cancel", "r")
    again = json.loads(call("resume", "r", "--nodes", "2", "--json").stdout)
    assert again["jobs"] == {"precompile": "3", "train": "4"}
    assert again["mesh"]["data"] == 2
    call("cancel", "r")
    run = RunDir(Path(str(sent["run_dir"])))
    GraphManifest(
        complete=True, backend="native", versions={}, graphs=0, archive_bytes=0,
        archive_sha256="", cold_first_step_s=1.0, files=(),
    ).save(run.graphs_manifest)  # fmt: skip
    third = json.loads(call("resume", "r", "--json").stdout)
    assert third["jobs"] == {"precompile": None, "train": "5"}
    assert fake.jobs["5"].after_ok is None
    assert len(JobsRecord.load(run.jobs).submissions) == 3


def test_sbatch_refusing_leaves_the_name_free(fake: FakeSlurm, inputs: tuple[str, ...]) -> None:
    fake.refuse = "Batch job submission failed: Invalid account"
    words = fails(3, "submit", "tiny_neox", "--name", "r", *inputs)
    assert "Invalid account" in words
    assert not Path("runs/r").exists()
    fake.refuse = None
    assert submitted(fake, inputs, "--name", "r")["run"] == "r"


def test_a_taken_name(fake: FakeSlurm, inputs: tuple[str, ...]) -> None:
    submitted(fake, inputs, "--name", "r")
    assert "is a run of recipe 'tiny_neox'" in fails(2, "submit", "tiny_neox", "--name", "r")
    words = fails(2, "submit", "neox_20b", "--nodes", "4", "--name", "r", "--dry-run")
    assert "is a run of recipe 'tiny_neox' (not this one)" in words
    for name in ("../up", "a b", "-x", ""):
        assert "choose another --name" in fails(2, "submit", "tiny_neox", f"--name={name}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("submit", "nosuch"), "unknown recipe 'nosuch'"),
        (("submit", "tiny_neox", "--cluster", "moon"), "unknown cluster profile 'moon'"),
        (("submit", "tiny_neox", "--nodes", "3"), "choose 1, 2 or 4 nodes"),
        (("submit", "tiny_neox", "--set", "optim.lrr=1"), "did you mean 'lr'"),
        (("submit", "tiny_neox", "--set", "data.corpus=no.arrow"), "no.arrow"),
        (("submit", "neox_20b", "--nodes", "4"), "cannot train on them yet"),
        (("submit", "neox_20b", "--nodes", "1", "--set", "backend=native"), "parallel.tensor"),
        (("submit", "tiny_neox", "--set", "data.corpus=null"), "data.corpus: not set"),
        (("status", "nosuch"), "no run 'nosuch'"),
        (("logs", "nosuch"), "no run 'nosuch'"),
        (("cancel", "nosuch"), "no run 'nosuch'"),
        (("resume", "nosuch"), "no run 'nosuch'"),
        (("compare", "nosuch", "other"), "nosuch"),
    ],
)
def test_bad_input(fake: FakeSlurm, arguments: tuple[str, ...], words: str) -> None:
    assert words in fails(2, *arguments)
    assert not fake.jobs


def test_inputs_that_do_not_fit(fake: FakeSlurm, inputs: tuple[str, ...], tmp_path: Path) -> None:
    submit = ("submit", "tiny_neox", *inputs)
    words = fails(2, *submit, "--set", "model.vocab_size=200")
    assert "300" in words
    assert "model.vocab_size" in words
    words = fails(2, *submit, "--set", "train.global_batch=8192", "--set", "model.seq_len=4096")
    assert "fewer than one global batch" in words
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    assert "broken.json" in fails(2, *submit, "--set", f"data.tokenizer={broken}")
    corpus = Path(inputs[1].partition("=")[2])
    cut = tmp_path / "cut.arrow"
    cut.write_bytes(corpus.read_bytes()[:5000])
    assert "cut.arrow" in fails(2, *submit, "--set", f"data.corpus={cut}")


def test_without_slurm_the_way_out_is_named(
    inputs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "--local" in fails(3, "submit", "tiny_neox", *inputs)
    assert not Path("runs/tiny_neox-001").exists()


def test_a_damaged_record_is_named(fake: FakeSlurm, inputs: tuple[str, ...]) -> None:
    sent = submitted(fake, inputs, "--name", "r")
    RunDir(Path(str(sent["run_dir"]))).jobs.write_text('{"submissions": [{')
    assert "jobs.json is damaged" in fails(4, "status", "r")


def test_recipes_and_profiles_are_in_the_wheel(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parent.parent.parent
    source = tmp_path / "source"
    shutil.copytree(root, source, ignore=shutil.ignore_patterns(".*", "runs", "build", "dist"))
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=source, check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    unpacked = tmp_path / "unpacked"
    shutil.unpack_archive(wheel, unpacked, "zip")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "slurmllm", "submit", "neox_20b", "--nodes", "4", "--dry-run"],
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        cwd=tmp_path, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert "supervise" in done.stdout
    assert stat.S_ISDIR((unpacked / "slurmllm" / "_shipped" / "sbatch").stat().st_mode)
