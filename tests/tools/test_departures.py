"""tools/benchmarks/departures: faults change what they claim, samenesses do not, answers score."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from departures import __main__ as command
from departures import store, training
from departures.corpus import VOCABULARY, read_passes
from departures.kinds import Kind, all_kinds
from departures.logs import VIEWS, View, make_logs
from departures.model import FFN, HIDDEN, LAYERS
from departures.noise import differs, noise
from departures.published import compare_golden, compare_seeds
from departures.scoring import (
    Answer,
    Cause,
    expected_verdicts,
    read_answer,
    score_all,
    score_answer,
)
from departures.settings import EARLY, LATE, Settings
from departures.training import Columns, train
from departures.truth import COLUMN_SETS, INDISTINCT, visible_verdicts
from rounding import rounding_bound
from torch.nn import functional as F

pytestmark = pytest.mark.numerics

STEPS = 14
SINCE = 11
# Of a loss or norm of the last steps: see `training_rounding`, for a model of this size.
_TERMS = LAYERS * (4 * HIDDEN + 3 * 32 + FFN) + HIDDEN + VOCABULARY
ROUNDING = rounding_bound((STEPS - SINCE + 1) * (2 * _TERMS + 8 * 32), mean_of=8 * 32)


@pytest.fixture(autouse=True, scope="module")
def _threads() -> Iterator[None]:
    """Restore the threads of this process, of which these trainings take one."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trainings() -> dict[str, Columns]:
    """The first steps of a few kinds that depart from one reference at step 11."""
    names = (
        "same_again", "exact_resume", "fused_kernels", "world_size_4", "sums_reversed",
        "rank_dropped", "weight_decay_off", "lr_plus_10", "label_shift", "gradients_not_reduced",
        "norms_not_reduced",
    )  # fmt: skip
    changes = [all_kinds()[name].change(1, SINCE) for name in names]
    reference, found = train(Settings(), changes, steps=STEPS)
    return {"reference": reference} | dict(zip(names, found, strict=True))


def differs_at(trainings: dict[str, Columns], name: str, column: str) -> int | None:
    """The first step at which a column of a training is not the reference's, bit by bit."""
    pairs = zip(trainings["reference"][column], trainings[name][column], strict=True)
    return next((step for step, (a, b) in enumerate(pairs, start=1) if a != b), None)


@pytest.mark.parametrize("name", ["same_again", "exact_resume"])
def test_the_same_bits(trainings: dict[str, Columns], name: str) -> None:
    assert trainings[name] == trainings["reference"]


@pytest.mark.parametrize("name", ["fused_kernels", "world_size_4", "sums_reversed"])
def test_other_roundings(trainings: dict[str, Columns], name: str) -> None:
    """Whether they show depends on the processor: its kernels may round alike."""
    found, reference = trainings[name], trainings["reference"]
    for column in ("loss", "grad_norm", "param_norm"):
        assert found[column] == pytest.approx(reference[column], rel=ROUNDING), column


