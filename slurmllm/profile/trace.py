"""Reads the traces of torch.profiler and divides the time of the profiled steps into parts.

Every instant of the steps belongs to one part. On CPU and Neuron devices the host's main thread is
divided, in this order:

1. in a collective's own call: `communication`;
2. in an operation: the part in which the training loop runs it, such as `forward`;
3. in no operation while a collective runs in another thread: `communication`;
4. else the part of the loop, or `other` outside of all of them (logging, checkpoints).

On CUDA, where the host only enqueues work, the device is divided: a kernel belongs to the part that
launched it; NCCL's kernels, while no other runs, are `communication`; an idle device is `waiting`,
or `data` while the host fetches data.

An evaluation after a profiled step is no part of it: its time is taken out, and given by itself.

The format is Chrome's trace event format, times in µs, as kineto writes it (torch 2.9 and 2.13).
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import model_validator

from slurmllm.errors import StorageError
from slurmllm.run.records import Record
from slurmllm.run.safe_files import open_regular

PARTS = ("data", "forward", "backward", "communication", "optimizer", "waiting", "other")
PREFIX = "slurmllm."  # of the names of our annotations
STEP = f"{PREFIX}step "  # followed by the number
EVALUATION = "evaluation"

_CHUNK = 1 << 20  # characters read at a time
_LONGEST_EVENT = 1 << 22
_LARGEST_TRACE = 1 << 34  # characters; a compressed file may be endless
_GAP_US = 20.0  # collectives closer than this are one interval
_OPERATIONS = 50  # the longest, kept in the record
_BASE_TIME = re.compile(r'"baseTimeNanoseconds":\s*(\d{1,20})')
_COLLECTIVE = re.compile(r"^(c10d::|c10d_functional::|_c10d_functional::|gloo:|nccl)|ncclDevKernel")
# Host events that last while their callees run, and are no computation of their own.
_FRAME = re.compile(r"^(autograd::engine::|PythonSubclass|CompiledFunction|Torch-Compiled)")
_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCH = frozenset({"cuda_runtime", "cuda_driver"})


class Interval(NamedTuple):
    """A named interval of time in a trace."""

    start: float  # µs
    end: float
    name: str


class Operation(Record):
    """An operation or kernel; self time excludes what it calls."""

    name: str
    self_s: float  # a step
    calls: int  # in all profiled steps


class RankProfile(Record):
    """`profiles/attempt_NNN/rank_RRRRR.json`: the profiled steps of one worker."""

    rank: int
    node: str = ""
    first_step: int
    last_step: int
    step_s: float  # mean, without evaluations
    parts: dict[str, float]  # seconds a step; their sum is `step_s`
    operations: tuple[Operation, ...]  # longest self time first
    evaluation_s: float = 0.0  # of all evaluations after these steps
    device: bool  # the parts are those of a device, not of the host
    # Unix time, µs: start and end of the profiled steps; the intervals in any collective, and of
    # them those in which the worker computes nothing.
    window: tuple[int, int]
    collectives: tuple[tuple[int, int], ...]
    exposed: tuple[tuple[int, int], ...]
    peak_bytes: int | None = None  # allocated in the profiled steps; with profile.memory, on CPUs

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if set(self.parts) != set(PARTS) or not 0 < self.step_s < 1e9 or self.num_steps < 1:
            raise ValueError("not the parts of a profiled step")
        return self

    @property
    def num_steps(self) -> int:
        return self.last_step - self.first_step + 1


def summarize(path: Path, rank: int, node: str = "") -> RankProfile:
    """Summarize a worker's trace; StorageError if it cannot be read or has no profiled step."""
    try:
        return _divide(_collect(path), path, rank, node)
    except (ValueError, OverflowError) as error:  # numbers that no profiler writes
        raise _damaged(path, str(error).partition("\n")[0]) from error


