"""The 64 bits by which a document is known: its `id` in a corpus, and its place in a split.

They depend on the content alone, so the same document has the same id in every corpus, on every
machine and in every version.
"""

from __future__ import annotations

import xxhash

_LOW_64 = (1 << 64) - 1


def document_hash(text: bytes | memoryview) -> int:
    """Id of a document: the low 64 bits of the xxh3-128 of its text's UTF-8 bytes."""
    return xxhash.xxh3_128_intdigest(text) & _LOW_64


def prompt_hash(prompt: bytes, completion: bytes) -> int:
    """Id of a prompt with its completion, both as UTF-8 bytes.

    The prompt's length goes first (8 bytes, little endian), for the cut between the two counts.
    """
    return document_hash(b"".join((len(prompt).to_bytes(8, "little"), prompt, completion)))
