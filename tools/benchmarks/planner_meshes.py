"""The meshes that AWS chose, beside what the planner would choose for the same run.

python tools/benchmarks/planner_meshes.py

For each row of published/chosen_meshes.csv: whether it is predicted to fit, and how its best
predicted throughput compares with the best of all meshes, twice: with precision, checkpointing,
ZeRO and micro batch as AWS's recipe has them ("same settings"), and with all of them free, of
either mesh ("free"). A row reported out of memory must not fit. Exit code 1 where one is not as it
should be; rows that cannot be told are skipped by name.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Collection
from typing import Any

from published_rows import FOLDER, SHAPES, checkpointing, configuration, precision

from slurmllm.backends.environment import load_environment
from slurmllm.config.resolve import RunConfig
from slurmllm.plan.search import search

NEAR = 0.90
_SETTINGS = (
    "parallel.zero",
    "parallel.sequence",
    "parallel.virtual_pipeline",
    "train.micro_batch",
    "train.activation_checkpointing",
)
_PRECISION = ("parallel.virtual_pipeline",)


def judged() -> list[dict[str, Any]]:
    """A verdict a row and node count."""
    with (FOLDER / "chosen_meshes.csv").open(encoding="utf-8") as lines:
        return [_judged(row, nodes) for row in csv.DictReader(lines) for nodes in _nodes(row)]


def _nodes(row: dict[str, str]) -> list[int]:
    """`4-64` → both ends."""
    words = row["nodes"].split()[0].split("-")
    return sorted({int(word) for word in words})


def _judged(row: dict[str, str], nodes: int) -> dict[str, Any]:
    name = f"{row['model']}, {nodes} nodes"
    model = row["model"].partition(" (")[0].removesuffix(" CP")
    skipped = _skipped(row, model)
    if skipped:
        return {"name": name, "skipped": skipped}
    config = _config(row, model, nodes)
    if "OUT OF MEMORY" in row["status"] or row["tp"] == "?" or row["pp"] == "?":
        return _limits(name, row, config, nodes)
    degrees = (int(row["tp"]), int(row["pp"].split()[0]))
    shown: dict[str, Any] = {"name": name, "tensor": degrees[0], "pipeline": degrees[1]}
    for kind, fixed in (("same", _SETTINGS), ("free", _PRECISION)):
        fitting = _fitting(config, nodes, fixed)
        chosen = [c for c in fitting if (c.mesh.tensor, c.mesh.pipeline) == degrees]
        shown[kind] = chosen[0].seq_per_s / fitting[0].seq_per_s if chosen else 0.0
        if kind == "same":
            shown["fits"] = bool(chosen)
        if fitting:
            best = fitting[0].mesh
            shown[f"best_{kind}"] = f"TP {best.tensor} PP {best.pipeline}"
    # Nobody has reported the speed of an example's mesh.
    slow = max(shown["same"], shown["free"]) < NEAR and row["status"] != "example config"
    shown["wrong"] = not shown["fits"] or slow
    return shown


def _skipped(row: dict[str, str], model: str) -> str | None:
    if model not in SHAPES:
        return "no dense decoder of ours"
    if row["cp"] != "1":
        return "context parallelism"
    pipeline = row["pp"].split()[0]
    if pipeline.isdigit() and SHAPES[model].layers % int(pipeline):
        return "stages of unequal layers"
    return None


def _config(row: dict[str, str], model: str, nodes: int) -> RunConfig:
    words = row["precision"].lower()
    fp32_state = "sr fp32 opt" in words
    batch = row["global_batch"].split()[0]
    if "node" in batch:
        batch = str(int(batch.split("/")[0]) * nodes)
    return configuration(
        model,
        int(row["seq_len"]),
        "trn1",
        [
            f"train.global_batch={batch if batch.isdigit() else 1024}",
            f"train.micro_batch={row['microbatch']}",
            f"train.precision={'bf16_mixed' if fp32_state else precision(words)}",
            f"train.activation_checkpointing={checkpointing(row['activation_ckpt'])}",
            f"parallel.sequence={'true' if row['sequence_parallel'] == 'yes' else 'false'}",
            f"parallel.zero={1 if row['zero1'] == '1' else 0}",
        ],
    )


def _fitting(config: RunConfig, nodes: int, fixed: Collection[str]) -> Any:
    return search(config, nodes, load_environment(config.backend).unsupported, fixed).fitting


def _limits(name: str, row: dict[str, str], config: RunConfig, nodes: int) -> dict[str, Any]:
    """Rows that tell the degrees in part, and whether anything fits."""
    fitting = _fitting(config, nodes, _SETTINGS)
    fits = any(row["tp"] == "?" or c.mesh.tensor == int(row["tp"]) for c in fitting)
    return {"name": name, "fits": fits, "wrong": fits == ("OUT OF MEMORY" in row["status"])}


if __name__ == "__main__":
    rows = judged()
    for row in rows:
        print(", ".join(f"{key} {value}" for key, value in row.items()))
    sys.exit(any(row.get("wrong") for row in rows))
