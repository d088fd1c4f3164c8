"""Pickles in checkpoints, read without running what they name: the only place that reads them.

A pickle may call any function of Python. Those in checkpoints (DCP's `.metadata`, and `data.pkl` in
every file of torch.save) need a few classes of torch and plain containers. `read_pickle` has only
the instructions for these, and makes stand-ins for torch's objects and lists for tuples.

CAUTION: pickle.Unpickler, written in C, allocates 64 GB for one pickle of ten bytes, and takes
hours to hash nested tuples as keys, whatever its `find_class` allows; `pickle_process` is limited.
torch.load(weights_only=True) hashes them too and reads protocol 2, not DCP's. It reads tensors,
after `check_torch_file`.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from struct import error as struct_error
from struct import unpack_from
from typing import Any, BinaryIO, ClassVar, NamedTuple, NoReturn, cast

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp

from slurmllm.core.errors import StorageError
from slurmllm.core.run.rundir import storage_errors
from slurmllm.core.run.safe_files import open_regular, read_limited
from slurmllm.train.checkpoint.archive_checks import FilePart

METADATA = ".metadata"
_LARGEST_METADATA = 1 << 29  # bytes; a chunk of a tensor takes 150
_LARGEST_PICKLE = 1 << 26  # bytes of a file's `data.pkl`; a tensor takes 200


class _StandIn:
    """An object of a pickle: its state, or None without one."""

    __slots__ = ("state",)

    def __init__(self, *args: Any) -> None:
        self.state: Any = None


@cache
def _globals() -> dict[str, Any]:
    """Return what pickles of torch's Metadata (torch 2.9 to 2.13) and of tensors may name."""
    metadata = (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties"),
        *("ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    )
    rebuild = ("tensor", "tensor_v2", "parameter", "device_tensor_from_cpu_tensor")
    stand_ins = [
        *(f"{dcp.__name__}.{name}" for name in metadata),
        *(f"torch._utils._rebuild_{name}" for name in rebuild),
        *(f"{kind.__module__}.{kind.__name__}" for kind in torch._storage_classes),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.device",
        "torch.serialization._get_layout",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",  # Python 3.13
        # Python before 3.11.4 pickles a member of an enum as a call of it; nothing is looked up.
        "builtins.getattr",
    ]
    return {
        **{str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
        **dict.fromkeys(stand_ins, _StandIn),
        "collections.OrderedDict": lambda *args: {},  # its items follow, by SETITEMS
        "torch.Size": torch.Size,
    }


_PurePython: Any = pickle._Unpickler  # whose instructions can be replaced
_INSTRUCTIONS = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT "
    "SHORT_BINUNICODE BINUNICODE EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS GLOBAL "
    "STACK_GLOBAL REDUCE BINPERSID MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET"
)


class _Unpickler(_PurePython):  # type: ignore[misc]
    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path not in _globals():
            _refuse(f"it names {path:.80}, which could run code")
        return _globals()[path]

    def persistent_load(self, pid: Any) -> Any:
        return _StandIn()  # torch's storages

    def load_build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], _StandIn):
            self.stack[-1].state = state
        elif type(self.stack[-1]) is not dict:  # an OrderedDict, whose attributes are not used
            _refuse("it sets attributes of what has none")

    # Lists, which are no keys: the hash of nested tuples takes hours, or overflows the stack.
    def load_group(self, size: int) -> None:
        self.stack[-size:] = [self.stack[-size:]]

    def load_other(self) -> None:
        _refuse("it has an instruction that none of torch's has")

    dispatch: ClassVar[dict[int, Any]] = {
        **dict.fromkeys(range(256), load_other),
        **{
            op: _PurePython.dispatch[op]
            for op in (getattr(pickle, name)[0] for name in _INSTRUCTIONS.split())
        },
        pickle.NEWOBJ[0]: _PurePython.load_reduce,  # a call of what `_globals` has
        pickle.EMPTY_TUPLE[0]: _PurePython.load_empty_list,
        pickle.TUPLE[0]: _PurePython.load_list,
        pickle.TUPLE1[0]: lambda self: self.load_group(1),
        pickle.TUPLE2[0]: lambda self: self.load_group(2),
        pickle.TUPLE3[0]: lambda self: self.load_group(3),
        pickle.BUILD[0]: load_build,
    }


def read_pickle(data: bytes) -> Any:
    """Return a pickle's object: stand-ins for torch's, lists for tuples; or UnpicklingError."""
    try:
        return _Unpickler(BytesIO(data)).load()
    except UnsafePickleError:
        raise
    except Exception as error:  # damaged bytes may raise anything
        raise UnpicklingError(f"damaged: {type(error).__name__}: {error}") from error


class UnsafePickleError(UnpicklingError):
    """A pickle that could run code."""


def _refuse(reason: str) -> NoReturn:
    raise UnsafePickleError(f"not safe to load: {reason}")


Rows = np.ndarray[Any, np.dtype[np.int64]]


class StoredChunks(NamedTuple):
    """The chunks of a tensor, or the place of an object that is no tensor."""

    dtype: torch.dtype | None  # None: no tensor
    shape: tuple[int, ...]
    # [chunks, 2 * dims + 3], int64: offsets, sizes, number of the file, offset, length
    rows: Rows


