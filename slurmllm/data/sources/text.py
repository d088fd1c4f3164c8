"""Documents of an Arrow corpus, tokenized when they are read.

Of prompts with completions only the completion is trained.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from slurmllm.core.errors import DataError, StorageError
from slurmllm.data.sources.arrow import FIX, ArrowFile
from slurmllm.data.sources.base import (
    BEGINS,
    UNTRAINED,
    Hashes,
    Integers,
    Pieces,
    Request,
    Source,
    document_hash,
    joined,
    prompt_content,
    short_digest,
)
from slurmllm.data.tokenizer import TokenEncoder, special_tokens

# About the text that a resume inside a long document tokenizes again; more if it has no cut.
PIECE_BYTES = 64 << 10
# Text of one call: the library's results need some 100 times the memory of the text.
_CALL_BYTES = 1 << 20
# Between two English words, after a line, before a Chinese comma or full stop; in UTF-8.
_HAN = rb"(?:\xe4[\xb8-\xbf]|[\xe5-\xe8][\x80-\xbf])[\x80-\xbf]"  # U+4E00 to U+8FFF, letters
_CUTS = re.compile(
    rb"(?<=[A-Za-z])(?= [A-Za-z])"
    rb"|(?:(?<=[!-~]\n)|(?<=" + _HAN + rb"\n)|(?<=\xe3\x80\x82\n))(?=[A-Za-z]|" + _HAN + rb")"
    rb"|(?<=" + _HAN + rb")(?=\xef\xbc\x8c|\xe3\x80\x82)"
)
_CUT_BYTES = 3  # of what follows a cut


class _ArrowSource(Source):
    """The rows of an Arrow corpus, compared with their hashes when they are read, if it has any.

    `columns` are those of a document's text, one or two.
    """

    size_unit = "bytes"

    def __init__(self, file: ArrowFile, encoder: TokenEncoder, *columns: str) -> None:
        self.path = file.path
        self.fingerprint = file.fingerprint()
        self._file = file
        self._id = file.ids()
        self._encoder = encoder
        self._columns = [file.strings(name) for name in columns]

    def __len__(self) -> int:
        return len(self._file)

    @property
    def total_size(self) -> int:
        return sum(column.total_size for column in self._columns)

    def document_size(self, document: int) -> int:
        return sum(len(column.data(document)) for column in self._columns)

    def num_pieces(self, document: int) -> int:
        return 1

    def content_hash(self, document: int) -> int:
        contents = [column.data(document) for column in self._columns]
        return document_hash(prompt_content(*contents) if contents[1:] else contents[0])

    def document_hashes(self, documents: Integers) -> Hashes:
        """Return the corpus's ids if it has them, else compute them from the texts."""
        return np.array([*map(self._id or self.content_hash, documents.tolist())], np.uint64)

    def _texts(self, document: int) -> list[str]:
        return [self._file.decoded(document, column.data(document)) for column in self._columns]

    def _verify(self, document: int) -> None:
        if self._id is not None and self.content_hash(document) != self._id(document):
            self._texts(document)  # raises with the position if it is not UTF-8
            raise StorageError(
                f"document {document} of {self.path} was changed or damaged since it was built: "
                "its content does not have the hash in the column `id`; compare the file with the "
                f"sha256 in its manifest, and {FIX}"
            )


