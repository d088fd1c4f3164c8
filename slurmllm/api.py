"""The functions of `import slurmllm`: what the verbs do, without their output, and without torch.

They raise `SlurmllmError`. `runs_dir` is the folder of all runs, by default $SLURMLLM_RUNS, else
`runs` here; a recipe is what `load_recipe` returns, or its name.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from slurmllm.core import errors
from slurmllm.core.run.rundir import STAGES, Stage, find_run, find_run_or_sweep, runs_root

if TYPE_CHECKING:
    from slurmllm.analysis.compare.result import BasisKind, Comparison
    from slurmllm.analysis.status.logs import RunLogs
    from slurmllm.analysis.status.runs import RunState, RunStates
    from slurmllm.core.config.resolve import RunConfig
    from slurmllm.core.format import Values
    from slurmllm.core.metrics.curves import Axis, Curve
    from slurmllm.launch.submit.deletion import CancelledRun
    from slurmllm.launch.submit.launch import SubmittedRun
    from slurmllm.plan.output import Plan
    from slurmllm.plan.recipe_plan import Rank
    from slurmllm.train.checkpoint.formats.model_folders import ExportedModel

PathName = str | Path

if "slurmllm.cli.main" not in sys.modules:
    # Python prints warnings of a program that configures no logging, and so does our command line.
    logging.getLogger("slurmllm").addHandler(logging.NullHandler())


def load_recipe(
    name: str,
    cluster: str | None = None,
    settings: Values | None = None,
    data: str | None = None,
    *,
    local: bool = False,
) -> RunConfig:
    """Return a recipe with a cluster profile: every value, checked, with its source.

    Args:
        name: Name of `slurmllm recipes`, or a .yaml file.
        cluster: Name or .yaml file of a profile; by default $SLURMLLM_CLUSTER, else that of
            config.yaml (`slurmllm init`), else the recipe's.
        settings: Dotted path → value, as of `--set`.
        data: `builtin` for a first trial, or a published data set, as of `--data`.
        local: For a run on this machine, to which config.yaml's profile does not apply.

    Examples:
        >>> config = slurmllm.load_recipe("llama3_8b", settings={"optim.lr": 1e-4})
        >>> config.recipe.optim.lr, config.to_dict()["model"]["num_layers"]
        (0.0001, 32)
    """
    from slurmllm.core.config.resolve import local_cluster, resolve
    from slurmllm.launch.submit.inputs import data_settings

    return resolve(name, local_cluster(cluster, local), _overrides(settings), data_settings(data))


def _overrides(settings: Values | None) -> list[str]:
    return [  # JSON is YAML
        f"{path}={value if isinstance(value, str) else json.dumps(value, default=str)}"
        for path, value in (settings or {}).items()
    ]


def plan_run(
    recipe: RunConfig | str,
    nodes: int | Sequence[int],
    *,
    tokens: str | None = None,
    price: float | None = None,
    rank: Rank = "speed",
) -> Plan:
    """Rank the parallel layouts of a recipe by predicted throughput, with memory, time and cost.

    Args:
        nodes: Number of nodes, or several.
        tokens: Tokens to train on, such as 20B; by default the recipe's.
        price: Dollars for an hour of one node; None: the profile's on-demand price.
        rank: `speed`, or `lower`: the lower end of the throughput's interval.

    Examples:
        >>> config = slurmllm.load_recipe("llama3_8b", cluster="p5")
        >>> plan = slurmllm.plan_run(config, [4, 8])
        >>> plan.best(8).seq_per_s > plan.best(4).seq_per_s
        True
        >>> plan.best(8)  # doctest: +ELLIPSIS
        <LayoutEstimate of llama3_8b on 8 nodes of p5: TP 2 × PP 1 × DP 32, micro batch 2, ...>
        >>> sorted(set(plan.to_pandas()["nodes"]))
        [4, 8]
    """
    from slurmllm.plan.output import Plan
    from slurmllm.plan.prices import parse_price, parse_tokens, select_price
    from slurmllm.plan.recipe_plan import node_counts, plan_recipe
    from slurmllm.train.backends.environment import load_environment

    config = _config_of(recipe)
    counts = node_counts(map(str, [nodes] if isinstance(nodes, int) else nodes))
    _check_choice("rank", rank, ("speed", "lower"))
    node_price = select_price(config, None if price is None else parse_price(price))
    count = None if tokens is None else parse_tokens(str(tokens))
    unsupported = load_environment(config.backend).unsupported
    return Plan(plan_recipe(config, counts, unsupported, node_price, count, rank))


def _check_choice(name: str, value: str | None, choices: Iterable[str]) -> None:
    if value is not None and value not in choices:
        raise errors.UserError(f"{name} {value!r}: give {' or '.join(choices)}")


def _check_positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise errors.UserError(f"{name} {value}: give 1 or more")


def _config_of(recipe: RunConfig | str, local: bool = False) -> RunConfig:
    return load_recipe(recipe, local=local) if isinstance(recipe, str) else recipe


def submit_run(
    recipe: RunConfig | str,
    nodes: int | str = 1,
    *,
    name: str | None = None,
    local: bool = False,
    dry_run: bool = False,
    force: bool = False,
    runs_dir: PathName | None = None,
) -> SubmittedRun:
    """Submit the jobs that train a recipe, or train it on this machine.

    Args:
        recipe: Settings of its section `slurm` are the options of the jobs.
        nodes: Nodes of the train job, or a range such as `2-4`: at least 2, at most 4.
        name: The run's name; by default the recipe's with the next free number.
        local: Train here, without Slurm, and return at the end; raise what ended a failed run.
        dry_run: Write and submit nothing; scripts and warnings are returned.
        force: Submit even if the planner predicts that the run exceeds device memory.

    Examples:
        >>> config = slurmllm.load_recipe("tiny_neox", None, {"train.steps": 20}, local=True)
        >>> dry = slurmllm.submit_run(config, nodes=4, dry_run=True)
        >>> dry.scripts["train"].splitlines()[0]
        '#!/bin/bash'
        >>> run = slurmllm.submit_run(config, name="first", local=True)
        >>> run.exit_code, run.path.name
        (0, 'first')
    """
    from slurmllm.core.config.directives import parse_nodes
    from slurmllm.core.config.resolve import change
    from slurmllm.core.slurm.client import SlurmClient
    from slurmllm.launch.submit.launch import start_run
    from slurmllm.launch.submit.prepare import RunRequest, check_mode

    min_nodes, max_nodes = parse_nodes(str(nodes), "nodes")
    options = {"slurm.min_nodes": ("nodes", min_nodes)}
    check_mode(local, options)
    config = _config_of(recipe, local)
    request = RunRequest(
        config=config if min_nodes is None else change(config, None, (), options),
        nodes=max_nodes,
        root=runs_root(runs_dir),
        name=name,
        local=local,
        force=force,
        dry_run=dry_run,
        slurm=None if local else SlurmClient(),
    )
    return _run_to_end(start_run(request))


def resume_run(
    run: str,
    nodes: int | str | None = None,
    *,
    settings: Values | None = None,
    cluster: str | None = None,
    from_scratch: bool = False,
    local: bool = False,
    dry_run: bool = False,
    force: bool = False,
    runs_dir: PathName | None = None,
) -> SubmittedRun:
    """Continue a run that was cancelled or has stopped, from its newest checkpoint.

    Args:
        nodes: Nodes of the train job, or a range such as `2-4`; by default as before.
        settings: Dotted path → value to change, as of `--set`: not model, data, seed and global
            batch.
        cluster: Name or .yaml file of another profile.
        from_scratch: Start again from step 0, without the checkpoints.
        local: Continue here and return at the end, as a run that was started here always does.
        dry_run: Write and submit nothing; scripts, warnings and changes are returned.
        force: As of `submit_run`; also resume if a process of another machine may run it.

    Examples:
        >>> run = slurmllm.resume_run("first", settings={"train.steps": 25})
        >>> run.exit_code, slurmllm.read_status("first").step
        (0, 25)
    """
    from slurmllm.core.config.directives import parse_nodes
    from slurmllm.core.config.load import load
    from slurmllm.core.slurm.client import SlurmClient
    from slurmllm.launch.submit.prepare import RunRequest
    from slurmllm.launch.submit.resume import Changes, continue_run

    run_dir, max_nodes, options = find_run(run, runs_root(runs_dir)), 0, {}
    if nodes is not None:
        min_nodes, max_nodes = parse_nodes(str(nodes), "nodes")
        options = {"slurm.min_nodes": ("nodes", min_nodes)}
    request = RunRequest(
        config=load(run_dir.config, trusted=True),
        nodes=max_nodes,
        root=runs_root(runs_dir),
        run=run_dir,
        local=local,
        force=force,
        dry_run=dry_run,
    )
    changes = Changes(cluster, _overrides(settings), options, from_scratch)
    return _run_to_end(continue_run(request, changes, SlurmClient()))


def _run_to_end(run: SubmittedRun) -> SubmittedRun:
    """Run a run that trains on this machine; raise what ended it."""
    if run.sent is None or not run.sent.local:
        return run
    run = run.run_to_end()
    code = run.exit_code or errors.EXIT_OK
    if code not in (errors.EXIT_OK, errors.EXIT_INTERRUPTED, errors.EXIT_REQUEUE):
        reason = read_status(str(run.path)).reason or f"exit code {code}"
        raise errors.by_exit_code(code)(
            f"{run.name} stopped: {reason}; `slurmllm logs {run.name}` shows more, `slurmllm "
            f"resume {run.name}` continues"
        )
    return run


def cancel_run(run: str, runs_dir: PathName | None = None) -> CancelledRun:
    """Cancel the jobs of a run, or of all runs of a sweep; `resume_run` continues them.

    The workers save a checkpoint before they exit, if Slurm gives them the time.

    Examples:
        >>> slurmllm.cancel_run("first").jobs  # it has ended
        ()
    """
    from slurmllm.core.slurm.client import SlurmClient
    from slurmllm.launch.submit.deletion import cancel_jobs

    return cancel_jobs(find_run_or_sweep(run, runs_root(runs_dir)), SlurmClient())


def export_checkpoint(
    checkpoint: PathName,
    out: PathName,
    *,
    dtype: str = "source",
    tokenizer: PathName | None = None,
    shard_bytes: int = 5_000_000_000,
    runs_dir: PathName | None = None,
) -> ExportedModel:
    """Export a checkpoint as a Hugging Face model folder, which AutoModelForCausalLM loads.

    Args:
        checkpoint: A run, of which the newest checkpoint that verifies is exported, RUN@STEP, or a
            checkpoint's folder.
        out: Folder to create.
        dtype: Type of the weights to write: `fp32`, `bf16`, or `source`, the stored one.
        tokenizer: A tokenizer.json; by default the run's, or the imported one.
        shard_bytes: Maximum size of a weight file.

    Examples:
        >>> model = slurmllm.export_checkpoint("first", "first-hf")
        >>> "config.json" in model.files
        True
    """
    from slurmllm.train.checkpoint.formats.exporting import export_model
    from slurmllm.train.checkpoint.formats.safetensors_files import WEIGHT_TYPES

    _check_choice("dtype", dtype, WEIGHT_TYPES)
    _check_positive("shard_bytes", shard_bytes)
    file = None if tokenizer is None else Path(tokenizer)
    return export_model(str(checkpoint), runs_root(runs_dir), Path(out), dtype, file, shard_bytes)


def read_status(run: str, runs_dir: PathName | None = None) -> RunState:
    """Return the state of a run: progress, attempts, checkpoints, cost, and why it waits or ended.

    Examples:
        >>> state = slurmllm.read_status("first")
        >>> state.state, state.step, state.attempts[0].nodes
        ('done', 20, ('local0',))
    """
    from slurmllm.analysis.status.runs import run_state
    from slurmllm.core.slurm.client import SlurmClient

    return run_state(find_run(run, runs_root(runs_dir)), SlurmClient())


def read_statuses(runs_dir: PathName | None = None) -> RunStates:
    """Return the states of all runs, the newest last.

    Examples:
        >>> slurmllm.read_statuses().to_pandas()[["name", "state"]].values.tolist()
        [['first', 'done']]
    """
    from slurmllm.analysis.status.runs import RunStates, list_runs, run_states
    from slurmllm.core.slurm.client import SlurmClient

    return RunStates(run_states(list_runs(runs_root(runs_dir)), SlurmClient()))


def read_logs(
    run: str,
    *,
    stage: Stage | None = None,
    attempt: int | None = None,
    rank: int | None = None,
    all_ranks: bool = False,
    lines: int | None = None,
    runs_dir: PathName | None = None,
) -> RunLogs:
    """Return the logs of a run: precompile stage, then train stage.

    Args:
        stage: Only `precompile` or `train`.
        attempt: Only this attempt; of the train stage by default.
        rank: A worker, in the newest attempt; by default rank 0 with the supervisor, in all.
        all_ranks: The workers whose logs are in the run directory, merged by time.
        lines: Only the last lines of each log.

    Examples:
        >>> print(slurmllm.read_logs("first", stage="train", lines=1))  # doctest: +ELLIPSIS
        20...
    """
    from slurmllm.analysis.status.logs import RunLogs, log_batches, select_logs
    from slurmllm.analysis.status.runs import state_text
    from slurmllm.core.slurm.client import SlurmClient

    _check_choice("stage", stage, STAGES)
    if rank is not None and all_ranks:
        raise errors.UserError("rank and all_ranks: each selects workers; give one of them")
    _check_positive("lines", lines)
    run_dir = find_run(run, runs_root(runs_dir))
    selection = select_logs(run_dir, stage, attempt, rank, None, lines, all_ranks)
    state = partial(state_text, run_dir, SlurmClient())
    return RunLogs(chain.from_iterable(log_batches(selection, lines, state)))


def read_curves(
    run: PathName,
    *,
    tags: Mapping[str, str] | None = None,
    pattern: str | None = None,
    where: Mapping[str, str] | None = None,
    runs_dir: PathName | None = None,
) -> Curve:
    """Return the metrics of a run by step, or of another framework's log.

    Args:
        run: A run's name or directory, or a file or folder as `slurmllm compare` takes it.
        tags: Of another framework's log: metric → tag, column or key that holds it.
        pattern: Of a text log: regular expression of a line, with a named group for each metric.
        where: Of another framework's log: column → the value of the rows to read.

    Examples:
        >>> curves = slurmllm.read_curves("first")
        >>> curves.to_pandas()["loss"].idxmin() > 10
        True
    """
    from slurmllm.core.metrics.source import locate, read_curve

    return read_curve(
        locate(str(run), runs_root(runs_dir)), tags, lenient=True, pattern=pattern, where=where
    )


def compare_runs(
    a: PathName | Curve,
    b: PathName | Curve,
    *,
    tolerance: float | None = None,
    exact: bool = False,
    by: Axis = "step",
    seeds: Sequence[PathName | Curve] = (),
    runs_dir: PathName | None = None,
) -> Comparison:
    """Compare the loss and gradient norm of two runs, or of what `read_curves` returned.

    Args:
        a: The reference.
        tolerance: Relative tolerance of the loss; by default 1e-3, or what the precisions allow.
        exact: Require bit-identical values, without a tolerance.
        by: What points are aligned by: `step`, `tokens` or `samples`.
        seeds: Runs as `a` with other seeds, whose spread is the tolerance.

    Examples:
        >>> other = slurmllm.load_recipe("tiny_neox", settings={"train.steps": 20, "train.seed": 1})
        >>> second = slurmllm.submit_run(other, name="second", local=True)
        >>> result = slurmllm.compare_runs("first", "second")
        >>> result.verdict, result.causes[0].kind, list(result.to_pandas().index)
        ('differ', 'seed', ['loss', 'grad_norm'])
    """
    from slurmllm.analysis.compare.compare import compare
    from slurmllm.analysis.compare.result import (
        Tolerances,
        check_tolerances,
        refuse_incomplete_logs,
    )
    from slurmllm.core.metrics.curves import Curve
    from slurmllm.core.metrics.source import name_apart

    check_tolerances({"tolerance": tolerance}, "exact" if exact else "")
    if seeds and (exact or tolerance is not None):
        raise errors.UserError("seeds give the tolerance; leave out exact and tolerance")
    first, second, *others = name_apart(
        [
            run if isinstance(run, Curve) else read_curves(run, runs_dir=runs_dir)
            for run in (a, b, *seeds)
        ]
    )
    if exact:
        refuse_incomplete_logs((first, second), "exact=True")
    limits = Tolerances(exact=exact) if tolerance is None else Tolerances(loss=tolerance)
    basis: BasisKind | None = None if tolerance is None else "tolerance"
    return compare(first, second, limits, axis=by, seeds=others, basis=basis)
