"""Model, optimizer and random state to files and back, by torch.distributed.checkpoint.

Every worker writes its own shards into one file; `.metadata` maps parameter names to pieces, so
that another number of workers can read them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from slurmllm.backends.base import Worker
from slurmllm.checkpoint.formats.dcp_writer import dcp_error
from slurmllm.checkpoint.formats.nxd_layout import read_layout
from slurmllm.checkpoint.formats.weights import TrainingFiles, open_training
from slurmllm.checkpoint.origin import read_origin
from slurmllm.checkpoint.state import MOMENTS
from slurmllm.config.recipe import ModelConfig
from slurmllm.errors import StorageError


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, worker: Worker) -> dict[str, Any]:
    """What a checkpoint holds of a worker: the tensors themselves, no copies."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {
        "model": model_state,
        # Not its param_groups: learning rate and the like come from the recipe.
        "optimizer": optimizer_state["state"],
        "random": {_random_key(worker.rank): _random_state()},
    }


def load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    directory: Path,
    worker: Worker,
    group: dist.ProcessGroup,
    config: ModelConfig | None = None,
) -> None:
    """Read what any number of workers wrote, by `shard_saving` or by NxD (collective).

    The random state comes back where the number of workers is the same; else it stays as the
    start-up seeded it.

    Args:
        model: This worker's.
        optimizer: Likewise.
        directory: The folder.
        worker: This one.
        group: All workers, over the host's network.
        config: The whole model's; None: as `train_state.json` says.

    Raises:
        StorageError: on all workers, where one of them cannot read its shares.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state["state"]}
    if read_layout(directory) is None:
        _load_own(state, directory, worker, group)
    else:
        _fill(state, directory, group, config)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
    )
    _set_random_state(state.get("random", {}).get(_random_key(worker.rank), {}))


def _load_own(
    state: dict[str, Any], directory: Path, worker: Worker, group: dist.ProcessGroup
) -> None:
    reader = FileSystemReader(directory)
    random_state = _saved_random_state(reader, worker)
    if random_state:
        state["random"] = {_random_key(worker.rank): random_state}
    try:
        load_state(state, storage_reader=reader, process_group=group)
    except CheckpointException as error:
        raise dcp_error(error, f"cannot read shards from {directory}") from error


def _fill(
    state: dict[str, Any], directory: Path, group: dist.ProcessGroup, config: ModelConfig | None
) -> None:
    """Set this worker's shares from another backend's checkpoint (collective)."""
    fault: str | None = None
    try:
        _read_shares(state, open_training(directory, config or read_origin(directory).model))
    except StorageError as error:
        fault = str(error)
    faults: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(faults, fault, group=group)
    for rank, found in enumerate(faults):
        if found is not None:
            raise StorageError(f"{found} (rank {rank})")


@torch.no_grad()
def _read_shares(state: dict[str, Any], files: TrainingFiles) -> None:
    for name, parameter in state["model"].items():
        local, region = _share(parameter)
        local.copy_(files.read(name, region))
    for name, held in state["optimizer"].items():
        held["step"].fill_(files.step(name))
        for kind in MOMENTS:
            local, region = _share(held[kind])
            local.copy_(files.read_moment(kind, name, region))


def _share(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This worker's part of a tensor, and which it is."""
    local, size, offset = tensor, tuple(tensor.shape), (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        size, offset = compute_local_shape_and_global_offset(
            size, tensor.device_mesh, tensor.placements
        )
    return local, tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))


def _random_key(rank: int) -> str:
    return f"rank_{rank:05d}"


def _random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _saved_random_state(reader: FileSystemReader, worker: Worker) -> dict[str, Tensor]:
    """Tensors to read this worker's random state into; none if another number of them saved."""
    saved = reader.read_metadata().state_dict_metadata
    savers = {key.split(".")[1] for key in saved if key.startswith("random.")}
    if len(savers) != worker.world_size:
        return {}
    mine = f"random.{_random_key(worker.rank)}"
    return {device: now for device, now in _random_state().items() if f"{mine}.{device}" in saved}


def _set_random_state(state: dict[str, Tensor]) -> None:
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
