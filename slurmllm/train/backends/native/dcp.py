"""Checkpoints of the native backend in the format of torch.distributed.checkpoint (DCP).

Every worker writes its own shards; `.metadata` maps parameter names to chunks, so that another
number of workers, and torch itself, can read them. DCP's own planning gathers all plans on one
worker, its `async_save` makes collectives from a background thread and blocks training while it
copies, and its reader gives every worker the whole `.metadata`. Here a save is:

1. `begin`: the plan, made once and without a message. A chunk that one worker holds is written by
   it. Workers that hold the same chunk, such as the norms of a tensor-parallel group, hold the same
   list of such chunks: each of them divides the list in the same way and takes its own share.
2. In a thread: the copy into host memory. It continues during the next forward and backward passes,
   which only read weights; `wait_for_copy` blocks the optimizer until it is complete. On CUDA, a
   stream of its own copies into pinned memory.
3. In that thread, at a lower priority: files, checksums and fsync.
4. `finish` (collective): `.metadata` (`dcp_write`).

A thread and not a process, because the long parts (copy, write, sha256) release the GIL.
"""

from __future__ import annotations

import heapq
import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from slurmllm.core.config.recipe import ModelConfig
from slurmllm.core.errors import StorageError
from slurmllm.core.run.rundir import storage_errors
from slurmllm.plan.mesh import Mesh
from slurmllm.train.backends.native.device import Device
from slurmllm.train.checkpoint.formats.dcp_read import DcpFiles
from slurmllm.train.checkpoint.formats.dcp_write import (
    ChecksumFiles,
    Place,
    SaveIndex,
    file_name,
    make_chunk,
    write_chunk,
)
from slurmllm.train.checkpoint.formats.nxd_files import read_layout
from slurmllm.train.checkpoint.formats.pickles import METADATA, read_metadata
from slurmllm.train.checkpoint.formats.weights import TrainingFiles, open_training
from slurmllm.train.checkpoint.shards import ShardWrite, leaves
from slurmllm.train.control.plane import ControlPlane
from slurmllm.train.model.init import local_part, local_region

log = logging.getLogger(__name__)

Tensors = dict[str, Tensor]  # by key

_ALIGNMENT = 64  # bytes, of a copy in host memory
_BACKGROUND_NICENESS = 5  # of the writing threads: training has the cores first
RANDOM = "random"  # prefix of the state that every worker has of its own
_ITEM_BYTES = 1024  # what a file has of each tensor apart from its values
# Keys of an embedding that first and last pipeline stage share.
_TIED = ("model.embed.weight", "optimizer.embed.weight.")
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


