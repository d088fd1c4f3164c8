"""Checkpoints of the native backend in the format of torch.distributed.checkpoint (DCP).

Every worker writes its own shards; `.metadata` maps parameter names to chunks, so that another
number of workers, and torch itself, can read them. DCP's own planning gathers all plans on one
worker, its `async_save` makes collectives from a background thread and blocks training while it
copies, and its reader gives every worker the whole `.metadata`. Here a save is:

1. `begin`: the plan, made once and without a message (`save_plan`): names and shapes never change.
2. In a thread: the copy into host memory. It continues during the next forward and backward passes,
   which only read weights; `wait_for_copy` blocks the optimizer until it is complete. On CUDA, a
   stream of its own copies into pinned memory.
3. In that thread, at a lower priority: files, checksums and fsync.
4. `finish` (collective): `.metadata` (`dcp_write`).

A thread and not a process, because the long parts (copy, write, sha256) release the GIL.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from slurmllm.core.config.recipe import ModelConfig
from slurmllm.core.errors import SlurmllmError, StorageError
from slurmllm.train.backends.native.device import Device
from slurmllm.train.backends.native.save_plan import RANDOM, MeshPlace, own_tensors, share_out
from slurmllm.train.checkpoint.formats.dcp_read import DcpFiles
from slurmllm.train.checkpoint.formats.dcp_write import (
    ChecksumFiles,
    Chunk,
    Keys,
    Place,
    SaveIndex,
    file_name,
    write_chunk,
)
from slurmllm.train.checkpoint.formats.nxd_files import read_layout
from slurmllm.train.checkpoint.formats.pickles import METADATA, ChunkTable, read_metadata
from slurmllm.train.checkpoint.formats.weights import TrainingFiles, open_training
from slurmllm.train.checkpoint.shards import ShardWrite
from slurmllm.train.checkpoint.state import read_origin
from slurmllm.train.control.plane import ControlPlane
from slurmllm.train.model.init import local_part, local_region

log = logging.getLogger(__name__)

_ALIGNMENT = 64  # bytes, of a copy in host memory
_BACKGROUND_NICENESS = 5  # of the writing threads: training has the cores first
_SPLIT_BYTES = 64 * 2**20  # size of a worker's state from which on it takes two files


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, Any]:
    """Return a worker's state for a checkpoint: the tensors themselves, no copies."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {
        "model": model_state,
        # Without param_groups: learning rate and the like come from the recipe.
        "optimizer": optimizer_state["state"],
        RANDOM: {_random_key(rank): _random_state(model)},
    }


def _tensors(state: Mapping[str, Any], keys: Keys = ()) -> Iterator[tuple[Keys, Tensor]]:
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _tensors(value, (*keys, key))
        else:
            assert isinstance(value, Tensor), "a state holds tensors only"
            yield (*keys, key), value


