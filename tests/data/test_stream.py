from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest
from amounts import sample
from tokenizers import Tokenizer

from slurmllm.data.order import DocumentOrder
from slurmllm.data.spec import StreamSpec, merge_states
from slurmllm.data.stream import Batch, PackedStream
from slurmllm.data.tokenizer import TokenEncoder
from slurmllm.errors import DataError

from . import corpora
from .conftest import make_corpus
from .corpora import close, restored, saved, slot_tokens, take

SEQ_LEN = 24
GLOBAL_BATCH = 8


def spec(corpus: Path, tokenizer: Path, **other: Any) -> StreamSpec:
    shape = {"seq_len": SEQ_LEN, "global_batch": GLOBAL_BATCH, "seed": 11, **other}
    return StreamSpec([(corpus, 1.0)], tokenizer, **shape)


def streams(
    corpus: Path, tokenizer: Path, dp_size: int = 1, workers: int = 0, **other: Any
) -> list[PackedStream]:
    return corpora.streams(spec(corpus, tokenizer, **other), dp_size, workers)


def test_shape_and_type(corpus: Path, tokenizer: Path) -> None:
    (rank,) = streams(corpus, tokenizer)
    batch, begins, untrained = rank.next_batch()
    assert begins is None
    assert untrained is None
    assert batch.shape == (GLOBAL_BATCH, SEQ_LEN + 1)
    assert batch.dtype == np.int64


@pytest.mark.parametrize("dp_size", [1, 2, 4, 8])
def test_batches_do_not_depend_on_the_ranks(corpus: Path, tokenizer: Path, dp_size: int) -> None:
    expected = take(streams(corpus, tokenizer), 40)
    assert np.array_equal(take(streams(corpus, tokenizer, dp_size), 40), expected)


@pytest.mark.parametrize(
    ("dp_size", "workers"), sample(2, [(1, 3), (2, 1), (1, 1), (4, 5)], arguments=2)
)
def test_batches_do_not_depend_on_the_workers(
    corpus: Path, tokenizer: Path, dp_size: int, workers: int
) -> None:
    expected = take(streams(corpus, tokenizer), 40)
    ranks = streams(corpus, tokenizer, dp_size, workers)
    try:
        assert np.array_equal(take(ranks, 40), expected)
    finally:
        close(ranks)


def test_seeds_give_other_batches(corpus: Path, tokenizer: Path) -> None:
    here, there = (take(streams(corpus, tokenizer, seed=seed), 3) for seed in (1, 2))
    assert not np.array_equal(here, there)


def test_packing_loses_no_token(corpus: Path, tokenizer: Path) -> None:
    batches = take(streams(corpus, tokenizer), 100)
    documents = pa.ipc.open_file(corpus).read_all()["text"].to_pylist()
    encoder = TokenEncoder(tokenizer)
    order = DocumentOrder(len(documents), seed=11).take(np.arange(GLOBAL_BATCH * 200))
    for slot in range(GLOBAL_BATCH):
        tokens = slot_tokens(batches, slot)
        expected: list[int] = []
        for document in order[slot::GLOBAL_BATCH].tolist():
            expected += encoder.encode(documents[document]).tolist()
        assert tokens == expected[: len(tokens)]


def test_every_document_once_an_epoch(corpus: Path, tokenizer: Path, texts: list[str]) -> None:
    batches = take(streams(corpus, tokenizer), 400)
    encoder = TokenEncoder(tokenizer)
    seen: dict[int, str] = {}  # by position
    for slot in range(GLOBAL_BATCH):
        text = encoder.decode(np.array(slot_tokens(batches, slot)))
        for visit, document in enumerate(text.split("<|endoftext|>")[:-1]):
            seen[slot + visit * GLOBAL_BATCH] = document
    for epoch in range(2):
        positions = range(epoch * len(texts), (epoch + 1) * len(texts))
        assert sorted(seen[position] for position in positions) == sorted(texts)


@pytest.mark.parametrize(
    ("stop", "before", "after"),
    [(0, 1, 4), (1, 4, 2), (7, 1, 1), (7, 8, 1), (33, 8, 1), (33, 1, 4)],
)
def test_resume_is_exact(corpus: Path, tokenizer: Path, stop: int, before: int, after: int) -> None:
    expected = take(streams(corpus, tokenizer), stop + 20)
    ranks = streams(corpus, tokenizer, before)
    assert np.array_equal(take(ranks, stop), expected[:stop]) if stop else True
    state = saved(ranks)
    resumed = restored(streams(corpus, tokenizer, after), state)
    assert saved(resumed) == state
    assert np.array_equal(take(resumed, 20), expected[stop:])


# Two workers of a rank: test_batches_are_counted_and_passed_over.
@pytest.mark.parametrize("workers", sample(1, [1, 2]))
def test_state_is_of_batches_handed_out(corpus: Path, tokenizer: Path, workers: int) -> None:
    expected = take(streams(corpus, tokenizer), 30)
    ahead, plain = streams(corpus, tokenizer, 2, workers), streams(corpus, tokenizer, 2)
    try:
        take(ahead, 10)  # the workers are further by now
        take(plain, 10)
        state = saved(ahead)
        assert state == saved(plain)
        for ranks in (ahead, streams(corpus, tokenizer, 4, workers)):
            assert np.array_equal(take(restored(ranks, state), 20), expected[10:])
            close(ranks)
    finally:
        close(ahead)


