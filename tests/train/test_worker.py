"""A worker's ways out that are nobody's kill: bad input, divergence."""

import errno
from collections.abc import Callable

import pytest
import torch
from torch._inductor.exc import CppCompileError

from slurmllm.core.errors import CheckpointError, ConfigError, DivergenceError
from slurmllm.core.run.records import FailureRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.train.backends.base import Worker
from slurmllm.train.exits import classify_error, failure_record, format_failure
from slurmllm.train.job import Job, precompile_mesh
from slurmllm.train.worker import run_worker
from train.gang import Gang, rows

from .gang import small_config

NewRun = Callable[..., RunDir]


def test_divergence(new_run: NewRun) -> None:
    run = new_run("optim.lr=1e30", "optim.warmup_steps=0", "checkpoint.every_steps=1")
    gang = Gang(run)
    assert gang.wait() == [71], gang.output()
    failure = FailureRecord.load(run.attempt("train", 0).failure(0))
    assert (failure.error, failure.exit_code) == ("DivergenceError", 71)
    assert "optim.lr" in failure.message
    saved = run.checkpoint_steps()[-1]
    assert saved == rows(run, 0)[-1]["step"], "nothing was recorded or saved after that"
    assert failure.step == saved + 1  # the step whose loss is not finite
    assert "Traceback" not in gang.output()


def test_user_s_fault_is_one_message(new_run: NewRun) -> None:
    run = new_run(
        "model.family=llama",
        "model.num_kv_heads=1",
        "parallel.tensor=2",
        "cluster.devices_per_node=2",
        "cluster.device=neuron",
        "backend=native",
    )
    gang = Gang(run, world=2)
    assert gang.wait() == [2, 2], gang.output()
    assert gang.output(0).count("\n  ") == 2, "both faults"
    assert "parallel.tensor: 2 does not divide 1 key and value heads" in gang.output(0)
    assert "Traceback" not in gang.output()
    failure = FailureRecord.load(run.attempt("train", 0).failure(1))
    assert (failure.error, failure.blame, failure.step) == ("ConfigError", "user", 0)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker's environment; no signal handlers left behind."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("slurmllm.train.worker.StopRequest.install", lambda self: None)
    monkeypatch.setattr("slurmllm.train.worker.StopRequest.ignore", lambda self: None)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["data.corpus=null"], "ConfigError", "data.corpus: not set"),
        (["data.corpus=/nowhere.arrow"], "DataError", "/nowhere.arrow"),
        (["cluster.devices_per_node=2"], "ConfigError", "1 workers are no multiple"),
        (["train.micro_batch=8", "train.global_batch=8"], None, ""),
    ],
)
def test_what_is_refused_before_torch(
    new_run: NewRun,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    error: str | None,
    message: str,
) -> None:
    def no_backend(name: str) -> None:
        raise ConfigError("no backend in this test")

    monkeypatch.setattr("slurmllm.train.job.load_backend", no_backend)
    run = new_run(*overrides)
    assert run_worker(run, "train", 0) == 2
    failure = FailureRecord.load(run.attempt("train", 0).failure(0))
    assert failure.error == error or error is None
    assert message in failure.message
    assert failure.message in capfd.readouterr().err


@pytest.mark.usefixtures("alone")
def test_a_compiler_that_the_stop_signal_ends_is_not_a_failure(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def be_stopped(job: Job) -> int:
        job.stop.signal_name = "SIGUSR2"
        raise CppCompileError(["g++"], "killed")

    monkeypatch.setattr("slurmllm.train.worker._run_stage", be_stopped)
    run = new_run()
    assert run_worker(run, "train", 0) == 75
    assert not run.attempt("train", 0).failure(0).exists()


def test_launcher_s_variables_are_needed(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("slurmllm.train.worker.StopRequest.install", lambda self: None)
    with pytest.raises(ConfigError, match=r"RANK, .* not set"):
        run_worker(new_run(), "train", 0)


def test_precompile_mesh_needs_no_fitting_batch() -> None:
    config = small_config(
        "cluster.devices_per_node=3", "train.global_batch=8", "train.micro_batch=4"
    )
    mesh = precompile_mesh(config, nodes=1)
    assert (mesh.data, mesh.global_batch, mesh.accumulation) == (3, 12, 1)


WORKER = Worker(3, 4, 1, "node-2")


@pytest.mark.parametrize(
    ("error", "name", "blame", "exit_code"),
    [
        (ConfigError("bad"), "ConfigError", "user", 2),
        (CheckpointError("full"), "CheckpointError", "infrastructure", 4),
        (DivergenceError("nan"), "DivergenceError", "code", 71),
        (KeyboardInterrupt(), "KeyboardInterrupt", "user", 130),
        (ValueError("oops"), "ValueError", "code", 70),
        (MemoryError(), "OutOfMemoryError", "code", 72),
        (torch.OutOfMemoryError("CUDA out of memory"), "OutOfMemoryError", "code", 72),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
            "OutOfMemoryError",
            "code",
            72,
        ),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]"),
            "RuntimeError",
            "infrastructure",
            3,
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "OSError", "infrastructure", 4),
        (FileNotFoundError(errno.ENOENT, "gone"), "FileNotFoundError", "code", 70),
    ],
)
def test_classes(error: BaseException, name: str, blame: str, exit_code: int) -> None:
    meaning = classify_error(error)
    assert (meaning.error, meaning.blame, meaning.exit_code) == (name, blame, exit_code)
    assert meaning.message


def test_out_of_memory_has_a_fix() -> None:
    assert "smaller train.micro_batch" in classify_error(torch.OutOfMemoryError("CUDA")).message


def test_record_and_message() -> None:
    try:
        raise ValueError("oops")
    except ValueError as error:
        record = failure_record(error, WORKER, step=7)
    assert (record.rank, record.node, record.step) == (3, "node-2", 7)
    assert "test_record_and_message" in record.traceback
    assert format_failure(record).startswith("Traceback")
    assert format_failure(record).endswith("rank 3 on node-2: ValueError: oops")
    plain = failure_record(ConfigError("model.x: 3 is wrong"), WORKER, step=None)
    assert format_failure(plain) == "rank 3 on node-2: model.x: 3 is wrong"
