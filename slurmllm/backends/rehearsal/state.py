"""The state of a rehearsed model: numbers that remember all they were trained on.

It is one vector of 64-bit numbers, cut into equal shares as ZeRO-3 does, a `.npy` file a share. A
step mixes a digest of the global batch and the learning rate into every number, so that their sum,
the state's digest, differs after any other history.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slurmllm.backends.base import MicroBatch
from slurmllm.errors import StorageError

_FACTOR = np.uint64(6364136223846793005)  # Knuth's MMIX generator: odd, so that nothing is lost
_STRIDE = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, as in SplitMix64
_SHARES = "state_*_of_*.npy"


class State:
    """One worker's share.

    Args:
        length: Numbers of all workers.
        rank: This worker's.
        world_size: Workers.
        seed: Of the run.

    Attributes:
        numbers: uint64; every step makes new ones, so that a save may keep the old.
    """

    def __init__(self, length: int, rank: int, world_size: int, seed: int) -> None:
        self._length = length
        self._first, self._last = _share(length, rank, world_size)
        self._places = np.arange(self._first, self._last, dtype=np.uint64) * _STRIDE
        self.numbers = (self._places ^ np.uint64(mix(seed))) * _FACTOR
        self.file_name = f"state_{rank:05d}_of_{world_size:05d}.npy"

    def digest(self) -> int:
        """The sum of this share, modulo 2^64: those of all shares add up to the state's."""
        return int(self.numbers.sum())

    def update(self, batch: int, lr: float) -> None:
        """One optimizer step."""
        mixed = np.uint64(mix(batch, *struct.unpack("<Q", struct.pack("<d", lr))))
        self.numbers = self.numbers * _FACTOR + (self._places ^ mixed)

    def load(self, directory: Path) -> None:
        """Read this share from the files of as many workers as there were then.

        Raises:
            StorageError: they are not all there, or another backend's.
        """
        paths = sorted(directory.glob(_SHARES))
        if not paths or not paths[-1].stem.endswith(f"_of_{len(paths):05d}"):
            raise StorageError(
                f"{directory} has {len(paths)} shares of a rehearsed state, which are not all: "
                "another backend wrote it, or files are missing; set `backend` to the one that did"
            )
        parts = []
        for index, path in enumerate(paths):
            begin, end = _share(self._length, index, len(paths))
            first, last = max(begin, self._first), min(end, self._last)
            if first < last:
                parts.append(_numbers(path, end - begin)[first - begin : last - begin])
        self.numbers = np.concatenate(parts)


def write(path: Path, numbers: npt.NDArray[np.uint64]) -> None:
    """Write a share, durably.

    Raises:
        OSError: the file system refuses.
    """
    with path.open("wb") as stream:
        np.save(stream, numbers)
        stream.flush()
        os.fsync(stream.fileno())


def _numbers(path: Path, length: int) -> npt.NDArray[np.uint64]:
    try:
        found: npt.NDArray[np.uint64] = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
    if found.shape != (length,):
        raise StorageError(
            f"{path} holds {found.size} numbers and not {length}: "
            "SLURMLLM_REHEARSAL_BYTES was another; set it back"
        )
    return found


def _share(length: int, rank: int, world_size: int) -> tuple[int, int]:
    return length * rank // world_size, length * (rank + 1) // world_size


def mix(*values: int) -> int:
    """A 64-bit digest of numbers."""
    words = ",".join(map(str, values)).encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def fraction(*values: int) -> float:
    """A number in [0, 1) that depends on all of `values`."""
    return mix(*values) / 2**64


def total(parts: Iterable[int]) -> int:
    """A sum modulo 2^64, the same whatever the order."""
    return sum(parts) % 2**64


def batch_digest(micro_batches: Sequence[MicroBatch]) -> int:
    """Of what a worker reads in a step: each sequence's content and its order, modulo 2^64."""
    found = 0
    for batch in micro_batches:
        factors = np.arange(1, batch.tokens.shape[1] + 1, dtype=np.uint64) * _STRIDE | np.uint64(1)
        for part in (batch.tokens, batch.labels, batch.positions):
            if part is not None:
                rows = (part.astype(np.uint64) * factors).sum(axis=1)
                found = total((found, int((rows * rows * _FACTOR + rows).sum())))
                factors = factors * _FACTOR
    return found
