"""`slurmllm data inspect`: what is in a corpus, and how far it takes a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from slurmllm.corpus.inspection import CorpusReport, RecipeEpochs, Sequence
    from slurmllm.data.spec import StreamSpec

_BAR = 40
# Of a sequence, for people; --json prints all of it.
_SHOWN_CHARS = 400


@click.command("inspect")
@click.argument("corpus", required=False)
@click.option(
    "--tokenizer", metavar="FILE", help="tokenizer.json.  [default: the recipe's; for text]"
)
@click.option("--recipe", metavar="NAME", help="Say how many epochs and steps this recipe takes.")
@options.set_value
@click.option("--exact", is_flag=True, help="Count all tokens, however many, instead of a sample.")
@click.option(
    "--sequences",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="First packed sequences to show decoded.",
)
@options.runs_dir
@options.as_json
def inspect(
    corpus: str | None,
    tokenizer: str | None,
    recipe: str | None,
    overrides: tuple[str, ...],
    exact: bool,
    sequences: int,
    runs_dir: str | None,
    as_json: bool,
) -> None:
    """Count a corpus: documents, tokens, lengths, and its first packed sequences.

    CORPUS is what data.corpus takes; left out, it is the recipe's. A large corpus is sampled, and
    the output says so.
    """
    from slurmllm.corpus.inspection import count_epochs, first_sequences, inspect_corpus
    from slurmllm.data.sources.opening import open_all
    from slurmllm.progress import input_progress

    spec, name, steps = _asked(corpus, tokenizer, recipe, overrides, runs_dir, sequences)
    sources, encoder = open_all(spec.corpora, spec.tokenizer, spec.vocab_size, spec.mask)
    total_weight = sum(weight for _, weight in spec.corpora)
    reports: list[CorpusReport] = []
    reaches: list[RecipeEpochs] = []
    for source, (_, weight) in zip(sources, spec.corpora, strict=True):
        with input_progress("counting", source.total_size) as on_progress:
            report = inspect_corpus(source, exact=exact, on_progress=on_progress)
        reports.append(report)
        if name is not None:
            share = weight / total_weight
            reaches.append(count_epochs(report, spec, name, steps, share))
    shown = first_sequences(spec, encoder, sequences) if sequences and encoder else []
    if as_json:
        click.echo(json.dumps(_as_json(reports, reaches, shown), indent=2))
        return
    for place, report in enumerate(reports):
        _print_report(report)
        if reaches:
            _print_epochs(reaches[place], len(reports) > 1)
    for sequence in shown:
        _print_sequence(sequence)
    if sequences and encoder is None:
        click.echo("sequences are token ids: --tokenizer FILE decodes them")


def _asked(
    corpus: str | None,
    tokenizer: str | None,
    recipe: str | None,
    overrides: tuple[str, ...],
    runs_dir: str | None,
    sequences: int,
) -> tuple[StreamSpec, str | None, int]:
    """The stream to look at, the recipe's name and its steps."""
    from slurmllm.data.spec import StreamSpec
    from slurmllm.errors import UserError
    from slurmllm.submit.prepare import STDLIB, with_inputs

    if recipe is None:
        if corpus is None:
            raise UserError("nothing to inspect: name a corpus, or --recipe NAME for the recipe's")
        if overrides:
            raise UserError("--set changes a recipe: add --recipe NAME")
        path = None if tokenizer is None else Path(tokenizer)
        if STDLIB in (corpus, tokenizer):
            from slurmllm.corpus.builtin import ensure_stdlib
            from slurmllm.rundir import runs_root

            built = ensure_stdlib(runs_root(runs_dir) / ".data")
            corpus = str(built[0]) if corpus == STDLIB else corpus
            path = built[1] if tokenizer in (STDLIB, None) else path
        return StreamSpec([(Path(corpus), 1.0)], path, 256, max(sequences, 1), seed=0), None, 0
    from slurmllm.config.resolve import resolve
    from slurmllm.rundir import runs_root

    given = [
        f"data.{field}={json.dumps(value)}"
        for field, value in (("corpus", corpus), ("tokenizer", tokenizer))
        if value is not None
    ]
    config = resolve(recipe, overrides=[*overrides, *given])
    config = with_inputs(config, runs_root(runs_dir), build=True)
    found, data = config.recipe, config.recipe.data
    spec = StreamSpec(
        [(Path(share.path), share.weight) for share in data.corpora],
        None if data.tokenizer is None else Path(data.tokenizer),
        found.model.seq_len,
        found.train.global_batch,
        found.train.seed,
        found.model.vocab_size,
        data.mask,
        data.validation,
    )
    return spec, found.name, found.train.steps


def _as_json(
    reports: list[CorpusReport], reaches: list[RecipeEpochs], shown: list[Sequence]
) -> dict[str, Any]:
    """Sums of all corpora, then each."""
    return {
        "documents": sum(report.documents for report in reports),
        "bytes": sum(report.size for report in reports if report.unit == "bytes") or None,
        "tokens": sum(report.tokens for report in reports),
        "tokens_are": "exact" if all(r.tokens_are == "exact" for r in reports) else "estimated",
        "corpora": [report.model_dump() for report in reports],
        "recipe": [count_epochs.model_dump() for count_epochs in reaches] or None,
        "sequences": [sequence.model_dump() for sequence in shown],
    }


def _print_report(report: CorpusReport) -> None:
    from slurmllm.tables import console, print_table

    def line(text: str) -> None:
        console().print(text, soft_wrap=True, markup=False)

    what, size = f"{report.documents:,} {report.documents_are}", f"{report.size:,} token ids"
    if report.unit == "bytes":
        size = f"{report.size / 1e6:,.1f} MB of text"
    line(f"{report.corpus}: {what}, {size}, {report.fingerprint}")
    if report.tokens_are == "exact":
        ends = ", end-of-document tokens included" if report.documents_are == "documents" else ""
        line(f"tokens   {report.tokens:,} (exact){ends}")
    else:
        line(
            f"tokens   {report.tokens:,} ± {report.tokens_error:,} (95 %), estimated from "
            f"{report.documents_counted:,} documents; --exact counts them"
        )
    at = report.lengths
    line(
        f"length   mean {at.mean:,.1f} tokens, median {at.median:,}, 90 % to {at.p90:,}, "
        f"99 % to {at.p99:,}, longest {at.longest:,}"
    )
    most = max(bucket.share for bucket in at.histogram)
    rows = [
        (
            f"{bucket.least:,}-{bucket.below - 1:,}",
            f"{bucket.share:.1%}",
            "█" * round(_BAR * bucket.share / most),
        )
        for bucket in at.histogram
    ]
    print_table(("tokens a document", "share", ""), rows)


def _print_epochs(epochs: RecipeEpochs, blended: bool) -> None:
    of_it = " of this corpus" if blended else ""
    click.echo(
        f"recipe   {epochs.recipe}: {epochs.steps:,} steps x {epochs.tokens_per_step:,} tokens{of_it} "
        f"are {epochs.epochs:,.3g} epochs; an epoch is {epochs.steps_per_epoch:,.1f} steps"
    )


def _print_sequence(sequence: Sequence) -> None:
    from rich.text import Text

    from slurmllm.tables import console

    text = Text()
    left = _SHOWN_CHARS
    for part in sequence.parts:
        text.append(part.text[:left], style="" if part.trained else "dim")
        left -= len(part.text)
        if left <= 0:
            text.append(" …")
            break
    console().print(f"\nsequence {sequence.number}, {sequence.tokens:,} tokens:", markup=False)
    console().print(text, soft_wrap=True)
