"""The lines of cluster.setup: in a batch script, in a task of srun, and what is wrong with them."""

import subprocess
import sys
from pathlib import Path

import pytest

from slurmllm.core.errors import ConfigError
from slurmllm.core.slurm import setup


def run(*lines: str, then: str = 'echo "$GREETING"', stop: bool = False) -> tuple[int, str, str]:
    script = "\n".join([*setup.setup_script(lines, stop=stop), "set -euo pipefail", then])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_the_lines_run_in_the_script_itself(tmp_path: Path) -> None:
    file = tmp_path / "env.sh"
    file.write_text('false\ndeclare -x GREETING="hello $NAME\'s"\n')  # its own failures are its own
    assert run("NAME='a b'  # a comment", f"source {file}") == (0, "hello a b's\n", "")
    # A line that exits is a failure.
    code, output, errors = run("exit 0", then="echo body")
    assert (code, output) == (2, "")
    assert "line 1 failed with exit code 0: exit 0" in errors


@pytest.mark.parametrize(
    ("line", "code"), [("module-that-is-not load x", 127), ("false", 1), ("echo 'a", 2)]
)
def test_the_first_failing_line_is_named_and_the_rest_do_not_run(line: str, code: int) -> None:
    result, output, errors = run("true", line, "echo no", then=f'echo "${setup.SETUP_ERROR}"')
    message = f"cluster.setup: line 2 failed with exit code {code}: {line}\n"
    assert (result, output) == (0, message)  # the body goes on: the supervisor records it
    assert errors.endswith(message)
    assert run(line, stop=True)[0] == 2


def test_each_task_of_srun_runs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "import os, sys; print(os.environ['A'], sys.argv[1:])", "b c"]
    monkeypatch.delenv(setup.SETUP, raising=False)
    assert setup.in_setup(command) == command
    monkeypatch.setenv(setup.SETUP, "A=1\nexport A")
    done = subprocess.run(setup.in_setup(command), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1 ['b c']\n")
    monkeypatch.setenv(setup.SETUP, "A=1\nfalse")
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    done = subprocess.run(setup.in_setup(command), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "n3: cluster.setup: line 2 failed with exit code 1: false\n"


def test_faults_are_found_before_anything_is_submitted() -> None:
    assert setup.setup_faults(["module load cuda/12.4", "[ -d /x ] && source /x/activate"]) == []
    result = setup.setup_faults(["true", "if true", "echo $("])
    assert len(result) == 2
    assert result[0] == "cluster.setup: line 2: syntax error: unexpected end of file: if true"
    assert result[1].startswith("cluster.setup: line 3: ")


def test_our_own_lines_pass_shellcheck() -> None:
    tool = Path(sys.executable).parent / "shellcheck"
    for script in (setup._TASK, "\n".join(setup.setup_script(["true"], stop=False))):
        subprocess.run([tool, "--shell=bash", "-"], input=script, text=True, check=True)


def test_an_attempt_begins_only_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (setup.SETUP_ERROR, setup.VERSION):
        monkeypatch.delenv(name, raising=False)
    setup.check_setup_ran("1.0")
    monkeypatch.setenv(setup.VERSION, "0.9")
    with pytest.raises(ConfigError, match=r"cluster\.python: .* has slurmllm 1\.0, .* with 0\.9"):
        setup.check_setup_ran("1.0")
    monkeypatch.setenv(setup.SETUP_ERROR, "cluster.setup: line 1 failed with exit code 1: false")
    with pytest.raises(ConfigError, match="line 1 failed with exit code 1: false; correct the"):
        setup.check_setup_ran("1.0")
