"""Workers as the launcher starts them, on the real NxD: stopped, killed in each phase of a save."""

from __future__ import annotations

import gzip
import json
import signal
from pathlib import Path

import pytest
from train.gang import Gang, curve, make_data, make_run

from nxd.conftest import nxd_environment
from slurmllm.analysis.evaluate.validation_loss import held_out_loss
from slurmllm.analysis.evaluate.validation_text import stream_spec, validation_text
from slurmllm.core.errors import EXIT_REQUEUE, CheckpointError
from slurmllm.core.metrics.row_reader import read_evaluations
from slurmllm.core.run.rundir import RunDir
from slurmllm.train.checkpoint.folder import file_faults, read_manifest

pytestmark = pytest.mark.nxd

NXD = (
    "backend=nxd",
    "cluster.devices_per_node=2",
    "train.steps=12",
    "checkpoint.every_steps=4",
    "checkpoint.asynchronous=true",
    "parallel.tensor=1",
)

# Kills rank 0 in a phase of the save of step 8.
_KILLED = """
import os, signal, sys
from pathlib import Path
from slurmllm.core.run.rundir import RunDir

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def after(function):
    def wrapped(self, *args, **more):
        found = function(self, *args, **more)
        if "step_00000008" in str(args[0] if args else self._directory):
            die()
        return found
    return wrapped

phase, rank = os.environ["TEST_PHASE"], int(os.environ["RANK"])
if rank == 0:
    import slurmllm.train.backends.nxd.runtime
    from slurmllm.train.backends.nxd import saving
    from slurmllm.train.checkpoint import save as saves
    from neuronx_distributed.trainer.checkpoint_storage import FilesysCheckpointStorage as Files
    made, finish, write = saving.NxdSaving.__init__, saving.NxdSaving.finish, Files.save_object
    if phase == "begun":
        saving.NxdSaving.__init__ = after(made)
    elif phase == "writing":
        def half(self, obj, filename):
            write(self, obj, filename)
            if "step_00000008" in self._dirname:
                path = Path(self._dirname, filename)
                os.truncate(path, path.stat().st_size // 2)
                die()
        Files.save_object = half
    elif phase == "written":
        def unfinished(self):
            if "step_00000008" in str(self._directory):
                die()
            return finish(self)
        saving.NxdSaving.finish = unfinished
    elif phase == "done":
        saving.NxdSaving.finish = after(finish)
    elif phase == "manifest":
        save = saves.CheckpointManifest.save
        saves.CheckpointManifest.save = after(save)
    elif phase == "published":
        remove = saves.remove_expired
        saves.remove_expired = lambda run, step, *kept: (
            die() if step == 8 else remove(run, step, *kept)
        )
from slurmllm.train.worker import run_worker
sys.exit(run_worker(RunDir(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, data: tuple[str, str]) -> RunDir:
    run = make_run(tmp_path_factory.mktemp("runs") / "unbroken", data, *NXD)
    return Gang(run, 2, env=nxd_environment()).finish()


def test_saves_while_training_goes_on(unbroken: RunDir) -> None:
    assert unbroken.checkpoint_steps() == [4, 8, 12]
    for step in unbroken.checkpoint_steps():
        directory = unbroken.checkpoint(step)
        manifest = read_manifest(directory)
        assert file_faults(directory, manifest.files) == []
        named = {file.path for file in manifest.files}
        assert {"nxd/model/dp_rank_00_tp_rank_00_pp_rank_00.pt", "nxd/done"} <= named
        assert "nxd/optim/dp_rank_01_tp_rank_00_pp_rank_00.pt" in named
        on_disk = {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}
        assert on_disk - {"manifest.json"} == named


def test_native_data_and_steps_are_the_same(
    unbroken: RunDir, data: tuple[str, str], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "native", data, *NXD[1:-1], "backend=native")
    Gang(run, 2).finish()
    ours, theirs = curve(unbroken), curve(run)
    assert ours.keys() == theirs.keys()
    for step, row in ours.items():
        assert row == pytest.approx(theirs[step], rel=1e-5), step


@pytest.mark.parametrize(
    ("phase", "resumed"),
    [("begun", 4), ("writing", 4), ("written", 4), ("done", 4), ("manifest", 4), ("published", 8)],
)
def test_killed_in_a_phase_of_the_save(
    unbroken: RunDir, data: tuple[str, str], tmp_path: Path, phase: str, resumed: int
) -> None:
    run = make_run(tmp_path / "killed", data, *NXD)
    env = {**nxd_environment(), "TEST_PHASE": phase}
    killed = Gang(run, 2, env=env, entry=_KILLED)
    assert killed.wait()[0] == -signal.SIGKILL, killed.output()
    assert run.checkpoint_steps() == ([4] if resumed == 4 else [4, 8])
    second = Gang(run, 2, attempt=1, env=nxd_environment())
    second.finish()
    assert f"resumed from step {resumed}" in second.output(0)
    assert curve(run, 0, 1) == curve(unbroken)
    assert not list(run.checkpoints.glob(".*"))


def test_a_stop_signal_saves_and_finishes(
    unbroken: RunDir, data: tuple[str, str], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "stopped", data, *NXD, "train.steps=12")
    stopped = Gang(run, 2, env=nxd_environment())
    stopped.signal_at(2, signal.SIGUSR2, [1])
    assert stopped.wait() == [EXIT_REQUEUE] * 2, stopped.output()
    (last,) = run.checkpoint_steps()[-1:]
    directory = run.checkpoint(last)
    assert file_faults(directory, read_manifest(directory).files) == []
    Gang(run, 2, attempt=1, env=nxd_environment()).finish()
    assert curve(run, 0, 1) == curve(unbroken)


_FULL_AT_ONE = """
import os, resource, sys
from pathlib import Path
from slurmllm.core.run.rundir import RunDir
if os.environ["RANK"] == "1":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from slurmllm.train.worker import run_worker
sys.exit(run_worker(RunDir(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])))
"""


def test_a_write_that_fails_on_one_worker_ends_all(data: tuple[str, str], tmp_path: Path) -> None:
    """NxD alone would leave the others waiting for it."""
    run = make_run(tmp_path / "full", data, *NXD)
    gang = Gang(run, 2, env=nxd_environment(), entry=_FULL_AT_ONE)
    assert gang.wait(120) == [CheckpointError.exit_code] * 2, gang.output()
    assert "cannot save" in gang.output(0)
    assert run.checkpoint_steps() == []


OPTIONS = (
    "backend=nxd",
    "cluster.devices_per_node=2",
    "train.steps=5",
    "checkpoint.every_steps=100",
    "parallel.pipeline=2",
)


def test_a_profile_changes_no_number(tmp_path: Path) -> None:
    data, env = make_data(tmp_path), nxd_environment()
    plain = Gang(make_run(tmp_path / "plain", data, *OPTIONS), world=2, env=env).finish()
    profile = ("profile.steps=[3, 4]", "profile.ranks=[0, 1]")
    run = Gang(make_run(tmp_path / "run", data, *OPTIONS, *profile), world=2, env=env).finish()
    assert curve(run) == curve(plain)
    for rank in (0, 1):
        with gzip.open(run.trace(0, rank)) as stream:
            names = {event.get("name") for event in json.load(stream)["traceEvents"]}
        expected = ("step 3", "step 4", "forward", "backward", "optimizer")
        assert {f"slurmllm.{name}" for name in expected} <= names


def test_a_run_has_the_numbers_of_evaluate(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    overrides = (
        "backend=nxd",
        "cluster.devices_per_node=2",
        "parallel.pipeline=2",
        "train.steps=8",
        "checkpoint.every_steps=4",
        "data.validation=0.1",
    )
    plain = Gang(
        make_run(tmp_path / "plain", data, *overrides), world=2, env=nxd_environment()
    ).finish()
    evaluates = ("eval.every_steps=4", "eval.sequences=13")
    run = make_run(tmp_path / "run", data, *overrides, *evaluates)
    Gang(run, world=2, env=nxd_environment()).finish()
    assert curve(run) == curve(plain), "bit-identical"
    evaluations = read_evaluations(run, run.metrics_files())
    assert sorted(evaluations) == [4, 8]
    for step, event in evaluations.items():
        directory = run.checkpoint(step)
        with stream_spec(validation_text(run, None), directory, None) as spec:
            expected = held_out_loss(directory, spec, 13, None, "cpu")
        assert event.values["held_out"] == pytest.approx(expected.loss, rel=1e-6)