class ChunkTable(NamedTuple):
    """What DCP's `.metadata` says of all tensors; plain numbers, which can be sent to workers."""

    files: list[str]
    stored: dict[str, StoredChunks]


def read_metadata(directory: Path) -> ChunkTable:
    """Read DCP's `.metadata`: where which chunk is; StorageError if it is unsafe or damaged."""
    path = directory / METADATA
    with storage_errors(f"{path} cannot be read"):
        data = read_limited(path, _LARGEST_METADATA)
    try:
        return _chunk_table(read_pickle(data))
    except UnpicklingError as error:
        raise StorageError(
            f"{path} is {error}; restore it, or take the checkpoint from whoever trained it as "
            "safetensors"
        ) from error


def _chunk_table(metadata: Any) -> ChunkTable:
    """Check every field of the stand-ins."""
    try:
        files: dict[str, int] = {}
        places: dict[str, dict[torch.Size, list[int]]] = {}
        for index, location in metadata.state["storage_data"].items():
            key = _text(index.state["fqn"])
            offset = index.state.get("offset")
            corner = torch.Size() if offset is None else _size(offset)
            number = files.setdefault(_file_name(location.state), len(files))
            bounds = [_number(location.state[name]) for name in ("offset", "length")]
            places.setdefault(key, {})[corner] = [number, *bounds]
        stored = {}
        for key, entry in metadata.state["state_dict_metadata"].items():
            of_key = rows = places.get(_text(key), {})
            dtype = None
            shape = torch.Size()
            if entry.state is not None:
                properties = entry.state["properties"].state
                shape = _size(entry.state["size"])
                dtype = properties[0] if type(properties) is list else properties["dtype"]
                if not isinstance(dtype, torch.dtype):
                    raise TypeError("a tensor without a type")
                rows = {}  # by corner: a chunk that is listed twice must not hide a gap
                for chunk in entry.state["chunks"]:
                    corner = _size(chunk.state["offsets"])
                    sizes = _size(chunk.state["sizes"])
                    # A chunk without a place, or of other dimensions, is of no use.
                    if corner in of_key and len(corner) == len(sizes) == len(shape):
                        rows[corner] = [*corner, *sizes, *of_key[corner]]
            numbers = np.array([*rows.values()], dtype=np.int64).reshape(-1, 2 * len(shape) + 3)
            stored[key] = StoredChunks(dtype, tuple(shape), numbers)
        return ChunkTable(list(files), stored)
    except UnpicklingError:
        raise
    except Exception as error:
        raise UnpicklingError(f"damaged: it is not DCP's metadata: {error!r}") from error


def _file_name(location: dict[str, Any]) -> str:
    path = _text(location["relative_path"])
    if "/" in path or path in ("", ".", ".."):
        _refuse(f"it names the file {path!r:.80}, outside the folder")
    if location.get("transform_descriptors"):
        raise TypeError("transformed shards are not read")
    return path


def _size(value: Any) -> torch.Size:
    if type(value) is not torch.Size or any(number < 0 for number in value):
        raise TypeError("no size of a tensor")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("no text")  # not its repr: that of nested lists may take hours
    return value


def _number(value: Any) -> int:
    if not (type(value) is int and 0 <= value < 1 << 63):
        raise TypeError("no position in a file")
    return value


def check_torch_file(stream: BinaryIO) -> Any:
    """Raise an UnpicklingError if torch.load should not be given this file of torch.save."""
    try:
        with zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
            # torch.save never compresses: such a member may be a thousand times its size on disk.
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                _refuse("its members are compressed")
            pickles = [member for member in members if member.filename.endswith("/data.pkl")]
            if len(pickles) != 1 or pickles[0].file_size > _LARGEST_PICKLE:
                raise UnpicklingError("damaged: it is no file of torch.save")
            # Not by zipfile: checkpoints are written without CRC32 (see dcp_write).
            stream.seek(pickles[0].header_offset + 26)
            stream.seek(sum(unpack_from("<HH", stream.read(4))), os.SEEK_CUR)
            data = stream.read(pickles[0].file_size)
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, struct_error) as error:
        raise UnpicklingError(f"damaged: {error}") from error
    return read_pickle(data)


def pickle_faults(directory: Path, names: Sequence[str]) -> list[str]:
    """Return a line for each of these files with an unsafe pickle."""
    faults = []
    shards: dict[str, list[tuple[int, int]]] = {n: [] for n in names if n.endswith(".pt")}
    try:
        # `.metadata` places the shards in DCP's files; other formats have none.
        dcp_files = METADATA in names or any(name.endswith(".distcp") for name in names)
        table = read_metadata(directory) if dcp_files else ChunkTable([], {})
        for stored in table.stored.values():
            for *_, file, offset, length in stored.rows.tolist():
                if (name := table.files[file]) in names:
                    shards.setdefault(name, []).append((offset, length))
    except StorageError as error:
        faults.append(str(error))
    for name, places in shards.items():
        try:
            with open_regular(directory / name) as stream:
                for offset, length in places:
                    check_torch_file(cast(BinaryIO, FilePart(stream, offset, length)))
                if not places:
                    check_torch_file(stream)
        except OSError as error:
            faults.append(f"{name} cannot be read: {error.strerror or error}")
        except UnpicklingError as error:
            faults.append(f"{name} is {error}")
    return faults
