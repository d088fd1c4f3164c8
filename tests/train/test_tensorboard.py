"""What the trainer writes for TensorBoard, read back by TensorBoard."""

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups
from training_rows import make_row

from slurmllm.core.metrics.curves import TAGS
from slurmllm.core.run import worker_files
from slurmllm.core.run.records import MetricsRow
from slurmllm.core.run.rundir import RunDir
from slurmllm.plan.mesh import make_mesh
from slurmllm.train.hooks import StepEnd
from slurmllm.train.hooks.tensorboard import TensorBoardHook

from .gang import small_config

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of the html5lib that they carry
    from tensorboard.plugins.text.text_plugin import TextPlugin

MakeJob = Callable[..., Any]


def moment(step: int, attempt: int = 0, *, loss: float = 5.0, last: bool = False) -> StepEnd:
    row = MetricsRow(**make_row(step, attempt, loss=loss, data_wait_s=0.0, time=1e9 + step))
    return StepEnd(row, last=last, saving=last, leaving=last)


@pytest.fixture
def make_job(tmp_path: Path) -> MakeJob:
    """A job of a run at a step, as far as the hook needs it."""

    def make(step: int = 0, attempt: int = 0, name: str = "r", *overrides: str) -> Any:
        config = small_config("train.steps=40", *overrides)
        return SimpleNamespace(
            run=RunDir(tmp_path / "runs" / name),
            attempt=attempt,
            step=step,
            config=config,
            mesh=make_mesh(config, 1),
        )

    return make


def write(job: Any, first: int, end: int, *, finished: bool = False) -> None:
    """Steps from `first` to `end` of an attempt."""
    hook = TensorBoardHook(job)
    for step in range(first, end + 1):
        loss = 100.0 * (job.attempt + 1) + step
        hook.after_step(moment(step, job.attempt, loss=loss, last=finished and step == end))
    hook.close()


def open_logdir(path: Path) -> TBContext:
    """What TensorBoard's plugins are given of a logdir."""
    runs = EventMultiplexer().AddRunsFromDirectory(str(path)).Reload()
    return TBContext(multiplexer=runs, data_provider=MultiplexerDataProvider(runs, str(path)))


def test_curve_is_one_over_restarts(make_job: MakeJob) -> None:
    write(make_job(0), 1, 7)
    write(make_job(4, 1), 5, 10)  # killed after step 7, resumed from step 4
    events = EventAccumulator(str(make_job().run.tensorboard)).Reload()
    assert sorted(events.Tags()["scalars"]) == sorted(TAGS.values())
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(s, 100.0 + s) for s in range(1, 5)] + [(s, 200.0 + s) for s in range(5, 11)]
    assert [event.value for event in events.Scalars("run/attempt")] == [0] * 4 + [1] * 6


def test_runs_stand_side_by_side_among_hyperparameters(make_job: MakeJob, tmp_path: Path) -> None:
    write(make_job(0, 0, "a"), 1, 4)
    write(make_job(2, 1, "a", "train.precision=bf16"), 3, 6, finished=True)
    write(make_job(0, 0, "b", "optim.lr=0.5"), 1, 3)
    context = backend_context.Context(open_logdir(tmp_path / "runs"))
    request = api_pb2.ListSessionGroupsRequest(
        start_index=0, slice_size=10, allowed_statuses=list(api_pb2.Status.values())
    )
    handler = list_session_groups.Handler(RequestContext(), context, "", request)
    groups = {group.sessions[0].name: group for group in handler.run().session_groups}
    assert set(groups) == {"a/tensorboard", "b/tensorboard"}
    a, b = groups["a/tensorboard"], groups["b/tensorboard"]
    assert b.hparams["optim.lr"].number_value == 0.5
    assert a.hparams["parallel.sequence"].bool_value is False
    assert a.hparams["optim.betas"].string_value == "0.9, 0.95"
    assert a.hparams["train.micro_batch"].number_value == 2
    assert a.hparams["nodes"].number_value == 1
    metrics = {value.name.tag: value.value for value in a.metric_values}
    assert set(metrics) == set(TAGS.values())
    assert metrics["train/loss"] == 206.0
    assert a.sessions[0].status == api_pb2.STATUS_SUCCESS
    assert b.sessions[0].status == api_pb2.STATUS_UNKNOWN
    experiment = context.experiment_from_metadata(
        RequestContext(), "", True, context.hparams_metadata(RequestContext(), ""), None
    )
    types = {info.name: info.type for info in experiment.hparam_infos}
    assert types["optim.lr"] == api_pb2.DATA_TYPE_FLOAT64
    assert types["parallel.sequence"] == api_pb2.DATA_TYPE_BOOL
    assert types["train.precision"] == api_pb2.DATA_TYPE_STRING
    assert set(types) == set(a.hparams)
    assert [info.name for info in experiment.hparam_infos if info.differs] == ["optim.lr"]


def test_the_recipe_as_text(make_job: MakeJob, tmp_path: Path) -> None:
    write(make_job(0), 1, 7)
    write(make_job(4, 1), 5, 6)
    text = TextPlugin(open_logdir(tmp_path / "runs"))
    cards = text.text_impl(
        RequestContext(), "r/tensorboard", "run/recipe", "", enable_markdown=True
    )
    assert [card["step"] for card in cards] == [0, 4]
    assert "<pre><code>" in cards[0]["text"]
    assert "precision: " in cards[0]["text"]


@pytest.mark.parametrize("fault", ["removed", "a file", "no space", "refused"])
def test_a_failure_is_one_warning_and_the_curves_go_on(
    make_job: MakeJob, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    job = make_job()
    folder = job.run.tensorboard
    monkeypatch.setattr(worker_files, "_failed_diagnostics", set())
    hook = TensorBoardHook(job)
    hook.after_step(moment(1))
    stream = hook._stream
    assert stream is not None
    if fault in ("removed", "a file"):
        shutil.rmtree(folder)
    if fault == "a file":
        folder.write_text("")
    if fault == "no space":
        full = os.fdopen(os.open("/dev/full", os.O_WRONLY), "ab")
        monkeypatch.setattr(hook, "_stream", full)
        monkeypatch.setattr(os, "fstat", lambda _: SimpleNamespace(st_nlink=1))
    if fault == "refused":
        stream.close()  # the descriptor is no longer valid: as any error of a file system
    for step in (2, 3, 4):
        hook.after_step(moment(step))
    (message,) = caplog.messages
    assert message.startswith("TensorBoard failed: ")
    assert message.endswith("training continues")
    monkeypatch.undo()
    if fault == "a file":
        folder.unlink()
    hook.after_step(moment(5)._replace(saving=True))  # tries again
    hook.add_scalars(5, {"mine": 1.0})
    hook.after_step(moment(6, last=True))
    hook.close()
    events = EventAccumulator(str(folder)).Reload()
    assert [point.step for point in events.Scalars("mine")] == [5]
    curve = events.Scalars("train/loss")
    assert curve[-1].step == 6
    assert {2, 3, 4} <= {point.step for point in curve} or fault != "removed"
