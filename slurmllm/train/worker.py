"""The process entry of a worker, and its ways out: finished, stopped, failed."""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import suppress

from slurmllm.backends.base import Worker
from slurmllm.errors import EXIT_OK, EXIT_REQUEUE, ConfigError, SlurmllmError
from slurmllm.rundir import AttemptDir, RunDir, Stage
from slurmllm.train.failures import failure_record, format_failure
from slurmllm.train.job import Job, make_job, open_job
from slurmllm.train.signals import StopRequest, dump_on_signal


def run_worker(run: RunDir, stage: Stage, attempt: int) -> int:
    """Do one worker's part in an attempt.

    The launcher's variables: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and
    SLURMLLM_NODE (the node's name; the host's where unset).

    Returns:
        The exit code: 0 finished, 75 stopped and saved, else a failure's (see `errors`). A worker
        that fails after its process groups are open does not return but ends the process, for
        closing a group whose peers are gone may take for ever.
    """
    started = time.time()
    stop = StopRequest()
    stop.install()
    dump_on_signal()
    worker = _worker()
    job: Job | None = None
    try:
        job = make_job(run, stage, attempt, worker, stop, started)
        code = _work(job)
        job.close()
    except BaseException as error:  # KeyboardInterrupt too: every ending leaves a record
        code = _fail(error, run.attempt(stage, attempt), worker, job)
    stop.ignore()
    return code


def _work(job: Job) -> int:
    open_job(job)
    if job.step >= job.last_step:
        job.say(f"nothing to do: step {job.step} of {job.last_step} is already reached")
        return EXIT_OK
    if job.mesh.unmeasured:
        from slurmllm.train.micro_batch import choose_micro_batch

        if signal_name := choose_micro_batch(job):
            job.say(f"stopped by {signal_name} while the micro batch was measured")
            return EXIT_REQUEUE
    from slurmllm.train.hooks import make_hooks
    from slurmllm.train.loop import train

    hooks = make_hooks(job)
    try:
        code = train(job, hooks)
        if job.stage == "precompile" and code == EXIT_OK:
            job.backend.precompile_resume()
        return code
    finally:
        for hook in hooks:
            hook.close()


def _fail(error: BaseException, attempt: AttemptDir, worker: Worker, job: Job | None) -> int:
    """Write down and say why; end the process where closing the process groups could hang."""
    record = failure_record(error, worker, job.step if job is not None else None)
    with suppress(SlurmllmError):
        record.save(attempt.failure(worker.rank))
    with suppress(OSError):  # the log may lie on the disk that is full
        print(format_failure(record), file=sys.stderr, flush=True)
    if job is not None:
        with suppress(Exception):
            job.close_stream()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(record.exit_code)
    return record.exit_code


def _worker() -> Worker:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set: `slurmllm worker` is started by the launcher"
        )
    rank, world_size, local_rank = (int(os.environ[name]) for name in names)
    node = os.environ.get("SLURMLLM_NODE", socket.gethostname())
    sharing = int(os.environ.get("SLURMLLM_SHARING") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return Worker(rank, world_size, local_rank, node, sharing)
