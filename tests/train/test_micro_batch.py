"""The precompile stage: it measures `train.micro_batch: auto`, and its graphs serve all meshes."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rounding import training_rounding

from slurmllm.core.config.load import load
from slurmllm.core.errors import StorageError
from slurmllm.core.run.artifact_records import MicroBatchCandidate, MicroBatchRecord
from slurmllm.core.run.host_memory import Memory
from slurmllm.core.run.records import WorkerRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.plan.mesh import Mesh, load_mesh, make_mesh, save_mesh
from slurmllm.train import micro_batch
from slurmllm.train.backends.base import Worker
from slurmllm.train.backends.native.environment import graphs
from slurmllm.train.control.plane import ControlPlane
from slurmllm.train.exits import StopRequest
from slurmllm.train.guard import Guard
from slurmllm.train.job import Job, make_job
from slurmllm.train.micro_batch import choose, choose_micro_batch, enough, to_try, too_large
from train.gang import Gang, curve, make_run, rows

NewRun = Callable[..., RunDir]


def candidates(*seconds: float, first: int = 1, peak: int = 100) -> list[MicroBatchCandidate]:
    """1, 2, 4, … with these seconds a sequence; memory of `peak` a sequence above 1000."""
    return [
        MicroBatchCandidate(
            micro_batch=first * 2**i,
            seconds_per_sequence=value,
            peak_bytes=1000 + peak * first * 2**i,
            first_step_s=9.0,
        )
        for i, value in enumerate(seconds)
    ]


@pytest.mark.parametrize(
    ("seconds", "size"),
    [
        ([1.0], 1),
        ([1.0, 0.5, 0.4], 4),
        ([1.0, 0.5, 0.49], 2),  # 2 % are not worth twice the memory
        ([1.0, 0.5, 0.52, 0.49], 2),
        ([1.0, 0.5, 0.7, 0.4], 8),
        ([0.4, 0.5, 0.6], 1),
    ],
)
def test_the_smallest_near_the_fastest_is_chosen(seconds: list[float], size: int) -> None:
    assert choose(candidates(*seconds)) == size


@pytest.mark.parametrize(
    ("seconds", "ends"),
    [
        ([], False),
        ([1.0, 1.0], False),
        ([1.0, 1.0, 0.99], True),
        ([1.0, 1.0, 0.9], False),  # one flat step may be chance
        ([1.0, 0.5, 0.49, 0.488], True),
        ([1.0, 1.2, 1.1], True),
    ],
)
def test_two_in_a_row_without_gain_end_it(seconds: list[float], ends: bool) -> None:
    assert (enough(candidates(*seconds)) is not None) == ends


def test_what_is_tried_doubles() -> None:
    assert to_try([1, 2, 3, 4, 6, 8, 12, 24]) == [1, 2, 4, 8, 24]
    assert to_try([1, 3, 5, 15]) == [1, 3, 15]
    assert to_try([4]) == [4]


def test_memory_is_predicted_before_it_is_used() -> None:
    first, two = candidates(1.0), candidates(1.0, 0.5)  # peaks 1100, and 1200
    # The first tells nothing of what it needed whatever its size: all above the resting bytes
    # is taken to grow.
    assert too_large(first, 2, limit=1400, resting=1000) is None
    assert too_large(first, 2, limit=1400, resting=0) is not None
    assert too_large(two, 4, limit=1600, resting=0) is None  # 1400 by the line through both
    assert "more than 90%" in too_large(two, 4, limit=1500, resting=0)
    assert too_large([], 1, limit=0, resting=0) is None, "somebody has to begin"
    assert too_large(candidates(1.0, 0.5, peak=-100), 64, limit=1000, resting=0) is None


class Bench:
    """A backend of one worker whose step times and memory are in tables."""

    def __init__(self, step_s: dict[int, float], bytes_: dict[int, int], limit: int) -> None:
        self.step_s, self.bytes, self.limit = step_s, bytes_, limit
        self.tried: list[int] = []
        self.mesh: Mesh | None = None

    def memory(self) -> Memory:
        return Memory(self.bytes[self.tried[-1]], self.limit)

    def step(self, job: Job, mesh: Mesh, length: int) -> float:
        size = mesh.micro_batch
        if size not in self.tried:
            self.tried.append(size)
        if size not in self.step_s:
            raise MemoryError("no room")
        return self.step_s[size] * length


@pytest.fixture
def bench(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Job, Bench, Callable[[], str | None]]]:
    """Tables of seconds a micro batch and bytes, and a limit → job, backend, what measures."""

    def make(
        step_s: dict[int, float], bytes_: dict[int, int], limit: int
    ) -> tuple[Job, Bench, Callable[[], str | None]]:
        run = new_run("train.micro_batch=auto", "train.global_batch=64")
        config = load(run.config)
        save_mesh(make_mesh(config, 1), run.plan)
        job = make_job(run, "precompile", 0, Worker(0, 1, 0, "n1"), StopRequest(), 0.0)
        backend = Bench(step_s, bytes_, limit)
        job.backend = backend  # type: ignore[assignment]
        job.control = ControlPlane()
        job.guard = Guard(run, "precompile", 0, config.recipe, job.backend, job.events)
        monkeypatch.setattr(micro_batch, "_step", backend.step)
        monkeypatch.setattr(micro_batch, "change_micro_batch", lambda job, size: None)
        return job, backend, lambda: choose_micro_batch(job)

    return make


def test_measured_choice_is_recorded(bench: Callable[..., Any]) -> None:
    job, backend, measure = bench(
        {1: 1.0, 2: 1.2, 4: 2.0, 8: 4.0, 16: 8.0, 32: 16.0},
        dict.fromkeys((1, 2, 4, 8, 16, 32), 1000),
        limit=10_000,
    )
    assert load_mesh(job.run.plan).unmeasured
    assert measure() is None
    assert backend.tried == [1, 2, 4, 8, 16], "32 was not tried: 8 and 16 gained nothing"
    record = MicroBatchRecord.load(job.run.micro_batch)
    assert record.micro_batch == 4
    assert [c.seconds_per_sequence for c in record.candidates[:3]] == [1.0, 0.6, 0.5]
    assert (record.nodes, record.device, record.workers) == (("n1",), "cpu", 1)
    mesh = load_mesh(job.run.plan)
    assert (mesh.micro_batch, mesh.accumulation, mesh.unmeasured) == (4, 16, False)
    # The next attempt of either stage goes on with it.
    for stage in ("precompile", "train"):
        resumed = make_job(job.run, stage, 1, job.worker, StopRequest(), 0.0).mesh
        assert (resumed.micro_batch, resumed.unmeasured) == (4, False)


def test_too_little_memory_ends_it(bench: Callable[..., Any]) -> None:
    job, backend, measure = bench({1: 1.0, 2: 1.5, 4: 2.5}, {1: 1100, 2: 1200, 4: 1400}, limit=1900)
    measure()
    assert backend.tried == [1, 2, 4], "8 would need 1800"
    assert "8 would need" in MicroBatchRecord.load(job.run.micro_batch).reason


def test_out_of_memory_against_the_prediction(bench: Callable[..., Any]) -> None:
    job, _, measure = bench({1: 1.0, 2: 1.5}, {1: 1100, 2: 1200, 4: 0}, limit=100_000)
    with pytest.raises(MemoryError):
        measure()
    record = MicroBatchRecord.load(job.run.micro_batch)
    assert (record.micro_batch, record.reason) == (2, "4 ran out of memory")


def test_a_stop_leaves_no_record(bench: Callable[..., Any]) -> None:
    job, _, measure = bench({1: 1.0}, {1: 1000}, limit=10_000)
    job.stop.signal_name = "SIGTERM"
    assert measure() == "SIGTERM"
    assert not job.run.micro_batch.exists()


def test_training_without_the_record_names_the_remedy(new_run: NewRun) -> None:
    run = new_run("train.micro_batch=auto")
    with pytest.raises(StorageError, match="`slurmllm resume run` runs that stage again"):
        make_job(run, "train", 0, Worker(0, 1, 0, "n1"), StopRequest(), 0.0)


def plan(run: RunDir, nodes: int) -> None:
    """What `submit` and `resume` write."""
    measured = run.micro_batch.is_file()
    micro_batch = MicroBatchRecord.load(run.micro_batch).micro_batch if measured else None
    save_mesh(make_mesh(load(run.config), nodes, micro_batch), run.plan)


def tried(record: MicroBatchRecord) -> Sequence[int]:
    return [candidate.micro_batch for candidate in record.candidates]


@pytest.mark.numerics
def test_found_once_and_kept_at_other_node_counts(new_run: NewRun, unbroken: RunDir) -> None:
    run = new_run(
        "train.micro_batch=auto",
        "train.steps=6",
        "optim.decay_steps=60",
        "checkpoint.every_steps=3",
    )
    plan(run, nodes=2)
    gang = Gang(run, stage="precompile")
    gang.finish()
    record = MicroBatchRecord.load(run.micro_batch)
    assert tried(record) == [1, 2, 4][: len(tried(record))]
    for candidate in record.candidates:
        assert f"micro batch {candidate.micro_batch}: " in gang.output(0)
        assert 0 < candidate.seconds_per_sequence < 10
        assert 2**20 < candidate.peak_bytes < record.limit_bytes
    assert f"micro batch {record.micro_batch} chosen" in gang.output(0)
    first = WorkerRecord.load(run.attempt("precompile", 0).worker(0)).first_step_s
    assert first in [candidate.first_step_s for candidate in record.candidates]
    planned = json.loads(run.plan.read_text())
    assert planned["micro_batch"] * planned["accumulation"] == 4

    Gang(run, world=2).finish()
    shutil.rmtree(run.checkpoint(6))
    plan(run, nodes=1)
    assert json.loads(run.plan.read_text())["global_batch"] == 8
    Gang(run, attempt=1).finish()
    reference, tolerance = curve(unbroken), training_rounding(load(run.config), 6)
    assert sorted(curve(run, 1)) == [4, 5, 6]
    for attempt in (0, 1):
        for step, values in curve(run, attempt).items():
            assert values == pytest.approx(reference[step], rel=tolerance), f"step {step}"


@pytest.mark.long
def test_measured_on_an_interleaved_pipeline(new_run: NewRun) -> None:
    run = new_run(
        "train.micro_batch=auto",
        "parallel.pipeline=2",
        "parallel.virtual_pipeline=2",
        "model.num_layers=4",
    )
    plan(run, nodes=2)
    Gang(run, world=2, stage="precompile").finish()
    assert set(tried(MicroBatchRecord.load(run.micro_batch))) <= {1, 2, 4}, "rounds of two stages"


COMPILED = ("train.compile=true", "train.steps=8", "optim.decay_steps=60")


@pytest.mark.numerics
@pytest.mark.long  # tests/end_to_end/test_slurm.py has a run whose nodes start warm
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


@pytest.mark.numerics
@pytest.mark.long
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
    assert WorkerRecord.load(two.attempt("train", 0).worker(0)).cache_misses == 0
    # Of all four workers: two of them are another tensor-parallel group than precompile's.
    assert sorted(path.name for path in (tmp_path / "cache").rglob("*.so")) == kernels
    tolerance = training_rounding(load(two.config), 5)
    for step, values in curve(two).items():
        assert values == pytest.approx(curve(unbroken)[step], rel=tolerance)
