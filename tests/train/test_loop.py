"""Target tokens and loss weights of the training loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slurmllm.backends.base import IGNORED, MicroBatch, loss_weight
from slurmllm.plan.mesh import Mesh
from slurmllm.train.loop import count_targets

# Two replicas of four workers each.
MESH = Mesh(1, 8, tensor=2, pipeline=2, data=2, global_batch=8, micro_batch=2)


def batches(ignored: int) -> list[MicroBatch]:
    """A replica's two micro batches of two sequences of five tokens."""
    labels = np.zeros((2, 2, 5), np.int64)
    labels.flat[:ignored] = IGNORED
    return [MicroBatch(part, part) for part in labels]


@pytest.mark.parametrize(("trains_every_token", "counted"), [(True, 40), (False, 40 - 3 - 11)])
def test_labels_are_counted_once(trains_every_token: bool, counted: int) -> None:

    def gather(own: int) -> list[int]:
        assert own == 20 - 3
        return [(own, 20 - 11)[MESH.data_rank(rank)] for rank in range(MESH.world_size)]

    job: Any = SimpleNamespace(
        mesh=MESH,
        config=SimpleNamespace(recipe=SimpleNamespace(model=SimpleNamespace(seq_len=5))),
        stream=SimpleNamespace(trains_every_token=trains_every_token),
        backend=SimpleNamespace(gather=gather),
    )
    assert count_targets(job, batches(3)) == counted


@pytest.mark.parametrize(("counted", "weight"), [(40, 1.0), (10, 4.0), (0, 40.0)])
def test_weight(counted: int, weight: float) -> None:
    assert loss_weight(batches(0), counted, MESH.data) == weight
