"""The index of a checkpoint's chunks: assembled of all workers' parts, and read for one of them."""

import io
import os
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

from slurmllm.core.errors import CodeError, StorageError
from slurmllm.core.run.safe_files import open_regular
from slurmllm.train.checkpoint.formats import dcp_read
from slurmllm.train.checkpoint.formats.dcp_read import DcpFiles
from slurmllm.train.checkpoint.formats.dcp_write import (
    ChecksumFiles,
    Chunk,
    Place,
    SaveIndex,
    build_metadata,
    pack_part,
    write_chunk,
)
from slurmllm.train.checkpoint.formats.pickles import FilePart, pickle_faults, read_metadata
from slurmllm.train.control.plane import ControlPlane
from slurmllm.train.model.private_names import CHECKPOINT_INDEX
from train.checkpoint.nxd_folders import write_dcp

ROWS = 12


def chunk(start: int, rows: int) -> Chunk:
    return Chunk(("model", "a"), torch.float32, (ROWS, 3), (start, 0), (rows, 3))


def part(*chunks: Chunk, rank: int = 0) -> bytes:
    return pack_part(chunks, [Place(f"__{rank}_0.distcp", 64 * n, 64) for n in range(len(chunks))])


def parts(*starts: int, rows: int = 4) -> list[bytes]:
    return [part(chunk(start, rows), rank=rank) for rank, start in enumerate(starts)]


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
    first = index.content
    index.collect([Place("__0_0.distcp", 0, 64)])
    assert index.content is first, "kept"
    index.collect([Place("__0_1.distcp", 8, 72)])
    (place,) = pickle.loads(index.content).storage_data.values()
    assert (place.relative_path, place.offset, place.length) == ("__0_1.distcp", 8, 72)


@pytest.fixture
def values() -> torch.Tensor:
    return torch.arange(ROWS * 3.0).view(ROWS, 3)


@pytest.fixture
def metadata(values: torch.Tensor, tmp_path: Path) -> Metadata:
    """Of a folder with `values` in three files of four rows."""
    parts = []
    for rank, start in enumerate((0, 4, 8)):
        name = f"__{rank}_0.distcp"
        with ChecksumFiles().create(tmp_path / name) as stream:
            place = write_chunk(stream, name, values[start : start + 4])
        parts.append(pack_part([chunk(start, 4)], [place]))
    metadata = build_metadata(parts)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    return metadata


def read(folder: Path, region: tuple[slice, ...] | None = None) -> torch.Tensor:
    table = pickle.loads(pickle.dumps(read_metadata(folder)))  # as it is sent
    return DcpFiles(folder, table).read("a", region)


@pytest.mark.usefixtures("metadata")
def test_regions_of_a_tensor(values: torch.Tensor, tmp_path: Path) -> None:
    assert torch.equal(read(tmp_path), values)
    region = (slice(2, 9), slice(1, 3))
    assert torch.equal(read(tmp_path, region), values[region])
    with zipfile.ZipFile(tmp_path / "__0_0.distcp") as archive:
        assert {member.CRC for member in archive.infolist()} == {0}, "a fifth of the CPU time"
    # Only chunks that overlap are read.
    (tmp_path / "__0_0.distcp").unlink()
    assert torch.equal(read(tmp_path, (slice(4, 8), slice(0, 3))), values[4:8])
    with pytest.raises(StorageError, match=r"cannot read model\.a from"):
        read(tmp_path)
    with pytest.raises(StorageError, match=r"holds no model\.b; restore it"):
        DcpFiles(tmp_path).read("b")
    shard = tmp_path / "__2_0.distcp"
    shard.write_bytes(shard.read_bytes()[:200])
    with pytest.raises(StorageError, match=rf"{shard.name} is truncated or damaged"):
        read(tmp_path, (slice(8, 9), slice(0, 3)))
    (tmp_path / ".metadata").write_bytes(b"\x80")
    with pytest.raises(StorageError, match=r"\.metadata is damaged"):
        read(tmp_path)


def test_a_load_opens_a_file_once(
    values: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dcp(tmp_path, {("model", name): values + ord(name) for name in "abc"})
    files, opened = DcpFiles(tmp_path), list[str]()

    def counted(path: Path) -> BinaryIO:
        opened.append(path.name)
        return open_regular(path)

    monkeypatch.setattr(dcp_read, "open_regular", counted)
    region, out = (slice(2, 9), slice(1, 3)), {name: torch.empty(7, 2) for name in "cab"}
    files.fill({f"model.{name}": (tensor, region) for name, tensor in out.items()})
    assert opened == ["__0_0.distcp"]
    assert all(torch.equal(out[name], values[region] + ord(name)) for name in out)


def test_a_part_of_a_file_ends_before_the_next() -> None:
    part_of_file = FilePart(io.BytesIO(b"0123456789"), 2, 5)
    assert (part_of_file.read(), part_of_file.read()) == (b"23456", b"")
    assert (part_of_file.seek(-2, os.SEEK_END), part_of_file.read(9)) == (3, b"56")


def test_a_gap_in_a_damaged_index(metadata: Metadata, tmp_path: Path) -> None:
    metadata.storage_data.popitem()
    entry: Any = metadata.state_dict_metadata["model.a"]
    entry.chunks.append(entry.chunks[0])  # hides no gap
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(StorageError, match=r"24 of 36 values of model\.a"):
        read(tmp_path)


def test_chunks_of_9_dimensions(metadata: Metadata, values: torch.Tensor, tmp_path: Path) -> None:
    """Nine dimensions take as many numbers as three chunks of two."""
    (place, *_) = metadata.storage_data.values()
    offsets, sizes = torch.Size([0] * 9), torch.Size([1] * 9)
    entry: Any = metadata.state_dict_metadata["model.a"]
    entry.chunks.append(ChunkStorageMetadata(offsets, sizes))
    metadata.storage_data[MetadataIndex("model.a", offsets)] = place
    metadata.state_dict_metadata["object"] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex("object", torch.Size([0, 0, 0]))] = place
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert torch.equal(read(tmp_path), values)
    assert pickle_faults(tmp_path, ["__0_0.distcp", ".metadata"]) == []


def test_a_chunk_of_another_size(metadata: Metadata, tmp_path: Path) -> None:
    with ChecksumFiles().create(tmp_path / "__1_0.distcp") as stream:
        write_chunk(stream, "__1_0.distcp", torch.zeros(4, 3)[:, :2])
    with pytest.raises(StorageError, match=r"a chunk is \[4, 2\] instead of \[4, 3\]"):
        read(tmp_path)


def test_a_torch_without_its_class_of_places(
    values: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(filesystem, "_StorageInfo")
    assert CHECKPOINT_INDEX.missing() is not None
    write_dcp(tmp_path, {("model", "a"): values})
    assert torch.equal(read(tmp_path), values)
