"""Prompts and completions for fine-tuning: both are read, only the completion is trained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slurmllm.data.chat import ChatFormat
from slurmllm.data.sources.arrow import ArrowFile
from slurmllm.data.sources.base import (
    BEGINS,
    UNTRAINED,
    Integers,
    Pieces,
    Request,
    Source,
    fingerprint,
    joined,
    prompt_hash,
)
from slurmllm.data.tokenizer import TokenEncoder
from slurmllm.errors import DataError

_COLUMNS = ("prompt", "completion")


def is_prompts(file: ArrowFile) -> bool:
    return all(name in file.names for name in _COLUMNS)


class PromptSource(Source):
    """The rows of an Arrow corpus with the string columns `prompt` and `completion`.

    A document is the prompt's tokens, the completion's and the end-of-document token: the eos
    token of the tokenizer's config if it has one. They are encoded separately, the prompt as
    generation would encode it. With a chat template they are the two sides of a dialogue.

    Raises:
        DataError: a column is not text, or the template or the eos token cannot be used.
    """

    trains_every_token = False
    size_unit = "bytes"

    def __init__(self, file: ArrowFile, encoder: TokenEncoder) -> None:
        self.path = file.path
        self._file = file
        self._prompts, self._completions = (file.strings(name) for name in _COLUMNS)
        self._ids = file.ids()
        self._encoder = encoder
        self._chat = ChatFormat(encoder.path)
        self._chat.validate()
        self._end = encoder.end_of_document
        self._end_token = self._chat.end_token or encoder.decode(np.array([self._end]))
        if self._chat.end_token is not None:
            end = encoder.token_id(self._chat.end_token)
            if end is None:
                raise DataError(
                    f"eos_token {self._chat.end_token!r} of the tokenizer_config.json of "
                    f"{encoder.path} is not in the tokenizer's vocabulary; name one that is"
                )
            self._end = end
        self.fingerprint = fingerprint([file.path], file.footer)
        self.template = self._chat.fingerprint

    def __len__(self) -> int:
        return len(self._file)

    @property
    def total_size(self) -> int:
        return self._prompts.total_bytes + self._completions.total_bytes

    def document_size(self, document: int) -> int:
        return self._prompts.size(document) + self._completions.size(document)

    def num_pieces(self, document: int) -> int:
        return 1  # prompts and completions are short enough to tokenize again

    def read(self, requests: Sequence[Request]) -> Pieces:
        """Render and tokenize documents.

        Raises:
            DataError: the chat template fails.
            StorageError: the corpus was damaged or changed after it was built.
        """
        texts = []
        for document, _ in requests:
            prompt = self._file.decoded(document, self._prompts.data(document))
            completion = self._file.decoded(document, self._completions.data(document))
            if self._ids is not None and self._hash(document) != self._ids[document]:
                raise self._file.changed_error(document)
            texts.append(self._chat.texts(prompt, completion))
        # A template contains the tokens that the tokenizer would add.
        prompts = self._encoder.encode_dialogue(
            [before for before, _ in texts], begins=not self._chat.has_template
        )
        completions = self._encoder.encode_dialogue([text for _, text in texts], begins=False)
        for (_, text), ids in zip(texts, completions, strict=True):
            if not text.rstrip().endswith(self._end_token):
                ids.append(self._end)
        parts = []
        for prompt_ids, ids in zip(prompts, completions, strict=True):
            tokens = np.array(prompt_ids + ids, dtype=np.int32)
            marks = np.zeros(len(tokens), dtype=np.uint8)
            marks[: len(prompt_ids)] = UNTRAINED
            marks[:1] |= BEGINS
            parts.append((tokens, marks))
        return joined(parts)

    def document_hashes(self, documents: Integers) -> npt.NDArray[np.uint64]:
        """The corpus's ids if it has them, else computed from prompt and completion."""
        if self._ids is not None:
            return self._ids.take(documents)
        hashes = (self._hash(document) for document in documents.tolist())
        return np.fromiter(hashes, dtype=np.uint64, count=len(documents))

    def _hash(self, document: int) -> int:
        return prompt_hash(
            bytes(self._prompts.data(document)), bytes(self._completions.data(document))
        )
