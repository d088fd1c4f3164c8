"""`Backend.evaluate` with the real NxD: the native loss, and no influence on the training."""

from __future__ import annotations

from pathlib import Path

import pytest
from mesh_pool import Case, MeshPool, evaluated, small_run
from train.gang import Gang, curve, make_data, make_run

from nxd.conftest import nxd_environment
from slurmllm.analysis.evaluate.validation_loss import held_out_loss
from slurmllm.analysis.evaluate.validation_text import stream_spec, validation_text
from slurmllm.core.metrics.row_reader import read_evaluations

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
    documents = [part for part in mesh if part == DOCUMENTS]
    (expected,) = pool.run(Case(small_run(mesh[0], 1, 1, 1, *documents), last=3, between=evaluated))
    plain = pool.run(Case(small_run(*mesh, "backend=nxd"), last=3))
    outcomes = pool.run(Case(small_run(*mesh, "backend=nxd"), last=3, between=evaluated))
    assert [outcome.rows for outcome in outcomes] == [outcome.rows for outcome in plain], (
        "bit-identical"
    )
    for outcome in outcomes:
        assert outcome.between == pytest.approx(expected.between, rel=1e-5)


def test_a_run_has_the_numbers_of_evaluate(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    overrides = (
        "backend=nxd",
        "cluster.devices_per_node=2",
        "parallel.pipeline=2",
        "train.steps=8",
        "checkpoint.every_steps=4",
        "data.validation=0.1",
    )
    plain = Gang(
        make_run(tmp_path / "plain", data, *overrides), world=2, env=nxd_environment()
    ).finish()
    evaluates = ("eval.every_steps=4", "eval.sequences=13")
    run = make_run(tmp_path / "run", data, *overrides, *evaluates)
    Gang(run, world=2, env=nxd_environment()).finish()
    assert curve(run) == curve(plain), "bit-identical"
    evaluations = read_evaluations(run, run.metrics_files())
    assert sorted(evaluations) == [4, 8]
    for step, event in evaluations.items():
        directory = run.checkpoint(step)
        with stream_spec(validation_text(run, None), directory, None) as spec:
            expected = held_out_loss(directory, spec, 13, None, "cpu")
        assert event.values["held_out"] == pytest.approx(expected.loss, rel=1e-6)
