"""Batch scripts: generated directives and exports above a static body.

A script is a pure function's text; the bodies in `sbatch/` hold no variable parts.
"""

from __future__ import annotations

import re
import shlex

from slurmllm.backends.environment import load_environment, node_local_cache, worker_environment
from slurmllm.config.resolve import RunConfig, shipped_dir
from slurmllm.config.variables import is_secret
from slurmllm.errors import ConfigError
from slurmllm.rundir import RunDir, Stage

_PLAIN = re.compile(r"[A-Za-z0-9_+.,:=@/%\[\]()|&*-]+")


def render(stage: Stage, config: RunConfig, run: RunDir, nodes: int, python: str) -> str:
    """The text of one stage's batch script.

    Args:
        run: The run's directory, absolute, on the shared file system.
        python: The interpreter that the job uses, absolute.

    Raises:
        ConfigError: a value that Slurm would misread, such as a path with a line break.
    """
    environment = load_environment(config.backend)
    wanted = nodes + config.recipe.slurm.spare_nodes
    if stage == "precompile":
        wanted = environment.precompile_nodes(config, nodes)
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH {directive}" for directive in _directives(stage, config, run, wanted)]
    lines += ["", "# What the body below reads.", *_exports(config, run, python)]
    return (
        "\n".join(lines)
        + "\n\n"
        + (shipped_dir() / "sbatch" / f"{stage}.sbatch").read_text("utf-8")
    )


def _directives(stage: Stage, config: RunConfig, run: RunDir, nodes: int) -> list[str]:
    slurm, cluster = config.recipe.slurm, config.cluster
    options: list[tuple[str, str | None]] = [
        ("job-name", f"{run.name}-{stage}"),
        ("nodes", str(nodes)),
        # One launcher a node, which starts the workers.
        ("ntasks-per-node", "1"),
        ("time", slurm.time if stage == "train" else slurm.precompile_time),
        ("partition", slurm.partition or cluster.partition),
        ("account", slurm.account),
        ("qos", slurm.qos),
        ("reservation", slurm.reservation),
        ("exclude", slurm.exclude),
        # Slurm expands %-patterns in file names; ours holds none.
        ("output", str(run.stage_log(stage)).replace("%", "%%")),
        # The default may truncate the log of the attempt before a requeue.
        ("open-mode", "append"),
    ]
    if stage == "train":
        # B: only to the batch shell, which does not get the signal without it.
        options.append(("signal", f"B:USR1@{slurm.signal_lead_s}"))
    directives = [
        f"--{name}={_quoted(name, value)}" for name, value in options if value is not None
    ]
    directives += ["--exclusive"] if cluster.exclusive else []
    # Slurm itself requeues too, when a node of the job dies.
    directives += ["--requeue" if slurm.restart in ("auto", "requeue") else "--no-requeue"]
    # Else a train job whose precompile job failed is pending for ever.
    directives += ["--kill-on-invalid-dep=yes"] if stage == "train" else []
    return directives + list(cluster.directives)


def _quoted(name: str, value: str) -> str:
    """A directive's value as sbatch reads it: plain, or in double quotes."""
    if _PLAIN.fullmatch(value):
        return value
    if re.search(r'[\n\r"\\$`]', value):
        raise ConfigError(
            "a value that sbatch would misread",
            [f"--{name}: {value!r} holds a quote, backslash, $ or line break; choose another"],
        )
    return f'"{value}"'


def _exports(config: RunConfig, run: RunDir, python: str) -> list[str]:
    cache = node_local_cache(config, run)
    port = config.cluster.master_port
    lines = [
        f"export SLURMLLM_RUN={shlex.quote(str(run.path))}",
        f"export SLURMLLM_PYTHON={shlex.quote(python)}",
        f"export SLURMLLM_CACHE={shlex.quote(cache)}",
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
