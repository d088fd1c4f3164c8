"""The planner against published runs: fit its few constants on some models, check them on others.

python tools/benchmarks/planner.py [--hardware trn1,p4d,p5] [--fit] [--rows] [--json FILE]

Prints, for each kind of hardware, how far predicted throughput is from what was published
(published/*.csv): of the models that the constants were fitted to, and of those that they were not.
A row counts as tuned where its mesh is one that AWS's recipes choose for the model, and it is
within a tenth, node by node, of the best figure published for the same layout: others measure an
old release or a mistake. --fit searches the constants anew, within the bounds below, and prints
them; profiles are changed by hand. Exit code 1 where a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from published_rows import Row, chosen_meshes, rows

from slurmllm.plan.step import step_time

MEAN, LARGEST = {"trn1": 0.12, "p4d": 0.10, "p5": 0.10}, 0.30
TUNED = 0.9  # of the best figure for the same layout
# What the constants are fitted to; every other model is checked.
FITTED = {
    "trn1": ("Llama-2-7B", "GPT-NeoX-20B", "GPT3-6.7B", "Llama-2-70B"),
    "p4d": ("MPT-125m", "MPT-7b", "MPT-70b"),
    "p5": ("MPT-760m", "MPT-13b"),
}
# Constant → what it may be: nothing reaches a peak. The masked half of attention is not counted,
# but NxD's kernels compute it, so that less than half of what matrices reach is left on trn1. How
# fast its network is, the rows hardly say (0.15 to 0.75 fit about as well): it is given there.
_EVERYWHERE = {
    "matrix_efficiency": (0.2, 0.9),
    "matrix_half": (0.0, 512.0),
    "memory_efficiency": (0.3, 0.95),
    "node_link_efficiency": (0.1, 0.9),
}
_GPU = {
    "attention_efficiency": (0.05, 0.8),
    "network_efficiency": (0.2, 0.95),
    "overlap": (0.0, 1.0),
}
SEARCHED: dict[str, dict[str, tuple[float, float]]] = {
    "trn1": {**_EVERYWHERE, "attention_efficiency": (0.05, 0.35)},
    "p4d": {**_EVERYWHERE, **_GPU},
    "p5": {**_EVERYWHERE, **_GPU},
}
_STARTS = 6


@dataclass(frozen=True)
class Case:
    """A published row, and whether its layout was tuned."""

    row: Row
    tuned: bool

    def predicted(self, changed: Mapping[str, float] | None = None) -> float:
        """Sequences a second, with other constants where given."""
        config = self.row.config
        if changed:
            hardware = config.cluster.hardware
            assert hardware is not None
            other = hardware.model_copy(update=dict(changed))
            config = replace(config, cluster=config.cluster.model_copy(update={"hardware": other}))
        return self.row.mesh.global_batch / step_time(config, self.row.mesh).total

    def error(self, changed: Mapping[str, float] | None = None) -> float:
        """Predicted over measured, less 1."""
        return self.predicted(changed) / self.row.measured - 1


def cases(hardware: str) -> list[Case]:
    """The rows of one kind of hardware."""
    file = "published_trn1.csv" if hardware == "trn1" else "published_gpu.csv"
    found = [row for row in rows(file) if row.config.cluster.name == hardware]
    best: dict[object, float] = {}
    for row in found:
        best[_layout(row)] = max(best.get(_layout(row), 0.0), _per_node(row))
    return [
        Case(row, _chosen(row) and _per_node(row) >= TUNED * best[_layout(row)]) for row in found
    ]


def _per_node(row: Row) -> float:
    return row.measured / row.mesh.nodes


def _chosen(row: Row) -> bool:
    """Whether a recipe of AWS's has the row's mesh for its model; GPUs have no such list."""
    degrees = (row.model, row.mesh.tensor, row.mesh.pipeline)
    return not row.hardware.startswith("trn1") or degrees in chosen_meshes()


def _layout(row: Row) -> object:
    mesh, recipe = row.mesh, row.config.recipe
    return (
        row.model, row.config.cluster.hardware, mesh.tensor, mesh.pipeline, mesh.micro_batch,
        mesh.accumulation, recipe.model.seq_len, recipe.train.precision,
        recipe.train.activation_checkpointing,
        recipe.parallel.zero, recipe.parallel.sequence,
    )  # fmt: skip


def fit(found: Sequence[Case], searched: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Constants that come nearest to the tuned cases; every model counts alike.

    Least is the mean of |log ratio| and of its square: the square keeps any row from being far off.
    Coordinate descent from the middle of the bounds, and from random places within them.
    """
    models = sorted({case.row.model for case in found})

    def loss(values: Mapping[str, float]) -> float:
        each = []
        for model in models:
            logs = [math.log1p(c.error(values)) for c in found if c.row.model == model and c.tuned]
            each.append(statistics.mean(abs(one) + one**2 for one in logs))
        return statistics.mean(each)

    drawn = random.Random(1)
    starts = [{name: (low + high) / 2 for name, (low, high) in searched.items()}]
    for _ in range(_STARTS - 1):
        starts.append({name: drawn.uniform(*bounds) for name, bounds in searched.items()})
    return min((_descend(start, searched, loss) for start in starts), key=loss)


