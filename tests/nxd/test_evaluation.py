"""`Backend.evaluate` with the real NxD: the native loss, and no influence on the training."""

from __future__ import annotations

import pytest
from mesh_pool import Case, MeshPool, evaluated, small_run

pytestmark = pytest.mark.nxd

DOCUMENTS, SEQUENCE = "data.mask=document", "parallel.sequence=true"
MESHES = [
    ("neox", 2, 1, 2, DOCUMENTS, SEQUENCE, "train.activation_checkpointing=selective"),
    ("llama", 1, 1, 2, DOCUMENTS, "train.activation_checkpointing=full"),
    ("gpt3", 2, 2, 1, SEQUENCE),
    ("neox", 1, 2, 2, DOCUMENTS, "parallel.virtual_pipeline=2"),
]


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "-".join(str(part) for part in mesh))
def test_same_loss_and_same_training(pool: MeshPool, mesh: tuple[str, int, int, int]) -> None:
    own = [part for part in mesh if part == DOCUMENTS]
    (expected,) = pool.run(Case(small_run(mesh[0], 1, 1, 1, *own), last=3, between=evaluated))
    plain = pool.run(Case(small_run(*mesh, "backend=nxd"), last=3))
    found = pool.run(Case(small_run(*mesh, "backend=nxd"), last=3, between=evaluated))
    assert [one.rows for one in found] == [one.rows for one in plain], "bit-identical"
    for one in found:
        assert one.between == pytest.approx(expected.between, rel=1e-5)
