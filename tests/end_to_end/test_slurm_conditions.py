"""Wrong requests and shells that leak accuse no node; broken nodes are still blamed.

The conditions are in conditions.yaml; those of one cluster are played at the same time.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from _devcluster.cluster import Cluster
from _devcluster.processes import program, same_namespace
from end_to_end.bench import SLURMLLM, BenchOfThreads, processes_with
from end_to_end.scenes import worker_of

DEVCLUSTER = Path(__file__).parents[2] / "tools" / "devcluster"
OPTIONS = (
    *("submit", "tiny_neox", "--set=backend=rehearsal", "--set=train.steps=12"),
    *("--set=optim.warmup_steps=2", "--set=checkpoint.every_steps=4", "--set=slurm.backoff_s=1"),
)
FAULT_STEP = 5
PENDING_S, LIMIT_S = 40.0, 300.0
# A site with GPUs (files), unequal nodes, features, limits, and cloud nodes that never boot.
CONF = Path(__file__).with_name("conditions.conf").read_text()
FAULTS_CONF = "NodeName=n4 CPUs=4 Feature=a100\nNodeName=n5 CPUs=4 Feature=a100\n"
RESUME = """\
#!/bin/sh
export SLURM_CONF={conf}
scontrol update NodeName=$1 State=DOWN \
  Reason="(Code:InsufficientInstanceCapacity)Failure when resuming nodes"
