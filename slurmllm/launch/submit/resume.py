"""The rules of resuming a run: which settings may change, what is refused, what is warned of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

from slurmllm.core.config.load import load, read_summary, summarize
from slurmllm.core.config.recipe import Recipe
from slurmllm.core.config.resolve import RunConfig, Settings, change, changed_settings
from slurmllm.core.errors import RunError
from slurmllm.core.metrics.row_reader import last_row
from slurmllm.core.run.records import Submission, last_submission
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.slurm.client import SlurmClient, wait_for
from slurmllm.launch.submit.launch import SubmittedRun, start
from slurmllm.launch.submit.prepare import PreparedRun, RunRequest, check_mode, prepare
from slurmllm.launch.supervise.run_lock import locked
from slurmllm.launch.supervise.run_state import (
    is_active,
    process_elsewhere,
    read_records,
    sweep_process,
)
from slurmllm.train.checkpoint.catalogue import require_recorded, usable_steps
from slurmllm.train.checkpoint.state import require_same_settings
from slurmllm.train.schedules import check_decay_start, moved_decay_end

log = logging.getLogger(__name__)
_ENDING_S = 60.0  # for a run's last save, and for Slurm to end its job
_POLL_S = 1.0


class Changes(NamedTuple):
    """What a resume changes of a run: the arguments of `config.resolve.change`, and its start."""

    cluster: str | None
    overrides: Sequence[str]
    options: Settings
    from_scratch: bool  # whether it starts again from step 0, without the checkpoints


def require_ended(run: RunDir, client: SlurmClient, force: bool = False) -> Submission | None:
    """Return the last submission of a run, or None if there is none; RunError if it has not ended.

    If the run has recorded its end or was cancelled, its last processes are waited for first.

    `force`: a process that cannot be seen from this machine counts as ended.
    """
    name = run.name
    last = last_submission(run)
    process = sweep_process(run) if last is None else process_elsewhere(run, client)
    if process is not None and not force:
        raise RunError(
            f"{name} may still be running: {process} runs it or its sweep; `slurmllm cancel` "
            f"there, or `slurmllm resume {name} --force` if that process is gone"
        )
    if last is None or process is not None or not is_active(run, client):
        return last
    records = read_records(run, read_summary(run.config))
    if not (records.ended or records.cancelled):
        raise RunError(
            f"{name} is pending or running; follow it with `slurmllm status {name}` or "
            f"`slurmllm cancel {name}` first"
        )
    log.warning("waiting up to %.0f s for the last processes of %s to end", _ENDING_S, name)
    if not wait_for(lambda: not is_active(run, client), _ENDING_S, _POLL_S):
        raise RunError(
            f"the last processes of {name} still run; type this command again when "
            "`squeue` no longer shows its jobs"
        )
    return last


def nodes_and_mode(last: Submission | None, nodes: int | None, local: bool) -> tuple[int, bool]:
    """Return nodes, and whether they are launchers on this machine, by default as before."""
    count = nodes or (last.nodes if last else 1)
    return count, local or (last is not None and last.local and last.allocation is None)


def continue_run(
    request: RunRequest,
    changes: Changes,
    client: SlurmClient,
    hold: Callable[[int | None], tuple[str, int]] | None = None,
    on_prepared: Callable[[PreparedRun], object] = lambda _: None,
) -> SubmittedRun:
    """Prepare a run to be continued, and submit its jobs or record that this process runs it.

    Args:
        request: The run, and nodes and mode if they change; its configuration is read again.
        hold: Returns the Slurm job whose nodes run the stages, and how many of the requested ones.
        on_prepared: Called before anything is submitted.

    Raises:
        SlurmllmError: as `require_ended`, `prepare_resume` and `submit_jobs` do.
    """
    assert request.run is not None
    run = request.run
    require_ended(run, client, request.force)  # waits: its last processes need the lock
    with nullcontext() if request.dry_run else locked(run, "resume"):
        last = require_ended(run, client, request.force)
        count, local = nodes_and_mode(last, request.nodes, request.local)
        allocation = None
        if hold is not None:
            local = False
            allocation, count = hold(request.nodes or (last.nodes if last else None))
        check_mode(local, changes.options)
        request = replace(
            request,
            config=load(run.config, trusted=True),
            nodes=count,
            local=local,
            slurm=None if local or allocation is not None else client,
        )
        prepared = prepare_resume(request, changes, last)
        on_prepared(prepared)
        return start(prepared, request, allocation)


def prepare_resume(request: RunRequest, changes: Changes, last: Submission | None) -> PreparedRun:
    """Prepare a run to be continued.

    Args:
        request: The run, with its present configuration; if jobs are submitted, those do without
            nodes that failed the run.
        changes: What is changed of it.
        last: The run's last submission.
    """
    assert request.run is not None
    run = request.run
    before = request.config
    config = changed_config(before, changes)
    earlier = before.recipe
    recipe = config.recipe
    is_done = read_records(run, summarize(before)).done
    request = replace(request, config=config)
    if not recipe.worker.has_model:
        if changes.from_scratch:
            raise RunError(
                f"--from-scratch: the checkpoints of {run.name} are its trainer's, which decides "
                "where it continues; remove them, or start another run"
            )
        step = int((last_row(run) or {}).get("step", 0))
        steps = recipe.steps
        if steps is not None and steps != earlier.steps and steps <= step:
            raise RunError(
                f"command.steps {steps} is not above step {step}, which {run.name} has reached; "
                "set more, or start another run"
            )
        if is_done and recipe.command == earlier.command:
            raise RunError(
                f"{run.name} is done: its command ended with exit code 0; change it with --set "
                "command.run=…, or --set command.steps=… with more steps, to continue it"
            )
    else:
        _check_recipe(run, earlier, recipe, changes.from_scratch)
        if is_done and recipe.train.steps <= earlier.train.steps:
            raise RunError(
                f"{run.name} is done: it has trained all its {earlier.train.steps} steps; --set "
                "train.steps=… with more of them continues it"
            )
        if not changes.from_scratch and recipe.checkpoint.replica is None:
            require_recorded(run)  # a worker finds out too, hours in the queue later
        # A layout that has trained before has shown that it fits.
        has_fitted = last is not None and request.nodes == last.nodes
        request = replace(
            request,
            check_layout=not has_fitted or _layout(config) != _layout(before),
            check_weights=recipe.train.init_from != earlier.train.init_from,
        )
    prepared = prepare(request)
    return replace(
        prepared,
        from_scratch=changes.from_scratch,
        changes=changed_settings(before, prepared.config),
    )


def changed_config(config: RunConfig, changes: Changes) -> RunConfig:
    """Return a run's configuration with changes, in which settings of its last jobs are reset."""
    recipe = config.recipe
    resets = []
    if not changes.from_scratch and recipe.worker.has_model:
        # The warm-up keeps its steps, if another train.steps would change them.
        names = {override.partition("=")[0].strip() for override in changes.overrides}
        sets_warmup = names & {"optim", "optim.warmup_ratio", "optim.warmup_steps"}
        if recipe.optim.warmup_ratio is not None and not sets_warmup and "train.steps" in names:
            resets += [
                "optim.warmup_ratio=null",
                f"optim.warmup_steps={recipe.optim.warmup(recipe.train.steps)}",
            ]
    if recipe.slurm.min_nodes is not None and "slurm.min_nodes" in changes.options:
        resets.append("slurm.min_nodes=null")
    if recipe.slurm.dependency is not None:  # the job that the last submission waited for has ended
        resets.append("slurm.dependency=null")
    overrides = [*resets, *changes.overrides]
    if changes.cluster or overrides or any(value for _, value in changes.options.values()):
        return change(config, changes.cluster, overrides, changes.options)
    return config


def _check_recipe(run: RunDir, before: Recipe, recipe: Recipe, from_scratch: bool) -> None:
    """Raise ConfigError if the checkpoints do not permit a change; warn of what it does."""
    if from_scratch:
        return
    steps = usable_steps(run)
    require_same_settings(run, recipe, run.checkpoint(max(steps)) if steps else None)
    if not steps:
        return
    check_decay_start(before, recipe, max(steps))
    if warning := moved_decay_end(before, recipe, max(steps)):
        log.warning("%s", warning)
    earlier = before.eval
    later = recipe.eval
    if later.every_steps and earlier.every_steps and earlier.sequences != later.sequences:
        log.warning(
            "eval.sequences: changed from %d to %d; losses of evaluations before and after are "
            "means over different sequences",
            earlier.sequences,
            later.sequences,
        )


def _layout(config: RunConfig) -> tuple[Any, ...]:
    """Return the settings that memory and speed depend on and that a resume may change."""
    train = config.recipe.train
    return (
        config.cluster,
        config.backend,
        config.recipe.parallel,
        train.micro_batch,
        train.activation_checkpointing,
        train.precision,
    )
