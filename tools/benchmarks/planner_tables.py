"""Published tables of throughput, cell by cell, with the ratio of what `plan` predicts.

python tools/benchmarks/planner_tables.py

Prints Markdown: MosaicML's tables of llm-foundry, by model and nodes and by
model and sequence length, and AWS's of trn1. A cell is the published throughput, and predicted over
published, from constants that were fitted without the model (slurmllm/plan/published_runs.csv).
Where a table has several rows for a cell (micro batches, releases), the last is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from slurmllm.plan.evidence import MeasuredRun, published_runs

_GPUS = {"A100 40 GB": "p4d", "A100 80 GB": "p4de", "H100 80 GB": "p5"}
_SEQUENCE = 2048  # of the tables by nodes


def _cell(run: MeasuredRun) -> str:
    return f"{run.seq_per_s * run.sequence / 1e3:,.4g} · {run.left_out:.2f}"


def _pivot(
    title: str, runs: Iterable[MeasuredRun], column: Callable[[MeasuredRun], int], unit: str
) -> list[str]:
    """Models by a column's values."""
    found = {(run.model, column(run)): _cell(run) for run in runs}
    sizes = {run.model: run.parameters for run in published_runs()}
    models = sorted({model for model, _ in found}, key=lambda model: sizes[model])
    values = sorted({value for _, value in found})
    head = [title, *(f"{value:,} {unit}{'s' * (unit == 'node' and value > 1)}" for value in values)]
    lines = [_line(head), _line(["---"] * len(head))]
    lines += [_line([model, *(found.get((model, v), "") for v in values)]) for model in models]
    return [*lines, ""]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print all tables."""
    for name, profile in _GPUS.items():
        runs = [run for run in published_runs() if run.profile == profile]
        by_nodes = [run for run in runs if run.sequence == _SEQUENCE]
        one_node = [run for run in runs if run.nodes == 1]
        print("\n".join(_pivot(f"{name}, ×10³ tokens/s", by_nodes, lambda run: run.nodes, "node")))
        print("\n".join(_pivot(f"{name}, 1 node", one_node, lambda run: run.sequence, "tokens")))
    print(_line(["trn1", "nodes", "TP × PP", "published seq/s", "ratio"]))
    print(_line(["---"] * 5))
    for run in published_runs():
        if run.profile == "trn1":
            degrees = f"{run.tensor} × {run.pipeline}"
            print(_line([run.name, str(run.nodes), degrees, f"{run.seq_per_s:.4g}",
                         f"{run.left_out:.2f}"]))  # fmt: skip


if __name__ == "__main__":
    main()
