"""Backends for tests of checkpoints: no torch, several workers in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from train.gang import small_config

from slurmllm.backends.base import Backend, MicroBatch, ModelFactory, Worker
from slurmllm.checkpoint.shards import ShardWrite, WeightReader
from slurmllm.checkpoint.state import TrainState, fingerprint
from slurmllm.host_memory import Memory
from slurmllm.plan.mesh import make_mesh

T = TypeVar("T")
CONFIG = small_config("checkpoint.keep=2")
FINGERPRINT = fingerprint(CONFIG.recipe, "corpus-a", "tokenizer-a")


def state(step: int) -> TrainState:
    return TrainState(step=step, tokens=step * 256, data={"at": step}, fingerprint=FINGERPRINT)


class CompletedWrite(ShardWrite):
    """Shards that are already durable."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def wait(self) -> list[str]:
        return self._names

    def finish(self) -> list[str]:
        return []


class PretendBackend(Backend):
    """Writes one small file a worker; `refuse` raises in its place."""

    def __init__(self, gang: PretendGang, rank: int) -> None:
        super().__init__(CONFIG, make_mesh(CONFIG, 1), Worker(rank, gang.world, rank, f"n{rank}"))
        self._gang = gang

    def save_shards(self, directory: Path) -> ShardWrite:
        if self.worker.rank in self._gang.refuse:
            raise self._gang.refuse[self.worker.rank]
        name = f"shard_{self.worker.rank}"
        (directory / name).write_bytes(bytes([self.worker.rank]) * 1000)
        return CompletedWrite([name])

    def gather(self, value: Any) -> list[Any]:
        return self._gang.gather(self.worker.rank, value)

    def start(self) -> None: ...
    def build(self, model_factory: ModelFactory) -> None: ...
    def build_optimizer(self) -> None: ...
    def fill_weights(self, read: WeightReader) -> None: ...
    def forward_backward(self, micro_batches: Sequence[MicroBatch], counted: int) -> float:
        raise NotImplementedError

    def optimizer_step(self, lr: float) -> float:
        raise NotImplementedError

    def param_norm(self) -> float:
        raise NotImplementedError

    def load_shards(self, directory: Path) -> None: ...
    def graph_cache_counts(self) -> tuple[int, int]:
        return (0, 0)

    def memory(self) -> Memory:
        return Memory(0, 0)

    def stop(self) -> None: ...


class PretendGang:
    """Workers in threads that really wait for one another."""

    def __init__(self, world: int = 2) -> None:
        self.world = world
        self.refuse: dict[int, Exception] = {}
        self._barrier = threading.Barrier(world, timeout=120)
        self._values: list[Any] = [None] * world

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def all(self, part: Callable[[Backend], T]) -> list[T | Exception]:
        """What each worker returns or raises."""

        def one(rank: int) -> T | Exception:
            try:
                return part(PretendBackend(self, rank))
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.world) as pool:
            return list(pool.map(one, range(self.world)))
