"""What planning, the stall and the end of a save cost with many workers; before and after.

    python tools/benchmarks/save_planning.py [--workers 8 16 32 64] [--gb 2] [--rounds 3] [--json]
    python tools/benchmarks/save_planning.py --generated 4096 [--json]

The native backend's workers are forked after one import, one thread each, on this machine's cores;
together they hold the weights and AdamW moments of a decoder of `--gb`, sharded by FSDP. They save
it the former way, torch's own planning and its collectives over a gloo group of all workers
(`_DistWrapper`), which is kept here as the reference, and now. Both save in turn from the same
processes, so that they have the same machine.

At 64 workers and 2 GB this takes about 12 GB of memory.

Seconds of a save, the slowest worker's:

    plan            until each worker knows what it writes; in the first save only
    first begin     until training may go on, of the first save, which is asynchronous; with `plan`
    first finish    `.metadata`, after all files are written
    later begin     likewise of the second save
    later finish
    index           reading `.metadata`, as far as each worker needs it
    blocking        a whole blocking save

`cpu` is rank 0's CPU time, all threads; `bytes` are what rank 0 sends and receives for plan and
`.metadata`. `--generated` makes the index and the manifest of so many workers of a Llama of 70 B
without workers, and measures rank 0's CPU time, of DCP's own planning too for up to 512.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing as mp
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from checkpoint import configuration
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from slurmllm.backends.base import Worker
from slurmllm.backends.native import dcp
from slurmllm.backends.native.dcp import DcpSaver
from slurmllm.backends.native.runtime import NativeBackend
from slurmllm.backends.native.save_plan import MeshPlace
from slurmllm.checkpoint.formats.dcp_index import (
    Chunk,
    ChunkTable,
    Place,
    build_metadata,
    pack_part,
)
from slurmllm.checkpoint.formats.dcp_write import DcpWriter, chunk_bytes
from slurmllm.checkpoint.formats.pickles import METADATA, DcpReader, read_metadata
from slurmllm.config.resolve import RunConfig, change
from slurmllm.control.plane import SOCKET, ControlPlane, open_control
from slurmllm.control.relay import Position, Relay
from slurmllm.control.rendezvous import SECRET, free_port, new_secret
from slurmllm.model.decoder import build_model
from slurmllm.plan.mesh import make_mesh
from slurmllm.run.artifact_records import CheckpointFile, CheckpointManifest

Times = dict[str, float]
FORMER_LIMIT = 512  # workers, of the generated plans of DCP: 4,096 take 20 GB
WAYS = ("former", "now")
CPU = torch.device("cpu")


class Clock:
    """Wall and CPU seconds of the parts of saves, by name."""

    def __init__(self) -> None:
        self.times: Times = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.times[name] = time.perf_counter() - wall
        self.times[f"{name} cpu"] = time.process_time() - cpu


class TimedSaver(DcpSaver):
    """Measures the plan."""

    clock: Clock

    def _make_plan(self, planner: Any) -> Any:
        with self.clock.measure("plan"):
            return super()._make_plan(planner)


class FormerSaver(DcpSaver):
    """DCP's own planning: rank 0 gets all plans and makes each worker's, and the metadata."""

    clock: Clock

    def __init__(self, control: ControlPlane, place: MeshPlace, group: dist.ProcessGroup) -> None:
        super().__init__(control, CPU, place)
        self._workers = _DistWrapper(group, True, 0)
        self.exchanged: list[Any] = []  # rank 0's, to count its bytes

    def _make_plan(self, planner: Any) -> Any:
        metadata: Metadata | None = None
        writer = DcpWriter(Path("unused"))

        def make_global_plan(plans: list[SavePlan]) -> list[SavePlan]:
            nonlocal metadata
            self.exchanged += plans
            plans, metadata = planner.create_global_plan(plans)
            plans = writer.prepare_global_plan(plans)
            self.exchanged += plans
            return plans

        with self.clock.measure("plan"):
            local = planner.create_local_plan
            plan = self._workers.reduce_scatter("plan", local, make_global_plan)
        return plan, FormerIndex(self._workers, plan, metadata, self.exchanged)


class FormerIndex:
    """The end of DCP's own saves: rank 0 gets the results of all workers in every one."""

    def __init__(
        self, workers: _DistWrapper, plan: SavePlan, metadata: Metadata | None, exchanged: list[Any]
    ) -> None:
        self._workers, self._plan, self._metadata = workers, plan, metadata
        self._exchanged, self._content = exchanged, b""

    def collect(self, places: Sequence[Place], fault: Exception | None = None) -> None:
        assert fault is None

        def write(everyone: list[list[WriteResult]]) -> None:  # as FileSystemWriter.finish
            assert self._metadata is not None
            self._exchanged += everyone
            found: dict[Any, Any] = {}
            for results in everyone:
                found.update({one.index: one.storage_data for one in results})
            self._metadata.storage_data = found
            self._content = pickle.dumps(self._metadata)

        results = [
            WriteResult(item.index, place.length, _StorageInfo(*place))
            for item, place in zip(self._plan.items, places, strict=True)
        ]
        self._workers.all_reduce("metadata", lambda: results, write)

    def content(self) -> bytes:
        return self._content


