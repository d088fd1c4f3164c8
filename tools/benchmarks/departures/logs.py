"""What a training writes: columns, intervals, and the changes to a log that are no training's."""

from __future__ import annotations

import csv
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from departures.kinds import Kind
from departures.settings import EARLY
from departures.truth import COLUMN_SETS, ColumnSet, Floats

INTERVALS = (1, 10)
# Relative scatter of loss and gradient norm
_NOISE = {"noise_weak": (2e-4, 2e-3), "noise": (3e-3, 3e-2), "noise_strong": (1e-2, 5e-2)}
_DIGITS = {"six_digits": 6, "four_digits": 4}

Log = dict[str, Floats]  # "step" and the columns. [points] each


@dataclass(frozen=True)
class View:
    """What of a training is logged."""

    columns: ColumnSet
    interval: int

    def select(self, log: Mapping[str, Floats]) -> Log:
        """Returns the columns, at every interval-th step."""
        kept = log["step"] % self.interval == 0
        return {name: log[name][kept] for name in ("step", *COLUMN_SETS[self.columns])}


VIEWS = tuple(View(columns, interval) for columns in COLUMN_SETS for interval in INTERVALS)


def make_logs(
    kind: Kind, since: int, seed: int, reference: Log, other: Log, view: View
) -> tuple[Log, Log]:
    """Returns the logs of reference and changed run, with the kind's change to the latter's log."""
    if kind.log in _NOISE:
        first, second = (
            _with_noise(one, kind, np.random.default_rng([seed, side]))
            for side, one in enumerate((reference, other))
        )
        return view.select(first), view.select(second)
    if kind.log == "means_of_intervals":
        longest = View(view.columns, INTERVALS[-1])
        loss = other["loss"].reshape(-1, INTERVALS[-1]).mean(axis=1).repeat(INTERVALS[-1])
        return view.select(reference), longest.select(other | {"loss": loss})
    changed = change_log(kind.log, other) if kind.log else other
    if since > EARLY and kind.log:
        later = other["step"] >= since
        changed = {name: np.where(later, changed[name], other[name]) for name in other}
    return view.select(reference), view.select(changed)


def change_log(name: str, log: Log) -> Log:
    """Returns a log that shows the same training in another way."""
    loss, norm = log["loss"], log["grad_norm"]
    match name:
        case "grad_norm_after_clipping":
            return log | {"grad_norm": log["grad_norm_clipped"]}
        case "grad_norm_without_embeddings":
            return log | {"grad_norm": log["grad_norm_without_embeddings"]}
        case "grad_norm_squared":
            return log | {"grad_norm": norm**2}
        case "loss_plus_half_percent":
            return log | {"loss": loss * 1.005}
        case "loss_summed_over_ranks":
            return log | {"loss": loss * 2}
        case "loss_of_one_rank":
            return log | {"loss": log["loss_of_rank"]}
        case "loss_in_bits":
            return log | {"loss": loss / np.log(2)}
        case "loss_smoothed":
            smooth = loss.copy()
            for place in range(1, len(loss)):
                smooth[place] = 0.9 * smooth[place - 1] + 0.1 * loss[place]
            return log | {"loss": smooth}
        case "loss_one_step_late":
            return log | {"loss": np.append(loss[:1], loss[:-1])}
        case "lr_one_step_late":
            return log | {"lr": np.append(log["lr"][:1], log["lr"][:-1])}
        case "six_digits" | "four_digits":
            digits = _DIGITS[name]
            rounded = {n: np.array([float(f"{v:.{digits}g}") for v in log[n]]) for n in log}
            return rounded | {"step": log["step"]}
        case "steps_from_0":  # every tenth of these is step 1, 11, … of those from 1
            return log | {"step": log["step"] - 1}
    raise ValueError(f"no change of a log is named {name!r}")


def _with_noise(log: Log, kind: Kind, random: np.random.Generator) -> Log:
    found = dict(log)
    for name, scatter in zip(("loss", "grad_norm"), _NOISE[kind.log], strict=True):
        found[name] = log[name] * (1 + scatter * random.standard_normal(len(log[name])))
    return found


def log_path(folder: Path, name: str) -> Path:
    """Returns where a log is written: as CSV or as JSON lines, by its name."""
    return folder / f"{name}.{'jsonl' if zlib.crc32(name.encode()) % 2 else 'csv'}"


def write_log(log: Log, path: Path) -> None:
    """Write a log as another framework would, without settings."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(log)
    rows = zip(*(log[column].tolist() for column in names), strict=True)
    part = path.with_name(f".{os.getpid()}{path.suffix}")
    with part.open("w", newline="") as file:
        if path.suffix == ".jsonl":
            for step, *values in rows:
                row = {"step": int(step)} | dict(zip(names[1:], values, strict=True))
                file.write(json.dumps(row) + "\n")
        else:
            writer = csv.writer(file)
            writer.writerow(names)
            writer.writerows((int(step), *map(repr, values)) for step, *values in rows)
    part.rename(path)
