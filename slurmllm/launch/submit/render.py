"""Batch scripts: generated directives and exports above a static body.

A script is a pure function's text; the bodies in `sbatch/` hold no variable parts.
"""

from __future__ import annotations

import getpass
import re
import shlex
from pathlib import Path

from slurmllm import __version__
from slurmllm.core.config.directives import as_arguments, quoted
from slurmllm.core.config.profiles import shipped_dir
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.config.variables import is_secret
from slurmllm.core.errors import ConfigError
from slurmllm.core.plugins import split_prefix
from slurmllm.core.run.rundir import RunDir, Stage, root_of
from slurmllm.core.slurm.client import SRUN_OPTIONS
from slurmllm.core.slurm.container import CONTAINER, CONTAINER_PYTHON, container_arguments
from slurmllm.core.slurm.setup import VERSION, limits_script, setup_script
from slurmllm.launch.supervise.allocation import launch_line
from slurmllm.plan.mesh import Mesh
from slurmllm.train.backends.environment import (
    load_environment,
    node_local_cache,
    worker_environment,
)


def precompile_nodes(config: RunConfig, nodes: int) -> int:
    """Return the number of nodes for precompile: as few as backend and model need.

    Fewer data-parallel workers than those of the train stage hold larger shards of weights and
    optimizer state, and the stage makes real steps.
    """
    few = load_environment(config.backend).precompile_nodes(config, nodes)
    if not config.recipe.worker.has_model:
        return few
    parallel, train, hardware = config.recipe.parallel, config.recipe.train, config.cluster.hardware
    if few == nodes or hardware is None or hardware.rough:
        return few
    from slurmllm.plan.estimate import predict

    per_node, model = config.cluster.devices_per_node, parallel.tensor * parallel.pipeline
    # As the stage computes: a micro batch for each pipeline stage, or two if it measures.
    micro, passes = (1, 2) if train.micro_batch == "auto" else (train.micro_batch, 1)
    for count in range(few, nodes, few):
        data = count * per_node // model
        batch = data * micro * passes * parallel.pipeline
        degrees = (parallel.tensor, parallel.pipeline, data)
        mesh = Mesh(count, per_node, *degrees, batch, micro, parallel.virtual_pipeline)
        if predict(config, mesh).fits:
            return count
    return nodes


def render(stage: Stage, config: RunConfig, run: RunDir, nodes: int, python: str) -> str:
    """Return the text of one stage's batch script.

    Args:
        run: The run's directory, absolute, on the shared file system.
        python: The interpreter that the job uses, absolute.

    Raises:
        ConfigError: a value that Slurm would misread, such as a path with a line break.
    """
    lines = ["#!/bin/bash", *directives(stage, config, run, nodes)]
    lines += ["", *limits_script(), "", *setup_script(config.cluster.setup, stop=False)]
    lines += ["# What the body below reads.", *_exports(config, run, python)]
    count = node_count(stage, config, nodes)
    if not count.isdecimal() or config.recipe.slurm.spare_nodes:
        count = "N"
    srun = launch_line(count, stage, _srun_options(config, run))
    lines += ["", "# The supervisor starts the workers of attempt N by:", f"# {srun}"]
    body = (shipped_dir() / "sbatch" / f"{stage}.sbatch").read_text("utf-8")
    return "\n".join(lines) + "\n\n" + body


def node_count(stage: Stage, config: RunConfig, nodes: int) -> str:
    """Return the number of nodes, or their range, that a stage requests."""
    slurm = config.recipe.slurm
    if stage == "precompile":
        return str(precompile_nodes(config, nodes))
    count = str(nodes + slurm.spare_nodes)
    if slurm.min_nodes is not None and slurm.min_nodes < nodes:
        return f"{slurm.min_nodes + slurm.spare_nodes}-{count}"
    return count