"""
COMMANDS = """\
sacctmgr -i add account capped GrpTRES=node=1
sacctmgr -i add user root account=capped
sacctmgr -i add qos narrow MaxTRESPerUser=node=1
sacctmgr -i modify user root set qos+=narrow
scontrol create ReservationName=later StartTime=now+5hours Duration=60 Nodes=n3 Users=root
scontrol update NodeName=n7 State=DRAIN Reason='bad DIMM'
sbatch -o/dev/null -Lmatlab:1 -wn8 -c1 --wrap='sleep 600'
"""


@dataclass(frozen=True)
class Condition:
    """What is done, and what must follow (regular expressions)."""

    name: str
    kind: int | str
    options: Sequence[str] = ()
    nodes: int = 1
    shell: dict[str, Any] = field(default_factory=dict)  # variables of the submitting shell
    within: Sequence[str] = ()  # a command that runs the submission
    step_s: float = 0.02
    fault: Sequence[str] = ()
    state: str = ""  # of the run at the end; `refused`: by submit
    endings: str = "done"  # classes and actions of the attempts
    text: str = ""  # in evidence, reason, warnings or in what submit printed
    blamed: bool = False  # the node of the fault, which is excluded too; else nobody
    excluded: bool = True  # whether a blamed node is
    site: str = "requests"
    ci: bool = True


@dataclass
class Observation:
    """What became of a condition."""

    condition: Condition
    state: str = ""
    endings: str = ""
    text: str = ""
    blamed: list[str] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # nodes with the fault
    leaks: list[str] = field(default_factory=list)  # what job or step has, and the script has not

    @property
    def failures(self) -> list[str]:
        """What differs from what must follow."""
        expected, failures = self.condition, list(self.leaks)
        accused = self.broken if expected.blamed else []
        if not re.fullmatch(expected.state, self.state):
            failures.append(f"state {self.state}, not {expected.state}")
        if self.state not in ("refused", "queued", "waiting") and not re.fullmatch(
            expected.endings, self.endings
        ):
            failures.append(f"endings {self.endings!r}, not {expected.endings}")
        if not re.search(expected.text, self.text, re.IGNORECASE):
            failures.append(f"no {expected.text!r} in {self.text!r}")
        if set(self.blamed) != set(accused):
            failures.append(f"blamed {self.blamed}, not {accused}")
        if expected.excluded and not set(accused) <= set(self.excluded):
            failures.append(f"{accused} not excluded")
        return failures + [f"{node} excluded" for node in self.excluded if node not in accused]


def load() -> list[Condition]:
    rows = yaml.safe_load(Path(__file__).with_name("conditions.yaml").read_text())
    waiting = {"state": "queued|waiting|refused"}
    rows = [
        {**({"text": row["name"]} | waiting if row["kind"] == 6 else {}), **row} for row in rows
    ]
    return [Condition(**{"state": "done", **row}) for row in rows]


class Site:
    """A development cluster on which conditions are played.

    Args:
        root: Its state directory.
        faults: Whether its nodes may break; else it has what `CONF` says.
    """

    def __init__(self, root: Path, faults: bool) -> None:
        self.root, self.faults = root, faults
        self.folder = root.with_name(root.name + "-site")
        self.shared = root.with_name(root.name + "-shared")
        self.cluster = Cluster(root)
        self.patch = pytest.MonkeyPatch()

    def __enter__(self) -> Site:
        self.folder.mkdir(parents=True)
        for number in range(4):
            (self.folder / f"gpu{number}").touch()
        resume, conf = self.folder / "resume", self.folder / "conf"
        resume.write_text(RESUME.format(conf=self.root / "slurm.conf"))
        resume.chmod(0o755)
        conf.write_text(FAULTS_CONF if self.faults else CONF.format(folder=self.folder))
        breakable = ("--nodes=5", "--network", "--clock", "--node-disk-mb=2048", "--kill-wait=30")
        breakable += (f"--shared={self.shared}", "--shared-mb=256")
        self.call("up", f"--conf={conf}", *(breakable if self.faults else ("--nodes=9",)))
        self.patch.setenv("SLURM_CONF", str(self.root / "slurm.conf"))
        self.bench = BenchOfThreads((self.shared if self.faults else self.folder) / "runs")
        try:
            for line in () if self.faults else COMMANDS.splitlines():
                call(*shlex.split(line))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.bench.__exit__()
        self.call("down")
        self.patch.undo()
        for folder in (self.folder, self.shared):
            shutil.rmtree(folder, ignore_errors=True)

    def call(self, *arguments: str) -> None:
        call(sys.executable, str(DEVCLUSTER), *arguments, f"--dir={self.root}")


class ConditionRun:
    """A condition on its site: one run."""

    def __init__(self, site: Site, condition: Condition) -> None:
        self.site, self.bench, self.condition = site, site.bench, condition
        self.name = re.sub(r"\W+", "-", condition.name)
        self.run = site.bench.runs / self.name
        self.folder = site.folder / "folders" / self.name  # of the submitting shell
        self.seen = Observation(condition)
        self.notes: list[str] = []  # what was shown while the fault lasted

    def play(self) -> Observation:
        """Submit the run, make the fault, wait for the end, look."""
        try:
            if not self._submit():
                self.seen.state = "refused"
                # A refused job is FAILED and never had a node.
                rows = call("squeue", "-ho%i %T %N", "--states=all", f"-n{self.name}-train")
                left = re.findall(r"^(\d+) (?:(?!CANCELLED)\w+ \w.*|PENDING)", rows, re.MULTILINE)
                self.seen.leaks = [f"job {job} is left" for job in left]
                return self.seen
            if self.condition.fault:
                self._wait_for_step()
            for step in self.condition.fault:
                self._carry_out(step)
            self.wait()
            self._look()
        except Exception as error:  # a row of the table, not its end
            self.notes.append(f"{type(error).__name__}: {error}")
            self.seen.state = "?"
        finally:
            self.seen.text = " / ".join(filter(None, [*self.notes, self.seen.text]))
            self.bench.invoke("cancel", self.name)
        return self.seen

    def _submit(self) -> bool:
        """Return whether submit accepted; its warnings and refusals are notes."""
        condition, options = self.condition, list(self.condition.options)
        run = [f"--nodes={condition.nodes}", f"--name={self.name}"]
        run += [f"--set=env.SLURMLLM_REHEARSAL_STEP_S={condition.step_s}"]
        at = options.index("--") if "--" in options else len(options)
        arguments = [*OPTIONS, *options[:at], *run, *options[at:]]
        if condition.shell or condition.within or condition.fault:
            command = [*condition.within, *SLURMLLM, *self.bench.in_runs(*arguments)]
            environment = {**os.environ, **{k: str(v) for k, v in condition.shell.items()}}
            self.folder.mkdir(parents=True)
            streams = {"capture_output": True, "text": True, "timeout": 300}
            done = subprocess.run(command, env=environment, cwd=self.folder, **streams)
            code, output = done.returncode, done.stdout + done.stderr
        else:  # in a process that has started, which costs less
            result = self.bench.invoke(*arguments)
            code, output = result.exit_code, result.output
        starts = ("warning", "error") if code == 0 else ("",)
        lines = map(str.strip, output.splitlines())
        self.notes += [line for line in lines if line.lower().startswith(starts)]
        return code == 0

    def wait(self) -> None:
        """Wait for the end of the run, or until status says why it waits."""
        text, waits = (
            re.compile(self.condition.text, re.IGNORECASE),
            "queued" in self.condition.state,
        )
        deadline = time.monotonic() + (PENDING_S if waits else LIMIT_S)
        while time.monotonic() < deadline:
            reason = self.bench.status(self.name)["reason"] if waits else ""
            if text.search(reason) if waits else self.bench.ended(self.name):
                return
            time.sleep(2 if waits else 0.3)
            if not waits:
                self._release()

    def _wait_for_step(self) -> None:
        """Wait for the step before the fault."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                return self.bench.wait_for_step(self.name, FAULT_STEP, timeout_s=5)
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
            self._release()

    def _release(self) -> None:
        """Release the job, as its status recommends, if a busy machine started it too slowly."""
        if "launch failed requeued held" in call("squeue", "-ho%r", f"-n{self.name}-train"):
            self.notes.append("released")
            call("scontrol", "release", f"jobname={self.name}-train")

    def _look(self) -> None:
        shown, seen = self.bench.status(self.name), self.seen
        closed = [attempt for attempt in shown["attempts"] if attempt["class"]]
        failed = [attempt for attempt in closed if attempt["class"] != "done"]
        seen.state = shown["state"]
        pairs = ((a["class"], a["action"]) for a in closed)
        seen.endings = ", ".join(c if a == "finish" else f"{c} → {a}" for c, a in pairs)
        evidence = [line for attempt in failed for line in attempt["evidence"]]
        seen.text = " / ".join(
            filter(
                None, [*evidence, shown["reason"], *shown["warnings"], *shown.get("core_files", ())]
            )
        )
        seen.blamed = sorted({node for a in closed for node in a["blamed_nodes"]})
        drained = re.findall(r"^(\S+) slurmllm", call("sinfo", "-hNo%N %E"), re.MULTILINE)
        run_nodes = {node for attempt in closed for node in attempt["nodes"]}
        seen.excluded = sorted({n["node"] for n in shown["excluded"]} | (run_nodes & {*drained}))
        if self.condition.kind in (1, 4) and (job := shown["jobs"].get("train")):
            seen.leaks = leaks(self.run, job["job_id"])

    @cached_property
    def broken(self) -> str:
        """The node that the fault breaks: the last of the run, without the supervisor."""
        self.seen.broken = [self.bench.attempt(self.name, 0)["nodes"][-1]]
        return self.seen.broken[0]

    def _carry_out(self, step: str) -> None:
        """Wait, or run a shell command in the folder of the submitting shell."""
        if step == "ended":
            return self.wait()
        if step == "restart":
            following = self.run / "attempts" / "001" / "attempt.json"
            return self.bench.until(following.is_file, "never started again", LIMIT_S)

        def init() -> int:
            return self.site.cluster.init(self.broken) or 0

        def slurmd() -> list[int]:
            return [pid for pid in same_namespace(init()) if program(pid) == "slurmd"]

        slurmllm, at = shlex.join(SLURMLLM), f"{self.name} --runs-dir={self.bench.runs}"
        values: dict[str, Callable[[], object]] = {
            "RUN": lambda: self.run,
            "JOB": lambda: self.bench.attempt(self.name, 0)["job_id"],
            "NODE": lambda: self.broken,
            "INIT": init,
            "DISK": lambda: self.site.cluster.node_disk(self.broken).path,
            "SLURMD": lambda: " ".join(map(str, slurmd())),
            "SUPERVISOR": lambda: processes_with(f"supervise\0{self.run}\0")[0],
            "RANK0": lambda: worker_of(self.run, 0),
            "RANK1": lambda: worker_of(self.run, 1),
            "STATE": lambda: self.condition.name,
            "FOLDER": lambda: self.folder,
            "STATUS": lambda: f"{slurmllm} status {at}",
            "CANCEL": lambda: f"{slurmllm} cancel {at}",
            "RESUME": lambda: f"{slurmllm} resume {at}",
            # Neither host name nor processes are those of the run.
            "ELSEWHERE": lambda: (
                "unshare --uts --pid --fork --mount-proc sh -c "
                """'hostname elsewhere; exec "$@"' sh"""
            ),
            "DEVCLUSTER": lambda: (
                f"env SLURMLLM_DEVCLUSTER={self.site.root} {sys.executable} {DEVCLUSTER}"
            ),
        }
        # Only what the step names: a process may be gone, and NODE names the node to blame.
        for name in set(re.findall(r"\$([A-Z]+[01]?)\b", step)) & values.keys():
            step = re.sub(rf"\${name}\b", str(values[name]()), step)
        shown = step.removeprefix("note ")
        folder = self.folder if self.folder.is_dir() else "/"
        command = ["bash", "-euc", shown]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        if shown != step:
            lines = re.findall(r"^(?:state|warning|error|queue).*", done.stdout + done.stderr, re.M)
            self.notes.append(f"exit {done.returncode} {' '.join(lines)}")
        elif done.returncode:
            raise AssertionError(f"{step}: {done.stdout}{done.stderr}")
        return None


