"""Checkpoints that somebody prepared to run code in whoever reads them."""

from __future__ import annotations

import io
import os
import pickle
import struct
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from slurmllm.cli.main import cli
from slurmllm.core.config.load import load
from slurmllm.core.errors import StorageError
from slurmllm.core.run.artifact_records import CheckpointManifest
from slurmllm.core.run.rundir import RunDir
from slurmllm.data.spec import StreamSpec
from slurmllm.data.stream import PackedStream
from slurmllm.train.checkpoint.folder import MANIFEST, describe
from slurmllm.train.checkpoint.formats import pickles
from slurmllm.train.checkpoint.formats.weights import weight_reader
from slurmllm.train.checkpoint.state import TRAIN_STATE, TrainState, fingerprint
from train.checkpoint.nxd_folders import Layout, random_whole, write_nxd
from train.checkpoint.test_command import write_checkpoint
from train.gang import Gang, make_data, make_run, small_config


class Payload:
    """Unpickled, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def sign(folder: Path) -> None:
    """Write the manifest again, as whoever prepares a checkpoint can."""
    manifest = CheckpointManifest.load(folder / MANIFEST)
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    files = tuple(describe(folder, name) for name in names if name != MANIFEST)
    manifest.model_copy(update={"files": files}).save(folder / MANIFEST)


def hostile_metadata(folder: Path, proof: Path) -> None:
    with (folder / ".metadata").open("rb") as stream:
        metadata = pickle.load(stream)
    metadata.planner_data["nothing"] = Payload(proof)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def hostile_shard(
    folder: Path, proof: Path, key: str = "model.embed.weight", *, declared: bool = False
) -> None:
    """`declared` as bytes, which DCP's planner gives to an unrestricted torch.load."""
    with (folder / ".metadata").open("rb") as stream:
        metadata = pickle.load(stream)
    place = next(p for i, p in metadata.storage_data.items() if i.fqn == key)
    content = io.BytesIO()
    torch.save(Payload(proof), content)
    shard = folder / place.relative_path
    place.offset, place.length = shard.stat().st_size, len(content.getvalue())
    with shard.open("ab") as stream:
        stream.write(content.getvalue())
    if declared:
        for index in [i for i in metadata.storage_data if i.fqn == key]:
            del metadata.storage_data[index]
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(key)] = place
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def hostile_nxd(folder: Path, proof: Path) -> None:
    path = next((folder / "nxd/optim").glob("*.pt"))
    content = torch.load(path)
    torch.save({**content, "more": Payload(proof)}, path)


