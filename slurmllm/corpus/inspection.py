"""What is in a corpus: documents, tokens, how long they are, and how far it would take a recipe."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal

import numpy as np
from pydantic import Field

from slurmllm.data.order import Integers, Permutation
from slurmllm.data.sources.base import Request, Source
from slurmllm.data.spec import StreamSpec
from slurmllm.data.stream import PackedStream
from slurmllm.data.tokenizer import TokenEncoder
from slurmllm.progress import OnProgress
from slurmllm.records import Record

# A corpus of no more than this is counted to the end: a matter of seconds.
COUNTED_SIZE = 32 << 20
SAMPLED_DOCUMENTS = 4000
# Of a long document no more pieces than these are tokenized, evenly spread.
_PIECES = 8
_AT_ONCE = 256
# Half the width of an interval that holds 95 % of a normal distribution, in standard deviations.
_Z95 = 1.96


class LengthBucket(Record):
    """Documents of similar length."""

    least: int = Field(description="tokens")
    below: int
    share: float = Field(description="of the documents looked at")


class Lengths(Record):
    """Tokens a document, of the documents looked at."""

    mean: float
    median: int
    p90: int
    p99: int
    longest: int
    histogram: tuple[LengthBucket, ...] = Field(description="shortest first; powers of two")


class CorpusReport(Record):
    """What `slurmllm data inspect --json` prints of a corpus."""

    corpus: str
    documents: int
    documents_are: Literal["documents", "blocks"] = Field(
        description="blocks of tokens where no index says where documents begin"
    )
    size: int = Field(description="of all documents, in `unit`")
    unit: Literal["bytes", "tokens"] = Field(description="bytes of text, or token ids")
    tokens: int = Field(description="end-of-document tokens included")
    tokens_are: Literal["exact", "estimated"]
    tokens_error: int = Field(description="the true number is within this with 95 %; 0: exact")
    documents_counted: int = Field(description="of which tokens and lengths are")
    lengths: Lengths
    fingerprint: str


class RecipeEpochs(Record):
    """How far a corpus takes a recipe."""

    recipe: str
    seq_len: int
    global_batch: int
    steps: int = Field(description="train.steps")
    tokens_per_step: int = Field(description="of this corpus")
    steps_per_epoch: float
    epochs: float = Field(description="passes over the corpus until the last step")


class SequencePart(Record):
    """Consecutive tokens, decoded."""

    text: str
    trained: bool = Field(description="false: a prompt, which is read but not learnt")


class Sequence(Record):
    """A packed sequence of the first step."""

    number: int = Field(description="its row in the global batch")
    tokens: int
    parts: tuple[SequencePart, ...]


def inspect_corpus(
    source: Source, *, exact: bool = False, on_progress: OnProgress = lambda _: None
) -> CorpusReport:
    """Count a corpus, or estimate its tokens from a sample of its documents.

    The estimate is the ratio estimator of survey sampling (W. Cochran, Sampling Techniques, 1977,
    section 6.4): tokens a byte in the sample times all bytes.

    Args:
        source: The corpus.
        exact: Whether to count to the end however large it is.
        on_progress: Called with the size of the documents looked at so far.

    Raises:
        SlurmllmError: a document is damaged or cannot serve.
    """
    count, unit = len(source), source.size_unit
    whole = exact or count <= SAMPLED_DOCUMENTS or source.total_size <= COUNTED_SIZE
    if whole:
        picked: Integers = np.arange(count)
    else:
        picked = np.sort(Permutation(count, "inspect").take(np.arange(SAMPLED_DOCUMENTS)))
    sizes = np.empty(len(picked), dtype=np.int64)
    tokens = np.empty(len(picked), dtype=np.int64)
    seen = 0
    for begin in range(0, len(picked), _AT_ONCE):
        documents = picked[begin : begin + _AT_ONCE].tolist()
        end = begin + len(documents)
        sizes[begin:end] = [source.document_size(document) for document in documents]
        tokens[begin:end] = _lengths(source, documents, _PIECES if not whole else None)
        seen += int(sizes[begin:end].sum())
        on_progress(seen)
    total, error = (int(tokens.sum()), 0) if whole else _ratio_estimate(source, sizes, tokens)
    return CorpusReport(
        corpus=str(source.path),
        documents=count,
        documents_are="blocks" if source.in_blocks else "documents",
        size=source.total_size,
        unit=unit,
        tokens=total,
        # Token ids are as many as the file holds, whatever the sample was.
        tokens_are="exact" if whole or (not error and unit == "tokens") else "estimated",
        tokens_error=error,
        documents_counted=len(picked),
        lengths=_describe(tokens),
        fingerprint=source.fingerprint,
    )


def count_epochs(
    report: CorpusReport, spec: StreamSpec, recipe: str, steps: int, share: float
) -> RecipeEpochs:
    """How many epochs of a corpus a recipe takes.

    Args:
        report: Of the corpus.
        spec: The recipe's stream.
        recipe: Its name.
        steps: Of the recipe.
        share: Of the sequences, those of this corpus.
    """
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


def first_sequences(spec: StreamSpec, encoder: TokenEncoder, count: int) -> list[Sequence]:
    """The first rows of the first step, as the model will read them."""
    with PackedStream(spec, 0, 1) as stream:
        batch = stream.next_batch()
    untrained = np.zeros_like(batch.tokens, bool) if batch.untrained is None else batch.untrained
    found = []
    for number, (ids, prompt) in enumerate(zip(batch.inputs, untrained[:, :-1], strict=True)):
        if number == count:
            break
        bounds = [0, *(np.flatnonzero(np.diff(prompt)) + 1).tolist(), len(ids)]
        parts = tuple(
            SequencePart(text=encoder.decode(ids[begin:end]), trained=not prompt[begin])
            for begin, end in itertools.pairwise(bounds)
        )
        found.append(Sequence(number=number, tokens=len(ids), parts=parts))
    return found


def _lengths(source: Source, documents: list[int], most: int | None) -> list[int]:
    """Tokens of some documents; of long ones scaled up from `most` of their pieces."""
    requests: list[Request] = []
    spans: list[tuple[int, int]] = []  # pieces read, pieces there are
    for document in documents:
        pieces = source.num_pieces(document)
        chosen = list(_spread(pieces, most))
        requests += [(document, piece) for piece in chosen]
        spans.append((len(chosen), pieces))
    ends = source.read(requests).ends
    counts = np.diff(ends, prepend=0)
    lengths, begin = [], 0
    for read, pieces in spans:
        lengths.append(round(int(counts[begin : begin + read].sum()) * pieces / read))
        begin += read
    return lengths


def _spread(pieces: int, most: int | None) -> Iterator[int]:
    if most is None or pieces <= most:
        return iter(range(pieces))
    return (pieces * place // most for place in range(most))


def _ratio_estimate(source: Source, sizes: Integers, tokens: Integers) -> tuple[int, int]:
    """Tokens of all documents from those of a sample, and half the width of the 95 % interval."""
    drawn, count = len(sizes), len(source)
    ratio = tokens.sum() / max(int(sizes.sum()), 1)
    rest = tokens - ratio * sizes
    variance = float((rest**2).sum()) / (drawn - 1) / drawn * (1 - drawn / count)
    return round(ratio * source.total_size), round(_Z95 * count * variance**0.5)


def _describe(tokens: Integers) -> Lengths:
    quantiles = np.quantile(tokens, [0.5, 0.9, 0.99], method="higher")
    median, p90, p99 = (int(quantile) for quantile in quantiles)
    places = np.frexp(np.maximum(tokens, 1))[1] - 1  # 2^place ≤ tokens < 2^(place + 1)
    buckets = [
        LengthBucket(
            least=1 << place,
            below=2 << place,
            share=float(np.count_nonzero(places == place)) / len(tokens),
        )
        for place in range(int(places.min()), int(places.max()) + 1)
    ]
    return Lengths(
        mean=float(tokens.mean()),
        median=median,
        p90=p90,
        p99=p99,
        longest=int(tokens.max()),
        histogram=tuple(buckets),
    )