class Bench:
    """One worker, which saves in both ways."""

    def __init__(self, rank: int, config: RunConfig, folder: Path) -> None:
        torch.set_num_threads(1)
        mesh = make_mesh(config, 1)
        self._folder, self._control = folder, open_control(rank, mesh.world_size)
        worker = Worker(rank, mesh.world_size, rank, "node")
        self._backend = NativeBackend(config, mesh, worker, self._control)
        self._backend.start()
        self._backend.build(lambda: build_model(config.recipe.model))
        self._backend.build_optimizer()
        self._state = dcp.state_of(self._backend.model, self._backend.optimizer, rank)
        assert dist.group.WORLD is not None
        self._group, self._place = dist.group.WORLD, MeshPlace(mesh, rank)

    def round(self, way: str) -> Times:
        """Two saves and the index read: seconds of the parts, and rank 0's bytes.

        Nothing is written but `.metadata`: its end is measured when the files are written.
        """
        saver = self._saver(way)
        with patch.object(DcpWriter, "write_data", _pretend_to_write):
            for which in ("first", "later"):
                self._save(saver, which)
        self._control.barrier()
        with saver.clock.measure("index"):
            self._read_index(self._folder / "save", way)
        times: Times = saver.clock.times
        return times

    def _save(self, saver: Any, which: str) -> None:
        directory = self._empty()
        begun = self._sent(saver)
        with saver.clock.measure(f"{which} begin"):
            save = saver.begin(self._state, directory, asynchronous=True)
        between = self._sent(saver)
        save.wait()
        self._control.barrier()
        again = self._sent(saver)
        with saver.clock.measure(f"{which} finish"):
            save.finish()
        saver.clock.times[f"{which} bytes"] = self._sent(saver) - again + between - begun

    def blocking(self, way: str) -> Times:
        """A whole blocking save, the second one."""
        saver = self._saver(way)
        with patch.object(DcpWriter, "write_data", _pretend_to_write):
            saver.begin(self._state, self._empty(), asynchronous=False)
        directory = self._empty()
        clock = saver.clock = Clock()
        with clock.measure("blocking"):
            saver.begin(self._state, directory, asynchronous=False)
        return {"blocking": clock.times["blocking"]}

    def _saver(self, way: str) -> Any:
        saver: Any
        if way == "former":
            saver = FormerSaver(self._control, self._place, self._group)
        else:
            saver = TimedSaver(self._control, CPU, self._place)
        saver.clock = Clock()
        return saver

    def _read_index(self, directory: Path, way: str) -> None:
        if way == "former":
            DcpReader(directory)
            return
        table = dcp._read_table(directory, self._control)
        assert table is not None
        table.metadata(flatten_state_dict(self._state)[0])

    def _sent(self, saver: Any) -> int:
        if self._control.rank:
            return 0
        if isinstance(saver, FormerSaver):
            return sum(len(pickle.dumps(one)) for one in saver.exchanged)
        return self._control.traffic[1]

    def _empty(self) -> Path:
        directory = self._folder / "save"
        if self._control.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
        self._control.barrier()
        return directory


