"""Nodes that lack something: stand-ins for vendors' programs, profiles, folders for /sys."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmllm.core.config.cluster import Cluster
from slurmllm.core.config.resolve import resolve

Program = Callable[[str, str], None]
Profile = Callable[..., Cluster]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """(name, shell script) → a program on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.defpath}")

    def put(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return put


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    """(name of a shipped profile, overrides…) → the profile, its disk in a folder of the test."""

    def make(name: str, *overrides: str) -> Cluster:
        disk = tmp_path / "disk"
        disk.mkdir(exist_ok=True)
        local = f"cluster.node_local={disk}"
        return resolve("tiny_neox", name, [local, *overrides]).cluster

    return make


def health(runs: Path, *arguments: str, code: int = 0) -> str:
    """What the command prints on its standard output."""
    command = [sys.executable, "-m", "slurmllm", "health", "--cluster=local", *arguments]
    command += ["--runs-dir", str(runs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout
