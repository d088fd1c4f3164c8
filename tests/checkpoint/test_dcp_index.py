"""The index of a checkpoint's chunks: assembled of all workers' parts, and read for one of them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest
import torch

from slurmllm.checkpoint.formats.dcp_index import (
    Chunk,
    ChunkTable,
    Place,
    SaveIndex,
    build_metadata,
    pack_part,
)
from slurmllm.control.plane import ControlPlane
from slurmllm.errors import CodeError, StorageError

ROWS = 12


def chunk(start: int, rows: int, key: str = "model.a") -> Chunk:
    return Chunk(key, ("model", "a"), torch.float32, False, False, (ROWS, 3), (start, 0), (rows, 3))


def part(*chunks: Chunk, rank: int = 0) -> bytes:
    return pack_part(chunks, [Place(f"__{rank}_0.distcp", 64 * n, 64) for n in range(len(chunks))])


def parts(*starts: int, rows: int = 4) -> list[bytes]:
    return [part(chunk(start, rows), rank=rank) for rank, start in enumerate(starts)]


def test_chunks_of_all_workers() -> None:
    found = build_metadata(parts(0, 4, 8))
    assert found.planner_data == {"model.a": ("model", "a")}
    entry = found.state_dict_metadata["model.a"]
    assert [tuple(one.offsets) for one in entry.chunks] == [(0, 0), (4, 0), (8, 0)]  # type: ignore[union-attr]
    assert [place.relative_path for place in found.storage_data.values()] == [
        "__0_0.distcp", "__1_0.distcp", "__2_0.distcp",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("starts", "reason"),
    [
        ((0, 4), "24 of 36 values of model.a"),
        ((0, 4, 8, 4), r"model.a at \(4, 0\) is written twice"),
    ],
)
def test_chunks_that_are_not_the_whole(starts: Sequence[int], reason: str) -> None:
    with pytest.raises(CodeError, match=reason):
        build_metadata(parts(*starts))


def test_a_changed_layout_is_sent_again() -> None:
    index = SaveIndex(ControlPlane(), [chunk(0, ROWS)])
    index.collect([Place("__0_0.distcp", 0, 64)])
    first = index.content()
    index.collect([Place("__0_0.distcp", 0, 64)])
    assert index.content() is first, "kept"
    index.collect([Place("__0_1.distcp", 8, 72)])
    (place,) = pickle.loads(index.content()).storage_data.values()
    assert (place.relative_path, place.offset, place.length) == ("__0_1.distcp", 8, 72)


def test_a_fault_of_one_worker_is_raised() -> None:
    index = SaveIndex(ControlPlane(), [])
    with pytest.raises(StorageError, match="No space"):
        index.collect([], StorageError("No space left on device"))


def test_a_worker_s_part_of_the_table() -> None:
    table = ChunkTable.of(build_metadata(parts(0, 4, 8)))
    table = pickle.loads(pickle.dumps(table))  # as it is sent
    found = table.metadata({"model.a": torch.empty(ROWS, 3), "model.b": torch.empty(1)})
    assert list(found.state_dict_metadata) == ["model.a"]
    assert len(found.storage_data) == 3


def test_only_chunks_that_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    from slurmllm.checkpoint.formats import dcp_index

    table = ChunkTable.of(build_metadata(parts(0, 4, 8)))
    monkeypatch.setattr(dcp_index, "local_region", lambda _: (slice(4, 8), slice(0, 3)))
    found = table.metadata({"model.a": torch.empty(ROWS, 3)})
    assert [tuple(index.offset or ()) for index in found.storage_data] == [(4, 0)]


def test_a_gap_in_a_damaged_index() -> None:
    metadata = build_metadata(parts(0, 4, 8))
    metadata.storage_data.popitem()
    table = ChunkTable.of(metadata)
    with pytest.raises(StorageError, match=r"24 of 36 values of model.a are stored"):
        table.metadata({"model.a": torch.empty(ROWS, 3)})
