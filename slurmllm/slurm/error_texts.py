"""The messages of srun, sbatch, slurmd and slurmstepd, and whose fault each is.

error_texts.yaml has a pattern, the fault, the source in Slurm and examples.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

from slurmllm.run.records import Fault, LaunchFailure

_FROM_SLURM = re.compile(r"(?:srun|sbcast|slurmstepd|slurmd)(?:-[\w.-]{1,255})?: ")
_ERROR = re.compile(r"[\w.-]{1,255}: (?:error|fatal): ")
# An option, or the variable that sets it: --mem-per-cpu, SLURM_MEM_PER_CPU.
_OPTION = re.compile(r"--([a-z][a-z-]+)|\b(?:SLURM|SRUN|SBATCH)_([A-Z_]+)")
# srun numbers the tasks of a step, one a node, as its nodes.
_NUMBERED = re.compile(r"task (\d{1,6}) launch failed|(?:to|on|with) node (\d{1,6})\b")
_LINE_CHARS, _ARGUMENT_CHARS = 400, 200


class Row(NamedTuple):
    """One row of the table; the pattern matches each of the `examples`."""

    pattern: re.Pattern[str]
    fault: Fault
    source: str
    examples: tuple[str, ...]
    options: tuple[str, ...] = ()


@cache
def table() -> tuple[Row, ...]:
    """Return the rows of error_texts.yaml."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    rows = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 (both are safe)
    return tuple(Row(**{**row, "pattern": re.compile(row["pattern"])}) for row in rows)


def fault_of(message: str) -> Fault:
    """Return whose fault a message is by the first row that matches; `unknown` if none does."""
    return next((row.fault for row in table() if row.pattern.search(message)), "unknown")


def launch_failure(
    processes: Iterable[subprocess.Popen[bytes]],
    seconds: float,
    lines: Iterable[str],
    nodes: Sequence[str],
) -> LaunchFailure | None:
    """Return how the first of a step's processes failed, after `seconds`; None if none did.

    `lines` are the output of the step. The message that explains most counts, the last one of
    equals: a refusal before what became of the tasks, a node's own before any other.
    """
    failed = next((process for process in processes if process.returncode), None)
    if failed is None:
        return None
    arguments = list(map(str, failed.args)) if isinstance(failed.args, list | tuple) else []
    ranked: list[tuple[int, bool, int, str, Row | None]] = []
    unmatched = next(i for i, row in enumerate(table()) if row.fault == "result")
    for index, line in enumerate(lines):
        text = line.strip()[:_LINE_CHARS]
        if not _FROM_SLURM.match(text):
            continue
        place = next((i for i, row in enumerate(table()) if row.pattern.search(text)), None)
        if place is not None:
            row, named = table()[place], set(_nodes_in(text, nodes))
            ranked.append((place + (place >= unmatched), not named, -index, text, row))
        elif _ERROR.match(text):
            ranked.append((unmatched, True, -index, text, None))
    *_, message, best = min(ranked, default=("", None))
    fault: Fault = "unknown" if best is None else best.fault
    same = [text for *_, text, row in ranked if row is not None and row.fault == fault]
    return LaunchFailure(
        command=shlex.join(a if len(a) <= _ARGUMENT_CHARS else f"{a[:60]}…" for a in arguments),
        exit_code=failed.returncode,
        seconds=round(seconds, 1),
        message=message,
        fault=fault,
        options=tuple(_options_in(message, () if best is None else best.options, arguments)),
        nodes=tuple(dict.fromkeys(name for text in same for name in _nodes_in(text, nodes))),
    )


def _nodes_in(text: str, nodes: Sequence[str]) -> Iterator[str]:
    """Yield those of some nodes that a message names, by their names or by their numbers."""
    for word in re.findall(r"[\w.-]+", text.removeprefix("slurmstepd-")):
        short = word.strip(".-")
        yield from (name for name in (short, short.partition(".")[0]) if name in nodes)
    for numbers in _NUMBERED.findall(text):
        number = int("".join(numbers))
        yield from nodes[number : number + 1]


def _options_in(
    message: str, concerned: Collection[str], arguments: Sequence[str]
) -> Iterator[str]:
    """Yield the options and variables that a refusal is about, as they are set, or by name."""
    words = _OPTION.findall(message)
    names = dict.fromkeys(
        [*(option or variable.lower().replace("_", "-") for option, variable in words), *concerned]
    )
    is_set = [a for a in arguments if a.startswith("--") and a[2:].partition("=")[0] in names]
    variables = [f"SLURM_{name}" for _, name in words if name]
    is_set += [f"{name}={os.environ[name]}" for name in variables if name in os.environ]
    yield from is_set or (f"--{name}" for name in names)
