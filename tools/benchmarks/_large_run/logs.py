"""Lines of logs, the logs of ranks, and the stacks of a hang."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from datetime import datetime

from slurmllm.run.records import AttemptRecord
from slurmllm.run.rundir import AttemptDir, RunDir


def log_line(at: float, node: str, rank: int | None, component: str, text: str) -> str:
    """A line as `slurmllm.log` writes it."""
    moment = datetime.fromtimestamp(at).astimezone().isoformat(timespec="milliseconds")
    origin = node if rank is None else f"{node} rank {rank}"
    return f"{moment} INFO {origin} slurmllm.{component}: {text}\n"


def write_rank_logs(run: RunDir, record: AttemptRecord, ranks: Iterable[int], at: float) -> None:
    """The logs of some ranks other than 0; `at` is the Unix time of the last step, s."""
    per_node = record.world_size // len(record.nodes)
    for rank in ranks:
        path = run.worker_log(record.stage, record.attempt, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        node, began = record.nodes[rank // per_node], record.started_at
        resumed = f"resumed from step {record.checkpoint_before}"
        lines = [
            log_line(began + 60, node, rank, "train.worker", "starting"),
            log_line(began + 200, node, rank, "train.job", resumed),
            f"nrt_init: {math.ceil(rank / 2)} devices\n",
        ]
        if rank % per_node == 0:
            text = "graph cache: 60 hits, 0 misses; first step 60.0 s"
            lines.append(log_line(at - 60, node, rank, "train.hooks.monitoring", text))
        path.write_text("".join(lines))


def write_stacks(attempt: AttemptDir, record: AttemptRecord, behind: Collection[int]) -> None:
    """The stacks of all workers of a hang; those that are behind wait for data."""
    attempt.stacks(0).parent.mkdir(parents=True)
    for rank in range(record.world_size):
        where = ("data/stream.py", 88) if rank in behind else ("torch/_ops.py", 1120)
        attempt.stacks(rank).write_text(
            "Current thread 0x00007f1 (most recent call first):\n"
            f'  File "/fsx/env/site-packages/{where[0]}", line {where[1]} in next\n'
            '  File "/fsx/env/site-packages/slurmllm/train/loop.py", line 47 in train\n'
        )
