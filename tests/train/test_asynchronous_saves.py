"""Asynchronous saves with a replica: a resume from either is bit-identical."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from slurmllm.checkpoint.folder import file_faults, read_manifest
from slurmllm.run.rundir import RunDir
from train.conftest import LONG
from train.gang import Gang, curve, rows


def test_killed_worker_and_a_lost_folder(
    new_run: Callable[..., RunDir], unbroken: RunDir, tmp_path: Path
) -> None:
    second = tmp_path / "second"
    run = new_run(
        "cluster.devices_per_node=2",
        *LONG,
        "checkpoint.asynchronous=true",
        "checkpoint.keep=2",
        f"checkpoint.replica={second}",
    )
    gang = Gang(run, world=2)
    gang.signal_at(35, signal.SIGKILL, ranks=[1])
    gang.wait()
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
    assert curve(run, 0, 1) == curve(unbroken), "bit-identical"
    assert run.checkpoint_steps() == [50, 60]
    copies = sorted(path.name for path in (second / run.name).iterdir())
    assert copies[-1] == "step_00000060", "the end waits for the copy"
