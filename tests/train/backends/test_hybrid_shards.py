"""Weights sharded over some nodes and copied on the others (HSDP), on eight workers.

`parallel.shard_nodes` of nodes of two workers: 2 copies of 4 shards, 4 of 2, and with tensor
parallelism or pipelines 2 of 2. Training, copies and checkpoints are those of any other mesh.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amounts import sample
from mesh_pool import Case, MeshPool, deviation, evaluated
from mesh_pool import small_run as small
from rounding import training_rounding
from torch import Tensor

from slurmllm.train.backends.native.runtime import NativeBackend
from slurmllm.train.model.init import local_part
from train.backends.conftest import LABELS, STEPS, whole

pytestmark = pytest.mark.numerics

BATCH = "train.global_batch=16"
SHARDS_OF_2, SHARDS_OF_4 = "parallel.shard_nodes=1", "parallel.shard_nodes=2"
DOCUMENTS, SEQUENCE, SR = "data.mask=document", "parallel.sequence=true", "train.precision=bf16_sr"


def mesh(family: str, tensor: int, pipeline: int, data: int, *overrides: str, **steps: Any) -> Case:
    """Steps on eight workers, or on one; four micro batches a step with pipelines, else two."""
    workers = tensor * pipeline * data
    per_node = min(2, workers)
    settings = (
        BATCH,
        f"cluster.devices_per_node={per_node}",
        f"train.micro_batch={max(1, 8 // data // pipeline)}",
    )
    config = small(family, tensor, pipeline, data, *settings, *overrides)
    return Case(config, workers // per_node, **steps)


# Every ZeRO level accumulates gradients.
MESHES: list[Any] = [
    ("llama", 1, 1, 8, SHARDS_OF_4, "parallel.zero=3"),
    ("gpt3", 1, 2, 4, SHARDS_OF_2),
    ("llama3", 2, 1, 4, SHARDS_OF_4, SEQUENCE, "parallel.zero=2"),
    ("neox", 1, 1, 8, SHARDS_OF_2, DOCUMENTS, "parallel.zero=2"),
    ("qwen3", 1, 1, 8, SHARDS_OF_4),
]


@pytest.mark.parametrize("hybrid", sample(2, MESHES), ids=str)
def test_same_training(pool: MeshPool, hybrid: tuple[Any, ...]) -> None:
    case = mesh(*hybrid, last=STEPS, after=evaluated)
    assert case.mesh.replicate > 1 < case.mesh.shard
    outcomes = pool.run(case)
    documents = (part for part in hybrid if part == DOCUMENTS)
    expected = pool.run(mesh(hybrid[0], 1, 1, 1, *documents, last=STEPS, after=evaluated))
    tolerance = training_rounding(case.config, STEPS, targets=LABELS)
    assert max(deviation(outcomes, expected)) < tolerance
    assert all(outcome.rows == outcomes[0].rows for outcome in outcomes), "all workers see the same"
    assert outcomes[0].after == pytest.approx(expected[0].after, rel=tolerance)


def state(backend: NativeBackend) -> dict[str, Tensor]:
    """Every weight of a worker, and the optimizer's state."""
    names = {parameter: name for name, parameter in backend.model.named_parameters()}
    return {
        f"{names[parameter]} {key}": tensor
        for parameter, moments in backend.optimizer.state.items()
        for key, tensor in {"weight": parameter, **moments}.items()
    }


def shards(backend: NativeBackend) -> dict[str, np.ndarray]:
    return {k: local_part(t).detach().float().numpy() for k, t in state(backend).items()}


def wholes(backend: NativeBackend) -> dict[str, np.ndarray]:
    return {k: whole(t).detach().float().numpy().copy() for k, t in state(backend).items()}


@pytest.mark.parametrize(
    "hybrid",
    sample(
        1,
        [
            ("gpt3", 1, 2, 4, SHARDS_OF_2, SR),
            ("llama", 1, 1, 8, SHARDS_OF_2, SR, "parallel.zero=3"),
            ("llama", 2, 1, 4, SHARDS_OF_4, SR, SEQUENCE),
        ],
    ),
    ids=str,
)
def test_copies_stay_equal(pool: MeshPool, hybrid: tuple[Any, ...]) -> None:
    """Bit by bit, although each worker rounds its own copy stochastically."""
    case = mesh(*hybrid, last=4, after=shards)
    outcomes, on = pool.run(case), case.mesh
    compared = 0
    for rank, outcome in enumerate(outcomes):
        copies = on.data_rank(rank) // on.shard
        first = outcomes[rank - copies * on.shard * on.tensor]
        assert outcome.after.keys() == first.after.keys()
        for name, part in outcome.after.items():
            np.testing.assert_array_equal(part, first.after[name], f"rank {rank}: {name}")
            compared += copies > 0
    assert compared > 100


HYBRID, FSDP = (1, 1, 8, SHARDS_OF_4), (1, 1, 8, "parallel.zero=3")


@pytest.mark.parametrize(
    "chain",
    sample(
        1,
        [
            (FSDP, (1, 1, 8, SHARDS_OF_2, "parallel.zero=3"), (1, 1, 1)),
            ((2, 1, 4, SEQUENCE), (2, 1, 4, SHARDS_OF_4), (1, 2, 4), (1, 2, 4, SHARDS_OF_2), FSDP),
        ],
    ),
    ids=["data", "tensor and pipeline"],
)
def test_checkpoints_load_on_any_mesh(pool: MeshPool, tmp_path: Path, chain: Any) -> None:
    """Saved and loaded along the chain with the same bits; at its end the first mesh goes on."""
    first = mesh("llama", *HYBRID, last=4, between=wholes, save=tmp_path / "0", save_at=2)
    expected = pool.run(first)[0]
    for number, degrees in enumerate(chain, 1):
        folders = {"load": tmp_path / str(number - 1), "save": tmp_path / str(number)}
        loaded = pool.run(mesh("llama", *degrees, first=2, last=2, before=wholes, **folders))
        held = {key: part for outcome in loaded for key, part in outcome.before.items()}
        assert held.keys() == expected.between[1].keys(), degrees
        for key, part in held.items():
            np.testing.assert_array_equal(part, expected.between[1][key], f"{degrees}: {key}")
    back = pool.run(mesh("llama", *HYBRID, first=2, last=4, load=tmp_path / str(len(chain))))
    assert back[0].rows == expected.rows[2:]
