"""Batch scripts: generated directives and exports above a static body.

A script is a pure function's text; the bodies in `sbatch/` hold no variable parts.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from slurmllm import __version__
from slurmllm.core.config.directives import as_arguments, quoted
from slurmllm.core.config.profiles import shipped_dir
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.config.variables import is_secret
from slurmllm.core.errors import ConfigError
from slurmllm.core.plugins import split_prefix
from slurmllm.core.run.rundir import STAGES, RunDir, Stage, root_of
from slurmllm.core.run.safe_files import login_name
from slurmllm.core.slurm.client import SlurmClient
from slurmllm.core.slurm.container import (
    CONTAINER,
    CONTAINER_PYTHON,
    behind_prefix,
    container_arguments,
)
from slurmllm.core.slurm.limits import DEVICES, LimitCheck, check_limits, read_options
from slurmllm.core.slurm.setup import SRUN_OPTIONS, VERSION, limits_script, setup_script
from slurmllm.core.slurm.site import Site
from slurmllm.launch.supervise.allocation import SLURMLLM, launch_line
from slurmllm.plan.mesh import Mesh
from slurmllm.train.backends.environment import (
    load_environment,
    node_local_cache,
    worker_environment,
)

Job = Stage | Literal["evaluate"]
Faults = dict[Stage, Sequence[str]]  # why Slurm can never start the job of a stage


def precompile_nodes(config: RunConfig, nodes: int) -> int:
    """Return the number of nodes for precompile: as few as backend and model need.

    Fewer data-parallel workers than those of the train stage hold larger shards of weights and
    optimizer state, and the stage makes real steps.
    """
    few = load_environment(config.backend).precompile_nodes(config, nodes)
    if not config.recipe.worker.has_model:
        return few
    parallel = config.recipe.parallel
    train = config.recipe.train
    hardware = config.cluster.hardware
    if few == nodes or hardware is None or hardware.rough:
        return few
    from slurmllm.plan.search import predict

    per_node = config.cluster.devices_per_node
    tensor = parallel.tensor
    pipeline = parallel.pipeline
    # As the stage computes: a micro batch for each pipeline stage, or two if it measures.
    micro, passes = (1, 2) if train.micro_batch == "auto" else (train.micro_batch, 1)
    for count in range(few, nodes, few):
        data = count * per_node // (tensor * pipeline)
        batch = data * micro * passes * pipeline
        virtual = parallel.virtual_pipeline
        mesh = Mesh(count, per_node, tensor, pipeline, data, batch, micro, virtual)
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
    lines = [
        "#!/bin/bash",
        *directives(stage, config, run, nodes),
        "",
        *limits_script(),
        "",
        *setup_script(config.cluster.setup, stop=False),
        "# What the body below reads.",
        *_exports(config, run, python),
    ]
    count = node_count(stage, config, nodes)
    if "-" in count or config.recipe.slurm.spare_nodes:
        count = "N"
    lines += [
        "",
        "# The supervisor starts the workers of attempt N by:",
        f"# {launch_line(count, stage, _srun_options(config, run))}",
    ]
    body = (shipped_dir() / "sbatch" / f"{stage}.sbatch").read_text("utf-8")
    return "\n".join(lines) + "\n\n" + body


def node_count(stage: Job, config: RunConfig, nodes: int) -> str:
    """Return the number of nodes, or their range, that a stage requests."""
    slurm = config.recipe.slurm
    if stage == "precompile":
        return str(precompile_nodes(config, nodes))
    if stage == "evaluate":
        return "1"
    count = str(nodes + slurm.spare_nodes)
    if slurm.min_nodes is not None and slurm.min_nodes < nodes:
        return f"{slurm.min_nodes + slurm.spare_nodes}-{count}"
    return count


def render_evaluation(config: RunConfig, run: RunDir, step: int) -> str:
    """Return the script that evaluates a checkpoint by the recipe's `evaluate`."""
    container, prefix = config.cluster.container, _container_prefix(config, run)
    python = container.python if container else config.cluster.python or sys.executable
    if container and container.srun_runs_it:
        prefix = ["srun", *prefix]
    verb = [*SLURMLLM, "evaluate-checkpoint", str(run.path), str(step)]
    return "\n".join(
        [
            "#!/bin/bash",
            *directives("evaluate", config, run, 1),
            *limits_script(),
            *setup_script(config.cluster.setup, stop=True),
            f"exec {shlex.join(behind_prefix(prefix, python, verb))}",
        ]
    )


