"""What follows a divergence: nothing, the end, or another way through the data."""

import hashlib
import json
import math
import random
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from amounts import amount
from hypothesis import given, settings
from hypothesis import strategies as st
from made_records import save_skips

from slurmllm.core.config.operation import GuardConfig
from slurmllm.core.errors import DivergenceError, StaleGraphsError
from slurmllm.core.run.records import Event, SkippedBatches, SkipsRecord, WorkerRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.run.worker_files import EventLog
from slurmllm.data.spec import StreamSpec
from slurmllm.data.stream import PackedStream
from slurmllm.train.backends.base import Backend
from slurmllm.train.guard import Guard, SpikeDetector
from train.checkpoint.pretend import PretendGang, save_at
from train.gang import Gang, curve, rows, small_config

NewRun = Callable[..., RunDir]

# Some sequences are poison: the loss of a batch with one of them is not a number, or its gradient
# is a few hundred times too large. The hash of every batch's first sequence is printed.
_ENTRY = """
import hashlib, os, sys
from pathlib import Path
from slurmllm.train.backends.native.runtime import NativeBackend
from slurmllm.core.run.rundir import RunDir
from slurmllm.train.worker import run_worker

poison, kind = os.environ["TEST_POISON"].split(), os.environ["TEST_KIND"]
NativeBackend.deferred_metrics = bool(os.environ.get("TEST_LATE"))
honest = NativeBackend.forward_backward

def forward_backward(self, batches, counted):
    word = hashlib.sha256(batches[0].tokens[0].tobytes()).hexdigest()
    if self.worker.rank == 0:
        print("batch", word, flush=True)
    if not self.control.all_reduce([int(word in poison)], "max")[0]:
        return honest(self, batches, counted)
    if kind == "spike":  # as if one label alone counted, and counted for all
        return honest(self, batches, 1)
    return float(honest(self, batches, counted)) * float("nan")

NativeBackend.forward_backward = forward_backward
sys.exit(run_worker(RunDir(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])))
"""
STEPS = ("cluster.devices_per_node=1", "train.steps=40", "checkpoint.every_steps=5")


@pytest.fixture(scope="module")
def batch_numbers(data: tuple[str, str]) -> dict[str, int]:
    """The first sequence of a global batch, as workers print it → the batch's number, from 1."""
    spec = StreamSpec([(Path(data[0]), 1.0)], Path(data[1]), 32, 8, seed=1234)
    with PackedStream(spec, 0, 1) as stream:
        batches = [stream.next_batch().inputs for _ in range(50)]
    return {hashlib.sha256(b[0].tobytes()).hexdigest(): n for n, b in enumerate(batches, start=1)}


def start(
    run: RunDir,
    batch_numbers: dict[str, int],
    poison: range,
    kind: str,
    *,
    late: bool = False,
    **other: Any,
) -> Gang:
    env = {
        "TEST_POISON": " ".join(w for w, n in batch_numbers.items() if n in poison),
        "TEST_KIND": kind,
    }
    return Gang(run, env={**env, "TEST_LATE": "1" if late else ""}, entry=_ENTRY, **other)


def trained_on(gang: Gang, batch_numbers: dict[str, int]) -> list[int]:
    """The batches that steps were made with, in turn."""
    lines = gang.output(0).splitlines()
    return [batch_numbers[line.split()[1]] for line in lines if line.startswith("batch ")]


def events(run: RunDir, attempt: int) -> list[Event]:
    lines = run.events(attempt).read_text().splitlines()
    all_events = map(Event.model_validate_json, lines)
    return [event for event in all_events if not event.kind.startswith(("save", "memory"))]


