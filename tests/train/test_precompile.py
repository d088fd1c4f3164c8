"""One precompilation serves every world size: the train stage finds all graphs in the cache."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from slurmllm.backends.native.environment import count_graphs
from slurmllm.records import WorkerRecord
from slurmllm.rundir import RunDir
from train.gang import Gang, curve, make_run, rows

COMPILED = ("train.compile=true", "train.steps=8", "optim.decay_steps=60")


def test_precompile_on_one_worker_train_on_two(
    tmp_path: Path, data: tuple[str, str], unbroken: RunDir
) -> None:
    cold = tmp_path / "cold"
    one = make_run(tmp_path / "one", data, *COMPILED)
    Gang(one, stage="precompile", env={"TORCHINDUCTOR_CACHE_DIR": str(cold / "inductor")}).finish()
    first = WorkerRecord.load(one.attempt("precompile", 0).worker(0))
    assert (first.cache_hits, first.cache_misses) == (0, 2), "forward and backward of all blocks"
    assert count_graphs(cold) == 2
    assert rows(one, 0) == []
    assert not one.checkpoints.exists()

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
    assert (second.cache_hits, second.cache_misses) == (2, 0)
    assert "graph cache: 2 hits, 0 misses; first step" in gang.output(0)
    assert sorted(path.name for path in warm.rglob("*.so")) == kernels, "nothing was compiled"
    assert second.first_step_s < first.first_step_s

    reference = curve(unbroken)  # not compiled
    for step, values in curve(two).items():
        assert values == pytest.approx(reference[step], rel=1e-5)

    shutil.rmtree(two.checkpoint(8))
    Gang(two, world=2, attempt=1, env=env).finish()
    assert [row["step"] for row in rows(two, 1)] == [5, 6, 7, 8]
    assert curve(two, 1).items() <= curve(two, 0).items(), "bit-identical"
