"""Tasks in containers: the commands that start them, and what is found before any srun."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from slurmllm.core.config.cluster import Container
from slurmllm.core.config.resolve import resolve
from slurmllm.core.errors import ConfigError
from slurmllm.core.slurm.container import (
    CONTAINER,
    CONTAINER_PYTHON,
    check_container,
    container_arguments,
    in_container,
)
from slurmllm.launch.supervise.allocation import task_command


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the PATH with `docker` and `apptainer`, which print what they get and run it."""
    for name in ("docker", "apptainer"):
        program = tmp_path / name
        program.write_text('#!/bin/bash\nprintf "%s\\n" "$@" >"$0.got"\nexec "${@: -4}"\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def start(command: str, monkeypatch: pytest.MonkeyPatch, python: str = sys.executable) -> None:
    monkeypatch.setenv(CONTAINER, command)
    monkeypatch.setenv(CONTAINER_PYTHON, python)


def test_folders_are_shown_once_and_at_the_same_paths() -> None:
    made = Container(runtime="apptainer", image="/a.sif", mounts=("/x:/y:ro",))
    folders = ["/fsx/runs/r1", "/fsx/runs", Path("/fsx/runs2"), "/local"]
    command = container_arguments(made, "cuda", folders)
    binds = "--bind /fsx/runs:/fsx/runs --bind /fsx/runs2:/fsx/runs2 --bind /local:/local"
    assert shlex.join(command) == f"apptainer exec --nv {binds} --bind /x:/y:ro /a.sif"


def test_docker_gets_variables_by_name_only(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start("docker run --rm the/image", monkeypatch)
    monkeypatch.setenv("HF_TOKEN", "cAnArY")
    monkeypatch.setenv("SLURM_NODEID", "3")
    command = in_container([sys.executable, "-P", "-c", "import os; print(os.environ['HF_TOKEN'])"])
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "cAnArY\n"
    got = (runtime / "docker.got").read_text().splitlines()
    assert got[:2] == ["run", "--rm"]
    assert got[-5:-1] == ["the/image", sys.executable, "-P", "-c"]
    pairs = [got[place + 1] for place, word in enumerate(got) if word == "--env"]
    assert {"HF_TOKEN", "SLURM_NODEID"} <= set(pairs)
    assert not {"PATH", "HOME", "LD_LIBRARY_PATH"} & set(pairs)
    assert "cAnArY" not in got


def test_setup_runs_outside_except_with_pyxis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMLLM_SETUP", "module load apptainer")
    command = [sys.executable, "-m", "slurmllm"]
    start("apptainer exec /a.sif", monkeypatch, "python3")
    inside = ["apptainer", "exec", "/a.sif", "python3", "-m", "slurmllm"]
    assert task_command(command)[:2] == ["bash", "-c"]
    assert task_command(command)[-6:] == inside
    monkeypatch.delenv(CONTAINER)
    assert task_command(command) == ["python3", "-m", "slurmllm"]
    monkeypatch.delenv(CONTAINER_PYTHON)
    monkeypatch.delenv("SLURMLLM_SETUP")
    assert task_command(command) == command


def test_what_is_wrong_is_found_before_any_srun(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("apptainer exec /a.sif", monkeypatch)
    with pytest.raises(ConfigError, match=r"has no /nosuch\.sif; correct image and mounts"):
        check_container("1.0", [tmp_path, Path("/nosuch.sif")])
    with pytest.raises(ConfigError, match=r"has slurmllm .*, and the run was submitted with 9\.9"):
        check_container("9.9", [])
    (runtime / "apptainer").write_text("#!/bin/sh\necho 'FATAL: no such image' >&2\nexit 255\n")
    with pytest.raises(ConfigError, match=r"\(exit code 255\): FATAL: no such image; correct"):
        check_container("1.0", [])
    start("podman run nosuch", monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="has no podman on the PATH; load its module"):
        check_container("1.0", [])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{runtime: lxc, image: x}", "must be 'pyxis', 'apptainer'"),
        ("{runtime: docker}", r"cluster\.container\.image: missing"),
        ("{runtime: docker, image: x, mounts: [relative]}", "must be /SOURCE or"),
        ("{runtime: docker, image: 'x y'}", r"cluster\.container\.image"),
    ],
)
def test_faults_of_a_profile(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve("tiny_neox", overrides=[f"cluster.container={value}"])
