"""A job's resources are its script's, whatever the shell of `submit` and its modules have set."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from end_to_end.bench import SLOWLY, Bench
from end_to_end.scenes import Stage, scene
from slurm.test_environment import input_variables

from slurmllm.slurm.client import SlurmClient

pytestmark = pytest.mark.slurm

# Values that change a job, by variable without its prefix; 1 for all others.
HARMFUL = {
    **dict.fromkeys(("OUTPUT", "ERROR", "INPUT"), "/dev/null"),
    **dict.fromkeys(("STDOUTMODE", "STDERRMODE", "STDINMODE"), "/dev/null"),
    **dict.fromkeys(("EXPORT", "EXPORT_ENV"), "NONE"),
    **dict.fromkeys(("GPUS", "GPUS_PER_NODE", "GPUS_PER_TASK"), "1"),
    **dict.fromkeys(("GRES", "STEP_GRES", "TRES_PER_TASK"), "gres/gpu:1"),
    **dict.fromkeys(("PROLOG", "EPILOG", "TASK_PROLOG", "TASK_EPILOG"), "/bin/false"),
    **dict.fromkeys(("WORKING_DIR", "REMOTE_CWD"), "/usr"),
    **{"DISTRIBUTION": "arbitrary", "HINT": "nomultithread", "CPU_BIND": "rank", "UMASK": "0777"},
    **{"MEM_PER_NODE": "500", "MEM_PER_CPU": "100", "MEM_BIND": "local", "SIGNAL": "TERM@50"},
    **{"ARRAY_INX": "0-1", "EXCLUSIVE": "user", "CLUSTERS": "other", "CONSTRAINT": "none"},
    **{"OPEN_MODE": "truncate", "CPU_FREQ_REQ": "low", "ACCTG_FREQ": "task=1"},
}
# Memory and GPUs count; 4 nodes: two jobs run at a time.
CONF = """\
GresTypes=gpu
Name=gpu File={folder}/gpu[0-3]
AccountingStorageTRES=gres/gpu
SelectTypeParameters=CR_Core_Memory
NodeName=n1 CPUs=4 RealMemory=20000 Gres=gpu:4
NodeName=n2 CPUs=4 RealMemory=20000 Gres=gpu:4
NodeName=n3 CPUs=4 RealMemory=20000 Gres=gpu:4
NodeName=n4 CPUs=4 RealMemory=20000 Gres=gpu:4
"""
DEFAULTS = ("ACCOUNT", "PARTITION", "QOS", "RESERVATION")
PROBE = Path(__file__).with_name("step_probe.py")
# The script's own signal, and a shell that shows which one came.
SIGNALLED = """\
trap 'echo signal USR1; exit' USR1
trap 'echo signal TERM; exit' TERM
for _ in {1..600}; do sleep 0.1; done
"""


def variables(*commands: str) -> set[str]:
    names = {name for command in commands for name in input_variables(command)}
    return names - {"SLURM_CONF"}


def harmful(name: str) -> str:
    return HARMFUL.get(name.partition("_")[2], "1")


def shown(kind: str, name: str) -> dict[str, str]:
    done = subprocess.run(["scontrol", "show", kind, name], capture_output=True, text=True)
    return dict(re.findall(r"(\S+?)=(\S+)", done.stdout))


@scene()
def test_job_and_step_are_as_the_script_says(stage: Stage) -> None:
    """Whatever variables the shell of `submit` has."""
    names = variables("sbatch", "srun", "salloc") - {f"SBATCH_{name}" for name in DEFAULTS}
    line = (*stage.line("leak"), *SLOWLY, "--time=0:20:00", "--mem=600", "--json")
    output = stage.call(*line, env={name: harmful(name) for name in names})
    job_id = json.loads(output[output.index("{") :])["jobs"]["train"]
    stage.wait_for_step("leak", 1)
    job = shown("job", job_id)
    step = shown("step", f"{job_id}.1") or shown("step", f"{job_id}.0")
    expected = {
        **{"NumNodes": "2", "TimeLimit": "00:20:00", "Requeue": "1", "MinMemoryNode": "600M"},
        **{"WorkDir": str(stage.runs / "leak"), "JobName": "leak-train"},
        "StdOut": str(stage.runs / "leak" / "logs" / "train.log"),
    }
    assert {key: job.get(key) for key in expected} == expected
    assert "ArrayJobId" not in job
    assert (step["Nodes"], step["Tasks"]) == ("2", "2"), step
    assert step["TimeLimit"] in ("UNLIMITED", "00:20:00")
    assert re.search(r"cpu=8\b", step["TRES"]), step
    stage.look("cancel", "leak")
    stage.wait("leak", "cancelled")


@pytest.fixture(scope="module")
def _site(
    new_cluster: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("site")
    for number in range(4):
        (folder / f"gpu{number}").touch()
    (folder / "conf").write_text(CONF.format(folder=folder))
    cluster = new_cluster(folder / "state")
    cluster.call("up", "--nodes=4", f"--conf={folder}/conf")
    yield cluster.slurm_conf
    cluster.call("down")


@pytest.fixture
def site(_site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", _site)


class Probes:
    """Jobs with the directives of a run's script and a probe as their body.

    Args:
        runs: The folder of their runs' directories.
    """

    def __init__(self, runs: Path) -> None:
        self.runs, self.jobs = runs, dict[str, str]()
        options = ("submit", "tiny_neox", "--dry-run", "--json", "--nodes=2", "--name=NAME")
        times = ("--time=2", "--mem=600", "--gres=gpu:4", "--set=slurm.signal_lead_s=80")
        script = json.loads(Bench(runs).call(*options, *times))["scripts"]["train"]
        self.script = script.partition("# Body of the train job")[0]

    def submit(self, variable: str) -> None:
        """Submit one with a variable in this shell and in that of the job; "": without."""
        name = f"probe{len(self.jobs)}"
        (self.runs / name / "logs").mkdir(parents=True)
        value, waits = harmful(variable), SIGNALLED if variable.endswith("SIGNAL") else ""
        # An allocation's number and its nodes say which job this is.
        export = f"export {variable}={shlex.quote(value)}\n" if variable else ""
        export *= variable != "SLURM_JOB_ID"
        probe = f"{sys.executable} -P {PROBE} {name}\n"
        with pytest.MonkeyPatch.context() as patch:
            if variable:
                patch.setenv(variable, value)
            script = self.script.replace("NAME", name)
            self.jobs[variable] = SlurmClient().submit(script + export + probe + waits)

    def results(self) -> dict[str, Any]:
        """Wait for all, and return what each has printed."""
        client, ids = SlurmClient(), [*self.jobs.values()]
        while any(job.active for job in client.queue(ids).values()):
            time.sleep(0.5)
        texts = [self.runs / f"probe{n}/logs/train.log" for n in range(len(ids))]
        return {
            variable: text.read_text().splitlines() if text.is_file() else ["no output"]
            for variable, text in zip(self.jobs, texts, strict=True)
        }


def salloc(variable: str) -> list[str]:
    """Return what a probe prints in a job of salloc, with a variable in this shell."""
    environment = {**os.environ, **({variable: harmful(variable)} if variable else {})}
    command = [sys.executable, "-P", str(PROBE), "salloc"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    return done.stdout.splitlines() or done.stderr.splitlines()


def difference(expected: list[str], lines: list[str]) -> list[str]:
    """Return what is in only one of two probes' output."""
    try:
        parts = [
            {*values["job"], *values["step"]} for values in map(json.loads, (expected[0], lines[0]))
        ]
    except ValueError:
        return lines
    return sorted({*parts[0], *expected[1:]} ^ {*parts[1], *lines[1:]})


@pytest.mark.long  # the test above has all of them at once
@pytest.mark.usefixtures("site")
@pytest.mark.timeout(3600)
def test_each_variable_alone_changes_no_job(tmp_path: Path) -> None:
    probes, names = Probes(tmp_path), variables("sbatch", "srun", "salloc")
    began = time.monotonic()
    for variable in ("", *sorted(names)):
        probes.submit(variable)
    assert time.monotonic() - began < 60 + 2 * len(names)  # of SBATCH_WAIT
    results = probes.results()
    expected = results.pop("")
    # The script asks for USR1.
    signalled = {name: [*expected, "signal USR1"] for name in names if name.endswith("SIGNAL")}
    seen = {n: difference(signalled.get(n, expected), lines) for n, lines in results.items()}
    assert not {name: lines for name, lines in seen.items() if lines}


@pytest.mark.long
@pytest.mark.usefixtures("site")
@pytest.mark.timeout(3600)
def test_each_variable_of_salloc_alone_changes_no_job() -> None:
    names, expected = variables("salloc") - {f"SALLOC_{name}" for name in DEFAULTS}, salloc("")
    seen = {name: difference(expected, salloc(name)) for name in sorted(names)}
    assert not {name: lines for name, lines in seen.items() if lines}
