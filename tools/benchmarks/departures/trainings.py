"""Departures of a small training in numpy, each with its true cause, and what compare answers.

A bigram model (embedding, tanh, softmax) is trained by AdamW on a text of a Markov chain, with
dropout, clipping, warm-up and cosine. B departs in one way: in its log, its settings, or in what a
resume restores. Each pair is compared as two logs, as two runs with a `command` and as two runs of
ours. A cause that is `certain` must be the true one.
"""

from __future__ import annotations

import copy
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from departures.answers import Floats
from slurmllm.analysis.compare.compare import compare
from slurmllm.analysis.compare.result import Comparison
from slurmllm.core.display.tables import markdown_table
from slurmllm.core.metrics.curves import Curve, Setting
from slurmllm.core.metrics.source import read_curve

_VOCABULARY, _WIDTH, _TOKENS = 48, 24, 256
_STEPS, _OLDER, _SAVED, _KILLED = 160, 40, 60, 75
_PEAK, _CLIP = 2e-2, 0.17
Row = dict[str, float]
KINDS = ("log", "command", "ours")


@dataclass(frozen=True)
class Settings:
    """What one training does; `lost`: what its resume does not restore."""

    seed: int = 1
    data_seed: int = 1
    data_from: int = 1  # step from which the data are those of this seed
    weight_decay: float = 0.1
    lr: float = 1.0  # times the peak
    eps: float = 1e-8
    clip: float = 1.0
    dropout: float = 0.05
    smoothing: float = 0.0
    scale: float = 1.0  # of the loss
    noise: float = 0.0  # of gradients, relative: other roundings
    bad_gradient: float = 1.0
    resumes: bool = False
    lost: str = ""


@dataclass(frozen=True)
class Departure:
    """What differs in B, and the kinds that are right as the first cause; none: no difference."""

    name: str
    kinds: tuple[str, ...]
    b: Settings = field(default_factory=Settings)
    log: Callable[[Row], Row] = dict  # a row of B → what B's log has
    recorded: Mapping[str, Setting] = field(default_factory=dict)  # settings of B, of runs of ours
    formats: tuple[str, str] = ("jsonl", "jsonl")


class _Training:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        random = np.random.default_rng(settings.seed)
        self.weights = [
            0.3 * random.standard_normal((_VOCABULARY, _WIDTH)),
            0.3 * random.standard_normal((_WIDTH, _VOCABULARY)),
        ]
        self.moments = [(np.zeros_like(w), np.zeros_like(w)) for w in self.weights]
        self.count = 0
        self.random = np.random.default_rng(100 + settings.seed)
        chain = np.random.default_rng(5).dirichlet(np.full(_VOCABULARY, 0.1), _VOCABULARY)
        self.chain = np.cumsum(chain, axis=1)

    def batch(self, step: int) -> tuple[Any, Any]:
        seed = self.settings.data_seed if step >= self.settings.data_from else 1
        random = np.random.default_rng([seed, step])
        x = random.integers(_VOCABULARY, size=_TOKENS)
        y = (self.chain[x] < random.random((_TOKENS, 1))).sum(axis=1)
        return x, np.minimum(y, _VOCABULARY - 1)

    def step(self, number: int, batch: int) -> Row:
        chosen, (x, y) = self.settings, self.batch(batch)
        embedding, output = self.weights
        hidden = np.tanh(embedding[x])
        mask = (self.random.random(hidden.shape) >= chosen.dropout) / (1 - chosen.dropout)
        logits = (hidden * mask) @ output
        probability = np.exp(logits - logits.max(axis=1, keepdims=True))
        probability /= probability.sum(axis=1, keepdims=True)
        target = np.full_like(probability, chosen.smoothing / _VOCABULARY)
        target[np.arange(_TOKENS), y] += 1 - chosen.smoothing
        loss = -float((target * np.log(probability)).sum(axis=1).mean()) * chosen.scale
        error = (probability - target) / _TOKENS * chosen.scale
        inner = (error @ output.T) * mask * (1 - hidden**2)
        gradients = [np.zeros_like(embedding), (hidden * mask).T @ error]
        np.add.at(gradients[0], x, inner)
        gradients[1] *= chosen.bad_gradient
        for gradient in gradients if chosen.noise else ():
            gradient *= 1 + chosen.noise * np.random.default_rng(number).standard_normal(
                gradient.shape
            )
        norm = float(np.sqrt(sum((g**2).sum() for g in gradients)))
        lr = chosen.lr * _rate(number)
        self.update([g * min(1.0, chosen.clip / norm) for g in gradients], lr)
        parameters = float(np.sqrt(sum((w**2).sum() for w in self.weights)))
        return {
            "step": number,
            "loss": loss,
            "grad_norm": norm,
            "param_norm": parameters,
            "lr": lr,
            "tokens": number * _TOKENS,
        }

    def update(self, gradients: Sequence[Floats], lr: float) -> None:
        self.count += 1
        for weight, gradient, (first, second) in zip(
            self.weights, gradients, self.moments, strict=True
        ):
            first += 0.1 * (gradient - first)
            second += 0.05 * (gradient**2 - second)
            mean = first / (1 - 0.9**self.count)
            deviation = np.sqrt(second / (1 - 0.95**self.count)) + self.settings.eps
            weight -= lr * (mean / deviation + self.settings.weight_decay * weight)


