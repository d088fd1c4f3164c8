import json
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from amounts import amount, sample
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmllm.core.errors import DataError
from slurmllm.data.order import Blend, DocumentOrder, Permutation
from slurmllm.data.spec import StreamSpec
from slurmllm.data.tokenizer import TokenEncoder

from .corpora import close, restored, saved, streams, take, write_texts

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
    values = set(Permutation(10**15, 1, 0).take(np.arange(1000)).tolist())
    assert len(values) == 1000
    assert all(0 <= value < 10**15 for value in values)


def test_the_order_stays_what_it_was() -> None:
    # A change here makes every run in progress resume on other data.
    assert DocumentOrder(10, 1234).take(np.arange(20)).tolist() == ORDER_OF_10


ORDER_OF_10 = [5, 8, 0, 1, 9, 3, 2, 6, 4, 7, 0, 6, 8, 3, 5, 2, 4, 7, 9, 1]


WEIGHTS = st.lists(
    st.one_of(st.integers(1, 1000), st.floats(1e-6, 1e6, allow_nan=False)), min_size=1, max_size=7
)


@settings(max_examples=amount(15, of=60))
@given(weights=WEIGHTS, global_batch=st.integers(1, 40), seed=st.integers(0, 2**32))
def test_shares_are_exact_at_each_draw(weights: list[float], global_batch: int, seed: int) -> None:
    blend = Blend(weights, 1, seed, [0] * len(weights))
    exact = [Fraction(str(weight)) for weight in weights]
    for draws in range(1, 200):
        blend.next_step()
        for count, weight in zip(blend.counts, exact, strict=True):
            assert abs(count - weight * draws / sum(exact)) < 1
    # In batches the draws are the same.
    whole = Blend(weights, global_batch, seed, [0] * len(weights))
    drawn = Counter(corpus for _ in range(3) for corpus in whole.next_step())
    assert [drawn[corpus] for corpus in range(len(weights))] == whole.counts
    for count, weight in zip(whole.counts, exact, strict=True):
        assert abs(count - weight * 3 * global_batch / sum(exact)) < 1


def test_every_slot_reads_every_corpus_alike() -> None:
    blend = Blend([7, 1], 8, 1, [0, 0])  # one draw of the second a step
    slots = Counter(blend.next_step().index(1) for _ in range(800))
    assert len(slots) == 8
    assert max(abs(count - 100) for count in slots.values()) < 5 * 9.4  # standard deviations


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("two")
    return (
        write_texts(folder / "a.arrow", [f"A{i} " + "a " * (i % 17) for i in range(60)]),
        write_texts(folder / "b.arrow", [f"B{i} " + "b " * (i % 23) for i in range(50)]),
    )


def blended(two: tuple[Path, Path], tokenizer: Path, *weights: float) -> StreamSpec:
    return StreamSpec(list(zip(two, weights, strict=True)), tokenizer, 16, 8, 5)


@pytest.mark.parametrize(
    ("dp_size", "workers"), sample(2, [(2, 0), (1, 3), (1, 0), (4, 1)], arguments=2)
)
def test_a_blend_is_the_same_everywhere_and_resumes(
    two: tuple[Path, Path], tokenizer: Path, dp_size: int, workers: int
) -> None:
    spec = blended(two, tokenizer, 0.7, 0.3)
    expected = take(streams(spec), 20)
    ranks, resumed = streams(spec, dp_size, workers), streams(spec, dp_size, workers)
    try:
        assert np.array_equal(take(ranks, 9), expected[:9])
        state = saved(ranks)
        assert sum(state["counts"]) == 9 * 8
        assert np.array_equal(take(restored(resumed, state), 11), expected[9:])
    finally:
        close([*ranks, *resumed])


def test_sequences_of_two_corpora_and_of_one_twice(two: tuple[Path, Path], tokenizer: Path) -> None:
    decode = TokenEncoder(tokenizer).decode
    texts = [
        decode(row) for row in take(streams(blended(two, tokenizer, 3, 1)), 50).reshape(-1, 17)
    ]
    assert not any("A" in text and "B" in text for text in texts)
    assert sum("b" in text.lower() for text in texts) == 100
    spec = StreamSpec([(two[0], 1.0), (two[0], 1.0)], tokenizer, 16, 2, 5)
    rows = take(streams(spec), 10).reshape(-1, 17)
    assert len({tuple(row) for row in rows.tolist()}) == 20


def test_a_state_of_another_blend_is_refused(two: tuple[Path, Path], tokenizer: Path) -> None:
    state = saved(streams(blended(two, tokenizer, 1, 2)))
    assert len(json.dumps(state)) < 1500
    for spec, message in (
        (blended(two, tokenizer, 1, 3), r"with weight 2 of .*b\.arrow, this stream has 3"),
        (blended((two[1], two[0]), tokenizer, 1, 2), r"with corpus .*a\.arrow \(fingerprint"),
        (StreamSpec([(two[0], 1.0)], tokenizer, 16, 8, 5), "saved with 2 corpora, .* has 1"),
    ):
        with pytest.raises(DataError, match=message):
            streams(spec)[0].load_state(state)
