"""What a submit finds out about the texts of `eval`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from slurmllm.config.resolve import resolve
from slurmllm.corpus.build import build_corpus
from slurmllm.corpus.inputs import find_inputs
from slurmllm.corpus.readers import ReadOptions
from slurmllm.data.inspection import check_evaluation_texts
from slurmllm.data.spec import StreamSpec
from slurmllm.data.tokenizer import train_tokenizer
from slurmllm.errors import DataError
from slurmllm.submit.inputs import resolve_inputs

TEXTS = [f"document {i} is about the number {i * 7919 % 1000} " * 9 for i in range(200)]


def corpus(folder: Path, name: str, texts: list[str]) -> str:
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    build_corpus(find_inputs([str(source)]), folder / f"{name}.arrow", ReadOptions())
    return str(folder / f"{name}.arrow")


@pytest.fixture
def training(tmp_path: Path) -> StreamSpec:
    (tmp_path / "tokenizer.json").write_text(train_tokenizer(TEXTS, 320))
    path = Path(corpus(tmp_path, "training", TEXTS))
    return StreamSpec([(path, 1.0)], tmp_path / "tokenizer.json", 32, 8, 1, 320, validation=0.1)


def test_other_text_and_text_that_is_trained_on(tmp_path: Path, training: StreamSpec) -> None:
    other = corpus(tmp_path, "other", [f"{text} too" for text in TEXTS])
    assert check_evaluation_texts(training, {"other": other}) == []
    some = corpus(tmp_path, "some", [*TEXTS[:50], "not in it " * 50])
    (warning,) = check_evaluation_texts(training, {"some": some})
    # Of the 50, about 5 are held out.
    count = int(warning.removeprefix("eval.corpora.some: ").partition(" ")[0])
    assert 40 <= count < 50
    assert "of the first 51 documents" in warning
    assert "remove them from data.corpus" in warning
    long = StreamSpec(training.corpora, training.tokenizer, 5000, 8, 1, 320, validation=0.1)
    with pytest.raises(DataError, match=r"data.validation: .* on the held-out side.* raise"):
        check_evaluation_texts(long, {})


@pytest.mark.parametrize(
    ("name", "ids", "message"),
    [
        ("short", np.arange(32) % 300, r"eval.corpora.short: .* has 32 tokens, fewer than one"),
        ("vocabulary", np.full(99, 320), r"eval.corpora.vocabulary: .* model.vocab_size is 320"),
        ("empty", np.zeros(0, dtype=np.uint16), r"eval.corpora.empty: "),
        ("absent", None, r"eval.corpora.absent: .*absent.npy"),
    ],
)
def test_text_that_cannot_be_evaluated(
    tmp_path: Path, training: StreamSpec, name: str, ids: np.ndarray | None, message: str
) -> None:
    path = tmp_path / f"{name}.npy"
    if ids is not None:
        np.save(path, ids.astype(np.uint16))
    with pytest.raises(DataError, match=message):
        check_evaluation_texts(training, {name: str(path)})


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (None, "eval.corpora.other: .* is not a file"),
        (np.arange(9), "eval.corpora.other: .* has 9 tokens, fewer than one sequence"),
        (np.arange(999) % 300, ""),
    ],
)
def test_a_dry_run_checks_them_like_a_submit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids: np.ndarray | None, message: str
) -> None:
    made = tmp_path / "stdlib.arrow", tmp_path / "stdlib.json"
    corpus(tmp_path, "stdlib", TEXTS)
    made[1].write_text(train_tokenizer(TEXTS, 320))
    monkeypatch.setattr("slurmllm.corpus.builtin.ensure_stdlib", lambda folder, vocab_size: made)
    other = tmp_path / "other.npy"
    if ids is not None:
        np.save(other, ids.astype(np.uint16))
    size = ("model.seq_len=32", "train.global_batch=8", "train.micro_batch=1")
    overrides = (*size, "eval.every_steps=5", f"eval.corpora.other={other}")
    config = resolve("tiny_neox", "local", overrides)
    for build in (False, True):
        if message:
            with pytest.raises(DataError, match=message if not build else "eval.corpora.other: "):
                resolve_inputs(config, tmp_path, build)
        else:
            assert (resolve_inputs(config, tmp_path, build) == config) is not build
