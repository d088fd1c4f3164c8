"""The micro batches of a worker, and the record of the data of a run."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from data.corpora import write_prompts

from slurmllm.backends.base import IGNORED, Worker
from slurmllm.cli.data import data as cli_data
from slurmllm.control.plane import ControlPlane
from slurmllm.data.tokenizer import TokenEncoder
from slurmllm.errors import ConfigError
from slurmllm.run.artifact_records import DataRecord
from slurmllm.run.rundir import RunDir
from slurmllm.train.exits import StopRequest
from slurmllm.train.job import Job, make_job, open_stream
from train.gang import Gang, make_run, rows, small_config


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


def test_prompts_are_not_learnt(tmp_path: Path, data: tuple[str, str]) -> None:
    rows = [(f"the question {i}", f"an answer {i}") for i in range(30)]
    corpus = write_prompts(tmp_path / "prompts.arrow", rows)
    with opened(tmp_path / "run", (str(corpus), data[1])) as job:
        assert not job.stream.trains_every_token
        labels = np.concatenate([batch.labels for batch in job.next_batch().micro_batches])
    assert 0.2 < (labels == IGNORED).mean() < 0.8


def test_the_assistant_s_turns_are_learnt(tmp_path: Path, data: tuple[str, str]) -> None:
    """Users write noise, which no model could predict; what is learnt is the answers."""
    rng = random.Random(3)
    lines = []
    for _ in range(300):
        turns = []
        for answer in ("of course", "certainly not"):
            noise = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=12))
            turns.append({"role": "user", "content": noise})
            turns.append({"role": "assistant", "content": answer})
        lines.append(json.dumps({"messages": turns}) + "\n")
    (tmp_path / "chats.jsonl").write_text("".join(lines))
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(Path(data[1]).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content + '|' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    corpus = tmp_path / "chats.arrow"
    build = ["build", str(tmp_path / "chats.jsonl"), "--messages-key", "messages", "--out"]
    assert CliRunner().invoke(cli_data, [*build, str(corpus)]).exit_code == 0
    inputs = (str(corpus), str(tokenizer))
    overrides = ("data.mask=document", "train.steps=60", "optim.lr=3e-3", "model.seq_len=64")
    run = make_run(tmp_path / "run", inputs, *overrides)
    with opened(tmp_path / "other", inputs, *overrides) as job:
        batch = job.next_batch()
        labels = np.concatenate([part.labels for part in batch.micro_batches])
        tokens = np.concatenate([part.tokens for part in batch.micro_batches])
    encoder = TokenEncoder(tokenizer)
    for targets, read in zip(labels, tokens, strict=True):
        trained = encoder.decode(targets[targets != IGNORED])
        assert len(trained) > 9
        assert trained in "of course|certainly not|" * 9
        assert "<user>" in encoder.decode(read)
    Gang(run).finish()
    losses = [row["loss"] for row in rows(run, 0)]
    assert losses[0] > 5
    assert losses[-1] < 0.7, "noise of 26 letters would cost much more"


def test_the_record_of_what_is_read(tmp_path: Path, data: tuple[str, str]) -> None:
    with opened(tmp_path / "run", data, "data.validation=0.1") as job:
        record = DataRecord.model_validate(job.stream.identity)
        assert (record.seq_len, record.global_batch, record.validation) == (32, 8, 0.1)
        assert job.fingerprint()["data.corpus"] == record.corpora[0].fingerprint


def test_nothing_to_read(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.config.write_text(small_config("data.corpus=null").to_yaml())
    with pytest.raises(ConfigError, match=r"data.corpus: not set; --set data.corpus="):
        open_stream(job_of(run))
