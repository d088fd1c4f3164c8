"""The Containerfile: what it copies is there and suffices, and where a builder is, it builds."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_BUILDERS = {"podman": ("info",), "buildah": ("info",), "docker": ("info",)}


def steps() -> list[tuple[str, str]]:
    """The instructions with their arguments, without comments and line breaks."""
    text = (ROOT / "Containerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", "")
    pairs = (line.partition(" ") for line in text.splitlines() if line)
    return [(name, arguments.strip()) for name, _, arguments in pairs]


def copied() -> list[tuple[list[str], str]]:
    """Sources of the build folder and target of each COPY."""
    lines = (shlex.split(arguments) for name, arguments in steps() if name == "COPY")
    return [(line[:-1], line[-1]) for line in lines if not line[0].startswith("--from=")]


def test_what_it_copies_is_there_and_builds_the_wheel(tmp_path: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for sources, target in copied():
        for source in sources:
            assert source.split("/")[0] not in ignored
            path, into = ROOT / source, tmp_path / target
            if path.is_dir():
                shutil.copytree(path, into, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                into = into / path.name if target.endswith("/") else into
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, tmp_path / path.name if target == "./" else into)
    (build,) = (rest for name, rest in steps() if name == "RUN" and rest.startswith("pip wheel"))
    command = shlex.split(build.replace("/wheels", str(tmp_path / "out")))
    # Without a network: with the builder that is installed here.
    command = [sys.executable, "-m", *command, "--no-build-isolation"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert len([*(tmp_path / "out").glob("slurmllm-*.whl")]) == 1


def test_its_shell_is_sound() -> None:
    for name, arguments in steps():
        if name == "RUN":
            subprocess.run(["sh", "-n", "-c", arguments], check=True)
            checked = subprocess.run(
                [Path(sys.executable).parent / "shellcheck", "--shell=sh", "-"],
                input=arguments,
                capture_output=True,
                text=True,
                check=False,
            )
            assert checked.stdout == ""


def builder() -> str:
    reasons = []
    for name, arguments in _BUILDERS.items():
        if shutil.which(name) is None:
            reasons.append(f"no {name}")
            continue
        done = subprocess.run([name, *arguments], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return name
        reasons.append((done.stderr.strip().splitlines() or [f"{name} fails"])[-1])
    pytest.skip(f"nothing builds images here: {'; '.join(reasons)}")


@pytest.mark.long
def test_the_image_of_the_cpu_is_built_and_plans() -> None:
    program = builder()
    tag = "slurmllm-test"
    command = [program, "build", "--tag", tag, "--build-arg", "DEVICE=cpu"]
    subprocess.run([*command, "--file", ROOT / "Containerfile", ROOT], check=True)
    if program == "buildah":  # builds only
        return
    run = [program, "run", "--rm", tag, "slurmllm", "plan", "neox_20b", "--nodes", "4"]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert "neox_20b on 4 nodes" in done.stdout
