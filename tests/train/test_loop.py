"""Target tokens and loss weights of the training loop."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from data.corpora import write_prompts

from slurmllm.backends.base import IGNORED, MicroBatch, Worker, loss_weight
from slurmllm.control.plane import ControlPlane
from slurmllm.data.spec import merge_states
from slurmllm.plan.mesh import Mesh
from slurmllm.train.exits import StopRequest
from slurmllm.train.job import Job, make_job, open_stream

from .gang import control_planes, make_run

# Two replicas of four workers each.
MESH = Mesh(1, 8, tensor=2, pipeline=2, data=2, global_batch=8, micro_batch=2)


def batches(ignored: int) -> list[MicroBatch]:
    """A replica's two micro batches of two sequences of five tokens."""
    labels = np.zeros((2, 2, 5), np.int64)
    labels.flat[:ignored] = IGNORED
    return [MicroBatch(part, part) for part in labels]


@pytest.mark.parametrize(("trains_every_token", "counted"), [(True, 40), (False, 40 - 3 - 11)])
def test_targets_are_counted_once(trains_every_token: bool, counted: int) -> None:

    def count(control: ControlPlane) -> int:
        job: Any = SimpleNamespace(
            mesh=MESH,
            config=SimpleNamespace(recipe=SimpleNamespace(model=SimpleNamespace(seq_len=5))),
            stream=SimpleNamespace(trains_every_token=trains_every_token, batches=7),
            control=control,
            _micro_batches=lambda: batches((3, 11)[MESH.data_rank(control.rank)]),
        )
        return Job._draw(job).num_targets()

    with control_planes(MESH.world_size) as ends, ThreadPoolExecutor(len(ends)) as pool:
        assert [*pool.map(count, ends)] == [counted] * MESH.world_size


def test_a_batch_drawn_ahead_is_not_in_the_state(tmp_path: Path, data: tuple[str, str]) -> None:
    rows = [(f"the question {i}", f"an answer {i}") for i in range(30)]
    corpus = write_prompts(tmp_path / "prompts.arrow", rows)
    run = make_run(tmp_path / "run", (str(corpus), data[1]))
    job = make_job(run, "train", 0, Worker(0, 1, 0, "n"), StopRequest(), 0.0)
    job.control, job.backend = ControlPlane(), SimpleNamespace()  # type: ignore[assignment]
    job.guard = SimpleNamespace(state=dict)  # type: ignore[assignment]
    job.stream, other = open_stream(job), open_stream(job)
    with job.stream, other:
        for number in range(1, 5):
            batch = job.next_batch()
            assert np.array_equal(batch.micro_batches[0].tokens, other.next_batch().inputs[:2])
            labels = [part.labels for part in batch.micro_batches]
            assert batch.num_targets() == sum((part != IGNORED).sum() for part in labels)
            assert (batch.number, job.stream.batches, other.batches) == (number, number + 1, number)
            assert job.train_state().data == merge_states([other.state()])


@pytest.mark.parametrize(("counted", "weight"), [(40, 1.0), (10, 4.0), (0, 40.0)])
def test_weight(counted: int, weight: float) -> None:
    assert loss_weight(batches(0), counted, MESH.data) == weight
