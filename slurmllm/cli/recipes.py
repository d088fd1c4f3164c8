"""`slurmllm recipes [NAME]`: list recipes or cluster profiles, or show a configuration."""

from __future__ import annotations

import textwrap
from itertools import product
from typing import TYPE_CHECKING

import click

from slurmllm.cli import options
from slurmllm.core.display.tables import print_table
from slurmllm.core.errors import UserError
from slurmllm.core.format import Json, Texts, format_count

if TYPE_CHECKING:
    from slurmllm.core.config.resolve import RunConfig

_FIGURES = ("bf16_tflops", "memory_gib", "memory_gb_s", "node_link_gb_s", "network_gb_s")


@click.command()
@options.recipe_argument("name", required=False)
@options.flag("--explain", "Show where each value comes from.")
@options.flag("--trainers", "List the adapters of other projects' trainers.")
@options.flag("--clusters", "List the cluster profiles, for --cluster.")
@options.flag("--schema", "Print the JSON schema of recipes, or of profiles (--clusters).")
@options.cluster
@options.set_value
@options.as_json
def recipes(
    name: str | None,
    explain: bool,
    trainers: bool,
    clusters: bool,
    schema: bool,
    cluster: str | None,
    overrides: Texts,
    as_json: bool,
) -> None:
    """List recipes or cluster profiles, or show one resolved.

    NAME is a shipped recipe, an adapter (trainers/NAME) or a .yaml file. What is printed is a
    recipe; the profile of --cluster follows as comments. --explain adds each value's source: file
    and line, --set, or the built-in default. --explain, --set and --cluster need NAME. --clusters
    lists the shipped profiles, and the file that --cluster names.
    """
    if schema:
        from slurmllm.core.config.schema import file_schema

        if name is not None or explain or overrides or cluster:
            raise UserError("--schema prints a schema; leave out NAME, --explain, --set, --cluster")
        options.echo_json(file_schema("cluster" if clusters else "recipe"))
    elif clusters or trainers:
        if name is not None or explain or overrides or (clusters and trainers):
            option, kind = ("--clusters", "profiles") if clusters else ("--trainers", "adapters")
            raise UserError(f"{option} lists {kind}; leave out NAME, --explain, --set, --trainers")
        if cluster and trainers:
            raise UserError("--trainers lists adapters; leave out --cluster")
        _list_clusters(cluster, as_json) if clusters else _list_trainers(as_json)
    elif name is None:
        if explain or overrides or cluster:
            raise UserError("--explain, --set and --cluster need NAME, such as tiny_neox")
        _list(as_json)
    else:
        _show(name, explain, cluster, overrides, as_json)


def _list(as_json: bool) -> None:
    from slurmllm.core.config.profiles import available
    from slurmllm.core.config.resolve import recipes_dir, resolve
    from slurmllm.plan.parameters import parameters

    recipes = [resolve(name, "local").recipe for name in available(recipes_dir())]
    counts = {recipe.name: parameters(recipe.model) for recipe in recipes}
    recipes.sort(key=lambda r: (r.name.partition("_")[0], counts[r.name], r.name))
    fields = {"name", "description", "default_cluster"}
    rows = [{**r.model_dump(include=fields), "parameters": counts[r.name]} for r in recipes]
    columns: options.Columns = {
        "recipe": "name",
        "parameters": lambda row: format_count(row["parameters"]),
        "description": "description",
        "default cluster": "default_cluster",
    }
    options.print_rows(as_json, "recipes", rows, columns, "description")


def _list_trainers(as_json: bool) -> None:
    from slurmllm.core.config.profiles import TRAINERS, any_command, available
    from slurmllm.core.config.resolve import recipes_dir, resolve

    rows = []
    folder = recipes_dir().parent
    for adapter in available(folder / TRAINERS):
        name = f"{TRAINERS}/{adapter}"
        command = resolve(name, "local", any_command(name)).values()["command"]
        del command["run"]
        begin = (folder / f"{name}.yaml").read_text("utf-8").partition("\n")[0]
        rows.append({"name": name, "description": begin.removeprefix("# "), **command})
    fields = ("resume", "checkpoints", "progress", "description")
    columns = {"adapter": "name"} | {name: name for name in fields}
    options.print_rows(as_json, "trainers", rows, columns, "description")


