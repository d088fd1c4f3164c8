"""Files that torch.save wrote: what they hold, and tensors or rows of them, read one at a time.

The file's own index is read under FakeTensorMode, which makes no values and says where in the file
each tensor lies. A mapped file would do as well, but its pages stay with the process: it would grow
to the size of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from slurmllm.checkpoint.safetensors_files import Region
from slurmllm.errors import StorageError

Key = tuple[Any, ...]  # the way through nested dicts: ("base_state", 3, "exp_avg")


class _Stored(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int  # in the file, bytes
    in_rows: bool


class TorchFile:
    """One file.

    Attributes:
        held: Everything in it; tensors without values.

    Raises:
        StorageError: it is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with FakeTensorMode():
                self.held: dict[Any, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
        except Exception as error:  # torch raises what it likes on damaged bytes
            raise StorageError(f"{path} is damaged: {error}; restore it") from error
        self._tensors = {key: _stored(tensor) for key, tensor in _tensors(self.held)}

    def shape(self, key: Key) -> tuple[int, ...] | None:
        """A tensor's dimensions; None where it is not there."""
        return self._tensors[key].shape if key in self._tensors else None

    def dtype(self, key: Key) -> torch.dtype | None:
        """A tensor's type; None where it is not there."""
        return self._tensors[key].dtype if key in self._tensors else None

    def read(self, key: Key, region: Region | None = None) -> Tensor:
        """A tensor or a part of it.

        Raises:
            StorageError: it is not there, or the file cannot be read.
        """
        stored = self._tensors.get(key)
        if stored is None or not stored.in_rows:
            raise StorageError(f"{self.path} holds no {'.'.join(map(str, key))}; restore it")
        shape, first = list(stored.shape), 0
        if region:
            first, shape[0] = region[0].start, region[0].stop - region[0].start
        out = torch.empty(shape, dtype=stored.dtype)
        if out.numel():
            row_bytes = out.nbytes // shape[0] if shape else 0
            self._fill(out, stored.offset + first * row_bytes)
        return out[(slice(None), *region[1:])] if region else out

    def _fill(self, out: Tensor, offset: int) -> None:
        target = out.reshape(-1).view(torch.uint8).numpy().data
        try:
            with self.path.open("rb") as stream:
                stream.seek(offset)
                found = stream.readinto(target)
        except OSError as error:
            raise StorageError(f"{self.path} cannot be read: {error.strerror or error}") from error
        if found != len(target):
            raise StorageError(f"{self.path} is cut short; restore it")


def _tensors(held: Mapping[Any, Any], way: Key = ()) -> Iterator[tuple[Key, Tensor]]:
    for key, value in held.items():
        if isinstance(value, Tensor):
            yield (*way, key), value
        elif isinstance(value, Mapping):
            yield from _tensors(value, (*way, key))


def _stored(tensor: Tensor) -> _Stored:
    start: int = tensor.untyped_storage()._checkpoint_offset or 0
    offset = start + int(tensor.storage_offset()) * tensor.itemsize
    return _Stored(tuple(tensor.shape), tensor.dtype, offset, tensor.is_contiguous())
