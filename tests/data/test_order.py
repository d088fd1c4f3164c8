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


def test_the_order_stays_what_it_was() -> None:
    # A change here makes every run in progress resume on other data.
    assert DocumentOrder(10, 1234).take(np.arange(20)).tolist() == ORDER_OF_10


ORDER_OF_10 = [5, 8, 0, 1, 9, 3, 2, 6, 4, 7, 0, 6, 8, 3, 5, 2, 4, 7, 9, 1]
