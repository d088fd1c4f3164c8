"""Writing a worker's shards by torch.distributed.checkpoint, while training goes on or not.

Why not DCP's own `async_save`: its planning and its end are collectives, which it makes from a
background thread and so on a group that nobody else may use; its copy holds up training from its
begin to its end; and it cannot say what it wrote. Here its parts are used one by one:

1. `begin` (collective): the plan, made once, for names and shapes never change.
2. In a thread: the copy into host memory. It goes on during the next forward and backward passes,
   which only read weights; `Shards.settle` holds up the optimizer until it is complete. On CUDA a
   stream of its own copies into pinned memory.
3. In that thread, at a lower priority: files, checksums and fsync.
4. `finish` (collective): `.metadata`.

A thread and not a process, for the long parts (copying, writing, sha256) let go of the GIL.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from slurmllm.backends.base import Worker
from slurmllm.checkpoint.formats.dcp_writer import DcpWriter, dcp_error
from slurmllm.checkpoint.shards import ShardWrite
from slurmllm.errors import StorageError

_ALIGNMENT = 64
_BACKGROUND_NICENESS = 5


class DcpSaver:
    """What one worker writes of every checkpoint; keeps plan and host memory between saves.

    Args:
        worker: This one.
        group: All workers, over the host's network.
        device: Of the state.
    """

    def __init__(self, worker: Worker, group: dist.ProcessGroup, device: torch.device) -> None:
        self._worker, self._group, self._device = worker, group, device
        self._plan: SavePlan | None = None
        self._metadata: Metadata | None = None
        self._names: frozenset[str] = frozenset()
        self._copies: dict[MetadataIndex, Tensor] = {}
        self._saving: DcpSave | None = None

    def begin(self, state: Mapping[str, Any], directory: Path, *, asynchronous: bool) -> DcpSave:
        """Begin to write a state into an existing folder (collective).

        Args:
            state: Tensors, DTensors and nested dicts of them.
            directory: The folder.
            asynchronous: Whether training may go on at once; else all is written on return.

        Raises:
            StorageError: on all workers, where the file system refused one of them.
        """
        # Two files at once keep two cores busy with checksums; from a GPU one stream is faster.
        threads = 2 if asynchronous or self._device.type == "cpu" else 1
        writer = DcpWriter(directory, threads)
        planner = _Planner()
        planner.set_up_planner(dict(state), is_coordinator=self._worker.rank == 0)
        workers = _DistWrapper(self._group, True, 0)
        writer.set_up_storage_writer(self._worker.rank == 0, rank=self._worker.rank)
        if self._plan is None:
            self._make_plan(planner, writer, workers)
        assert self._names == planner.state_dict.keys(), "the names of a state never change"
        plan = planner.finish_plan(self._plan)  # type: ignore[arg-type]
        if asynchronous:
            planner.copies = self._room(planner, plan)
        self._saving = DcpSave(
            planner, plan, writer, workers, self._metadata, self._worker, self._device
        )
        self._saving.start(asynchronous)
        return self._saving

    def settle(self) -> None:
        """Wait until the state may be changed; before every optimizer step."""
        if self._saving is not None:
            self._saving.settle()

    def _make_plan(self, planner: _Planner, writer: DcpWriter, workers: _DistWrapper) -> None:
        def everyone(plans: list[SavePlan]) -> list[SavePlan]:
            plans, self._metadata = planner.create_global_plan(plans)
            return writer.prepare_global_plan(plans)

        try:
            self._plan = workers.reduce_scatter("plan", planner.create_local_plan, everyone)
        except CheckpointException as error:
            raise dcp_error(error, "cannot plan a checkpoint") from error
        self._names = frozenset(planner.state_dict)

    def _room(self, planner: _Planner, plan: SavePlan) -> dict[MetadataIndex, Tensor]:
        """Host memory for the tensors that this worker writes: the same at every save."""
        if self._copies:
            return self._copies
        tensors = {i.index: planner.tensor(i) for i in plan.items if i.type != _BYTES}
        sizes = {
            index: math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT
            for index, tensor in tensors.items()
        }
        memory = mmap.mmap(-1, sum(sizes.values()) or _ALIGNMENT)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # a hundredth of the page faults
            memory.madvise(mmap.MADV_HUGEPAGE)
        offset = 0
        for index, tensor in tensors.items():
            self._copies[index] = _piece_of(memory, offset, tensor)
            offset += sizes[index]
        if self._device.type == "cuda":
            _pin(memory)
        return self._copies


class DcpSave(ShardWrite):
    """One save of a worker's shards; made by `Shards.begin`."""

    def __init__(
        self,
        planner: _Planner,
        plan: SavePlan,
        writer: DcpWriter,
        workers: _DistWrapper,
        metadata: Metadata | None,
        worker: Worker,
        device: torch.device,
    ) -> None:
        self._planner, self._plan, self._writer = planner, plan, writer
        self._workers, self._metadata, self._worker = workers, metadata, worker
        self._device = device
        self._copied = threading.Event()
        self._results: Future[list[WriteResult]] = Future()
        self._names: list[str] | None = None
        self.waited_s = 0.0

    def start(self, asynchronous: bool) -> None:
        """Write now, or copy and write in a thread."""
        if not asynchronous:
            self._copied.set()
            self._run()
            written = sorted(self._writer.fs.written)
            self._names = [*written, *self._complete()]
            return
        self._planner.keep_bytes(self._plan)
        ready = None
        if self._device.type == "cuda":
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        executor = ThreadPoolExecutor(1, thread_name_prefix="shards")
        executor.submit(self._copy_and_run, ready)
        executor.shutdown(wait=False)

    def settle(self) -> None:
        """Wait until the copy is complete."""
        if not self._copied.is_set():
            began = time.monotonic()
            self._copied.wait()
            self.waited_s += time.monotonic() - began

    def _copy_and_run(self, ready: torch.cuda.Event | None) -> None:
        try:
            self._planner.copy(ready, self._device)
        except BaseException as error:
            self._results.set_exception(error)
            return
        finally:
            self._copied.set()
        # On Linux of this thread and those that it starts alone.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND_NICENESS)
        self._run()

    def _run(self) -> None:
        try:
            self._results.set_result(self._writer.write_data(self._plan, self._planner).wait())
        except BaseException as error:  # told to all workers, not to this thread
            self._results.set_exception(error)

    def wait(self) -> list[str]:
        """Wait for this worker's files; names those that it wrote."""
        if self._names is not None:
            return self._names
        try:
            self._results.result()
        except OSError as error:
            told = f"cannot write shards: {error.strerror or error}"
            raise StorageError(f"{told} (rank {self._worker.rank})") from error
        return sorted(self._writer.fs.written)

    def finish(self) -> list[str]:
        """Write `.metadata`, where that is not done yet (collective)."""
        return self._complete() if self._names is None else []

    def _complete(self) -> list[str]:
        def write_metadata(results: list[list[WriteResult]]) -> None:
            assert self._metadata is not None
            self._writer.finish(self._metadata, results)

        try:
            self._workers.all_reduce("metadata", self._results.result, write_metadata)
        except CheckpointException as error:  # on all workers alike
            raise dcp_error(error, "cannot write shards") from error
        return [".metadata"] if self._worker.rank == 0 else []

    def sha256(self, name: str) -> str | None:
        """The checksum of a file, made of the bytes that were written."""
        return self._writer.fs.written.get(name)