def test_not_a_number_rolls_back_and_a_kill_after_that_changes_nothing(
    new_run: NewRun, batch_numbers: dict[str, int]
) -> None:
    run = new_run(*STEPS, "guard.not_finite=roll_back", "guard.skip_batches=2")
    first = start(run, batch_numbers, range(13, 14), "nan", world=2)
    assert first.wait() == [DivergenceError.exit_code] * 2, first.output()
    message = "the loss of step 13 is nan; roll-back 1 of at most 3: the next attempt resumes from "
    assert f"{message}step 10 and skips batches 11 to 13" in first.output(0)
    assert message in first.output(1)
    assert SkipsRecord.load(run.skips).skips == (
        SkippedBatches(
            first=11,
            last=13,
            roll_back_to=10,
            onset=13,
            attempt=0,
            reason="the loss of step 13 is nan",
        ),
    )
    assert run.checkpoint_steps() == [5, 10], "no checkpoint of a step that is not finite"
    assert [event.kind for event in events(run, 0)] == ["not_finite"]
    assert curve(run).keys() == set(range(1, 13))

    unbroken = RunDir(run.path.with_name("unbroken"))
    shutil.copytree(run.path, unbroken.path)
    gang = start(unbroken, batch_numbers, range(13, 14), "nan", attempt=1)
    killed = start(run, batch_numbers, range(13, 14), "nan", attempt=1)
    killed.signal_at(18, signal.SIGKILL, ranks=[0])
    killed.wait()
    resumed = start(run, batch_numbers, range(13, 14), "nan", attempt=2)
    gang.finish()
    resumed.finish()
    assert "resumed from step 10" in gang.output()
    assert trained_on(gang, batch_numbers) == list(range(14, 44))
    assert [row["tokens"] for row in rows(unbroken, 1)] == [s * 8 * 32 for s in range(11, 41)]

    resumed_from = WorkerRecord.load(run.attempt("train", 2).worker(0)).resumed_from
    assert 15 <= resumed_from < 40
    assert trained_on(resumed, batch_numbers)[0] == resumed_from + 4
    assert curve(run, 1, 2) == curve(unbroken, 1), "bit-identical"


def test_a_lasting_spike_is_rolled_back(new_run: NewRun, batch_numbers: dict[str, int]) -> None:
    guard = ("guard.spike=roll_back", "guard.smoothing_steps=4", "guard.window_steps=3")
    run = new_run(*STEPS, *guard, "checkpoint.keep=1")
    first = start(run, batch_numbers, range(14, 18), "spike", late=True)
    assert first.wait() == [DivergenceError.exit_code], first.output()
    (skip,) = SkipsRecord.load(run.skips).skips
    assert (skip.first, skip.last, skip.onset, skip.roll_back_to) == (14, 17, 14, 10)
    assert "has not returned in the 3 steps since step 14" in skip.reason
    assert run.checkpoint_steps() == [10, 15], "saved while nobody knew; the one before it is kept"
    (spike,) = events(run, 0)
    assert (spike.kind, spike.step) == ("spike", 14)
    assert spike.values["grad_norm"] > 3 * spike.values["lowest"]

    resumed = start(run, batch_numbers, range(14, 18), "spike", attempt=1, late=True)
    resumed.finish()
    aside = "step 15: attempt 0 saved it after the divergence from step 14 on"
    assert f"skipped an invalidated checkpoint: {aside}" in resumed.output()
    assert "batches 14 to 17 are skipped: the gradient norm has not" in resumed.output()
    assert trained_on(resumed, batch_numbers) == [11, 12, 13, *range(18, 45)]
    assert run.checkpoint_steps() == [40]


def guard_of(run: RunDir, backend: Backend, *overrides: str) -> Guard:
    recipe = small_config("optim.warmup_steps=0", "guard.smoothing_steps=2", *overrides).recipe
    events = EventLog(run.events(4) if backend.worker.rank == 0 else None, 4)
    return Guard(run, "train", 4, recipe, backend, events)


def decide(guard: Guard, backend: Backend) -> None:
    """Exchange whether a worker found a divergence, as `Job.decide` does."""
    if backend.control.all_reduce([int(guard.diverged)], "max")[0]:
        guard.fail()


def diverge(run: RunDir, *overrides: str, found_by: int = 0) -> set[str]:
    """What two workers fail with where one of them finds that the norm of step 9 stays high."""

    def work(backend: Backend) -> None:
        guard = guard_of(run, backend, "guard.window_steps=3", *overrides)
        for step in range(1, 11):
            high = backend.worker.rank == found_by and step > 5
            guard.check_norm(step, 100 + step, 8.0 if high else 1.0)
            decide(guard, backend)

    return {str(answer) for answer in PretendGang().all(work)}


@pytest.mark.parametrize(("step", "stale"), [(41, True), (42, False)])
def test_the_first_step_with_graphs_that_were_compiled_before(
    tmp_path: Path, step: int, stale: bool
) -> None:
    """Of a resumed run, in which the second worker's node alone has reused graphs."""
    run = RunDir(tmp_path)

    def work(backend: Backend) -> None:
        guard = guard_of(run, backend, "guard.not_finite=roll_back")
        guard.reused_graphs = backend.worker.rank == 1
        for number in (41, 42):
            for name in ("loss", "gradient norm"):
                bad = name == "gradient norm" and number == step
                guard.check_finite(name, float("nan") if bad else 1.0, number, number)
            decide(guard, backend)

    answers = PretendGang().all(work)
    kind = StaleGraphsError if stale else DivergenceError
    assert [type(answer) for answer in answers] == [kind, kind]
    message = f"the gradient norm of step {step} is nan"
    assert all(str(answer).startswith(message) for answer in answers)
    assert run.skips.exists() is not stale, "no batch is to blame"


