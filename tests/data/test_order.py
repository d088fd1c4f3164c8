from __future__ import annotations

import numpy as np
from amounts import amount
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmllm.data.order import DocumentOrder, Permutation

SEEDS = st.integers(0, 2**63)


@settings(max_examples=amount(37, of=150))
@given(size=st.integers(1, 700), seed=SEEDS, epoch=st.integers(0, 10**6))
def test_permutation_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    permuted = Permutation(size, seed, epoch).take(np.arange(size))
    assert sorted(permuted.tolist()) == list(range(size))


@settings(max_examples=amount(12, of=50))
@given(size=st.integers(32, 300), seed=SEEDS, epoch=st.integers(0, 10**6))
def test_epochs_and_seeds_differ(size: int, seed: int, epoch: int) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return list(Permutation(size, seed, epoch).take(np.arange(size)).tolist())

    here = order(seed, epoch)
    assert here != order(seed, epoch + 1)
    assert here != order(seed + 1, epoch)
    assert here != list(range(size))


@settings(max_examples=amount(7, of=30))
@given(documents=st.integers(1, 60), seed=SEEDS, epochs=st.integers(1, 4))
def test_every_epoch_holds_every_document_once(documents: int, seed: int, epochs: int) -> None:
    order = DocumentOrder(documents, seed)
    for epoch in range(epochs):
        positions = np.arange(epoch * documents, (epoch + 1) * documents)
        assert sorted(order.take(positions).tolist()) == list(range(documents))


@settings(max_examples=amount(7, of=30))
@given(documents=st.integers(1, 60), stride=st.integers(1, 9), begin=st.integers(0, 200))
def test_positions_may_be_asked_for_apart(documents: int, stride: int, begin: int) -> None:
    expected = DocumentOrder(documents, 3).take(np.arange(300))
    positions = np.arange(begin, 300, stride)
    assert np.array_equal(DocumentOrder(documents, 3).take(positions), expected[positions])


def test_corpora_of_a_blend_are_in_orders_of_their_own() -> None:
    first, second = (DocumentOrder(100, 3, place).take(np.arange(100)) for place in (0, 1))
    assert not np.array_equal(first, second)


def test_a_corpus_of_any_size_takes_no_memory_or_time() -> None:
    values = set(Permutation(10**15, 1, 0).take(np.arange(1000)).tolist())
    assert len(values) == 1000
    assert all(0 <= value < 10**15 for value in values)


def test_every_place_is_equally_likely() -> None:
    # 4000 epochs of 20 documents: 200 visits expected a document in each place, sd 13.8.
    for place in (0, 7, 19):
        counts = [0] * 20
        for epoch in range(4000):
            counts[Permutation(20, 5, epoch).take(np.array([place]))[0]] += 1
        assert max(abs(count - 200) for count in counts) < 5 * 13.8


def test_neighbours_are_not_kept_together() -> None:
    permuted = Permutation(1000, 9, 0).take(np.arange(1000))
    together = int((np.abs(np.diff(permuted)) == 1).sum())
    assert together < 12  # 2 expected


def test_the_order_stays_what_it_was() -> None:
    # A change here makes every run in progress resume on other data.
    assert DocumentOrder(10, 1234).take(np.arange(20)).tolist() == ORDER_OF_10


ORDER_OF_10 = [5, 8, 0, 1, 9, 3, 2, 6, 4, 7, 0, 6, 8, 3, 5, 2, 4, 7, 9, 1]
