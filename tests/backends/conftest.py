from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from train.gang import small_config

from slurmllm.backends.base import Backend, MicroBatch, Worker, load_backend
from slurmllm.model.decoder import build_model
from slurmllm.plan.mesh import make_mesh

NewBackend = Callable[..., Backend]


def batch(rows: int = 8, seed: int = 0) -> np.ndarray:
    """Sequences of the small recipe with the token after each."""
    return np.random.default_rng(seed).integers(0, 512, (rows, 33))


def micro_batches(tokens: np.ndarray, size: int) -> list[MicroBatch]:
    return [
        MicroBatch(tokens[i : i + size, :-1].copy(), tokens[i : i + size, 1:].copy())
        for i in range(0, len(tokens), size)
    ]


@pytest.fixture
def new_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[NewBackend]:
    """overrides → a native backend with one worker, in this process, ready to train."""
    with ExitStack() as stack:

        def build(*overrides: str) -> Backend:
            stack.close()  # one default process group at a time
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
                monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
            config = small_config(*overrides)
            backend = load_backend("native")(config, make_mesh(config, 1), Worker(0, 1, 0, "node"))
            stack.callback(backend.stop)
            backend.start()
            backend.build(lambda: build_model(config.recipe.model))
            backend.build_optimizer()
            return backend

        yield build
