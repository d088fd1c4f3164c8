"""`slurmllm data` and `slurmllm tokenizer`: make and inspect the corpus that training reads."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from slurmllm.cli import commands, options
from slurmllm.cli.fetch import fetch
from slurmllm.cli.inspect import inspect
from slurmllm.core.errors import DataError
from slurmllm.core.format import Texts, format_plural
from slurmllm.core.run.rundir import write_atomic

if TYPE_CHECKING:
    from slurmllm.data.corpus.build import BuildResult
    from slurmllm.data.corpus.inputs import InputFile
    from slurmllm.data.corpus.options import ReadOptions, TokenizeOptions


# More processes read faster than a disk writes, and need memory.
_DEFAULT_WORKERS = 4
_DEFAULT_JOBS = 16


class Inputs(NamedTuple):
    """The input files of a command, and how they become documents."""

    names: Texts
    files_from: str | None
    format: Any
    text_by: Any
    text_key: str
    skip_bad: bool
    zstd_long: int
    split: str | None

    def find(self, exclude: list[Path]) -> list[InputFile]:
        """Find the files named by the arguments and --files-from; at least one is required."""
        from slurmllm.data.corpus.inputs import find_inputs, read_list

        if not self.names and self.files_from is None:
            raise click.UsageError("name an INPUT, or a list of them with --files-from")
        listed = [] if self.files_from is None else read_list(self.files_from)
        return find_inputs(
            [*self.names, *listed],
            self.format,
            split=self.split,
            exclude=exclude,
            on_note=options.note,
        )

    def read_options(self, **keys: Any) -> ReadOptions:
        """Return how they are read; `keys` are of fine-tuning data."""
        from slurmllm.data.corpus.options import ReadOptions

        return ReadOptions(
            self.text_by, self.text_key, skip_bad=self.skip_bad, zstd_long=self.zstd_long, **keys
        )


input_options = options.grouped(
    "inputs",
    Inputs,
    Inputs._fields,
    click.argument("names", metavar="[INPUT]...", nargs=-1),
    click.option(
        "--files-from", metavar="LIST", help="Also read the files that LIST names; - is stdin."
    ),
    options.choice(
        "--format",
        "auto text jsonl csv parquet arrow",
        "Format of the files; auto: by their suffixes.",
        default="auto",
    ),
    options.choice(
        "--text-by",
        "paragraph document line",
        "What a document is in a text file: the lines between blank lines (paragraph), the entire "
        "file (document), or each line (line).",
        default="paragraph",
    ),
    click.option("--text-key", default="text", help="Field or column of the text."),
    options.flag("--skip-bad", "Skip and count unreadable input instead of failing."),
    click.option(
        "--split",
        help="Split to read of a folder with several, by file names or README; all: every one.  "
        "[default: train]",
    ),
    click.option(
        "--zstd-long",
        type=click.IntRange(10, 31),
        default=27,
        help="Largest window of .zst files, log2 of bytes, as in `zstd --long`: 31 takes 2 GiB per "
        "process.",
    ),
)
overwrite = options.flag("--overwrite", "Replace --out if it exists.")


@click.group(cls=commands.Verbs)
def data() -> None:
    """Fetch, build and inspect the corpus that training reads."""


data.add_command(fetch)
data.add_command(inspect)


@data.command(
    cls=commands.GroupedCommand,
    common="format text-key overwrite prompt-key completion-key workers slurm out",
)
@input_options
@overwrite
@options.as_json
@options.grouped(
    "keys",
    dict,
    ("prompt_key", "completion_key"),
    click.option("--prompt-key", help="Field or column of the prompt, for fine-tuning data."),
    click.option("--completion-key", help="Field of the completion; requires --prompt-key."),
)
@options.flag("--dedup", "Skip documents with the same text as an earlier one.")
@click.option(
    "--tokenize",
    "tokenizer",
    metavar="TOKENIZER",
    type=options.FILE,
    help="Write token ids of this tokenizer.json for Megatron (<out>.bin and <out>.idx) instead of "
    "an Arrow file.",
)
@options.count(
    "--workers",
    metavar="N",
    help="Reader processes or, with --slurm, concurrent Slurm jobs.  "
    f"[default: one per CPU, at most {_DEFAULT_WORKERS} without --tokenize; {_DEFAULT_JOBS} with "
    "--slurm]",
)
@options.flag("--slurm", "Read the inputs in Slurm jobs.")
@options.job_options("partition account qos time")
@options.site
@click.option(
    "--out",
    required=True,
    type=options.FILE,
    help="The corpus, an Arrow file; its manifest is written next to it.",
)
def build(
    inputs: Inputs,
    overwrite: bool,
    as_json: bool,
    keys: dict[str, str | None],
    dedup: bool,
    tokenizer: Path | None,
    workers: int | None,
    slurm: bool,
    cluster: str | None,
    out: Path,
    **job: str | None,
) -> None:
    """Build an Arrow corpus from files of text.

    INPUT is a file (text, JSON lines, CSV, Parquet or Arrow), a folder of files (read recursively),
    a folder written by Hugging Face datasets, a quoted glob, or an address (hf://, s3://, gs://,
    https://). All files but Parquet may be compressed (.gz .zst .bz2 .xz). An interrupted build
    continues when the same command is run again.
    """
    from slurmllm.core.display.progress import stage_progress
    from slurmllm.core.slurm.arrays import slurm_options
    from slurmllm.data.corpus.build import build_corpus, manifest_path, output_paths, refuse_outputs
    from slurmllm.data.corpus.work_folder import WorkFolder

    begun = time.monotonic()
    if (keys["prompt_key"] is None) != (keys["completion_key"] is None):
        raise click.UsageError("--prompt-key and --completion-key go together")
    if tokenizer is not None and keys["prompt_key"] is not None:
        raise click.UsageError("--tokenize writes plain text; leave out --prompt-key")
    if not slurm:
        options.refuse_job_options(job)
    outputs = output_paths(out, tokenize=tokenizer is not None)
    # Before the inputs are listed, which takes minutes with a million files.
    refuse_outputs(outputs, overwrite)
    manifest_file = manifest_path(outputs[0])
    files = inputs.find([*outputs, manifest_file, WorkFolder.of(outputs[0]).path])
    # Tokenizing is limited by the CPUs, reading plain text by the disk.
    cpus = len(os.sched_getaffinity(0))
    default = _DEFAULT_JOBS if slurm else cpus if tokenizer else min(cpus, _DEFAULT_WORKERS)
    with stage_progress() as show:
        built = build_corpus(
            files,
            out,
            inputs.read_options(**keys),
            dedup=dedup,
            tokenize=_tokenize_options(tokenizer) if tokenizer else None,
            format=inputs.format,
            overwrite=overwrite,
            workers=workers or default,
            slurm=slurm_options(cluster, job) if slurm else None,
            on_progress=show,
            on_note=options.note,
        )
    report_bad(built.manifest.bad, built.manifest.bad_examples)
    _print(built, manifest_file, time.monotonic() - begun, as_json)


def _tokenize_options(tokenizer: Path) -> TokenizeOptions:
    from slurmllm.data.corpus.options import TokenDtype, TokenizeOptions
    from slurmllm.data.tokenizer import TokenEncoder

    encoder = TokenEncoder(tokenizer)
    dtype: TokenDtype = "uint16" if encoder.num_ids <= 1 << 16 else "int32"
    return TokenizeOptions(tokenizer, encoder.fingerprint, dtype)


def _print(built: BuildResult, manifest_file: Path, seconds: float, as_json: bool) -> None:
    manifest = built.manifest
    files = len(manifest.inputs)
    if as_json:
        result = {
            # Text has no index.
            **dict(zip(("corpus", "index"), map(str, built.outputs), strict=False)),
            "manifest": str(manifest_file),
            **manifest.model_dump(exclude={"inputs"}, exclude_none=True),
            "inputs": files,
            "seconds": round(seconds, 3),
            "peak_memory_bytes": built.peak_memory_bytes,
            "workers": built.workers,
            "shards": built.shards,
            "continued": built.continued,
        }
        options.echo_json(result, indent=None)
        return
    tokens = "" if manifest.tokens is None else f"{manifest.tokens:,} tokens, "
    click.echo(
        f"{' and '.join(map(str, built.outputs))}: {manifest.documents:,} documents, {tokens}"
        f"{manifest.text_bytes / 1e6:,.1f} MB of text "
        f"from {format_plural(files, 'file')} in {seconds:.1f} s, "
        f"with {built.peak_memory_bytes / 1e6:,.0f} MB of memory"
    )
    skipped = {"blank": manifest.empty, "duplicate": manifest.duplicates}
    if counts := ", ".join(f"{count:,} {kind}" for kind, count in skipped.items() if count):
        click.echo(f"skipped: {counts}")
    click.echo(f"{manifest_file}: manifest")


def report_bad(count: int, examples: Texts) -> None:
    """Print the number of unreadable documents and examples to stderr."""
    if count:
        first = "; the first are" if count > 1 else ""
        options.note(f"skipped {format_plural(count, 'unreadable document')}{first}:")
        for example in examples[:5]:
            options.note(f"  {example}")


@click.group()
def tokenizer() -> None:
    """Train a tokenizer."""


@tokenizer.command()
@input_options
@overwrite
@options.as_json
@click.option("--out", required=True, type=options.FILE, help="The tokenizer.json to write.")
@click.option(
    "--vocab-size",
    type=int,
    required=True,
    help="Entries, the 256 bytes and the end-of-document token included.",
)
def train(inputs: Inputs, overwrite: bool, as_json: bool, out: Path, vocab_size: int) -> None:
    """Train a byte-level BPE tokenizer on texts.

    The texts are a corpus, or files that `slurmllm data build` reads.

    INPUT is a file, a folder (read recursively) or a quoted glob.
    """
    from slurmllm.core.display.progress import input_progress
    from slurmllm.data.corpus.options import InputErrors
    from slurmllm.data.corpus.readers import DocumentStream
    from slurmllm.data.corpus.work_folder import refuse_existing
    from slurmllm.data.tokenizer import END_OF_DOCUMENT, TokenEncoder, train_tokenizer

    begun = time.monotonic()
    refuse_existing(out, overwrite)
    files = inputs.find([out])
    errors = InputErrors(inputs.skip_bad, len(files) == 1)
    with input_progress("reading", sum(file.size_bytes for file in files)) as on_progress:
        texts = DocumentStream(files, inputs.read_options(), errors, on_progress)
        content = train_tokenizer(texts, vocab_size)
    if not texts.documents:
        raise DataError(
            f"no text in {len(files)} input files, so nothing to train on; the first is "
            f"{files[0].name}: see --format and --text-key"
        )
    write_atomic(out, content)
    report_bad(errors.count, tuple(errors.examples))
    entries = TokenEncoder(out).num_ids
    if entries < vocab_size:
        options.note(f"the text yields {entries} entries, fewer than --vocab-size {vocab_size}")
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
        f"{out}: {entries:,} entries, from {texts.documents:,} documents of "
        f"{format_plural(len(files), 'file')} in {time.monotonic() - begun:.1f} s"
    )
