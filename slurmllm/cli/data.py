"""`slurmllm data` and `slurmllm tokenizer`: make and inspect the corpus that training reads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmllm.cli import options
from slurmllm.cli.fetch import fetch
from slurmllm.cli.inspect import inspect

if TYPE_CHECKING:
    from slurmllm.corpus.build import BuildResult
    from slurmllm.corpus.inputs import InputFile
    from slurmllm.corpus.options import TokenizeOptions


# More processes read faster than a disk writes, and need memory.
_DEFAULT_WORKERS = 4
_DEFAULT_JOBS = 16


_INPUT_OPTIONS = (
    click.argument("inputs", metavar="[INPUT]...", nargs=-1),
    click.option(
        "--files-from", metavar="LIST",
        help="Also read the files named in LIST, one per line; - is standard input.",
    ),
    click.option(
        "--format", "format_",
        type=click.Choice(["auto", "text", "jsonl", "csv", "parquet", "arrow"]), default="auto",
        show_default=True, help="Format of the files; auto: by their suffixes.",
    ),
    click.option(
        "--text-by", type=click.Choice(["paragraph", "document", "line"]), default="paragraph",
        show_default=True,
        help="What a document is in a text file: the lines between blank lines (paragraph), "
        "the entire file (document), or each line (line).",
    ),
    click.option(
        "--text-key", default="text", show_default=True,
        help="Field (JSON lines) or column (CSV, Parquet, Arrow) of the text.",
    ),
    click.option(
        "--skip-bad", is_flag=True, help="Skip and count unreadable input instead of failing."
    ),
    click.option("--overwrite", is_flag=True, help="Replace --out if it exists."),
    options.as_json,
)  # fmt: skip


def input_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options shared by the commands that read input files."""
    for option in reversed(_INPUT_OPTIONS):
        command = option(command)
    return command


def named_inputs(
    inputs: tuple[str, ...], files_from: str | None, format_: Any, exclude: list[Path]
) -> list[InputFile]:
    """Find the files named by the arguments and --files-from; at least one must be given."""
    from slurmllm.corpus.inputs import find_inputs, read_list

    if not inputs and files_from is None:
        raise click.UsageError("name an INPUT, or a list of them with --files-from")
    listed = [] if files_from is None else read_list(files_from)
    on_note = partial(click.echo, err=True)
    return find_inputs([*inputs, *listed], format_, exclude=exclude, on_note=on_note)


@click.group()
def data() -> None:
    """Fetch, build and inspect the corpus that training reads."""


data.add_command(fetch)
data.add_command(inspect)