class TextSource(_ArrowSource):
    """The documents of an Arrow corpus, each with the end-of-document token.

    A document of more than PIECE_BYTES is tokenized in pieces, cut where every tokenizer with
    `splits_words` splits too, so that the tokens equal those of the whole. Pieces without such a
    place are part of the one before. Documents of other tokenizers are not cut.
    """

    def __init__(self, file: ArrowFile, encoder: TokenEncoder) -> None:
        super().__init__(file, encoder, "text")

    def num_pieces(self, document: int) -> int:
        if not self._encoder.splits_words:
            return 1
        return max(1, -(-self.document_size(document) // PIECE_BYTES))

    def read(self, requests: Sequence[Request]) -> Pieces:
        # fromlist is four times as fast as with the type "i"
        ids = array("I")
        ends = []
        for texts, lasts in self._batches(requests):
            for tokens, last in zip(self._encoder.encode_batch(texts), lasts, strict=True):
                ids.fromlist(tokens)
                if last:
                    ids.append(self._encoder.end_of_document)
                ends.append(len(ids))
        marks = np.zeros(len(ids), np.uint8)
        for begin, (_, piece) in zip([0, *ends], requests, strict=False):
            if piece == 0:
                marks[begin : begin + 1] = BEGINS
        return Pieces(np.frombuffer(ids, np.int32), marks, np.array(ends, np.int64))

    def _batches(self, requests: Sequence[Request]) -> Iterator[tuple[list[str], list[bool]]]:
        """Yield texts of bounded length, and whether each ends its document."""
        texts = []
        lasts = []
        total = 0
        for document, piece in requests:
            data = self._columns[0].data(document)
            count = self.num_pieces(document)
            begin, end = _piece_bounds(data, piece) if count > 1 else (0, len(data))
            texts.append(self._file.decoded(document, data[begin:end], begin))
            lasts.append(piece + 1 == count)
            if piece == 0:
                self._verify(document)
            total += end - begin
            if total >= _CALL_BYTES:
                yield texts, lasts
                texts = []
                lasts = []
                total = 0
        if texts:
            yield texts, lasts


def _piece_bounds(data: memoryview, piece: int) -> tuple[int, int]:
    """Return begin and end of a piece: the first cuts in and after its share of the bytes.

    A piece whose share has no cut is empty, so that all pieces together search each byte at most
    twice.
    """
    begin = piece * PIECE_BYTES
    next_begin = (piece + 1) * PIECE_BYTES
    if piece:
        cut = _CUTS.search(data, begin, next_begin + _CUT_BYTES)
        if cut is None or cut.start() >= next_begin:
            return begin, begin
        begin = cut.start()
    cut = _CUTS.search(data, next_begin)
    return begin, cut.start() if cut else len(data)


class PromptSource(_ArrowSource):
    """The rows of an Arrow corpus with the string columns `prompt` and `completion`.

    A document is the prompt's tokens, the completion's and the end-of-document token: the eos
    token of the tokenizer's config if it has one. They are encoded separately, the prompt as
    generation would encode it.
    """

    trains_every_token = False

    def __init__(self, file: ArrowFile, encoder: TokenEncoder) -> None:
        super().__init__(file, encoder, "prompt", "completion")
        tokens = special_tokens(encoder.path)
        self._end = encoder.end_of_document
        self._end_token = tokens.get("eos_token") or encoder.decode(np.array([self._end]))
        if "eos_token" in tokens:
            end = encoder.token_id(self._end_token)
            if end is None:
                raise DataError(
                    f"eos_token {self._end_token!r} of the tokenizer_config.json of "
                    f"{encoder.path} is not in the tokenizer's vocabulary; name one that is"
                )
            self._end = end
        if tokens:
            # The list begins with a chat template, which is not used: states of earlier versions
            # without a template remain valid.
            self.special_tokens = short_digest(json.dumps([None, sorted(tokens.items())]))

    def read(self, requests: Sequence[Request]) -> Pieces:
        for document, _ in requests:
            self._verify(document)
        pairs = [self._texts(document) for document, _ in requests]
        prompts = self._encoder.encode_as_generation([pair[0] for pair in pairs], begins=True)
        completions = self._encoder.encode_as_generation([pair[1] for pair in pairs], begins=False)
        parts = []
        for (_, completion), prompt_ids, ids in zip(pairs, prompts, completions, strict=True):
            if not completion.rstrip().endswith(self._end_token):
                ids.append(self._end)
            tokens = np.array(prompt_ids + ids, np.int32)
            marks = np.zeros(len(tokens), np.uint8)
            marks[: len(prompt_ids)] = UNTRAINED
            marks[:1] |= BEGINS
            parts.append((tokens, marks))
        return joined(parts)
