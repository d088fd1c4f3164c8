"""All checkpoints of a run, judged in the jobs of one array on a real Slurm."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest
from end_to_end.bench import Bench
from end_to_end.slurm_runs import Cluster
from train.gang import Gang, make_data, make_run

MISSING = [n for n in ("lm_eval", "accelerate") if importlib.util.find_spec(n) is None]
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]


def test_all_checkpoints_as_an_array(
    slurm: Cluster, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    settings = ("train.steps=6", "checkpoint.every_steps=3", "data.validation=0.05")
    run = make_run(bench.runs / "judged", make_data(tmp_path), "model.seq_len=64", *settings)
    Gang(run).finish()
    asked = ("evaluate", "judged", "--suite=smoke", "--checkpoint=all", "--limit=2", "--json")
    narrowed = ("--task=smoke_choice", "--task=validation")
    output = bench.call(*asked, *narrowed, "--slurm", "--jobs=2")
    found = json.loads(output[output.index("{") :])
    assert [one["step"] for one in found["checkpoints"]] == [3, 6]
    assert (found["evaluated"], found["cached"], found["failed"]) == (4, 0, [])
    array = output.partition("Slurm job ")[2].partition(":")[0]
    accounting = ["sacct", "-n", "-X", "-P", "-o", "JobID,State", "-j", array]

    def ended() -> list[str]:
        done = subprocess.run(accounting, capture_output=True, text=True, check=True)
        return sorted(done.stdout.split())

    jobs = [f"{array}_{index}|COMPLETED" for index in (0, 1)]
    bench.until(lambda: ended() == jobs, "sacct: the array's jobs not COMPLETED", 60, every_s=1)
    assert json.loads(bench.call(*asked, *narrowed))["cached"] == 4
