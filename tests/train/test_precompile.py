"""One precompilation serves every world size: the train stage finds all graphs in the cache."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from rounding import training_rounding

from slurmllm.core.config.load import load
from slurmllm.core.run.records import WorkerRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.train.backends.native.environment import graphs
from train.gang import Gang, curve, make_run, rows

# tests/end_to_end/test_slurm.py has a run whose nodes start warm.
pytestmark = [pytest.mark.numerics, pytest.mark.long]

COMPILED = ("train.compile=true", "train.steps=8", "optim.decay_steps=60")


def test_precompile_on_one_worker_train_on_two(
    tmp_path: Path, data: tuple[str, str], unbroken: RunDir
) -> None:
    cold = tmp_path / "cold"
    one_worker = make_run(tmp_path / "one", data, *COMPILED)
    Gang(
        one_worker, stage="precompile", env={"TORCHINDUCTOR_CACHE_DIR": str(cold / "inductor")}
    ).finish()
    first = WorkerRecord.load(one_worker.attempt("precompile", 0).worker(0))
    assert (first.cache_hits, first.cache_misses) == (0, 4), "blocks both ways, two of the loss"
    assert len(graphs(cold)) == 4
    assert rows(one_worker, 0) == []
    assert not one_worker.checkpoints.exists()

    # Another folder: the archive is unpacked wherever a node has its local disk.
    warm = Path(shutil.move(cold, tmp_path / "warm"))
    kernels = sorted(path.name for path in warm.rglob("*.so"))
    assert kernels
    env = {"TORCHINDUCTOR_CACHE_DIR": str(warm / "inductor")}
    overrides = ("cluster.devices_per_node=2", "checkpoint.every_steps=4")
    two = make_run(tmp_path / "two", data, *COMPILED, *overrides)
    gang = Gang(two, world=2, env=env)
    gang.finish()
    second = WorkerRecord.load(two.attempt("train", 0).worker(0))
    assert (second.cache_hits, second.cache_misses) == (4, 0)
    assert "graph cache: 4 hits, 0 misses; first step" in gang.output(0)
    assert sorted(path.name for path in warm.rglob("*.so")) == kernels, "nothing was compiled"
    assert second.first_step_s < first.first_step_s

    reference = curve(unbroken)  # not compiled
    tolerance = training_rounding(load(two.config), 8)
    for step, values in curve(two).items():
        assert values == pytest.approx(reference[step], rel=tolerance)

    shutil.rmtree(two.checkpoint(8))
    Gang(two, world=2, attempt=1, env=env).finish()
    assert [row["step"] for row in rows(two, 1)] == [5, 6, 7, 8]
    assert curve(two, 1).items() <= curve(two, 0).items(), "bit-identical"


def test_one_tensor_parallel_replica_serves_others(
    tmp_path: Path, data: tuple[str, str], unbroken: RunDir
) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache" / "inductor")}
    tensor = (*COMPILED, "train.steps=5", "parallel.tensor=2")
    one_replica = make_run(tmp_path / "one", data, *tensor, "cluster.devices_per_node=2")
    Gang(one_replica, world=2, stage="precompile", env=env).finish()
    kernels = sorted(path.name for path in (tmp_path / "cache").rglob("*.so"))
    two = make_run(tmp_path / "two", data, *tensor, "cluster.devices_per_node=4")
    Gang(two, world=4, env=env).finish()
    record = WorkerRecord.load(two.attempt("train", 0).worker(0))
    assert record.cache_misses == 0
    # Of all four workers: two of them are another tensor-parallel group than precompile's.
    assert sorted(path.name for path in (tmp_path / "cache").rglob("*.so")) == kernels
    tolerance = training_rounding(load(two.config), 5)
    for step, values in curve(two).items():
        assert values == pytest.approx(curve(unbroken)[step], rel=tolerance)
