"""A job's resources are its script's, whatever the shell of `submit` and its modules have set."""

from __future__ import annotations

import re
import subprocess
import time

import pytest
from end_to_end.bench import SLOWLY, Bench
from end_to_end.slurm_runs import submit
from slurm.test_environment import input_variables

pytestmark = pytest.mark.slurm

# Values that Slurm takes; any other variable is set to 1, which for most is an option, too.
HARMFUL = {
    **dict.fromkeys(("SBATCH_TIMELIMIT", "SLURM_TIMELIMIT"), "1"),
    **dict.fromkeys(("SBATCH_OUTPUT", "SBATCH_ERROR", "SLURM_STDOUTMODE"), "/dev/null"),
    **dict.fromkeys(("SBATCH_DISTRIBUTION", "SLURM_DISTRIBUTION"), "arbitrary"),
    **dict.fromkeys(("SBATCH_MEM_PER_NODE", "SLURM_MEM_PER_NODE"), "500"),
    "SBATCH_ARRAY_INX": "0-1",
    "SBATCH_SIGNAL": "B:TERM@5",
    "SLURM_JOB_NUM_NODES": "1",
}
KEPT = {"SLURM_CONF"} | {f"SBATCH_{n}" for n in ("ACCOUNT", "PARTITION", "QOS", "RESERVATION")}


def shown(what: str, name: str) -> dict[str, str]:
    done = subprocess.run(["scontrol", "show", what, name], capture_output=True, text=True)
    return dict(re.findall(r"(\S+?)=(\S+)", done.stdout))


@pytest.mark.parametrize("variables", ["all", "SBATCH_ARRAY_INX", "SBATCH_WAIT", "SLURM_TIMELIMIT"])
def test_job_and_step_are_as_the_script_says(
    variables: str,
    slurm: object,
    bench: Bench,
    inputs: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = {name for command in ("sbatch", "srun", "salloc") for name in input_variables(command)}
    name = f"leak-{variables.lower().replace('_', '-')}"
    with monkeypatch.context() as patch:
        for variable in every - KEPT if variables == "all" else {variables}:
            patch.setenv(variable, HARMFUL.get(variable, "1"))
        began = time.monotonic()
        jobs = submit(bench, inputs, name, *SLOWLY, "--time=0:20:00", "--mem=600")
    assert time.monotonic() - began < 60  # of SBATCH_WAIT
    bench.wait_for_step(name, 1)
    job = shown("job", jobs["train"])
    step = shown("step", f"{jobs['train']}.1") or shown("step", f"{jobs['train']}.0")
    expected = {
        **{"NumNodes": "2", "TimeLimit": "00:20:00", "Requeue": "1", "MinMemoryNode": "600M"},
        **{"WorkDir": str(bench.runs / name), "JobName": f"{name}-train"},
        "StdOut": str(bench.runs / name / "logs" / "train.log"),
    }
    assert {key: job.get(key) for key in expected} == expected
    assert "ArrayJobId" not in job
    assert (step["Nodes"], step["Tasks"]) == ("2", "2"), step
    assert step["TimeLimit"] in ("UNLIMITED", "00:20:00")
    assert re.search(r"cpu=8\b", step["TRES"]), step
    bench.look("cancel", name)
