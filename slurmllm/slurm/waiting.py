"""Why a job is pending: Slurm's reason, its meaning, the command to type (waiting_reasons.yaml)."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from slurmllm.run.error_patterns import read_rows


@cache
def table() -> list[dict[str, Any]]:
    """Return the rows of waiting_reasons.yaml, in their order."""
    return read_rows(Path(__file__).with_name("waiting_reasons.yaml"))


def explain(reason: str, job_id: str, run: str, stage: str = "train") -> tuple[str, str]:
    """Return the meaning of a reason, empty if it is unknown, and what to do about it."""
    text = reason.replace("_", " ")  # as scontrol writes blanks
    unknown = {"meaning": "", "remedy": "`scontrol show job {job}` shows more"}
    row = next((r for r in table() if re.match(r["reason"], text, re.IGNORECASE)), unknown)
    time = "--time TIME" if stage == "train" else "--set slurm.precompile_time=TIME"
    return row["meaning"], row.get("remedy", "").format(job=job_id, run=run, time=time)
