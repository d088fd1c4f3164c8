"""Folders of safetensors files: what they hold, a tensor or a part of one, and writing them.

The headers of all files are read first and every fault is told at once. A tensor is then mapped
for as long as it is used, so that memory follows what is held and not the size of the model.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slurmllm.errors import StorageError

# Codes of the format's header (huggingface/safetensors, README, "Format") → what torch calls it.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAX_HEADER_BYTES = 100_000_000  # the library's own limit
_LFS_POINTER = b"version https://git-lfs"
_OS_ERROR = re.compile(r"\(os error (\d+)\)")

Region = tuple[slice, ...]


@dataclass(frozen=True)
class StoredTensor:
    """What a file says of a tensor.

    Attributes:
        shape: Its dimensions.
        dtype: None where torch has no such type.
        code: The type as the file names it.
        file: Name of the file that holds it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    code: str
    file: str = ""

    @property
    def num_bytes(self) -> int:
        """Its size, 0 where the type is unknown."""
        return math.prod(self.shape) * (self.dtype.itemsize if self.dtype else 0)


class TensorFiles(Protocol):
    """Tensors by name, however they are stored."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All that are there."""
        ...

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """One of them, or a part of it, in its own type; for reading only."""
        ...


class SafetensorsFiles:
    """The tensors of one or more safetensors files of a folder."""

    def __init__(self, directory: Path, tensors: Mapping[str, StoredTensor]) -> None:
        self.directory = directory
        self.tensors = tensors

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """A tensor or a part of it, mapped from its file; for reading only.

        Raises:
            StorageError: the file cannot be read any more.
        """
        path = self.directory / self.tensors[name].file
        try:
            # Opened for each tensor: the mapping, and with it the memory, ends with the tensor.
            with safe_open(path, framework="pt") as file:
                whole = region is None or not region
                out: Tensor = file.get_tensor(name) if whole else file.get_slice(name)[region]
                return out
        except (OSError, SafetensorError) as error:
            raise StorageError(f"cannot read {name} from {path}: {error}") from error


def open_safetensors(
    directory: Path, names: Sequence[str], weight_map: Mapping[str, str] | None = None
) -> tuple[SafetensorsFiles, list[str]]:
    """Read the headers of files.

    Args:
        directory: Where they are.
        names: The files.
        weight_map: An index's idea of what lies where, which must hold.

    Returns:
        The tensors, and the faults: one line each.
    """
    tensors: dict[str, StoredTensor] = {}
    faults: list[str] = []
    sound = set()
    for name in names:
        try:
            for key, stored in _read_header(directory / name).items():
                if key in tensors:
                    faults.append(
                        f"{key} is in {tensors[key].file} and in {name}; keep one of them"
                    )
                tensors[key] = stored
            sound.add(name)
        except StorageError as error:
            faults.append(str(error))
    for key, name in (weight_map or {}).items():
        if name in sound and (key not in tensors or tensors[key].file != name):
            faults.append(f"the index places {key} in {name}, which does not hold it")
    return SafetensorsFiles(directory, tensors), faults


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Names, types and shapes of a file's tensors.

    Raises:
        StorageError: it is no whole safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if (start + stream.read(64)).startswith(_LFS_POINTER):
                raise StorageError(
                    f"{path.name} is a pointer of Git LFS, not the weights; fetch them with "
                    "`git lfs pull`"
                )
            if size < 8 or (length <= _MAX_HEADER_BYTES and 8 + length > size):
                raise StorageError(
                    f"{path.name} is cut short: {size} bytes, where its header alone takes "
                    f"{8 + length if size >= 8 else 'more'}; copy it again"
                )
            stream.seek(8)
            header = stream.read(length) if length <= _MAX_HEADER_BYTES else b""
    except OSError as error:
        raise StorageError(f"{path.name} cannot be read: {error.strerror or error}") from error
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        found = {key: _stored(entry, path.name) for key, entry in entries.items()}
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise StorageError(
            f"{path.name} is not a safetensors file: its header is damaged; copy it again"
        ) from None
    if size != 8 + length + end:
        word = "is cut short" if size < 8 + length + end else "is too long"
        raise StorageError(
            f"{path.name} {word}: {size} bytes, where its header asks for {8 + length + end}; "
            "copy it again"
        )
    try:
        with safe_open(path, framework="pt"):  # the library's own checks of offsets and types
            return found
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{path.name} is damaged: {error}; copy it again") from error


def _stored(entry: Mapping[str, Any], file: str) -> StoredTensor:
    code = str(entry["dtype"])
    return StoredTensor(tuple(int(size) for size in entry["shape"]), DTYPES.get(code), code, file)


@dataclass(frozen=True)
class OutputShard:
    """A file to be written.

    Attributes:
        file: Its name.
        parts: Indices of what goes into it, in order.
    """

    file: str
    parts: tuple[int, ...]


def plan_shards(
    sizes_bytes: Sequence[int], limit_bytes: int, stem: str, whole: str
) -> list[OutputShard]:
    """Share parts out among files, in order, none above the limit unless one part alone is.

    Args:
        sizes_bytes: Of the parts.
        limit_bytes: Of a file.
        stem: Files are named `<stem>-00001-of-00003.safetensors`.
        whole: Name of the file where there is only one.
    """
    groups: list[list[int]] = [[]]
    filled = 0
    for index, size in enumerate(sizes_bytes):
        if groups[-1] and filled + size > limit_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(index)
        filled += size
    if len(groups) == 1:
        return [OutputShard(whole, tuple(groups[0]))]
    return [
        OutputShard(f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors", tuple(group))
        for number, group in enumerate(groups, start=1)
    ]


def own_storage(tensor: Tensor) -> Tensor:
    """The tensor on storage of its own, as the format wants it."""
    tensor = tensor.contiguous()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    return tensor if whole else tensor.clone()


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one file, on disk for good (fsync).

    Args:
        path: The file.
        tensors: Each as `own` returns it.

    Raises:
        OSError: the file system refused.
    """
    try:
        # The metadata is what transformers looks for before it reads a file.
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = _OS_ERROR.search(str(error))
        code = int(number.group(1)) if number else 0
        raise OSError(code, os.strerror(code) if number else str(error), str(path)) from error
    # The library makes files that only their owner may read.
    path.chmod(0o666 & ~_umask())
    fsync_file(path)


def fsync_file(path: Path) -> None:
    """Put a file's content on disk for good."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def write_index(path: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """Write which tensor is in which file, as transformers does."""
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    fsync_file(path)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
