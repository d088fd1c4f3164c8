"""What saving and resuming need of a backend: shards written in parts, and workers that agree.

`backends.base` builds on these types; nothing in `checkpoint` imports a backend. No torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slurmllm.core.config.resolve import RunConfig
from slurmllm.train.control.plane import ControlPlane
from slurmllm.train.model.regions import Region

if TYPE_CHECKING:
    from torch import Tensor

# Name of a parameter and a region of the whole parameter → its values.
WeightReader = Callable[[str, Region], "Tensor"]


def leaves(tree: Mapping[Any, Any], keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Yield the values of nested dicts, each after the tuple of keys that lead to it."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*keys, key))
        else:
            yield (*keys, key), value


class ShardWrite(ABC):
    """One worker's write of its shards, possibly in the background."""

    waited_s: float = 0.0  # time that training waited for this write within steps, in seconds

    @abstractmethod
    def wait(self) -> list[str]:
        """Wait, in any thread, until this worker's shards are durable; return its file names."""

    @abstractmethod
    def finish(self) -> list[str]:
        """Complete the write after all workers' `wait` (collective); return more file names."""

    def sha256(self, name: str) -> str | None:
        """Return the checksum of a file if it was computed during the write, else None."""
        return None

    def abandon(self) -> None:  # noqa: B027  most have nothing to release
        """Give up the write because it failed on one of the workers."""


@dataclass(frozen=True)
class Worker:
    """This process among the workers of an attempt, from the launcher's variables (torchrun's)."""

    rank: int
    world_size: int
    local_rank: int
    node: str
    sharing: int = 1  # workers on this machine: the node's, with --local those of all nodes


class ShardBackend(Protocol):
    """The part of a backend that saving uses (see `backends.base.Backend`)."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def worker(self) -> Worker: ...
    @property
    def control(self) -> ControlPlane: ...

    def save_shards(self, directory: Path) -> ShardWrite:
        """Begin to write this worker's shards into an existing folder (collective)."""
        ...