def _descend(
    values: dict[str, float],
    searched: Mapping[str, tuple[float, float]],
    loss: Callable[[Mapping[str, float]], float],
) -> dict[str, float]:
    """Coordinate descent with steps that shrink."""
    best, step = loss(values), 0.3
    while step > 0.005:
        before = best
        for name, (low, high) in searched.items():
            for factor in (1 + step, 1 / (1 + step)):
                raised = max(values[name], (high - low) / 100) * factor
                tried = {**values, name: min(high, max(low, raised))}
                if (found := loss(tried)) < best:
                    best, values = found, tried
        if best > before - 1e-6:
            step /= 2
    return values


@dataclass(frozen=True)
class Verdict:
    """How far a group of rows is off."""

    name: str
    count: int
    mean: float
    tuned: int
    tuned_mean: float
    tuned_largest: float


def judge(name: str, found: Sequence[Case], values: Mapping[str, float] | None) -> Verdict:
    """Mean absolute error of all rows, and the largest of the tuned ones."""
    errors = [abs(case.error(values)) for case in found]
    tuned = [abs(case.error(values)) for case in found if case.tuned]
    return Verdict(
        name, len(found), statistics.mean(errors), len(tuned),
        statistics.mean(tuned) if tuned else 0.0, max(tuned, default=0.0),
    )  # fmt: skip


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hardware", default="trn1,p4d,p5")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report, missed = [], False
    for hardware in options.hardware.split(","):
        found = cases(hardware)
        fitted = [case for case in found if case.row.model in FITTED[hardware]]
        checked = [case for case in found if case.row.model not in FITTED[hardware]]
        values = None
        if options.fit:
            values = fit(fitted, SEARCHED[hardware])
            print(f"{hardware}: " + ", ".join(f"{k} {v:.3g}" for k, v in values.items()))
        if options.rows:
            _print_rows(found, values, FITTED[hardware])
        for name, group in (("fitted", fitted), ("checked", checked), ("all", found)):
            verdict = judge(name, group, values)
            print(
                f"{hardware:<5}{name:<8} {verdict.count:3} rows: mean absolute error "
                f"{verdict.mean:6.1%}; {verdict.tuned} tuned: {verdict.tuned_mean:6.1%}, "
                f"largest {verdict.tuned_largest:6.1%}"
            )
            report.append({"hardware": hardware, **vars(verdict)})
            if name == "checked":
                missed |= verdict.tuned_mean > MEAN[hardware]
            missed |= hardware == "trn1" and verdict.tuned_largest > LARGEST
        for model in sorted({case.row.model for case in found}):
            verdict = judge(model, [case for case in found if case.row.model == model], values)
            word = "fitted" if model in FITTED[hardware] else "checked"
            print(f"      {model:<14} {verdict.count:3} {word:<8} {verdict.mean:6.1%}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    sys.exit(missed)


def _print_rows(
    found: Sequence[Case], values: Mapping[str, float] | None, fitted: Sequence[str]
) -> None:
    print(f"{'':<45} {'measured':>9} {'predicted':>9} {'error':>7}  seq/s")
    for case in found:
        words = ["fitted" if case.row.model in fitted else "checked"]
        words += [] if case.tuned else ["not tuned"]
        print(
            f"{case.row.name:<45} {case.row.measured:9.2f} {case.predicted(values):9.2f} "
            f"{case.error(values):+7.1%}  {', '.join(words)}"
        )


if __name__ == "__main__":
    main()
