"""A run goes on from a checkpoint on another mesh, or on the same one bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from amounts import sample
from mesh_pool import Case, MeshPool, deviation
from mesh_pool import small_run as small
from rounding import training_rounding

from slurmllm.core.config.resolve import RunConfig
from train.backends.conftest import STEPS, Reference

pytestmark = pytest.mark.numerics

HALF = STEPS // 2
FEW, SEQUENCE = "train.micro_batch=4", "parallel.sequence=true"
INTERLEAVED = "parallel.virtual_pipeline=2"

CHANGES = {
    "pp2-tp2 to dp4": (
        small("neox", 2, 2, 1, FEW, SEQUENCE),
        small("neox", 1, 1, 4, "parallel.zero=3"),
    ),
    "tied over four stages to one process": (small("gpt3", 1, 4, 1), small("gpt3")),
    "dp2 to tp2-pp2 interleaved": (
        small("llama", 1, 1, 2),
        small("llama", 2, 2, 1, FEW, INTERLEAVED),
    ),
    "tied, one process to two stages of two": (
        small("gpt3"),
        small("gpt3", 1, 2, 2, INTERLEAVED),
    ),
    "tp4 to tp2-dp2": (small("llama", 4, 1, 1, FEW), small("llama", 2, 1, 2, FEW, SEQUENCE)),
}


@pytest.mark.parametrize(("before", "after"), sample(1, CHANGES.values(), arguments=2), ids=CHANGES)
def test_goes_on(
    pool: MeshPool, reference: Reference, tmp_path: Path, before: RunConfig, after: RunConfig
) -> None:
    expected = reference(after.recipe.model.family)
    pool.run(Case(before, last=HALF, save=tmp_path))
    outcomes = pool.run(Case(after, first=HALF, last=STEPS, load=tmp_path))
    assert max(deviation(outcomes, expected)) < training_rounding(after, STEPS)


@pytest.mark.parametrize(
    "config",
    sample(
        1,
        [
            small("gpt3", 2, 2, 1, FEW, INTERLEAVED),
            small("neox", 2, 1, 2, FEW, SEQUENCE),
            small("gpt3", 1, 4, 1),
        ],
    ),
    ids=["tp2-pp2 tied", "tp2-dp2", "pp4 tied"],
)
def test_the_same_mesh_goes_on_bit_for_bit(
    pool: MeshPool, tmp_path: Path, config: RunConfig
) -> None:
    whole = pool.run(Case(config, last=STEPS))
    pool.run(Case(config, last=HALF, save=tmp_path))
    outcomes = pool.run(Case(config, first=HALF, last=STEPS, load=tmp_path))
    assert outcomes[0].rows == whole[0].rows[HALF:]
