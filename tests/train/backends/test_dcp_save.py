"""Shards are written while training goes on, and hold what was there before."""

import dataclasses
import hashlib
import threading
import warnings
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from amounts import sample
from mesh_pool import Case, MeshPool
from mesh_pool import small_run as small
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import save as save_by_dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from slurmllm.core.config.resolve import RunConfig
from slurmllm.plan.mesh import make_mesh
from slurmllm.train.backends.native import dcp
from slurmllm.train.backends.native.dcp import DcpSave, own_tensors
from slurmllm.train.backends.native.runtime import NativeBackend
from slurmllm.train.checkpoint.formats.dcp_read import DcpFiles
from slurmllm.train.checkpoint.formats.dcp_write import Chunk, Place, pack_part
from slurmllm.train.model.init import local_part
from train.backends.conftest import LABELS, NewBackend, batch, micro_batches, save, train
from train.control.gangs import count_traffic

ASYNCHRONOUS = "checkpoint.asynchronous=true"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Files are written when it is set."""
    event = threading.Event()
    write = DcpSave.write

    def waiting(self: DcpSave) -> list[Place]:
        assert event.wait(30)
        return write(self)

    monkeypatch.setattr(DcpSave, "write", waiting)
    return event


def test_steps_meanwhile_are_not_in_it(
    new_backend: NewBackend, tmp_path: Path, gate: threading.Event
) -> None:
    backend = new_backend(ASYNCHRONOUS)
    train(backend, 3)
    for first, folder in ((3, tmp_path / "a"), (6, tmp_path / "b")):
        folder.mkdir()
        saving = backend.save_shards(folder)
        random_numbers = torch.rand(3)
        weights = {
            name: local_part(p).detach().clone() for name, p in backend.model.named_parameters()
        }
        expected = train(backend, 3, first=first)
        now = dict(backend.model.named_parameters())
        assert all(not torch.equal(local_part(now[name]), was) for name, was in weights.items())
        assert list(folder.iterdir()) == [], "nothing is written yet"
        gate.set()
        names = saving.wait()
        gate.clear()
        assert sorted(names + saving.finish()) == sorted(p.name for p in folder.iterdir())
        for name in names:
            assert saving.sha256(name) == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    resumed = new_backend()
    resumed.load_shards(folder)
    assert torch.equal(torch.rand(3), random_numbers)
    assert train(resumed, 3, first=6) == expected, "bit for bit"


def test_the_optimizer_waits_for_the_copy(
    new_backend: NewBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = new_backend(ASYNCHRONOUS)
    train(backend, 1)
    copy = DcpSave.copy_and_write

    go = threading.Event()

    def slow(self: Any, *arguments: Any) -> list[Place]:
        assert go.wait(30)
        return copy(self, *arguments)

    monkeypatch.setattr(DcpSave, "copy_and_write", slow)
    saving = backend.save_shards(tmp_path)
    backend.forward_backward(micro_batches(batch(seed=1), 2), LABELS)
    assert saving.waited_s == 0
    threading.Timer(0.1, go.set).start()
    backend.optimizer_step(1e-2)
    assert saving.waited_s > 0.05
    saving.wait()
    saving.finish()
    expected = train(new_backend(), 2)
    resumed = new_backend()
    resumed.load_shards(tmp_path)
    assert train(resumed, 1, first=1) == expected[3:]


def test_the_second_save_reuses_the_memory(new_backend: NewBackend, tmp_path: Path) -> None:
    backend = new_backend(ASYNCHRONOUS)
    addresses = []
    for step in range(2):
        train(backend, 1, first=step)
        folder = tmp_path / str(step)
        folder.mkdir()
        save(backend, folder)
        addresses.append({i: t.data_ptr() for i, t in backend.shards._copies.items()})
    assert addresses[0] == addresses[1]
    with pytest.raises(AssertionError, match="names of a state never change"):
        backend.shards.begin({"late": torch.zeros(1)}, tmp_path, asynchronous=True)


def test_several_files_of_one_worker(
    new_backend: NewBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp, "_SPLIT_BYTES", 0)
    backend = new_backend()
    train(backend, 2)
    assert save(backend, tmp_path) == ["__0_0.distcp", "__0_1.distcp", ".metadata"]
    expected = train(backend, 2, first=2)
    resumed = new_backend()
    resumed.load_shards(tmp_path)
    assert train(resumed, 2, first=2) == expected


def test_other_archives_keep_their_checksums(new_backend: NewBackend, tmp_path: Path) -> None:
    backend = new_backend()
    train(backend, 1)
    names = save(backend, tmp_path)
    torch.save({"a": torch.ones(100)}, tmp_path / "other.pt")
    with zipfile.ZipFile(tmp_path / "other.pt") as archive:
        assert all(member.CRC for member in archive.infolist() if member.file_size)
    assert torch.serialization.get_crc32_options()
    with zipfile.ZipFile(tmp_path / names[0]) as shard:
        assert not any(member.CRC for member in shard.infolist())


FEW = "train.micro_batch=4"
INTERLEAVED = "parallel.virtual_pipeline=2"
MESHES = {
    "tp2-pp2 tied": small("gpt3", 2, 2, 1, FEW, INTERLEAVED),
    "tp2-dp2 bf16": small("llama", 2, 1, 2, FEW, "train.precision=bf16_sr"),
    "copies": small("llama", 1, 1, 4, "cluster.devices_per_node=2", "parallel.shard_nodes=1"),
    "dp4": small("llama", 1, 1, 4),
    "tp2-dp2": small("neox", 2, 1, 2, FEW),
    "tp4": small("llama", 4, 1, 1, FEW),
    "pp2-dp2 tied": small("gpt3", 1, 2, 2, FEW),
}


def save_both_ways(folder: Path, backend: NativeBackend) -> list[list[int]]:
    """By DCP's own `save` into `dcp`, and three times by ours; the latter's messages, bytes."""
    state = dcp.state_of(backend.model, backend.optimizer, backend.worker.rank)
    save_by_dcp(state, checkpoint_id=folder / "dcp")
    results = []
    for number in range(3):
        ours = folder / f"ours_{number}"
        ours.mkdir(exist_ok=True)
        backend.control.barrier()
        traffic = count_traffic(backend.control)
        shards = backend.shards.begin(state, ours, asynchronous=number > 0)
        shards.wait()
        shards.finish()
        results.append([*traffic])
    return results


def load(path: Path) -> Metadata:
    metadata = FileSystemReader(path).read_metadata()
    for entry in metadata.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            # An empty chunk, of a worker for which a small parameter has no part, holds nothing.
            entry.chunks = [chunk for chunk in entry.chunks if chunk.sizes.numel()]
            entry.chunks.sort(key=lambda chunk: tuple(chunk.offsets))
    return metadata


def whole(path: Path, out: Path) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp_to_torch_save(path, out)
    return torch.load(out)


@pytest.mark.parametrize("config", sample(1, MESHES.values()), ids=MESHES)
def test_the_checkpoint_is_dcp_s(pool: MeshPool, tmp_path: Path, config: RunConfig) -> None:
    nodes = 4 // config.cluster.devices_per_node
    trained = pool.run(Case(config, nodes, last=1, after=partial(save_both_ways, tmp_path)))
    expected = load(tmp_path / "dcp")
    metadata = load(tmp_path / "ours_0")
    assert metadata.state_dict_metadata == expected.state_dict_metadata
    assert metadata.planner_data == expected.planner_data
    assert metadata.version == expected.version
    stored = {
        MetadataIndex(key, chunk.offsets)
        for key, entry in expected.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks
    }
    assert metadata.storage_data.keys() == stored
    assert stored <= expected.storage_data.keys()
    # torch itself reads it, and the tensors are the same.
    a, b = (whole(tmp_path / name, tmp_path / f"{name}.pt") for name in ("dcp", "ours_0"))
    torch.testing.assert_close(b, a, rtol=0, atol=0)
    # A load reads both: DCP's own plan is that of earlier versions.
    ours, earlier = (DcpFiles(tmp_path / name) for name in ("ours_0", "dcp"))
    for key in metadata.state_dict_metadata:
        assert torch.equal(ours.read_key(key), earlier.read_key(key)), key
    # Later saves are the same file, and only one small operation.
    contents = [(tmp_path / f"ours_{number}" / ".metadata").read_bytes() for number in range(3)]
    assert contents[0] == contents[1] == contents[2]
    for saves in (outcome.after for outcome in trained):
        # A reduction: sent and received, with a header of 17 bytes each.
        assert all(len(traffic) == 2 and sum(traffic) < 64 for traffic in saves[1:]), saves


def test_every_tensor_has_one_writer() -> None:
    """Plain tensors, which all workers of a stage hold; those of the ends are tied."""
    config = small("gpt3", 2, 2, 2, FEW)
    mesh = dataclasses.replace(make_mesh(config, 1), replicate=2)
    stage_shapes = {f"model.blocks.{n}.norm.weight": (8 * (n + 1),) for n in range(20)}
    tied = {"model.embed.weight": (500, 64), "optimizer.embed.weight.step": ()}
    writers: dict[tuple[int, str], list[int]] = {}
    load = dict.fromkeys(range(8), 0)
    for rank in range(8):
        shapes = {**stage_shapes, **tied, f"random.rank_{rank:05d}.cpu": (5,)}
        state = {key: torch.empty(shape) for key, shape in shapes.items()}
        for key in own_tensors(state, mesh, rank, tied=True):
            stage = -1 if key in tied else mesh.pipeline_rank(rank)
            writers.setdefault((stage, key), []).append(rank)
            load[rank] += 1
    assert len(writers) == 2 * len(stage_shapes) + len(tied) + 8
    assert all(len(ranks) == 1 for ranks in writers.values()), writers
    assert max(load.values()) - min(load.values()) <= 2, load


def test_what_a_worker_sends_is_small() -> None:
    chunks = [
        Chunk(("model", f"blocks.{n}.attn.qkv.weight"), torch.float32, (64, 64), (0, 0), (64, 64))
        for n in range(300)
    ]
    places = [Place("__17_0.distcp", n * 17_600, 17_600) for n in range(300)]
    assert len(pack_part(chunks, places)) < 30 * 300