def train(settings: Settings) -> list[Row]:
    """Return the rows of a training; those of a resumed one go back once."""
    training, rows = _Training(settings), list[Row]()
    for number in range(1, _STEPS + 1 if not settings.resumes else _KILLED + 1):
        rows.append(training.step(number, number))
        if number == _OLDER:
            older = [w.copy() for w in training.weights]
        if number == _SAVED:
            saved = copy.deepcopy(training)
    if not settings.resumes:
        return rows
    training, fresh = saved, _Training(settings)
    if settings.lost == "weights":
        training.weights = older
    if settings.lost == "optimizer":
        training.moments, training.count = fresh.moments, 0
    if settings.lost == "random":
        training.random = fresh.random
    offset = {"data": _SAVED, "batches": -3}.get(settings.lost, 0)
    rows += [training.step(n, n - offset) for n in range(_SAVED + 1, _STEPS + 1)]
    return rows


def _rounded(*names: str, digits: int = 3) -> Callable[[Row], Row]:
    return lambda row: row | {name: float(f"{row[name]:.{digits}g}") for name in names}


def _at_step(function: Callable[[float], float]) -> Callable[[Row], Row]:
    return lambda row: row | {"step": function(row["step"])}


def _resumed(lost: str) -> Departure:
    name = f"a resume loses {lost}" if lost else "an exact resume"
    return Departure(name, ("resume",) if lost else (), Settings(resumes=True, lost=lost))


def _rate(step: float) -> float:
    return _PEAK * max(0.0, min(1.0, step / 20)) * (0.55 + 0.45 * math.cos(step / 60))


_SKIP, _LATER = Settings(data_seed=2), Settings(data_seed=2, data_from=101)
_DATA = ("batches", "data", "seed")
_OWN: dict[str, Setting] = {"train.seed": 1, "optim.lr": _PEAK, "train.precision": "fp32"}


def _later(name: str, log: Callable[[Row], Row]) -> Departure:
    return Departure(f"{name}, later other data", _DATA, _LATER, log)


DEPARTURES = (
    Departure("the same", ()),
    Departure("lr rounded to 3 digits", (), log=_rounded("lr")),
    Departure("lr rounded, text", (), log=_rounded("lr"), formats=("jsonl", "log")),
    Departure("lr in bf16", (), log=lambda row: row | {"lr": _to_bf16(row["lr"])}),
    Departure("tokens rounded to 2 digits", (), log=_rounded("tokens", digits=2)),
    Departure("tokens from 0", (), log=lambda r: r | {"tokens": r["tokens"] - _TOKENS}),
    Departure("all of 4 digits", (), log=_rounded("loss", "grad_norm", "lr", digits=4)),
    Departure("steps from 6", (), log=_at_step(lambda step: step + 5)),
    Departure("steps times 4", ("logging",), log=_at_step(lambda step: 4 * step)),
    Departure(
        "steps times 4, other data",
        ("batches", "data", "seed", "logging", "unknown"),
        _SKIP,
        _at_step(lambda step: 4 * step),
    ),
    Departure("lr rounded, other data", _DATA, _SKIP, _rounded("lr")),
    Departure("tokens rounded, other data", _DATA, _SKIP, _rounded("tokens", digits=2)),
    Departure(
        "norm logged after clipping",
        ("logging",),
        Settings(),
        lambda row: row | {"grad_norm": min(row["grad_norm"], _CLIP)},
    ),
    Departure("loss logged times 2", ("logging",), log=lambda r: r | {"loss": 2 * r["loss"]}),
    Departure("loss times 2, another seed", ("logging", "model"), Settings(seed=2, scale=2.0)),
    Departure("no weight decay", ("optimizer",), Settings(weight_decay=0.0)),
    Departure("weight decay doubled", ("optimizer",), Settings(weight_decay=0.2)),
    _later("lr logged halved from step 10", lambda r: r | {"lr": r["lr"] / (1 + (r["step"] > 9))}),
    Departure("lr logged halved", (), log=lambda r: r | {"lr": r["lr"] / 2}),
    _later("lr logged halved", lambda r: r | {"lr": r["lr"] / 2}),
    _later("lr 5 steps late in the log", lambda r: r | {"lr": _rate(r["step"] - 5)}),
    _later("tokens halved in the log", lambda r: r | {"tokens": r["tokens"] / 2}),
    _later("lr rounded", _rounded("lr")),
    Departure("clip", (), Settings(clip=_CLIP)),
    Departure("eps 1e-4", ("optimizer",), Settings(eps=1e-4)),
    Departure("lr halved", ("lr",), Settings(lr=0.5), recorded={"optim.lr": 0.5 * _PEAK}),
    Departure("a gradient 1.05 times", ("gradient",), Settings(bad_gradient=1.05)),
    Departure("other roundings", (), Settings(noise=1e-7)),
    Departure("another seed", ("seed",), Settings(seed=2, data_seed=2), recorded={"train.seed": 2}),
    Departure("another order of data", _DATA, _SKIP),
    Departure(
        "smoothed labels, another seed", ("seed",), Settings(seed=2, data_seed=2, smoothing=0.1)
    ),
    *(_resumed(lost) for lost in ("", "optimizer", "random", "data", "batches", "weights")),
)


