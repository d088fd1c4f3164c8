from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from slurmllm.data.order import DocumentOrder, Permutation

SEEDS = st.integers(0, 2**63)


@settings(deadline=None, max_examples=150)
@given(size=st.integers(1, 700), seed=SEEDS, epoch=st.integers(0, 10**6))
def test_permutation_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    permutation = Permutation(size, seed, epoch)
    assert sorted(permutation[i] for i in range(size)) == list(range(size))


@settings(deadline=None, max_examples=50)
@given(size=st.integers(32, 300), seed=SEEDS, epoch=st.integers(0, 10**6))
def test_epochs_and_seeds_differ(size: int, seed: int, epoch: int) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        permutation = Permutation(size, seed, epoch)
        return [permutation[i] for i in range(size)]

    here = order(seed, epoch)
    assert here != order(seed, epoch + 1)
    assert here != order(seed + 1, epoch)
    assert here != list(range(size))


@settings(deadline=None, max_examples=30)
@given(documents=st.integers(1, 60), seed=SEEDS, epochs=st.integers(1, 4))
def test_every_epoch_holds_every_document_once(documents: int, seed: int, epochs: int) -> None:
    order = DocumentOrder(documents, seed)
    for epoch in range(epochs):
        positions = range(epoch * documents, (epoch + 1) * documents)
        assert sorted(map(order.document, positions)) == list(range(documents))


def test_positions_may_be_asked_in_any_order() -> None:
    forward, backward = DocumentOrder(10, 3), DocumentOrder(10, 3)
    expected = [forward.document(p) for p in range(50)]
    assert [backward.document(p) for p in reversed(range(50))] == expected[::-1]


def test_a_corpus_of_any_size_takes_no_memory_or_time() -> None:
    permutation = Permutation(10**15, 1, 0)
    values = {permutation[i] for i in range(1000)}
    assert len(values) == 1000
    assert all(0 <= value < 10**15 for value in values)


def test_every_place_is_equally_likely() -> None:
    # 4000 epochs of 20 documents: 200 visits expected a document in each place, sd 13.8.
    for place in (0, 7, 19):
        counts = [0] * 20
        for epoch in range(4000):
            counts[Permutation(20, 5, epoch)[place]] += 1
        assert max(abs(count - 200) for count in counts) < 5 * 13.8


def test_neighbours_are_not_kept_together() -> None:
    permutation = Permutation(1000, 9, 0)
    together = sum(abs(permutation[i] - permutation[i + 1]) == 1 for i in range(999))
    assert together < 12  # 2 expected


def test_the_order_stays_what_it_was() -> None:
    # A change here makes every run in progress resume on other data.
    order = DocumentOrder(10, 1234)
    assert [order.document(p) for p in range(20)] == ORDER_OF_10


ORDER_OF_10 = [5, 8, 0, 1, 9, 3, 2, 6, 4, 7, 0, 6, 8, 3, 5, 2, 4, 7, 9, 1]