def _list_clusters(more: str | None, as_json: bool) -> None:
    from slurmllm.core.config.profiles import available
    from slurmllm.core.config.resolve import clusters_dir, resolve

    names = available(clusters_dir())
    names += [more] if more is not None and more not in names else []
    rows = [_cluster_row(resolve("tiny_neox", name)) for name in names]
    if not as_json:
        for row in rows:
            notes = ["planning only"] if row["planning_only"] is not None else []
            notes += ["rough"] if row["rough"] else []
            notes += [f"{len(row['assumed'])} assumed"] if row["assumed"] else []
            row["notes"] = ", ".join(notes)
        for row, name in product(rows, (*_FIGURES, "usd_per_hour")):
            if row[name] is not None:
                row[name] = f"{round(row[name], 2):g}"
    columns = {
        "profile": "name",
        "device": "device",
        "a node": "devices_per_node",
        "GiB": "memory_gib",
        "TFLOP/s": "bf16_tflops",
        "node GB/s": "node_link_gb_s",
        "network GB/s": "network_gb_s",
        "$/h": "usd_per_hour",
        "backend": "backend",
        "notes": "notes",
    }
    options.print_rows(as_json, "clusters", rows, columns)


def _cluster_row(config: RunConfig) -> Json:
    """Return a profile for the list; figures are None without hardware figures."""
    from slurmllm.plan.prices import select_price

    cluster = config.cluster
    hardware = cluster.hardware
    price = select_price(config, None)
    fields = {"name", "description", "device", "instance_type", "devices_per_node"}
    return {
        **cluster.model_dump(mode="json", include=fields),
        **{name: getattr(hardware, name, None) for name in _FIGURES},
        "usd_per_hour": getattr(price, "usd", None),
        "price_date": getattr(price, "date", None),
        "backend": config.backend,
        "planning_only": cluster.planning_only,
        "rough": hardware is not None and hardware.rough,
        "assumed": list(getattr(hardware, "assumed", ())),
        "source": getattr(hardware, "source", None),
    }


def _show(name: str, explain: bool, cluster: str | None, overrides: Texts, as_json: bool) -> None:
    from slurmllm.core.config.profiles import any_command
    from slurmllm.core.config.resolve import recipes_dir, resolve

    config = resolve(name, cluster, [*any_command(name), *overrides])
    if any_command(name) and not (explain or cluster or overrides or as_json):
        click.echo((recipes_dir().parent / f"{name}.yaml").read_text("utf-8"), nl=False)
        return
    sources = {path: source for path, _, source in config.rows()}
    sources |= dict.fromkeys(config.open_settings(), "the planner, at submit")
    tree = _tree(config, None if as_json else "auto")
    if as_json:
        options.echo_json({**tree, "origin": sources} if explain else tree)
        return
    if not explain:
        from slurmllm.core.config.yaml_source import write_yaml

        if cluster is None and not any(override.startswith("parallel") for override in overrides):
            _restore_layouts(tree, config, name)
        profile = write_yaml({"cluster": tree.pop("cluster")})
        click.echo(write_yaml(tree), nl=False)
        if cluster is not None or any(override.startswith("cluster.") for override in overrides):
            click.echo(textwrap.indent(profile, "# "), nl=False)
        return
    from slurmllm.core.config.yaml_source import flatten

    rows = ((path, str(value), sources[path]) for path, value in flatten(tree).items())
    print_table(("field", "value", "source"), rows, fold="value")


def _restore_layouts(tree: Json, config: RunConfig, name: str) -> None:
    """Replace what a layout has set by the recipe's layouts, so that it is for any cluster."""
    from slurmllm.core.config.layers import value_at
    from slurmllm.core.config.profiles import find_yaml
    from slurmllm.core.config.recipe_file import LAYOUT, read_recipe
    from slurmllm.core.config.resolve import recipes_dir

    paths = [path for path, source in config.origins.items() if source.startswith(LAYOUT)]
    for path in paths:
        section, _, field = path.partition(".")
        if section in tree and section != "parallel":
            del tree[section][field]
    if any(path.startswith("parallel") for path in paths):
        del tree["parallel"]
    if paths:
        shipped = recipes_dir()
        file = find_yaml(name, shipped, "recipe", "slurmllm recipes")
        tree["layouts"] = value_at(read_recipe(file, shipped), "layouts", {})


def _tree(config: RunConfig, unchosen: str | None) -> Json:
    """Return the nested values, with `unchosen` for degrees that the planner is to choose.

    Settings of `train` that it is to choose are None: auto would be another micro batch.
    """
    tree = config.values()
    for path in config.open_settings():
        section, _, field = path.partition(".")
        tree[section][field] = unchosen if section == "parallel" else None
    return tree
