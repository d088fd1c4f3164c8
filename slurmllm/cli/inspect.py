"""`slurmllm data inspect`: documents, tokens and lengths of a corpus, and epochs of a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmllm.cli import options
from slurmllm.core.display.tables import print_line, print_table
from slurmllm.core.errors import UserError
from slurmllm.core.format import Texts

if TYPE_CHECKING:
    from slurmllm.core.config.recipe import Recipe
    from slurmllm.data.inspection import CorpusReport, PackedSequence, RecipeEpochs
    from slurmllm.data.spec import StreamSpec

# Width of the longest bar of the histogram, in characters.
_BAR = 40
# Characters of a sequence on a terminal; --json prints all of it.
_SHOWN_CHARS = 400


@click.command("inspect")
@click.argument("corpus", required=False)
@click.option(
    "--tokenizer", metavar="FILE", help="tokenizer.json for text.  [default: that of --recipe]"
)
@click.option("--recipe", metavar="NAME", help="Show how many epochs this recipe trains.")
@options.set_value
@options.flag("--exact", "Count all tokens instead of sampling a large corpus.")
@click.option(
    "--sequences", type=click.IntRange(0), default=2, help="Packed sequences to show decoded."
)
@options.runs_dir
@options.as_json
def inspect(
    corpus: str | None,
    tokenizer: str | None,
    recipe: str | None,
    overrides: Texts,
    exact: bool,
    sequences: int,
    runs_dir: Path,
    as_json: bool,
) -> None:
    """Count the documents and tokens of a corpus.

    Also shows the lengths of the documents and the first packed sequences.

    CORPUS is written as in data.corpus; without it, the corpus of --recipe is read. The token count
    of a large corpus is estimated from a sample of its documents.
    """
    from slurmllm.core.display.progress import input_progress
    from slurmllm.data.inspection import count_epochs, first_sequences, inspect_corpus
    from slurmllm.data.sources import open_all
    from slurmllm.data.spec import StreamSpec

    trained = None
    if recipe is not None:
        trained = _trained_recipe(recipe, corpus, tokenizer, overrides, runs_dir)
        spec = StreamSpec.of(trained)
    elif corpus is None:
        raise UserError("nothing to inspect: name a corpus, or --recipe NAME for the recipe's")
    elif overrides:
        raise UserError("--set changes a recipe: add --recipe NAME")
    else:
        spec = _corpus_stream(corpus, tokenizer, runs_dir, max(sequences, 1))
    sources, encoder = open_all(spec)
    total_weight = sum(weight for _, weight in spec.corpora)
    reports = []
    epochs = []
    for source, (_, weight) in zip(sources, spec.corpora, strict=True):
        with input_progress("counting", source.total_size) as on_progress:
            report = inspect_corpus(source, exact=exact, on_progress=on_progress)
        reports.append(report)
        if trained is not None:
            share = weight / total_weight
            epochs.append(count_epochs(report, spec, trained.name, trained.train.steps, share))
    packed = first_sequences(spec, encoder, sequences) if sequences and encoder else []
    if as_json:
        options.echo_json(_to_json(reports, epochs, packed))
        return
    for index, report in enumerate(reports):
        _print_report(report)
        if epochs:
            entry, suffix = epochs[index], " of this corpus" if len(reports) > 1 else ""
            click.echo(
                f"recipe   {entry.recipe}: {entry.steps:,} steps x {entry.tokens_per_step:,} "
                f"tokens{suffix} are {entry.epochs:,.3g} epochs; an epoch is "
                f"{entry.steps_per_epoch:,.1f} steps"
            )
    for sequence in packed:
        _print_sequence(sequence)
    if sequences and encoder is None:
        click.echo("sequences are token ids: --tokenizer FILE decodes them")


def _to_json(
    reports: list[CorpusReport], epochs: list[RecipeEpochs], sequences: list[PackedSequence]
) -> dict[str, object]:
    exact_counts = all(report.tokens_are == "exact" for report in reports)
    return {
        "documents": sum(report.documents for report in reports),
        "bytes": sum(report.size for report in reports if report.unit == "bytes") or None,
        "tokens": sum(report.tokens for report in reports),
        "tokens_are": "exact" if exact_counts else "estimated",
        "corpora": [report.model_dump() for report in reports],
        "recipe": [entry.model_dump() for entry in epochs] or None,
        "sequences": [sequence.model_dump() for sequence in sequences],
    }


def _corpus_stream(
    corpus: str, tokenizer: str | None, runs_dir: Path, sequences: int
) -> StreamSpec:
    """Return a stream of one corpus without a recipe: sequences of 256 tokens, seed 0."""
    from slurmllm.data.spec import StreamSpec
    from slurmllm.launch.submit.inputs import STDLIB

    path = None if tokenizer is None else Path(tokenizer)
    if STDLIB in (corpus, tokenizer):
        from slurmllm.data.corpus.builtin import ensure_stdlib

        built = ensure_stdlib(runs_dir / ".data")
        corpus = str(built[0]) if corpus == STDLIB else corpus
        path = built[1] if tokenizer in (STDLIB, None) else path
    return StreamSpec([(Path(corpus), 1.0)], path, 256, sequences, seed=0)


def _trained_recipe(
    recipe: str,
    corpus: str | None,
    tokenizer: str | None,
    overrides: Texts,
    runs_dir: Path,
) -> Recipe:
    """Return a recipe whose corpus and tokenizer are files, or those given."""
    from slurmllm.core.config.resolve import resolve
    from slurmllm.launch.submit.inputs import resolve_inputs

    for field, value in (("corpus", corpus), ("tokenizer", tokenizer)):
        if value is not None:
            overrides = (*overrides, f"data.{field}={json.dumps(value)}")
    config = resolve(recipe, overrides=overrides)
    config.recipe.require_training("--recipe", "name a corpus, or a recipe with one")
    return resolve_inputs(config, runs_dir, build=True).recipe


def _print_report(report: CorpusReport) -> None:
    size = f"{report.size:,} token ids"
    if report.unit == "bytes":
        size = f"{report.size / 1e6:,.1f} MB of text"
    print_line(
        f"{report.corpus}: {report.documents:,} {report.documents_are}, {size}, "
        f"{report.fingerprint}"
    )
    if report.tokens_are == "exact":
        ends = ", end-of-document tokens included" if report.documents_are == "documents" else ""
        print_line(f"tokens   {report.tokens:,} (exact){ends}")
    else:
        print_line(
            f"tokens   {report.tokens:,} ± {report.tokens_error:,} (95 %), estimated from "
            f"{report.documents_counted:,} documents; --exact counts them"
        )
    lengths = report.lengths
    print_line(
        f"length   mean {lengths.mean:,.1f} tokens, median {lengths.median:,}, "
        f"90 % to {lengths.p90:,}, 99 % to {lengths.p99:,}, longest {lengths.longest:,}"
    )
    if report.trained is not None:
        print_line(
            f"trained  {report.trained:.1%} of the tokens; {report.answers:,.1f} answers a document"
        )
    largest = max(bucket.share for bucket in lengths.histogram)
    rows = []
    for bucket in lengths.histogram:
        bar = "█" * round(_BAR * bucket.share / largest)
        rows.append((f"{bucket.least:,}-{bucket.below - 1:,}", f"{bucket.share:.1%}", bar))
    print_table(("tokens per document", "share", ""), rows)


def _print_sequence(sequence: PackedSequence) -> None:
    from rich.text import Text

    line = Text()
    left = _SHOWN_CHARS
    for segment in sequence.parts:
        line.append(segment.text[:left], style="" if segment.trained else "dim")
        left -= len(segment.text)
        if left <= 0:
            line.append(" …")
            break
    print_line(f"\nsequence {sequence.number}, {sequence.tokens:,} tokens:")
    print_line(line)
