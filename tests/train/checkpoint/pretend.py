"""Backends for tests of checkpoints: no torch, several workers in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from slurmllm.core.run.host_memory import Memory
from slurmllm.core.run.rundir import RunDir
from slurmllm.plan.mesh import make_mesh
from slurmllm.train.backends.base import Backend, MicroBatch, Worker
from slurmllm.train.checkpoint.resume import Resumable, find_resumable
from slurmllm.train.checkpoint.save import Save
from slurmllm.train.checkpoint.shards import ShardWrite, WeightReader
from slurmllm.train.checkpoint.state import TrainState, fingerprint
from slurmllm.train.control.plane import ControlPlane
from slurmllm.train.control.relay import Position, Relay
from train.gang import small_config

T = TypeVar("T")
SECRET = b"known to the workers"
CONFIG = small_config("checkpoint.keep=2")
FINGERPRINT = fingerprint(CONFIG.recipe, "corpus-a", "tokenizer-a")


def save(run: RunDir, backend: Backend, state: TrainState, attempt: int) -> float:
    """Write a checkpoint, remove expired ones (collective); return the seconds."""
    current = Save(run, backend, state, attempt)
    seconds = current.finish()
    current.join_retention()
    return seconds


def save_at(run: RunDir, *steps: int, attempt: int = 0) -> None:
    """Write checkpoints of two workers."""
    for step in steps:
        done = PretendGang().all(lambda b, step=step: save(run, b, state(step), attempt))
        assert all(isinstance(seconds, float) for seconds in done), done


def find(run: RunDir, world: int = 3, fingerprint: dict[str, object] = FINGERPRINT) -> Resumable:
    """On another number of workers than saved; all must answer alike."""
    answers = PretendGang(world).all(
        lambda b: find_resumable(run, b.config, b.control, fingerprint)
    )
    assert len({str(answer) for answer in answers}) == 1, answers
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


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
        worker = Worker(rank, gang.world, rank, f"n{rank}")
        super().__init__(CONFIG, make_mesh(CONFIG, 1), worker, gang.control(rank))
        self._gang = gang

    def save_shards(self, directory: Path) -> ShardWrite:
        if self.worker.rank in self._gang.refuse:
            raise self._gang.refuse[self.worker.rank]
        name = f"shard_{self.worker.rank}"
        (directory / name).write_bytes(bytes([self.worker.rank]) * 1000)
        return CompletedWrite([name])

    def start(self) -> None: ...
    def build(self) -> None: ...
    def fill_weights(self, read: WeightReader) -> None: ...
    def forward_backward(self, micro_batches: Sequence[MicroBatch], counted: int) -> float:
        raise NotImplementedError

    def evaluate(self, micro_batches: Sequence[MicroBatch], num_targets: int) -> float:
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
        self._path: str | None = None

    def control(self, rank: int) -> ControlPlane:
        if self._path is None:
            return ControlPlane()
        return ControlPlane(rank, self.world, self._path, SECRET)

    def all(self, part: Callable[[Backend], T]) -> list[T | Exception]:
        """What each worker returns or raises."""

        def one(rank: int) -> T | Exception:
            backend = PretendBackend(self, rank)
            try:
                return part(backend)
            except Exception as error:
                return error
            finally:
                backend.control.close()

        with TemporaryDirectory() as folder, ExitStack() as stack:
            if self.world > 1:
                position = Position(0, ("n",), self.world)
                relay = Relay(position, Path(folder) / "control", ("127.0.0.1", 0), SECRET)
                relay.start()
                stack.callback(relay.close)
                self._path = str(relay.path)
            with ThreadPoolExecutor(self.world) as pool:
                return list(pool.map(one, range(self.world)))
