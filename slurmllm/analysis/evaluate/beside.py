"""Evaluations of checkpoints while a run trains, by the section `evaluate` of its recipe.

A child of the supervisor has each new checkpoint evaluated (`Evaluator`), by a job of its own.
Nothing of it is an error of the training.
"""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from slurmllm.analysis.evaluate.request import task_key
from slurmllm.analysis.evaluate.suites import LocatedSuite, save_suite, suite_of_tasks, suites_dir
from slurmllm.core.config.command import fill
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import SlurmllmError, UserError
from slurmllm.core.run.artifact_records import CheckpointEvaluation, EvaluationRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.run.worker_files import diagnostic
from slurmllm.core.slurm.client import SlurmClient
from slurmllm.core.slurm.setup import new_job_environment
from slurmllm.launch.submit.render import render_evaluation
from slurmllm.train.checkpoint.catalogue import invalidated_checkpoints, list_checkpoints
from slurmllm.train.checkpoint.foreign import list_trainer_checkpoints
from slurmllm.train.checkpoint.holds import read_evaluations
from slurmllm.train.control.rendezvous import die_with_parent

INTERVAL_S = 15.0  # between two looks at the checkpoints
CACHED_S = 60.0  # for which NFS may show an old file (acregmax)
_TRIES = 2  # of sbatch, and of an evaluation
_COMMAND = "command"  # task and version of what `evaluate.command` scores
_SLURMLLM = (sys.executable, "-P", "-m", "slurmllm")

log = logging.getLogger(__name__)


@dataclass
class Evaluator:
    """Has a run's checkpoints evaluated: by Slurm, or by processes of this machine."""

    run: RunDir
    config: RunConfig
    client: SlurmClient | None  # None: one after the other, here
    _jobs: dict[int, str] = field(default_factory=dict)  # step → job
    _ended_at: dict[int, float] = field(default_factory=dict)  # step → Unix time, s

    def watch(self, ended: Callable[[], bool], sleep: Callable[[float], object]) -> None:
        """Look for checkpoints until `ended`, and once more then."""
        last = False
        while not last:
            last = ended()
            with diagnostic("evaluations"):  # what fails is tried again at the next look
                self.look()
            if not last:
                sleep(INTERVAL_S)

    def look(self) -> None:
        evaluate = self.config.recipe.evaluate
        assert evaluate is not None
        records = {record.step: record for record in read_evaluations(self.run)}
        for step, (path, saved_at) in self._complete().items():
            record = records.get(step)
            if record is None or record.saved_at != saved_at:
                before = [records[other].state for other in sorted(records) if other < step]
                skipped = before[-evaluate.every + 1 :] if evaluate.every > 1 else []
                due = skipped.count("skipped") == evaluate.every - 1
                due = due or step == self.config.recipe.steps
                state = "due" if due else "skipped"
                record = CheckpointEvaluation.model_validate(
                    {"step": step, "path": str(path), "saved_at": saved_at, "state": state}
                )
                record.save(self.run.evaluating(step))
                records[step] = record
            if record.state == "due" or (record.state == "submitted" and self._lost(step)):
                self._start(record)

    def _lost(self, step: int) -> bool:
        """Return whether an evaluation ended without a result, as far as this process knows."""
        if self.client is None:
            return True
        job = self.client.queue([self._jobs[step]]) if step in self._jobs else None
        if job is None or any(queued.active for queued in job.values()):
            return False
        ended_at = self._ended_at.setdefault(step, time.time())
        # Read again: it may have ended since.
        settled = CheckpointEvaluation.load(self.run.evaluating(step)).settled
        return time.time() - ended_at >= CACHED_S and not settled

    def _start(self, record: CheckpointEvaluation) -> None:
        def save(state: str, error: str = "", refusals: int = record.refusals) -> None:
            changes = {"state": state, "error": error, "refusals": refusals}
            record.model_copy(update=changes).save(self.run.evaluating(record.step))
            if error:
                log.warning("step %d: evaluation %s: %s", record.step, state, error)

        if record.refusals >= _TRIES or (record.state == "submitted" and self.client is not None):
            save("failed", record.error or f"job {self._jobs[record.step]} ended without a result")
            return
        save("submitted")
        if self.client is None:
            command = [*_SLURMLLM, "evaluate-checkpoint", str(self.run.path), str(record.step)]
            subprocess.run(command, preexec_fn=die_with_parent)
            return
        try:
            script = render_evaluation(self.config, self.run, record.step)
            self._jobs[record.step] = self.client.submit(script)
        except SlurmllmError as error:
            refusals = record.refusals + 1
            save("failed" if refusals >= _TRIES else "due", str(error), refusals)

    def _complete(self) -> dict[int, tuple[Path, float]]:
        """Return step → path of each complete checkpoint, and the Unix time of its save, s."""
        command = self.config.recipe.command
        if command is not None:
            entries = list_trainer_checkpoints(self.run, command)
            return {e.step: (e.path, e.changed_at) for e in entries if e.complete}
        invalidated = invalidated_checkpoints(self.run)
        return {
            entry.step: (entry.directory, entry.manifest.saved_at)
            for entry in list_checkpoints(self.run)
            if entry.manifest is not None and entry.step not in invalidated
        }