def directives(stage: Stage, config: RunConfig, run: RunDir, nodes: int) -> list[str]:
    """Return the lines of a script that hold options of sbatch; ConfigError as `render`."""
    slurm, cluster = config.recipe.slurm, config.cluster
    count = node_count(stage, config, nodes)
    options: dict[str, str | None] = {
        "job-name": f"{run.name}-{stage}",
        "nodes": count,
        # One launcher a node, which starts the workers. With a range of nodes, Slurm would give as
        # few as the tasks need.
        "ntasks-per-node": None if "-" in count else "1",
        "time": slurm.time if stage == "train" else slurm.precompile_time,
        "partition": slurm.partition or cluster.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "reservation": slurm.reservation,
        "exclude": slurm.exclude,
        # The train job's is given to sbatch, unless it is the first.
        "dependency": slurm.dependency,
        # Slurm expands %-patterns in file names; ours holds none.
        "output": str(run.stage_log(stage)).replace("%", "%%"),
        # The default may truncate the log of the attempt before a requeue.
        "open-mode": "append",
        "chdir": str(run.path),  # the folder of submit may be gone when the job starts
    }
    if stage == "train":
        # B: only to the batch shell, which does not get the signal without it.
        options["signal"] = f"B:USR1@{slurm.signal_lead_s}"
    users = slurm.directives.train if stage == "train" else slurm.directives.precompile
    lines = [
        f"--{name}={_checked(name, value)}"
        for name, value in options.items()
        if value is not None and name not in users
    ]
    if cluster.exclusive and "exclusive" not in users:
        lines.append("--exclusive")
    # Slurm itself requeues too, when a node of the job dies.
    lines.append("--requeue" if slurm.restart in ("auto", "requeue") else "--no-requeue")
    if stage == "train":
        # Else a train job whose precompile job failed is pending for ever.
        lines.append("--kill-on-invalid-dep=yes")
    lines += cluster.directives
    for name, value in users.items():
        lines.append(f"--{name}" if value is True else f"--{name}={quoted(str(value))}")
    return [f"#SBATCH {line}" for line in lines]


def _checked(name: str, value: str) -> str:
    if re.search(r'[\n\r"\\$`]', value):
        raise ConfigError(
            "a value that sbatch would misread",
            [f"--{name}: {value!r} holds a quote, backslash, $ or line break; choose another"],
        )
    return quoted(value)


def shared_folders(config: RunConfig, run: RunDir) -> list[Path]:
    """Return the folders outside the container that a run's tasks read and write."""
    recipe = config.recipe
    texts = (*(share.path for share in recipe.data.corpora), *recipe.eval.corpora.values())
    files = [*(split_prefix(source)[1] for source in texts), recipe.data.tokenizer]
    folders = [Path(file).parent for file in files if file is not None and file.startswith("/")]
    command = recipe.command
    start = recipe.train.init_from if command is None else command.folder
    places = (start, recipe.checkpoint.replica)
    folders += [Path(folder) for folder in places if folder is not None and folder.startswith("/")]
    return [root_of(run), run.path, Path(config.cluster.node_local), *folders]


def _container_prefix(config: RunConfig, run: RunDir) -> list[str]:
    container = config.cluster.container
    if container is None:
        return []
    return container_arguments(container, config.cluster.device, shared_folders(config, run))


def _srun_options(config: RunConfig, run: RunDir) -> list[str]:
    container, options = config.cluster.container, config.recipe.slurm.directives.srun
    by_srun = container is not None and container.srun_runs_it
    return [*(_container_prefix(config, run) if by_srun else ()), *as_arguments(options)]


def _exports(config: RunConfig, run: RunDir, python: str) -> list[str]:
    cache, srun = node_local_cache(config, run), _srun_options(config, run)
    container, lines = config.cluster.container, list[str]()
    if container is not None:
        lines.append(f"export {CONTAINER_PYTHON}={shlex.quote(container.python)}")
        # An image's passwd need not know the user, whose name is in paths.
        lines.append(f"export LOGNAME={shlex.quote(getpass.getuser())}")
        if not container.srun_runs_it:
            prefix = _container_prefix(config, run)
            lines.append(f"export {CONTAINER}={shlex.quote(shlex.join(prefix))}")
    port = config.cluster.master_port
    lines = [
        *lines,
        f"export SLURMLLM_RUN={shlex.quote(str(run.path))}",
        f"export SLURMLLM_PYTHON={shlex.quote(python)}",
        f"export SLURMLLM_CACHE={shlex.quote(cache)}",
        *([f"export {VERSION}={__version__}"] if config.cluster.python else []),
        *([f"export {SRUN_OPTIONS}={shlex.quote(shlex.join(srun))}"] if srun else []),
        *([f"export SLURMLLM_MASTER_PORT={port}"] if port is not None else []),
        "",
        f"# The workers' environment: backend {config.backend}, cluster {config.cluster.name}.",
    ]
    lines += [
        f"# {name}: from secrets.json, by the launcher  # {variable.source}"
        if is_secret(name, variable.value)
        else f"export {name}={shlex.quote(variable.value)}  # {variable.source}"
        for name, variable in worker_environment(config, run).items()
    ]
    return lines