@data.command()
@input_options
@click.option("--prompt-key", help="Field or column of the prompt, for fine-tuning data.")
@click.option("--completion-key", help="Field or column of the completion; requires --prompt-key.")
@click.option(
    "--messages-key",
    help="Field or column of the messages of a conversation, for fine-tuning data.",
)
@click.option(
    "--normalize", type=click.Choice(["none", "nfc", "nfd", "nfkc", "nfkd"]), default="none",
    show_default=True,
    help="Unicode normalization form.",
)  # fmt: skip
@click.option(
    "--min-chars", type=click.IntRange(min=0), default=0, metavar="N",
    help="Skip documents of fewer than N characters.",
)  # fmt: skip
@click.option("--dedup", is_flag=True, help="Skip documents with the same text as an earlier one.")
@click.option(
    "--tokenize", "tokenizer", metavar="TOKENIZER", type=click.Path(path_type=Path),
    help="Write token ids of this tokenizer.json for Megatron (<out>.bin and <out>.idx) instead of "
    "an Arrow file.",
)  # fmt: skip
@click.option(
    "--dtype", type=click.Choice(["uint16", "int32"]),
    help="Type of the token ids.  [default: uint16 if all of the tokenizer's ids fit, else int32]",
)  # fmt: skip
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N",
    help="Reader processes or, with --slurm, concurrent Slurm jobs.  "
    f"[default: one per CPU, at most {_DEFAULT_WORKERS} without --tokenize; {_DEFAULT_JOBS} with "
    "--slurm]",
)  # fmt: skip
@click.option("--slurm", is_flag=True, help="Read the inputs in Slurm jobs.")
@options.job_options("partition account qos time")
@options.site
@click.option(
    "--out", required=True, type=click.Path(path_type=Path),
    help="The corpus, an Arrow file; its manifest is written next to it.",
)  # fmt: skip
def build(
    inputs: tuple[str, ...], files_from: str | None, format_: Any, text_by: Any, text_key: str,
    skip_bad: bool, overwrite: bool, as_json: bool, prompt_key: str | None,
    completion_key: str | None, messages_key: str | None, normalize: Any, min_chars: int,
    dedup: bool, tokenizer: Path | None, dtype: Any, workers: int | None, slurm: bool,
    cluster: str | None, out: Path,
    **slurm_options: str | None,  # --partition, --account, --qos, --time
) -> None:  # fmt: skip
    """Build an Arrow corpus from files of text.

    INPUT is a file (text, JSON lines, CSV, Parquet or Arrow), a folder of files (read recursively),
    a folder written by Hugging Face datasets, or a quoted glob. All files but Parquet may be
    compressed (.gz .zst .bz2 .xz). An interrupted build continues when the same command is run
    again.
    """
    from slurmllm.corpus.build import (
        build_corpus,
        manifest_path,
        output_paths,
        renaming_interrupted,
    )
    from slurmllm.corpus.join import BuildCallbacks
    from slurmllm.corpus.options import CleanOptions, ReadOptions
    from slurmllm.corpus.work_folder import WorkFolder, refuse_existing
    from slurmllm.display.progress import stage_progress

    begun = time.monotonic()
    if (prompt_key is None) != (completion_key is None):
        raise click.UsageError("--prompt-key and --completion-key go together")
    if tokenizer is None and dtype is not None:
        raise click.UsageError("--dtype is the type of token ids; add --tokenize")
    if tokenizer is not None and prompt_key is not None:
        raise click.UsageError("--tokenize writes plain text; leave out --prompt-key")
    if messages_key is not None:
        chosen = {
            "--prompt-key": prompt_key is not None,
            "--tokenize": tokenizer is not None,
            "--normalize": normalize != "none",
            "--min-chars": min_chars > 0,
        }
        if other := next((name for name, is_set in chosen.items() if is_set), None):
            raise click.UsageError(f"{other} does not apply to conversations; leave it out")
    for_slurm = {name: value for name, value in slurm_options.items() if value is not None}
    if for_slurm and not slurm:
        raise click.UsageError(f"--{next(iter(for_slurm))} applies to Slurm jobs; add --slurm")
    outputs = output_paths(out, tokenize=tokenizer is not None)
    # Before the inputs are listed, which takes minutes with a million files.
    for path in outputs:
        refuse_existing(path, overwrite or renaming_interrupted(outputs[0]))
    manifest_file = manifest_path(outputs[0])
    own = [*outputs, manifest_file, WorkFolder.of(outputs[0]).path]
    files = named_inputs(inputs, files_from, format_, own)
    tokenize = None if tokenizer is None else _tokenize_options(tokenizer, dtype)
    if workers is None:
        cpus = len(os.sched_getaffinity(0))
        # Tokenizing is limited by the CPUs, reading plain text by the disk.
        workers = cpus if tokenizer else min(cpus, _DEFAULT_WORKERS)
        workers = _DEFAULT_JOBS if slurm else workers
    total = sum(file.size_bytes for file in files)
    with stage_progress() as show:
        built = build_corpus(
            files,
            out,
            ReadOptions(text_by, text_key, prompt_key, completion_key, skip_bad, messages_key),
            clean=CleanOptions(normalize, min_chars, dedup),
            tokenize=tokenize,
            format=format_,
            overwrite=overwrite,
            workers=workers,
            slurm=options.slurm_options(cluster, for_slurm) if slurm else None,
            callbacks=BuildCallbacks(
                on_read=lambda done: show("reading", done, total),
                on_join=lambda done, of: show("writing", done, of),
                on_note=partial(click.echo, err=True),
            ),
        )
    seconds = time.monotonic() - begun
    report_bad(built.manifest.bad, built.manifest.bad_examples)
    if as_json:
        corpus, *others = map(str, built.outputs)
        result = {
            "corpus": corpus,
            **({"index": others[0]} if others else {}),
            "manifest": str(manifest_file),
            **built.manifest.model_dump(exclude={"inputs"}, exclude_none=True),
            "inputs": len(built.manifest.inputs),
            "seconds": round(seconds, 3),
            "peak_memory_bytes": built.peak_memory_bytes,
            "workers": built.workers,
            "shards": built.shards,
            "continued": built.continued,
        }
        options.echo_json(result, indent=None)
    else:
        _print_build(built, manifest_file, seconds)


