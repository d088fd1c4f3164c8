"""Memory of each worker, measured, beside what `slurmllm/plan/memory.py` says.

python tools/benchmarks/memory.py [--family neox] [--mesh 4,1,1 --mesh 2,1,2] [--set a.b=c …]
    [--json FILE]

Measured is the kernel's resident set of the process (VmRSS, and VmHWM for the most within a step,
counted anew from there on), less what it was after two steps of a tiny model on the same mesh: that
holds the interpreter, the libraries and the process groups. glibc is told to map every large
tensor by itself (MALLOC_MMAP_THRESHOLD_), so that a freed one leaves the resident set at once.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from mesh_pool import FAMILIES, Case, MeshPool, counted, micro_batches, small_run

from slurmllm.backends.base import Backend
from slurmllm.plan.memory import WorkerMemory, worker_memory

# 167 million parameters: gigabytes on four workers, where a tiny model drowns in the interpreter.
_MODEL = (
    "model.num_layers=8", "model.hidden_size=1024", "model.num_heads=16",
    "model.ffn_hidden_size=4096", "model.vocab_size=32000", "model.seq_len=256",
    "train.micro_batch=1", "parallel.zero=1",
)  # fmt: skip
_GLIBC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "MALLOC_TOP_PAD_": "0"}
_TOLERANCE = 0.10


def resident(field: str = "VmRSS") -> int:
    """Bytes, of /proc/self/status (proc(5))."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def settled() -> int:
    """The resident set once what is free has been given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return resident()


def baseline(backend: Backend) -> int:
    """Of a process that has trained something tiny."""
    return settled()


def one_more_step(backend: Backend) -> dict[str, int]:
    """The resident set between steps, and at its largest within the next one."""
    at_rest = settled()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    backend.forward_backward(micro_batches(backend, 2), counted(backend.config, 2))
    backend.optimizer_step(1e-3)
    return {"at_rest": at_rest, "peak": resident("VmHWM")}


def measure(
    family: str, degrees: tuple[int, int, int], overrides: list[str]
) -> list[dict[str, Any]]:
    """A row for each worker of a mesh."""
    tensor, pipeline, data = degrees
    accumulation = 2 * pipeline
    batch = f"train.global_batch={accumulation * data}"
    config = small_run(family, tensor, pipeline, data, *_MODEL, batch, *overrides)
    tiny = small_run(family, tensor, pipeline, data, *overrides)
    with MeshPool(tensor * pipeline * data, staying=True) as pool:
        before = pool.run(Case(tiny, last=2, after=baseline))
        found = pool.run(Case(config, last=1, after=one_more_step), timeout_s=1800)
    rows = []
    for rank, (empty, outcome) in enumerate(zip(before, found, strict=True)):
        predicted = worker_memory(config, Case(config).mesh, rank)
        row: dict[str, Any] = {"mesh": f"tp{tensor} pp{pipeline} dp{data}", "rank": rank}
        for name in ("at_rest", "peak"):
            row[name] = outcome.after[name] - empty.after
            row[f"{name}_predicted"] = getattr(predicted, name)
            row[f"{name}_ratio"] = row[name] / row[f"{name}_predicted"]
        rows.append({**row, "parts": parts(predicted)})
    return rows


def parts(predicted: WorkerMemory) -> dict[str, int]:
    """The terms of a prediction."""
    return {name: value for name, value in vars(predicted).items() if value}


def main() -> None:
    """Measure the meshes in turn; exit code 1 where one is off by more than a tenth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=sorted(FAMILIES), default="neox")
    parser.add_argument("--mesh", action="append", help="tensor,pipeline,data; may be repeated")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="a.b=c")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    options = parser.parse_args()
    os.environ.update(_GLIBC)  # the pool's processes inherit it
    meshes = [tuple(map(int, mesh.split(","))) for mesh in options.mesh or ("4,1,1", "2,1,2")]
    columns = "  ".join(f"{name:>9} {'predicted':>9} {'ratio':>5}" for name in ("at rest", "peak"))
    print(f"{'MB':<14} {'rank':>4}  {columns}")
    rows = []
    for tensor, pipeline, data in meshes:
        for row in measure(options.family, (tensor, pipeline, data), options.overrides):
            rows.append(row)
            figures = "  ".join(
                f"{row[name] / 1e6:9.1f} {row[f'{name}_predicted'] / 1e6:9.1f} "
                f"{row[f'{name}_ratio']:5.3f}"
                for name in ("at_rest", "peak")
            )
            print(f"{row['mesh']:<14} {row['rank']:4}  {figures}", flush=True)
        terms = ", ".join(f"{name} {value / 1e6:.1f}" for name, value in rows[-1]["parts"].items())
        print(f"  rank {rows[-1]['rank']}: {terms}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    worst = max(abs(row[f"{name}_ratio"] - 1) for row in rows for name in ("at_rest", "peak"))
    print(f"largest deviation {worst:.1%}, allowed {_TOLERANCE:.0%}")
    sys.exit(worst > _TOLERANCE)


if __name__ == "__main__":
    main()
