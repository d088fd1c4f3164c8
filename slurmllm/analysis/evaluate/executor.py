"""Runs jobs, one for each checkpoint: as processes of this machine, or as a Slurm array.

A job verifies and exports its checkpoint, evaluates its tasks, and saves each score at once.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from slurmllm.analysis.evaluate.request import (
    EXPORT_PREFIX,
    EvaluationSettings,
    JobOutcome,
    JobRequest,
    ModelRef,
    TaskRequest,
)
from slurmllm.core.errors import DataError, SlurmllmError, StorageError
from slurmllm.core.run.artifact_records import EvaluationRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.slurm.arrays import ArrayRequest, map_calls
from slurmllm.core.slurm.processes import FailedCall
from slurmllm.train.checkpoint.catalogue import read_entry, verify_entry

_SHARD_BYTES = 5 * 10**9  # files of an exported model


def run_calls(
    jobs: Sequence[JobRequest],
    *,
    at_once: int,
    logs: Path,
    on_poll: Callable[[], None],
    array: ArrayRequest | None = None,
) -> Iterator[tuple[JobRequest, JobOutcome]]:
    """Run jobs in processes of this machine, or in a Slurm array; yield each with its outcome.

    They end when this is closed; `on_poll` is called regularly meanwhile.
    """
    arguments = [(job,) for job in jobs]
    names = [f"step_{job.model.step:08d}" for job in jobs]
    calls = map_calls(
        run_job,
        arguments,
        names=names,
        logs=logs,
        at_once=at_once,
        on_poll=on_poll,
        array=array,
    )
    with contextlib.closing(calls):
        for index, outcome in calls:
            if isinstance(outcome, FailedCall):
                outcome = JobOutcome(error=outcome.message)
            yield jobs[index], outcome


def run_job(request: JobRequest) -> JobOutcome:
    """Evaluate the tasks of a job; a task that fails does not end the others."""
    model, validation = request.model, request.validation
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
        if validation is not None and task.task.task == validation.name:
            evaluate(task, lambda _: validation_record(request))
        else:
            harness_tasks.append(task)
    if harness_tasks:
        from slurmllm.analysis.evaluate.harness import Harness

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
    """Return the record of the loss on held-out text."""
    # Here and not above: torch, which the login node does without.
    from slurmllm.analysis.evaluate.harness import resolve_device
    from slurmllm.analysis.evaluate.validation_loss import held_out_loss
    from slurmllm.analysis.evaluate.validation_text import LOOP, stream_spec

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
        evaluated_at=time.time(),
    )


def _reason(error: Exception) -> str:
    """Return an error on one line; the traceback of an unexpected one goes to the job's log."""
    if isinstance(error, SlurmllmError):
        return str(error)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextlib.contextmanager
def exported(model: ModelRef, store: Path, settings: EvaluationSettings) -> Iterator[Path]:
    """Yield the Hugging Face folder of a model: its own, or a temporary export in `store`."""
    from slurmllm.train.checkpoint.formats.exporting import plan_export, run_export
    from slurmllm.train.checkpoint.formats.tokenizer_files import checkpoint_tokenizer

    directory = model.directory
    if model.huggingface:
        yield directory
        return
    tokenizer = checkpoint_tokenizer(directory, settings.tokenizer)
    if not tokenizer.files:
        raise DataError(f"no tokenizer is known for {directory}; give --tokenizer FILE")
    try:
        store.mkdir(parents=True, exist_ok=True)
        prefix = f"{EXPORT_PREFIX}{settings.call_id}-"
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=store))
    except OSError as error:
        raise StorageError(
            f"cannot create a folder for the exported model in {store}: "
            f"{error.strerror or error}; check its permissions and the file system"
        ) from error
    try:
        folder = temporary / directory.name
        run_export(plan_export(directory, tokenizer), folder, _SHARD_BYTES)
        yield folder
    finally:
        # If the job is killed, the caller removes the folder (`evaluate.run_jobs`).
        shutil.rmtree(temporary, ignore_errors=True)
