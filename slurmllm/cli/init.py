"""`slurmllm init`: write a profile of the cluster at hand, or a recipe of one's own."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmllm.cli import options
from slurmllm.core.display.tables import print_table
from slurmllm.core.errors import UserError
from slurmllm.core.format import Json
from slurmllm.core.run.rundir import write_atomic

if TYPE_CHECKING:
    from slurmllm.core.slurm.site import Partition
    from slurmllm.launch.init.draft import Draft, Survey

Confirm = Callable[[str, bool], bool]  # question, the answer without one → whether the user agrees


@click.command()
@click.option("-p", "--partition", help="The partition of the jobs.  [default: ask]")
@click.option(
    "--out",
    metavar="FILE.yaml",
    help="The profile to write.  [default: CLUSTER-PARTITION.yaml in ~/.config/slurmllm]",
)
@click.option("--recipe", metavar="FILE.yaml", help="Write a recipe that extends that of --from.")
@click.option(
    "--from",
    "base",
    metavar="RECIPE",
    shell_complete=options.complete_recipe,
    help="Recipe to extend: a name of `slurmllm recipes`, or a .yaml file.",
)
@options.flag("--yes", "Ask nothing: take the default answers.")
@options.flag("--force", "Replace an existing file and default cluster.")
@options.flag("--dry-run", "Only print the profile.")
@options.as_json
def init(
    partition: str | None,
    out: str | None,
    recipe: str | None,
    base: str | None,
    yes: bool,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write a profile of this Slurm cluster, or a recipe.

    The profile becomes the default --cluster. Asks Slurm (partitions, nodes, limits, accounts),
    looks at this machine (modules, disks, interpreter, container runtimes); submits no job. The
    profile has the hardware figures of the nearest shipped one; `slurmllm calibrate` measures them.

    --json asks nothing, as --yes.

    \b
    slurmllm init
    slurmllm init --recipe mine.yaml --from llama3_8b

    Exit codes: 0 done; 2 invalid options, or a file exists; 3 no Slurm here, or no answer.
    """
    from slurmllm.core.config.profiles import user_configuration
    from slurmllm.core.slurm.client import SlurmClient
    from slurmllm.launch.init.draft import draft_profile, survey

    if recipe is not None or base is not None:
        if partition or out or dry_run or as_json:
            raise UserError("--recipe goes with --from and --force only; it asks nothing of Slurm")
        _write_recipe(recipe, base, force)
        return
    options.check_folder("--out", out)
    if out is not None and Path(out).suffix not in (".yaml", ".yml"):
        raise UserError(f"--out {out}: a profile's name ends in .yaml; choose such a name")
    site = survey(SlurmClient())
    asks = not (yes or as_json or dry_run)
    if not as_json:
        _print_survey(site)
    chosen = _choose(site, partition, asks)
    path = user_configuration().with_name(f"{site.name}-{chosen.name}.yaml")
    if out is not None:
        path = Path(out).absolute()
    draft = draft_profile(site, chosen)

    def confirm(question: str, default: bool) -> bool:
        if force or not asks:
            return force or default
        return bool(_ask(lambda: click.confirm(question, default, err=True)))

    if not as_json:
        click.echo(f"{draft.text}\nfigures     {draft.figures.confidence}: {draft.figures.reason}")
    written = not dry_run and _write(path, draft.text, confirm, asks)
    is_default = written and _make_default(path, confirm)
    if as_json:
        options.echo_json(_as_json(site, chosen, draft, path, written, is_default))
    elif written:
        _print_written(path, is_default, draft)


def _ask(prompt: Callable[[], Any]) -> Any:
    try:
        return prompt()
    except click.Abort:
        if sys.stdin.isatty():
            raise
        raise UserError(
            "no terminal to ask on; add --yes, and --partition NAME for another partition"
        ) from None


def _choose(site: Survey, name: str | None, asks: bool) -> Partition:
    """Return the partition of that name, or the one that the user chooses, or the suggested one."""
    names = [*site.partitions]
    if name not in (None, *names):
        raise UserError(
            f"--partition {name}: unknown, empty or closed to you; choose of {', '.join(names)}"
        )
    default = site.suggested.name
    if name is None and asks and len(names) > 1:
        kind = click.Choice(names)
        name = _ask(lambda: click.prompt("partition", default, False, type=kind, err=True))
    return site.partitions[name or default]


