"""Checks of corpora and tokenizer before a submit, without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from slurmllm.data.sources.base import Source
from slurmllm.data.sources.opening import open_all
from slurmllm.data.spec import Split, SplitName
from slurmllm.errors import DataError

# Upper bound of the mean bytes per token of natural text (English: 4 to 5, code: 3 to 4). A corpus
# that fills a batch even at this rate need not be counted.
_MOST_BYTES_PER_TOKEN = 16
# Documents at the beginning of each corpus that are always read.
_FIRST_DOCUMENTS = 16
_AT_ONCE = 1024


@dataclass(frozen=True)
class CorpusFacts:
    """Size of a corpus."""

    documents: int
    size: int  # of all documents
    unit: Literal["bytes", "tokens"]
    # To train on, end-of-document tokens included; None if the corpus is long enough without
    # counting them.
    tokens: int | None


def check_corpora(
    corpora: Sequence[tuple[Path, float]],
    tokenizer: Path | None,
    vocab_size: int,
    seq_len: int,
    global_batch: int,
    validation: float = 0.0,
    mask: Literal["none", "document"] = "none",
) -> list[CorpusFacts]:
    """Check that a model can be trained on corpora with a tokenizer.

    Reads the tokenizer, each corpus's metadata and its first documents; more only if the corpus
    might be shorter than its part of a global batch, and no more than that.

    The arguments are those of `StreamSpec`.

    Raises:
        SlurmllmError: corpus or tokenizer are missing, unreadable, damaged or do not fit.
    """
    sources, encoder = open_all(corpora, tokenizer, vocab_size, mask)
    if encoder is not None and encoder.num_ids > vocab_size:
        raise DataError(
            f"tokenizer {tokenizer} has {encoder.num_ids} token ids, more than model.vocab_size "
            f"{vocab_size}; set model.vocab_size to {encoder.num_ids} or more, or choose a "
            f"tokenizer with at most {vocab_size}"
        )
    total = sum(weight for _, weight in corpora)
    facts = []
    for source, (_, weight) in zip(sources, corpora, strict=True):
        # Detects a damaged file and ids beyond the vocabulary.
        source.read([(document, 0) for document in range(min(len(source), _FIRST_DOCUMENTS))])
        sides: tuple[SplitName, ...] = ("train", "validation") if validation else ()
        for side in sides:
            Split(side, validation).require_documents(source)
        needed = math.ceil(global_batch * seq_len * weight / total)
        tokens = _count_tokens(source, Split("train", validation), needed)
        if tokens is not None and tokens < needed:
            share = f" x its share {weight / total:.3g}" if len(corpora) > 1 else ""
            raise DataError(
                f"corpus {source.path} has {tokens} tokens in {len(source)} documents"
                f"{' with those held out' if validation else ''}, fewer than one global batch "
                f"takes: train.global_batch {global_batch} x model.seq_len {seq_len}{share} = "
                f"{needed}; add text to the corpus, or lower train.global_batch or model.seq_len"
            )
        facts.append(CorpusFacts(len(source), source.total_size, source.size_unit, tokens))
    return facts


def _count_tokens(source: Source, split: Split, enough: int) -> int | None:
    """Tokens on one side of a corpus; None if there are enough without counting all of them."""
    rate = _MOST_BYTES_PER_TOKEN if source.size_unit == "bytes" else 1
    # Twice: the hash holds out only about this fraction of the documents.
    if source.total_size * (1 - split.validation) >= 2 * enough * rate:
        return None
    total = 0
    for begin in range(0, len(source), _AT_ONCE):
        documents = np.arange(begin, min(begin + _AT_ONCE, len(source)))
        if not split.all_documents:
            documents = documents[split.holds(source.document_hashes(documents))]
        for document in documents.tolist():
            if total >= enough:
                return None
            for piece in range(source.num_pieces(document)):
                total += len(source.read([(document, piece)]).tokens)
    return total
