"""The division of traces into parts, on traces written by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from slurmllm.errors import StorageError
from slurmllm.profile.profile import _result
from slurmllm.profile.trace import PARTS, RankProfile, summarize
from slurmllm.run.rundir import ProfileFiles


def event(name: str, start: float, end: float, kind: str = "cpu_op", **args: Any) -> dict[str, Any]:
    common = {"ph": "X", "cat": kind, "name": name, "pid": 1, "args": args}
    thread = 2 if name.startswith("gloo:") else 1
    return {**common, "tid": thread, "ts": start, "dur": end - start}


def ours(name: str, start: float, end: float) -> dict[str, Any]:
    return event(f"slurmllm.{name}", start, end, "user_annotation")


def write(path: Path, events: list[dict[str, Any]], base_ns: int = 0) -> Path:
    value = {"baseTimeNanoseconds": base_ns, "traceEvents": events, "traceName": "x"}
    path.write_bytes(gzip.compress(json.dumps(value, indent=1).encode()))
    return path


STEP = [
    ours("step 5", 0, 1000),
    ours("data", 0, 100),
    ours("forward", 100, 400),
    ours("backward", 400, 800),
    ours("optimizer", 800, 900),
    ours("waiting", 900, 950),
]


def microseconds(profile: RankProfile) -> dict[str, int]:
    return {part: round(profile.parts[part] * 1e6) for part in PARTS}


def test_host(tmp_path: Path) -> None:
    trace = write(
        tmp_path / "t.json.gz",
        [
            {"ph": "M", "name": "thread_name"},
            *STEP,
            event("aten::linear", 100, 200),
            event("aten::addmm", 120, 180),
            event("c10d::allreduce_", 200, 250),  # the host waits in the call
            event("autograd::engine::evaluate_function: X", 400, 800),
            event("aten::mm", 500, 600),
            # In another thread: hidden by the product until 600, then the host waits for it.
            event("gloo:all_reduce", 550, 700, "user_annotation"),
            {"ph": "i", "name": "[memory]", "args": {"Total Allocated": 4096}},
            {"ph": "i", "name": "[memory]", "args": {"Total Allocated": 1024}},
        ],
        base_ns=10**15,
    )
    profile = summarize(trace, 3, "n1")
    assert (profile.rank, profile.node, profile.first_step, profile.last_step) == (3, "n1", 5, 5)
    assert list(microseconds(profile).values()) == [100, 250, 300, 150, 100, 50, 50]
    times = {o.name: (round(o.self_s * 1e6), o.calls) for o in profile.operations}
    assert times["aten::linear"] == (40, 1)
    assert times["aten::addmm"] == (60, 1)
    assert times["autograd::engine::evaluate_function: X"] == (300, 1)
    base = 10**12
    assert profile.window == (base, base + 1000)
    assert profile.exposed == ((base + 200, base + 250), (base + 600, base + 700))
    assert profile.collectives == ((base + 200, base + 250), (base + 550, base + 700))
    assert profile.peak_bytes == 4096
    assert not profile.device


def test_an_evaluation_is_no_part_of_a_step(tmp_path: Path) -> None:
    hook = [ours("hook EvaluationHook", 950, 3000), ours("evaluation", 951, 2951)]
    inside = [event("aten::mm", 1000, 2000), ours("forward", 990, 2500)]
    later = [ours("step 6", 3000, 4000), event("aten::mm", 3100, 3200)]
    first = STEP[0] | {"dur": 3000.0}
    profile = summarize(
        write(tmp_path / "t.json.gz", [first, *STEP[1:], *hook, *inside, *later]), 0
    )
    assert list(microseconds(profile).values()) == [50, 150, 200, 0, 50, 25, 525]
    assert profile.step_s == pytest.approx(1e-3)
    assert profile.evaluation_s == pytest.approx(2e-3)
    times = {o.name: (round(o.self_s * 1e6), o.calls) for o in profile.operations}
    assert times == {"aten::mm": (50, 1)}
    kernels = [event("gemm", start, start + 40, "kernel", correlation=0) for start in (150, 1200)]
    device = summarize(write(tmp_path / "d.json.gz", [first, *STEP[1:], *hook, *kernels]), 0)
    assert device.step_s == pytest.approx(1e-3)
    assert device.operations[0].calls == 1
    parts = microseconds(device)
    assert (parts["other"], parts["data"], parts["waiting"]) == (40, 100, 860)


def test_device(tmp_path: Path) -> None:
    """A kernel belongs to the part that launched it, whenever it runs."""
    launches = [
        event("cudaLaunchKernel", start, start + 5, "cuda_runtime", correlation=number)
        for number, start in enumerate((110, 390, 410, 820))
    ]
    kernels = [
        event("gemm", 150, 450, "kernel", correlation=0),
        event("gemm", 450, 500, "kernel", correlation=1),
        event("gemm_backward", 500, 700, "kernel", correlation=2),
        event("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 650, 850, "kernel", correlation=9),
        event("adam", 850, 990, "kernel", correlation=3),
    ]
    profile = summarize(write(tmp_path / "t.json.gz", [*STEP, *launches, *kernels]), 0)
    assert list(microseconds(profile).values()) == [100, 350, 200, 150, 140, 60, 0]
    assert profile.device
    assert (profile.operations[0].name, profile.operations[0].calls) == ("gemm", 2)
    assert profile.collectives == ((650, 850),)
    assert profile.exposed == ((700, 850),)


def test_a_worker_waits_for_those_in_no_collective(tmp_path: Path) -> None:
    profiles = [
        summarize(
            write(tmp_path / f"{rank}.json.gz", [*STEP, event("c10d::allreduce_", begin, 400)]),
            rank,
        )
        for rank, begin in enumerate((100, 350, 300))
    ]
    files = ProfileFiles(tmp_path, 0)
    first, last, _ = (_result(profile, files, profiles) for profile in profiles)
    assert {rank: round(s * 1e6) for rank, s in first.waits_for.items()} == {1: 250, 2: 200}
    assert next(iter(first.waits_for)) == 1
    assert round(first.parts["communication"] * 1e6) == 50, "the transfer"
    assert round(first.parts["waiting"] * 1e6) == 50 + 250
    assert sum(first.parts.values()) == pytest.approx(first.profile.step_s)
    assert last.waits_for == {}


def test_damaged_traces(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    whole = gzip.compress(json.dumps({"traceEvents": STEP}).encode())
    for content in (
        *(b"", b"\x1f\x8b\x08", b"no gzip", gzip.compress(b"\xff" * 100)),
        *(gzip.compress(b"{}"), gzip.compress(b'{"traceEvents": ['), whole[:-20]),
        gzip.compress(b'{"traceEvents": [1]}'),
        gzip.compress(b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "x"}]}'),
        gzip.compress(b'{"traceEvents": [' + b"[" * 10**5),
    ):
        path.write_bytes(content)
        with pytest.raises(StorageError, match=r"is damaged: .* profile again"):
            summarize(path, 0)
    write(path, [{"ph": "X", "name": "x", "ts": 1, "dur": 1}])
    with pytest.raises(StorageError, match="has no profiled step; profile again"):
        summarize(path, 0)
