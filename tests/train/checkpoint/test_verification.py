"""Checkpoints of other projects: what their own loading refuses is found, and nothing else is."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from slurmllm.train.checkpoint import verification
from slurmllm.train.checkpoint.verification import verify_checkpoint

TENSORS = {f"layers.{n}.weight": torch.full((8, 40 * n + 8), float(n)) for n in range(6)}
RANKS = 4
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def write_torch(folder: Path) -> None:
    torch.save({"model": TENSORS, "step": 7}, folder / "model.pt")


def load_torch(folder: Path) -> None:
    assert torch.load(folder / "model.pt")["model"].keys() == TENSORS.keys()


def write_dcp(folder: Path) -> None:
    state = {"model": dict(TENSORS), "step": 7, "optimizer": {"lr": 0.1}}
    dcp_save(state, storage_writer=FileSystemWriter(folder, thread_count=3))


def load_dcp(folder: Path) -> None:
    state: dict[str, Any] = {"model": {n: torch.zeros_like(t) for n, t in TENSORS.items()}}
    state |= {"step": 0, "optimizer": {"lr": 0.0}}
    dcp_load(state, checkpoint_id=folder)
    assert (state["step"], state["optimizer"]["lr"]) == (7, 0.1)


def write_safetensors(folder: Path) -> None:
    save_file(TENSORS, folder / "model.safetensors")
    torch.save({"lr": 0.1}, folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 10, "log_history": []}))


def load_safetensors(folder: Path) -> None:
    assert load_file(folder / "model.safetensors").keys() == TENSORS.keys()
    assert torch.load(folder / "optimizer.pt")["lr"] == 0.1
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 10


def write_sharded(folder: Path) -> None:
    weights = dict[str, str]()
    for part in range(3):
        file = f"model-0000{part + 1}-of-00003.safetensors"
        tensors = {n: t for k, (n, t) in enumerate(TENSORS.items()) if k % 3 == part}
        save_file(tensors, folder / file)
        weights |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def load_sharded(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == TENSORS.keys()  # as transformers' strict loading requires
    for name, file in index.items():
        with safe_open(folder / file, "pt") as stream:
            assert stream.get_tensor(name).shape == TENSORS[name].shape


def write_megatron(folder: Path) -> None:
    write_dcp(folder)
    torch.save({"args": {"lr": 0.1}, "iteration": 10}, folder / "common.pt")
    backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    (folder / "metadata.json").write_text(json.dumps(backends))


def load_megatron(folder: Path) -> None:
    assert json.loads((folder / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    assert torch.load(folder / "common.pt")["iteration"] == 10
    load_dcp(folder)


def write_deepspeed(folder: Path) -> None:
    torch.save({"module": TENSORS, "dp_world_size": RANKS}, folder / "mp_rank_00_model_states.pt")
    for rank in range(RANKS):
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"state": torch.full((40 + rank,), 1.0)}, folder / name)


def load_deepspeed(folder: Path) -> None:
    assert torch.load(folder / "mp_rank_00_model_states.pt")["module"].keys() == TENSORS.keys()
    for rank in range(RANKS):
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        assert torch.load(folder / name)["state"].shape == (40 + rank,)


FORMATS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "torch": (write_torch, load_torch),
    "dcp": (write_dcp, load_dcp),
    "safetensors": (write_safetensors, load_safetensors),
    "sharded": (write_sharded, load_sharded),
    "megatron": (write_megatron, load_megatron),
    "deepspeed": (write_deepspeed, load_deepspeed),
}


def flipped(content: bytes, at: int, mask: int = 0x11) -> bytes:
    at %= len(content)
    return content[:at] + bytes([content[at] ^ mask]) + content[at + 1 :]


Changes = dict[str, bytes | None]  # file → its new content; None: removed


def checkpoint_in(folder: Path, name: str) -> Path:
    return folder / "model.pt" if name == "torch" else folder


# Without these the trainer or `completion_file` says that the checkpoint is incomplete.
UNLISTED = (
    *("metadata.json", "trainer_state.json", "optimizer.pt", "model.safetensors"),
    *("model.safetensors.index.json", "mp_rank_00_model_states.pt"),
)
LAST = f"bf16_zero_pp_rank_{RANKS - 1}_mp_rank_00_optim_states.pt"


def mutations(files: dict[str, bytes]) -> Iterator[tuple[str, Changes]]:
    """Yield mutations of each file of a checkpoint, and of pairs of shards."""
    for name, content in files.items():
        if name not in (*UNLISTED, LAST):
            yield f"{name} removed", {name: None}
        yield f"{name} empty", {name: b""}
        yield f"{name} cut in half", {name: content[: len(content) // 2]}
        yield f"{name} cut by a byte", {name: content[:-1]}
        yield f"{name} ends with zeros", {name: content[:-200] + bytes(200)}
        yield f"{name} of zeros", {name: bytes(len(content))}
        for at in (0, -3, -10, -20) if name.endswith(".json") else (0, 2, -3, -6, -10, -20):
            yield f"{name} byte {at} flipped", {name: flipped(content, at)}
        if (table := content.rfind(b"PK\x01\x02")) > 0:
            for at in (0, 25, 29, 43, 47):
                yield f"{name} table byte {at} flipped", {name: flipped(content, table + at)}
        for at in range(66, 130, 8) if name == "model.pt" else ():  # in its pickle
            yield f"{name} byte {at} flipped", {name: flipped(content, at)}
    shards = [name for name in files if name.endswith((".distcp", ".safetensors"))]
    for first, second in pairwise(shards):
        yield f"{first} and {second} swapped", {first: files[second], second: files[first]}
        yield f"{first} in place of {second}", {second: files[first]}
    yield "a file is left over", {".metadata.tmp": b"x", "model.pt.tmp": b"", "tmp/x.bin": b""}
    if table_of_files := files.get("model.safetensors.index.json"):
        index = json.loads(table_of_files)
        index["weight_map"].popitem()
        changed = json.dumps(index).encode()
        yield "an entry of the index is gone", {"model.safetensors.index.json": changed}


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_that_its_trainer_cannot_load_is_found(name: str, tmp_path: Path) -> None:
    write, load = FORMATS[name]
    intact = tmp_path / "intact"
    intact.mkdir()
    write(intact)
    load(intact)
    for full in (False, True):
        verified = verify_checkpoint(checkpoint_in(intact, name), time.monotonic() + 60, full)
        assert verified[:2] == ((), ())
    files = {str(p.relative_to(intact)): p.read_bytes() for p in intact.rglob("*") if p.is_file()}
    missed, refused, found = [], [], 0
    for text, changes in mutations(files):
        folder = tmp_path / "mutated"
        shutil.copytree(intact, folder)
        for file, new in changes.items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).unlink(missing_ok=True)
            if new is not None:
                (folder / file).write_bytes(new)
        try:
            load(folder)
            loads = True
        except BaseException:  # CheckpointException
            loads = False
        faults = verify_checkpoint(checkpoint_in(folder, name), time.monotonic() + 60).faults
        found += bool(faults) and not loads
        if not loads and not faults:
            missed.append(text)
        if loads and faults and "left over" in text:
            refused.append((text, faults))
        if faults and not loads:
            named = [file for file in changes if any(file in line for line in faults)]
            assert named, (text, faults)
        shutil.rmtree(folder)
    print(name, found, "found")
    assert not missed, "\n".join(missed)
    assert not refused
    assert found >= 20


@pytest.mark.parametrize("backwards", [False, True])
def test_the_order_of_a_folder_does_not_matter(
    backwards: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dcp(tmp_path)
    shard = next(tmp_path.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-200])
    names = sorted((path.name for path in tmp_path.iterdir()), reverse=backwards)
    monkeypatch.setattr(verification, "_files", lambda *_: names)
    assert verify_checkpoint(tmp_path, time.monotonic() + 60).faults[0].startswith(shard.name)


@pytest.mark.parametrize(
    ("numbers", "missing"),
    [
        ((0, 1, 3), ("rank_2.log is missing",)),
        ((0, 2), ("rank_1.log is missing",)),
        ((0, 8), ()),  # the first rank of each node saves
        ((0, 1, 8, 9), ()),
        ((8, 16), ()),  # of an adapter, say
        ((0, 20261129), ()),
        ((1,), ()),
    ],
)
def test_a_number_is_missing_where_most_are_there(
    numbers: tuple[int, ...], missing: tuple[str, ...], tmp_path: Path
) -> None:
    for number in numbers:
        (tmp_path / f"rank_{number}.log").touch()
    assert verify_checkpoint(tmp_path, time.monotonic() + 60).faults == missing


def test_what_is_not_read_is_no_damage(tmp_path: Path) -> None:
    with (tmp_path / "trainer_state.json").open("wb") as stream:
        stream.truncate(1 << 30)  # of a million steps
    faults, unverified, _ = verify_checkpoint(tmp_path, time.monotonic() + 60)
    assert faults == ()
    assert "trainer_state.json: larger than 67,108,864 bytes" in unverified[0]


def test_another_archive_is_not_one_of_torch_that_is_damaged(tmp_path: Path) -> None:
    np.savez(tmp_path / "weights.npz", x=np.ones(3))
    (tmp_path / "weights.npz").rename(tmp_path / "weights.pt")
    assert verify_checkpoint(tmp_path, time.monotonic() + 60).faults == ()


def test_a_pipe_in_place_of_a_list_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".metadata")
    began = time.monotonic()
    assert "not a regular file" in verify_checkpoint(tmp_path, began + 60).faults[0]
    assert time.monotonic() - began < 30


def test_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_safetensors(tmp_path)
    (tmp_path / "rng").mkdir()
    scandir = os.scandir

    def closed(path: str) -> Any:
        if Path(path).name == "rng":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    (fault,) = verify_checkpoint(tmp_path, time.monotonic() + 60).faults
    assert fault.startswith("rng: Permission denied")
