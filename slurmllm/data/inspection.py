"""Corpora counted: whether a model can be trained on them, and `slurmllm data inspect`.

`check_corpora` runs before a submit and reads as little as it can. `inspect_corpus` counts
documents, tokens and lengths; `count_epochs` how many epochs of a corpus a recipe trains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np

from slurmllm.core.errors import DataError, SlurmllmError
from slurmllm.core.run.records import Record
from slurmllm.data.order import Permutation
from slurmllm.data.sources import open_all
from slurmllm.data.sources.base import BEGINS, UNTRAINED, Flags, Integers, Source
from slurmllm.data.spec import HELD_OUT, Split, StreamSpec, evaluation_texts
from slurmllm.data.stream import PackedStream
from slurmllm.data.tokenizer import TokenEncoder

if TYPE_CHECKING:
    from slurmllm.core.display.progress import OnProgress

# Bytes or tokens up to which a corpus is counted completely, which takes seconds.
COUNTED_SIZE = 32 << 20
SAMPLED_DOCUMENTS = 4000
# Pieces of a long document that are tokenized for the estimate, evenly spread.
_SAMPLED_PIECES = 8
_AT_ONCE = 256
# Upper bound of the mean bytes per token of natural text (English: 4 to 5, code: 3 to 4). A corpus
# that fills a batch even at this rate need not be counted.
_MOST_BYTES_PER_TOKEN = 16
# Documents at the beginning of each corpus that are always read.
_FIRST_DOCUMENTS = 16
# Documents of a text of `eval`, and bytes or tokens of each training corpus, whose hashes are
# compared: seconds.
_COMPARED_DOCUMENTS = 10_000
_COMPARED_SIZE = 256 << 20
# Half the width of an interval that holds 95 % of a normal distribution, in standard deviations.
_Z95 = 1.96


class LengthBucket(Record):
    """Documents of similar length."""

    least: int  # tokens
    below: int
    share: float  # of the documents counted


class Lengths(Record):
    """Tokens per document, of the documents counted."""

    mean: float
    median: int
    p90: int
    p99: int
    longest: int
    histogram: tuple[LengthBucket, ...]  # shortest first; powers of two


class CorpusReport(Record):
    """Counts of a corpus, as in `slurmllm data inspect --json`."""

    corpus: str
    documents: int
    # Blocks of tokens if the file has no index of documents.
    documents_are: Literal["documents", "blocks"]
    size: int  # of all documents, in `unit`
    unit: Literal["bytes", "tokens"]  # bytes of text, or token ids
    tokens: int  # end-of-document tokens included
    tokens_are: Literal["exact", "estimated"]
    tokens_error: int  # the true number is within this with 95 %; 0: exact
    documents_counted: int  # documents that tokens and lengths are counted from
    lengths: Lengths
    # Share of the tokens that are trained, and answers (runs of trained tokens) a document; None if
    # every token is trained.
    trained: float | None = None
    answers: float | None = None
    fingerprint: str


class RecipeEpochs(Record):
    """Epochs of a corpus that a recipe trains."""

    recipe: str
    seq_len: int
    global_batch: int
    steps: int  # train.steps
    tokens_per_step: int  # of this corpus
    steps_per_epoch: float
    epochs: float  # passes over the corpus until the last step


class SequencePart(Record):
    """Consecutive tokens, decoded."""

    text: str
    trained: bool  # false: a prompt, which is read but not trained


class PackedSequence(Record):
    """A packed sequence of the first step."""

    number: int  # its row in the global batch
    tokens: int
    parts: tuple[SequencePart, ...]


def inspect_corpus(
    source: Source, *, exact: bool = False, on_progress: OnProgress = lambda _: None
) -> CorpusReport:
    """Count a corpus, or estimate its tokens from a sample of its documents (never if `exact`).

    The estimate is the ratio estimator of survey sampling (W. Cochran, Sampling Techniques, 1977,
    section 6.4): tokens a byte in the sample times all bytes. `on_progress` is called with the size
    of the documents read so far.
    """
    count = len(source)
    whole = exact or count <= SAMPLED_DOCUMENTS or source.total_size <= COUNTED_SIZE
    if whole:
        picked = np.arange(count)
    else:
        # A fixed key: the same sample each time. Sorted, to read the file in order.
        picked = np.sort(Permutation(count, "inspect").take(np.arange(SAMPLED_DOCUMENTS)))
    sizes, tokens = np.empty((2, len(picked)), np.int64)
    trained = answers = seen = 0
    for begin in range(0, len(picked), _AT_ONCE):
        documents = picked[begin : begin + _AT_ONCE].tolist()
        end = begin + len(documents)
        sizes[begin:end] = [source.document_size(document) for document in documents]
        max_pieces = None if whole else _SAMPLED_PIECES
        tokens[begin:end], num_trained, num_answers = _count_tokens(source, documents, max_pieces)
        trained += num_trained
        answers += num_answers
        seen += int(sizes[begin:end].sum())
        on_progress(seen)
    total = int(tokens.sum())
    error = 0
    if not whole:
        drawn = len(sizes)
        ratio = total / max(seen, 1)
        squares = float(((tokens - ratio * sizes) ** 2).sum())
        # The last factor corrects for sampling without replacement.
        variance = squares / (drawn - 1) / drawn * (1 - drawn / count)
        total = round(ratio * source.total_size)
        error = round(_Z95 * count * variance**0.5)  # half the 95 % interval
    return CorpusReport(
        corpus=str(source.path),
        documents=count,
        documents_are="blocks" if source.in_blocks else "documents",
        size=source.total_size,
        unit=source.size_unit,
        tokens=total,
        # The number of token ids in a file is known, whatever the sample.
        tokens_are="exact"
        if whole or (not error and source.size_unit == "tokens")
        else "estimated",
        tokens_error=error,
        documents_counted=len(picked),
        lengths=_describe_lengths(tokens),
        trained=None if source.trains_every_token else trained / int(tokens.sum()),
        answers=None if source.trains_every_token else answers / len(picked),
        fingerprint=source.fingerprint,
    )


def count_epochs(
    report: CorpusReport, spec: StreamSpec, recipe: str, steps: int, share: float
) -> RecipeEpochs:
    """Count the epochs of a corpus that a recipe trains; `share` is its part of the sequences."""
    per_step = spec.global_batch * spec.seq_len * share
    trained = report.tokens * (1 - spec.validation)
    return RecipeEpochs(
        recipe=recipe,
        seq_len=spec.seq_len,
        global_batch=spec.global_batch,
        steps=steps,
        tokens_per_step=round(per_step),
        steps_per_epoch=trained / per_step,
        epochs=steps * per_step / trained,
    )


def first_sequences(spec: StreamSpec, encoder: TokenEncoder, count: int) -> list[PackedSequence]:
    with PackedStream(spec, 0, 1) as stream:
        batch = stream.next_batch()
    untrained = np.zeros_like(batch.tokens, bool) if batch.untrained is None else batch.untrained
    sequences = []
    rows = zip(batch.inputs[:count], untrained[:, :-1], strict=False)
    for number, (ids, prompt) in enumerate(rows):
        bounds = [0, *(np.flatnonzero(np.diff(prompt)) + 1), len(ids)]
        parts = [
            SequencePart(text=encoder.decode(ids[begin:end]), trained=not prompt[begin])
            for begin, end in pairwise(bounds)
        ]
        sequences.append(PackedSequence(number=number, tokens=len(ids), parts=parts))
    return sequences


def _count_tokens(
    source: Source, documents: list[int], max_pieces: int | None
) -> tuple[list[int], int, int]:
    """Count the tokens of each document, those that are trained, and the answers.

    Tokens of a long document are extrapolated from `max_pieces` of its pieces.
    """
    requests = []
    spans = []  # pieces read, pieces of the document
    for document in documents:
        pieces = source.num_pieces(document)
        read = min(pieces, max_pieces or pieces)
        requests += [(document, pieces * index // read) for index in range(read)]
        spans.append((read, pieces))
    pieces_read = source.read(requests)
    trained = (pieces_read.marks & UNTRAINED) == 0
    answers = trained.copy()  # where one begins
    answers[1:] &= ((pieces_read.marks[1:] & BEGINS) > 0) | ~trained[:-1]
    counts = iter(np.diff(pieces_read.ends, prepend=0).tolist())
    lengths = [round(sum(islice(counts, read)) * pieces / read) for read, pieces in spans]
    return lengths, int(trained.sum()), int(answers.sum())


def _describe_lengths(tokens: Integers) -> Lengths:
    # `higher`: lengths of actual documents, not means of two.
    median, p90, p99 = np.quantile(tokens, [0.5, 0.9, 0.99], method="higher").tolist()
    exponents = np.frexp(np.maximum(tokens, 1))[1] - 1  # 2^exponent ≤ tokens < 2^(exponent + 1)
    shares = (np.bincount(exponents) / len(tokens)).tolist()
    return Lengths(
        mean=tokens.mean(),
        median=median,
        p90=p90,
        p99=p99,
        longest=tokens.max(),
        histogram=[
            LengthBucket(least=1 << exponent, below=2 << exponent, share=shares[exponent])
            for exponent in range(exponents.min(), len(shares))
        ],
    )


def check_corpora(spec: StreamSpec) -> list[int | None]:
    """Check that a model can be trained on a stream.

    Reads the tokenizer, each corpus's metadata and its first documents; more only if the corpus
    might be shorter than its part of a global batch, and no more than that. A SlurmllmError says
    what is missing, unreadable, damaged or does not fit.

    Returns:
        The tokens to train on of each corpus, end-of-document tokens included; None if there are
        enough without counting all of them.
    """
    sources, encoder = open_all(spec)
    vocab_size = spec.vocab_size
    if encoder is not None and vocab_size is not None and encoder.num_ids > vocab_size:
        raise DataError(
            f"tokenizer {spec.tokenizer} has {encoder.num_ids} token ids, more than "
            f"model.vocab_size {vocab_size}; set model.vocab_size to {encoder.num_ids} or more, or "
            f"choose a tokenizer with at most {vocab_size}"
        )
    total = sum(weight for _, weight in spec.corpora)
    counts = []
    for source, (_, weight) in zip(sources, spec.corpora, strict=True):
        _read_first_documents(source)
        split = Split("train", spec.validation)
        if spec.validation:
            split.require_documents(source)
            Split("validation", spec.validation).require_documents(source)
        needed = math.ceil(spec.global_batch * spec.seq_len * weight / total)
        tokens = _count_enough_tokens(source, split, needed)
        if tokens is not None and tokens < needed:
            share = f" x its share {weight / total:.3g}" if len(sources) > 1 else ""
            raise DataError(
                f"corpus {source.path} has {tokens} tokens in {len(source)} documents"
                f"{' with those held out' if spec.validation else ''}, fewer than one global batch "
                f"takes: train.global_batch {spec.global_batch} x model.seq_len {spec.seq_len}"
                f"{share} = {needed}; add text to the corpus, or lower train.global_batch or "
                "model.seq_len"
            )
        counts.append(tokens)
    return counts


def _read_first_documents(source: Source) -> None:
    """Detect a damaged file and ids beyond the vocabulary."""
    source.read([(document, 0) for document in range(min(len(source), _FIRST_DOCUMENTS))])


def check_evaluation_texts(training: StreamSpec, corpora: Mapping[str, str]) -> list[str]:
    """Check that the texts of `eval` can be evaluated; raises a SlurmllmError.

    Reads the first documents of each; of the training text too, to find those that are in both.

    Returns:
        A warning for each text that is part of the training text.
    """
    warnings = []
    for name, spec in evaluation_texts(training, corpora).items():
        setting = "data.validation" if name == HELD_OUT else f"eval.corpora.{name}"
        try:
            sources, _ = open_all(spec)
            for source in sources:
                _read_first_documents(source)
        except SlurmllmError as error:
            raise type(error)(f"{setting}: {error}") from error
        held_out = ""
        fix = "name a longer corpus"
        if name == HELD_OUT:
            held_out = " on the held-out side"
            fix = "raise data.validation"
        needed = spec.seq_len + 1
        for source in sources:
            tokens = _count_enough_tokens(source, Split(spec.split, spec.validation), needed)
            if tokens is not None and tokens < needed:
                raise DataError(
                    f"{setting}: {source.path} has {tokens} tokens{held_out}, fewer than one "
                    f"sequence takes: model.seq_len {spec.seq_len} and the token after it; "
                    f"{fix}, or lower model.seq_len"
                )
        if name == HELD_OUT:
            continue
        trained = _mark_trained_documents(sources[0], training)
        if trained.any():
            warnings.append(
                f"{setting}: {trained.sum()} of the first {len(trained)} "
                f"documents of {sources[0].path} are in the training text, so its loss is not one "
                "of unseen text; remove them from data.corpus, or hold documents out with "
                "data.validation"
            )
    return warnings


def _mark_trained_documents(source: Source, training: StreamSpec) -> Flags:
    """Return which of the first documents of a corpus are in the begin of the training text."""
    documents = source.document_hashes(np.arange(min(len(source), _COMPARED_DOCUMENTS)))
    split = Split("train", training.validation)
    trained = np.zeros(len(documents), bool)
    for corpus in open_all(training)[0]:
        share = min(1.0, _COMPARED_SIZE / max(corpus.total_size, 1))
        hashes = corpus.document_hashes(np.arange(math.ceil(len(corpus) * share)))
        trained |= np.isin(documents, hashes[split.document_mask(hashes)])
    return trained


def _count_enough_tokens(source: Source, split: Split, enough: int) -> int | None:
    """Count the tokens on one side of a corpus; None if more than enough."""
    rate = _MOST_BYTES_PER_TOKEN if source.size_unit == "bytes" else 1
    # Twice: the hash holds out only about this fraction of the documents.
    if split.name == "train" and source.total_size * (1 - split.validation) >= 2 * enough * rate:
        return None
    total = 0
    for document in split.documents(source):
        if total >= enough:
            return None
        for piece in range(source.num_pieces(document)):
            total += len(source.read([(document, piece)]).tokens)
    return total
