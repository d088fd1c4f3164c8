"""One job: verify and export a checkpoint, evaluate its tasks, save each score at once."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from time import time

from slurmllm.checkpoint.catalogue import read_entry, verify_entry
from slurmllm.errors import SlurmllmError
from slurmllm.evaluate.request import JobOutcome, JobRequest, TaskRequest
from slurmllm.records import EvaluationRecord
from slurmllm.rundir import RunDir


def run_job(request: JobRequest) -> JobOutcome:
    """Evaluate the tasks of a job; a task that fails does not end the others."""
    model, text = request.model, request.validation
    if not model.verified and not model.huggingface:
        faults = verify_entry(read_entry(model.directory)).faults
        if faults:
            return JobOutcome(damaged=faults)
    failed: dict[str, str] = {}

    def evaluate(task: TaskRequest, score: Callable[[TaskRequest], EvaluationRecord]) -> None:
        try:
            # Saved at once: an interrupted job continues after its last score.
            score(task).save(request.score_file(task))
        except Exception as error:
            failed[task.key] = _reason(error)

    harness_tasks = []
    for task in request.tasks:
        if text is not None and task.task.task == text.name:
            evaluate(task, lambda _: validation_record(request))
        else:
            harness_tasks.append(task)
    if harness_tasks:
        from slurmllm.evaluate.exported import exported
        from slurmllm.evaluate.harness import Harness

        try:
            store = RunDir(request.store).evaluations
            with exported(model, store, request.settings) as folder:
                harness = Harness(folder, model, request.settings)
                for task in harness_tasks:
                    evaluate(task, harness.score)
        except Exception as error:
            reason = _reason(error)
            failed |= {t.key: reason for t in harness_tasks if not request.score_file(t).is_file()}
    return JobOutcome(failed=failed)


def validation_record(request: JobRequest) -> EvaluationRecord:
    """The loss on held-out text."""
    from slurmllm.evaluate.harness import resolve_device
    from slurmllm.evaluate.validation_loss import held_out_loss
    from slurmllm.evaluate.validation_text import LOOP, stream_spec

    model, settings = request.model, request.settings
    assert request.validation is not None
    device = resolve_device(settings.device)
    with stream_spec(request.validation, model.directory, settings.tokenizer) as spec:
        loss = held_out_loss(model.directory, spec, settings.limit, settings.batch_size, device)
    return EvaluationRecord(
        step=model.step,
        tokens=model.tokens,
        checkpoint=model.checksum,
        task=request.validation.name,
        limit=settings.limit,
        scores=loss.scores,
        errors=loss.errors,
        num_samples=loss.sequences,
        version=LOOP,
        seconds=loss.seconds,
        evaluated_at=time(),
    )


def _reason(error: Exception) -> str:
    """An error on one line; the traceback of an unexpected one goes to the job's log."""
    if isinstance(error, SlurmllmError):
        return str(error)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
