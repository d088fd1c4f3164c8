"""Puts a small worker in the place of the real one: it meets graphs and does nothing else.

In the folder of $PYTHONPATH that launchers get in tests. $STANDIN_WORKER names a JSON file:
{"precompile": [graphs], "train": [graphs], "rank_1": [graphs], "die": {"<attempt>": <signal>}}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import types
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))


def run_worker(run, stage, attempt):  # type: ignore[no-untyped-def]
    """Meet the graphs of the stage, write what a worker writes, end as the test wants it."""
    import fake_runtime

    from slurmllm.core.errors import EXIT_REQUEUE
    from slurmllm.core.run.records import FailureRecord, WorkerRecord

    stopped = []
    signal.signal(signal.SIGUSR2, lambda number, frame: stopped.append(number))
    wishes = json.loads(Path(os.environ["STANDIN_WORKER"]).read_text())
    rank, node = int(os.environ["RANK"]), os.environ["SLURMLLM_NODE"]
    files = run.attempt(stage, attempt)
    try:
        for name in [*wishes[stage], *wishes.get(f"rank_{rank}", ())]:
            fake_runtime.load_graph(name)
    except RuntimeError as error:
        FailureRecord(
            rank=rank,
            node=node,
            error="RuntimeError",
            message=str(error),
            blame="code",
            exit_code=70,
            time=time.time(),
        ).save(files.failure(rank))
        return 70
    if os.environ["LOCAL_RANK"] == "0":
        WorkerRecord(
            rank=rank,
            node=node,
            start_up_s=0.1,
            first_step_s=0.2,
            cache_hits=fake_runtime.counts["hits"],
            cache_misses=fake_runtime.counts["compiled"],
        ).save(files.worker(rank))
    if stage == "train" and str(attempt) in wishes.get("die", {}):
        # By the first rank: its peers wait, as in a collective.
        if rank == 0:
            os.kill(os.getpid(), wishes["die"][str(attempt)])
        while not stopped:
            time.sleep(0.05)
        return EXIT_REQUEUE
    return 0


module = types.ModuleType("slurmllm.train.worker")
module.run_worker = run_worker  # type: ignore[attr-defined]
sys.modules["slurmllm.train.worker"] = module
