"""The results of a suite in files, so that it can end at any time and go on later."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _chaos.bench import Setup
from _chaos.suite import Outcome, summary
from slurmllm.core.display.tables import markdown_table

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Part:
    """Some of the runs of a suite: all have one setup."""

    setup: Setup
    kinds: Sequence[str]  # failures to choose from
    seeds: Sequence[int]

    def title(self) -> str:
        """Such as `native, 4 nodes, 60 steps`."""
        kinds = f", {' '.join(self.kinds)}" if len(self.kinds) < 4 else ""
        return f"{self.setup.backend}, {self.setup.nodes} nodes, {self.setup.steps} steps{kinds}"


class Results:
    """The file of a part: a JSON line for each run that has ended, of whatever seed."""

    def __init__(self, folder: Path, part: Part) -> None:
        self.setup = {
            name: value for name, value in asdict(part.setup).items() if name != "inputs"
        } | {"kinds": list(part.kinds)}
        digest = hashlib.sha256(json.dumps(self.setup, sort_keys=True).encode()).hexdigest()[:8]
        self.path = folder / f"{part.setup.backend}-{part.setup.nodes}-{digest}.jsonl"
        self.title, self.commit = part.title(), commit()

    def done(self) -> tuple[set[int], Counter[str]]:
        """The seeds that have a result of this commit, and the numbers of results of others."""
        rows = read(self.path)
        others = Counter(row["commit"] for row in rows if row["commit"] != self.commit)
        return {row["run"]["seed"] for row in rows if row["commit"] == self.commit}, others

    def append(self, outcome: Outcome) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        row = {"commit": self.commit, "part": self.title, "setup": self.setup}
        whole = not self.path.exists() or self.path.read_bytes()[-1:] in (b"", b"\n")
        with self.path.open("a") as stream:  # after a line that was cut, a new one
            line = json.dumps({**row, "run": asdict(outcome)})
            stream.write(f"{line}\n" if whole else f"\n{line}\n")


def commit() -> str:
    """The commit of the tree; with `+` and a digest of the changes if there are some."""

    def git(*arguments: str) -> bytes:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True).stdout

    changes = git("diff", "HEAD", "--", "slurmllm", "tools", "sbatch")
    head = git("rev-parse", "--short=12", "HEAD").decode().strip() or "unknown"
    return f"{head}+{hashlib.sha256(changes).hexdigest()[:8]}" if changes else head


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; a last one that was cut is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(dict(json.loads(line)))
        except ValueError:
            continue
    return rows


def write_table(folder: Path) -> Path:
    """Write `table.md` and `table.json` over the newest result of each seed of every part."""
    parts, runs = [], []
    for path in sorted(folder.glob("*.jsonl")):
        newest = {row["run"]["seed"]: row for row in read(path)}
        if not newest:
            continue
        rows = list(newest.values())
        part_runs = [row["run"] for row in rows]
        runs += part_runs
        commits = ", ".join(sorted({row["commit"] for row in rows}))
        parts.append({"part": rows[0]["part"], "commits": commits, **summary(part_runs)})
    whole = summary(runs)
    cells = []
    for part in (*parts, {"part": "all", "commits": "", **whole}):
        failed = " ".join(f"seed {seed}" for seed in part["failed"]) or "none"
        counts = (str(part["runs"]), str(part["failures"]))
        cells.append((part["part"], *counts, failed, str(part["median_s"]), part["commits"]))
    headings = ("part", "runs", "failures", "runs that failed a check", "median s", "commits")
    checks = [(name, str(count)) for name, count in whole["checks"].items()]
    classes = [
        (f"`{kind}`", ", ".join(f"{ending} {count}" for ending, count in endings.items()))
        for kind, endings in whole["confusion"].items()
    ]
    for kind, reasons in whole["unsupported"].items():
        why = "; ".join(f"{count} times: {reason}" for reason, count in reasons.items())
        classes.append((f"`{kind}`", f"not possible here, {why}"))
    tables = (
        "# chaos: results\n",
        markdown_table(headings, cells),
        markdown_table(("check", "broken in"), checks),
        markdown_table(("failure", "class of the attempt that it hit"), classes),
    )
    (folder / "table.json").write_text(json.dumps({"parts": parts, "all": whole}, indent=2) + "\n")
    table = folder / "table.md"
    table.write_text("\n".join(tables))
    return table
