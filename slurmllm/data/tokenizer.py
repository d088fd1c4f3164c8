"""Tokenizers: training one, and text → token ids for packing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from slurmllm.core.errors import DataError
from slurmllm.core.format import Json
from slurmllm.core.run.rundir import storage_errors
from slurmllm.core.run.safe_files import read_limited
from slurmllm.data.sources.base import Tokens, short_digest
from slurmllm.data.tokenizer_limits import require_bounded

END_OF_DOCUMENT = "<|endoftext|>"
# In this order: GPT-2, GPT-NeoX, Pythia; then Llama.
_END_OF_DOCUMENT_TOKENS = (END_OF_DOCUMENT, "</s>")
# Real text has more distinct words than the library's default cache of 10,000. This takes some
# 20 MB per process.
_CACHED_WORDS = 1 << 17
# 256 bytes and the end-of-document token: no byte-level tokenizer can be smaller.
MIN_VOCAB_SIZE = 257
# Pre-tokenizers of Llama 3 (GPT-4) and Qwen 2; GPT-2's is the library's ByteLevel.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORD_PATTERNS = (_WORDS, _WORDS.replace("{1,3}", ""))
_LOCAL_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD")
# Of BPE and of Unigram: they draw another segmentation at each call.
_RANDOM = ("dropout", "alpha", "nbest_size")
_LARGEST = 1 << 28  # bytes of a tokenizer.json; that of a vocabulary of 256,000 has 35 MB


class TokenEncoder:
    """Text → token ids.

    A document's ids are only those of its text: truncation, padding, added tokens and random
    segmentation of tokenizer.json are off. Special tokens spelled out in the text are encoded as
    ordinary text, so that no document can forge the end of a document.

    Attributes:
        end_of_document: Id of the token that ends a document: `<|endoftext|>` or `</s>`, else the
            `eos_token` of a tokenizer_config.json in the same folder.
        fingerprint: Hex digest of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        tokenizer, data = read_tokenizer(path)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        for name in _RANDOM:
            if getattr(tokenizer.model, name, None) is not None:
                setattr(tokenizer.model, name, None)
        if hasattr(tokenizer.model, "_resize_cache"):
            tokenizer.model._resize_cache(_CACHED_WORDS)
        self._tokenizer = tokenizer
        configured = special_tokens(path).get("eos_token")
        for end in (*_END_OF_DOCUMENT_TOKENS, *([configured] if configured else [])):
            if (token_id := self.token_id(end)) is not None:
                break
        else:
            raise DataError(
                f"tokenizer {path} has no end-of-document token: neither "
                f"{' nor '.join(_END_OF_DOCUMENT_TOKENS)} is in its vocabulary, nor an eos_token "
                "of a tokenizer_config.json next to it; put that file next to a tokenizer.json, "
                "add one of the two to added_tokens, or train one with `slurmllm tokenizer train`"
            )
        self.end_of_document: int = token_id
        # Only an eos token that the file itself does not determine is part of the fingerprint.
        data += b"" if end in _END_OF_DOCUMENT_TOKENS else end.encode()
        self.fingerprint = short_digest(data)

    @cached_property
    def splits_words(self) -> bool:
        """Whether it is known where the tokenizer splits texts: between words and lines.

        Not known of Llama 2's, which puts a space before a text, and of all kinds that are not
        listed here: their documents must be encoded as a whole.
        """
        splits = False
        for step in _steps(self._tokenizer.pre_tokenizer, "pretokenizers"):
            if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
                splits = splits or step["use_regex"]
            elif (step["type"], step.get("behavior"), step.get("invert")) == (
                "Split",
                "Isolated",
                False,
            ) and step["pattern"].get("Regex") in _WORD_PATTERNS:
                splits = True
            else:
                return False
        for step in _steps(self._tokenizer.normalizer, "normalizers"):
            if step["type"] not in _LOCAL_NORMALIZERS:
                return False
        for token in self._tokenizer.get_added_tokens_decoder().values():
            # It may take what is on both sides of a cut; special ones are ordinary characters.
            spans_words = re.search(r"[^ ] |\n|[，。]", token.content)
            if not token.special and (token.lstrip or token.rstrip or spans_words):
                return False
        return splits

    @property
    def num_ids(self) -> int:
        """Largest id + 1: the smallest vocabulary of a model; ids may have gaps."""
        return count_ids(self._tokenizer)

    def encode(self, document: str) -> Tokens:
        """Return the token ids of a document and its end-of-document token, int32."""
        (ids,) = self.encode_batch([document])
        return np.array([*ids, self.end_of_document], np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts, without end-of-document tokens."""
        return self._encode(texts, add_special_tokens=False)

    def encode_as_generation(self, texts: Sequence[str], *, begins: bool) -> list[list[int]]:
        """Return the token ids of texts as a program that generates text encodes them.

        Special tokens spelled out are special; with `begins`, the tokenizer adds its tokens around
        a text, such as Llama's `<s>`.
        """
        # CAUTION: state of the tokenizer, so a TokenEncoder must not be used by several threads.
        self._tokenizer.encode_special_tokens = False
        try:
            return self._encode(texts, add_special_tokens=begins)
        finally:
            self._tokenizer.encode_special_tokens = True

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        # The fast variant computes no character offsets: 1.18 times the tokens/s of encode().
        with _library_errors(self.path, "encodes no text"):
            encodings = self._tokenizer.encode_batch_fast(
                texts, add_special_tokens=add_special_tokens
            )
        return [encoding.ids for encoding in encodings]

    def token_id(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def decode(self, ids: npt.NDArray[np.integer]) -> str:
        """Return the text of token ids, the end-of-document tokens included."""
        with _library_errors(self.path, "decodes no token ids"):
            return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def _steps(component: Any, field: str) -> list[Json]:
    """Return the parts of a normalizer or pre-tokenizer, as tokenizer.json has them."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    return state[field] if state["type"] == "Sequence" else [state]


def _byte_level(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def tokenizer_of_vocabulary(vocab: Path, merges: Path) -> str:
    """Return the tokenizer.json of GPT-2's two vocabulary files; DataError if they are others."""
    with _library_errors(vocab, f"and {merges.name} are not GPT-2's vocabulary files"):
        tokenizer = _byte_level(models.BPE.from_file(str(vocab), str(merges)))
        tokenizer.add_special_tokens([END_OF_DOCUMENT])
        return str(tokenizer.to_str())


def read_tokenizer(path: Path) -> tuple[Tokenizer, bytes]:
    """Read a tokenizer.json and its bytes; DataError if it is unreadable or holds no tokens."""
    fix = "name a tokenizer.json, or make one with `slurmllm tokenizer train`"
    with storage_errors(f"cannot read tokenizer {path}", fix, DataError):
        data = read_limited(path, _LARGEST)
    with _library_errors(path, "is refused"):
        require_bounded(data)
    with _library_errors(path, "is not a tokenizer.json of the tokenizers library"):
        tokenizer = Tokenizer.from_buffer(data)
        if not tokenizer.get_vocab_size(with_added_tokens=True):
            raise ValueError("it has no tokens")
    return tokenizer, data


@contextmanager
def _library_errors(path: Path, action: str) -> Iterator[None]:
    """Raise errors of the library, which is written in Rust, as DataError."""
    try:
        yield
    except BaseException as error:
        # The library raises plain Exception; a panic of Rust's is a BaseException.
        is_other = isinstance(error, MemoryError) or not isinstance(error, Exception)
        if is_other and type(error).__name__ != "PanicException":
            raise
        raise DataError(
            f"{path} {action}: {error}; name another one, or make one with "
            "`slurmllm tokenizer train`"
        ) from error


def special_tokens(tokenizer: Path) -> dict[str, str]:
    """Return the fields `…_token` of the tokenizer_config.json next to a tokenizer.json."""
    path = tokenizer.with_name("tokenizer_config.json")
    if tokenizer.name != "tokenizer.json" or not path.is_file():
        return {}
    tokens = {}
    for name, token in read_settings(path).items():
        if isinstance(token, dict):
            token = token.get("content")
        if name.endswith("_token") and isinstance(token, str):
            tokens[name] = token
    return tokens


def read_settings(path: Path) -> Json:
    """Read a JSON file that transformers keeps next to a tokenizer.json; DataError if damaged."""
    try:
        settings = json.loads(read_limited(path))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is not readable JSON: {error}; fix it or remove it") from error
    if not isinstance(settings, dict):
        raise DataError(f"{path} is not a JSON object; fix it or remove it")
    return settings


def count_ids(tokenizer: Tokenizer) -> int:
    return int(max(tokenizer.get_vocab(with_added_tokens=True).values())) + 1


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> str:
    """Train a byte-level BPE tokenizer and return its tokenizer.json; equal texts, equal bytes.

    `vocab_size` includes 256 bytes and the end-of-document token (id 0). Short texts yield fewer
    entries: merging ends when no pair of tokens is left.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise DataError(
            f"a vocabulary of {vocab_size} cannot hold the 256 bytes and {END_OF_DOCUMENT}; "
            f"--vocab-size must be at least {MIN_VOCAB_SIZE}"
        )
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str(pretty=True)) + "\n"