def _pretend_to_write(
    self: DcpWriter, plan: SavePlan, planner: Any
) -> torch.futures.Future[list[WriteResult]]:
    done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
    results, offset = [], 0
    for item in plan.items:
        length = chunk_bytes(item) + 1024
        place = _StorageInfo(f"{plan.storage_data.prefix}0.distcp", offset, length)
        results.append(WriteResult(item.index, length, place))
        offset += length
    done.set_result(results)
    return done


def _serve(
    rank: int, config: RunConfig, folder: Path, rounds: int, blocking: int, ready: Any, pipe: Any
) -> None:
    try:
        gc.collect()
        gc.freeze()  # shared pages stay shared
        ready.wait()
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
        bench = Bench(rank, config, folder)
        found: list[tuple[str, Times]] = []
        for part in [bench.round] * rounds + [bench.blocking] * blocking:
            for way in WAYS:
                found.append((way, part(way)))
                gc.collect()
        pipe.send(found)
        os._exit(0)  # the threads of gloo may hang
    except BaseException:
        pipe.send(traceback.format_exc())
        os._exit(1)


def measure(workers: int, gb: float, rounds: int, blocking: int, parent: Path) -> dict[str, Times]:
    """Way → part → median over rounds; of the slowest worker, CPU time and bytes of rank 0."""
    config = configuration(gb, "cpu")
    devices = [f"cluster.devices_per_node={workers}", f"train.global_batch={workers}"]
    config = change(config, None, devices)
    context = mp.get_context("fork")
    folder = Path(tempfile.mkdtemp(prefix="save-planning-", dir=parent))
    sockets = Path(tempfile.mkdtemp(prefix="save-planning-"))  # short: a path of a Unix socket
    secret = new_secret()
    os.environ.update(
        secret, WORLD_SIZE=str(workers), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()),
        LOCAL_WORLD_SIZE=str(workers), **{SOCKET: str(sockets / "control")},
    )  # fmt: skip
    ready, pipes = context.Event(), []
    for rank in range(workers):  # before the relay's thread exists
        ours, theirs = context.Pipe()
        arguments = (rank, config, folder, rounds, blocking, ready, theirs)
        context.Process(target=_serve, args=arguments, daemon=True).start()
        pipes.append(ours)
    position = Position(0, ("node",), workers)
    relay = Relay(position, sockets / "control", ("127.0.0.1", 0), secret[SECRET].encode())
    relay.start()
    ready.set()
    try:
        answers = [pipe.recv() for pipe in pipes]
    finally:
        relay.close()
        shutil.rmtree(folder)
        shutil.rmtree(sockets)
    if faults := [answer for answer in answers if isinstance(answer, str)]:
        sys.exit(faults[0])
    found: dict[str, Times] = {}
    for way in WAYS:
        rows = [[times for name, times in answer if name == way] for answer in answers]
        parts = {part: None for times in rows[0] for part in times}
        found[way] = {part: _median(part, rows) for part in parts}
    return found


def _median(part: str, rows: list[list[Times]]) -> float:
    """Of the rounds of all workers' rows."""
    if part.endswith(("cpu", "bytes")):
        rows = rows[:1]
    rounds = zip(*rows, strict=True)
    return float(median(max(row[part] for row in one) for one in rounds if part in one[0]))