class _Planner(DefaultSavePlanner):
    """Gives the writer the copies, where there are any, in place of the tensors themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: Mapping[MetadataIndex, Tensor] = {}
        self._bytes: dict[MetadataIndex, bytes] = {}

    def tensor(self, item: WriteItem) -> Tensor:
        """The tensor itself: this worker's part of it."""
        found = super().resolve_data(item)
        assert isinstance(found, Tensor)
        return found.detach()

    def keep_bytes(self, plan: SavePlan) -> None:
        """Keep what is no tensor as it is now."""
        for item in plan.items:
            if item.type == _BYTES:
                found = super().resolve_data(item)
                assert isinstance(found, io.BytesIO)
                self._bytes[item.index] = found.getvalue()

    def copy(self, ready: torch.cuda.Event | None, device: torch.device) -> None:
        """Copy all tensors; on CUDA when what was enqueued before `ready` is done."""
        stream = torch.cuda.Stream(device) if ready else None  # type: ignore[no-untyped-call]
        if stream is not None and ready is not None:
            stream.wait_event(ready)
        with torch.no_grad(), torch.cuda.stream(stream):
            for item in self.plan.items:
                if item.type != _BYTES:
                    self.copies[item.index].copy_(self.tensor(item), non_blocking=True)
        if stream is not None:
            stream.synchronize()

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """What to write."""
        index = write_item.index
        if index in self._bytes:
            return io.BytesIO(self._bytes[index])
        if index in self.copies:
            return self.copies[index]
        return super().resolve_data(write_item)


_BYTES = WriteItemType.BYTE_IO


def _piece_of(memory: mmap.mmap, offset: int, like: Tensor) -> Tensor:
    """A tensor in a part of the memory, with a storage of its own: torch.save writes it whole."""
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype)
    flat = torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=offset)
    return flat.view(like.shape)


def _pin(memory: mmap.mmap) -> None:
    """Register memory with CUDA, so that copies run beside the computation; it is never freed."""
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if error := int(runtime.cudaHostRegister(start, len(memory), 0)):
        print(f"warning: saves are copied slowly: cudaHostRegister says {error}", flush=True)
