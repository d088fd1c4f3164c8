"""Documents as read → documents as kept: normalized, without blank and short ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from slurmllm.corpus.inputs import InputFile
from slurmllm.corpus.options import CleanOptions, InputErrors, ReadOptions
from slurmllm.corpus.readers import DocumentReader, Documents


class Cleaned(NamedTuple):
    """The kept documents of a chunk, and the number of skipped ones."""

    documents: Documents
    empty: int  # only white space; of fine-tuning data: the completion, the assistant's turns
    short: int  # others


def clean(documents: Documents, options: CleanOptions) -> Cleaned:
    """Normalize a chunk of documents, and skip blank and short ones."""
    if options.normalize != "none":
        form = options.normalize.upper()
        documents = tuple(pc.utf8_normalize(column, form) for column in documents)
    last = documents[-1]
    # utf8_is_space is false of an empty string.
    blank = pc.or_(pc.utf8_is_space(last), pc.equal(pc.binary_length(last), 0))
    keep = ~blank.to_numpy(zero_copy_only=False)
    empty = len(keep) - int(keep.sum())
    short = 0
    if options.min_chars:
        chars = sum(pc.utf8_length(column).to_numpy() for column in documents)
        long_enough = chars >= options.min_chars
        short = int((keep & ~long_enough).sum())
        keep &= long_enough
    if empty or short:
        mask = pa.array(keep)
        documents = tuple(column.filter(mask) for column in documents)
    return Cleaned(documents, empty, short)


class DocumentStream:
    """The non-empty documents of several files; iterates once.

    Attributes:
        documents: Documents so far.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        options: ReadOptions,
        errors: InputErrors,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        self._files = files
        self._options = options
        self._errors = errors
        self._on_progress = on_progress or (lambda _: None)
        self.documents = 0

    def __iter__(self) -> Iterator[str]:
        done_bytes = 0
        for file in self._files:
            reader = DocumentReader(file, self._options, self._errors.add)
            for chunk in reader:
                self._on_progress(done_bytes + reader.position_bytes)
                (texts,) = clean(chunk, CleanOptions()).documents
                self.documents += len(texts)
                yield from texts.to_pylist()
            done_bytes += file.size_bytes
            self._on_progress(done_bytes)
