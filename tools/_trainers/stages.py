"""The stages of one trainer: a run, one whose worker is killed, their comparison, and a drill."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import yaml

from _trainers.catalog import BUILD, Trainer
from _trainers.commands import StageError, last_line, run_limited, say
from _trainers.environment import make_environment, variables, version_of
from slurmllm.analysis.drill.injector import Injection, inject
from slurmllm.analysis.drill.plan import make_plan
from slurmllm.core.config.load import load
from slurmllm.core.errors import SlurmllmError
from slurmllm.core.metrics.row_reader import last_row
from slurmllm.core.run.records import AttemptRecord, NodeRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.supervise.attempts import load_attempts
from slurmllm.train.checkpoint.foreign import list_trainer_checkpoints

SLURMLLM = (sys.executable, "-P", "-m", "slurmllm")
RUNS = BUILD / "runs"
LOGS = BUILD / "logs"


@dataclass
class Outcome:
    """What was shown of a trainer; `None`: its stage was not reached."""

    name: str
    title: str
    date: str
    expected: str
    version: str = ""
    reason: str = ""  # the catalog's: why it is not exact
    nodes: int = 0
    steps: int | None = None
    checkpoints: list[int] = field(default_factory=list)  # of the unbroken run
    killed_at: int | None = None  # last step seen before the kill
    ending: str | None = None  # class of the attempt that was killed
    evidence: str = ""
    resumed_from: int | None = None  # newest complete checkpoint at the next attempt's start
    compare: dict[str, Any] | None = None  # `compare --exact --json`
    drill: dict[str, Any] | None = None  # `drill --json`
    failure: str = ""  # the stage that failed, and why
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """`exact` if both the comparison and the drill say so; else what the worse one says."""
        if self.failure or self.compare is None or self.drill is None:
            return "fails"
        resumes = [result["resume"] or {} for result in self.drill["drills"]]
        verdicts = {resume.get("verdict", "fails") for resume in resumes}
        verdicts |= set() if self.is_identical else {"differs"}
        for verdict in ("differs", "within_noise", "exact"):
            if verdict in verdicts and verdicts <= {"exact", "within_noise", "differs"}:
                return verdict
        return "fails"

    @property
    def is_identical(self) -> bool:
        """Whether the killed run's curve is bit-identical to the unbroken one's."""
        return self.compare is not None and self.compare["verdict"] == "identical"


def run_trainer(trainer: Trainer) -> Outcome:
    """Run all stages; the outcome has the first failure."""
    begin = time.monotonic()
    outcome = Outcome(
        name=trainer.name,
        title=trainer.title,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        expected=trainer.expected,
        reason=trainer.reason,
        nodes=trainer.nodes,
    )
    try:
        _Stages(trainer, outcome).run_all()
    except (StageError, SlurmllmError) as error:
        outcome.failure = str(error)
        say(f"{trainer.name}: {error}")
    outcome.version = version_of(trainer)
    outcome.seconds = round(time.monotonic() - begin, 1)
    return outcome


class _Stages:
    def __init__(self, trainer: Trainer, outcome: Outcome) -> None:
        self.trainer = trainer
        self.outcome = outcome
        self.logs = LOGS / trainer.name
        self.recipe = BUILD / "recipes" / f"{trainer.name}.yaml"
        self.unbroken = RunDir(RUNS / f"{trainer.name}-unbroken")
        self.killed = RunDir(RUNS / f"{trainer.name}-killed")

    def run_all(self) -> None:
        for old in RUNS.glob(f"{self.trainer.name}-*"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        shutil.rmtree(self.logs, ignore_errors=True)
        self._stage("environment", lambda: make_environment(self.trainer, self.logs))
        self.recipe.parent.mkdir(parents=True, exist_ok=True)
        self.recipe.write_text(yaml.safe_dump(self.trainer.filled_recipe), "utf-8")
        self._stage("unbroken", self._run_unbroken)
        self._stage("killed", self._run_killed)
        self._stage("compare", self._compare)
        self._stage("drill", self._drill)

    def _stage(self, name: str, stage: Callable[[], None]) -> None:
        begin = time.monotonic()
        say(f"{self.trainer.name}: {name}")
        stage()
        say(f"{self.trainer.name}: {name}: done in {time.monotonic() - begin:.0f} s")

    def _call(self, label: str, *arguments: str, **options: Any) -> int:
        """Run slurmllm with JSON output to the stage's log; return its exit code."""
        command = [*SLURMLLM, *arguments, f"--runs-dir={RUNS}", "--json"]
        log, environment = self.logs / f"{label}.json", variables(self.trainer)
        title = f"{self.trainer.name}: {label}"
        return run_limited(title, command, log, environment, self.trainer.limit_s, **options)

    def _report(self, label: str, code: int) -> dict[str, Any]:
        """Return a stage's JSON; StageError if there is none."""
        log = self.logs / f"{label}.json"
        try:
            report: dict[str, Any] = json.loads(log.read_text("utf-8"))
        except ValueError:
            reason = last_line(log.with_suffix(".err"), log)
            raise StageError(f"{label}: exit code {code}: {reason}") from None
        return report

    def _submit(self, run: RunDir, label: str, meanwhile: Callable[[], bool]) -> None:
        nodes = f"--nodes={self.trainer.nodes}"
        arguments = ("submit", str(self.recipe), "--local", nodes, f"--name={run.name}")

        def status() -> str:
            row = last_row(run) if run.path.is_dir() else None
            return f"attempt {len(run.attempts('train'))}, step {row['step'] if row else 0}"

        code = self._call(label, *arguments, status=status, meanwhile=meanwhile)
        attempts = load_attempts(run, "train") if run.path.is_dir() else []
        if not attempts or attempts[-1].ending != "done":
            why = last_line(self.logs / f"{label}.err", self.logs / f"{label}.json")
            if attempts:
                why = f"{attempts[-1].ending}: {'; '.join(attempts[-1].evidence)}"
            raise StageError(f"{label}: exit code {code}: {why}")

    def _run_unbroken(self) -> None:
        self._submit(self.unbroken, "unbroken", lambda: True)
        row = last_row(self.unbroken)
        if row is None:
            node = load_attempts(self.unbroken, "train")[-1].nodes[0]
            record = NodeRecord.load(self.unbroken.attempt("train", 0).node(node))
            raise StageError(f"unbroken: no steps were read: {record.progress_missing}")
        self.outcome.steps = int(row["step"])
        command = load(self.unbroken.config).recipe.command
        assert command is not None
        entries = list_trainer_checkpoints(self.unbroken, command)
        self.outcome.checkpoints = [entry.step for entry in entries if entry.complete]
        if not self.outcome.checkpoints and command.checkpoints is not None:
            raise StageError(f"unbroken: no complete checkpoint matches {command.checkpoints}")

    def _run_killed(self) -> None:
        outcome = self.outcome
        copies = RunDir(RUNS / self.trainer.name)
        config, nodes = load(self.unbroken.config), self.trainer.nodes
        plan = make_plan(copies, config, nodes, True, ("worker",), steps=None, seed=0)
        plan = plan.with_reference(self.unbroken)
        injections: list[Injection] = []
        started: list[Thread] = []

        def meanwhile() -> bool:
            """Start the injector once the first attempt's workers run."""
            attempt = self.killed.attempt("train", 0)
            record = AttemptRecord.find(attempt.record) if self.killed.path.is_dir() else None
            if record is None:
                return False
            records = [NodeRecord.find(attempt.node(node)) for node in record.nodes]
            if not all(node is not None and node.pids for node in records):
                return False
            spec = plan.fault("worker", record.nodes)
            work = Thread(target=lambda: injections.append(inject(self.killed, spec)), daemon=True)
            work.start()
            started.append(work)
            return True

        self._submit(self.killed, "killed", meanwhile)
        for work in started:
            work.join(60)
        if not injections or injections[0].missed:
            missed = injections[0].missed if injections else "the workers never started"
            raise StageError(f"killed: no worker was killed: {missed}")
        first, *later = load_attempts(self.killed, "train")
        outcome.killed_at = injections[0].step
        outcome.ending, outcome.evidence = first.ending, "; ".join(first.evidence)
        outcome.resumed_from = later[0].checkpoint_before if later else None
        if not later:
            raise StageError(f"killed: it did not continue: {first.ending}: {outcome.evidence}")

    def _compare(self) -> None:
        code = self._call("compare", "compare", self.unbroken.name, self.killed.name, "--exact")
        self.outcome.compare = self._report("compare", code)

    def _drill(self) -> None:
        options = ("--local", f"--nodes={self.trainer.nodes}", f"--kinds={self.trainer.kinds}")
        code = self._call("drill", "drill", str(self.recipe), *options)
        self.outcome.drill = self._report("drill", code)
