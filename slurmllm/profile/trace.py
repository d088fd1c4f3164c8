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
    """Return a summary of a worker's trace; raise StorageError if it has no profiled step."""
    try:
        return _divide(_collect(path), path, rank, node)
    except (ValueError, OverflowError) as error:  # numbers that no profiler writes
        raise _damaged(path, str(error).partition("\n")[0]) from error


def _divide(events: _Events, path: Path, rank: int, node: str) -> RankProfile:
    steps = sorted(event for event in events.annotations if event.name.startswith(STEP))
    if not steps:
        raise StorageError(
            f"{path} has no profiled step; profile again: `slurmllm resume RUN --set "
            "'profile.steps=[FIRST, LAST]'`"
        )
    numbers = [int(step.name.removeprefix(STEP)) for step in steps]
    whole = Interval(steps[0].start, max(step.end for step in steps), "other")
    evaluations, window = take([whole], _take_out_evaluations(events))
    parts = _innermost(
        event._replace(name=event.name.removeprefix(PREFIX))
        for event in events.annotations
        if not event.name.startswith(STEP)
    )
    host = _innermost(events.main_thread)
    if events.kernels:
        layers, longest = _device_layers(events, parts), _total(events.kernels)
        collectives = [kernel for kernel in events.kernels if _COLLECTIVE.search(kernel.name)]
    else:
        layers, longest = _host_layers(events, host, parts), _total(host)
        calls = [call for call in host if _COLLECTIVE.search(call.name)]
        collectives = [*calls, *events.collectives]
    seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    free, exposed = window, []
    for layer in [*layers, window]:
        taken, free = take(free, layer)
        for interval in taken:
            part = interval.name if interval.name in seconds else "other"
            seconds[part] += (interval.end - interval.start) / 1e6 / len(steps)
            if part == "communication":
                exposed.append(interval)
    inside, _ = take(window, disjoint(collectives))
    return RankProfile(
        rank=rank,
        node=node,
        first_step=numbers[0],
        last_step=numbers[-1],
        step_s=sum(seconds.values()),
        parts=seconds,
        device=bool(events.kernels),
        evaluation_s=_total(evaluations)[EVALUATION] / 1e6,
        operations=tuple(
            Operation(name=name, self_s=us / 1e6 / len(steps), calls=events.calls[name])
            for name, us in longest.most_common(_OPERATIONS)
        ),
        window=_absolute([whole], events.base_us)[0],
        collectives=_absolute(inside, events.base_us),
        exposed=_absolute(exposed, events.base_us),
        peak_bytes=events.peak_bytes,
    )


def _take_out_evaluations(events: _Events) -> list[Interval]:
    """Remove what ran in evaluations, and return their intervals.

    A device has none of an evaluation's work before it begins, and none when it has its losses.
    """
    name = f"{PREFIX}{EVALUATION}"
    evaluations = disjoint(
        event._replace(name=EVALUATION) for event in events.annotations if event.name == name
    )

    def outside(intervals: list[Interval]) -> list[Interval]:
        rest = []
        for interval in intervals:
            place = bisect_right(evaluations, interval.start, key=lambda e: e.start) - 1
            if place < 0 or evaluations[place].end <= interval.start:
                rest.append(interval)
            else:
                events.calls[interval.name] -= 1
        return rest

    if evaluations:
        events.main_thread = outside(events.main_thread)
        events.kernels = outside(events.kernels)
    return evaluations


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
    events, threads = _Events(), defaultdict[str, list[Interval]](list)
    main = ""
    correlations: dict[Interval, str] = {}
    launched: dict[str, float] = {}
    for event in _read(path, events):
        try:
            arguments = event.get("args") or {}
            if event.get("name") == "[memory]":
                total = int(arguments.get("Total Allocated", 0))
                events.peak_bytes = max(events.peak_bytes or 0, total)
                continue
            if event.get("ph") != "X":
                continue
            start, kind, name = float(event["ts"]), event.get("cat"), str(event["name"])
            interval = Interval(start, start + float(event["dur"]), name)
            thread = f"{event.get('pid')} {event.get('tid')}"
            if kind in _DEVICE:
                events.kernels.append(interval)
                correlations[interval] = str(arguments.get("correlation"))
            elif kind in _LAUNCH:
                launched[str(arguments.get("correlation"))] = start
                continue
            elif kind not in ("cpu_op", "user_annotation"):
                continue
            elif name.startswith(PREFIX):
                events.annotations.append(interval)
                main = thread
                continue
            elif name.startswith("gloo:"):
                events.collectives.append(interval)
                continue
            else:
                threads[thread].append(interval)
            events.calls[name] += 1
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise _damaged(path, f"event {event!r:.100}") from error
    events.main_thread = threads[main]
    events.launches = {
        kernel: launched[number] for kernel, number in correlations.items() if number in launched
    }
    return events


