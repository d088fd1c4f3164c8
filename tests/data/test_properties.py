"""What must hold of any corpus, seed, degree, number of workers and stop."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from amounts import amount
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmllm.core.errors import DataError
from slurmllm.data.order import DocumentOrder
from slurmllm.data.sources import text
from slurmllm.data.sources.base import Pieces, Request, document_hash
from slurmllm.data.spec import Split, StreamSpec
from slurmllm.data.stream import PackedStream
from slurmllm.data.tokenizer import TokenEncoder

from .corpora import restored, saved, slot_tokens, streams, take, write_megatron, write_texts

SEEDS = st.integers(0, 2**32 - 1)
# Many short documents, empty ones among them, or few that take several pieces.
TEXTS = st.lists(
    st.one_of(st.text("ab é東", max_size=12), st.text("ab é東", min_size=60, max_size=200)),
    min_size=1,
    max_size=30,
)
DEGREES = st.sampled_from([(1, 1), (2, 1), (2, 4), (4, 2), (4, 4), (1, 4)])


def documents_of(stream: Sequence[int], end: int) -> list[tuple[int, ...]]:
    """The documents that a slot has finished, in its order."""
    documents, begin = [], 0
    for place, token in enumerate(stream):
        if token == end:
            documents.append(tuple(stream[begin : place + 1]))
            begin = place + 1
    return documents


def all_held_out(texts: Sequence[str], validation: float) -> bool:
    hashes = np.array([document_hash(text.encode()) for text in texts], dtype=np.uint64)
    return not Split("train", validation).document_mask(hashes).any()


@settings(max_examples=amount(15, of=60))
@given(
    texts=TEXTS,
    seed=SEEDS,
    seq_len=st.integers(1, 40),
    degrees=DEGREES,
    stop=st.integers(0, 12),
    validation=st.sampled_from([0.0, 0.0, 0.3]),
    ids=st.booleans(),
)
def test_any_stream_is_one_order_and_resumes_exactly(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: Path,
    texts: list[str],
    seed: int,
    seq_len: int,
    degrees: tuple[int, int],
    stop: int,
    validation: float,
    ids: bool,
) -> None:
    corpus = write_texts(tmp_path_factory.mktemp("any") / "c.arrow", texts, ids=ids)
    spec = StreamSpec([(corpus, 1.0)], tokenizer, seq_len, 4, seed, validation=validation)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "PIECE_BYTES", 64)
        if all_held_out(texts, validation):
            with pytest.raises(DataError, match="is on the train side"):
                take(streams(spec), 1)
            return
        expected = take(streams(spec), stop + 6)
        ranks = streams(spec, degrees[0])
        if stop:
            assert np.array_equal(take(ranks, stop), expected[:stop])
        state = saved(ranks)
        resumed = restored(streams(spec, degrees[1]), state)
        assert saved(resumed) == state
        assert np.array_equal(take(resumed, 6), expected[stop:])


@settings(max_examples=amount(10, of=40))
@given(texts=TEXTS, seed=SEEDS, seq_len=st.integers(1, 40), epochs=st.integers(1, 3))
def test_no_token_is_lost_or_repeated_in_an_epoch(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: Path,
    texts: list[str],
    seed: int,
    seq_len: int,
    epochs: int,
) -> None:
    # Documents are cut where their tokens stay apart, so that those of the whole are expected.
    texts = [f"{place}: {document}" for place, document in enumerate(texts)]
    corpus = write_texts(tmp_path_factory.mktemp("any") / "c.arrow", texts)
    encoder, slots = TokenEncoder(tokenizer), 4
    spec = StreamSpec([(corpus, 1.0)], tokenizer, seq_len, slots, seed)
    order = DocumentOrder(len(texts), seed).take(np.arange(len(texts) * epochs))
    expected = [tuple(encoder.encode(texts[document]).tolist()) for document in order.tolist()]
    # As long as the slot that has most to read.
    longest = max(sum(map(len, expected[slot::slots])) for slot in range(slots))
    batches = take(streams(spec), -(-longest // seq_len))
    for slot in range(slots):
        actual = documents_of(slot_tokens(batches, slot), encoder.end_of_document)
        assert actual[: len(expected[slot::slots])] == expected[slot::slots]
    for epoch in range(epochs):
        here = expected[epoch * len(texts) : (epoch + 1) * len(texts)]
        assert Counter(here) == Counter(tuple(encoder.encode(t).tolist()) for t in texts)


@settings(max_examples=amount(10, of=40))
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any),
    seed=SEEDS,
    seq_len=st.integers(1, 30),
    stop=st.integers(0, 10),
)
def test_documents_and_positions_of_a_masked_batch(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seed: int, seq_len: int, stop: int
) -> None:
    # Each token encodes its document and its index in it.
    documents = [[[d * 100 + place for place in range(n)]] for d, n in enumerate(lengths)]
    prefix = write_megatron(tmp_path_factory.mktemp("any") / "m", documents)
    spec = StreamSpec([(prefix, 1.0)], None, seq_len, 2, seed, mask="document")
    (stream,) = streams(spec)
    for _ in range(stop):
        stream.next_batch()
    batch = restored(streams(spec, 2), saved([stream]))[0].next_batch()
    assert batch.begins is not None
    assert batch.positions is not None
    for row, begins, positions in zip(batch.inputs, batch.begins, batch.positions, strict=True):
        place = -1
        for token, begin, position in zip(row % 100, begins[:-1], positions, strict=True):
            # The first document of a sequence may have begun before it.
            place = 0 if token == 0 and begin else place + 1
            assert begin == (token == 0)
            assert position == place


@settings(max_examples=amount(5, of=20))
@given(seed=SEEDS, validation=st.floats(0.1, 0.5), ids=st.booleans())
def test_the_split_parts_the_documents(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: Path,
    seed: int,
    validation: float,
    ids: bool,
) -> None:
    texts = [f"{i}" for i in range(150)]
    corpus = write_texts(tmp_path_factory.mktemp("any") / "c.arrow", texts, ids=ids)
    decode = TokenEncoder(tokenizer).decode
    spec = StreamSpec([(corpus, 1.0)], tokenizer, 400, 2, seed, validation=validation)
    sides: list[set[str]] = []
    for side in (spec, replace(spec, split="validation")):
        batches = take(streams(side), 4)
        slots = [decode(np.array(slot_tokens(batches, slot))) for slot in (0, 1)]
        sides.append({text for slot in slots for text in slot.split("<|endoftext|>")[:-1]})
    train, held_out = sides
    assert not train & held_out
    assert train | held_out == set(texts)
    assert abs(len(held_out) - validation * 150) < 6 * (validation * 150) ** 0.5


def test_splits_depend_only_on_content_and_need_a_token_on_each_side(tmp_path: Path) -> None:
    hashes = np.random.default_rng(1).integers(0, 2**64, 100_000, dtype=np.uint64)
    small, large = (Split("validation", share).document_mask(hashes) for share in (0.05, 0.2))
    assert (small <= large).all()  # a larger share holds out more, not others
    assert abs(large.mean() - 0.2) < 6 * (0.2 * 0.8 / 100_000) ** 0.5
    assert (Split("train", 0.2).document_mask(hashes) != large).all()
    split = Split("train", 0.5)
    hashes = {n: document_hash(np.array([n], "<i4").tobytes()) for n in range(64)}
    held_out = next(
        n for n, h in hashes.items() if not split.document_mask(np.array([h], np.uint64))[0]
    )
    path = write_megatron(tmp_path / "m", [[[held_out]], *([[]] for _ in range(40))])
    spec = StreamSpec([(path, 1.0)], None, seq_len=8, global_batch=2, seed=1, validation=0.5)
    with pytest.raises(DataError, match=r"is on the train side of .* and holds a token"):
        PackedStream(spec, 0, 1).next_batch()


def test_resumed_pieces(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "PIECE_BYTES", 4096)
    path = write_texts(tmp_path / "c.arrow", ["some words " * 20_000])
    spec = StreamSpec([(path, 1.0)], tokenizer, seq_len=8, global_batch=4, seed=1)
    stream = PackedStream(spec, 0, 1)
    stream.next_batch()
    state = stream.state() | {"slots": [[0, 20, 700]] * 4}
    read: list[int] = []
    whole = text.TextSource.read

    def counting(source: text.TextSource, requests: Sequence[Request]) -> Pieces:
        read.append(len(requests))
        return whole(source, requests)

    monkeypatch.setattr(text.TextSource, "read", counting)
    stream.load_state(state)
    stream.next_batch()
    assert sum(read) == 4
