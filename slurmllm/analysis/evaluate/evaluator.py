"""Evaluates checkpoints while a run trains, as the section `evaluate` of its recipe says.

A child process of the supervisor submits a job for each new checkpoint (`Evaluator`). Failures here
never affect the training.
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

INTERVAL_S = 15.0  # between two searches for new checkpoints
CACHED_S = 60.0  # NFS may show an old file for so long (acregmax)
_TRIES = 2  # for each evaluation
_COMMAND = "command"  # task and version in the records of `evaluate.command`
_SLURMLLM = (sys.executable, "-P", "-m", "slurmllm")

log = logging.getLogger(__name__)


@dataclass
class Evaluator:
    """Evaluates a run's checkpoints by Slurm jobs, or by processes on this machine."""

    run: RunDir
    config: RunConfig
    client: SlurmClient | None  # None: on this machine, one after the other
    _ended_at: dict[str, float] = field(default_factory=dict)  # job → Unix time, s

    def watch(self, stop: threading.Event) -> None:
        """Evaluate new checkpoints until `stop`, and those that are new then."""
        last = False
        while not last:
            last = stop.wait(INTERVAL_S)
            for _ in range(1 + last):  # leave no refused evaluation due
                with diagnostic("evaluations"):  # a failure is retried at the next interval
                    self.update()

    def update(self) -> None:
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
                number = 1 + sum(earlier < step for earlier in records)
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
        # Read again: the job may have written it since.
        finished = CheckpointEvaluation.load(self.run.evaluating(record.step)).finished
        if time.time() - ended_at >= CACHED_S and not finished:
            self._fail(record, f"job {record.job} ended without a result")

    def _fail(self, record: CheckpointEvaluation, error: str) -> None:
        """Record a failure of Slurm; after the first one, the evaluation is due again."""
        save_evaluation(self.run, record, state="failed" if record.error else "due", error=error)

    def _complete(self) -> dict[int, tuple[Path, float]]:
        """Return step → path and Unix time of the save, s, of each complete checkpoint."""
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
    """Evaluate a checkpoint as the recipe says, and record the result."""
    for _ in range(_TRIES):
        try:
            _evaluate(run, config, CheckpointEvaluation.load(run.evaluating(step)))
            state = "done"
            error = ""
            break
        except Exception as fault:  # `status` shows it
            state = "failed"
            error = str(fault)
            if not isinstance(fault, SlurmllmError):
                error = repr(fault)
                log.warning("step %d: the evaluation failed", step, exc_info=True)
    # Read again: a job may start before its id is recorded.
    record = CheckpointEvaluation.load(run.evaluating(step))
    save_evaluation(run, record, state=state, error=error)


def _evaluate(run: RunDir, config: RunConfig, record: CheckpointEvaluation) -> None:
    evaluate = config.recipe.evaluate
    begin = time.time()
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
        raise UserError("no scores: the output has no line that is a JSON object with numbers")
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