def _write(path: Path, profile: str, confirm: Confirm, asks: bool) -> bool:
    """Write the profile if the user agrees; return whether it was written."""
    exists = path.exists()
    if not confirm(f"{'replace' if exists else 'write'} {path}?", not exists):
        if asks:
            return False
        raise UserError(f"{path} exists; --force replaces it, --out FILE.yaml writes another")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, profile)
    return True


def _make_default(path: Path, confirm: Confirm) -> bool:
    """Name a profile in config.yaml, unless the user wants the other one that it names."""
    from slurmllm.core.config.profiles import default_cluster, set_default_cluster

    current = default_cluster()
    is_default = current in (None, str(path)) or confirm(
        f"the default cluster is {current}; make it this one?", False
    )
    if is_default:
        set_default_cluster(path)
    return is_default


def _print_survey(site: Survey) -> None:
    version = site.site.settings["SLURM_VERSION"]
    click.echo(f"cluster {site.name}, Slurm {version}, seen from {site.machine.host}\n")
    rows = [
        (
            partition.name
            + (", the default" if partition.is_default else "")
            + ("" if partition.is_up else ", down"),
            partition.time_limit,
            str(len(kind.nodes)),
            str(kind.cpus),
            f"{kind.memory_mb / 1024:.0f}",
            f"{kind.gpus} {kind.gpu_type}" if kind.gpus else "-",
            ",".join(kind.features) or "-",
        )
        for partition in site.partitions.values()
        for kind in partition.kinds
    ]
    headings = ("partition", "time limit", "nodes", "CPUs", "GiB", "GPUs", "features")
    print_table(headings, rows, fold="features")
    click.echo()


def _print_written(path: Path, is_default: bool, draft: Draft) -> None:
    from slurmllm.core.config.profiles import user_configuration

    click.echo(f"profile     {path}")
    if is_default:
        click.echo(f"default     by {user_configuration()}, before a recipe's default_cluster")
    if name := os.environ.get("SLURMLLM_CLUSTER"):
        click.echo(f"note        $SLURMLLM_CLUSTER={name} goes before it; `unset` it")
    option = "" if is_default else f" --cluster {path}"
    click.echo(f"next        slurmllm doctor{option}")
    if draft.figures.confidence != "exact":
        click.echo(
            f"            slurmllm calibrate{option} --nodes {min(2, len(draft.kind.nodes))} --out "
            "measured.yaml   measure the figures"
        )


def _as_json(
    site: Survey, chosen: Partition, draft: Draft, path: Path, written: bool, is_default: bool
) -> Json:
    partitions = [
        {
            "name": partition.name,
            "default": partition.is_default,
            "up": partition.is_up,
            "fields": partition.fields,
            "kinds": [asdict(kind) for kind in partition.kinds],
            "time_limit": partition.time_limit,
        }
        for partition in site.partitions.values()
    ]
    settings = site.site.settings
    return {
        "cluster": site.name,
        "slurm_version": settings.get("SLURM_VERSION"),
        "requeue": settings.get("JobRequeue") == "1",
        "partitions": partitions,
        "associations": [asdict(row) for row in site.site.associations],
        "machine": asdict(site.machine),
        "partition": chosen.name,
        "figures": {
            name: getattr(draft.figures, name) for name in ("profile", "confidence", "reason")
        },
        "profile": {"file": str(path), "text": draft.text, "written": written},
        "default": is_default,
    }


def _write_recipe(recipe: str | None, base: str | None, force: bool) -> None:
    """Write the file of --recipe, and say what to do with it."""
    from slurmllm.core.config.schema import write_recipe

    if recipe is None or base is None:
        raise UserError("--recipe FILE.yaml and --from RECIPE belong together; give both")
    options.check_folder("--recipe", recipe)
    worker = write_recipe(Path(recipe), base, force=force).recipe.worker
    verb = "plan" if worker.has_model else "submit --dry-run"
    click.echo(f"recipe  {recipe}: extends {base}")
    click.echo(f"next    slurmllm {verb} {shlex.quote(recipe)} --nodes N")
