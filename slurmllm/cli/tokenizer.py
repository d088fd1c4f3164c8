"""`slurmllm tokenizer`: train the tokenizer of a corpus."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from slurmllm.cli.data import input_options, named_inputs, report_bad


@click.group()
def tokenizer() -> None:
    """Train a tokenizer."""


@tokenizer.command()
@input_options
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="The tokenizer.json to write."
)
@click.option(
    "--vocab-size",
    type=int,
    required=True,
    help="Entries, the 256 bytes and the end-of-document token included.",
)
def train(
    inputs: tuple[str, ...],
    files_from: str | None,
    format_: Any,
    text_by: Any,
    text_key: str,
    skip_bad: bool,
    overwrite: bool,
    as_json: bool,
    out: Path,
    vocab_size: int,
) -> None:
    """Train a byte-level BPE tokenizer on a corpus, or on files that `slurmllm data build` reads.

    INPUT is a file, a folder (read to any depth) or a quoted glob.
    """
    from slurmllm.corpus.cleaning import DocumentStream
    from slurmllm.corpus.options import InputErrors, ReadOptions
    from slurmllm.corpus.work_folder import refuse_existing
    from slurmllm.data.tokenizer import END_OF_DOCUMENT, train_tokenizer, vocab_size_of
    from slurmllm.errors import DataError
    from slurmllm.progress import input_progress
    from slurmllm.rundir import write_atomic

    begun = time.monotonic()
    refuse_existing(out, overwrite)
    files = named_inputs(inputs, files_from, format_, [out])
    options = ReadOptions(text_by=text_by, text_key=text_key, skip_bad=skip_bad)
    errors = InputErrors(skip_bad)
    with input_progress("reading", sum(file.size_bytes for file in files)) as on_progress:
        texts = DocumentStream(files, options, errors, on_progress)
        content = train_tokenizer(texts, vocab_size)
    if not texts.documents:
        raise DataError(
            f"no text in {len(files)} input files, so nothing to train on; the first is "
            f"{files[0].name}: see --format and --text-key"
        )
    write_atomic(out, content)
    report_bad(errors.count, tuple(errors.examples))
    entries = vocab_size_of(content)
    if entries < vocab_size:
        click.echo(
            f"the text yields {entries} entries, fewer than --vocab-size {vocab_size}", err=True
        )
    if as_json:
        summary = {
            "tokenizer": str(out),
            "vocab_size": entries,
            "end_of_document": END_OF_DOCUMENT,
            "documents": texts.documents,
            "inputs": len(files),
            "bad": errors.count,
        }
        click.echo(json.dumps(summary))
        return
    click.echo(
        f"{out}: {entries:,} entries, from {texts.documents:,} documents of {len(files):,} "
        f"file{'s' if len(files) != 1 else ''} in {time.monotonic() - begun:.1f} s"
    )
