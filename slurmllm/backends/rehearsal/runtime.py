"""The rehearsal backend's worker: all the verbs, and figures that only depend on what was read."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmllm.backends.base import (
    Backend,
    Memory,
    MicroBatch,
    ModelFactory,
    Saving,
    WeightReader,
)
from slurmllm.backends.host_memory import host_memory
from slurmllm.backends.rehearsal.environment import unsupported
from slurmllm.backends.rehearsal.network import Star
from slurmllm.backends.rehearsal.state import State, batch_digest, fraction, mix, total, write
from slurmllm.errors import ConfigError

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

    def save_shards(self, directory: Path) -> Saving:
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


class _Writing(Saving):
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