def _read(path: Path, events: _Events) -> Iterator[dict[str, Any]]:
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
                        events.base_us = int(base.group(1)) / 1e3
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
    events: _Events, host: list[Interval], parts: list[Interval]
) -> list[list[Interval]]:
    calls, work = [], []
    for call in host:
        if _COLLECTIVE.search(call.name):
            calls.append(call)
        elif call.name.startswith("## Call") or ("::" in call.name and not _FRAME.match(call.name)):
            work.append(call)
    computed, _ = take(parts, work, keep=True)
    running = disjoint(events.collectives)
    return [_named(calls, "communication"), computed, _named(running, "communication"), parts]


def _device_layers(events: _Events, parts: list[Interval]) -> list[list[Interval]]:
    kernels, collectives = [], []
    launch_times = sorted((at, kernel) for kernel, at in events.launches.items())
    part_of, index = {}, 0
    for at, kernel in launch_times:
        while index < len(parts) and parts[index].end <= at:
            index += 1
        if index < len(parts) and parts[index].start <= at:
            part_of[kernel] = parts[index].name
    for kernel in events.kernels:
        if _COLLECTIVE.search(kernel.name):
            collectives.append(kernel)
        else:
            kernels.append(kernel._replace(name=part_of.get(kernel, "other")))
    running = _named(disjoint(collectives), "communication")
    data = [part for part in parts if part.name == "data"]
    idle = [Interval(float("-inf"), float("inf"), "waiting")]
    return [disjoint(kernels), running, data, idle]


def _named(intervals: Iterable[Interval], name: str) -> list[Interval]:
    return [interval._replace(name=name) for interval in intervals]


def _innermost(intervals: Iterable[Interval]) -> list[Interval]:
    """Divide nested intervals of one thread into disjoint ones, each of the innermost's name."""
    innermost: list[Interval] = []
    stack: list[Interval] = []
    at = 0.0

    def advance(to: float) -> None:
        nonlocal at
        if stack and to > at:
            innermost.append(Interval(at, to, stack[-1].name))
        at = max(at, to)

    for call in sorted(intervals, key=lambda interval: (interval.start, -interval.end)):
        while stack and stack[-1].end <= call.start:
            advance(stack[-1].end)
            stack.pop()
        advance(call.start)
        # Times are rounded: a callee may seem to end later than its caller.
        stack.append(call._replace(end=min(call.end, stack[-1].end)) if stack else call)
    while stack:
        advance(stack[-1].end)
        stack.pop()
    return innermost


def disjoint(intervals: Iterable[Interval]) -> list[Interval]:
    """Remove overlaps: the interval that begins first has the common time."""
    result: list[Interval] = []
    for interval in sorted(intervals):
        start = max(interval.start, result[-1].end) if result else interval.start
        if interval.end > start:
            result.append(interval._replace(start=start))
    return result


def take(
    free: list[Interval], layer: list[Interval], *, keep: bool = False
) -> tuple[list[Interval], list[Interval]]:
    """Return the intersections with `layer`, and what of `free` is left; both are disjoint, sorted.

    The intersections have the names of `layer`; with `keep`, those of `free`.
    """
    taken, left, index = [], [], 0
    for interval in free:
        at = interval.start
        while index < len(layer) and layer[index].end <= at:
            index += 1
        place = index
        while place < len(layer) and layer[place].start < interval.end:
            other = layer[place]
            start, end = max(at, other.start), min(interval.end, other.end)
            if start > at:
                left.append(interval._replace(start=at, end=start))
            if end > start:
                taken.append(Interval(start, end, interval.name if keep else other.name))
            at = max(at, end)
            place += 1
        if at < interval.end:
            left.append(interval._replace(start=at))
    return taken, left


def _total(intervals: Iterable[Interval]) -> Counter[str]:
    total_us: Counter[str] = Counter()
    for interval in intervals:
        total_us[interval.name] += interval.end - interval.start  # type: ignore[assignment]
    return total_us


def _absolute(intervals: Iterable[Interval], base_us: float) -> tuple[tuple[int, int], ...]:
    """Merge intervals that nearly touch; Unix time, µs."""
    merged: list[tuple[float, float]] = []
    for start, end, _ in sorted(intervals):
        if merged and start <= merged[-1][1] + _GAP_US:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return tuple((round(start + base_us), round(end + base_us)) for start, end in merged)