def _divide(events: _Events, path: Path, rank: int, node: str) -> RankProfile:
    steps = sorted(one for one in events.annotations if one.name.startswith(STEP))
    if not steps:
        raise StorageError(
            f"{path} has no profiled step; profile again: `slurmllm resume RUN --set "
            "'profile.steps=[FIRST, LAST]'`"
        )
    numbers = [int(one.name.removeprefix(STEP)) for one in steps]
    whole = Interval(steps[0].start, max(one.end for one in steps), "other")
    evaluations, window = take([whole], _take_out_evaluations(events))
    parts = _innermost(
        one._replace(name=one.name.removeprefix(PREFIX))
        for one in events.annotations
        if not one.name.startswith(STEP)
    )
    own = _innermost(events.main_thread)
    if events.kernels:
        layers, longest = _device_layers(events, parts), _total(events.kernels)
        collectives = [one for one in events.kernels if _COLLECTIVE.search(one.name)]
    else:
        layers, longest = _host_layers(events, own, parts), _total(own)
        calls = [one for one in own if _COLLECTIVE.search(one.name)]
        collectives = [*calls, *events.collectives]
    seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    free, exposed = window, []
    for layer in [*layers, window]:
        taken, free = take(free, layer)
        for one in taken:
            part = one.name if one.name in seconds else "other"
            seconds[part] += (one.end - one.start) / 1e6 / len(steps)
            if part == "communication":
                exposed.append(one)
    inside, _ = take(window, disjoint(collectives))
    return RankProfile(
        rank=rank, node=node, first_step=numbers[0], last_step=numbers[-1],
        step_s=sum(seconds.values()), parts=seconds, device=bool(events.kernels),
        evaluation_s=_total(evaluations)[EVALUATION] / 1e6,
        operations=tuple(
            Operation(name=name, self_s=us / 1e6 / len(steps), calls=events.calls[name])
            for name, us in longest.most_common(_OPERATIONS)
        ),
        window=_absolute([whole], events.base_us)[0],
        collectives=_absolute(inside, events.base_us), exposed=_absolute(exposed, events.base_us),
        peak_bytes=events.peak_bytes,
    )  # fmt: skip


def _take_out_evaluations(events: _Events) -> list[Interval]:
    """Remove what ran in evaluations; returns their intervals.

    A device has none of an evaluation's work before it begins, and none when it has its losses.
    """
    name = f"{PREFIX}{EVALUATION}"
    found = [one._replace(name=EVALUATION) for one in events.annotations if one.name == name]
    found = disjoint(found)

    def outside(intervals: list[Interval]) -> list[Interval]:
        kept = []
        for one in intervals:
            place = bisect_right(found, one.start, key=lambda other: other.start) - 1
            if place < 0 or found[place].end <= one.start:
                kept.append(one)
            else:
                events.calls[one.name] -= 1
        return kept

    if found:
        events.main_thread = outside(events.main_thread)
        events.kernels = outside(events.kernels)
    return found


class _Events:
    """The events of a trace that the parts depend on."""

    def __init__(self) -> None:
        self.base_us = 0.0  # Unix time of the trace's time 0
        self.annotations: list[Interval] = []  # ours
        self.main_thread: list[Interval] = []  # other events of the thread with our annotations
        self.collectives: list[Interval] = []  # of any thread, as gloo reports them
        self.kernels: list[Interval] = []
        self.launches: dict[Interval, float] = {}  # kernel → when the host launched it
        self.calls: Counter[str] = Counter()
        self.peak_bytes: int | None = None


def _collect(path: Path) -> _Events:
    found, threads = _Events(), defaultdict[str, list[Interval]](list)
    main = ""
    correlations: dict[Interval, str] = {}
    launched: dict[str, float] = {}
    for event in _read(path, found):
        try:
            arguments = event.get("args") or {}
            if event.get("name") == "[memory]":
                total = int(arguments.get("Total Allocated", 0))
                found.peak_bytes = max(found.peak_bytes or 0, total)
                continue
            if event.get("ph") != "X":
                continue
            start, kind, name = float(event["ts"]), event.get("cat"), str(event["name"])
            interval = Interval(start, start + float(event["dur"]), name)
            thread = f"{event.get('pid')} {event.get('tid')}"
            if kind in _DEVICE:
                found.kernels.append(interval)
                correlations[interval] = str(arguments.get("correlation"))
            elif kind in _LAUNCH:
                launched[str(arguments.get("correlation"))] = start
                continue
            elif kind not in ("cpu_op", "user_annotation"):
                continue
            elif name.startswith(PREFIX):
                found.annotations.append(interval)
                main = thread
                continue
            elif name.startswith("gloo:"):
                found.collectives.append(interval)
                continue
            else:
                threads[thread].append(interval)
            found.calls[name] += 1
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise _damaged(path, f"event {event!r:.100}") from error
    found.main_thread = threads[main]
    found.launches = {
        kernel: launched[number] for kernel, number in correlations.items() if number in launched
    }
    return found


def _read(path: Path, found: _Events) -> Iterator[dict[str, Any]]:
    """Yield the events one by one: a trace of some 100 MB would be several GB in memory."""
    decoder, text, place, size = json.JSONDecoder(), "", -1, 0
    try:
        with (
            open_regular(path) as raw,
            gzip.open(raw, "rt", encoding="utf-8", errors="replace") as stream,
        ):
            while True:
                chunk = stream.read(_CHUNK)
                size += len(chunk)
                text += chunk
                if place < 0 and (begin := text.find('"traceEvents"')) >= 0:
                    if base := _BASE_TIME.search(text[:begin]):
                        found.base_us = int(base.group(1)) / 1e3
                    place = text.find("[", begin) + 1 or -1
                while place >= 0:
                    while place < len(text) and text[place] in ", \t\r\n":
                        place += 1
                    if text[place : place + 1] == "]":
                        return
                    try:
                        event, place = decoder.raw_decode(text, place)
                    except ValueError:
                        break  # incomplete: more is needed
                    if not isinstance(event, dict):
                        raise _damaged(path, f"event {event!r:.100}")
                    yield event
                if not chunk:
                    raise _damaged(path, "it ends before its last event")
                if place >= 0:
                    text, place = text[place:], 0
                if len(text) > _CHUNK + _LONGEST_EVENT or size > _LARGEST_TRACE:
                    raise _damaged(path, "it is not a trace of torch.profiler")
    except (OSError, EOFError, zlib.error, RecursionError) as error:
        raise _damaged(path, str(error) or type(error).__name__) from error