def directives(stage: Job, config: RunConfig, run: RunDir, nodes: int) -> list[str]:
    """Return the lines of a script that hold options of sbatch; ConfigError as `render`."""
    slurm = config.recipe.slurm
    cluster = config.cluster
    evaluate = config.recipe.evaluate if stage == "evaluate" else None
    count = node_count(stage, config, nodes)
    times = {"train": slurm.time, "precompile": slurm.precompile_time}
    # Slurm expands %-patterns in file names; ours holds none, but for the job's id.
    log = str(run.logs / stage).replace("%", "%%")
    options: dict[str, str | None] = {
        "job-name": f"{run.name}-{stage}",
        "nodes": count,
        # One launcher a node, which starts the workers. With a range of nodes, Slurm would give as
        # few as the tasks need.
        "ntasks-per-node": None if "-" in count else "1",
        "time": evaluate.time if evaluate else times[stage],
        "partition": slurm.partition or cluster.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "reservation": slurm.reservation,
        "exclude": slurm.exclude,
        # The train job's is given to sbatch, unless it is the first.
        "dependency": None if evaluate else slurm.dependency,
        "output": f"{log}-%j.log" if evaluate else f"{log}.log",
        # The default may truncate the log of the attempt before a requeue.
        "open-mode": "append",
        "chdir": str(run.path),  # the folder of submit may be gone when the job starts
    }
    if stage == "train":
        # B: only to the batch shell, which does not get the signal without it.
        options["signal"] = f"B:USR1@{slurm.signal_lead_s}"
    users = getattr(slurm.directives, stage)
    lines = [
        f"--{name}={_checked(name, value)}"
        for name, value in options.items()
        if value is not None and name not in users
    ]
    if cluster.exclusive and "exclusive" not in users and not evaluate:
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


def check_jobs(
    client: SlurmClient | None, config: RunConfig, run: RunDir, nodes: int, compiles: bool
) -> tuple[Sequence[str], Faults]:
    """Compare jobs with their partition; returns warnings of the train job, and the faults."""
    faults: Faults = dict.fromkeys(STAGES, ())
    limits = LimitCheck()
    site = None if client is None else Site(client)
    for stage in STAGES:
        # A value that Slurm would misread is refused, whether there is a limit or not.
        options = directives(stage, config, run, nodes)
        if site is not None and (compiles or stage == "train"):
            request = read_options(options)
            if config.cluster.device == "cuda":
                request[DEVICES] = str(config.cluster.devices_per_node)
            limits = check_limits(request, site)
            option = "--time " if stage == "train" else "--set slurm.precompile_time="
            faults[stage] = [
                f"{stage} job: {fault}".replace("--time ", option) for fault in limits.faults
            ]
    return limits.warnings, faults


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
    texts = [*(share.path for share in recipe.data.corpora), *recipe.eval.corpora.values()]
    files = [*(split_prefix(source)[1] for source in texts), recipe.data.tokenizer]
    folders = [
        *(file and str(Path(file).parent) for file in files),
        recipe.train.init_from if recipe.command is None else recipe.command.folder,
    ]
    folders = [config.cluster.node_local, *folders, recipe.checkpoint.replica]
    return [
        root_of(run),
        run.path,
        *(Path(folder) for folder in folders if folder is not None and folder.startswith("/")),
    ]


def _container_prefix(config: RunConfig, run: RunDir) -> list[str]:
    container = config.cluster.container
    if container is None:
        return []
    return container_arguments(container, config.cluster.device, shared_folders(config, run))


def _srun_options(config: RunConfig, run: RunDir) -> list[str]:
    container = config.cluster.container
    options = config.recipe.slurm.directives.srun
    by_srun = container is not None and container.srun_runs_it
    return [*(_container_prefix(config, run) if by_srun else ()), *as_arguments(options)]


def _exports(config: RunConfig, run: RunDir, python: str) -> list[str]:
    cluster = config.cluster
    srun = _srun_options(config, run)
    variables = {}
    container = cluster.container
    port = cluster.master_port
    if container is not None:
        # An image's passwd need not know the user, whose name is in paths.
        variables = {CONTAINER_PYTHON: container.python, "LOGNAME": login_name()}
        if not container.srun_runs_it:
            variables[CONTAINER] = shlex.join(_container_prefix(config, run))
    variables |= {
        "SLURMLLM_RUN": str(run.path),
        "SLURMLLM_PYTHON": python,
        "SLURMLLM_CACHE": node_local_cache(config, run),
    }
    if cluster.python:
        variables[VERSION] = __version__
    if srun:
        variables[SRUN_OPTIONS] = shlex.join(srun)
    if port is not None:
        variables["SLURMLLM_MASTER_PORT"] = str(port)
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    lines += ["", f"# The workers' environment: backend {config.backend}, cluster {cluster.name}."]
    for name, variable in worker_environment(config, run).items():
        line = f"export {name}={shlex.quote(variable.value)}"
        if is_secret(name, variable.value):
            line = f"# {name}: from secrets.json, by the launcher"
        lines.append(f"{line}  # {variable.source}")
    return lines
