"""The table of docs/any_trainer.md: a row for each trainer, each from one outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _trainers.stages import Outcome

BEGIN, END = "<!-- make trainers: begin -->", "<!-- make trainers: end -->"
_HEAD = (
    "| trainer | version | date | killed at → resumed from | to next step | resumed curve |",
    "|---|---|---|---|---|---|",
)


def row_of(outcome: Outcome) -> str:
    """Return an outcome's row of the table."""
    killed = recovery = "–"
    for result in _drills(outcome):
        if result["recovery"] and result["resume"]:
            resume = result["resume"]
            killed = f"{result['at_step']} → {resume['from_step']} of {outcome.steps}"
            recovery = f"{result['recovery']['total_s']:.0f} s"
    cells = (outcome.title, outcome.version or "–", outcome.date, killed, recovery, _curve(outcome))
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _drills(outcome: Outcome) -> list[dict[str, Any]]:
    return outcome.drill["drills"] if outcome.drill else []


def _curve(outcome: Outcome) -> str:
    """Return how the resumed runs' curves compare with an unbroken run's, and why."""
    reason = f" ({outcome.reason})" if outcome.reason else ""
    if outcome.verdict == "fails":
        faults = "; ".join(fault for result in _drills(outcome) for fault in result["faults"])
        return f"not shown: {outcome.failure or faults}{reason}"
    resumes = [result["resume"] for result in _drills(outcome)]
    texts = [resume["text"] for resume in resumes]
    if not outcome.is_identical and all(r["verdict"] != "differs" for r in resumes):
        assert outcome.compare is not None
        texts.insert(0, outcome.compare["reason"])
    return ", ".join(dict.fromkeys(texts)) + reason


def update_table(page: Path, outcomes: Sequence[Outcome]) -> None:
    """Replace these outcomes' rows of the page, and keep the other rows."""
    before, _, rest = page.read_text("utf-8").partition(BEGIN)
    inside, _, after = rest.partition(END)
    if not after:
        raise SystemExit(f"{page}: the markers {BEGIN!r} and {END!r} are missing")
    rows: Mapping[str, str] = {
        **{line.split("|")[1].strip(): line for line in inside.splitlines() if line[:2] == "| "},
        **{outcome.title: row_of(outcome) for outcome in outcomes},
    }
    ordered = sorted(rows.items(), key=lambda item: item[0].casefold())
    lines = [row for title, row in ordered if title != "trainer"]
    table = "\n".join((BEGIN, "", *_HEAD, *lines, "", END))
    page.write_text(before + table + after, "utf-8")