HOSTILE: dict[str, Callable[[Path, Path], None]] = {
    "metadata": hostile_metadata,
    "shard": hostile_shard,
    "random state": partial(hostile_shard, key="random.rank_00000.cpu", declared=True),
    "optimizer": partial(hostile_shard, key="optimizer.embed.weight.exp_avg"),
    "nxd": hostile_nxd,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(params=HOSTILE)
def hostile(
    request: pytest.FixtureRequest, tmp_path: Path, data: tuple[str, str]
) -> tuple[RunDir, Path, Path]:
    """A run with a hostile checkpoint, that checkpoint, and the file that its payload creates."""
    run, proof = make_run(tmp_path / "runs" / "a", data, "train.steps=14"), tmp_path / "proof"
    write_checkpoint(run, small_config().recipe, 10)
    folder = run.checkpoint(10)
    if request.param == "nxd":
        for path in folder.glob("*.distcp"):
            path.unlink()
        (folder / ".metadata").unlink()
        state = (folder / "train_state.json").read_bytes()
        write_nxd(folder, random_whole("neox"), Layout())
        (folder / "train_state.json").write_bytes(state)
    HOSTILE[request.param](folder, proof)
    sign(folder)
    return run, folder, proof


def test_no_verb_runs_its_code(hostile: tuple[RunDir, Path, Path], tmp_path: Path) -> None:
    _, folder, proof = hostile

    for verb in (["verify"], ["export", "--out"]):
        name, *options = verb
        more = [*options, str(tmp_path / f"out-{name}")] if options else []
        done = CliRunner().invoke(cli, ["checkpoint", name, str(folder), *more])
        assert (done.exit_code, proof.exists()) == (4, False), done.output
        assert "not safe to load: it names posix.system, which could run code" in done.output
        assert not (tmp_path / f"out-{name}").exists()


def test_not_even_a_reader_that_verifies_nothing_does(hostile: tuple[RunDir, Path, Path]) -> None:
    """As `evaluate` and train.init_from read the weights, and a worker after the verification."""
    _, folder, proof = hostile
    try:
        read = weight_reader(folder, small_config().recipe.model)
        read("embed.weight", (slice(0, 4), slice(0, 64)))
    except StorageError:
        pass  # a hostile moment is not read by these
    assert not proof.exists()


@pytest.mark.parametrize("hostile", ["shard"], indirect=True)
def test_training_neither_resumes_nor_starts_from_it(
    hostile: tuple[RunDir, Path, Path], tmp_path: Path, data: tuple[str, str]
) -> None:
    run, folder, proof = hostile
    recipe = load(run.config).recipe
    stream = PackedStream(StreamSpec.of(recipe), 0, 1, 0)
    identity = stream.state()
    stream.close()
    saved = TrainState.load(folder / TRAIN_STATE)
    fields = fingerprint(recipe, identity["corpus"], identity["tokenizer"])
    saved.model_copy(update={"fingerprint": fields}).save(folder / TRAIN_STATE)
    sign(folder)
    resumed = Gang(run).wait()
    other = make_run(tmp_path / "runs" / "b", data, f"train.init_from={folder}")
    started = Gang(other).wait()
    assert not proof.exists()
    for codes, gang_run in ((resumed, run), (started, other)):
        log = (gang_run.logs / "train_0_0.log").read_text()
        assert (codes, "not safe to load" in log) == ([4], True), log


def test_dcp_s_load_itself_unpickles_nothing(hostile: tuple[RunDir, Path, Path]) -> None:
    """Of a file that was exchanged after the verification."""
    import torch.distributed as dist
    from torch.optim import AdamW

    from slurmllm.train.backends.native import dcp
    from slurmllm.train.control.plane import ControlPlane
    from slurmllm.train.model.decoder import build_model

    _, folder, proof = hostile
    config = small_config().recipe.model
    model = build_model(config)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(StorageError):
            dcp.load(model, AdamW(model.parameters()), folder, ControlPlane(), config)
    finally:
        dist.destroy_process_group()
    assert not proof.exists()


def test_torch_s_metadata_is_read_as_torch_reads_it(tmp_path: Path, data: tuple[str, str]) -> None:
    run = make_run(tmp_path / "runs" / "a", data)
    write_checkpoint(run, small_config().recipe, 10)
    with (run.checkpoint(10) / ".metadata").open("rb") as stream:
        expected = pickle.load(stream)
    files, stored = pickles.read_metadata(run.checkpoint(10))
    assert stored.keys() == expected.state_dict_metadata.keys()
    for key, entry in expected.state_dict_metadata.items():
        (chunk,) = entry.chunks
        place = expected.storage_data[MetadataIndex(key, chunk.offsets)]
        (row,) = stored[key].rows.tolist()
        assert stored[key][:2] == (entry.properties.dtype, tuple(entry.size))
        assert row == [*chunk.offsets, *chunk.sizes, row[-3], place.offset, place.length]
        assert files[row[-3]] == place.relative_path
    names = [p.name for p in run.checkpoint(10).iterdir()]
    assert pickles.pickle_faults(run.checkpoint(10), names) == []


def nested_keys() -> bytes:
    """A key whose hash takes 2 ** 60 steps."""
    levels = b"".join(b"\x94h%c\x86" % number for number in range(60))
    return b"\x80\x04})" + levels + b"Ns."


def attack(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


DCP = "torch.distributed.checkpoint.metadata"
ATTACKS: dict[str, bytes] = {
    "system": pickle.dumps(Payload(Path("proof"))),
    "system, protocol 0": pickle.dumps(Payload(Path("proof")), 0),
    "eval": attack(named("builtins", "eval"), text("open('proof','w')"), b"\x85R"),
    "attribute of a class": attack(named(DCP, "Metadata.__init__.__globals__"), b")R"),
    "getattr": attack(named("builtins", "getattr"), named(DCP, "Metadata"), text("x"), b"\x86R"),
    "partial": attack(named("functools", "partial"), named("os", "system"), b"\x85R"),
    "a class that is changed": attack(
        named(DCP, "Metadata"), b"N", b"}", text("__init__"), b"Ns", b"\x86b"
    ),
    "an instance of another class": b"\x80\x02(i" + b"os\nsystem\n.",
    "an extension code": attack(b"\x82\x01"),
    "a huge memo": attack(b"Nr\xff\xff\xff\xff"),  # pickle.Unpickler allocates 64 GB
    "a text without end": attack(b"X" + struct.pack("<I", (1 << 32) - 1)),
    "a deep key": attack(b"}", b")" + b"\x85" * 50_000, b"Ns"),
    "a wide key": nested_keys(),
    "a deep name": attack(b"N" + b"\x85" * 50_000, text("x"), b"\x93"),
    "a persistent id": attack(text("../../etc/passwd"), b"Q"),
    "nothing": b"",
    "a list": attack(b"]"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_on_unpickling(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(ATTACKS[name])
    began = time.process_time()
    with pytest.raises(StorageError, match=r"not safe to load|damaged"):
        pickles.read_metadata(tmp_path)
    assert time.process_time() - began < 5
    assert not (tmp_path / "proof").exists()


def test_a_shard_whose_key_takes_hours_is_refused() -> None:
    """torch.load(weights_only=True) hashes it."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", nested_keys())
    began = time.process_time()
    with pytest.raises(pickle.UnpicklingError, match="unhashable"):
        pickles.check_torch_file(content)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda place: setattr(place, "relative_path", "../b/secret"), "outside the folder"),
        (lambda place: setattr(place, "offset", -1), "damaged"),
        (lambda place: setattr(place, "length", 1 << 70), "damaged"),
        (lambda place: setattr(place, "transform_descriptors", ["zstd"]), "damaged"),
    ],
)
def test_hostile_places_of_shards(
    change: Callable[[Any], None], reason: str, tmp_path: Path, data: tuple[str, str]
) -> None:
    run = make_run(tmp_path / "runs" / "a", data)
    write_checkpoint(run, small_config().recipe, 10)
    path = run.checkpoint(10) / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(next(iter(metadata.storage_data.values())))
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(StorageError, match=reason):
        pickles.read_metadata(run.checkpoint(10))
