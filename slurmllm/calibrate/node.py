"""The process of each node: starts the measuring workers like those of a run.

Run as `python -m slurmllm.calibrate.node TASK`, with the task as JSON.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

from slurmllm.backends.rendezvous import (
    NODE_NAME,
    SHARING,
    die_with_parent,
    own_node_rank,
    rendezvous_variables,
)
from slurmllm.calibrate.sample import Sample, Task

_WORKER = "slurmllm.calibrate.measure.worker"
_POLL_S = 0.1


def main(text: str) -> int:
    """Run the workers; returns the code of the first that fails, and kills its peers."""
    task = Task.model_validate_json(text)
    node = own_node_rank()
    name = os.environ.get(NODE_NAME) or socket.gethostname()
    busy = os.getloadavg()[0] / (os.cpu_count() or 1)
    Sample(kind="busy", of=name, value=busy).write()
    cpus = task.cpus or int(os.environ.get("SLURM_CPUS_ON_NODE") or len(os.sched_getaffinity(0)))
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", _WORKER, text],
            env={
                **os.environ, **task.variables, SHARING: str(task.sharing),
                **rendezvous_variables(
                    task.address, task.port, nodes=task.nodes, workers_per_node=task.workers,
                    node_rank=node, local_rank=n, threads=max(1, cpus // task.sharing),
                ),
            },
            preexec_fn=die_with_parent,
        )
        for n in range(task.workers)
    ]  # fmt: skip
    try:
        while any(worker.poll() is None for worker in workers):
            if any(worker.returncode for worker in workers):
                break
            time.sleep(_POLL_S)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return next((abs(worker.returncode) for worker in workers if worker.returncode), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
