"""The seam between the training loop and what computes.

The height is the one at which neuronx-distributed itself cuts: whole forward-backward passes
and whole optimizer steps, so that a pipeline schedule or a sharded optimizer stays inside.
The training loop and the checkpoints know this file and never a backend's name.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from slurmllm.config.resolve import RunConfig
from slurmllm.errors import ConfigError
from slurmllm.plan.mesh import Mesh

if TYPE_CHECKING:
    from torch import nn

ModelFactory = Callable[[], "nn.Module"]


@dataclass(frozen=True)
class Worker:
    """Who this process is among the workers, as its launcher told it (torchrun's variables)."""

    rank: int
    world_size: int
    local_rank: int
    node: str


@dataclass(frozen=True)
class MicroBatch:
    """Sequences of one forward pass.

    Attributes:
        tokens: int64 [micro_batch, seq], what the model reads.
        labels: int64 [micro_batch, seq], what it is to predict: the tokens moved by one.
    """

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]


class Backend(ABC):
    """One worker's share of the computation.

    The verbs are called in this order: start, build, build_optimizer, (load_shards), then
    forward_backward and optimizer_step for each step with save_shards in between, then stop.
    Every worker calls every verb; those with communication in them are marked collective.
    """

    def __init__(self, config: RunConfig, mesh: Mesh, worker: Worker) -> None:
        self.config = config
        self.mesh = mesh
        self.worker = worker

    @abstractmethod
    def start(self) -> None:
        """Open process groups and the device mesh (collective)."""

    @abstractmethod
    def build(self, model_factory: ModelFactory) -> None:
        """Build this worker's shard of the model; weights depend on the seed alone (collective)."""

    @abstractmethod
    def build_optimizer(self) -> None:
        """Build this worker's share of the optimizer from `config.recipe.optim`."""

    @abstractmethod
    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Accumulate the gradients of one step (collective).

        Returns:
            The mean loss over the tokens of the global batch, in nats, equal on all workers.
        """

    @abstractmethod
    def optimizer_step(self, lr: float) -> float:
        """Clip, update, clear the gradients (collective).

        Returns:
            The 2-norm of the gradient over all parameters before clipping.
        """

    @abstractmethod
    def param_norm(self) -> float:
        """The 2-norm over all parameters (collective)."""

    @abstractmethod
    def save_shards(self, directory: Path) -> list[str]:
        """Write model, optimizer and random state into an existing folder (collective).

        Returns:
            Names of the files that this worker wrote, on disk for good (fsync).

        Raises:
            StorageError: on all workers, where the file system refused one of them.
        """

    @abstractmethod
    def load_shards(self, directory: Path) -> None:
        """Read back what `save_shards` wrote, on the same mesh or another one (collective)."""

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Every worker's small picklable value, by rank, on all workers (collective).

        Runs over the host's network and never waits for the device.
        """

    @abstractmethod
    def graph_cache_counts(self) -> tuple[int, int]:
        """Compiled graphs found in the cache and graphs that had to be compiled, so far."""

    @abstractmethod
    def stop(self) -> None:
        """Close the process groups."""


def load_backend(name: str) -> type[Backend]:
    """The runtime class of a backend, imported now.

    Raises:
        ConfigError: this installation lacks what the backend needs.
    """
    try:
        module = importlib.import_module(f"slurmllm.backends.{name}.runtime")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"backend {name!r} cannot be loaded here: {error}; "
            "install what it needs, or set backend=native"
        ) from error
    backend: type[Backend] = module.BACKEND
    return backend
