"""Pickles in checkpoints, read without running what they name: the only place that reads them.

A pickle is a program that may call any function of Python. Those in checkpoints (DCP's `.metadata`,
and `data.pkl` in every file of torch.save) need a few classes of torch and plain containers.
`read_pickle` has only the instructions for these, makes stand-ins instead of torch's objects, and
uses no tuple as a key: pickle.Unpickler, written in C, would take hours for some pickles of a few
hundred bytes, and 64 GB for one of ten, whatever its `find_class` allows.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Mapping
from functools import cache
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from struct import error as struct_error
from struct import unpack_from
from typing import Any, BinaryIO, ClassVar, NoReturn, cast

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.utils import _ReaderView

from slurmllm.errors import StorageError
from slurmllm.safe_files import open_regular, read_limited

METADATA = ".metadata"
_LARGEST_METADATA = 1 << 29  # bytes; a chunk of a tensor takes 150
_LARGEST_PICKLE = 1 << 26  # bytes of a file's `data.pkl`; a tensor takes 200
_DCP = "torch.distributed.checkpoint."


class _StandIn:
    """An object of a pickle: what it was made from, and its state."""

    __slots__ = ("args", "state")

    def __init__(self, *args: Any) -> None:
        self.args, self.state = args, None

    def fields(self, *names: str) -> list[Any]:
        return [self.state[name] for name in names]  # type: ignore[index]


class _BytesStandIn(_StandIn):
    """BytesStorageMetadata, the only one whose class is of importance."""

    __slots__ = ()


@cache
def _dtypes() -> dict[str, Any]:
    return {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


@cache
def _dcp_names() -> dict[str, Any]:
    """What the pickle of torch's Metadata names (torch 2.9 to 2.13)."""
    kinds = (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )  # fmt: skip
    names = [f"{_DCP}metadata.{kind}" for kind in kinds]
    names += [f"{_DCP}filesystem._StorageInfo", "torch.serialization._get_layout"]
    names += ["pathlib.PosixPath", "pathlib._local.PosixPath"]  # the second: Python 3.13
    return {
        **_dtypes(),
        **dict.fromkeys(names, _StandIn),
        f"{_DCP}metadata.BytesStorageMetadata": _BytesStandIn,
        "torch.Size": torch.Size,
    }


@cache
def _torch_names() -> dict[str, Any]:
    """What torch.save names for tensors in dicts; torch.load(weights_only=True) knows all."""
    storages = [f"{kind.__module__}.{kind.__name__}" for kind in torch._storage_classes]
    rebuild = ("tensor", "tensor_v2", "parameter", "device_tensor_from_cpu_tensor")
    names = [f"torch._utils._rebuild_{name}" for name in rebuild]
    names += ["torch.device", "torch.serialization._get_layout", *storages]
    return {
        **_dtypes(),
        "collections.OrderedDict": _new_dict,
        "torch.Size": torch.Size,
        **dict.fromkeys(names, _StandIn),
    }


_INSTRUCTIONS = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT "
    "SHORT_BINUNICODE BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND "
    "APPENDS EMPTY_DICT GLOBAL STACK_GLOBAL BINPERSID MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET"
)


def _opcodes(names: str) -> list[int]:
    return [getattr(pickle, name)[0] for name in names.split()]


_PurePython: Any = pickle._Unpickler  # whose instructions can be replaced


class _Unpickler(_PurePython):  # type: ignore[misc]
    def __init__(self, data: bytes, names: Mapping[str, Any]) -> None:
        super().__init__(BytesIO(data))
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path not in self._names:
            _refuse(f"it names {path:.80}, which could run code")
        return self._names[path]

    def persistent_load(self, pid: Any) -> Any:
        return _StandIn(pid)  # torch's storages

    def load_object(self) -> None:
        args, make = self.stack.pop(), self.stack.pop()
        self.stack.append(make(*args))  # only what `names` has can be called

    def load_build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], _StandIn):
            self.stack[-1].state = state
        elif type(self.stack[-1]) is not dict:  # an OrderedDict, whose attributes are not used
            _refuse("it sets attributes of what has none")

    def load_setitem(self) -> None:
        self.stack[-2:] = [[*self.stack[-2:]]]
        self.set_items(self.stack.pop())

    def load_setitems(self) -> None:
        self.set_items(self.pop_mark())

    def set_items(self, items: list[Any]) -> None:
        # The hash of nested tuples takes hours, or overflows the stack.
        if type(self.stack[-1]) is not dict or tuple in set(map(type, items[::2])):
            _refuse("it sets items of what is no dict, or by a tuple")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def load_other(self) -> None:
        _refuse("it has an instruction that none of torch's has")

    dispatch: ClassVar[dict[int, Any]] = {
        **dict.fromkeys(range(256), load_other),
        **{op: _PurePython.dispatch[op] for op in _opcodes(_INSTRUCTIONS)},
        pickle.NEWOBJ[0]: load_object, pickle.REDUCE[0]: load_object, pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems,
    }  # fmt: skip


def read_pickle(data: bytes, names: Mapping[str, Any]) -> Any:
    """Return the object of a pickle, in which globals are what `names` has for them.

    Raises:
        UnpicklingError: It names something else, has other instructions, or is damaged.
    """
    try:
        return _Unpickler(data, names).load()
    except _UnsafeError:
        raise
    except Exception as error:  # of damaged bytes anything
        raise UnpicklingError(f"damaged: {type(error).__name__}: {error}") from error


