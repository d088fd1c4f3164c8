"""Digests of a chunk of documents: 128 bits each, of which the low 64 are a document's id."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from slurmllm.data.build.readers import Documents

Words = npt.NDArray[np.uint64]


def digest(documents: Documents) -> tuple[Words, Words]:
    """High and low half of each document's digest.

    The low half is `document_hash` of a text, and `prompt_hash` of a prompt and its completion.

    Returns:
        uint64 [documents] twice.
    """
    xxh3 = xxhash.xxh3_128_digest
    if len(documents) == 1:
        offsets, values = text_of(documents[0])
        ends = offsets.tolist()
        parts = [xxh3(values[a:b]) for a, b in itertools.pairwise(ends)]
    else:
        spans = []
        for column in documents:
            offsets, values = text_of(column)
            ends = offsets.tolist()
            spans.append([values[a:b] for a, b in itertools.pairwise(ends)])
        parts = [
            xxh3(b"".join((len(prompt).to_bytes(8, "little"), prompt, completion)))
            for prompt, completion in zip(*spans, strict=True)
        ]
    halves = np.frombuffer(b"".join(parts), ">u8").astype(np.uint64).reshape(-1, 2)
    return halves[:, 0].copy(), halves[:, 1].copy()


def text_of(column: pa.LargeStringArray) -> tuple[npt.NDArray[np.int64], memoryview]:
    """Offsets int64 [documents + 1] into the UTF-8 bytes, and the bytes; no copies."""
    if not len(column):
        return np.zeros(1, np.int64), memoryview(b"")
    _, offsets, values = column.buffers()
    begin, end = column.offset, column.offset + len(column) + 1
    return np.frombuffer(offsets, np.int64)[begin:end], memoryview(values or b"")