def test_what_one_worker_finds_ends_all(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    answers = diverge(run, "guard.spike=roll_back", found_by=1)
    (message,) = answers
    assert message == (
        "the gradient norm has not returned in the 3 steps since step 6: it is 8 at step 9, more "
        "than 3 times the lowest smoothed norm (1); roll-back 1 of at most 3: the next attempt "
        "resumes from step 0 and skips batches 106 to 109"
    )
    (skip,) = SkipsRecord.load(run.skips).skips
    assert (skip.onset, skip.attempt, skip.roll_back_to) == (6, 4, None)


def test_the_checkpoint_to_go_back_to_is_none_that_was_set_aside(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    save_at(run, 2, 4, attempt=1)
    save_skips(run, onset=3, last=9, attempt=2, roll_back_to=2)
    (message,) = diverge(run, "guard.spike=roll_back")
    assert "roll-back 2 of at most 3: the next attempt resumes from step 2" in message


def test_a_spike_that_ends_in_no_number_rolls_back_behind_the_spike(tmp_path: Path) -> None:
    run = RunDir(tmp_path)

    def work(backend: Backend) -> None:
        guard = guard_of(run, backend, "guard.not_finite=roll_back")
        for step in range(1, 9):
            guard.check_norm(step, 100 + step, 8.0 if step > 5 else 1.0)
            decide(guard, backend)
        assert guard.protected_steps() == ()
        guard.check_finite("loss", float("inf"), 9, 109)
        decide(guard, backend)

    (error,) = PretendGang(1).all(work)
    message = (
        "the loss of step 9 is inf, after a spike of the gradient norm from step 6 on; roll-back"
    )
    assert message in str(error)
    (skip,) = SkipsRecord.load(run.skips).skips
    assert (skip.onset, skip.first, skip.last) == (6, 106, 109)


@pytest.mark.parametrize(
    ("settings", "skips", "message"),
    [
        (
            ("guard.spike=roll_back", "guard.max_roll_backs=1"),
            '{"skips": [{"first": 1, "last": 2, "roll_back_to": null, "onset": 1, "attempt": 0, '
            '"reason": ""}]}',
            "the run stops after 1 roll-backs (guard.max_roll_backs 1)",
        ),
        (
            ("guard.spike=roll_back",),
            "{",
            "the run stops, because the roll-back could not be written: ",
        ),
        (("guard.spike=stop",), "", "`slurmllm resume run --set guard.spike=roll_back`"),
        (("guard.spike=off",), "", "None"),
    ],
)
def test_no_roll_back(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    settings: tuple[str, ...],
    skips: str,
    message: str,
) -> None:
    run = RunDir(tmp_path / "run")
    if skips:
        run.path.mkdir()
        run.skips.write_text(skips)
    (answer,) = diverge(run, *settings)
    assert message in answer
    assert run.skips.read_text() == skips if skips else not run.skips.exists()
    assert len(caplog.messages) == (message != "None"), "the spike's begin"


def test_warnings_and_their_events(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "slurmllm")
    run = RunDir(tmp_path)

    def work(backend: Backend) -> None:
        guard = guard_of(run, backend, "guard.window_steps=3")
        for step in range(1, 20):
            guard.check_norm(step, step, 8.0 if 6 <= step <= 12 else 1.0)
            decide(guard, backend)

    assert PretendGang(1).all(work) == [None]
    assert [(record.levelname, record.message) for record in caplog.records] == [
        (
            "WARNING",
            "spike: the gradient norm of step 6 is 8, more than 3 times the lowest smoothed norm "
            "(1)",
        ),
        (
            "WARNING",
            "the gradient norm has not returned in the 3 steps since step 6: it is 8 at step 9, "
            "more than 3 times the lowest smoothed norm (1)",
        ),
        ("INFO", "the spike of step 6 is over: gradient norm 1"),
    ]
    assert [(event.kind, event.step, event.values) for event in events(run, 4)] == [
        ("spike", 6, {"onset": 6, "grad_norm": 8, "lowest": 1, "factor": 3}),
        ("spike_over", 15, {"onset": 6, "grad_norm": 1, "lowest": 1, "factor": 3}),
    ]


SMALL = GuardConfig(smoothing_steps=4, window_steps=6)


def changes(
    norms: Iterable[float], config: GuardConfig = SMALL, warmup_steps: int = 0
) -> list[tuple[str, int]]:
    """Return the changes, each with its step."""
    watch = SpikeDetector(config, warmup_steps)
    results = []
    for step, norm in enumerate(norms, start=1):
        if change := watch.update(step, step + 1000, norm):
            assert change.spike.batch == change.spike.onset + 1000
            results.append((change.kind, step))
    return results


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        pytest.param([1.0] * 60, [], id="steady"),
        pytest.param([50.0, 60.0, 40.0], [], id="no smoothed norm yet"),
        pytest.param([1.0] * 10 + [3.0], [], id="factor itself is none"),
        pytest.param([1.0] * 10 + [3.1] + [1.0] * 8, [("began", 11), ("over", 16)], id="one step"),
        pytest.param(
            [1.0] * 10 + [9.0, 1.0] * 3 + [1.0] * 5, [("began", 11), ("over", 20)], id="ragged"
        ),
        pytest.param(
            [1.0] * 10 + [9.0] * 8, [("began", 11), ("stays", 17), ("stays", 18)], id="divergence"
        ),
        pytest.param(
            [1.0] * 10 + [2.0**i for i in range(9)], [("began", 13), ("stays", 19)], id="faster"
        ),
        pytest.param([1.01**i for i in range(1000)], [], id="slow growth, 20,000-fold in all"),
        pytest.param([40 * 0.9**i + 1 for i in range(200)], [], id="falls from a height"),
    ],
)
def test_curves(norms: list[float], expected: list[tuple[str, int]]) -> None:
    assert changes(norms) == expected


