"""Folders of safetensors files: their headers, whole tensors or regions of them, and writing them.

The headers of all files are read first, so that every fault is reported at once. A tensor is mapped
into memory only while it is used: memory depends on what is held, not on the size of the model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slurmllm.core.errors import StorageError
from slurmllm.core.run.safe_files import LFS_POINTER, LFS_REASON, open_regular
from slurmllm.train.checkpoint.folder import fsync_file
from slurmllm.train.model.regions import Region

if TYPE_CHECKING:
    from slurmllm.core.display.progress import OnProgress

# Types of weights, by their codes in the header (huggingface/safetensors, README, "Format").
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# Types to write, by their names of the command line; None keeps each tensor's own
WEIGHT_TYPES = {"source": None, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class StoredTensor:
    """Shape and type of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None if it is no type of weights
    code: str = ""  # the type as the safetensors format names it, if the file is one
    file: str = ""  # name of the file that holds it, if it is only in one


class TensorFiles(Protocol):
    """Tensors by name, in any storage format."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return a tensor or a region of it in its stored type; the caller must not modify it.

        Raises a StorageError if a file is missing or damaged.
        """
        ...


@dataclass
class SafetensorsFiles:
    """The tensors of one or more safetensors files of a folder."""

    directory: Path
    tensors: Mapping[str, StoredTensor]

    def read(self, name: str, region: Region | None = None) -> Tensor:
        path = self.directory / self.tensors[name].file
        try:
            # Opened for each tensor: the mapping, and with it the memory, ends with the tensor.
            with safe_open(path, framework="pt") as file:
                out: Tensor = file.get_slice(name)[region] if region else file.get_tensor(name)
                return out
        except (OSError, SafetensorError) as error:
            raise StorageError(f"cannot read {name} from {path}: {error}") from error


def open_safetensors(
    directory: Path, names: Sequence[str], weight_map: Mapping[str, str] | None = None
) -> tuple[SafetensorsFiles, list[str]]:
    """Read headers, which must confirm `weight_map`; return the tensors, and a line per fault."""
    tensors: dict[str, StoredTensor] = {}
    faults: list[str] = []
    readable = set()
    for name in names:
        try:
            for key, stored in _read_header(directory / name).items():
                if key in tensors:
                    faults.append(
                        f"{key} is in {tensors[key].file} and in {name}; keep one of them"
                    )
                tensors[key] = stored
            readable.add(name)
        except StorageError as error:
            faults.append(str(error))
    for key, name in (weight_map or {}).items():
        if name in readable and (key not in tensors or tensors[key].file != name):
            faults.append(f"the index places {key} in {name}, which does not hold it")
    return SafetensorsFiles(directory, tensors), faults


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Return types and shapes of a file's tensors; StorageError if the file is not complete."""
    try:
        with open_regular(path) as stream:
            if stream.read(len(LFS_POINTER)) == LFS_POINTER:
                raise StorageError(f"{path.name} is {LFS_REASON}")
        tensors = {}
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  not a mapping
                stored = file.get_slice(key)
                shape = tuple(stored.get_shape())
                code = stored.get_dtype()
                tensors[key] = StoredTensor(shape, DTYPES.get(code), code, path.name)
        return tensors
    except (OSError, ValueError) as error:  # a ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise StorageError(f"{path.name} cannot be read: {reason}") from error
    except SafetensorError as error:
        raise StorageError(
            f"{path.name} is cut short or damaged: {error}; copy it again"
        ) from error


def plan_shards(
    sizes_bytes: Sequence[int], limit_bytes: int, stem: str, whole: str
) -> dict[str, list[int]]:
    """Distribute parts over files in order; return file name → indices of its parts.

    A file exceeds the limit only for a single large part; if one is enough, it is named `whole`.
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
        return {whole: groups[0]}
    return {
        f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors": group
        for number, group in enumerate(groups, start=1)
    }


def write_shards(
    folder: Path,
    shards: Mapping[str, Sequence[int]],
    sizes_bytes: Sequence[int],
    convert: Callable[[int], Mapping[str, Tensor]],
    on_progress: OnProgress,
    on_file: Callable[[str], None] = lambda _: None,
) -> dict[str, str]:
    """Write the files of `plan_shards`, one in memory at a time; return tensor name → file.

    `convert` returns the tensors of a part, `on_file` gets the name of each file that is complete.
    """
    weight_map: dict[str, str] = {}
    done_bytes = 0
    for file, parts in shards.items():
        tensors: dict[str, Tensor] = {}
        for index in parts:
            tensors |= {name: own_storage(t) for name, t in convert(index).items()}
            done_bytes += sizes_bytes[index]
            on_progress(done_bytes)
        path = folder / file
        path.touch()  # with the mode that the user's umask gives
        mode = path.stat().st_mode
        try:
            # transformers refuses a file without this metadata.
            save_file(tensors, path, metadata={"format": "pt"})
        except SafetensorError as error:  # the library wraps the file system's error in a text
            number = re.search(r"\(os error (\d+)\)", str(error))
            code = int(number[1]) if number else 0
            raise OSError(code, os.strerror(code) if number else str(error), str(path)) from error
        path.chmod(mode)  # the library creates files that only their owner may read
        fsync_file(path)
        on_file(file)
        weight_map |= dict.fromkeys(tensors, file)
    return weight_map


def own_storage(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous and without shared storage, which would be written whole."""
    tensor = tensor.contiguous()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    return tensor if whole else tensor.clone()


def write_index(path: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """Write tensor → file, in transformers' form."""
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    fsync_file(path)
