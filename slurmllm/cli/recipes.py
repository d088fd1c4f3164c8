"""`slurmllm recipes [NAME]`: list the recipes, or show a resolved configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from slurmllm.config.resolve import RunConfig


@click.command()
@click.argument("name", required=False, shell_complete=options.complete_recipe)
@click.option("--explain", is_flag=True, help="Show where each value comes from.")
@options.cluster
@options.set_value
@options.as_json
def recipes(
    name: str | None, explain: bool, cluster: str | None, overrides: tuple[str, ...], as_json: bool
) -> None:
    """List the recipes, or show the resolved configuration of NAME.

    NAME is a shipped recipe or a .yaml file. --explain adds each value's source: file and line,
    --set, or the built-in default. --explain, --set and --cluster need NAME.
    """
    if name is None:
        _list(as_json)
    else:
        _show(name, explain, cluster, overrides, as_json)


def _list(as_json: bool) -> None:
    from slurmllm.config.resolve import available, recipes_dir, resolve
    from slurmllm.plan.parameters import parameters

    recipes = (resolve(name).recipe for name in available(recipes_dir()))
    counted = ((recipe, parameters(recipe.model)) for recipe in recipes)
    found = sorted(counted, key=lambda row: (row[0].name.partition("_")[0], row[1], row[0].name))
    if as_json:
        fields = {"name", "description", "default_cluster"}
        rows = [
            {**recipe.model_dump(include=fields), "parameters": count} for recipe, count in found
        ]
        options.echo_json({"recipes": rows})
        return
    from slurmllm.tables import print_table

    table = (
        (recipe.name, _rounded(count), recipe.description, recipe.default_cluster)
        for recipe, count in found
    )
    headings = ("recipe", "parameters", "description", "default cluster")
    print_table(headings, table, fold="description")


def _rounded(count: int) -> str:
    """`6.86B`: a number of parameters with three digits."""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            return f"{count / unit:#.3g}".rstrip(".") + letter
    return str(count)


def _show(
    name: str, explain: bool, cluster: str | None, overrides: tuple[str, ...], as_json: bool
) -> None:
    from slurmllm.config.resolve import resolve

    config = resolve(name, cluster, overrides)
    sources = {path: source for path, _, source in config.rows()}
    sources |= dict.fromkeys(config.open_degrees(), "the planner, at submit")
    if as_json:
        tree = _tree(config, None)
        options.echo_json({**tree, "origin": sources} if explain else tree)
        return
    tree = _tree(config, "auto")
    if not explain:
        import yaml

        click.echo(yaml.safe_dump(tree, sort_keys=False), nl=False)
        return
    from slurmllm.config.yaml_source import flatten
    from slurmllm.tables import print_table

    rows = ((path, str(value), sources[path]) for path, value in flatten(tree).items())
    print_table(("field", "value", "source"), rows, fold="value")


def _tree(config: RunConfig, unchosen: str | None) -> dict[str, Any]:
    """The nested values, with `unchosen` for the degrees that the planner is still to choose."""
    tree = config.values()
    for path in config.open_degrees():
        section, _, field = path.partition(".")
        tree[section][field] = unchosen
    return tree