def _new_dict(*args: Any) -> dict[Any, Any]:
    return {}  # its items follow, by SETITEMS


class _UnsafeError(UnpicklingError):
    pass


def _refuse(reason: str) -> NoReturn:
    raise _UnsafeError(f"not safe to load: {reason}")


def read_metadata(directory: Path) -> dcp.Metadata:
    """Read DCP's `.metadata`: where which chunk is; StorageError if it is unsafe or damaged."""
    path = directory / METADATA
    try:
        return _metadata(read_pickle(read_limited(path, _LARGEST_METADATA), _dcp_names()))
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnpicklingError as error:
        raise StorageError(
            f"{path} is {error}; restore it, or take the checkpoint from whoever trained it as "
            "safetensors"
        ) from error


def _metadata(found: Any) -> dcp.Metadata:
    """Make torch's objects of stand-ins, with every field of its type."""
    try:
        entries, planned, places = found.fields(
            "state_dict_metadata", "planner_data", "storage_data"
        )
        return dcp.Metadata(
            {_text(key): _entry(entry) for key, entry in entries.items()},
            {_text(key): tuple(map(_key, keys)) for key, keys in (planned or {}).items()},
            dict(map(_place, places.items())),
            dcp.StorageMeta(),
        )
    except UnpicklingError:
        raise
    except Exception as error:
        raise UnpicklingError(f"damaged: it is not DCP's metadata: {error!r}") from error


def _entry(entry: Any) -> dcp.TensorStorageMetadata | dcp.BytesStorageMetadata:
    if type(entry) is _BytesStandIn:
        return dcp.BytesStorageMetadata()
    properties, size, chunks = entry.fields("properties", "size", "chunks")
    state = properties.state
    dtype = state[0] if type(state) is tuple else state["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise TypeError("a tensor without a type")
    return dcp.TensorStorageMetadata(
        dcp.TensorProperties(dtype),
        _size(size),
        [
            dcp.ChunkStorageMetadata(_size(offsets), _size(sizes))
            for offsets, sizes in (chunk.fields("offsets", "sizes") for chunk in chunks)
        ],
    )


def _place(item: tuple[Any, Any]) -> tuple[dcp.MetadataIndex, _StorageInfo]:
    index, place = item
    (fqn,) = index.fields("fqn")
    offset, hint = index.state.get("offset"), index.state.get("index")
    path, start, length = place.fields("relative_path", "offset", "length")
    if "/" in _text(path) or path in ("", ".", ".."):
        _refuse(f"it names the file {path!r:.80}, outside the folder")
    if place.state.get("transform_descriptors"):
        raise TypeError("transformed shards are not read")
    if type(hint) not in (int, type(None)):
        raise TypeError("no number of a chunk")
    return (
        dcp.MetadataIndex(_text(fqn), None if offset is None else _size(offset), hint),
        _StorageInfo(path, _key(start), _key(length)),
    )


def _size(value: Any) -> torch.Size:
    if type(value) is not torch.Size or any(not 0 <= number < 1 << 63 for number in value):
        raise TypeError("no size of a tensor")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("no text")  # not its repr: that of nested tuples may take hours
    return value


def _key(value: Any) -> Any:
    if type(value) is not str and not (type(value) is int and 0 <= value < 1 << 63):
        raise TypeError("neither a text nor a position")
    return value


class DcpReader(FileSystemReader):
    """DCP's reader of a folder, with `read_metadata`, and regular files only."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.fs = _RegularFiles()
        self.metadata = read_metadata(directory)

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        return self.metadata


class _RegularFiles(FileSystem):
    def create_stream(self, path: Any, mode: str) -> Any:
        return open_regular(Path(path))


class _Part(_ReaderView):
    """A part of a file, as one of its own."""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        # torch's goes beyond the end for an offset from the end.
        if whence == os.SEEK_END:
            offset, whence = self.len + offset, os.SEEK_SET
        return super().seek(offset, whence)


def check_torch_file(stream: BinaryIO) -> Any:
    """Read the pickle of a file of torch.save with stand-ins; its tensors have no values.

    Raises:
        UnpicklingError: torch.load should not be given this file.
    """
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
    return read_pickle(data, _torch_names())


def pickle_faults(directory: Path, names: list[str]) -> list[str]:
    """One line for each of these files of a checkpoint with a pickle that is not safe to load.

    The shards of DCP are those that `.metadata` places in these files.
    """
    faults = []
    places: dict[str, list[_StorageInfo]] = {}
    if METADATA in names or any(name.endswith(".distcp") for name in names):
        try:
            for place in read_metadata(directory).storage_data.values():
                places.setdefault(place.relative_path, []).append(place)
        except StorageError as error:
            faults.append(str(error))
    for name in names:
        ours = places.get(name, [])
        if not ours and not name.endswith(".pt"):
            continue
        try:
            with open_regular(directory / name) as stream:
                for place in ours:
                    check_torch_file(cast(BinaryIO, _Part(stream, place.offset, place.length)))
                if not ours:
                    check_torch_file(stream)
        except OSError as error:
            faults.append(f"{name} cannot be read: {error.strerror or error}")
        except UnpicklingError as error:
            faults.append(f"{name} is {error}")
    return faults
