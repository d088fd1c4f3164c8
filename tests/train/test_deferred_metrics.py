"""Figures that are read a step late change nothing but when they are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmllm.errors import DivergenceError
from slurmllm.rundir import RunDir
from train.gang import Gang, curve, make_data, make_run, rows

# The native backend, made to look as one whose device the host should not wait for: its figures are
# objects that say when they are read.
_LATE = """
import os, sys
from pathlib import Path
from slurmllm.backends.native.runtime import NativeBackend
from slurmllm.rundir import RunDir

made = []

class Figure:
    def __init__(self, value, name):
        self.value, self.step, self.name = value, len(made), name
    def __float__(self):
        late = len(made) - self.step
        print(f"read {self.name} of step {self.step}, {late} late", flush=True)
        nan = os.environ.get("TEST_NAN_AT") == str(self.step)
        return float("nan") if nan and self.name == "loss" else float(self.value)

def late(verb, name):
    def called(self, *args):
        if name == "loss":
            made.append(0)
        return Figure(verb(self, *args), name)
    return called

NativeBackend.deferred_metrics = True
NativeBackend.forward_backward = late(NativeBackend.forward_backward, "loss")
NativeBackend.optimizer_step = late(NativeBackend.optimizer_step, "grad_norm")
from slurmllm.train.worker import run_worker
sys.exit(run_worker(RunDir(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])))
"""
STEPS = ("train.steps=9", "checkpoint.every_steps=4")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_data(tmp_path_factory.mktemp("data"))


def late_run(folder: Path, data: tuple[str, str], **env: str) -> tuple[RunDir, Gang]:
    run = make_run(folder, data, *STEPS)
    return run, Gang(run, env=env, entry=_LATE)


def test_rows_are_complete_and_read_late(tmp_path: Path, data: tuple[str, str]) -> None:
    at_once = Gang(make_run(tmp_path / "at_once", data, *STEPS)).finish()
    run, gang = late_run(tmp_path / "late", data)
    gang.finish()
    assert curve(run) == curve(at_once)
    assert [row["step"] for row in rows(run, 0)] == list(range(1, 10))
    lateness = {
        int(line.split()[4].rstrip(",")): int(line.split()[5])
        for line in gang.output().splitlines()
        if line.startswith("read loss")
    }
    # Those of a step that is saved, and of the last one, are read before the save.
    assert lateness == {step: 0 if step in (4, 8, 9) else 1 for step in range(1, 10)}
    times = [row["step_time_s"] for row in rows(run, 0)]
    assert all(seconds > 0 for seconds in times)
    parts = {"forward_backward_s", "optimizer_s"}
    assert parts.isdisjoint(rows(run, 0)[-1]), "the host's clock cannot tell them apart"
    assert parts <= rows(RunDir(tmp_path / "at_once"), 0)[-1].keys()


def test_no_number_is_found_before_the_save_that_would_hold_it(
    tmp_path: Path, data: tuple[str, str]
) -> None:
    run, gang = late_run(tmp_path / "nan", data, TEST_NAN_AT="7")
    assert gang.wait() == [DivergenceError.exit_code]
    assert "the loss of step 7 is nan" in gang.output()
    assert run.checkpoint_steps() == [4]
