"""The figures of a benchmark, and the tables that show them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from departures.scoring import Score
from departures.settings import LATE

Row = dict[str, Any]
_WORST = 15


def figures(scores: Sequence[Score]) -> dict[str, Any]:
    """Returns the tables of a benchmark, as JSON holds them."""
    return {
        "all": _row(scores),
        "half": _by(scores, lambda one: one.half),
        "columns": _by(scores, lambda one: one.columns),
        "interval": _by(scores, lambda one: one.interval),
        "start": _by(scores, lambda one: "from the start" if one.since < LATE else "later"),
        "half and columns": _by(scores, lambda one: f"{one.half}, {one.columns}"),
        "group": _by(scores, lambda one: one.group),
        "kind": _by(scores, lambda one: one.kind),
        "verdicts": _confusion(scores),
        "certain_wrong": [
            {"case": one.case, "columns": one.columns, "interval": one.interval,
             "causes": list(one.certain_wrong)}
            for one in scores if one.certain_wrong
        ],
    }  # fmt: skip


def _by(scores: Sequence[Score], key: Callable[[Score], Hashable]) -> dict[str, Row]:
    groups: dict[Hashable, list[Score]] = defaultdict(list)
    for score in scores:
        groups[key(score)].append(score)
    return {str(name): _row(group) for name, group in groups.items()}


def _row(scores: Sequence[Score]) -> Row:
    asked = [one for one in scores if one.asked]

    def share(flags: Sequence[bool]) -> float | None:
        return sum(flags) / len(flags) if flags else None

    return {
        "comparisons": len(scores),
        "borderline": sum(one.borderline for one in scores),
        "verdict_right": share([one.verdict_right for one in scores]),
        "asked": len(asked),
        "outright": share([one.outright for one in asked]),
        "listed": share([one.listed for one in asked]),
        "step_right": share([one.step_right for one in asked]),
        "certain_wrong": sum(bool(one.certain_wrong) for one in scores),
    }


def _confusion(scores: Sequence[Score]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for one in scores:
        found[" or ".join(one.expected)][one.verdict] += 1
    return {name: dict(row) for name, row in found.items()}


def show(found: Mapping[str, Any]) -> str:
    """Returns the tables as Markdown."""
    parts = [_table("all", {"all": found["all"]})]
    for name in ("half", "columns", "interval", "start", "half and columns", "group"):
        parts.append(_table(name, found[name]))
    rows = list(found["kind"].items())
    for title, key in (("verdict", "verdict_right"), ("cause", "outright")):
        known = [(name, row) for name, row in rows if row[key] is not None and row[key] < 1]
        ranked = sorted(known, key=lambda item: item[1][key])[:_WORST]
        if ranked:
            parts.append(_table(f"worst kinds by {title}", dict(ranked)))
    lines = ["| right verdicts | answers |", "|---|---|"]
    for name, answers in sorted(found["verdicts"].items()):
        lines.append(f"| {name} | {', '.join(f'{v} {n}' for v, n in sorted(answers.items()))} |")
    parts.append("\n".join(lines))
    wrong = found["certain_wrong"]
    lines = [f"certain and wrong: {len(wrong)}"]
    lines += [f"- {w['case']}, {w['columns']}, every {w['interval']}: {w['causes']}" for w in wrong]
    parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _table(title: str, rows: Mapping[str, Row]) -> str:
    lines = [
        f"| {title} | comparisons | verdict right | causes due | first cause right "
        "| in the list or unknown | step right too | certain and wrong |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, row in rows.items():
        shares = (row["verdict_right"], row["outright"], row["listed"], row["step_right"])
        texts = ["-" if share is None else f"{100 * share:.1f} %" for share in shares]
        lines.append(
            f"| {name} | {row['comparisons']:,} | {texts[0]} | {row['asked']:,} | {texts[1]} "
            f"| {texts[2]} | {texts[3]} | {row['certain_wrong']} |"
        )
    return "\n".join(lines)
