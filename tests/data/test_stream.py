import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slurmllm.core.errors import DataError
from slurmllm.core.run.artifact_records import DataRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.data.spec import StreamSpec, merge_states
from slurmllm.data.stream import Batch, PackedStream, check_data
from slurmllm.data.tokenizer import TokenEncoder

from . import corpora
from .conftest import make_corpus
from .corpora import close, restored, saved, take

SEQ_LEN = 24
GLOBAL_BATCH = 8


def spec(corpus: Path, tokenizer: Path, **other: Any) -> StreamSpec:
    shape = {"seq_len": SEQ_LEN, "global_batch": GLOBAL_BATCH, "seed": 11, **other}
    return StreamSpec([(corpus, 1.0)], tokenizer, **shape)


def streams(
    corpus: Path, tokenizer: Path, dp_size: int = 1, workers: int = 0, **other: Any
) -> list[PackedStream]:
    return corpora.streams(spec(corpus, tokenizer, **other), dp_size, workers)


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


def test_positions_and_ranks_that_do_not_fit_are_refused(corpus: Path, tokenizer: Path) -> None:
    (rank,) = streams(corpus, tokenizer)
    state = saved([rank])
    state["slots"][0] = [0, 0, 10_000]
    rank.load_state(state)
    with pytest.raises(DataError, match="token 10000 of a part of a document of"):
        rank.next_batch()
    with pytest.raises(DataError, match=r"global_batch 8 is not a multiple of the 3 .*choose 6"):
        streams(corpus, tokenizer, 3)


def test_what_a_run_reads(corpus: Path, tokenizer: Path) -> None:
    (rank,) = streams(corpus, tokenizer, validation=0.25, mask="document")
    identity = json.loads(json.dumps(rank.identity))
    assert identity.pop("corpora") == [
        {"path": str(corpus), "fingerprint": rank.state()["corpus"], "weight": 1.0, "documents": 97}
    ]
    assert identity == {
        "tokenizer": TokenEncoder(tokenizer).fingerprint,
        "seed": 11,
        "seq_len": SEQ_LEN,
        "global_batch": GLOBAL_BATCH,
        "mask": "document",
        "validation": 0.25,
    }


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
        state = saved(ranks)
        take(ranks, 2)
        for resumed in (streams(corpus, tokenizer, 4), ranks):  # another stream, or the same again
            assert {rank.batches for rank in restored(resumed, state)} == {7}
            assert np.array_equal(take(resumed, 5), expected[7:])
    finally:
        close(ranks)


def test_labels_do_not_change_the_inputs_of_one_row() -> None:
    tokens = np.arange(6)[None].copy()
    batch = Batch(tokens, None, np.array([[True, True, True, False, False, False]]))
    assert batch.labels(-100).tolist() == [[-100, -100, 3, 4, 5]]
    assert batch.inputs.tolist() == [[0, 1, 2, 3, 4]]


def recorded(**changed: Any) -> dict[str, Any]:
    corpus = {"path": "/a.arrow", "fingerprint": "12", "documents": 9, "weight": 1.0}
    fields = {"seed": 1, "seq_len": 8, "global_batch": 4, "mask": "none", "validation": 0.0}
    return {"corpora": [corpus], "tokenizer": "77", **fields, **changed}


def test_a_record_is_written_once_or_if_damaged_and_held_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDir(tmp_path / "r")
    run.path.mkdir()
    check_data(run, recorded())
    written = run.data.read_bytes()
    assert DataRecord.load(run.data).tokenizer == "77"
    check_data(run, recorded())
    assert run.data.read_bytes() == written
    changed = {"path": "/a.arrow", "fingerprint": "34", "documents": 9, "weight": 1.0}
    with pytest.raises(DataError, match=r"corpora a\.arrow \(12\) and a\.arrow \(34\)"):
        check_data(run, recorded(corpora=[changed]))
    with pytest.raises(DataError, match="seed 1 and 2"):
        check_data(run, recorded(seed=2))
    run = RunDir(tmp_path)
    run.data.write_text("{")
    check_data(run, recorded())
    assert "data.json is damaged" in caplog.text
    check_data(run, recorded())
    with pytest.raises(DataError, match="seed"):
        check_data(run, recorded(seed=2))
    run.data.unlink()
    os.mkfifo(run.data)
    check_data(run, recorded())
    assert run.data.is_file()
