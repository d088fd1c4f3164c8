"""`slurmllm doctor` as a command: exit codes, both forms of its output, no torch of its own."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from command_line import call

from slurmllm.core.slurm.client import COMMANDS
from slurmllm.launch.diagnose import login_node, ok


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`doctor` in this process, without its processes that import torch and lm_eval."""
    monkeypatch.setattr(login_node, "import_torch", lambda: "imported 2.13.0 None")
    monkeypatch.setattr(login_node, "private_names_finding", lambda: ok("private APIs", ""))

    def run(*arguments: str, path: str) -> Result:
        monkeypatch.setenv("PATH", path)
        return call("doctor", *arguments)

    return run


def checks(text: str) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(text)["checks"]}


def test_a_laptop_without_slurm_can_train(tmp_path: Path, doctor: Callable[..., Result]) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "g++").symlink_to("/bin/true")
    done = doctor("--json", "--runs-dir", str(tmp_path / "runs"), path=str(tmp_path / "bin"))
    states = checks(done.stdout)
    assert done.exit_code == 0, done.stdout
    assert states["slurm commands"]["state"] == "warn"
    assert states["nodes"]["state"] == "skipped"
    assert states["torch"]["state"] in ("ok", "warn")
    assert states["file system"]["state"] == "ok"
    assert "--recipe RECIPE compares" in states["free space"]["found"]
    arguments = ("--recipe", "llama3_70b", "--cluster", "local", "--runs-dir", str(tmp_path))
    table = doctor(*arguments, path=str(tmp_path / "bin")).stdout
    # 12 bytes for each of 70.6 billion parameters, four times: no disk of a test has them.
    assert "free space: checkpoint.keep + 1 checkpoints of the recipe take 3,154.0 GiB" in table
    assert "\nskipped: slurm controller, slurm version, requeue, accounting, partition" in table


def test_slurm_that_does_not_answer_is_3(tmp_path: Path, doctor: Callable[..., Result]) -> None:
    for command in COMMANDS:
        script = tmp_path / command
        script.write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
        script.chmod(0o755)
    done = doctor("--json", "--runs-dir", str(tmp_path), path=f"{tmp_path}:/usr/bin:/bin")
    assert done.exit_code == 3
    assert "Unable to contact" in checks(done.stdout)["slurm controller"]["found"]
    assert json.loads(done.stdout)["exit_code"] == 3


def test_an_environment_without_the_neuron_wheels_is_2(
    tmp_path: Path, doctor: Callable[..., Result]
) -> None:
    done = doctor("--cluster", "trn1", "--runs-dir", str(tmp_path), path=str(tmp_path))
    assert done.exit_code == 2
    assert re.search(r"^fail +neuronx-distributed |^fail: neuronx-distributed: ", done.stdout, re.M)
    assert "warn: slurm commands: --local trains on this machine" in done.stdout


def test_torch_is_imported_in_a_process_of_its_own() -> None:
    assert login_node.import_torch().startswith("imported ")
    assert call("doctor", "--cluster", "trn9").exit_code == 2
