"""`slurmllm data fetch`: download the published data sets of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmllm.cli import options
from slurmllm.core.errors import ConfigError
from slurmllm.core.format import ABSENT, Json, Texts, format_plural

if TYPE_CHECKING:
    from slurmllm.core.config.resolve import RunConfig


@click.command()
@options.recipe_argument("names", metavar="[NAME]...", nargs=-1)
@click.option(
    "--to",
    metavar="DIR",
    type=options.FILE,
    help="Folder of data sets; each has a folder of its own in it.  "
    "[default: cluster.data_folder, else .data in the folder of the runs]",
)
@options.count("--parts", metavar="N", help="Only the first N files, for a trial.")
@options.flag("--list list_", "List the published data sets.")
@options.cluster
@options.runs_dir
@options.as_json
def fetch(
    names: Texts,
    to: Path | None,
    parts: int | None,
    list_: bool,
    cluster: str | None,
    runs_dir: Path,
    as_json: bool,
) -> None:
    """Download published data sets: NAME is one of --list, a recipe, or a .yaml file of either.

    An interrupted download continues when the same command is run again. Files are verified, and a
    corpus of texts is built. `submit` finds what is in the default folder.
    """
    from slurmllm.core.config.data_sources import data_dir
    from slurmllm.core.config.profiles import available, did_you_mean
    from slurmllm.core.config.resolve import recipes_dir, resolve
    from slurmllm.core.config.yaml_source import read_yaml

    if list_:
        if names or to is not None or parts is not None:
            raise click.UsageError("--list lists all data sets; leave out NAME, --to and --parts")
        _list(as_json)
        return
    if not names:
        raise click.UsageError("name a data set of `slurmllm data fetch --list`, or a recipe")
    published = available(data_dir())
    fetched = []
    shipped = [*published, *available(recipes_dir())]
    for name in names:
        is_source = name in published
        if Path(name).suffix in (".yaml", ".yml"):
            is_source = "files" in read_yaml(Path(name))[0]  # which a recipe has not
        elif name not in shipped:
            raise ConfigError(
                f"{name!r} is neither a data set nor a recipe; {did_you_mean(name, shipped)}"
                "`slurmllm data fetch --list` lists the data sets"
            )
        config = resolve("tiny_neox" if is_source else name, cluster)
        sources = (name,) if is_source else config.recipe.data.sources
        if not sources:
            raise ConfigError(
                f"{name} names no published data set (data.source); choose one of "
                f"{', '.join(published)}"
            )
        fetched += fetch_sources(config, runs_dir, sources, to, parts, err=as_json)
    if as_json:
        options.echo_json({"fetched": fetched})
    elif to is not None:
        click.echo("next       put these lines under `data:` in ~/.config/slurmllm/config.yaml:")
        for data_set in fetched:
            values = ", ".join(
                f"{key}: {data_set[key]}" for key in ("corpus", "tokenizer") if data_set[key]
            )
            click.echo(f"             {data_set['name']}: {{{values}}}")


def fetch_sources(
    config: RunConfig,
    root: Path,
    names: Sequence[str],
    to: Path | None = None,
    parts: int | None = None,
    *,
    err: bool = True,
) -> list[Json]:
    """Fetch data sets; print and return what training reads of each."""
    from rich.filesize import decimal

    from slurmllm.core.config.data_sources import MANIFEST, read_source
    from slurmllm.core.display.progress import stage_progress
    from slurmllm.data.corpus.fetch import Fetch
    from slurmllm.launch.submit.inputs import data_folder, source_folder
    from slurmllm.launch.submit.run_folder import make_folders

    fetched = []
    for name in names:
        source = read_source(name)
        folder = source_folder(to or data_folder(config, root), name).absolute()
        make_folders(config.cluster, folder)
        mirrors = config.cluster.data_mirrors
        with stage_progress() as show:
            group = config.cluster.trusted_group
            fetch = Fetch(name, source, folder, mirrors, parts, group, show, options.note)
            files = fetch.run()
        total = decimal(sum(file.size_bytes for file in files))
        origins = [origin for file in files for origin in file.origins]
        compared = sum(origin.compared is not None for origin in origins)
        if fetch.is_earlier:
            outcome = (
                "there since the last fetch, not read again; to verify the files, remove "
                f"{folder / MANIFEST}"
            )
        elif compared == len(origins):
            outcome = "verified"
        else:
            extent = f"{compared} of {len(origins)} verified" if compared else "downloaded"
            outcome = f"{extent}; nothing is published to compare"
        click.echo(f"{name}: {format_plural(len(files), 'file')}, {total}, {outcome}", err=err)
        row: Json = {"name": name, "folder": str(folder)}
        for key, file in (("corpus", source.corpus), ("tokenizer", source.tokenizer)):
            row[key] = str(folder / file) if file else None
            if file:
                click.echo(f"{key:<10} {row[key]}", err=err)
        fetched.append({**row, "files": [file.model_dump(mode="json") for file in files]})
    return fetched


def _list(as_json: bool) -> None:
    from slurmllm.core.config.data_sources import data_dir, read_source
    from slurmllm.core.config.profiles import available
    from slurmllm.core.config.resolve import recipes_dir, resolve

    recipes = [resolve(name).recipe for name in available(recipes_dir())]
    rows = []
    for name in available(data_dir()):
        users = [recipe.name for recipe in recipes if name in recipe.data.sources]
        rows.append({"name": name, **read_source(name).model_dump(mode="json"), "recipes": users})
    columns: options.Columns = {
        "data set": "name",
        "GB": lambda row: ABSENT if row["gigabytes"] is None else f"{row['gigabytes']:g}",
        "description": "description",
        "recipes": lambda row: ", ".join(row["recipes"]) or ABSENT,
    }
    options.print_rows(as_json, "data_sets", rows, columns, "description")
