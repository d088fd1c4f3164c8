"""`Backend.evaluate`: the same loss on every mesh, and no influence on the training."""

from __future__ import annotations

import pytest
from amounts import sample
from mesh_pool import Case, MeshPool, deviation, evaluated
from mesh_pool import small_run as small
from rounding import training_rounding

from train.backends.conftest import LABELS

pytestmark = pytest.mark.numerics

FEW, SEQUENCE = "train.micro_batch=4", "parallel.sequence=true"
DOCUMENTS, INTERLEAVED = "data.mask=document", "parallel.virtual_pipeline=2"
STEPS = 3

Z_LOSS = "train.z_loss=0.01"

# Data-parallel workers alone are in tests/train/test_evaluation.py.
MESHES = [
    ("neox", 2, 1, 1, DOCUMENTS, Z_LOSS, FEW, SEQUENCE, "train.compile=true"),
    ("neox", 1, 2, 2, DOCUMENTS, INTERLEAVED, "train.activation_checkpointing=full"),
    ("neox", 2, 1, 2, DOCUMENTS, FEW, SEQUENCE, "parallel.zero=3"),
    ("neox", 1, 1, 2, DOCUMENTS, "parallel.zero=0"),
    ("neox", 1, 4, 1, DOCUMENTS),
    ("gpt3", 2, 2, 1, FEW),
    ("llama", 2, 1, 1, FEW, "train.compile=true", SEQUENCE),
]


@pytest.mark.parametrize(
    "mesh", sample(2, MESHES), ids=lambda mesh: "-".join(str(part) for part in mesh)
)
def test_same_loss_and_same_training(pool: MeshPool, mesh: tuple[str, int, int, int]) -> None:
    same = [part for part in mesh if part in (DOCUMENTS, Z_LOSS)]
    (expected,) = pool.run(Case(small(mesh[0], 1, 1, 1, *same), last=STEPS, between=evaluated))
    outcomes = pool.run(Case(small(*mesh), last=STEPS, between=evaluated))
    if "train.compile=true" not in mesh:
        plain = pool.run(Case(small(*mesh), last=STEPS))
        assert [o.rows for o in outcomes] == [o.rows for o in plain], "bit-identical"
    # Of two in three sequences, whose prompts are not learnt.
    tolerance = training_rounding(small(*mesh), STEPS, targets=LABELS // 4)
    assert max(deviation(outcomes, [expected])) < tolerance
    for outcome in outcomes:
        assert outcome.between == pytest.approx(expected.between, rel=tolerance)
    assert len(set(expected.between)) == STEPS
