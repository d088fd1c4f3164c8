"""The checks after a run: a name each and, if the check fails, the evidence."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from _chaos.bench import Bench, read_json
from _chaos.plan import EXPECTED
from _chaos.running import Course
from slurmllm.analysis.drill.injector import find_processes
from slurmllm.core.errors import SlurmllmError
from slurmllm.core.run.rundir import RunDir
from slurmllm.train.checkpoint.catalogue import list_checkpoints, verify_entry

Figures = Mapping[int, tuple[Any, ...]]  # step → values that must be equal bit by bit
REPRODUCED = ("loss", "grad_norm", "param_norm", "lr", "tokens")
GONE_S = 30.0  # for Slurm to end the processes of a job
NOTICED_S = 45.0  # until Slurm has recovered from a failure that was undone
# When a step is terminated and a node does not confirm the signal within 10 s, slurmctld repeats it
# after 60 s more (RPC_RETRY_INTERVAL of its agent.c). If the job was requeued meanwhile, the new
# step has the same id and receives it: the workers save and leave.
LATE_SIGNAL_S = 90.0


def figures(run: RunDir) -> tuple[dict[int, tuple[Any, ...]], list[str]]:
    """The last values of each step, and the faults of the metrics."""
    values_of: dict[int, tuple[Any, ...]] = {}
    odd = []
    for path in run.metrics_files():
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                if number < len(lines):  # the last line of an attempt may be cut
                    odd.append(f"{path.name}:{number} is no JSON")
                continue
            values = tuple(row[name] for name in REPRODUCED)
            if values_of.setdefault(row["step"], values) != values:
                odd.append(f"step {row['step']} of {path.name} differs from an earlier attempt's")
            values_of[row["step"]] = values
    return values_of, odd


def check(bench: Bench, run: RunDir, course: Course, reference: Figures) -> dict[str, str]:
    """All checks: name → fault, empty if it passes."""

    def steps() -> str:
        got, odd = figures(run)
        expected = set(range(1, bench.setup.steps + 1))
        if got.keys() != expected:
            odd.append(f"steps missing or too many: {sorted(got.keys() ^ expected)[:8]}")
        return "; ".join(odd[:3])

    def losses() -> str:
        got, _ = figures(run)
        differing = sorted(step for step in reference if got.get(step) != reference[step])
        if not differing:
            return ""
        step = differing[0]
        return f"{len(differing)} steps, the first {step}: {got.get(step)} not {reference[step]}"

    faults = {}
    parts: dict[str, Callable[[], str]] = {
        "run done": lambda: _done(run, course),
        "every step once": steps,
        "same values": losses,
        "no process left": lambda: _processes(run),
        "no partial file": lambda: _partial_files(run),
        "endings named": lambda: _endings(run, course),
    }
    for name, part in parts.items():
        try:
            faults[name] = part()
        except (OSError, SlurmllmError, KeyError, ValueError) as error:
            faults[name] = f"{type(error).__name__}: {error}"
    return faults


def _done(run: RunDir, course: Course) -> str:
    last = records(run)[-1:]
    if course.ended == "finished" and last and last[0].get("class") == "done":
        return ""
    how = f"{last[0].get('class')}: {'; '.join(last[0].get('evidence', ()))}" if last else "none"
    return f"{course.ended} after {course.seconds:.0f} s; last attempt {how}"


def _processes(run: RunDir) -> str:
    deadline = time.monotonic() + GONE_S
    while left := find_processes(run):
        if time.monotonic() > deadline:
            return "; ".join(f"{process.pid}: {' '.join(process.command)}" for process in left[:4])
        time.sleep(0.2)
    return ""


def _partial_files(run: RunDir) -> str:
    odd = [
        str(path.relative_to(run.path))
        for path in run.path.rglob("*")
        if path.name.endswith((".tmp", ".replaced", ".part"))
    ]
    for path in run.path.rglob("*.json"):
        if read_json(path) is None:
            odd.append(f"{path.relative_to(run.path)} is no JSON")
    for entry in list_checkpoints(run):
        if faults := verify_entry(entry).faults:
            odd.append(f"{entry.directory.name}: {faults[0]}")
    if not run.checkpoint_steps():
        odd.append("no checkpoint")
    open_records = [r["attempt"] for r in records(run) if r.get("ended_at") is None]
    if open_records:
        odd.append(f"attempts left open: {open_records}")
    return "; ".join(odd[:4])


def records(run: RunDir) -> list[dict[str, Any]]:
    contents = (read_json(attempt.record) for attempt in run.attempts("train"))
    return [record for record in contents if record is not None]


def hits(course: Course) -> dict[int, list[str]]:
    """The kinds of failure that hit each attempt."""
    kinds: dict[int, list[str]] = {}
    for injected in course.injected:
        if injected.happened:
            kinds.setdefault(injected.attempt, []).append(injected.failure.kind)
    return kinds


def _endings(run: RunDir, course: Course) -> str:
    """An attempt may fail only after a failure, and in a class that this one allows."""
    odd: list[str] = []
    broken_at = -math.inf  # end of the last attempt whose step was terminated
    jumped = any(i.happened and i.failure.kind == "clock_jump" for i in course.injected)
    for record in records(run):
        number, ending, began = record["attempt"], record.get("class"), record["started_at"]
        kinds = [
            i.failure.kind
            for i in course.injected
            # The times in the records of a node whose clock was wrong say nothing.
            if i.happened
            and (jumped or i.at <= (record.get("ended_at") or math.inf))
            and (jumped or i.attempt == number or began < i.at + i.failure.lasts_s + NOTICED_S)
        ]
        allowed = frozenset({"done"}).union(*(EXPECTED[kind] for kind in kinds))
        ended_at = record.get("ended_at") or began
        repeated = ending == "advance_signal" and ended_at - broken_at < LATE_SIGNAL_S
        if ending in ("node_failure", "hang", "storage_failure"):
            broken_at = ended_at
        if ending not in allowed and not repeated:
            odd.append(f"attempt {number}: {ending} after {', '.join(kinds) or 'nothing'}")
    return "; ".join(odd)