def _to_bf16(value: float) -> float:
    bits = np.array([value], dtype=np.float32).view(np.uint32) + np.uint32(0x8000)
    return float((bits & np.uint32(0xFFFF0000)).view(np.float32)[0])


def _write(path: Path, rows: Sequence[Row]) -> None:
    lines = [json.dumps(row) for row in rows]
    if path.suffix == ".log":
        lines = [
            f"step {row['step']:.0f} loss {row['loss']:.6f} grad_norm {row['grad_norm']:.6f} "
            f"lr {row['lr']:.3e}"
            for row in rows
        ]
    path.write_text("\n".join(lines) + "\n")


def answer(departure: Departure, kind: str, columns: Sequence[str], folder: Path) -> Comparison:
    """Compare a departure with the reference, as two logs or runs that have some columns."""
    curves = list[Curve]()
    for name, settings, log, suffix in (
        ("a", Settings(), dict, departure.formats[0]),
        ("b", departure.b, departure.log, departure.formats[1]),
    ):
        path = folder / f"{name}.{suffix}"
        rows = [{c: row[c] for c in ("step", *columns)} for row in map(log, train(settings))]
        _write(path, rows)
        curve = read_curve(path)
        if kind == "command":
            command = {"command.run": f"python {name}.py"}
            curve = replace(curve, kind="run", settings=command)
        elif kind == "ours":
            extra = departure.recorded if name == "b" else {}
            curve = replace(curve, kind="run", settings={**_OWN, **extra})
        curves.append(curve)
    return compare(curves[0], curves[1])


def judge(departure: Departure, comparison: Comparison) -> tuple[str, str]:
    """Return the first cause, and whether it is right."""
    first = next(iter(comparison.causes), None)
    certain = {cause.kind for cause in comparison.causes if cause.confidence == "certain"}
    # Trainings of other seeds and data may be equivalent.
    named = first is not None and (comparison.verdict == "differ" or bool(departure.kinds))
    right = (first.kind if first and named else "") in (departure.kinds or ("",))
    shown = f"{first.kind} ({first.confidence})" if first and named else "-"
    if certain - set(departure.kinds):
        return shown, "CERTAIN AND WRONG"
    return shown, "right" if right else "wrong"


def measure() -> list[tuple[str, ...]]:
    """Return a row for each departure, kind of run and set of columns."""
    rows = list[tuple[str, ...]]()
    with tempfile.TemporaryDirectory() as folder:
        for departure in DEPARTURES:
            for kind in KINDS:
                columns: tuple[str, ...] = ("loss", "grad_norm", "lr", "tokens")
                comparison = answer(departure, kind, columns, Path(folder))
                shown, mark = judge(departure, comparison)
                expected = " or ".join(departure.kinds) or "-"
                rows.append((departure.name, kind, expected, comparison.verdict, shown, mark))
    return rows


def show(rows: Sequence[tuple[str, ...]]) -> str:
    headings = ("departure", "as", "first cause due", "verdict", "first cause", "")
    right = sum(row[-1] == "right" for row in rows)
    certain = sum(row[-1] == "CERTAIN AND WRONG" for row in rows)
    return (
        f"{markdown_table(headings, rows)}\n{right} of {len(rows)} right, {certain} certain and "
        "wrong"
    )
