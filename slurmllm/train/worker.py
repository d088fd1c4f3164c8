"""The entry of a worker process, and its exits: finished, stopped, failed."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from slurmllm.core.errors import EXIT_OK, EXIT_REQUEUE, ConfigError, PluginError, SlurmllmError
from slurmllm.core.log import setup_logging
from slurmllm.core.plugins import build
from slurmllm.core.run.rundir import AttemptDir, RunDir, Stage
from slurmllm.core.run.worker_files import diagnostic
from slurmllm.train.backends.base import Worker
from slurmllm.train.exits import (
    StopRequest,
    classify_error,
    dump_on_signal,
    failure_record,
    format_failure,
    is_of_compiler,
)
from slurmllm.train.hooks import Hook, HookContext
from slurmllm.train.job import Job, make_job, open_job

if TYPE_CHECKING:
    from slurmllm.train.hooks.tensorboard import TensorBoardHook

log = logging.getLogger(__name__)

_HOOK_METHODS = ("reads_model", "before_training", "after_evaluation", "before_step", "after_step")


def run_worker(run: RunDir, stage: Stage, attempt: int) -> int:
    """Run one worker of an attempt: return 0 finished, 75 stopped, else a failure's exit code.

    The launcher sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, SLURMLLM_NODE and
    SLURMLLM_SHARING. A worker that fails with open process groups ends the process instead of
    returning, because closing a group without its peers may block forever.
    """
    started = time.time()
    stop = StopRequest()
    stop.install()
    dump_on_signal()
    worker = worker_from_environment()
    setup_logging(worker.rank)
    train_log = logging.getLogger("slurmllm.train")
    if worker.rank != 0 and train_log.getEffectiveLevel() > logging.DEBUG:
        # All ranks do the same in training; rank 0 alone logs it. Failures are logged by all.
        train_log.setLevel(logging.ERROR)
    job: Job | None = None
    try:
        job = make_job(run, stage, attempt, worker, stop, started)
        code = _run_stage(job)
        job.close()
    except BaseException as error:  # KeyboardInterrupt too: every failure leaves a record
        if stop.signal_name is not None and is_of_compiler(error):
            # The signal went to all processes of the step, and ended the compiler's.
            log.info("stopped by %s while compiling", stop.signal_name)
            _leave_if_distributed(EXIT_REQUEUE)
            code = EXIT_REQUEUE
        else:
            code = _fail(error, run.attempt(stage, attempt), worker, job)
    stop.ignore()
    return code


def worker_from_environment() -> Worker:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if missing := [name for name in names if name not in os.environ]:
        raise ConfigError(
            f"{', '.join(missing)} not set: `slurmllm worker` is started by the launcher"
        )
    rank, world_size, local_rank = (int(os.environ[name]) for name in names)
    node = os.environ.get("SLURMLLM_NODE", socket.gethostname())
    sharing = int(os.environ.get("SLURMLLM_SHARING") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return Worker(rank, world_size, local_rank, node, sharing)


def _run_stage(job: Job) -> int:
    open_job(job)
    if job.step >= job.last_step:
        log.info("nothing to do: step %d of %d is already reached", job.step, job.last_step)
        return EXIT_OK
    if job.mesh.unmeasured:
        from slurmllm.train.micro_batch import choose_micro_batch

        if signal_name := choose_micro_batch(job):
            log.info("stopped by %s during the measurement of micro batches", signal_name)
            return EXIT_REQUEUE
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


def make_hooks(job: Job) -> list[Hook]:
    """Return the hooks of this worker, in the order in which they run after each step.

    Metrics come before the checkpoint, so that the rows of all its steps are on disk; the guard
    before it, so that a diverged step is recorded but not saved; the evaluation too, so that a
    saved step has its losses. Memory is read after the guard, and before a save uses some.
    """
    from slurmllm.train.hooks import monitoring
    from slurmllm.train.hooks.checkpoint import CheckpointHook
    from slurmllm.train.hooks.evaluation import EvaluationHook

    hooks: list[Hook] = []
    evaluates = job.config.recipe.eval.every_steps is not None
    tensorboard: TensorBoardHook | None = None
    if job.worker.local_rank == 0:
        hooks.append(monitoring.StartUpHook(job))
    if job.stage == "precompile":
        return [*hooks, EvaluationHook(job)] if evaluates else hooks
    if job.worker.rank == 0:
        hooks += [monitoring.MetricsHook(job), monitoring.ProgressHook(job)]
        with diagnostic("TensorBoard"):  # protobuf may be of a version that it does not accept
            from slurmllm.train.hooks.tensorboard import TensorBoardHook

            tensorboard = TensorBoardHook(job)
            hooks.append(tensorboard)
    hooks.append(monitoring.GuardHook(job))
    # Trainium's memory is not read. Where CPUs stand in for it, nothing is deferred.
    if job.config.cluster.device != "neuron" or not job.backend.deferred_metrics:
        hooks.append(monitoring.MemoryHook(job))
    hooks += [make_plugin_hook(job, name, tensorboard) for name in job.config.recipe.hooks]
    if evaluates:
        hooks.append(EvaluationHook(job, tuple(hooks)))
    if job.config.recipe.profile.steps is not None:
        from slurmllm.train.hooks.profiling import ProfilingHook

        hooks.append(ProfilingHook(job))
    return [*hooks, CheckpointHook(job)]


def make_plugin_hook(job: Job, name: str, tensorboard: TensorBoardHook | None) -> Hook:
    context = HookContext(
        name,
        job.config,
        job.mesh,
        job.worker.rank,
        job.attempt,
        job.step,
        job.last_step,
        job.control,
        job.backend.model_of_hooks,
        job.run.hook_rows(name, job.attempt),
        tensorboard.add_scalars if tensorboard is not None else lambda step, values: None,
    )
    settings = job.config.recipe.hooks[name]
    return PluginHook(job, name, build("hooks", name, f"hooks.{name}", Hook, settings, context))


def _fail(error: BaseException, attempt: AttemptDir, worker: Worker, job: Job | None) -> int:
    """Record and log the failure; end the process if closing process groups could hang."""
    record = failure_record(error, worker, job.step if job is not None else None)
    with suppress(SlurmllmError):
        record.save(attempt.failure(worker.rank))
    log.error("%s", format_failure(record))
    if job is not None:
        with suppress(Exception):
            job.stream.close()
    _leave_if_distributed(record.exit_code)
    return record.exit_code


def _leave_if_distributed(exit_code: int) -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        with suppress(OSError):  # standard output may be a file on a full disk
            sys.stdout.flush()
        os._exit(exit_code)


@dataclass
class PluginHook(Hook):
    """A hook of another package; what that raises is raised as a PluginError.

    Errors of the infrastructure (a lost peer, a full disk) and of slurmllm pass unchanged.
    """

    job: Job
    name: str
    hook: Hook

    def __post_init__(self) -> None:
        for method in _HOOK_METHODS:
            setattr(self, method, partial(self._call, method))

    def __str__(self) -> str:
        return type(self.hook).__name__

    def close(self) -> None:
        # What it raises is logged, since it would hide how the training ended.
        try:
            self.hook.close()
        except Exception as error:
            log.exception("%s", self._text("close", error))

    def _call(self, method: str, *arguments: object) -> object:
        try:
            return getattr(self.hook, method)(*arguments)
        except SlurmllmError:
            raise
        except Exception as error:
            if classify_error(error).blame == "infrastructure":
                raise
            raise PluginError(self._text(method, error)) from error

    def _text(self, method: str, error: Exception) -> str:
        path = f"hooks.{self.name}"
        return (
            f"{path}: {self}.{method} of module {type(self.hook).__module__} raised "
            f"{type(error).__name__} after step {self.job.step}: {error}; a hook must not raise: "
            "correct it (the traceback is in this worker's log), or train without it: `slurmllm "
            f"resume {self.job.run.name} --set {path}=null`"
        )
