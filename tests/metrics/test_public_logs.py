"""Public training logs, value by value against a parser of their own.

The logs are not part of the project: `$SLURMLLM_PUBLIC_LOGS` is a folder with them and `logs.tsv`,
a line for each: file, parser (a name of `PARSERS`, or a regular expression of step and loss) and
tags of `--tag`.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from slurmllm.metrics.source import read_curve
from slurmllm.metrics.tags import parse_tags

Points = dict[int, float]
FOLDER = Path(os.environ.get("SLURMLLM_PUBLIC_LOGS", "no public logs"))
LIST = FOLDER / "logs.tsv"
ROWS = [line.split("\t") for line in LIST.read_text().splitlines()] if LIST.is_file() else []


def by_pattern(path: Path, pattern: str) -> Points:
    lines = path.read_text(errors="replace").splitlines()
    matches = [match for line in lines if (match := re.search(pattern, line))]
    return {int(match["step"]): float(match["loss"]) for match in matches}


def by_rows(step: str, loss: str) -> Callable[[Path], Points]:
    def parse(path: Path) -> Points:
        rows = map(json.loads, path.read_text().splitlines())
        return {int(str(r[step]).split("/")[0]): float(r[loss]) for r in rows if r.get(loss)}

    return parse


def by_table(step: str, loss: str) -> Callable[[Path], Points]:
    def parse(path: Path) -> Points:
        with path.open() as stream:
            return {int(r[step]): float(r[loss]) for r in csv.DictReader(stream) if r[loss]}

    return parse


def trainer_state(path: Path) -> Points:
    history = json.loads(path.read_text())["log_history"]
    return {row["step"]: row["loss"] for row in history if "loss" in row}


def golden_values(path: Path) -> Points:
    document = json.loads(path.read_text())
    if "lm loss" in document:
        return {int(step): value for step, value in document["lm loss"]["values"].items()}
    return {int(step): row["lm loss"] for step, row in document.items() if step.isdigit()}


def composer(path: Path) -> Points:
    points, step = Points(), 0
    for line in path.read_text().splitlines():
        if match := re.search(r"\[batch=(\d+)/", line):
            step = int(match[1])
        if match := re.search(r"Train loss/train/total: ([\d.]+)", line):
            points[step] = float(match[1])
    return points


PARSERS: dict[str, Callable[[Path], Points]] = {
    "trainer_state": trainer_state,
    "golden_values": golden_values,
    "composer": composer,
    "ms-swift": by_rows("global_step/max_steps", "loss"),
    "LLaMA-Factory": by_rows("current_steps", "loss"),
    "Detectron2": by_rows("iteration", "total_loss"),
    "Lightning": by_table("step", "train_loss_step"),
    "Keras": by_table("epoch", "loss"),
}


@pytest.mark.skipif(not ROWS, reason="no $SLURMLLM_PUBLIC_LOGS")
@pytest.mark.parametrize(("name", "parser", "tags"), ROWS)
def test_a_public_log(name: str, parser: str, tags: str) -> None:
    path = FOLDER / name
    parse = PARSERS.get(parser)
    points = by_pattern(path, parser) if parse is None else parse(path)
    steps, losses = read_curve(path, parse_tags(tags.split(",") if tags else [])).series("loss")
    assert len(points) > 0
    assert steps.tolist() == sorted(points)
    np.testing.assert_array_equal(losses, [points[step] for step in sorted(points)])