def test_what_makes_roundings_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other kernels, batches of other sizes, sums in the opposite order."""
    plain = Settings()
    changed = {
        name: all_kinds()[name].change(1, SINCE).settings
        for name in ("fused_kernels", "world_size_4", "sums_reversed")
    }
    kernels = ("scaled_dot_product_attention", "rms_norm", "gelu", "cross_entropy")
    calls: Counter[str] = Counter()
    for kernel in kernels:
        function = getattr(F, kernel)
        monkeypatch.setattr(
            F, kernel, lambda *a, f=function, n=kernel, **k: (calls.update([n]), f(*a, **k))[1]
        )
    train(plain, steps=1)
    assert not calls
    train(changed["fused_kernels"], steps=1)
    assert set(calls) == set(kernels)

    def shapes(settings: Settings) -> list[list[tuple[int, ...]]]:
        return [[tuple(b.tokens.shape) for b in passes] for passes in read_passes(settings, 1)]

    assert shapes(plain) == [[(4, 32)]] * 2
    assert shapes(changed["world_size_4"]) == [[(2, 32)]] * 4

    # fp32 holds no 1e8 + 1, so that the order decides what is left of the 1.
    parts = [torch.tensor([value]) for value in (1.0, 1e8, -1e8)]
    sums = [training._add(parts, settings).item() for settings in (plain, changed["sums_reversed"])]
    assert sums == [0.0, 1.0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lr_plus_10", {"loss": 12, "grad_norm": 12, "lr": 11, "param_norm": 11}),
        ("weight_decay_off", {"loss": 12, "grad_norm": 12, "lr": None, "param_norm": 11}),
        ("rank_dropped", {"loss": 12, "grad_norm": 11, "lr": None, "param_norm": 11}),
        ("norms_not_reduced", {"loss": 12, "grad_norm": 11, "lr": None, "param_norm": 11}),
        ("gradients_not_reduced", {"loss": 12, "grad_norm": 11, "lr": None, "param_norm": 11}),
        ("label_shift", {"loss": 11, "grad_norm": 11, "lr": None, "param_norm": 11}),
    ],
)
def test_a_fault_shows_where_its_signature_has_it(
    trainings: dict[str, Columns], name: str, expected: dict[str, int | None]
) -> None:
    assert {column: differs_at(trainings, name, column) for column in expected} == expected


def test_training_starts_to_learn() -> None:
    losses = train(Settings(), steps=30)[0]["loss"]
    assert losses[0] == pytest.approx(np.log(64), rel=0.03)
    assert np.mean(losses[-5:]) < losses[0] - 0.2


def test_the_halves_are_stable_and_of_about_the_same_size() -> None:
    kinds = all_kinds()
    assert len(kinds) > 100
    halves = {name: kind.half for name, kind in kinds.items()}
    assert halves["rank_dropped"] == "held_out"
    assert halves["lr_plus_10"] == Kind("x", "lr_plus_10", (), "logging").half
    count = sum(half == "rules" for half in halves.values())
    assert 0.4 < count / len(kinds) < 0.6


def test_every_kind_has_a_right_answer() -> None:
    known = {
        "lr", "seed", "data", "batches", "precision", "rounding", "model", "optimizer", "mesh",
        "gradient", "not_finite", "logging", "unknown",
    }  # fmt: skip
    for kind in all_kinds().values():
        assert set(kind.causes) <= known
        assert kind.causes or kind.verdicts
        assert kind.starts
        for since in kind.starts:
            signature = kind.signature_from(since)
            # What is true of a kind must be among what looks like it.
            for columns in COLUMN_SETS:
                alike = INDISTINCT[columns][signature]
                assert not kind.causes or set(kind.causes) & (alike | {"unknown"}), kind.name


def test_changed_settings_have_known_values() -> None:
    """A misspelt value would train the reference once more."""
    known = {
        n: get_args(h) for n, h in get_type_hints(Settings).items() if get_origin(h) is Literal
    }
    assert "schedule" in known
    for kind in all_kinds().values():
        for since in kind.starts:
            settings = kind.change(1, since).settings
            for name, values in known.items():
                assert getattr(settings, name) in values, kind.name


def likely(*kinds: str, step: int = LATE) -> Answer:
    return Answer("differ", tuple(Cause(kind, "likely", step) for kind in kinds))


@pytest.mark.parametrize(
    ("answer", "expected"),  # whether verdict, first cause, list and step are right
    [
        (likely("optimizer"), (True, True, True, True)),
        (likely("mesh", "optimizer"), (True, True, True, True)),  # looks the same
        (likely("lr", "optimizer"), (True, False, True, False)),
        (likely("mesh"), (True, False, False, False)),
        (likely("unknown"), (True, False, True, False)),
        (likely("optimizer", step=1), (True, True, True, False)),
        (Answer("match", ()), (False, False, False, False)),
    ],
)
def test_scores(answer: Answer, expected: tuple[bool, ...]) -> None:
    kind = all_kinds()["weight_decay_off"]
    reference = {n: np.full(100, 3.0) for n in COLUMN_SETS["four"]} | {"step": np.arange(1, 101)}
    changed = {n: v.copy() for n, v in reference.items()}
    changed["param_norm"][LATE - 1 :] *= 1.01
    changed["loss"][LATE:] *= 1.01
    logs = make_logs(kind, LATE, 1, reference, changed, View("four", 1))
    case = store.Case(kind.name, LATE, 1)
    score = score_answer(kind, case, View("four", 1), logs, answer)
    assert (score.verdict_right, score.outright, score.listed, score.step_right) == expected
    assert score.asked
    assert not score.certain_wrong
    for wrong, found in (("lr", ("lr",)), ("optimizer", ())):
        certain = Answer("differ", (Cause(wrong, "certain", LATE),))
        assert score_answer(kind, case, View("four", 1), logs, certain).certain_wrong == found


@pytest.mark.parametrize("degrees", [None, 0, 5])
@pytest.mark.parametrize("slowness", [0.0, 0.9])
def test_noise_has_standard_deviation_1(degrees: int | None, slowness: float) -> None:
    random = np.random.default_rng(3)
    assert noise(random, 50_000, degrees, slowness).std() == pytest.approx(1, abs=0.05)
    assert not differs(np.zeros(200))
    assert differs(np.full(200, 2.0))


def log(loss: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    return {"loss": loss, "grad_norm": np.ones(len(loss))}


def test_verdicts_by_what_a_log_shows() -> None:
    a = np.full(40, 3.0)
    wave = 1 + 1.5e-3 * np.resize([1.0, -1.0], 40)
    assert visible_verdicts(log(a), log(a)) == {"identical"}
    assert visible_verdicts(log(a), log(a * 1.0005)) == {"match"}
    assert visible_verdicts(log(a), log(a * wave)) == {"match", "equivalent", "differ"}
    assert visible_verdicts(log(a), log(a * 1.002)) == {"differ"}
    assert visible_verdicts(log(a), log(a * np.nan)) == {"differ"}


def test_answers_of_both_versions_of_the_json() -> None:
    metrics = {"loss": {"bit_identical": True}}
    coming = {
        "verdict": "differ",
        "power": {},
        "causes": [
            {"kind": "optimizer", "confidence": "likely", "step": 81, "evidence": "…"},
            {"kind": "mesh", "confidence": "possible", "step": 81, "evidence": "…"},
        ],
        "metrics": metrics,
    }
    causes = (Cause("optimizer", "likely", 81), Cause("mesh", "possible", 81))
    assert read_answer(coming) == Answer("differ", causes)
    today = {"verdict": "match", "causes": [], "diagnosis": None, "metrics": metrics}
    assert read_answer(today) == Answer("identical", ())
    batch = {"kind": "batch", "step": 1, "text": ""}
    today |= {"verdict": "differ", "diagnosis": batch, "statistics": {}, "causes": ["text"]}
    assert read_answer(today) == Answer("differ", (Cause("batches", "likely", 1),))


def test_published_curves(tmp_path: Path) -> None:
    losses = {str(step): 10 - step / 50 for step in range(5, 105, 5)}
    for device, factor in (("a100", 1.0), ("h100", 1.002)):
        values = {step: loss * factor for step, loss in losses.items()}
        golden = tmp_path / "case" / f"golden_values_dev_dgx_{device}.json"
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(json.dumps({"lm loss": {"step_interval": 5, "values": values}}))
        rows = [f"{step},{loss}" for step, loss in values.items()]
        (tmp_path / "seeds").mkdir(exist_ok=True)
        (tmp_path / "seeds" / f"{device}.csv").write_text("\n".join(["step,loss", *rows]))
    (found,) = compare_golden(tmp_path)
    assert (found.points, found.beyond, found.above) == (20, 20, 20)
    assert found.expected == ("differ",)
    for device in ("a100", "h100"):  # the format until 2024
        golden = tmp_path / "old" / f"golden_values_dev_dgx_{device}.json"
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(
            json.dumps({"lm loss": {"step_interval": 5, "values": [9.0, "nan", 8.0]}})
        )
    found = next(one for one in compare_golden(tmp_path) if one.a.startswith("old"))
    assert (found.points, found.expected) == (2, ("identical",))
    (found,) = compare_seeds(tmp_path / "seeds")
    assert found.points == 20
    assert found.expected == ("differ", "equivalent")


def test_logs_of_the_same_training(trainings: dict[str, Columns]) -> None:
    held = {n: np.array(values) for n, values in trainings["reference"].items()}
    view = View("three", 1)
    for name, expected in (
        ("grad_norm_after_clipping", {"differ"}),
        ("loss_plus_half_percent", {"differ"}),
        ("six_digits_logged", {"match"}),
        ("independent_noise", {"equivalent"}),
        ("lr_one_step_late", {"identical", "match"}),
    ):
        kind = all_kinds()[name]
        a, b = make_logs(kind, EARLY, 1, held, held, view)
        assert expected_verdicts(kind, view, a, b)[0] == expected
    clipping = all_kinds()["grad_norm_after_clipping"]
    pair = make_logs(clipping, EARLY, 1, held, held, View("loss", 1))
    assert expected_verdicts(clipping, View("loss", 1), *pair)[0] == {"identical"}
    counted = make_logs(all_kinds()["steps_from_0"], EARLY, 1, held, held, view)[1]
    assert counted["step"][0] == 0


def test_trainings_are_kept_and_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "STEPS", 40)
    kinds = [all_kinds()[name] for name in ("same_again", "lr_doubled", "grad_norm_squared")]
    wanted = [case for case in store.cases(kinds, 1) if case.since == EARLY]
    assert store.train_missing(tmp_path / "trainings", wanted, 1) == 3
    assert store.train_missing(tmp_path / "trainings", wanted, 1) == 0
    scores = score_all(tmp_path, wanted, 1)
    assert len(scores) == len(wanted) * len(VIEWS)
    for score in scores:
        if score.kind == "same_again":
            assert score.verdict_right
            assert score.verdict == "identical"
            assert not score.asked
        if score.kind == "grad_norm_squared" and score.columns != "loss":
            assert score.expected == ("differ",)
        if score.kind == "lr_doubled" and score.columns == "four" and score.interval == 1:
            assert all((score.verdict_right, score.outright, score.listed, score.step_right))
            assert score.causes == ("lr (certain)",)
    arguments = ["--data", str(tmp_path), "--kinds", "same_again", "--seeds", "1", "--jobs", "1"]
    monkeypatch.setattr("sys.argv", ["departures", *arguments, "--json"])
    command.main()
    found = json.loads(capsys.readouterr().out)
    assert found["figures"]["all"]["verdict_right"] == 1
    monkeypatch.setattr("sys.argv", ["departures", *arguments])
    command.main()
    assert "verdict right" in capsys.readouterr().out
