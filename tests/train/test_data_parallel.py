"""The number of workers changes nothing but rounding; the files of a finished run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from amounts import sample
from rounding import training_rounding

from slurmllm.core.config.load import load
from slurmllm.core.log import message_of
from slurmllm.core.metrics.row_reader import read_events
from slurmllm.core.run.artifact_records import CheckpointManifest
from slurmllm.core.run.records import MetricsRow, WorkerRecord
from slurmllm.core.run.rundir import RunDir
from train.gang import Gang, curve, make_run, rows

STEPS = 60


@pytest.mark.numerics
@pytest.mark.parametrize("world", sample(1, [1, 4]))
def test_world_size_changes_only_rounding(
    tmp_path: Path, data: tuple[str, str], unbroken: RunDir, world: int
) -> None:
    # 12 steps of the schedule of 60, so that the learning rates are those of the long run.
    workers = f"cluster.devices_per_node={world}"
    run = make_run(tmp_path / "run", data, workers, "train.steps=12", f"optim.decay_steps={STEPS}")
    Gang(run, world).finish()
    reference = curve(unbroken)
    tolerance = training_rounding(load(run.config), 12)
    for step, values in curve(run).items():
        assert values == pytest.approx(reference[step], rel=tolerance), f"step {step}"


def test_metrics_have_every_step_once(unbroken: RunDir) -> None:
    result = [MetricsRow.model_validate(row) for row in rows(unbroken, 0)]
    assert [row.step for row in result] == list(range(1, STEPS + 1))
    assert [row.tokens for row in result] == [step * 8 * 32 for step in range(1, STEPS + 1)]
    for row in result:
        assert row.tokens_per_s == pytest.approx(row.seq_per_s * 32)
        assert row.seq_per_s == pytest.approx(8 / row.step_time_s)
    assert result[-1].loss < result[0].loss - 1


def test_parts_add_up_to_the_step(unbroken: RunDir) -> None:
    for row in (MetricsRow.model_validate(row) for row in rows(unbroken, 0)):
        assert row.forward_backward_s is not None
        assert row.optimizer_s is not None
        sum_s = row.data_wait_s + row.forward_backward_s + row.optimizer_s
        assert 0 < sum_s <= row.step_time_s
        assert min(row.data_wait_s, row.forward_backward_s, row.optimizer_s) > 0


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


def test_worker_record(unbroken: RunDir) -> None:
    record = WorkerRecord.load(unbroken.attempt("train", 0).worker(0))
    assert (record.rank, record.node, record.resumed_from) == (0, "node-0", None)
    assert 0 < record.first_step_s < 60
    assert record.start_up_s > 0
    assert not unbroken.attempt("train", 0).worker(1).exists(), "one record a node"


def test_newest_checkpoints_are_kept_whole(unbroken: RunDir) -> None:
    assert unbroken.checkpoint_steps() == [40, 50, 60]
    assert sorted(p.name for p in unbroken.checkpoints.iterdir()) == [
        f"step_{step:08d}" for step in (40, 50, 60)
    ]
    manifest = CheckpointManifest.load(unbroken.checkpoint(60) / "manifest.json")
    assert (manifest.step, manifest.world_size, manifest.tokens) == (60, 2, 60 * 8 * 32)
    names = {path.name for path in unbroken.checkpoint(60).iterdir()}
    assert names == {file.path for file in manifest.files} | {"manifest.json"}
    assert {".metadata", "__0_0.distcp", "__1_0.distcp", "train_state.json"} <= names


def test_nothing_is_done_twice(unbroken: RunDir) -> None:
    gang = Gang(unbroken, world=2, attempt=1)
    assert gang.wait() == [0, 0]
    assert "nothing to do: step 60 of 60 is already reached" in gang.output(0)
    assert rows(unbroken, 1) == []
    assert json.loads((unbroken.checkpoint(60) / "manifest.json").read_text())["attempt"] == 0
