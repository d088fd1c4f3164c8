"""Offline write of the native backend's format: one process, one piece of a tensor at a time."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from slurmllm.checkpoint.formats.dcp_writer import DcpWriter, dcp_error, write_item
from slurmllm.checkpoint.shards import Region

if TYPE_CHECKING:
    from slurmllm.progress import OnProgress

PIECE_BYTES = 64 * 2**20  # rounded to rows of the tensor, at least one
FILE_BYTES = 4 * 10**9

Keys = tuple[str, ...]
PieceReader = Callable[[Keys, Region], Tensor]


def write_dcp(
    folder: Path,
    shapes: Mapping[str, Any],
    dtype: torch.dtype,
    read: PieceReader,
    on_progress: OnProgress = lambda _: None,
) -> None:
    """Writes `.metadata` and the shard files into an existing folder.

    Args:
        shapes: The state, nested as in the backend, with shapes in place of tensors.
        dtype: Type of the tensors; scalars are fp32.
        read: Returns a region of a tensor, given the keys that lead to it in `shapes`.
        on_progress: Receives the bytes written so far.

    Raises:
        StorageError: The file system failed a write, or `read` raised it.
    """
    planner = _OfflinePlanner(read, on_progress)
    try:
        with warnings.catch_warnings():
            # There is no process group, on purpose.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save_state(
                _meta_tensors(shapes, dtype),
                storage_writer=_SequentialWriter(folder),
                planner=planner,
                no_dist=True,
            )
    except CheckpointException as error:
        raise dcp_error(error, "cannot write shards") from error


def _meta_tensors(shapes: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        key: _meta_tensors(value, dtype)
        if isinstance(value, Mapping)
        else torch.empty(value, dtype=dtype if value else torch.float32, device="meta")
        for key, value in shapes.items()
    }


class _SequentialWriter(DcpWriter):
    """Releases each piece once it is written; DCP's own writer holds a whole file (torch 2.13)."""

    def _write(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        items = list(plan.items)
        number = 0
        while items:
            name = f"__0_{number}{DEFAULT_SUFFIX}"
            with self.fs.create_stream(Path(self.path) / name, "wb") as stream:
                while items and stream.tell() < FILE_BYTES:
                    item = items.pop(0)
                    results.append(write_item(stream, name, item, planner.resolve_data(item)))
                stream.flush()
                os.fsync(stream.fileno())
            number += 1
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


class _OfflinePlanner(DefaultSavePlanner):
    """Splits tensors into pieces and reads the values of each when it is written."""

    def __init__(self, read: PieceReader, on_progress: OnProgress) -> None:
        super().__init__()
        self._read, self._on_progress, self._done_bytes = read, on_progress, 0

    def create_local_plan(self) -> SavePlan:
        items = [item for key, value in self.state_dict.items() for item in _pieces(key, value)]
        self.plan = replace(SavePlan(items), planner_data=self.mappings)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        data = write_item.tensor_data
        assert data is not None
        region = tuple(
            slice(o, o + n) for o, n in zip(data.chunk.offsets, data.chunk.sizes, strict=True)
        )
        keys = tuple(str(key) for key in self.mappings[write_item.index.fqn])
        values = self._read(keys, region)
        self._done_bytes += values.nbytes
        self._on_progress(self._done_bytes)
        return values


def _pieces(key: str, tensor: Tensor) -> Iterator[WriteItem]:
    """Splits a tensor into groups of rows of at most PIECE_BYTES."""
    rows = tensor.shape[0] if tensor.ndim else 1
    each = max(1, PIECE_BYTES // (tensor.nbytes // rows or 1))
    for start in range(0, rows, each):
        sizes, offsets = list(tensor.shape), [0] * tensor.ndim
        if tensor.ndim:
            sizes[0], offsets[0] = min(each, rows - start), start
        yield WriteItem(
            index=MetadataIndex(key, torch.Size(offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                properties=TensorProperties.create_from_tensor(tensor),
                size=tensor.size(),
            ),
        )
