"""Whatever ends an attempt, the next one goes on as if nothing had happened."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from amounts import sample
from rounding import training_rounding

from slurmllm.core.config.load import load
from slurmllm.core.errors import EXIT_REQUEUE
from slurmllm.core.log import message_of
from slurmllm.core.metrics.row_reader import read_events
from slurmllm.core.run.artifact_records import CheckpointManifest
from slurmllm.core.run.records import FailureRecord, MetricsRow, WorkerRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.train.checkpoint.folder import file_faults, read_manifest
from train.conftest import LONG
from train.gang import Gang, curve, make_run, rows

pytestmark = pytest.mark.numerics

NewRun = Callable[..., RunDir]
TWO = ("cluster.devices_per_node=2", *LONG)


def test_killed_worker_and_a_lost_folder(new_run: NewRun, unbroken: RunDir, tmp_path: Path) -> None:
    """Saved asynchronously; the replica is left."""
    second = tmp_path / "second"
    asynchronous = ("checkpoint.asynchronous=true", f"checkpoint.replica={second}")
    run = new_run(*TWO, *asynchronous, "checkpoint.keep=2")
    gang = Gang(run, world=2)
    gang.signal_at(35, signal.SIGKILL, ranks=[1])
    codes = gang.wait()  # the peer leaves by itself, promptly
    assert codes == [3, -signal.SIGKILL], gang.output()
    failure = FailureRecord.load(run.attempt("train", 0).failure(0))
    assert (failure.blame, failure.exit_code, failure.node) == ("infrastructure", 3, "node-0")
    assert 35 <= rows(run, 0)[-1]["step"] < 60
    for step in run.checkpoint_steps():
        assert file_faults(run.checkpoint(step), read_manifest(run.checkpoint(step)).files) == []
    shutil.rmtree(run.checkpoints)
    resumed = Gang(run, world=2, attempt=1)
    resumed.finish()
    output = resumed.output(0)
    (restored,) = [line for line in output.splitlines() if ": restored step " in line]
    step = int(restored.partition(": restored step ")[2].split()[0])
    assert step in (10, 20, 30)
    assert f"resumed from step {step}" in output
    assert rows(run, 1)[0]["step"] == step + 1
    assert WorkerRecord.load(run.attempt("train", 1).worker(0)).resumed_from == step
    assert curve(run, 0, 1) == curve(unbroken), "bit-identical"
    assert curve(run, 0).items() <= curve(unbroken).items()
    assert run.checkpoint_steps() == [50, 60]
    copies = sorted(path.name for path in (second / run.name).iterdir())
    assert copies[-1] == "step_00000060", "the end waits for the copy"


def test_stop_signal_at_one_worker(new_run: NewRun, unbroken: RunDir) -> None:
    run = new_run(*TWO)
    gang = Gang(run, world=2)
    gang.signal_at(15, signal.SIGUSR2, ranks=[1])
    assert gang.wait() == [EXIT_REQUEUE, EXIT_REQUEUE], gang.output()
    stopped_at = rows(run, 0)[-1]["step"]
    assert 15 <= stopped_at < 60
    assert f"stopped by SIGUSR2 after step {stopped_at} of 60" in gang.output(0)
    assert run.checkpoint_steps()[-1] == stopped_at, "saved where it stopped, on all workers"
    assert not run.attempt("train", 0).failure(0).exists()
    Gang(run, world=2, attempt=1).finish()
    assert rows(run, 1)[0]["step"] == stopped_at + 1, "no step is made twice"
    assert curve(run, 0, 1) == curve(unbroken), "bit-identical"


def test_a_full_disk_leaves_older_checkpoints_intact(new_run: NewRun, unbroken: RunDir) -> None:
    run = new_run(*TWO)
    shutil.copytree(unbroken.checkpoint(40), run.checkpoint(40))
    gang = Gang(run, world=2, attempt=1, env={"TEST_FILE_SIZE_LIMIT": "100000"})
    assert gang.wait() == [4, 4], gang.output()
    assert [p.name for p in run.checkpoints.iterdir()] == ["step_00000040"]
    assert file_faults(run.checkpoint(40), read_manifest(run.checkpoint(40)).files) == []
    failure = FailureRecord.load(run.attempt("train", 1).failure(0))
    assert (failure.error, failure.blame) == ("CheckpointError", "infrastructure")
    for part in ("File too large", "step_00000050", "MB are free", "slurmllm resume"):
        assert part in failure.message
    assert "Traceback" not in gang.output(), "one clear message"


def test_a_cut_checkpoint_elsewhere(tmp_path: Path, new_run: NewRun, unbroken: RunDir) -> None:
    run = new_run("cluster.devices_per_node=1", *LONG)
    shutil.copytree(unbroken.checkpoint(40), run.checkpoint(40))
    shutil.copytree(unbroken.checkpoint(50), run.checkpoint(50))
    shard = run.checkpoint(50) / "__1_0.distcp"
    os.truncate(shard, shard.stat().st_size - 1)
    leftover = run.checkpoints / ".step_00000055.tmp"
    leftover.mkdir()
    gang = Gang(run, world=1, attempt=1)
    gang.finish()
    assert "skipped a checkpoint that does not verify: step 50: __1_0.distcp has" in gang.output(0)
    assert "resumed from step 40" in gang.output(0)
    record = WorkerRecord.load(run.attempt("train", 1).worker(0))
    assert record.resumed_from == 40
    assert len(record.skipped_checkpoints) == 1
    tolerance = training_rounding(load(run.config), 60 - 40)
    for step, values in curve(run, 1).items():
        assert values == pytest.approx(curve(unbroken)[step], rel=tolerance)
    assert not leftover.exists()
    manifest = CheckpointManifest.load(run.checkpoint(50) / "manifest.json")
    assert manifest.world_size == 1, "the damaged one was replaced when its step came again"
    assert [p.name for p in sorted(run.checkpoints.iterdir())] == [
        f"step_{step:08d}" for step in (40, 50, 60)
    ]


@pytest.mark.parametrize("world", sample(1, [1, 4]))
def test_world_size_changes_only_rounding(
    tmp_path: Path, data: tuple[str, str], unbroken: RunDir, world: int
) -> None:
    # 12 steps of the schedule of 60, so that the learning rates are those of the long run.
    workers = f"cluster.devices_per_node={world}"
    run = make_run(tmp_path / "run", data, workers, "train.steps=12", "optim.decay_steps=60")
    Gang(run, world).finish()
    reference = curve(unbroken)
    tolerance = training_rounding(load(run.config), 12)
    for step, values in curve(run).items():
        assert values == pytest.approx(reference[step], rel=tolerance), f"step {step}"


def test_metrics_have_every_step_once(unbroken: RunDir) -> None:
    result = [MetricsRow.model_validate(row) for row in rows(unbroken, 0)]
    assert [(row.step, row.tokens) for row in result] == [(n, n * 8 * 32) for n in range(1, 61)]
    for row in result:
        assert row.tokens_per_s == pytest.approx(row.seq_per_s * 32)
        assert row.seq_per_s == pytest.approx(8 / row.step_time_s)
        assert row.forward_backward_s is not None
        assert row.optimizer_s is not None
        parts = (row.data_wait_s, row.forward_backward_s, row.optimizer_s)
        assert min(parts) > 0
        assert sum(parts) <= row.step_time_s
    assert result[-1].loss < result[0].loss - 1


def test_memory_of_the_fullest_worker_is_told_twice(unbroken: RunDir) -> None:
    steps, all_of_it = (e for e in read_events(unbroken, 0) if e.kind == "memory")
    assert (steps.step, all_of_it.step) == (5, 60)
    for event in (steps, all_of_it):
        # A process with torch in it.
        assert 1e8 < event.values["peak_bytes"] < event.values["limit_bytes"]
        assert event.values["rank"] in (0, 1)


def test_log_tells_start_progress_and_end(unbroken: RunDir) -> None:
    log = (unbroken.logs / "train_0_0.log").read_text()
    assert "starting from step 0" in log
    assert "graph cache: 0 hits, 0 misses; first step" in log
    messages = [message_of(line) for line in log.splitlines()]
    steps = [message.split()[1] for message in messages if message.startswith("step ")]
    assert steps == [f"{step}/60" for step in (1, 2, 3, 10, 20, 30, 40, 50, 60)]
    assert (unbroken.logs / "train_0_1.log").read_text() == ""


def test_records_and_newest_checkpoints(unbroken: RunDir) -> None:
    record = WorkerRecord.load(unbroken.attempt("train", 0).worker(0))
    assert (record.rank, record.node, record.resumed_from) == (0, "node-0", None)
    assert 0 < record.first_step_s < 60
    assert record.start_up_s > 0
    assert not unbroken.attempt("train", 0).worker(1).exists(), "one record a node"
    assert unbroken.checkpoint_steps() == [40, 50, 60]
    manifest = CheckpointManifest.load(unbroken.checkpoint(60) / "manifest.json")
    assert (manifest.step, manifest.world_size, manifest.tokens) == (60, 2, 60 * 8 * 32)
    names = {path.name for path in unbroken.checkpoint(60).iterdir()}
    assert names == {file.path for file in manifest.files} | {"manifest.json"}
    assert {".metadata", "__0_0.distcp", "__1_0.distcp", "train_state.json"} <= names
    gang = Gang(unbroken, world=2, attempt=1)
    assert gang.wait() == [0, 0]
    assert "nothing to do: step 60 of 60 is already reached" in gang.output(0)
    assert rows(unbroken, 1) == []
    assert CheckpointManifest.load(unbroken.checkpoint(60) / "manifest.json") == manifest