def generated(workers: int) -> dict[str, float]:
    """The index and the manifest of a Llama of 70 B: 8 tensor, 8 pipeline, FSDP over the rest."""
    tensor, pipeline, layers, hidden, ffn = 8, 8, 80, 8192, 28672
    data = workers // (tensor * pipeline)
    shapes = {
        "attn.qkv.weight": (hidden + 2048, hidden), "attn.out.weight": (hidden, hidden),
        "mlp.gate.weight": (ffn, hidden), "mlp.up.weight": (ffn, hidden),
        "mlp.down.weight": (hidden, ffn), "norm_1.weight": (hidden,), "norm_2.weight": (hidden,),
    }  # fmt: skip
    kinds = {"model.{}": 0, "optimizer.{}.exp_avg": 0, "optimizer.{}.exp_avg_sq": 0}
    parts = []
    for rank in range(workers):
        stage, shard = divmod(rank, data * tensor)
        share, chunks = tensor * data, []
        for layer in range(stage * layers // pipeline, (stage + 1) * layers // pipeline):
            for name, shape in shapes.items():
                width = shape[0] // share
                for kind in kinds:
                    key = kind.format(f"blocks.{layer}.{name}")
                    offsets, sizes = (shard * width, 0)[: len(shape)], (width, *shape[1:])
                    whole = (width * share, *shape[1:])
                    path = (key.partition(".")[0], f"blocks.{layer}.{name}")
                    chunks.append(
                        Chunk(key, path, torch.float32, False, False, whole, offsets, sizes)
                    )
        places = [Place(f"__{rank}_{n % 2}.distcp", n * 10**6, 10**6) for n in range(len(chunks))]
        parts.append(pack_part(chunks, places))
    found: dict[str, float] = {"chunks": len(chunks) * workers, "sent": sum(map(len, parts))}

    def timed(name: str, call: Any) -> Any:
        began = time.process_time()
        answer = call()
        found[f"{name} cpu"] = time.process_time() - began
        return answer

    gc.disable()
    if workers <= FORMER_LIMIT:
        plans = [_plan(part) for part in parts]
        sent = [pickle.dumps(plan) for plan in plans]
        found["former sent"] = sum(map(len, sent))
        planner = DefaultSavePlanner()
        timed("former plan", lambda: planner.create_global_plan([pickle.loads(p) for p in sent]))  # noqa: S301
        del plans, sent
    folder = Path(tempfile.mkdtemp())
    content = timed("build", lambda: pickle.dumps(build_metadata(parts)))
    (folder / METADATA).write_bytes(content)
    found["index"] = len(content)
    table = timed("read", lambda: ChunkTable.of(read_metadata(folder)))
    found["broadcast"] = len(timed("pack", lambda: pickle.dumps(table)))
    timed("unpack", lambda: pickle.loads(pickle.dumps(table)))  # noqa: S301
    files = tuple(
        CheckpointFile(path=f"__{rank}_{n}.distcp", bytes=10**9, sha256=f"{rank:064x}")
        for rank in range(workers)
        for n in range(2)
    )
    manifest = CheckpointManifest(
        step=1, tokens=1, world_size=workers, attempt=0, recipe="llama2_70b", saved_at=1.0,
        save_s=1.0, fingerprint="0" * 32, files=files,
    )  # fmt: skip
    written = folder / "manifest.json"
    timed("write manifest", lambda: manifest.save(written))
    timed("read manifest", lambda: CheckpointManifest.load(written))
    found["manifest"] = written.stat().st_size
    shutil.rmtree(folder)
    return found


def _plan(part: bytes) -> SavePlan:
    """What DCP's planning sends for the same chunks."""
    items, paths = [], {}
    for values in pickle.loads(zlib.decompress(part))[0]:  # noqa: S301
        chunk = Chunk(*values)
        data = TensorWriteData(
            ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)),
            TensorProperties(chunk.dtype),
            torch.Size(chunk.shape),
        )
        index = MetadataIndex(chunk.key, chunk.offsets)
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        paths[chunk.key] = chunk.path
    return SavePlan(items, planner_data=paths)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--gb", type=float, default=2.0, help="size of the state of all workers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocking", type=int, default=1, help="rounds of whole saves, written")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to write to")
    parser.add_argument("--generated", type=int, help="workers; measures no save")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.generated:
        sizes = generated(options.generated)
        print(
            json.dumps(sizes, indent=2)
            if options.json
            else "\n".join(f"{name:18} {value:14,.3f}" for name, value in sizes.items())
        )
        return
    rows = []
    for workers in options.workers:
        found = measure(workers, options.gb, options.rounds, options.blocking, options.folder)
        rows.append({"workers": workers, **found})
        if not options.json:
            print(f"{workers} workers, {options.gb} GB, medians of {options.rounds} rounds")
            print(f"  {'':18}{'former':>12}{'now':>12}")
            for part in found["now"]:
                print(f"  {part:18}{found['former'][part]:12,.3f}{found['now'][part]:12,.3f}")
            sys.stdout.flush()
    if options.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