def _tokenize_options(tokenizer: Path, dtype: Any) -> TokenizeOptions:
    from slurmllm.corpus.options import TokenDtype, TokenizeOptions
    from slurmllm.data.tokenizer import TokenEncoder
    from slurmllm.errors import DataError

    encoder = TokenEncoder(tokenizer)
    fitting: TokenDtype = "uint16" if encoder.num_ids <= 1 << 16 else "int32"
    if dtype == "uint16" != fitting:
        raise DataError(
            f"tokenizer {tokenizer} has ids up to {encoder.num_ids - 1}, and uint16 holds "
            f"{(1 << 16) - 1} at most; leave out --dtype, or choose int32"
        )
    return TokenizeOptions(tokenizer, encoder.fingerprint, dtype or fitting)


def _print_build(built: BuildResult, manifest_file: Path, seconds: float) -> None:
    manifest = built.manifest
    files = len(manifest.inputs)
    tokens = "" if manifest.tokens is None else f"{manifest.tokens:,} tokens, "
    click.echo(
        f"{' and '.join(map(str, built.outputs))}: {manifest.documents:,} documents, {tokens}"
        f"{manifest.text_bytes / 1e6:,.1f} MB of text "
        f"from {files:,} file{'s' if files != 1 else ''} in {seconds:.1f} s, "
        f"with {built.peak_memory_bytes / 1e6:,.0f} MB of memory"
    )
    skipped = {"blank": manifest.empty, "short": manifest.short, "duplicate": manifest.duplicates}
    if any(skipped.values()):
        counts = ", ".join(f"{count:,} {kind}" for kind, count in skipped.items() if count)
        click.echo(f"skipped: {counts}")
    click.echo(f"{manifest_file}: manifest")


def report_bad(count: int, examples: tuple[str, ...]) -> None:
    """Print the number of unreadable documents and examples to stderr."""
    if count:
        plural = "s; the first are" if count > 1 else ""
        click.echo(f"skipped {count:,} unreadable document{plural}:", err=True)
        for example in examples[:5]:
            click.echo(f"  {example}", err=True)


@click.group()
def tokenizer() -> None:
    """Train a tokenizer."""


@tokenizer.command()
@input_options
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="The tokenizer.json to write."
)
@click.option(
    "--vocab-size", type=int, required=True,
    help="Entries, the 256 bytes and the end-of-document token included.",
)  # fmt: skip
def train(
    inputs: tuple[str, ...], files_from: str | None, format_: Any, text_by: Any, text_key: str,
    skip_bad: bool, overwrite: bool, as_json: bool, out: Path, vocab_size: int,
) -> None:  # fmt: skip
    """Train a byte-level BPE tokenizer on texts.

    The texts are a corpus, or files that `slurmllm data build` reads.

    INPUT is a file, a folder (read recursively) or a quoted glob.
    """
    from slurmllm.corpus.cleaning import DocumentStream
    from slurmllm.corpus.options import InputErrors, ReadOptions
    from slurmllm.corpus.work_folder import refuse_existing
    from slurmllm.data.tokenizer import END_OF_DOCUMENT, train_tokenizer, vocab_size_of
    from slurmllm.display.progress import input_progress
    from slurmllm.errors import DataError
    from slurmllm.run.rundir import write_atomic

    begun = time.monotonic()
    refuse_existing(out, overwrite)
    files = named_inputs(inputs, files_from, format_, [out])
    reading = ReadOptions(text_by=text_by, text_key=text_key, skip_bad=skip_bad)
    errors = InputErrors(skip_bad)
    with input_progress("reading", sum(file.size_bytes for file in files)) as on_progress:
        texts = DocumentStream(files, reading, errors, on_progress)
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
        options.echo_json(summary, indent=None)
        return
    click.echo(
        f"{out}: {entries:,} entries, from {texts.documents:,} documents of {len(files):,} "
        f"file{'s' if len(files) != 1 else ''} in {time.monotonic() - begun:.1f} s"
    )
