"""The 64 bits by which a document is known: its `id` in a corpus, and its place in a split.

They depend on the content alone, so the same document has the same id in every corpus, on every
machine and in every version.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import xxhash

from slurmllm.errors import StorageError

_LOW_64 = (1 << 64) - 1


def document_hash(text: bytes | memoryview) -> int:
    """Id of a document: the low 64 bits of the xxh3-128 of its text's UTF-8 bytes."""
    return xxhash.xxh3_128_intdigest(text) & _LOW_64


def prompt_hash(prompt: bytes, completion: bytes) -> int:
    """Id of a prompt with its completion, both as UTF-8 bytes.

    The prompt's length goes first (8 bytes, little endian), for the cut between the two counts.
    """
    return document_hash(b"".join((len(prompt).to_bytes(8, "little"), prompt, completion)))


# Read to the end in some hundredths of a second.
_WHOLE_BYTES = 32 << 20
_SAMPLES = 64
_SAMPLE_BYTES = 4096


def fingerprint(paths: Sequence[Path], *identity: str) -> str:
    """Short hex digest of files: sizes, and all of a small file or evenly spaced samples.

    It tells another file at once, and a file that was rewritten or cut; bytes of a large file
    changed between two samples it does not see. (Where a corpus has hashes of its documents, each
    is compared when it is read.)

    Args:
        paths: The files of a corpus, in a fixed order.
        identity: What else tells it from another, such as the kind.

    Raises:
        StorageError: a file cannot be read.
    """
    digest = hashlib.sha256("\0".join(identity).encode())
    for path in paths:
        try:
            with path.open("rb", buffering=0) as stream:
                size = os.fstat(stream.fileno()).st_size
                digest.update(size.to_bytes(8, "little"))
                if size <= _WHOLE_BYTES:
                    digest.update(xxhash.xxh3_128_digest(stream.read()))
                    continue
                last = size - _SAMPLE_BYTES
                for offset in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
                    digest.update(os.pread(stream.fileno(), _SAMPLE_BYTES, offset))
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    return digest.hexdigest()[:16]
