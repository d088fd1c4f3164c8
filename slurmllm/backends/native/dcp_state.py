"""The state that DCP saves, and DCP load: model, optimizer and random state.

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

from slurmllm.backends.base import Worker
from slurmllm.backends.native.sharded_tensors import local_part, local_region
from slurmllm.checkpoint.formats.dcp_write import dcp_error
from slurmllm.checkpoint.formats.nxd_files import read_layout
from slurmllm.checkpoint.formats.weights import TrainingFiles, open_training
from slurmllm.checkpoint.state import MOMENTS, read_origin
from slurmllm.config.recipe import ModelConfig
from slurmllm.errors import StorageError


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, worker: Worker) -> dict[str, Any]:
    """Return a worker's state for a checkpoint: the tensors themselves, no copies."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {
        "model": model_state,
        # Without param_groups: learning rate and the like come from the recipe.
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
    """Load a checkpoint of any number of workers, by `dcp_save` or by NxD (collective).

    The random state is restored if the number of workers is the same; else it stays as seeded at
    the start.

    Args:
        group: All workers, over the host's network.
        config: Of the whole model; None to read it from `train_state.json`.

    Raises:
        StorageError: On all workers if one of them cannot read its shards.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state["state"]}
    if read_layout(directory) is None:
        _load_dcp(state, directory, worker, group)
    else:
        _load_nxd(state, directory, group, config)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
    )
    random_state = state.get("random", {}).get(_random_key(worker.rank), {})
    if "cpu" in random_state:
        torch.set_rng_state(random_state["cpu"])
    if "cuda" in random_state:
        torch.cuda.set_rng_state(random_state["cuda"])


def _load_dcp(
    state: dict[str, Any], directory: Path, worker: Worker, group: dist.ProcessGroup
) -> None:
    reader = FileSystemReader(directory)
    saved = reader.read_metadata().state_dict_metadata
    ranks = {key.split(".")[1] for key in saved if key.startswith("random.")}
    if len(ranks) == worker.world_size:
        own = _random_key(worker.rank)
        now = _random_state().items()
        random_state = {kind: value for kind, value in now if f"random.{own}.{kind}" in saved}
        if random_state:
            state["random"] = {own: random_state}
    try:
        load_state(state, storage_reader=reader, process_group=group)
    except CheckpointException as error:
        raise dcp_error(error, f"cannot read shards from {directory}") from error


def _load_nxd(
    state: dict[str, Any], directory: Path, group: dist.ProcessGroup, config: ModelConfig | None
) -> None:
    fault: str | None = None
    try:
        _read_shards(state, open_training(directory, config or read_origin(directory).model))
    except StorageError as error:
        fault = str(error)
    # Exchanged, so that no worker waits in a later collective for one that failed here.
    faults: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(faults, fault, group=group)
    for rank, found in enumerate(faults):
        if found is not None:
            raise StorageError(f"{found} (rank {rank})")


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
