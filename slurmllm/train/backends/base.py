"""The interface between the training loop and the backends.

Its operations are whole forward-backward passes and whole optimizer steps, as in
neuronx-distributed, so that a pipeline schedule or a sharded optimizer stays inside a backend. The
training loop and the checkpoints use this interface and never a backend's name.
"""

from __future__ import annotations

import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

import numpy as np
import numpy.typing as npt

from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import ConfigError
from slurmllm.core.run.host_memory import Memory
from slurmllm.plan.mesh import Mesh
from slurmllm.train.checkpoint.shards import ShardWrite, WeightReader
from slurmllm.train.checkpoint.shards import Worker as Worker
from slurmllm.train.control.plane import ControlPlane
from slurmllm.train.model import IGNORED as IGNORED

if TYPE_CHECKING:
    from torch import nn

    from slurmllm.train.backends.native.device import Device


@dataclass(frozen=True)
class MicroBatch:
    """Sequences of one forward pass; all arrays are [micro_batch, seq]."""

    tokens: npt.NDArray[np.int64]  # the input
    # The tokens shifted by one; IGNORED for those that are no targets.
    labels: npt.NDArray[np.int64]
    # The position of each token in its document, in the first one from the start of the sequence.
    # Attention stays within documents. None: documents are not separated.
    positions: npt.NDArray[np.int64] | None = None


def loss_weight(micro_batches: Sequence[MicroBatch], num_targets: int, data: int) -> float:
    """Return the factor from a mean over all labels, IGNORED ones as 0, to the mean over targets.

    It is the same for all micro batches and workers, however the targets are distributed, and
    exactly 1 without IGNORED labels. `num_targets` counts the targets of the global batch.
    """
    return sum(m.labels.size for m in micro_batches) * data / max(num_targets, 1)


class ReadMark:
    """A point in time on a device without a clock: when the host has read its results."""

    _last_read = 0.0  # time.perf_counter()

    def __init__(self) -> None:
        self._made = time.perf_counter()

    def __sub__(self, earlier: ReadMark) -> float:
        # What was enqueued before an earlier result was read has begun no earlier than that.
        begun = max(earlier._made, self._last_read)
        ReadMark._last_read = time.perf_counter()
        return ReadMark._last_read - begun


_NOT_PROFILED = nullcontext()


class Backend(ABC):
    """One worker's share of the computation.

    Every worker makes every call; calls with communication are marked collective. Their order:
    start, build, (load_shards), steps of forward_backward and optimizer_step, stop.
    """

    # Whether the metrics of a step are read while the next step runs: reading them earlier would
    # make the host wait for the device.
    deferred_metrics: bool = False

    # What this worker computes on, for the profiler; None: the CPUs.
    worker_device: Device | None = None

    def mark(self) -> Any:
        """Return the point in time at which the work enqueued so far is done.

        `later - earlier` is the time between two of them in seconds, by the device's clock if it
        has one. It waits for the later one.
        """
        return ReadMark() if self.deferred_metrics else time.perf_counter()

    # Marks of the begin and end of forward passes in the last step that wait for no other worker;
    # empty if not measured.
    forward_marks: Sequence[tuple[Any, Any]] = ()

    # A context that annotates a part of a step, such as `forward`; the profiler's own while a step
    # is profiled, else one that does nothing.
    part: Callable[[str], AbstractContextManager[object]] = staticmethod(lambda _: _NOT_PROFILED)

    def annotated(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose calls are annotated as a part of the step."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return call

    def __init__(
        self, config: RunConfig, mesh: Mesh, worker: Worker, control: ControlPlane | None = None
    ) -> None:
        self.config = config
        self.mesh = mesh
        self.worker = worker
        # Over the host's network: its messages never wait for the device.
        self.control = control or ControlPlane()
        assert self.control.world_size == worker.world_size, "one control plane for all workers"

    @abstractmethod
    def start(self) -> None:
        """Open process groups and the device mesh (collective)."""

    @abstractmethod
    def build(self) -> None:
        """Build this worker's shards of the recipe's model and optimizer (collective).

        Weights depend on the seed, not on the mesh.
        """

    @abstractmethod
    def fill_weights(self, read: WeightReader) -> None:
        """Set the weights of this worker's shard before the first step, the only part it reads."""

    @abstractmethod
    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], num_targets: int
    ) -> SupportsFloat:
        """Accumulate the gradients of one step (collective).

        Returns the mean loss over the `num_targets` targets of the global batch, in nats, equal on
        all workers; 0 without targets. As other results it may still be computing: float() waits
        for it.
        """

    @abstractmethod
    def optimizer_step(self, lr: float) -> SupportsFloat:
        """Clip, update weights, clear gradients; returns the norm before clipping (collective)."""

    @abstractmethod
    def evaluate(self, micro_batches: Sequence[MicroBatch], num_targets: int) -> SupportsFloat:
        """Return the mean loss, as `forward_backward`, without gradients (collective).

        Nothing that training depends on changes. In a pipeline there are as many micro batches as
        in a step.
        """

    @abstractmethod
    def param_norm(self) -> SupportsFloat:
        """Return the 2-norm over all parameters (collective)."""

    @abstractmethod
    def save_shards(self, directory: Path) -> ShardWrite:
        """Begin to write model, optimizer and random state into an existing folder (collective).

        Training may continue when this returns. One save at a time. Raises a StorageError on all
        workers if the file system refused one of them.
        """

    @abstractmethod
    def load_shards(self, directory: Path) -> None:
        """Load what `save_shards` wrote, on the same mesh or another one (collective)."""

    def precompile_resume(self) -> None:  # noqa: B027  most backends have no such graphs
        """Compile the graphs of a resume after the precompile stage's steps (collective)."""

    @abstractmethod
    def graph_cache_counts(self) -> tuple[int, int]:
        """Return the numbers of graphs found in the cache and of graphs compiled, so far."""

    def model_of_hooks(self) -> nn.Module:
        """Return this worker's part of the model, for hooks; ConfigError if it has no such form."""
        raise ConfigError(
            f"backend {self.config.backend} gives hooks no access to the model; --set "
            "backend=native, or leave the hook out"
        )

    def change_batch(self, mesh: Mesh) -> None:
        """Continue with another micro batch or accumulation, on the same degrees (collective)."""
        self.mesh = mesh

    @abstractmethod
    def memory(self) -> Memory:
        """Return this worker's peak since the last call, and its limit; resets the peak.

        Called twice in a row, the second peak is the current use.
        """

    @abstractmethod
    def stop(self) -> None:
        """Close the process groups."""


def load_backend(name: str) -> type[Backend]:
    """Import the runtime class of a backend; ConfigError if a package of it is missing."""
    try:
        module = importlib.import_module(f"slurmllm.train.backends.{name}.runtime")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"backend {name!r} cannot be imported: {error}; "
            "install the missing package, or set backend=native"
        ) from error
    backend: type[Backend] = module.BACKEND
    return backend