def call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def leaks(run: Path, job: str) -> list[str]:
    """Return what differs between the train script, its job and the steps of the job."""
    script = (run / "scripts" / "train.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script, re.MULTILINE))
    shown = dict(re.findall(r"(\w+)=(\S+)", call("scontrol", "show", "job", job)))
    expected = {"TimeLimit": options["time"].rjust(8, "0"), "StdOut": options["output"]}
    expected |= {"Requeue": "1", "NumNodes": options["nodes"], "OverSubscribe": "NO"}
    pairs = ((key, shown.get(key, ""), value) for key, value in expected.items())
    differ = [f"job: {k} {s}, script {e}" for k, s, e in pairs if s.removesuffix(f"-{e}") != e]
    differ += ["job: an array"] if "ArrayTaskId" in shown else []
    rows = call("sacct", "-nPj", job, "--format=JobID,JobName,AllocTRES").splitlines()
    (_, _, whole), *steps = (line.split("|") for line in rows)
    # An exclusive job has all GPUs of its nodes, a step those that the script requests.
    others = ("billing", "energy", *(() if "gres" in options else ("gres",)))
    tres = {item for item in whole.split(",") if not item.startswith(others)}
    for identity, name, of_step in steps:
        if name not in ("batch", "extern", "true") and (missing := tres - {*of_step.split(",")}):
            differ.append(f"step {identity}: {of_step} without {' '.join(sorted(missing))}")
    return differ


def play(conditions: Sequence[Condition], root: Path) -> list[Observation]:
    """Play conditions together; those that may break nodes alone, on a cluster of their own."""
    seen: list[Observation] = []
    for faults in (False, True):
        chosen = [condition for condition in conditions if (condition.site == "faults") == faults]
        if chosen:
            with Site(root / ("faults" if faults else "requests"), faults) as site:
                runs = [ConditionRun(site, condition) for condition in chosen]
                with ThreadPoolExecutor(1 if faults else 8) as pool:
                    seen += pool.map(ConditionRun.play, runs)
    return seen


pytestmark = pytest.mark.slurm
ROWS = [pytest.param(row, id=row.name, marks=() if row.ci else pytest.mark.long) for row in load()]


@pytest.fixture(scope="module")
def observations(
    slurm_installed: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Observation]:
    """What became of the conditions that are not skipped, played together."""
    items = [item for item in request.session.items if item.path == Path(__file__)]
    left = [item for item in items if item.get_closest_marker("skip") is None]
    rows = [item.callspec.params["condition"] for item in left if isinstance(item, pytest.Function)]
    seen = play(rows, tmp_path_factory.mktemp("conditions"))
    return {observation.condition.name: observation for observation in seen}


@pytest.mark.parametrize("condition", ROWS)
def test_condition(condition: Condition, observations: dict[str, Observation]) -> None:
    assert not observations[condition.name].failures
