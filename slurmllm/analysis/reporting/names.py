"""Where a report lies, and what its files are called."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from slurmllm.analysis.reporting.facts import RunFacts

# The Markdown's pictures
CURVES, SCALING, UTILIZATION = "curves", "scaling", "utilization"
_MOST_NAMES = 4
_LONGEST = 40


def default_path(runs: Sequence[RunFacts]) -> Path:
    """`reports/report.html` of the first that is a run, else in this folder.

    Of several runs it is `report-<A>-<B>.html`.
    """
    own = "report"
    if len(runs) > 1:
        parts = [_file_part(facts.name) for facts in runs[:_MOST_NAMES]]
        more = len(runs) - _MOST_NAMES
        own = "-".join([own, *parts, *([f"and-{more}-more"] if more > 0 else [])])
    for facts in runs:
        if facts.kind == "run":
            return facts.path / "reports" / f"{own}.html"
    return Path(f"{own}.html")


def pictures_folder(page: Path) -> Path:
    """Of the Markdown's pictures, beside it."""
    return page.with_name(f"{page.stem}_files")


def scores_name(run: int, suite: str) -> str:
    """Of the picture of what a run scored in a suite; `run` is its place in the report."""
    return f"scores-{run}-{_file_part(suite)}"


def _file_part(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:_LONGEST]
