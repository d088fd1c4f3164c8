"""The state of a rehearsed model: numbers that remember all they were trained on.

It is one vector of 64-bit numbers, cut into equal shares as ZeRO-3 does, a `.npy` file a share. A
step mixes a digest of the global batch and the learning rate into every number, so that their sum,
the state's digest, differs after any other history.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmllm.backends.base import Backend, MicroBatch, ModelFactory
from slurmllm.backends.rehearsal.environment import unsupported
from slurmllm.backends.rehearsal.network import Star
from slurmllm.checkpoint.shards import ShardWrite, WeightReader
from slurmllm.errors import ConfigError, StorageError
from slurmllm.host_memory import Memory, host_memory

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


STEP_S = "SLURMLLM_REHEARSAL_STEP_S"  # how long a step takes at least, s
BYTES = "SLURMLLM_REHEARSAL_BYTES"  # of the state, all workers together


class RehearsalBackend(Backend):
    """A worker that computes nothing."""

    star: Star
    state: State
    _batch = 0

    def start(self) -> None:
        """Meet the other workers (collective)."""
        if faults := unsupported(self.config):
            raise ConfigError("the rehearsal backend cannot run this recipe", faults)
        self._step_s = _setting(STEP_S, 0.02)
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self.star = Star(self.worker.rank, self.worker.world_size, address)

    def build(self, model_factory: ModelFactory) -> None:
        """Make the state; no model is built."""
        worker, seed = self.worker, self.config.recipe.train.seed
        length = max(int(_setting(BYTES, 2**20)) // 8, worker.world_size)
        self.state = State(length, worker.rank, worker.world_size, seed)

    def build_optimizer(self) -> None:
        """The state is all there is."""

    def fill_weights(self, read: WeightReader) -> None:
        """Refused by `start`."""
        raise ConfigError("the rehearsal backend has no weights to fill")

    def forward_backward(self, micro_batches: Sequence[MicroBatch], counted: int) -> float:
        """Take in what all workers read (collective).

        Returns:
            A figure between 2 and 3 that depends on it and on the state.
        """
        time.sleep(self._step_s)
        # Workers of one replica read the same; the first of them speaks for it.
        rank, mesh = self.worker.rank, self.mesh
        first = rank % mesh.tensor == 0 and mesh.pipeline_rank(rank) == 0
        own = batch_digest(micro_batches) if first else 0
        answers = self.star.gather((own, self.state.digest()))
        batch, state = (total(parts) for parts in zip(*answers, strict=True))
        self._batch = mix(batch, state, counted)
        return 2.0 + fraction(self._batch)

    def optimizer_step(self, lr: float) -> float:
        """Change the state; a figure between 0.5 and 1 that depends on the batch."""
        self.state.update(self._batch, lr)
        return 0.5 + fraction(self._batch, 1) / 2

    def param_norm(self) -> float:
        """A figure between 10 and 11 that depends on the batch."""
        return 10.0 + fraction(self._batch, 2)

    def save_shards(self, directory: Path) -> ShardWrite:
        """Begin to write this worker's share, as it is now."""
        return _Writing(directory / self.state.file_name, self.state.numbers)

    def load_shards(self, directory: Path) -> None:
        """Read this worker's share, written by as many workers or another number."""
        self.state.load(directory)

    def gather(self, value: Any) -> list[Any]:
        """Every worker's small picklable value, by rank, on all workers (collective)."""
        return self.star.gather(value)

    def graph_cache_counts(self) -> tuple[int, int]:
        """There are no graphs."""
        return 0, 0

    def memory(self) -> Memory:
        """What this worker used at most since the last call, and what it may use."""
        return host_memory(self.worker.sharing)

    def stop(self) -> None:
        """Leave the other workers."""
        self.star.close()


class _Writing(ShardWrite):
    """A share that is written by whoever waits for it, in a thread of the save's."""

    def __init__(self, path: Path, numbers: npt.NDArray[np.uint64]) -> None:
        self._path, self._numbers = path, numbers

    def wait(self) -> list[str]:
        """Write the file."""
        write(self._path, self._numbers)
        return [self._path.name]

    def finish(self) -> list[str]:
        """Nothing is left to do."""
        return []


def _setting(name: str, default: float) -> float:
    text = os.environ.get(name) or default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise ConfigError(
            "the rehearsal backend cannot start",
            [f"env.{name}: {text!r} is no number of 0 or more; such as {default:g}"],
        )
    return value


BACKEND = RehearsalBackend
