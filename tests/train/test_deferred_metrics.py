"""Figures that are read a step late change nothing but when they are read."""

from pathlib import Path

import pytest
from amounts import sample

from slurmllm.core.errors import DivergenceError
from slurmllm.core.metrics.row_reader import read_events
from slurmllm.core.run.rundir import RunDir
from train.gang import Gang, curve, make_run, rows

# The native backend, made to look as one whose device the host should not wait for: its figures are
# objects that say when they are read.
_LATE = """
import os, sys
from pathlib import Path
from slurmllm.train.backends.native.runtime import NativeBackend
from slurmllm.core.run.rundir import RunDir

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
# Raises if an operation of a step has a result that the host must wait for.
_NO_WAITS = """
import os, sys
from pathlib import Path
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from slurmllm.train.backends.native.runtime import NativeBackend
from slurmllm.core.run.rundir import RunDir
from slurmllm.train import loop
from slurmllm.train.worker import run_worker

WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

class NoWaits(TorchDispatchMode):
    def __init__(self, optimizer):
        super().__init__()
        self.optimizer, self.calls = optimizer, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        if WAITS & set(func.tags):
            # The step counts of AdamW with stochastic rounding are on the host on every device.
            counts = [state.get("step") for state in self.optimizer.state.values()]
            if not any(args[0] is count for count in counts):
                raise RuntimeError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))

run_step = loop.run_step

def watched(job):
    if job.step == 0:  # torch's pipelines try their connections then, others compile
        return run_step(job)
    with NoWaits(job.backend.optimizer) as watch:
        step = run_step(job)
    print("watched", watch.calls, "operations", flush=True)
    return step

loop.run_step = watched
NativeBackend.deferred_metrics = True
sys.exit(run_worker(RunDir(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])))
"""
STEPS = ("train.steps=9", "checkpoint.every_steps=4")


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
    # Those of a step that is saved, of the first and of the last one are read at once.
    assert lateness == {step: 0 if step in (1, 4, 8, 9) else 1 for step in range(1, 10)}
    times = [row["step_time_s"] for row in rows(run, 0)]
    assert all(seconds > 0 for seconds in times)
    parts = {"forward_backward_s", "optimizer_s"}
    assert parts.isdisjoint(rows(run, 0)[-1]), "the host's clock cannot tell them apart"
    assert parts <= rows(RunDir(tmp_path / "at_once"), 0)[-1].keys()
    memory = [event.step for event in read_events(run, 0) if event.kind == "memory"]
    assert memory == [4, 9], "before a save, and at the end"


@pytest.mark.parametrize(
    "overrides",
    sample(
        1,
        [
            ("train.precision=bf16_sr", "optim.grad_clip=0.01", "parallel.tensor=2"),
            ("parallel.pipeline=2", "train.micro_batch=2"),
            ("train.precision=bf16_mixed", "train.activation_checkpointing=selective"),
            ("parallel.zero=3", "train.activation_checkpointing=full"),
        ],
    ),
    ids=str,
)
def test_a_step_has_no_number_that_the_host_waits_for(
    tmp_path: Path, data: tuple[str, str], overrides: tuple[str, ...]
) -> None:
    options = ("cluster.devices_per_node=2", "train.steps=3", "optim.warmup_steps=1", *overrides)
    at_once = Gang(make_run(tmp_path / "at_once", data, *options), 2).finish()
    run = make_run(tmp_path / "late", data, *options)
    gang = Gang(run, 2, entry=_NO_WAITS)
    gang.finish()
    assert curve(run) == curve(at_once)
    counts = [int(line.split()[1]) for line in gang.output(0).splitlines() if "watched" in line]
    assert len(counts) == 2, "the steps after the first"
    assert min(counts) > 100, "the operations of a step were not seen"


def test_a_nan_is_seen_before_its_save(tmp_path: Path, data: tuple[str, str]) -> None:
    run, gang = late_run(tmp_path / "nan", data, TEST_NAN_AT="7")
    assert gang.wait() == [DivergenceError.exit_code]
    assert "the loss of step 7 is nan" in gang.output()
    assert run.checkpoint_steps() == [4]
