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
from typing import TYPE_CHECKING, Any, SupportsFloat

import numpy as np
import numpy.typing as npt

from slurmllm.checkpoint.shards import ShardWrite, WeightReader
from slurmllm.config.resolve import RunConfig
from slurmllm.errors import ConfigError
from slurmllm.host_memory import Memory
from slurmllm.model import IGNORED as IGNORED
from slurmllm.plan.mesh import Mesh

if TYPE_CHECKING:
    from torch import nn

ModelFactory = Callable[[], "nn.Module"]


@dataclass(frozen=True)
class Worker:
    """Who this process is among the workers, as its launcher told it (torchrun's variables).

    Attributes:
        sharing: Workers that share this one's machine, itself included: the node's, and with
            --local those of all nodes.
    """

    rank: int
    world_size: int
    local_rank: int
    node: str
    sharing: int = 1


@dataclass(frozen=True)
class MicroBatch:
    """Sequences of one forward pass.

    Attributes:
        tokens: int64 [micro_batch, seq], what the model reads.
        labels: int64 [micro_batch, seq], what it is to predict: the tokens moved by one; IGNORED
            where nothing is learnt.
        positions: int64 [micro_batch, seq], each token's place in its document, counted from the
            sequence's begin for the document that the sequence begins in. Attention stays within
            documents. None: documents do not matter.
    """

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64] | None = None


def loss_weight(micro_batches: Sequence[MicroBatch], counted: int, data: int) -> float:
    """Turns a mean in which IGNORED labels count as 0 into the mean over those that count.

    The same for all micro batches and workers. So the mean is that of the global batch however its
    labels are spread, and every part of it may divide by the number of all its labels.

    Args:
        micro_batches: A worker's, of one step.
        counted: Labels of the global batch that are not IGNORED.
        data: Data-parallel degree.

    Returns:
        All labels of the global batch over those that count: exactly 1 where all do.
    """
    return sum(m.labels.size for m in micro_batches) * data / max(counted, 1)


class Backend(ABC):
    """One worker's share of the computation.

    The verbs are called in this order: start, build, build_optimizer, (load_shards), then
    forward_backward and optimizer_step for each step with save_shards in between, then stop.
    Every worker calls every verb; those with communication in them are marked collective.
    """

    # Whether a step's figures are better read when the next step is under way: before that,
    # reading makes the device wait for the host.
    deferred_metrics: bool = False

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
    def fill_weights(self, read: WeightReader) -> None:
        """Set the weights of this worker's shard, before the first step.

        Args:
            read: Is asked for no more than this worker's share of each parameter.
        """

    @abstractmethod
    def forward_backward(self, micro_batches: Sequence[MicroBatch], counted: int) -> SupportsFloat:
        """Accumulate the gradients of one step (collective).

        Args:
            micro_batches: This worker's, equally many and equally large on all workers.
            counted: Labels of the global batch that are not IGNORED.

        Returns:
            The mean loss over these labels, in nats, equal on all workers; 0 where there are none.
            It may not be computed yet: float() waits for it, here and below.
        """

    @abstractmethod
    def optimizer_step(self, lr: float) -> SupportsFloat:
        """Clip, update, clear the gradients (collective).

        Returns:
            The 2-norm of the gradient over all parameters before clipping.
        """

    @abstractmethod
    def param_norm(self) -> SupportsFloat:
        """The 2-norm over all parameters (collective)."""

    @abstractmethod
    def save_shards(self, directory: Path) -> ShardWrite:
        """Begin to write model, optimizer and random state into an existing folder (collective).

        Training may go on when this returns. One save at a time.

        Raises:
            StorageError: on all workers, where the file system refused one of them.
        """

    @abstractmethod
    def load_shards(self, directory: Path) -> None:
        """Read back what `save_shards` wrote, on the same mesh or another one (collective)."""

    def precompile_resume(self) -> None:  # noqa: B027  most have no graphs of it
        """Let the precompile stage meet the graphs of a resume, after its steps (collective)."""

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Every worker's small picklable value, by rank, on all workers (collective).

        Runs over the host's network and never waits for the device.
        """

    @abstractmethod
    def graph_cache_counts(self) -> tuple[int, int]:
        """Compiled graphs found in the cache and graphs that had to be compiled, so far."""

    def change_batch(self, mesh: Mesh) -> None:
        """Go on with another micro batch or accumulation (collective).

        Args:
            mesh: Of the same degrees.
        """
        self.mesh = mesh

    @abstractmethod
    def memory(self) -> Memory:
        """What this worker used at most since the last call, and what it may use.

        After a second call at once the peak is what it uses now.
        """

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
