"""Options that several verbs share."""

from __future__ import annotations

import click

runs_dir = click.option(
    "--runs-dir",
    metavar="DIR",
    help="Folder of all runs, on the shared file system.  [default: $SLURMLLM_RUNS, else ./runs]",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
set_value = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="PATH=VALUE",
    help="Override a value of recipe or cluster profile, such as optim.lr=1e-4; repeatable.",
)
precompile = click.option(
    "--precompile",
    type=click.Choice(["auto", "always"]),
    default="auto",
    show_default=True,
    help="auto: skip the precompile stage where this or an earlier run has compiled the graphs.",
)
cluster = click.option(
    "--cluster",
    metavar="PROFILE",
    help="Cluster profile, by name or .yaml file.  "
    "[default: $SLURMLLM_CLUSTER, else the recipe's default_cluster]",
)
