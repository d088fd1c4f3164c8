"""The memory between steps is as `plan/memory.py` computes it, to the byte."""

from __future__ import annotations

import pytest
from mesh_pool import Case, MeshPool
from mesh_pool import small_run as small
from torch import Tensor

from slurmllm.backends.native.runtime import NativeBackend
from slurmllm.model.init import local_part
from slurmllm.plan.memory import worker_memory


def stored(backend: NativeBackend) -> dict[str, int]:
    """Bytes of weights, of their gradients and of the optimizer's moments."""
    parameters = list(backend.model.parameters())
    moments = [
        value
        for state in backend.optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.ndim
    ]
    return {
        "weights": sum(local_part(p).untyped_storage().nbytes() for p in parameters),
        "optimizer": sum(local_part(m).numel() * m.element_size() for m in moments),
    }


@pytest.mark.parametrize(
    "mesh",
    [
        ("neox", 2, 1, 2, "train.micro_batch=4"),
        ("neox", 1, 1, 3, "train.global_batch=6", "train.precision=bf16_sr"),
        ("llama", 2, 2, 1, "train.precision=bf16_mixed", "parallel.virtual_pipeline=2"),
        ("gpt3", 1, 2, 2, "train.precision=bf16_mixed"),
    ],
    ids=str,
)
def test_at_rest(pool: MeshPool, mesh: tuple[str, int, int, int]) -> None:
    case = Case(small(*mesh), last=1, after=stored)
    for rank, outcome in enumerate(pool.run(case)):
        predicted = worker_memory(case.config, case.mesh, rank)
        assert outcome.after == {"weights": predicted.weights, "optimizer": predicted.optimizer}
