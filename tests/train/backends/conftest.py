import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import SupportsFloat

import numpy as np
import pytest
import torch
from amounts import amount
from mesh_pool import Case, MeshPool, Outcome, small_run
from torch import Tensor
from torch.distributed.tensor import DTensor

from slurmllm.plan.mesh import make_mesh
from slurmllm.train.backends.base import Backend, MicroBatch, Worker, load_backend
from slurmllm.train.backends.native.device import Accelerator, Device
from slurmllm.train.backends.native.runtime import NativeBackend
from train.gang import small_config

NewBackend = Callable[..., NativeBackend]
Reference = Callable[..., list[Outcome]]


# Training steps on each mesh.
STEPS = amount(4, of=12)
# Of a global batch of the small recipe.
LABELS = 8 * 32


def batch(rows: int = 8, seed: int = 0) -> np.ndarray:
    """Sequences of the small recipe with the token after each."""
    return np.random.default_rng(seed).integers(0, 512, (rows, 33))


def micro_batches(tokens: np.ndarray, size: int) -> list[MicroBatch]:
    return [
        MicroBatch(tokens[i : i + size, :-1].copy(), tokens[i : i + size, 1:].copy())
        for i in range(0, len(tokens), size)
    ]


def train(backend: Backend, steps: int, *, first: int = 0, size: int = 2) -> list[float]:
    """Loss, gradient norm and parameter norm of some steps, one after the other."""
    figures: list[SupportsFloat] = []
    for step in range(first, first + steps):
        loss = backend.forward_backward(micro_batches(batch(seed=step), size), LABELS)
        figures += [loss, backend.optimizer_step(1e-2), backend.param_norm()]
    return [float(figure) for figure in figures]


def save(backend: Backend, folder: Path) -> list[str]:
    """Save into a folder; return the names of the files that this worker has written."""
    saving = backend.save_shards(folder)
    return saving.wait() + saving.finish()


def whole(tensor: Tensor) -> Tensor:
    """All of a parameter or gradient, which is a DTensor unless one worker has all of it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class AcceleratorOfCpus(Device):
    """The properties of an accelerator, with the CPUs' tensors."""

    asynchronous = True
    row_multiple = Accelerator.row_multiple
    waiting_gradients = Accelerator.waiting_gradients


@pytest.fixture
def new_backend() -> Iterator[NewBackend]:
    """overrides → a native backend with one worker, in this process, ready to train."""
    torch.compiler.reset()  # Dynamo has at most eight graphs of a function
    with ExitStack() as stack:

        def build(*overrides: str) -> NativeBackend:
            stack.close()  # one default process group at a time
            config = small_config(*overrides)
            backend = load_backend("native")(config, make_mesh(config, 1), Worker(0, 1, 0, "node"))
            assert isinstance(backend, NativeBackend)
            stack.callback(backend.stop)
            backend.start()
            backend.build()
            return backend

        yield build


@pytest.fixture(scope="package")
def pool() -> MeshPool:
    """Eight processes at most, as many as a mesh has workers."""
    return MeshPool(8, threads=int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(scope="package")
def reference(pool: MeshPool) -> Reference:
    """(family, overrides…) → STEPS steps of one process, and its weight decays."""
    outcomes: dict[tuple[str, ...], list[Outcome]] = {}

    def run(family: str, *overrides: str) -> list[Outcome]:
        key = (family, *overrides)
        if key not in outcomes:
            outcomes[key] = pool.run(
                Case(small_run(family, 1, 1, 1, *overrides), last=STEPS, after=decayed)
            )
        return outcomes[key]

    return run


def decayed(backend: NativeBackend) -> dict[str, float]:
    """Weight decay of each parameter of a worker."""
    names = {id(p): name for name, p in backend.model.named_parameters()}
    return {
        names[id(p)]: group["weight_decay"]
        for group in backend.optimizer.param_groups
        for p in group["params"]
    }
