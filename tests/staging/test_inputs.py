"""Copies of small inputs on a node's disk, and what its workers compute once for all of them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from data.corpora import write_megatron

from slurmllm.config.resolve import resolve
from slurmllm.data.sources import open_source
from slurmllm.data.tokenizer import TokenEncoder
from slurmllm.run.worker_files import STAGED_INPUTS, local_copy, once_a_node
from slurmllm.staging import node as staging

DOCUMENTS = [[[1, 2, 3]], [[4], [5]], [[6, 7, 8, 9]]]


@pytest.fixture
def private(tmp_path: Path) -> Path:
    folder = tmp_path / "node"
    folder.mkdir(mode=0o700)
    return folder


def stage(
    private: Path, monkeypatch: pytest.MonkeyPatch, corpus: Path, tokenizer: Path | None = None
) -> Path:
    overrides = [f"data.corpus={corpus}"]
    overrides += [] if tokenizer is None else [f"data.tokenizer={tokenizer}"]
    folder = staging.stage_inputs(resolve("tiny_neox", overrides=overrides), private)
    monkeypatch.setenv(STAGED_INPUTS, str(folder))
    return folder


def test_a_small_text_corpus_and_its_tokenizer_are_read_from_their_copies(
    private: Path, stdlib: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, tokenizer = stdlib
    shared = open_source(corpus, TokenEncoder(tokenizer), None)
    folder = stage(private, monkeypatch, corpus, tokenizer)
    assert local_copy(corpus).parent == local_copy(tokenizer).parent == folder
    staged = open_source(corpus, TokenEncoder(tokenizer), None)
    assert str(local_copy(corpus)) in Path("/proc/self/maps").read_text()
    assert (staged.path, staged.fingerprint) == (corpus, shared.fingerprint)
    positions = [(document, 0) for document in range(20)]
    assert np.array_equal(staged.read(positions).tokens, shared.read(positions).tokens)


@pytest.mark.parametrize("limit", [0, 1_000_000])
def test_of_a_large_corpus_only_the_index_is_copied(
    private: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(staging, "MAX_CORPUS_BYTES", limit)
    corpus = write_megatron(tmp_path / "tokens", DOCUMENTS)
    shared = open_source(corpus, None, 10)
    folder = stage(private, monkeypatch, corpus)
    tokens, index = (tmp_path / f"tokens{suffix}" for suffix in (".bin", ".idx"))
    assert local_copy(index).parent == folder
    assert (local_copy(tokens) != tokens) is bool(limit)
    staged = open_source(corpus, None, 10)
    assert staged.fingerprint == shared.fingerprint
    assert np.array_equal(staged.read([(2, 0)]).tokens, [6, 7, 8, 9])


def test_a_changed_original_has_no_copy(
    private: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_megatron(tmp_path / "tokens", DOCUMENTS)
    stage(private, monkeypatch, corpus)
    former = open_source(corpus, None, 10).fingerprint
    write_megatron(tmp_path / "tokens", DOCUMENTS[::-1])
    assert local_copy(tmp_path / "tokens.bin") == tmp_path / "tokens.bin"
    changed = open_source(corpus, None, 10)
    assert np.array_equal(changed.read([(0, 0)]).tokens, [6, 7, 8, 9])
    assert changed.fingerprint != former


def test_on_a_full_disk_the_originals_are_read(
    private: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("slurmllm.staging.node.shutil.copyfileobj", full)
    corpus = write_megatron(tmp_path / "tokens", DOCUMENTS)
    assert list(stage(private, monkeypatch, corpus).iterdir()) == []
    assert np.array_equal(open_source(corpus, None, 10).read([(0, 0)]).tokens, [1, 2, 3])
    assert "No space left on device" in caplog.text


def test_one_worker_computes_for_its_node(
    private: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, counts = tmp_path / "corpus", []
    file.write_text("text")

    def compute() -> str:
        counts.append(os.getpid())
        return f"result {len(counts)}"

    def ask(kind: str = "kind") -> str:
        return once_a_node([file], kind, compute)

    assert [ask(), ask()] == ["result 1", "result 2"]  # nothing is staged
    monkeypatch.setenv(STAGED_INPUTS, str(private))
    assert [ask(), ask(), ask("other"), ask("other")] == ["result 3"] * 2 + ["result 4"] * 2
    file.write_text("another")
    assert ask() == "result 5"
    monkeypatch.setenv(STAGED_INPUTS, str(private / "gone"))
    assert ask() == "result 6"


def test_workers_that_start_together_compute_once(private: Path, tmp_path: Path) -> None:
    file, count = tmp_path / "corpus", tmp_path / "count"
    file.write_text("text")
    os.environ[STAGED_INPUTS] = str(private)
    try:
        children = []
        for _ in range(8):
            if (child := os.fork()) == 0:
                once_a_node([file], "kind", lambda: _noted(count))
                os._exit(0)
            children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    finally:
        del os.environ[STAGED_INPUTS]
    assert count.read_text() == "x"


def _noted(count: Path) -> str:
    with count.open("a") as stream:
        stream.write("x")
    return "result"