def evaluate_checkpoint(run: RunDir, config: RunConfig, step: int) -> None:
    """Evaluate a checkpoint as the recipe says, and write what became of it."""
    record = CheckpointEvaluation.load(run.evaluating(step))
    state, error = "failed", ""
    for _ in range(_TRIES):
        try:
            _evaluate(run, config, record)
            state, error = "done", ""
            break
        except Exception as fault:  # whatever it is: `status` says it
            error = str(fault) or repr(fault)
            log.warning("step %d: %s", step, error)
    record.model_copy(update={"state": state, "error": error}).save(run.evaluating(step))


def _evaluate(run: RunDir, config: RunConfig, record: CheckpointEvaluation) -> None:
    evaluate, begin = config.recipe.evaluate, time.time()
    assert evaluate is not None
    if not Path(record.path).exists():
        raise UserError(f"{record.path} has been removed; see evaluate.hold_hours")
    command = [*_SLURMLLM, "evaluate", f"{run.path}@{record.step}", "--no-plot"]
    command += ["--suite", str(evaluate.suite)]
    if evaluate.command is not None:
        values = {"checkpoint": record.path, "step": record.step, "run": run.path}
        command = ["bash", "-c", fill(evaluate.command, values, quote=True)]
    done = subprocess.run(
        command,
        env={**new_job_environment(), **config.cluster.env, **config.recipe.env},
        cwd=config.recipe.command.folder if config.recipe.command else None,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        preexec_fn=die_with_parent,
    )
    output = done.stdout.decode(errors="replace")
    print(output, flush=True)
    if done.returncode:
        raise UserError(f"exit code {done.returncode}; see the folder {run.logs}")
    if evaluate.command is None:
        return
    if not (scores := last_scores(output)):
        raise UserError("no scores: no line of the output is a JSON object of numbers")
    located = LocatedSuite(suite_of_tasks([_COMMAND], None), suites_dir())
    save_suite(run, located, complete=True)
    checkpoint = f"{record.step:x}.{record.saved_at:.0f}"
    key = task_key(located.suite.groups[0].tasks[0], located.folder, None, _COMMAND)
    EvaluationRecord(
        step=record.step,
        tokens=0,
        checkpoint=checkpoint,
        task=_COMMAND,
        scores=scores,
        version=_COMMAND,
        seconds=time.time() - begin,
        evaluated_at=time.time(),
    ).save(run.evaluation(checkpoint, key))


def last_scores(output: str) -> dict[str, float]:
    """Return the finite numbers of the last line that is a JSON object; empty without one."""
    for line in reversed(output.splitlines()):
        try:
            document = json.loads(line)
        except ValueError:
            continue
        if isinstance(document, dict):
            numbers = {k: v for k, v in document.items() if isinstance(v, int | float)}
            return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}
    return {}
