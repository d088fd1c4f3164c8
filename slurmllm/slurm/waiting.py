"""Why a job is pending: Slurm's reason, its meaning, and the command to type.

waiting_reasons.yaml is the table.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

_UNKNOWN = ("", "`scontrol show job {job}` shows more")


class WaitingReason(NamedTuple):
    """One row of the table; without a remedy the wait ends by itself."""

    reason: str  # pattern of the beginning of Slurm's text
    meaning: str
    remedy: str = ""


@cache
def table() -> tuple[WaitingReason, ...]:
    text = Path(__file__).with_name("waiting_reasons.yaml").read_text("utf-8")
    return tuple(WaitingReason(**row) for row in yaml.safe_load(text))


def explain(reason: str, job_id: str, run: str, stage: str = "train") -> tuple[str, str]:
    """Return the meaning of a reason, empty if it is unknown, and what to do about it."""
    text = reason.replace("_", " ")  # as scontrol writes blanks
    rows = (row for row in table() if re.match(row.reason, text, re.IGNORECASE))
    _, meaning, remedy = next(rows, ("", *_UNKNOWN))
    time = "--time TIME" if stage == "train" else "--set slurm.precompile_time=TIME"
    return meaning, remedy.format(job=job_id, run=run, time=time)
