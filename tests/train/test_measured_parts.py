"""What a run leaves for a prediction to be held against, of real training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from slurmllm.config.load import load
from slurmllm.metrics.row_reader import read_events
from slurmllm.plan.mesh import make_mesh, save_mesh
from slurmllm.report.prediction import check_run_prediction
from slurmllm.run.records import MetricsRow
from slurmllm.run.rundir import RunDir
from train.gang import rows

# Of no machine: what is compared here is what was measured.
HARDWARE = {
    "source": "made up",
    "bf16_tflops": 0.05,
    "fp32_tflops": 0.05,
    "memory_gib": 2,
    "memory_gb_s": 10,
    "node_link_gb_s": 2,
    "network_gb_s": 2,
    "matrix_efficiency": 0.8,
    "attention_efficiency": 0.5,
    "memory_efficiency": 0.8,
    "node_link_efficiency": 0.8,
    "network_efficiency": 0.8,
}


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


def test_a_prediction_is_held_against_the_run(unbroken: RunDir, tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(unbroken.path, tmp_path / "run"))
    config = load(run.config)
    save_mesh(make_mesh(config, 1), run.plan)
    profile = tmp_path / "profile.yaml"
    cluster = config.cluster.model_dump(mode="json") | {"hardware": HARDWARE}
    profile.write_text(json.dumps(cluster))
    check = check_run_prediction(run, str(profile))
    figures = {row.name: row for row in check.rows}
    assert (check.steps, check.attempts) == (54, (0,))
    parts = ("data wait", "forward and backward", "optimizer and norms", "rest")
    predicted = [figures[part].predicted or 0.0 for part in parts]
    assert sum(predicted) == pytest.approx(figures["step"].predicted)
    measured = sum(figures[part].measured for part in parts)
    assert measured == pytest.approx(figures["step"].measured, rel=0.25), "medians"
    assert figures["save, training waits"].note == "median of 6 saves"
    assert {"peak memory", "start-up", "first step, longer by"} <= figures.keys()
