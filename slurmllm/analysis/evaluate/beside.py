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
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from slurmllm.analysis.evaluate.request import task_key
from slurmllm.analysis.evaluate.suites import LocatedSuite, save_suite, suite_of_tasks, suites_dir
from slurmllm.core.config.command import fill
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import SlurmllmError, UserError
from slurmllm.core.run.artifact_records import CheckpointEvaluation, EvaluationRecord
from slurmllm.core.run.records import JobsRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.run.worker_files import diagnostic
from slurmllm.core.slurm.client import SlurmClient
from slurmllm.core.slurm.setup import new_job_environment
from slurmllm.launch.submit.render import render_evaluation
from slurmllm.train.checkpoint.catalogue import invalidated_checkpoints, list_checkpoints
from slurmllm.train.checkpoint.foreign import list_trainer_checkpoints
from slurmllm.train.checkpoint.holds import read_evaluations, save_evaluation
from slurmllm.train.control.rendezvous import die_with_parent

INTERVAL_S = 15.0  # between two looks at the checkpoints
CACHED_S = 60.0  # for which NFS may show an old file (acregmax)
_TRIES = 2  # of an evaluation
_COMMAND = "command"  # task and version of what `evaluate.command` scores
_SLURMLLM = (sys.executable, "-P", "-m", "slurmllm")

log = logging.getLogger(__name__)


@dataclass
class Evaluator:
    """Has a run's checkpoints evaluated: by Slurm, or by processes of this machine."""

    run: RunDir
    config: RunConfig
    client: SlurmClient | None  # None: one after the other, here
    _ended_at: dict[str, float] = field(default_factory=dict)  # job → Unix time, s

    def watch(self, stop: threading.Event) -> None:
        """Look for checkpoints until `stop`, and once more then."""
        last = False
        while not last:
            last = stop.wait(INTERVAL_S)
            for _ in range(1 + last):  # no refused one stays due
                with diagnostic("evaluations"):  # what fails is tried again at the next look
                    self.look()

    def look(self) -> None:
        evaluate = self.config.recipe.evaluate
        assert evaluate is not None
        records = {record.step: record for record in read_evaluations(self.run)}
        jobs = [record.job for record in records.values() if record.state == "submitted"]
        queue = self.client.queue(jobs) if self.client else {}
        active = {job for job, queued in queue.items() if queued.active}
        cancelled = JobsRecord.last_of(self.run).cancelled_at is not None
        for step, (path, saved_at) in self._complete().items():
            record = records.get(step)
            if record is None or record.saved_at != saved_at:
                number = 1 + sum(other < step for other in records)
                due = number % evaluate.every == 0 or step == self.config.recipe.steps
                record = records[step] = CheckpointEvaluation(
                    step=step,
                    path=str(path),
                    saved_at=saved_at,
                    state="due" if due else "skipped",
                )
                save_evaluation(self.run, record)
            if record.state == "due" and not cancelled:
                self._start(record)
            elif record.state == "submitted" and record.job not in active:
                self._check_result(record)

    def _start(self, record: CheckpointEvaluation) -> None:
        if self.client is None:
            evaluate_checkpoint(self.run, self.config, record.step)
            return
        try:
            job = self.client.submit(render_evaluation(self.config, self.run, record.step))
        except SlurmllmError as error:
            self._fail(record, str(error))
        else:
            save_evaluation(self.run, record, state="submitted", job=job)

    def _check_result(self, record: CheckpointEvaluation) -> None:
        ended_at = self._ended_at.setdefault(record.job, time.time())
        # Read again: it may have been written since.
        settled = CheckpointEvaluation.load(self.run.evaluating(record.step)).settled
        if time.time() - ended_at >= CACHED_S and not settled:
            self._fail(record, f"job {record.job} ended without a result")

    def _fail(self, record: CheckpointEvaluation, error: str) -> None:
        """Have a checkpoint evaluated again, if it is the first failure of Slurm."""
        state = "failed" if record.error else "due"
        save_evaluation(self.run, record, state=state, error=error)

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
    """Evaluate a checkpoint as the recipe says, and record the outcome."""
    for _ in range(_TRIES):
        try:
            _evaluate(run, config, CheckpointEvaluation.load(run.evaluating(step)))
            state, error = "done", ""
            break
        except Exception as fault:  # whatever it is: `status` says it
            state, error = "failed", str(fault)
            if not isinstance(fault, SlurmllmError):
                error = repr(fault)
                log.warning("step %d: the evaluation failed", step, exc_info=True)
    # Read again: a job may start before it is recorded.
    record = CheckpointEvaluation.load(run.evaluating(step))
    save_evaluation(run, record, state=state, error=error)


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
        text=True,
        errors="replace",
        preexec_fn=die_with_parent,
    )
    print(done.stdout, flush=True)
    if done.returncode:
        raise UserError(f"exit code {done.returncode}; see the folder {run.logs}")
    if evaluate.command is None:
        return
    if not (scores := last_scores(done.stdout)):
        raise UserError("no scores: no line of the output is a JSON object of numbers")
    located = LocatedSuite(suite_of_tasks([_COMMAND], None), suites_dir())
    save_suite(run, located)
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
        with suppress(ValueError):
            if isinstance(document := json.loads(line), dict):
                numbers = {k: float(v) for k, v in document.items() if isinstance(v, int | float)}
                return {name: value for name, value in numbers.items() if math.isfinite(value)}
    return {}
