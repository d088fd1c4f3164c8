"""Checkpoints of the native backend with torch.distributed.checkpoint (DCP).

Every worker writes its own shards into one file; `.metadata` maps parameter names to pieces, so
that another number of workers can read them.

Why not DCP's own `async_save`: its planning and its end are collectives from a background thread,
on a group that nothing else may use then; its copy blocks training from start to end; and it does
not report the files that it wrote. `DcpSaver` uses its parts one by one:

1. `begin`: the plan, made once, because names and shapes never change. Each worker makes its own,
   without a message (`save_plan`); DCP's own planning gathers all plans on one worker.
2. In a thread: the copy into host memory. It continues during the next forward and backward passes,
   which only read weights; `wait_for_copy` blocks the optimizer until it is complete. On CUDA, a
   stream of its own copies into pinned memory.
3. In that thread, at a lower priority: files, checksums and fsync.
4. `finish` (collective): `.metadata` (`dcp_index`).

A thread and not a process, because the long parts (copy, write, sha256) release the GIL.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import threading
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.storage import WriteResult

from slurmllm.backends.native.save_plan import RANDOM, MeshPlace, own_items
from slurmllm.checkpoint.formats.dcp_index import Chunk, ChunkTable, Place, SaveIndex
from slurmllm.checkpoint.formats.dcp_write import DcpWriter, dcp_error
from slurmllm.checkpoint.formats.nxd_files import read_layout
from slurmllm.checkpoint.formats.pickles import METADATA, DcpReader, read_metadata
from slurmllm.checkpoint.formats.weights import TrainingFiles, open_training
from slurmllm.checkpoint.shards import ShardWrite
from slurmllm.checkpoint.state import MOMENTS, read_origin
from slurmllm.config.recipe import ModelConfig
from slurmllm.control.plane import ControlPlane
from slurmllm.errors import SlurmllmError, StorageError
from slurmllm.model.init import local_part, local_region

log = logging.getLogger(__name__)

_ALIGNMENT = 64  # bytes, of a copy in host memory
_BACKGROUND_NICENESS = 5  # of the writing threads: training has the cores first


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, Any]:
    """Return a worker's state for a checkpoint: the tensors themselves, no copies."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {
        "model": model_state,
        # Without param_groups: learning rate and the like come from the recipe.
        "optimizer": optimizer_state["state"],
        RANDOM: {_random_key(rank): _random_state()},
    }


class DcpSaver:
    """Writes one worker's part of every checkpoint; keeps plan and host memory between saves."""

    def __init__(
        self, control: ControlPlane, device: torch.device, mesh_place: MeshPlace | None = None
    ) -> None:
        assert mesh_place is not None or control.world_size == 1
        self._control, self._device, self._mesh_place = control, device, mesh_place
        self._plan: SavePlan | None = None
        self._index: SaveIndex | None = None
        self._copies: dict[MetadataIndex, Tensor] = {}
        self._save: DcpSave | None = None
        self._names: frozenset[str] = frozenset()

    def begin(self, state: Mapping[str, Any], directory: Path, *, asynchronous: bool) -> DcpSave:
        """Begin to write a state (tensors, DTensors, dicts of them) into a folder.

        Unless `asynchronous`, all is written on return (collective).

        Raises:
            StorageError: On all workers if the file system refused one of them.
        """
        # Two files at once keep two cores busy with checksums; from a GPU one stream is faster.
        threads = 2 if asynchronous or self._device.type == "cpu" else 1
        writer, planner = DcpWriter(directory, threads), _SavePlanner()
        planner.set_up_planner(dict(state))
        if self._plan is None or self._index is None:
            self._plan, self._index = self._make_plan(planner)
            self._names = frozenset(planner.state_dict)
        assert self._names == planner.state_dict.keys(), "the names of a state never change"
        plan = planner.finish_plan(self._plan)
        if asynchronous:
            if not self._copies:
                self._allocate_copies(planner, plan)
            planner.copies = self._copies
        self._save = save = DcpSave(planner, plan, writer, self._control, self._index, self._device)
        save.start(asynchronous)
        return save

    def _make_plan(self, planner: _SavePlanner) -> tuple[SavePlan, SaveIndex]:
        items = planner.create_local_plan().items
        if self._mesh_place is not None:
            items = own_items(items, planner.state_dict, self._mesh_place)
        prefix = _StoragePrefix(f"__{self._control.rank}_")
        chunks = [Chunk.of(item, planner.mappings[item.index.fqn]) for item in items]
        return SavePlan(items, storage_data=prefix), SaveIndex(self._control, chunks)

    def wait_for_copy(self) -> None:
        """Wait until the state may be changed; before every optimizer step."""
        if self._save is not None:
            self._save.wait_for_copy()

    def _allocate_copies(self, planner: _SavePlanner, plan: SavePlan) -> None:
        """Allocate host memory for the tensors that this worker writes, the same at every save."""
        tensors = {i.index: planner.tensor(i) for i in plan.items}
        sizes = {
            index: math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT
            for index, tensor in tensors.items()
        }
        memory = mmap.mmap(-1, sum(sizes.values()) or _ALIGNMENT)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # a hundredth of the page faults
            memory.madvise(mmap.MADV_HUGEPAGE)
        offset = 0
        for index, tensor in tensors.items():
            # Each copy has a storage of its own, because torch.save writes the whole storage.
            if count := tensor.numel():
                flat = torch.frombuffer(memory, dtype=tensor.dtype, count=count, offset=offset)
                self._copies[index] = flat.view(tensor.shape)
            else:  # `frombuffer` refuses a count of 0
                self._copies[index] = torch.empty(tensor.shape, dtype=tensor.dtype)
            offset += sizes[index]
        if self._device.type == "cuda":
            # Pinned, so that copies run during computation; it stays registered until the end.
            start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if error := int(runtime.cudaHostRegister(start, len(memory), 0)):
                log.warning("slow copies at saves: cudaHostRegister returned %d", error)


