"""The same seed gives the same weights, however the workers share them out."""

from __future__ import annotations

import hashlib

import pytest
from amounts import sample
from mesh_pool import Case, MeshPool
from mesh_pool import small_run as small
from torch import Tensor

from slurmllm.train.backends.native.runtime import NativeBackend
from slurmllm.train.model.decoder import build_model
from slurmllm.train.model.init import initialize
from train.backends.conftest import whole

pytestmark = pytest.mark.numerics


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()


def digests(backend: NativeBackend) -> dict[str, str]:
    """Of the whole parameters that this worker has a share of."""
    return {name: digest(whole(p)) for name, p in backend.model.named_parameters()}


@pytest.mark.parametrize(
    "mesh",
    sample(
        3,
        [
            # 3 divides neither the vocabulary nor the widths: shards of unequal sizes.
            ("neox", 1, 1, 3, "train.global_batch=6"),
            ("llama", 2, 2, 1, "parallel.virtual_pipeline=2"),
            ("gpt3", 1, 2, 2),
            ("neox", 2, 1, 2),
            ("llama", 4, 1, 1),
        ],
    ),
    ids=str,
)
def test_one_process_has_the_same(pool: MeshPool, mesh: tuple[str, int, int, int]) -> None:
    config = small(*mesh)
    recipe = config.recipe
    model = build_model(recipe.model)
    initialize(model, recipe.model, recipe.train.seed)
    expected = {name: digest(p) for name, p in model.named_parameters()}
    outcomes = pool.run(Case(config, last=0, before=digests))
    assert {name for outcome in outcomes for name in outcome.before} == expected.keys()
    for outcome in outcomes:
        assert outcome.before.items() <= expected.items()
