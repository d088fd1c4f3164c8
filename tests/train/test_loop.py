"""The training loop's target tokens, loss weights and micro batches, and the record of its data."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from data.corpora import write_prompts

from slurmllm.core.run.artifact_records import DataRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.data.spec import merge_states
from slurmllm.plan.mesh import Mesh
from slurmllm.train.backends.base import IGNORED, MicroBatch, Worker, loss_weight
from slurmllm.train.control.plane import ControlPlane
from slurmllm.train.exits import StopRequest
from slurmllm.train.job import Job, make_job, open_stream
from train.gang import control_planes, make_run

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
        return Job.next_batch(job).num_targets

    with control_planes(MESH.world_size) as ends, ThreadPoolExecutor(len(ends)) as pool:
        assert [*pool.map(count, ends)] == [counted] * MESH.world_size


def test_targets_and_the_state_are_of_the_batch(tmp_path: Path, data: tuple[str, str]) -> None:
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
            assert batch.num_targets == sum((part != IGNORED).sum() for part in labels)
            assert (batch.number, job.stream.batches, other.batches) == (number, number, number)
            assert job.train_state().data == merge_states([other.state()])


@pytest.mark.parametrize(("counted", "weight"), [(40, 1.0), (10, 4.0), (0, 40.0)])
def test_weight(counted: int, weight: float) -> None:
    assert loss_weight(batches(0), counted, MESH.data) == weight


def job_of(run: RunDir) -> Job:
    worker = Worker(0, 1, 0, "node-0")
    return make_job(run, "train", 0, worker, StopRequest(), time.time())


@contextmanager
def opened(folder: Path, data: tuple[str, str], *overrides: str) -> Iterator[Job]:
    job = job_of(make_run(folder, data, *overrides))
    job.stream, job.control = open_stream(job), ControlPlane()
    try:
        yield job
    finally:
        job.stream.close()


def test_every_label_counts_and_documents_do_not(tmp_path: Path, data: tuple[str, str]) -> None:
    with opened(tmp_path / "run", data) as job:
        assert job.stream.trains_every_token
        batches = job.next_batch().micro_batches
    assert [batch.tokens.shape for batch in batches] == [(2, 32)] * 4
    for batch in batches:
        assert batch.positions is None
        assert np.array_equal(batch.tokens[:, 1:], batch.labels[:, :-1])


def test_positions_begin_again_with_each_document(tmp_path: Path, data: tuple[str, str]) -> None:
    with opened(tmp_path / "run", data, "data.mask=document") as job:
        batch = next(b for b in job.next_batch().micro_batches if (b.tokens[:, :-1] == 0).any())
    ends = batch.tokens[:, :-1] == 0
    assert (batch.positions[:, 0] == 0).all()
    assert np.array_equal(batch.positions[:, 1:][~ends], (batch.positions[:, :-1] + 1)[~ends])
    assert (batch.positions[:, 1:][ends] == 0).all()


def test_the_record_of_what_is_read(tmp_path: Path, data: tuple[str, str]) -> None:
    with opened(tmp_path / "run", data, "data.validation=0.1") as job:
        record = DataRecord.model_validate(job.stream.identity)
        assert (record.seq_len, record.global_batch, record.validation) == (32, 8, 0.1)
        assert job.fingerprint()["data.corpus"] == record.corpora[0].fingerprint
