"""Slurm's own messages of a launch that fails, and whose fault they are."""

import subprocess
import sys
from collections.abc import Sequence

import pytest

from slurmllm.core.run.records import Fault, LaunchFailure
from slurmllm.core.slurm.error_texts import ErrorText, fault_of, launch_failure, table

CASES = [(row, example) for row in table() for example in row.examples]


@pytest.mark.parametrize(("row", "example"), CASES, ids=[example[:70] for _, example in CASES])
def test_a_row_explains_its_examples(row: ErrorText, example: str) -> None:
    assert row.pattern.search(example)
    assert fault_of(example) == row.fault
    assert row.source


NODES = ["n1", "n2", "n3"]


def failed(*lines: str, command: Sequence[str] = (), nodes: Sequence[str] = NODES) -> LaunchFailure:
    process = subprocess.Popen(
        [sys.executable, "-c", "raise SystemExit(1)", *command], stdout=subprocess.DEVNULL
    )
    process.wait()
    failure = launch_failure([process], 0.234, lines, nodes)
    assert failure is not None
    return failure


KILLED = "srun: error: n1: task 0: Killed"
ABORTED = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish."
STEP = "slurmstepd: error: *** STEP 5.0 ON n1 CANCELLED AT 2026-11-26T10:00:00 ***"
TASK = "srun: error: Task launch for StepId=5.0 failed on node"


@pytest.mark.parametrize(
    ("lines", "fault", "message", "nodes"),
    [
        ([f"{TASK} n2: Job credential expired", ABORTED, STEP, KILLED], "node", 0, ["n2"]),
        ([KILLED, f"{TASK} n2: Unspecified error"], "node", 1, ["n2"]),
        ([f"{TASK} {node}: Job credential expired" for node in NODES], "node", 2, NODES),
        ([f"{TASK} n1: Job credential revoked", KILLED], "job", 0, ["n1"]),
        (["srun: error: task 2 launch failed: Slurmd could not connect IO"], "node", 0, ["n3"]),
        (["srun: error: Aborting, can not test connection to node 1."], "network", 0, ["n2"]),
        (["srun: error: slurm_receive_msgs: [[n3.site]:6818] failed: x"], "network", 0, ["n3"]),
        ([KILLED, "srun: error: n2: task 1: Exited with exit code 1"], "result", 0, ["n1", "n2"]),
        (["srun: error: what nobody knows", KILLED, ABORTED], "unknown", 0, []),
        (["step 7", "n2: srun: error: quoted"], "unknown", None, []),
        (
            ["slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.", KILLED],
            *("memory", 0, []),
        ),
        (
            ["srun: error: n2: task 1: Out Of Memory", f"{TASK} n2: Communication connection"],
            *("memory", 0, ["n2"]),
        ),
    ],
)
def test_the_line_that_explains_most(
    lines: list[str], fault: Fault, message: int | None, nodes: list[str]
) -> None:
    failure = failed(*lines)
    assert failure.message == ("" if message is None else lines[message])
    assert (failure.fault, list(failure.nodes)) == (fault, nodes)
    assert failure.exit_code == 1
    assert failure.text.endswith(": exit code 1 after 0.2 s)")


def test_a_refusal_says_which_option_or_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "500")
    exclusive = (
        "srun: fatal: SLURM_MEM_PER_CPU, SLURM_MEM_PER_GPU, and SLURM_MEM_PER_NODE are mutually "
        "exclusive."
    )
    assert failed(exclusive).options == ("SLURM_MEM_PER_CPU=500",)
    memory = (
        "srun: error: Unable to create step for job 5: Memory required by task is not available"
    )
    command = ["--mem=1G", "--mem=900G", "--exclusive", "x" * 300]
    assert failed(memory, command=command).options == ("--mem=900G",)
    assert failed(memory).options == ("--mem", "--mem-per-cpu", "--mem-per-gpu")
    assert len(failed(memory, command=["x" * 300]).command) < 200  # profiles are long


def test_a_step_that_succeeds_has_no_failure() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert launch_failure([process], 1.0, [KILLED], ["n1"]) is None
