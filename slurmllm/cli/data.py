"""`slurmllm data`: make the corpus that training reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def input_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say how input files become documents."""
    options = [
        click.argument("inputs", metavar="INPUT...", nargs=-1, required=True),
        click.option(
            "--format",
            "format_",
            type=click.Choice(["auto", "text", "jsonl", "parquet"]),
            default="auto",
            show_default=True,
            help="How the files are coded; auto reads it off their endings.",
        ),
        click.option(
            "--text-by",
            type=click.Choice(["paragraph", "document", "line"]),
            default="paragraph",
            show_default=True,
            help="What a document of a text file is: the lines between blank ones, the whole "
            "file, or a line.",
        ),
        click.option(
            "--text-key",
            default="text",
            show_default=True,
            help="Field (JSON lines) or column (Parquet) that holds the text.",
        ),
        click.option(
            "--skip-bad",
            is_flag=True,
            help="Leave out and count what cannot be read, instead of stopping there.",
        ),
        click.option("--overwrite", is_flag=True, help="Replace --out if it is there."),
        click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.group()
def data() -> None:
    """Make the corpus that training reads."""


@data.command()
@input_options
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="The corpus, an Arrow file; its manifest is written beside it.",
)
def build(
    inputs: tuple[str, ...],
    format_: Any,
    text_by: Any,
    text_key: str,
    skip_bad: bool,
    overwrite: bool,
    as_json: bool,
    out: Path,
) -> None:
    """Build an Arrow corpus from text, JSON lines or Parquet.

    INPUT is a file, a folder (read to any depth) or a quoted glob. Text (.txt .py .rst .md) and
    JSON lines (.jsonl .json .ndjson) may be compressed (.gz .zst).
    """
    import time

    from slurmllm.data.build.corpus import build_corpus, refuse_existing
    from slurmllm.data.build.inputs import find_inputs
    from slurmllm.data.build.manifest import manifest_path
    from slurmllm.data.build.readers import ReadOptions
    from slurmllm.progress import input_progress

    begun = time.monotonic()
    refuse_existing(out, overwrite)
    manifest_file = manifest_path(out)
    files = find_inputs(inputs, format_, leave_out=[out, manifest_file])
    options = ReadOptions(text_by=text_by, text_key=text_key, skip_bad=skip_bad)
    with input_progress("building", sum(file.size_bytes for file in files)) as on_progress:
        manifest = build_corpus(
            files, out, options, format=format_, overwrite=overwrite, on_progress=on_progress
        )
    report_bad(manifest.bad, manifest.bad_examples)
    if as_json:
        summary = manifest.model_dump(exclude={"inputs"})
        where = {"corpus": str(out), "manifest": str(manifest_file)}
        click.echo(json.dumps({**where, **summary, "inputs": len(manifest.inputs)}))
        return
    click.echo(
        f"{out}: {manifest.documents:,} documents, {manifest.text_bytes / 1e6:,.1f} MB of text "
        f"from {len(files):,} file{'s' if len(files) != 1 else ''} "
        f"in {time.monotonic() - begun:.1f} s"
    )
    click.echo(f"{manifest_file}: manifest")


def report_bad(count: int, examples: tuple[str, ...]) -> None:
    """Say on stderr what was left out."""
    if count:
        plural = "s; the first are" if count > 1 else ""
        click.echo(f"left out {count:,} unreadable document{plural}:", err=True)
        for example in examples[:5]:
            click.echo(f"  {example}", err=True)
