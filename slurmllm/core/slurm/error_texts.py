"""Messages of srun, sbatch, slurmd and slurmstepd and whose fault each is; why a job is pending.

error_texts.yaml has a pattern, the fault, the source in Slurm and examples; waiting_reasons.yaml
Slurm's reason, its meaning and the command to type.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from slurmllm.core.format import Json, Texts
from slurmllm.core.run.error_patterns import read_rows
from slurmllm.core.run.records import Fault, LaunchFailure

# Lines of Slurm, and of what runs in its tasks before slurmllm
_FROM_SLURM = re.compile(
    r"(?:srun|sbcast|slurmstepd|slurmd)(?:-[\w.-]{1,255})?: |[\w.-]{1,255}: cluster\.setup: line "
    r"|slurmllm: line \d|\S{0,200}python[\d.]*: (?:No module named|can't open file) "
)
# An option, or the variable that sets it: --mem-per-cpu, SLURM_MEM_PER_CPU.
_OPTION = re.compile(r"--([a-z][a-z-]+)|\b(?:SLURM|SRUN|SBATCH)_([A-Z_]+)")
# srun numbers the tasks of a step, one a node, as its nodes.
_NUMBERED = re.compile(r"task (\d{1,6}) launch failed|(?:to|on|with) node (\d{1,6})\b")
StopCheck = Callable[[], bool]  # whether to end what is under way
ChildProcess = subprocess.Popen[bytes]
Command = Sequence[str]  # a program and its arguments
Processes = Sequence[ChildProcess]  # srun's, or with --local one a node


class ErrorText(NamedTuple):
    """One row of the table; the pattern matches each of the `examples`."""

    pattern: re.Pattern[str]
    fault: Fault
    source: str
    examples: Texts
    options: Texts = ()


@cache
def table() -> tuple[ErrorText, ...]:
    return tuple(
        ErrorText(**{**row, "pattern": re.compile(row["pattern"])})
        for row in read_rows(Path(__file__).with_suffix(".yaml"))
    )


def row_of(message: str) -> ErrorText | None:
    return next((row for row in table() if row.pattern.search(message)), None)


def fault_of(message: str) -> Fault:
    row = row_of(message)
    return "unknown" if row is None else row.fault


def launch_failure(
    processes: Processes,
    seconds: float,
    lines: Iterable[str],
    nodes: Sequence[str],
) -> LaunchFailure | None:
    """Return how the first of a step's processes failed, after `seconds`; None if none did.

    `lines` are the output of the step. The message that explains most counts: by its row in the
    table, then one that names a node, an error before a notice, the last one.
    """
    failed = next((process for process in processes if process.returncode), None)
    if failed is None:
        return None
    arguments = list(map(str, failed.args)) if isinstance(failed.args, list | tuple) else []
    messages = []
    for order, line in enumerate(lines):
        error_line = line.strip()[:400]
        row = row_of(error_line) if _FROM_SLURM.match(error_line) else None
        if row is not None:
            names = tuple(_nodes_in(error_line, nodes))
            ended = row.fault == "result"
            priority = (
                ended,
                table().index(row),
                not names,
                not re.match(r"[\w.-]{1,255}: (?:error|fatal): ", error_line),
                # The first task that ended: srun ended the other tasks because of it.
                order if ended else -order,
            )
            messages.append((priority, error_line, row, names))
    _, message, best, _ = min(messages, default=((), "", None, ()))
    fault = "unknown" if best is None else best.fault
    named = [names for *_, row, names in messages if row.fault == fault]
    return LaunchFailure(
        command=shlex.join(a if len(a) <= 200 else f"{a[:60]}…" for a in arguments),
        exit_code=failed.returncode,
        seconds=round(seconds, 1),
        message=message,
        fault=fault,
        options=tuple(_options_in(message, () if best is None else best.options, arguments)),
        nodes=tuple(dict.fromkeys(name for names in named for name in names)),
    )


def _nodes_in(message: str, nodes: Sequence[str]) -> Iterator[str]:
    """Yield those of some nodes that a message names, by their names or by their numbers."""
    for word in re.findall(r"[\w.-]+", message.removeprefix("slurmstepd-")):
        short = word.strip(".-")
        yield from {short, short.partition(".")[0]}.intersection(nodes)
    for number in map(int, filter(None, chain(*_NUMBERED.findall(message)))):
        yield from nodes[number : number + 1]


def _options_in(
    message: str, concerned: Collection[str], arguments: Sequence[str]
) -> Iterator[str]:
    """Yield the options and variables that a refusal is about, as they are set, or by name."""
    words = _OPTION.findall(message)
    names = dict.fromkeys(
        [*(option or variable.lower().replace("_", "-") for option, variable in words), *concerned]
    )
    # Of an option that is there twice srun takes the last; the user's are after slurmllm's.
    last = {a.partition("=")[0].removeprefix("--"): a for a in arguments if a.startswith("--")}
    is_set = [argument for name, argument in reversed(last.items()) if name in names]
    variables = [f"SLURM_{name}" for _, name in words if name]
    is_set += [f"{name}={os.environ[name]}" for name in variables if name in os.environ]
    yield from is_set or (f"--{name}" for name in names)


@cache
def waiting_reasons() -> list[Json]:
    return read_rows(Path(__file__).with_name("waiting_reasons.yaml"))


def explain_waiting(reason: str, job_id: str, run: str, stage: str = "train") -> tuple[str, str]:
    """Return the meaning of a reason, empty if it is unknown, and what to do about it."""
    phrase = reason.replace("_", " ")  # as scontrol writes blanks
    row = next(
        (r for r in waiting_reasons() if re.match(r["reason"], phrase, re.IGNORECASE)),
        {"meaning": "", "remedy": "`scontrol show job {job}` shows more"},
    )
    return row["meaning"], row.get("remedy", "").format(
        job=job_id,
        run=run,
        time="--time TIME" if stage == "train" else "--set slurm.precompile_time=TIME",
    )