def _damaged(path: Path, reason: str) -> StorageError:
    return StorageError(f"{path} is damaged: {reason}; remove it, or profile again")


def _host_layers(
    events: _Events, own: list[Interval], parts: list[Interval]
) -> list[list[Interval]]:
    calls, work = [], []
    for one in own:
        if _COLLECTIVE.search(one.name):
            calls.append(one._replace(name="communication"))
        elif one.name.startswith("## Call") or ("::" in one.name and not _FRAME.match(one.name)):
            work.append(one)
    computed, _ = take(parts, work, keep=True)
    running = [one._replace(name="communication") for one in disjoint(events.collectives)]
    return [calls, computed, running, parts]


def _device_layers(events: _Events, parts: list[Interval]) -> list[list[Interval]]:
    kernels, collectives = [], []
    launch_times = sorted((at, kernel) for kernel, at in events.launches.items())
    part_of, index = {}, 0
    for at, kernel in launch_times:
        while index < len(parts) and parts[index].end <= at:
            index += 1
        if index < len(parts) and parts[index].start <= at:
            part_of[kernel] = parts[index].name
    for one in events.kernels:
        if _COLLECTIVE.search(one.name):
            collectives.append(one._replace(name="communication"))
        else:
            kernels.append(one._replace(name=part_of.get(one, "other")))
    data = [one for one in parts if one.name == "data"]
    idle = [Interval(float("-inf"), float("inf"), "waiting")]
    return [disjoint(kernels), disjoint(collectives), data, idle]


def _innermost(intervals: Iterable[Interval]) -> list[Interval]:
    """Divide nested intervals of one thread into disjoint ones, each of the innermost's name."""
    found: list[Interval] = []
    stack: list[Interval] = []
    at = 0.0

    def advance(to: float) -> None:
        nonlocal at
        if stack and to > at:
            found.append(Interval(at, to, stack[-1].name))
        at = max(at, to)

    for one in sorted(intervals, key=lambda one: (one.start, -one.end)):
        while stack and stack[-1].end <= one.start:
            advance(stack[-1].end)
            stack.pop()
        advance(one.start)
        # Times are rounded: a callee may seem to end later than its caller.
        stack.append(one._replace(end=min(one.end, stack[-1].end)) if stack else one)
    while stack:
        advance(stack[-1].end)
        stack.pop()
    return found


def disjoint(intervals: Iterable[Interval]) -> list[Interval]:
    """Remove overlaps: the interval that begins first has the common time."""
    found: list[Interval] = []
    for one in sorted(intervals):
        start = max(one.start, found[-1].end) if found else one.start
        if one.end > start:
            found.append(one._replace(start=start))
    return found


def take(
    free: list[Interval], layer: list[Interval], *, keep: bool = False
) -> tuple[list[Interval], list[Interval]]:
    """Return the intersections with `layer`, and what of `free` is left; both are disjoint, sorted.

    The intersections have the names of `layer`; with `keep`, those of `free`.
    """
    taken, left, index = [], [], 0
    for one in free:
        at = one.start
        while index < len(layer) and layer[index].end <= at:
            index += 1
        place = index
        while place < len(layer) and layer[place].start < one.end:
            other = layer[place]
            start, end = max(at, other.start), min(one.end, other.end)
            if start > at:
                left.append(one._replace(start=at, end=start))
            if end > start:
                taken.append(Interval(start, end, one.name if keep else other.name))
            at = max(at, end)
            place += 1
        if at < one.end:
            left.append(one._replace(start=at))
    return taken, left


def _total(intervals: Iterable[Interval]) -> Counter[str]:
    found: Counter[str] = Counter()
    for one in intervals:
        found[one.name] += one.end - one.start  # type: ignore[assignment]  # µs
    return found


def _absolute(intervals: Iterable[Interval], base_us: float) -> tuple[tuple[int, int], ...]:
    """Merge intervals that nearly touch; Unix time, µs."""
    found: list[tuple[float, float]] = []
    for start, end, _ in sorted(intervals):
        if found and start <= found[-1][1] + _GAP_US:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return tuple((round(start + base_us), round(end + base_us)) for start, end in found)