def test_nothing_is_judged_while_the_learning_rate_warms_up() -> None:
    rises = [1.0] * 10 + [5.0] * 10
    assert changes(rises, warmup_steps=20) == []
    assert changes([*rises, 5.0], warmup_steps=20) == [("began", 21)], "still high when it ends"
    assert changes([*rises, 2.0], warmup_steps=20) == []


def test_a_run_that_settles_on_a_higher_level_goes_on() -> None:
    spikes = changes([1.0] * 10 + [5.0] * 200)
    assert spikes[0] == ("began", 11)
    assert spikes[-1][0] == "over"
    assert spikes[-1][1] < 110


def noisy(seed: int, sigma: float, lone_spikes: float = 0.0) -> Iterator[float]:
    """1,500 norms: down from 8 to 0.25, a hump after the warm-up, log-normal noise."""
    rng = random.Random(seed)
    for step in range(1, 1501):
        level = 0.25 + 8 * math.exp(-step / 60) + 0.3 * math.exp(-(((step - 300) / 120) ** 2))
        lone = rng.uniform(3, 20) if rng.random() < lone_spikes else 1.0
        yield level * lone * math.exp(rng.gauss(0, sigma))


@pytest.mark.parametrize(
    ("curve", "allowed"),
    [
        (lambda seed: noisy(seed, 0.2), set()),
        (lambda seed: noisy(seed, 0.3, lone_spikes=0.005), {"began", "over"}),
    ],
    ids=["20 % noise", "30 % noise, one lone spike in 200 steps"],
)
def test_no_false_alarm(curve: Callable[[int], Iterator[float]], allowed: set[str]) -> None:
    kinds = {
        kind
        for seed in range(amount(40, of=200))
        for kind, _ in changes(curve(seed), GuardConfig(), warmup_steps=100)
    }
    assert kinds == allowed


@settings(deadline=None)  # the first example may wait for a busy machine
@given(
    st.lists(st.floats(0.01, 100.0), min_size=1, max_size=120),
    st.integers(1, 120),
    st.integers(1, 6),
    st.integers(1, 6),
)
def test_a_resume_judges_as_unbroken(
    norms: list[float], at: int, smoothing: int, window: int
) -> None:
    config = GuardConfig(smoothing_steps=smoothing, window_steps=window)
    unbroken, resumed = SpikeDetector(config, 3), SpikeDetector(config, 3)
    for step, norm in enumerate(norms, start=1):
        if step == at:
            resumed.load_state(json.loads(json.dumps(unbroken.state())))
        change = unbroken.update(step, step, norm)
        if step >= at:
            assert resumed.update(step, step, norm) == change
            assert resumed.state() == unbroken.state()
