"""The rehearsal backend's worker: losses and norms that depend on the batches read and the state.

The state is a vector of 64-bit numbers, a `.npy` file for each shard. A step mixes a digest of the
global batch and the learning rate into every number. Sums are modulo 2^64, in any order.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slurmllm.core.errors import ConfigError, StorageError
from slurmllm.core.run.host_memory import Memory, host_memory
from slurmllm.train.backends.base import Backend, MicroBatch
from slurmllm.train.backends.environment import RehearsalEnvironment
from slurmllm.train.checkpoint.shards import ShardWrite, WeightReader

STEP_S = "SLURMLLM_REHEARSAL_STEP_S"  # shortest duration of a step, s
BYTES = "SLURMLLM_REHEARSAL_BYTES"  # of the state, all workers together

_MODULUS = 2**64
_FACTOR = np.uint64(6364136223846793005)  # Knuth's MMIX generator: odd, so that no bits are lost
_STRIDE = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, as in SplitMix64
_SHARDS = "state_*_of_*.npy"


class RehearsalBackend(Backend):
    """A worker that computes nothing."""

    state: State
    _batch = 0

    def start(self) -> None:
        if faults := RehearsalEnvironment.unsupported(self.config):
            raise ConfigError("the rehearsal backend cannot run this recipe", faults)
        self._step_s = _read_setting(STEP_S, 0.02)

    def build(self) -> None:
        worker = self.worker
        seed = self.config.recipe.train.seed
        length = max(int(_read_setting(BYTES, 2**20)) // 8, worker.world_size)
        self.state = State(length, worker.rank, worker.world_size, seed)

    def fill_weights(self, read: WeightReader) -> None:
        raise ConfigError("the rehearsal backend has no weights")  # `start` refuses it first

    def forward_backward(self, micro_batches: Sequence[MicroBatch], num_targets: int) -> float:
        """Return a number between 2 and 3 that depends on the global batch and the state."""
        self._batch = self._digest(micro_batches, num_targets)
        return 2.0 + fraction(self._batch)

    def evaluate(self, micro_batches: Sequence[MicroBatch], num_targets: int) -> float:
        """Return a number between 2 and 3 that depends on the sequences and the state."""
        return 2.0 + fraction(self._digest(micro_batches, num_targets))

    def _digest(self, micro_batches: Sequence[MicroBatch], num_targets: int) -> int:
        begun = self.mark()
        time.sleep(self._step_s)
        self.forward_marks = [(begun, self.mark())]
        # All workers of a replica read the same: only the first of them counts.
        rank = self.worker.rank
        mesh = self.mesh
        first = rank % mesh.tensor == 0 and mesh.pipeline_rank(rank) == 0
        worker_digest = batch_digest(micro_batches) if first else 0
        sums = self.control.all_reduce((worker_digest, self.state.digest()), "sum")
        batch, state = (total % _MODULUS for total in sums)
        return mix(batch, state, num_targets)

    def optimizer_step(self, lr: float) -> float:
        """Update the state; return a number between 0.5 and 1 that depends on the batch."""
        self.state.update(self._batch, lr)
        return 0.5 + fraction(self._batch, 1) / 2

    def param_norm(self) -> float:
        return 10.0 + fraction(self._batch, 2)

    def save_shards(self, directory: Path) -> ShardWrite:
        return _ShardFile(directory / self.state.file_name, self.state.numbers)

    def load_shards(self, directory: Path) -> None:
        self.state.load(directory)

    def graph_cache_counts(self) -> tuple[int, int]:
        return 0, 0

    def memory(self) -> Memory:
        return host_memory(self.worker.sharing)

    def stop(self) -> None:
        pass  # the control plane is the job's


class State:
    """One worker's shard of the state, whose `length` is that of all workers.

    Attributes:
        numbers: uint64; every step makes a new array, so that a save may keep the old one.
    """

    def __init__(self, length: int, rank: int, world_size: int, seed: int) -> None:
        self._length = length
        self._first, self._last = _shard_bounds(length, rank, world_size)
        self._places = np.arange(self._first, self._last, dtype=np.uint64) * _STRIDE
        self.numbers = (self._places ^ np.uint64(mix(seed))) * _FACTOR
        self.file_name = f"state_{rank:05d}_of_{world_size:05d}.npy"

    def digest(self) -> int:
        """Return the sum of this shard; those of all shards add up to the state's digest."""
        return int(self.numbers.sum())

    def update(self, batch: int, lr: float) -> None:
        mixed = np.uint64(mix(batch, *struct.unpack("<Q", struct.pack("<d", lr))))
        self.numbers = self.numbers * _FACTOR + (self._places ^ mixed)

    def load(self, directory: Path) -> None:
        """Load this shard from the files of any number of workers; StorageError if unusable."""
        paths = sorted(directory.glob(_SHARDS))
        if not paths or not paths[-1].stem.endswith(f"_of_{len(paths):05d}"):
            raise StorageError(
                f"{directory} has {len(paths)} shards of a rehearsed state, not all of them: "
                "another backend wrote it, or files are missing; set `backend` to the one that did"
            )
        parts = []
        for index, path in enumerate(paths):
            begin, end = _shard_bounds(self._length, index, len(paths))
            first = max(begin, self._first)
            last = min(end, self._last)
            if first >= last:
                continue
            try:
                numbers: npt.NDArray[np.uint64] = np.load(path, mmap_mode="r")
            except (OSError, ValueError) as error:
                raise StorageError(f"{path} cannot be read: {error}") from error
            if numbers.shape != (end - begin,):
                raise StorageError(
                    f"{path} has {numbers.size} numbers instead of {end - begin}: "
                    "SLURMLLM_REHEARSAL_BYTES had another value; restore it"
                )
            parts.append(numbers[first - begin : last - begin])
        self.numbers = np.concatenate(parts)


def _shard_bounds(length: int, rank: int, world_size: int) -> tuple[int, int]:
    return length * rank // world_size, length * (rank + 1) // world_size


@dataclass(eq=False)
class _ShardFile(ShardWrite):
    """A shard that `wait` writes, in the thread of the save."""

    path: Path
    numbers: npt.NDArray[np.uint64]

    def wait(self) -> list[str]:
        with self.path.open("wb") as stream:
            np.save(stream, self.numbers)
            stream.flush()
            os.fsync(stream.fileno())
        return [self.path.name]

    def finish(self) -> list[str]:
        return []


def mix(*values: int) -> int:  # a 64-bit digest
    digits = ",".join(map(str, values)).encode()
    return int.from_bytes(hashlib.blake2b(digits, digest_size=8).digest(), "little")


def fraction(*values: int) -> float:
    return mix(*values) / _MODULUS


def batch_digest(micro_batches: Sequence[MicroBatch]) -> int:
    digest = 0
    for batch in micro_batches:
        factors = np.arange(1, batch.tokens.shape[1] + 1, dtype=np.uint64) * _STRIDE | np.uint64(1)
        for tensor in (batch.tokens, batch.labels, batch.positions):
            if tensor is not None:
                rows = (tensor.astype(np.uint64) * factors).sum(axis=1)
                digest = (digest + int((rows * rows * _FACTOR + rows).sum())) % _MODULUS
                factors = factors * _FACTOR
    return digest


def _read_setting(name: str, default: float) -> float:
    digits = os.environ.get(name) or default
    try:
        value = float(digits)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise ConfigError(
            "the rehearsal backend cannot start",
            [f"env.{name}: {digits!r} is not a number of 0 or more, such as {default:g}"],
        )
    return value


BACKEND = RehearsalBackend