class DcpSaver:
    """Writer of a worker's part of every checkpoint, with one plan and host memory for all."""

    def __init__(self, control: ControlPlane, device: Device, mesh_place: MeshPlace) -> None:
        self._control, self._device, self._mesh_place = control, device, mesh_place
        self._files: list[list[str]] = []  # keys of this worker's tensors, by file
        self._index: SaveIndex | None = None
        self._names: frozenset[str] = frozenset()
        self._copies: dict[str, Tensor] = {}
        self._save: DcpSave | None = None

    def begin(self, state: Mapping[str, Any], directory: Path, *, asynchronous: bool) -> DcpSave:
        """Begin to write a state (tensors, DTensors, dicts of them) into a folder.

        Unless `asynchronous`, all is written on return (collective). Raises a StorageError on all
        workers if the file system refused one of them.
        """
        by_keys = dict(_tensors(state))
        tensors = {".".join(keys): tensor for keys, tensor in by_keys.items()}
        if self._index is None:
            self._names, self._files = frozenset(tensors), self._plan(tensors)
            chunks = {
                ".".join(keys): Chunk.from_tensor(keys, tensor) for keys, tensor in by_keys.items()
            }
            self._index = SaveIndex(
                self._control, [chunks[key] for file in self._files for key in file]
            )
        assert self._names == tensors.keys(), "the names of a state never change"
        parts = [{key: local_part(tensors[key]).detach() for key in file} for file in self._files]
        if asynchronous and not self._copies:
            self._allocate_copies(parts)
        save = DcpSave(directory, parts, self._control, self._index)
        self._save = save
        if asynchronous:
            save.start(self._copies, self._device)
        else:
            save.write_all()
        return save

    def _plan(self, tensors: Mapping[str, Tensor]) -> list[list[str]]:
        """Choose the files of this worker: two keep two cores busy with checksums."""
        keys = own_tensors(tensors, self._mesh_place)
        sizes = {key: local_part(tensors[key]).nbytes for key in keys}
        return share_out(sizes, 2) if sum(sizes.values()) >= _SPLIT_BYTES else [keys]

    def wait_for_copy(self) -> None:
        """Wait until the state may be changed; before every optimizer step."""
        if self._save is not None:
            self._save.wait_for_copy()

    def _allocate_copies(self, parts: Sequence[Mapping[str, Tensor]]) -> None:
        tensors = {key: tensor for group in parts for key, tensor in group.items()}
        sizes = {key: math.ceil(t.nbytes / _ALIGNMENT) * _ALIGNMENT for key, t in tensors.items()}
        memory = mmap.mmap(-1, sum(sizes.values()) or _ALIGNMENT)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # a hundredth of the page faults
            memory.madvise(mmap.MADV_HUGEPAGE)
        offset = 0
        for key, tensor in tensors.items():
            # Each copy has a storage of its own, because torch.save writes the whole storage.
            if count := tensor.numel():
                flat = torch.frombuffer(memory, dtype=tensor.dtype, count=count, offset=offset)
                self._copies[key] = flat.view(tensor.shape)
            else:  # `frombuffer` refuses a count of 0
                self._copies[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
            offset += sizes[key]
        # Pinned, so that copies run during computation; it stays registered until the end.
        if fault := self._device.pin(torch.frombuffer(memory, dtype=torch.uint8)):
            log.warning("slow copies at saves: %s", fault)


class DcpSave(ShardWrite):
    """One save of a worker's shards; made by `DcpSaver.begin`."""

    def __init__(
        self,
        directory: Path,
        parts: Sequence[dict[str, Tensor]],
        control: ControlPlane,
        index: SaveIndex,
    ) -> None:
        self._directory, self._parts = directory, parts
        self._control, self._index = control, index
        self._written = ChecksumFiles()
        self._copied = threading.Event()
        self._places: Future[list[Place]] = Future()
        self._names: list[str] | None = None
        self.waited_s = 0.0

    def write_all(self) -> None:
        self._copied.set()
        self._write()
        self._names = [*sorted(self._written.written), *self._write_metadata()]

    def start(self, copies: Mapping[str, Tensor], device: Device) -> None:
        ready = device.event()
        executor = ThreadPoolExecutor(1, thread_name_prefix="shards")
        executor.submit(self._copy_and_write, copies, device, ready)
        executor.shutdown(wait=False)

    def wait_for_copy(self) -> None:
        if not self._copied.is_set():
            began = time.monotonic()
            self._copied.wait()
            self.waited_s += time.monotonic() - began

    def _copy_and_write(self, copies: Mapping[str, Tensor], device: Device, ready: Any) -> None:
        try:
            self._copy(copies, device, ready)
        except BaseException as error:
            self._places.set_exception(error)
            return
        finally:
            self._copied.set()
        # On Linux this changes only this thread and the threads that it starts.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND_NICENESS)
        self._write()

    def _copy(self, copies: Mapping[str, Tensor], device: Device, ready: Any) -> None:
        """Copy all tensors after the work that was enqueued before `ready`."""
        with torch.no_grad(), device.copies(ready):
            copied = [
                {key: copies[key].copy_(t, non_blocking=True) for key, t in group.items()}
                for group in self._parts
            ]
        self._parts = copied  # only now: other streams use the memory of tensors that are released

    def _write(self) -> None:
        try:
            with ThreadPoolExecutor(len(self._parts)) as pool:
                places = list(pool.map(self._write_file, range(len(self._parts)), self._parts))
            self._places.set_result([location for group in places for location in group])
        except BaseException as error:  # raised by `wait` and `finish`, on all workers
            self._places.set_exception(error)

    def _write_file(self, number: int, tensors: Mapping[str, Tensor]) -> list[Place]:
        name = file_name(self._control.rank, number)
        with self._written.create(self._directory / name) as stream:
            return [write_chunk(stream, name, tensor) for tensor in tensors.values()]

    def wait(self) -> list[str]:
        if self._names is not None:
            return self._names
        try:
            self._places.result()
        except OSError as error:
            raise self._storage_error(error) from error
        return sorted(self._written.written)

    def finish(self) -> list[str]:
        return self._write_metadata() if self._names is None else []

    def _write_metadata(self) -> list[str]:
        """Write `.metadata` on rank 0 (collective)."""
        fault: SlurmllmError | None = None
        places: list[Place] = []
        try:
            places = self._places.result()
        except (OSError, SlurmllmError) as error:
            fault = self._storage_error(error)
        self._index.collect(places, fault)
        if self._control.rank == 0:
            try:
                with self._written.create(self._directory / METADATA) as stream:
                    stream.write(self._index.content())
            except (OSError, SlurmllmError) as error:
                fault = self._storage_error(error)
        if first := self._control.first(fault):
            raise first
        return [METADATA] if self._control.rank == 0 else []

    def _storage_error(self, error: OSError | SlurmllmError) -> SlurmllmError:
        if isinstance(error, SlurmllmError):
            return error
        reason = error.strerror or error
        return StorageError(f"cannot write shards: {reason} (rank {self._control.rank})")

    def sha256(self, name: str) -> str | None:
        return self._written.written.get(name)


def load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    directory: Path,
    control: ControlPlane,
    config: ModelConfig | None = None,
) -> None:
    """Load a checkpoint of any number of workers, by DCP or by NxD (collective).

    The random state is restored if the number of workers is the same. Without `config`, the model's
    is read from `train_state.json`. Raises a StorageError on all workers if one cannot read its
    shards.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state["state"]}
    table = _read_table(directory, control)
    fault: SlurmllmError | None = None
    try:
        if table is None:
            files = open_training(directory, config or read_origin(directory).model)
            _read_nxd_shards(state, files)
        else:
            # Each worker that wrote the checkpoint has a random state.
            writers = {key.split(".")[1] for key in table.stored if key.startswith(f"{RANDOM}.")}
            if len(writers) == control.world_size:
                mine, now = _random_key(control.rank), _random_state(model)
                stored = [kind for kind in now if f"{RANDOM}.{mine}.{kind}" in table.stored]
                state[RANDOM] = {mine: {kind: now[kind] for kind in stored}}
            _read_shards(state, DcpFiles(directory, table))
    except StorageError as error:
        fault = StorageError(f"{error} (rank {control.rank})")
    except SlurmllmError as error:
        fault = error
    # Exchanged, so that no worker waits in a later collective for one that failed here.
    if first := control.first(fault):
        raise first
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    random_state = state.get(RANDOM, {}).get(_random_key(control.rank), {})
    for kind, module in _random_modules(model).items():
        if kind in random_state:
            module.set_rng_state(random_state[kind])


def _read_table(directory: Path, control: ControlPlane) -> ChunkTable | None:
    """Read `.metadata` on rank 0 for all workers (collective); None for a checkpoint of NxD."""
    table: ChunkTable | StorageError | None = None
    if control.rank == 0:
        try:
            if read_layout(directory) is None:
                table = read_metadata(directory)
        except StorageError as error:
            table = StorageError(f"{error} (rank 0)")
    (table,) = control.broadcast((table,))
    if isinstance(table, StorageError):
        raise table
    return table


@torch.no_grad()
def _read_shards(state: Mapping[str, Any], files: DcpFiles) -> None:
    tensors = {".".join(keys): tensor for keys, tensor in _tensors(state)}
    for key, tensor in tensors.items():
        files.require_shape(key, tuple(tensor.shape))
    files.fill({key: (local_part(t), local_region(t)) for key, t in tensors.items()})


@torch.no_grad()
def _read_nxd_shards(state: Mapping[str, Any], files: TrainingFiles) -> None:
    for (kind, name, *moment), tensor in _tensors(state):
        region = local_region(tensor)
        if kind == "model":
            local_part(tensor).copy_(files.read(name, region))
        elif moment == ["step"]:
            tensor.fill_(files.step(name))
        else:
            local_part(tensor).copy_(files.read_moment(moment[0], name, region))


def _random_key(rank: int) -> str:
    return f"rank_{rank:05d}"


def _random_modules(model: nn.Module) -> dict[str, Any]:
    """Return kind of device → torch's module with its random state."""
    kind = next(model.parameters()).device.type
    return {kind: torch.get_device_module(kind), "cpu": torch.random}


def _random_state(model: nn.Module) -> dict[str, Tensor]:
    return {kind: module.get_rng_state() for kind, module in _random_modules(model).items()}
