"""Whether every mesh trains the same: loss and gradient norm of some steps against one process.

python tools/benchmarks/meshes.py [--family neox] [--processes 8] [--steps 20] [--tensor 1,2,4]
    [--pipeline 1,2,4] [--data 1,2,4] [--sequence off,on] [--checkpointing none,selective,full]
    [--compile] [--set a.b=c …] [--json FILE]

All combinations of the degrees that --processes allow; sequence parallelism only where there is
tensor parallelism. Uncompiled, for compiling takes longer than the steps; --compile compiles.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mesh_pool import FAMILIES, Case, CaseFailed, MeshPool, Outcome, deviation, small_run

_TOLERANCE = 1e-5


class Point(NamedTuple):
    """One combination."""

    tensor: int
    pipeline: int
    data: int
    sequence: str
    checkpointing: str

    @property
    def workers(self) -> int:
        """Processes that it takes."""
        return self.tensor * self.pipeline * self.data


def points(options: argparse.Namespace) -> Iterator[Point]:
    """What is to be run, small meshes first."""
    found = itertools.product(
        *(numbers(getattr(options, name)) for name in ("tensor", "pipeline", "data")),
        options.sequence.split(","),
        options.checkpointing.split(","),
    )
    every = [Point(*values) for values in found]
    for point in sorted(every, key=lambda point: point.workers):
        if point.workers <= options.processes and (point.tensor > 1 or point.sequence == "off"):
            yield point


def numbers(text: str) -> list[int]:
    """`1,2,4` → [1, 2, 4]."""
    return [int(word) for word in text.split(",")]


# The recipes' own, which makes more of rounding than that of `small_run`.
EPS = "optim.eps=1e-8"


def overrides(point: Point, options: argparse.Namespace) -> list[str]:
    """The settings of a combination: as few micro batches as keep all stages busy."""
    sequences = 8 // point.data
    micro_batch = max(1, min(4, sequences // point.pipeline))
    return [
        f"train.micro_batch={micro_batch}",
        f"parallel.sequence={'true' if point.sequence == 'on' else 'false'}",
        f"train.activation_checkpointing={point.checkpointing}",
        f"train.compile={'true' if options.compile else 'false'}",
        EPS,
        *options.set,
    ]


def run(pool: MeshPool, reference: list[Outcome], point: Point, options: argparse.Namespace) -> Any:
    """A row of the table."""
    row: dict[str, Any] = {"family": options.family, **point._asdict()}
    config = small_run(
        options.family, point.tensor, point.pipeline, point.data, *overrides(point, options)
    )
    began = time.perf_counter()
    try:
        found = pool.run(Case(config, last=options.steps), timeout_s=1800)
        loss, gradient, parameter = deviation(found, reference)
        row |= {"loss": loss, "grad_norm": gradient, "param_norm": parameter}
    except CaseFailed as error:
        row |= {"loss": math.inf, "grad_norm": math.inf, "error": str(error)}
    return {**row, "seconds": time.perf_counter() - began}


def main() -> None:
    """Run the matrix; exit code 1 where a combination deviates by more than 1e-5."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=sorted(FAMILIES), default="neox")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    for name in ("tensor", "pipeline", "data"):
        parser.add_argument(f"--{name}", default="1,2,4")
    parser.add_argument("--sequence", default="off,on")
    parser.add_argument("--checkpointing", default="none,selective,full")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    options = parser.parse_args()
    rows = []
    print(f"{'tp':>2} {'pp':>2} {'dp':>2} {'sp':>3} {'checkpointing':<13} {'loss':>8} {'grad':>8}")
    with MeshPool(options.processes) as pool:
        reference = pool.run(Case(small_run(options.family, 1, 1, 1, EPS), last=options.steps))
        for point in points(options):
            row = run(pool, reference, point, options)
            rows.append(row)
            tensor, pipeline, data, sequence, checkpointing = point
            print(
                f"{tensor:2} {pipeline:2} {data:2} {sequence:>3} {checkpointing:<13} "
                f"{row['loss']:8.1e} {row['grad_norm']:8.1e}  {row['seconds']:6.1f} s",
                row.get("error", ""),
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    worst = max(max(row["loss"], row["grad_norm"]) for row in rows)
    print(f"{options.family}: {len(rows)} meshes, largest deviation {worst:.1e}")
    sys.exit(worst > _TOLERANCE)


if __name__ == "__main__":
    main()
