"""Runs jobs, one for each checkpoint: as processes of this machine, or as a Slurm array.

A job verifies and exports its checkpoint, evaluates its tasks, and saves each score at once. A
local job is a process of its own rather than one of submitit's LocalExecutor, whose controller
discards the exit status, hides the CUDA devices and kills a job one second after SIGINT.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from slurmllm.checkpoint.catalogue import read_entry, verify_entry
from slurmllm.errors import DataError, SlurmllmError, StorageError
from slurmllm.evaluate.request import (
    EXPORT_PREFIX,
    EvaluationSettings,
    JobOutcome,
    JobRequest,
    ModelRef,
    TaskRequest,
)
from slurmllm.format import format_plural
from slurmllm.run.artifact_records import EvaluationRecord
from slurmllm.run.rundir import RunDir
from slurmllm.slurm.arrays import (
    MOST_TASKS,
    FailedJob,
    Resources,
    SlurmOptions,
    array_of,
    finished_jobs,
    submit_array,
)

_POLL_S = 0.2
_TERMINATE_S = 5.0  # between SIGTERM and SIGKILL: a job removes the model that it has exported
_SHARD_BYTES = 5 * 10**9  # files of an exported model


class JobProcess:
    """A job in a process of its own; its output is in a .log file.

    Request and outcome are pickles, which run code when they are read; they pass through files
    without a name, which only the two processes can open. The job sees one CUDA device (`device`),
    or all that this process sees.
    """

    def __init__(self, job: JobRequest, logs: Path, device: str | None) -> None:
        self.log = logs / f"step_{job.model.step:08d}-{secrets.token_hex(4)}.log"
        variables = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
        try:
            logs.mkdir(parents=True, exist_ok=True)
            self._outcome = tempfile.TemporaryFile()  # noqa: SIM115  closed by `outcome`
            with self.log.open("xb") as log, tempfile.TemporaryFile() as request:
                pickle.dump(job, request)
                request.seek(0)
                outcome = self._outcome.fileno()
                self._process = subprocess.Popen(
                    # -P: not the modules of the working directory, which may be another user's.
                    [sys.executable, "-P", "-m", "slurmllm.evaluate.executor", str(outcome)],
                    env={**os.environ, **variables},
                    stdin=request,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(outcome,),
                    # Ctrl-C reaches only the parent, which then terminates all of the session.
                    start_new_session=True,
                )
        except OSError as error:
            raise StorageError(f"cannot write {logs}: {error.strerror or error}") from error

    def done(self) -> bool:
        return self._process.poll() is not None

    def outcome(self) -> JobOutcome:
        """Return what the job returned, or how its process ended."""
        try:
            with self._outcome as stream:
                stream.seek(0)
                outcome = pickle.load(stream)
            assert isinstance(outcome, JobOutcome)
        except (EOFError, pickle.UnpicklingError):
            code = self._process.returncode
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return JobOutcome(error=f"its process {how}; see {self.log}")
        return outcome

    def terminate(self) -> None:
        # The whole session: a task may have started processes of its own.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_TERMINATE_S)


def cuda_devices() -> list[str]:
    """Return the CUDA devices that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    # Without torch, which would take seconds to import.
    with contextlib.suppress(OSError):
        return [str(number) for number, _ in enumerate(Path("/proc/driver/nvidia/gpus").iterdir())]
    return []


def run_local(
    jobs: Sequence[JobRequest], at_once: int, logs: Path, on_poll: Callable[[], None]
) -> Iterator[tuple[JobRequest, JobOutcome]]:
    """Run `at_once` jobs at a time in processes of this machine, which end when this is closed.

    Yields each job and its outcome as it ends; `on_poll` is called regularly meanwhile.
    """
    devices = cuda_devices()
    pending = list(jobs)
    # By slot: of several devices, each slot uses one.
    running: dict[int, tuple[JobProcess, JobRequest]] = {}
    try:
        while pending or running:
            for slot in range(at_once):
                if pending and slot not in running:
                    # A single job at a time may use all devices.
                    device = devices[slot % len(devices)] if at_once > 1 and devices else None
                    job = pending.pop(0)
                    running[slot] = JobProcess(job, logs, device), job
            time.sleep(_POLL_S)
            on_poll()
            for slot in [slot for slot, (process, _) in running.items() if process.done()]:
                process, job = running.pop(slot)
                yield job, process.outcome()
    finally:
        for process, _ in running.values():
            process.terminate()


def run_on_slurm(
    jobs: Sequence[JobRequest],
    at_once: int,
    logs: Path,
    on_poll: Callable[[], None],
    options: SlurmOptions,
    resources: Resources,
    on_submit: Callable[[str], None],
) -> Iterator[tuple[JobRequest, JobOutcome]]:
    """Run jobs in a Slurm array, which is cancelled when this is closed; else as `run_local`.

    `logs` is on a file system that the nodes share; `on_submit` gets a line about each array.
    """
    for begin in range(0, len(jobs), MOST_TASKS):
        part = jobs[begin : begin + MOST_TASKS]
        tasks = submit_array(
            run_job,
            [(job,) for job in part],
            logs=logs,
            name="slurmllm-evaluate",
            at_once=at_once,
            options=options,
            resources=resources,
            description="the evaluation jobs",
            alternative="evaluate on this machine without --slurm",
        )
        array = array_of(tasks)
        checkpoints = format_plural(len(part), "checkpoint")
        on_submit(f"Slurm job {array}: {checkpoints}, {at_once:,} at a time")
        with contextlib.closing(finished_jobs(tasks, on_poll)) as finished:
            for job_id, place, outcome in finished:
                if isinstance(outcome, FailedJob):
                    outcome = JobOutcome(error=f"job {job_id} {outcome.how}: {outcome.reason}")
                yield part[place], outcome


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
    """Return the record of the loss on held-out text."""
    # Here and not above: torch, which the login node does without.
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
    from slurmllm.checkpoint.formats.exporting import plan_export, run_export
    from slurmllm.checkpoint.formats.tokenizer_files import checkpoint_tokenizer

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


def main(outcome: int) -> None:
    """Entry point of a job's process, which writes its outcome to a file descriptor."""
    # Raises SystemExit, so that the exported model is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    result = run_job(pickle.load(sys.stdin.buffer))
    with os.fdopen(outcome, "wb") as stream:
        pickle.dump(result, stream)


if __name__ == "__main__":
    main(int(sys.argv[1]))
