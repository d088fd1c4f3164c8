"""The micro batches of a worker, and the record of the data of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from slurmllm.backends.base import Worker
from slurmllm.control.plane import ControlPlane
from slurmllm.run.artifact_records import DataRecord
from slurmllm.run.rundir import RunDir
from slurmllm.train.exits import StopRequest
from slurmllm.train.job import Job, make_job, open_stream
from train.gang import make_run


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
    assert batch.positions is not None
    ends = batch.tokens[:, :-1] == 0
    assert (batch.positions[:, 0] == 0).all()
    assert np.array_equal(batch.positions[:, 1:][~ends], (batch.positions[:, :-1] + 1)[~ends])
    assert (batch.positions[:, 1:][ends] == 0).all()


def test_the_record_of_what_is_read(tmp_path: Path, data: tuple[str, str]) -> None:
    with opened(tmp_path / "run", data, "data.validation=0.1") as job:
        record = DataRecord.model_validate(job.stream.identity)
        assert (record.seq_len, record.global_batch, record.validation) == (32, 8, 0.1)
        assert job.fingerprint()["data.corpus"] == record.corpora[0].fingerprint