def own_tensors(state: Tensors, mesh: Mesh, rank: int, *, tied: bool = False) -> list[str]:
    """Return the keys of the tensors whose local chunks this worker writes, in their order."""
    # Axis → this worker's index, and the axis' degree.
    mesh_axes = {
        "replicate": (mesh.data_rank(rank) // mesh.shard, mesh.replicate),
        "shard": (mesh.shard_rank(rank), mesh.shard),
        "tensor": (rank % mesh.tensor, mesh.tensor),
    }
    # Axes over which a chunk is replicated, this worker among its holders, their number → sizes.
    groups: dict[tuple[tuple[str, ...], int, int], dict[str, int]] = {}
    for key, tensor in state.items():
        axes = {} if key.startswith(RANDOM) else dict(mesh_axes)
        if isinstance(tensor, DTensor):
            names = tensor.device_mesh.mesh_dim_names
            assert names is not None, key
            for name, placement in zip(names, tensor.placements, strict=True):
                if not placement.is_replicate():
                    del axes[name]
        if tied and mesh.pipeline > 1 and key.startswith(_TIED):
            axes["pipeline"] = (int(mesh.pipeline_rank(rank) > 0), 2)
        holder = 0
        count = 1
        for index, degree in axes.values():
            holder = holder * degree + index
            count = count * degree
        if num_bytes := local_part(tensor).nbytes:  # FSDP leaves some workers without a part
            groups.setdefault((tuple(axes), holder, count), {})[key] = num_bytes
    written: set[str] = set()
    for (_, holder, count), sizes in groups.items():
        written.update(share_out(sizes, count)[holder])
    return [key for key in state if key in written]


def share_out(sizes_bytes: Mapping[str, int], count: int) -> list[list[str]]:
    """Distribute tensors: the largest first, each to the share with the least bytes so far."""
    shares: list[list[str]] = [[] for _ in range(count)]
    loads = [(0, holder) for holder in range(count)]
    for key in sorted(sizes_bytes, key=lambda key: (-sizes_bytes[key], key)):
        load, holder = loads[0]
        heapq.heapreplace(loads, (load + sizes_bytes[key] + _ITEM_BYTES, holder))
        shares[holder].append(key)
    return shares


@dataclass
class DcpSaver:
    """Writer of a worker's part of every checkpoint, with one plan and host memory for all.

    `tied`: the first and the last pipeline stage share the embedding.
    """

    control: ControlPlane
    device: Device
    mesh: Mesh
    rank: int
    tied: bool = False
    _files: Sequence[Sequence[str]] = ()  # keys of this worker's tensors, by file
    _index: SaveIndex | None = None
    _names: frozenset[str] = frozenset()
    _copies: Tensors = field(default_factory=dict)
    _save: DcpSave | None = None

    def begin(self, state: Mapping[str, Any], directory: Path, *, asynchronous: bool) -> DcpSave:
        """Begin to write a state (tensors, DTensors, dicts of them) into a folder.

        Unless `asynchronous`, this worker's files are written on return.
        """
        by_keys = dict(leaves(state))
        assert all(isinstance(value, Tensor) for value in by_keys.values()), "only tensors"
        tensors = {".".join(keys): tensor for keys, tensor in by_keys.items()}
        if self._index is None:
            self._names = frozenset(tensors)
            written = own_tensors(tensors, self.mesh, self.rank, tied=self.tied)
            sizes = {key: local_part(tensors[key]).nbytes for key in written}
            # Two files keep two cores busy with checksums.
            split = sum(sizes.values()) >= _SPLIT_BYTES
            self._files = share_out(sizes, 2) if split else [written]
            chunks = {".".join(keys): make_chunk(keys, tensor) for keys, tensor in by_keys.items()}
            own_chunks = [chunks[key] for file in self._files for key in file]
            self._index = SaveIndex(self.control, own_chunks)
        assert self._names == tensors.keys(), "the names of a state never change"
        parts = [{key: local_part(tensors[key]).detach() for key in file} for file in self._files]
        if asynchronous and not self._copies:
            self._allocate_copies(parts)
        save = self._save = DcpSave(directory, parts, self.control, self._index)
        executor = ThreadPoolExecutor(1, thread_name_prefix="shards")
        if asynchronous:
            save.places = executor.submit(
                save.copy_and_write, self._copies, self.device, self.device.event()
            )
        else:
            save.places = executor.submit(save.write)
        executor.shutdown(wait=not asynchronous)
        return save

    def wait_for_copy(self) -> None:
        """Wait until the state may be changed; before every optimizer step."""
        if self._save is not None:
            self._save.wait_for_copy()

    def _allocate_copies(self, parts: Sequence[Tensors]) -> None:
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
        if fault := self.device.pin(torch.frombuffer(memory, dtype=torch.uint8)):
            log.warning("slow copies at saves: %s", fault)


@dataclass
class DcpSave(ShardWrite):
    """One save of a worker's shards; made by `DcpSaver.begin`."""

    directory: Path
    parts: Sequence[Tensors]
    control: ControlPlane
    index: SaveIndex

    def __post_init__(self) -> None:
        self.places: Future[list[Place]]  # of this worker's chunks
        self._written = ChecksumFiles()
        self._copied = threading.Event()

    def wait_for_copy(self) -> None:
        if not self._copied.is_set():
            began = time.monotonic()
            self._copied.wait()
            self.waited_s += time.monotonic() - began

    def copy_and_write(self, copies: Tensors, device: Device, ready: Any) -> list[Place]:
        """Copy all tensors after the work that was enqueued before `ready`, then write them."""
        try:
            with torch.no_grad(), device.copies(ready):
                copied = [
                    {key: copies[key].copy_(t, non_blocking=True) for key, t in group.items()}
                    for group in self.parts
                ]
            # Only now: other streams use the memory of tensors that are released.
            self.parts = copied
        finally:
            self._copied.set()
        # On Linux this changes only this thread and the threads that it starts.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND_NICENESS)
        return self.write()

    def write(self) -> list[Place]:
        """Write this worker's files."""
        self._copied.set()
        crc32 = torch.serialization.get_crc32_options()
        try:
            with (
                storage_errors(f"rank {self.control.rank} cannot write shards"),
                ThreadPoolExecutor(len(self.parts)) as pool,
            ):
                places = pool.map(self._write_file, range(len(self.parts)), self.parts)
                return [location for group in places for location in group]
        finally:
            # Where all threads of torch share it, the last file restores what another had set.
            torch.serialization.set_crc32_options(crc32)

    def _write_file(self, number: int, tensors: Tensors) -> list[Place]:
        name = file_name(self.control.rank, number)
        with self._written.create(self.directory / name) as stream:
            return [write_chunk(stream, name, tensor) for tensor in tensors.values()]

    def wait(self) -> list[str]:
        self.places.result()
        return sorted(self._written.written)

    def finish(self) -> list[str]:
        """Write `.metadata` on rank 0 (collective)."""
        self.index.collect(self.places.result())
        if self.control.rank:
            return []
        with (
            storage_errors(f"rank {self.control.rank} cannot write shards"),
            self._written.create(self.directory / METADATA) as stream,
        ):
            stream.write(self.index.content)
        return [METADATA]

    def sha256(self, name: str) -> str | None:
        return self._written.written.get(name)


def load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    directory: Path,
    control: ControlPlane,
    config: ModelConfig,
) -> None:
    """Load a checkpoint of any number of workers, by DCP or by NxD (collective).

    The random state is restored if the number of workers is the same. Raises a StorageError on all
    workers if one cannot read its shards.
    """
    random_key = _random_key(control.rank)
    random_state: Tensors = {}
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state["state"]}
    # None for a checkpoint of NxD.
    table = control.from_first(
        lambda: read_metadata(directory) if read_layout(directory) is None else None
    )
    # Each worker that wrote the checkpoint has a random state.
    stored = table.stored if table is not None else {}
    writers = {key.split(".")[1] for key in stored if key.startswith(f"{RANDOM}.")}
    if len(writers) == control.world_size:
        random_state = {
            kind: tensor
            for kind, tensor in _random_state(model).items()
            if f"{RANDOM}.{random_key}.{kind}" in stored
        }
        state[RANDOM] = {random_key: random_state}

    @torch.no_grad()
    def read_shards() -> None:
        tensors = dict(leaves(state))
        try:
            if table is None:
                _read_nxd_shards(tensors, open_training(directory, config))
                return
            files = DcpFiles(directory, table)
            by_key = {".".join(keys): tensor for keys, tensor in tensors.items()}
            for key, tensor in by_key.items():
                files.require_shape(key, tuple(tensor.shape))
            files.fill({key: (local_part(t), local_region(t)) for key, t in by_key.items()})
        except StorageError as error:
            raise StorageError(f"{error} (rank {control.rank})") from error

    control.agree(read_shards)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for kind, module in _random_modules(model).items():
        if kind in random_state:
            module.set_rng_state(random_state[kind])


def _read_nxd_shards(tensors: Mapping[Any, Tensor], files: TrainingFiles) -> None:
    for (kind, name, *moment), tensor in tensors.items():
        region = local_region(tensor)
        if kind == "model":
            local_part(tensor).copy_(files.read(name, region))
        elif moment == ["step"]:
            tensor.fill_(files.step(name))
        else:
            local_part(tensor).copy_(files.read(name, region, moment[0]))


def _random_key(rank: int) -> str:
    return f"rank_{rank:05d}"


def _random_modules(model: nn.Module) -> dict[str, Any]:
    """Return kind of device → torch's module with its random state."""
    kind = next(model.parameters()).device.type
    return {kind: torch.get_device_module(kind), "cpu": torch.random}


def _random_state(model: nn.Module) -> Tensors:
    return {kind: module.get_rng_state() for kind, module in _random_modules(model).items()}
