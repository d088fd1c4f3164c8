"""`slurmllm init`: write a recipe of one's own."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from slurmllm.cli import options


@click.command()
@click.option("--recipe", metavar="FILE.yaml", help="Write a recipe that extends that of --from.")
@click.option(
    "--from",
    "base",
    metavar="RECIPE",
    shell_complete=options.complete_recipe,
    help="Recipe to extend: a name of `slurmllm recipes`, or a .yaml file.",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
def init(recipe: str | None, base: str | None, force: bool) -> None:
    """Write a recipe of your own, with the fields that people change.

    \b
    slurmllm init --recipe mine.yaml --from llama3_8b
    """
    init_recipe(recipe, base, force)


def init_recipe(recipe: str | None, base: str | None, force: bool) -> None:
    """Write the file of --recipe, and say what to do with it."""
    from slurmllm.config.new_recipe import write_recipe
    from slurmllm.errors import UserError

    if recipe is None or base is None:
        raise UserError("--recipe FILE.yaml and --from RECIPE belong together; give both")
    options.check_folder("--recipe", recipe)
    write_recipe(Path(recipe), base, force=force)
    click.echo(f"recipe  {recipe}: extends {base}")
    click.echo(f"next    slurmllm plan {shlex.quote(recipe)} --nodes N")
