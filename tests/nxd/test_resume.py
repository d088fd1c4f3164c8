"""NxD's checkpoints: bit-identical on the same mesh, read by other meshes and by the native one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mesh_pool import Case, MeshPool, deviation, small_run

from nxd.conftest import Reference
from nxd.test_meshes import INTERLEAVED, KV1, SEQUENCE, TOLERANCE, WHOLE
from slurmllm.train.checkpoint.formats.nxd_files import read_layout

pytestmark = pytest.mark.nxd

MIXED, STOCHASTIC = "train.precision=bf16_mixed", "train.precision=bf16_sr"


@pytest.mark.parametrize(
    "mesh",
    [
        ("neox", 2, 1, 2, SEQUENCE),
        ("neox", 2, 1, 2, WHOLE),
        ("neox", 1, 2, 2, MIXED),
        ("neox", 2, 1, 2, MIXED, "train.activation_checkpointing=full"),
        ("llama", 2, 2, 1, KV1, STOCHASTIC, SEQUENCE),
        ("gpt3", 1, 2, 2, INTERLEAVED),
        ("gpt3", 2, 1, 2, MIXED),
    ],
    ids=lambda mesh: "-".join(str(part) for part in mesh),
)
def test_the_same_mesh_goes_on_bit_for_bit(
    pool: MeshPool, mesh: tuple[str, int, int, int], tmp_path: Path
) -> None:
    family, tensor, pipeline, data, *overrides = mesh
    config = small_run(family, tensor, pipeline, data, "backend=nxd", *overrides)
    unbroken = pool.run(Case(config, last=6))
    pool.run(Case(config, last=3, save=tmp_path / "c"))
    resumed = pool.run(Case(config, first=3, last=6, load=tmp_path / "c"))
    assert [outcome.rows for outcome in resumed] == [outcome.rows[3:] for outcome in unbroken]


def test_the_time_of_files_means_nothing(pool: MeshPool, tmp_path: Path) -> None:
    # NxD by itself takes the checkpoint whose `done` is youngest.
    config = small_run("neox", 1, 1, 2, "backend=nxd")
    unbroken = pool.run(Case(config, last=4))
    pool.run(Case(config, last=2, save=tmp_path / "early"))
    pool.run(Case(config, last=3, save=tmp_path / "late"))
    (tmp_path / "early" / "nxd" / "done").touch()
    resumed = pool.run(Case(config, first=3, last=4, load=tmp_path / "late"))
    assert resumed[0].rows == unbroken[0].rows[3:]


MOVES = {
    "native to nxd": (("native", 1, 1, 2), ("nxd", 2, 1, 2, SEQUENCE)),
    "native tp2-dp2 to nxd pp2-dp2": (("native", 2, 1, 2), ("nxd", 1, 2, 2)),
    "nxd to native": (("nxd", 2, 1, 2), ("native", 1, 1, 2)),
    "nxd pp2-dp2 to native tp2": (("nxd", 1, 2, 2), ("native", 2, 1, 1)),
    "nxd tp2-dp2 to nxd pp2-tp2": (("nxd", 2, 1, 2), ("nxd", 2, 2, 1, SEQUENCE)),
    "nxd zero to none": (("nxd", 1, 1, 2), ("nxd", 1, 1, 4, WHOLE)),
}


@pytest.mark.parametrize("family", ["llama", "gpt3"])
@pytest.mark.parametrize("move", MOVES)
def test_goes_on_elsewhere(
    pool: MeshPool, native: Reference, family: str, move: str, tmp_path: Path
) -> None:
    """20 steps, the backend or the mesh changed after the tenth; the curve is the unbroken one."""
    kv = (KV1,) if family == "llama" and "native tp" not in move else ()
    (first, *first_overrides), (second, *other) = MOVES[move]
    before = small_run(family, *first_overrides[:3], f"backend={first}", *kv, *first_overrides[3:])
    after = small_run(family, *other[:3], f"backend={second}", *kv, *other[3:])
    pool.run(Case(before, last=10, save=tmp_path / "c"))
    assert (read_layout(tmp_path / "c") is not None) == (first == "nxd")
    outcomes = pool.run(Case(after, first=10, last=20, load=tmp_path / "c"))
    assert max(deviation(outcomes, native(family, *kv))) < TOLERANCE


def test_there_and_back(pool: MeshPool, native: Reference, tmp_path: Path) -> None:
    steps = [("native", 1, 1, 2, 0, 6), ("nxd", 2, 1, 2, 6, 12), ("native", 2, 1, 1, 12, 20)]
    rows = []
    for backend, tensor, pipeline, data, first, last in steps:
        config = small_run("neox", tensor, pipeline, data, f"backend={backend}")
        load = tmp_path / str(first) if first else None
        outcome = pool.run(
            Case(config, first=first, last=last, load=load, save=tmp_path / str(last))
        )
        rows += outcome[0].rows
    from mesh_pool import Outcome

    assert max(deviation([Outcome(rows)], native("neox"))) < TOLERANCE


def test_master_weights_come_across(pool: MeshPool, tmp_path: Path) -> None:
    """bf16 weights with fp32 masters: the masters go on, and not their rounded copies."""
    mixed = small_run("neox", 2, 1, 2, "backend=nxd", MIXED)
    pool.run(Case(mixed, last=4, save=tmp_path / "c"))
    on_mesh = pool.run(Case(mixed, first=4, last=5, load=tmp_path / "c"))
    other = small_run("neox", 1, 1, 4, "backend=nxd", MIXED)
    outcomes = pool.run(Case(other, first=4, last=5, load=tmp_path / "c"))
    # The parameter norm is of the fp32 masters after an equal start and one step.
    assert outcomes[0].rows[0][2] == pytest.approx(on_mesh[0].rows[0][2], rel=1e-6)


def weight_decays(backend: Any) -> list[float]:
    """Of the groups of the optimizer that makes the update."""
    return [group["weight_decay"] for group in backend._inner_optimizer.param_groups]


@pytest.mark.parametrize("zero", [0, 1])
def test_hyperparameters_are_the_recipe_s(pool: MeshPool, zero: int, tmp_path: Path) -> None:
    whole = ("backend=nxd", f"parallel.zero={zero}")
    pool.run(Case(small_run("neox", 1, 1, 2, *whole), last=2, save=tmp_path / "c"))
    more = ("optim.weight_decay=0.3", "optim.decay_norms_and_biases=true")
    changed = small_run("neox", 1, 1, 2, *whole, *more)
    load = Case(changed, first=2, last=2, load=tmp_path / "c", before=weight_decays)
    assert pool.run(load)[0].before == [0.3, 0.3]
