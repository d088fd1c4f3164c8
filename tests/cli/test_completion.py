"""Completion of names by the shell (click's protocol: words in, `type,value` lines out)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def complete(runs: Path, *words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "slurmllm"],
        env=os.environ
        | {
            "_SLURMLLM_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(words),
            "COMP_CWORD": str(len(words) - 1),
            "SLURMLLM_RUNS": str(runs),
        },
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert not done.stderr, done.stderr
    return done.stdout.split()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("neox-1", "neox-2", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("[" * 9)  # its content does not matter
    (tmp_path / "neox-none").mkdir()
    os.mkfifo(tmp_path / "neox-pipe")
    (tmp_path / "neox-loop").symlink_to("neox-loop")
    for name in ("neox-$(touch harm)", "neox-\x1b[31m", "neox\nx", "neox;x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").touch()
    return tmp_path


@pytest.mark.parametrize(
    "verb", [("status",), ("resume",), ("logs", "-f"), ("compare", "other"), ("checkpoint", "list")]
)
def test_names_of_runs(runs: Path, verb: tuple[str, ...]) -> None:
    assert complete(runs, "slurmllm", *verb, "ne") == ["plain,neox-1", "plain,neox-2"]
    assert complete(runs, "slurmllm", *verb, "./x") == ["file,./x"]


def test_names_under_another_root(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    words = ("slurmllm", "status", "--runs-dir", str(runs), "o")
    assert complete(empty, *words) == ["plain,other"]
    assert complete(empty / "absent", "slurmllm", "status", "o") == ["file,o"]


def test_names_of_recipes_and_profiles(runs: Path) -> None:
    assert "plain,tiny_neox" in complete(runs, "slurmllm", "submit", "tiny_")
    assert "plain,tiny_neox" in complete(runs, "slurmllm", "plan", "tiny_neox", "tiny_")
    assert complete(runs, "slurmllm", "submit", "trainers/torch") == ["plain,trainers/torchtitan"]
    assert "plain,trainers/nemo" in complete(runs, "slurmllm", "recipes", "tr")
    assert complete(runs, "slurmllm", "submit", "tiny_neox", "--cluster", "trn") == [
        "plain,trn1",
        "plain,trn1n",
        "plain,trn2",
    ]