class DcpSave(ShardWrite):
    """One save of a worker's shards; made by `DcpSaver.begin`."""

    def __init__(
        self, planner: _SavePlanner, plan: SavePlan, writer: DcpWriter, control: ControlPlane,
        index: SaveIndex, device: torch.device,
    ) -> None:  # fmt: skip
        self._planner, self._plan, self._writer = planner, plan, writer
        self._control, self._index = control, index
        self._device = device
        self._copied = threading.Event()
        self._results: Future[list[WriteResult]] = Future()
        self._names: list[str] | None = None
        self.waited_s = 0.0

    def start(self, asynchronous: bool) -> None:
        if not asynchronous:
            self._copied.set()
            self._write()
            written = sorted(self._writer.fs.written)
            self._names = [*written, *self._write_metadata()]
            return
        ready = None
        if self._device.type == "cuda":
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        executor = ThreadPoolExecutor(1, thread_name_prefix="shards")
        executor.submit(self._copy_and_write, ready)
        executor.shutdown(wait=False)

    def wait_for_copy(self) -> None:
        if not self._copied.is_set():
            began = time.monotonic()
            self._copied.wait()
            self.waited_s += time.monotonic() - began

    def _copy_and_write(self, ready: torch.cuda.Event | None) -> None:
        try:
            self._planner.copy(ready, self._device)
        except BaseException as error:
            self._results.set_exception(error)
            return
        finally:
            self._copied.set()
        # On Linux this changes only this thread and the threads that it starts.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND_NICENESS)
        self._write()

    def _write(self) -> None:
        try:
            self._results.set_result(self._writer.write_data(self._plan, self._planner).wait())
        except BaseException as error:  # raised by `wait` and `finish`, on all workers
            self._results.set_exception(error)

    def wait(self) -> list[str]:
        if self._names is not None:
            return self._names
        try:
            self._results.result()
        except OSError as error:
            raise self._storage_error(error) from error
        return sorted(self._writer.fs.written)

    def finish(self) -> list[str]:
        return self._write_metadata() if self._names is None else []

    def _write_metadata(self) -> list[str]:
        """Write `.metadata` on rank 0 (collective)."""
        fault: SlurmllmError | None = None
        places: list[Place] = []
        try:
            stored = {result.index: result.storage_data for result in self._results.result()}
            places = [Place.of(stored[item.index]) for item in self._plan.items]
        except (OSError, SlurmllmError) as error:
            fault = self._storage_error(error)
        self._index.collect(places, fault)
        if self._control.rank == 0:
            try:
                self._writer.write_metadata(self._index.content())
            except (OSError, SlurmllmError) as error:
                fault = self._storage_error(error)
        if found := self._control.first(fault):
            raise found
        return [METADATA] if self._control.rank == 0 else []

    def _storage_error(self, error: OSError | SlurmllmError) -> SlurmllmError:
        if isinstance(error, SlurmllmError):
            return error
        reason = error.strerror or error
        return StorageError(f"cannot write shards: {reason} (rank {self._control.rank})")

    def sha256(self, name: str) -> str | None:
        return self._writer.fs.written.get(name)


