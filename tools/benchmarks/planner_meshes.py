"""The meshes that AWS chose, beside the best that the planner finds for the same run.

python tools/benchmarks/planner_meshes.py

For each row of published/chosen_meshes.csv: the throughput of AWS's mesh, as a share of the best
that is predicted to fit, once with the settings of AWS's recipe ("same") and once with settings
chosen for each mesh ("free"). A row reported out of memory must not fit. Exit code 1 if a row is
not as it should be; rows that cannot be checked are skipped, with the reason.
"""

import sys
from collections.abc import Collection, Sequence
from typing import Any

from published_rows import SHAPES, configuration, recipe_overrides, table

from slurmllm.core.config.resolve import RunConfig
from slurmllm.plan.search import search
from slurmllm.train.backends.environment import load_environment

NEAR = 0.90
_FREE = ("parallel.virtual_pipeline",)
_SAME = (
    *("parallel.zero", "parallel.sequence", "train.micro_batch", "train.activation_checkpointing"),
    *_FREE,
)


def judged() -> list[dict[str, Any]]:
    """Return a verdict for each row and each end of its node counts."""
    return [
        _judged(row, nodes)
        for row in table("chosen_meshes.csv")
        for nodes in sorted({int(end) for end in row["nodes"].split()[0].split("-")})
    ]


def _judged(row: dict[str, str], nodes: int) -> dict[str, Any]:
    name, model = f"{row['model']}, {nodes} nodes", row["model"].partition(" (")[0]
    tensor, pipeline = row["tp"], row["pp"].split()[0]
    if row["cp"] != "1":
        return {"name": name, "skipped": "context parallelism"}
    if model not in SHAPES:
        return {"name": name, "skipped": "no dense decoder of ours"}
    if pipeline.isdigit() and SHAPES[model].layers % int(pipeline):
        return {"name": name, "skipped": "stages of unequal layers"}
    batch, _, per_node = row["global_batch"].split()[0].partition("/")
    batch = str(int(batch) * nodes) if per_node else batch.replace("?", "1024")
    overrides = recipe_overrides(row | {"global_batch": batch, "notes": ""})
    config = configuration(model, int(row["seq_len"]), "trn1", overrides)
    same = _fitting(config, nodes, _SAME)
    if "OUT OF MEMORY" in row["status"] or pipeline == "?":
        fits = any(candidate.mesh.tensor == int(tensor) for candidate in same)
        return {"name": name, "fits": fits, "wrong": fits == ("OUT OF MEMORY" in row["status"])}
    degrees = (int(tensor), int(pipeline))
    shares = {"same": _share(same, degrees)}
    shares["free"] = _share(_fitting(config, nodes, _FREE), degrees)
    # Nobody has reported the speed of an example's mesh.
    slow = max(shares.values()) < NEAR and row["status"] != "example config"
    return {"name": name, **shares, "wrong": not shares["same"] or slow}


def _fitting(config: RunConfig, nodes: int, fixed: Collection[str]) -> Any:
    return search(config, nodes, load_environment(config.backend).unsupported, fixed).fitting


def _share(fitting: Sequence[Any], degrees: tuple[int, int]) -> float:
    chosen = [c.seq_per_s for c in fitting if (c.mesh.tensor, c.mesh.pipeline) == degrees]
    return float(chosen[0] / fitting[0].seq_per_s) if chosen else 0.0


if __name__ == "__main__":
    rows = judged()
    for row in rows:
        print(", ".join(f"{key} {value}" for key, value in row.items()))
    sys.exit(any(row.get("wrong") for row in rows))