def test_going_back_on_the_same_stream(corpus: Path, tokenizer: Path) -> None:
    ranks = streams(corpus, tokenizer)
    first = take(ranks, 5)
    state = saved(streams(corpus, tokenizer))
    assert np.array_equal(take(restored(ranks, state), 5), first)


def test_state_is_small(corpus: Path, tokenizer: Path) -> None:
    ranks = streams(corpus, tokenizer, global_batch=1024)
    take(ranks, 3)
    assert len(json.dumps(saved(ranks))) < 16_000


def test_state_of_another_stream_is_refused(
    tmp_path: Path, corpus: Path, tokenizer: Path, texts: list[str]
) -> None:
    state = saved(streams(corpus, tokenizer))
    other_corpus = make_corpus(tmp_path, texts[:-1])
    other_tokenizer = tmp_path / "tokenizer.json"
    other_tokenizer.write_text(tokenizer.read_text() + " ")
    for other, message in (
        (streams(corpus, tokenizer, seed=12), "train.seed 11, this stream has 12"),
        (streams(corpus, tokenizer, global_batch=16), "train.global_batch 8, .* has 16"),
        (streams(other_corpus, tokenizer), r"with corpus .*\.arrow \(fing.* changed after the run"),
        (streams(corpus, other_tokenizer), "tokenizer"),
        (streams(corpus, tokenizer, validation=0.1), "data.validation 0.0, this stream has 0.1"),
    ):
        with pytest.raises(DataError, match=message):
            other[0].load_state(state)


def test_states_must_be_of_all_ranks_and_one_moment(corpus: Path, tokenizer: Path) -> None:
    ranks = streams(corpus, tokenizer, 4)
    states = [rank.state() for rank in ranks]
    with pytest.raises(DataError, match=r"2 of 8 slots .* the first is 2"):
        merge_states([states[0], *states[2:]])
    with pytest.raises(DataError, match="this rank needs 2 to 3; load the merged state"):
        ranks[1].load_state(states[0])
    # Tensor-parallel neighbours report the same slots.
    assert merge_states([*states, states[0]]) == merge_states(states)
    ranks[0].next_batch()
    with pytest.raises(DataError, match="different positions for slot 0"):
        merge_states([*states, ranks[0].state()])


def test_a_position_beyond_its_document_is_refused(corpus: Path, tokenizer: Path) -> None:
    (rank,) = streams(corpus, tokenizer)
    state = saved([rank])
    state["slots"][0] = [0, 0, 10_000]
    rank.load_state(state)
    with pytest.raises(DataError, match="token 10000 of a part of a document of"):
        rank.next_batch()


def test_ranks_must_divide_the_global_batch(corpus: Path, tokenizer: Path) -> None:
    with pytest.raises(DataError, match=r"global_batch 8 is not a multiple of the 3 .*choose 6"):
        streams(corpus, tokenizer, 3)


def test_what_a_run_reads(corpus: Path, tokenizer: Path) -> None:
    (rank,) = streams(corpus, tokenizer, validation=0.25, mask="document")
    identity = json.loads(json.dumps(rank.identity))
    assert identity.pop("corpora") == [
        {
            "path": str(corpus),
            "fingerprint": rank.state()["corpus"],
            "weight": 1.0,
            "documents": 97,
        }
    ]
    assert identity == {
        "tokenizer": TokenEncoder(tokenizer).fingerprint,
        "seed": 11,
        "seq_len": SEQ_LEN,
        "global_batch": GLOBAL_BATCH,
        "mask": "document",
        "validation": 0.25,
    }


def test_real_text_gives_the_tokens_of_the_library(
    tmp_path: Path, wikitext: Path, gpt2: Path
) -> None:
    paragraphs = [p.strip("\n") for p in wikitext.read_text().split("\n \n") if p.strip()]
    corpus = make_corpus(tmp_path, paragraphs)
    library = Tokenizer.from_file(str(gpt2))
    ids = [[*e.ids, 50256] for e in library.encode_batch(paragraphs)]
    order = DocumentOrder(len(paragraphs), seed=11).take(np.arange(4 * 400)).tolist()
    batches = take(streams(corpus, gpt2, seq_len=512, global_batch=4), 30)
    for slot in range(4):
        tokens = slot_tokens(batches, slot)
        expected = [t for document in order[slot::4] for t in ids[document]]
        assert tokens == expected[: len(tokens)]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_counted_and_passed_over(corpus: Path, tokenizer: Path, workers: int) -> None:
    expected = take(streams(corpus, tokenizer), 12)
    ranks = streams(corpus, tokenizer, 2, workers)
    try:
        assert [rank.batches for rank in ranks] == [0, 0]
        take(ranks, 3)
        for rank in ranks:
            rank.skip_batch()
            rank.skip_batch()
        assert [rank.batches for rank in ranks] == [5, 5]
        assert np.array_equal(take(ranks, 2), expected[5:7])
        resumed = restored(streams(corpus, tokenizer, 4), saved(ranks))
        assert {rank.batches for rank in resumed} == {7}
        assert np.array_equal(take(resumed, 5), expected[7:])
    finally:
        close(ranks)


def test_labels_do_not_change_the_inputs_of_one_row() -> None:
    tokens = np.arange(6)[None].copy()
    batch = Batch(tokens, None, np.array([[True, True, True, False, False, False]]))
    assert batch.labels(-100).tolist() == [[-100, -100, 3, 4, 5]]
    assert batch.inputs.tolist() == [[0, 1, 2, 3, 4]]