class _SavePlanner(DefaultSavePlanner):
    """Passes the copies, if there are any, to the writer in place of the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: Mapping[MetadataIndex, Tensor] = {}

    def tensor(self, item: WriteItem) -> Tensor:
        found = super().resolve_data(item)
        assert isinstance(found, Tensor)
        return found.detach()

    def copy(self, ready: torch.cuda.Event | None, device: torch.device) -> None:
        """Copy all tensors; on CUDA after the work that was enqueued before `ready`."""
        stream = torch.cuda.Stream(device) if ready else None  # type: ignore[no-untyped-call]
        if stream is not None and ready is not None:
            stream.wait_event(ready)
        with torch.no_grad(), torch.cuda.stream(stream):
            for item in self.plan.items:
                self.copies[item.index].copy_(self.tensor(item), non_blocking=True)
        if stream is not None:
            stream.synchronize()

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        copy = self.copies.get(write_item.index)
        return self.tensor(write_item) if copy is None else copy


def load(
    model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path, control: ControlPlane,
    config: ModelConfig | None = None,
) -> None:  # fmt: skip
    """Load a checkpoint of any number of workers, by DCP or by NxD (collective).

    The random state is restored if the number of workers is the same; else it stays as seeded at
    the start. Without `config`, the model's is read from `train_state.json`.

    Raises:
        StorageError: On all workers if one of them cannot read its shards.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state["state"]}
    table = _read_table(directory, control)
    fault: SlurmllmError | None = None
    try:
        if table is not None:
            _load_dcp(state, directory, table, control)
        else:
            _read_shards(state, open_training(directory, config or read_origin(directory).model))
    except StorageError as error:
        fault = StorageError(f"{error} (rank {control.rank})")
    except SlurmllmError as error:
        fault = error
    # Exchanged, so that no worker waits in a later collective for one that failed here.
    if found := control.first(fault):
        raise found
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    random_state = state.get(RANDOM, {}).get(_random_key(control.rank), {})
    if "cpu" in random_state:
        torch.set_rng_state(random_state["cpu"])
    if "cuda" in random_state:
        torch.cuda.set_rng_state(random_state["cuda"])


def _read_table(directory: Path, control: ControlPlane) -> ChunkTable | None:
    """Read `.metadata` on rank 0 for all workers (collective); None for a checkpoint of NxD."""
    found: ChunkTable | StorageError | None = None
    if control.rank == 0:
        try:
            if read_layout(directory) is None:
                found = ChunkTable.of(read_metadata(directory))
        except StorageError as error:
            found = StorageError(f"{error} (rank 0)")
    (found,) = control.broadcast((found,))
    if isinstance(found, StorageError):
        raise found
    return found


def _load_dcp(
    state: dict[str, Any], directory: Path, table: ChunkTable, control: ControlPlane
) -> None:
    ranks = {key.split(".")[1] for key in table.stored if key.startswith(f"{RANDOM}.")}
    if len(ranks) == control.world_size:
        own = _random_key(control.rank)
        now = _random_state().items()
        random_state = {kind: v for kind, v in now if f"{RANDOM}.{own}.{kind}" in table.stored}
        if random_state:
            state[RANDOM] = {own: random_state}
    reader = DcpReader(directory, table.metadata(flatten_state_dict(state)[0]))
    try:
        with warnings.catch_warnings():
            # Without a process group, on purpose: DCP's plans for reading need no other worker's.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load_state(state, storage_reader=reader, planner=_LoadPlanner(), no_dist=True)
    except CheckpointException as error:
        raise dcp_error(error, f"cannot read shards from {directory}") from error


class _LoadPlanner(DefaultLoadPlanner):
    """Loads tensors only: DCP's own unpickles everything else without restriction."""

    def load_bytes(self, read_item: ReadItem, value: object) -> None:
        raise StorageError(f"{read_item.dest_index.fqn} is no tensor; restore the checkpoint")


@torch.no_grad()
def _read_shards(state: dict[str, Any], files: TrainingFiles) -> None:
    for name, parameter in state["model"].items():
        local_part(parameter).copy_(files.read(name, local_region(parameter)))
    for name, moments in state["optimizer"].items():
        moments["step"].fill_(files.step(name))
        for kind in MOMENTS:
            region = local_region(moments[kind])
            local_part(moments[kind]).copy_(files.read_moment(kind, name, region))


def _random_key(rank: int) -> str:
    return f"rank_{rank:05d}"


def _random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state
