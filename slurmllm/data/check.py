"""What `submit` asks of corpus and tokenizer before it queues hours of work; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slurmllm.data.sources.arrow import Corpus
from slurmllm.data.tokenizer import TokenEncoder
from slurmllm.errors import DataError

# No natural text has a mean of more bytes a token than this (English: 4 to 5, code: 3 to 4),
# so a corpus that reaches a batch even at this rate need not be counted.
_MOST_BYTES_PER_TOKEN = 16


@dataclass(frozen=True)
class CorpusFacts:
    """What a corpus and a tokenizer are found to be.

    Attributes:
        documents: Documents in the corpus.
        text_bytes: UTF-8 bytes of all documents.
        tokens: Tokens, end-of-document tokens included, where they had to be counted to the end;
            None where the corpus is plainly long enough.
        vocab_size: The tokenizer's largest id + 1.
        end_of_document: Id of the token that ends a document.
    """

    documents: int
    text_bytes: int
    tokens: int | None
    vocab_size: int
    end_of_document: int


def check_inputs(
    corpus: Path, tokenizer: Path, vocab_size: int, seq_len: int, global_batch: int
) -> CorpusFacts:
    """Check that a model can be trained on a corpus with a tokenizer.

    Reads the tokenizer, the corpus's footer and the offsets of its documents; it tokenizes only
    where the corpus might be shorter than one global batch, and no further than that batch.

    Args:
        corpus: Arrow corpus.
        tokenizer: tokenizer.json.
        vocab_size: The model's vocabulary.
        seq_len: Tokens in a sequence.
        global_batch: Sequences in one step.

    Raises:
        DataError: missing, unreadable or unfit; the message says which, and the remedy.
    """
    documents = Corpus(corpus)
    encoder = TokenEncoder(tokenizer)
    num_ids = encoder.num_ids
    if num_ids > vocab_size:
        raise DataError(
            f"tokenizer {tokenizer} has {num_ids} token ids, more than model.vocab_size "
            f"{vocab_size}; set model.vocab_size to {num_ids} or more, or choose a tokenizer "
            f"with at most {vocab_size}"
        )
    needed = global_batch * seq_len
    tokens: int | None = None
    if documents.text_bytes < needed * _MOST_BYTES_PER_TOKEN:
        tokens = _count(documents, encoder, needed)
    if tokens is not None and tokens < needed:
        raise DataError(
            f"corpus {corpus} has {tokens} tokens in {len(documents)} documents, fewer than one "
            f"global batch takes: train.global_batch {global_batch} x model.seq_len {seq_len} = "
            f"{needed}; add text to the corpus, or lower train.global_batch or model.seq_len"
        )
    return CorpusFacts(
        documents=len(documents),
        text_bytes=documents.text_bytes,
        tokens=tokens,
        vocab_size=num_ids,
        end_of_document=encoder.end_of_document,
    )


def _count(documents: Corpus, encoder: TokenEncoder, enough: int) -> int | None:
    """Tokens of the corpus; None as soon as there are enough and documents remain."""
    total = 0
    for index, text in enumerate(documents):
        total += len(encoder.encode(text))
        if total >= enough and index + 1 < len(documents):
            return None
    return total
