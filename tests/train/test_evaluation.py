"""Validation while training: the numbers of `evaluate`, and no influence on the training."""

import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rounding import rounding_bound
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slurmllm.analysis.evaluate.request import ValidationText
from slurmllm.analysis.evaluate.validation_loss import held_out_loss
from slurmllm.analysis.evaluate.validation_text import stream_spec, validation_text
from slurmllm.core.errors import EXIT_OK, EXIT_REQUEUE
from slurmllm.core.metrics.row_reader import read_events
from slurmllm.core.run.records import Event
from slurmllm.core.run.rundir import RunDir
from slurmllm.data.spec import HELD_OUT, StreamSpec, evaluation_texts
from slurmllm.data.stream import single_sequences
from slurmllm.plan.mesh import Mesh
from slurmllm.train.backends.base import IGNORED
from slurmllm.train.hooks.evaluation import make_passes
from train.gang import Gang, curve, make_data, make_run

NewRun = Callable[..., RunDir]
SETTINGS = (
    "cluster.devices_per_node=2",
    "train.steps=60",
    "checkpoint.every_steps=10",
    "data.validation=0.1",
    "checkpoint.keep=9",
)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A corpus of few documents."""
    return make_data(tmp_path_factory.mktemp("other"))[0]


def evaluations(run: RunDir, *attempts: int) -> dict[int, Event]:
    events_of_run = [event for attempt in attempts for event in read_events(run, attempt)]
    return {event.step: event for event in events_of_run if event.kind == "evaluation"}


@pytest.mark.numerics
def test_the_numbers_of_evaluate_and_the_same_training(
    tmp_path: Path, data: tuple[str, str], other: str
) -> None:
    plain = Gang(make_run(tmp_path / "plain", data, *SETTINGS), world=2).finish()
    overrides = (
        *SETTINGS,
        "eval.every_steps=20",
        "eval.sequences=41",
        f"eval.corpora={{other: {other}}}",
    )
    run = make_run(tmp_path / "run", data, *overrides)
    gang = Gang(run, world=2)
    gang.signal_at(45, signal.SIGKILL, ranks=[1])
    gang.wait()
    Gang(run, world=2, attempt=1).finish()
    assert curve(run, 0, 1) == curve(plain), "bit-identical"
    first, second = evaluations(run, 0), evaluations(run, 1)
    assert (sorted(first), sorted(second)) == ([20, 40], [60])
    texts = {
        HELD_OUT: validation_text(run, None),
        "other": ValidationText(run.path, Path(other), ""),
    }
    for step, event in {**first, **second}.items():
        assert (event.seconds or 0) > 0
        for name, text in texts.items():
            with stream_spec(text, run.checkpoint(step), None) as spec:
                expected = held_out_loss(run.checkpoint(step), spec, 41, None, "cpu")
            # The sum over the targets of 41 sequences, in other batches.
            assert event.values[name] == pytest.approx(expected.loss, rel=rounding_bound(41 * 32))
    assert first[20].values != first[40].values


def test_a_stop_leaves_the_evaluation_to_the_next_attempt(new_run: NewRun) -> None:
    run = new_run(*SETTINGS, "backend=rehearsal", "eval.every_steps=1", "eval.sequences=2")
    gang = Gang(run, world=2)
    gang.signal_at(15, signal.SIGTERM, ranks=[1])
    assert gang.wait() == [EXIT_REQUEUE, EXIT_REQUEUE], gang.output()
    stopped_at = run.checkpoint_steps()[-1]
    assert sorted(evaluations(run, 0)) == [*range(1, stopped_at)]
    Gang(run, world=2, attempt=1).finish()
    assert sorted(evaluations(run, 1)) == [*range(stopped_at, 61)]
    read = EventAccumulator(str(run.tensorboard), size_guidance={"scalars": 0}).Reload()
    losses = {e.step: e.value for e in read.Scalars("eval/held_out/loss")}
    assert sorted(losses) == [*range(1, 61)]
    expected = {**evaluations(run, 0), **evaluations(run, 1)}
    assert losses == pytest.approx({s: e.values[HELD_OUT] for s, e in expected.items()})
    perplexities = {e.step: e.value for e in read.Scalars("eval/held_out/perplexity")}
    assert perplexities == pytest.approx({step: np.exp(loss) for step, loss in losses.items()})


@pytest.mark.parametrize(("steps", "code"), [(60, EXIT_REQUEUE), (7, EXIT_OK)])
def test_a_stop_ends_a_long_evaluation(new_run: NewRun, steps: int, code: int) -> None:
    long = ("backend=rehearsal", "eval.every_steps=7", "eval.sequences=400", f"train.steps={steps}")
    run = new_run(*SETTINGS, *long)
    slowly = {"SLURMLLM_REHEARSAL_STEP_S": "0.2"}  # 25 passes or more
    gang = Gang(run, world=2, env=slowly)
    gang.signal_at(7, signal.SIGUSR2, ranks=[1])
    assert gang.wait() == [code, code], gang.output()
    assert (run.checkpoint_steps(), evaluations(run, 0)) == ([7], {}), "saved at once"
    assert "SIGUSR2 ended the evaluation of step 7; " in gang.output(0)
    again = Gang(run, world=2, attempt=1, env=slowly)
    if code == EXIT_REQUEUE:  # it begins with the evaluation
        while "resumed from step 7" not in again.output(0):
            assert again.processes[0].poll() is None, again.output()
        again.processes[0].send_signal(signal.SIGUSR2)
    assert again.wait() == [code, code], again.output()
    assert (run.checkpoint_steps(), curve(run, 1), evaluations(run, 1)) == ([7], {}, {})


@pytest.mark.parametrize(("data_parallel", "pipeline"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_sequences_once_on_a_mesh(data: tuple[str, str], data_parallel: int, pipeline: int) -> None:
    training = StreamSpec([(Path(data[0]), 1.0)], Path(data[1]), 32, 16, 7, 512, "document", 0.1)
    spec = evaluation_texts(training, {})[HELD_OUT]
    mesh = Mesh(1, data_parallel * pipeline, 1, pipeline, data_parallel, 16, 2)
    expected = [batch.inputs[0] for batch in single_sequences(spec, 21)]
    results, targets = [], 0
    by_rank = [[*make_passes(spec, 21, mesh, rank)] for rank in range(data_parallel)]
    for parts in zip(*by_rank, strict=True):
        assert len({(len(part.micro_batches), part.num_targets) for part in parts}) == 1
        assert pipeline == 1 or len(parts[0].micro_batches) == mesh.accumulation
        targets += parts[0].num_targets
        for batch in (batch for part in parts for batch in part.micro_batches):
            assert batch.tokens.shape == batch.labels.shape == (2, 32)
            assert batch.positions.shape == (2, 32)
            used = (batch.labels != IGNORED).any(axis=1)
            results += [*batch.tokens[used]]
    assert targets == 21 * 32
    assert np.array_equal(results, expected)
