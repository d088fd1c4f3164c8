"""One process a node: starts the node's measuring workers as a run's are started.

A program of its own (`python -m slurmllm.calibrate.node TASK`), the task as JSON.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

from slurmllm.calibrate.sample import Sample, Task
from slurmllm.supervise.allocation import NODE_NAME, NODE_RANK, SHARING, die_with_parent
from slurmllm.supervise.interfaces import interface_variables

_WORKER = "slurmllm.calibrate.measure.worker"
_POLL_S = 0.1


def main(text: str) -> int:
    """Run the workers; the code of the first that fails, whose peers are ended."""
    task = Task.model_validate_json(text)
    node = int(os.environ.get(NODE_RANK) or os.environ.get("SLURM_NODEID") or 0)
    name = os.environ.get(NODE_NAME) or socket.gethostname()
    busy = os.getloadavg()[0] / (os.cpu_count() or 1)
    Sample(kind="busy", of=name, value=busy).write()
    cpus = task.cpus or int(os.environ.get("SLURM_CPUS_ON_NODE") or len(os.sched_getaffinity(0)))
    shared = {
        **task.variables,
        "WORLD_SIZE": str(task.nodes * task.workers),
        "LOCAL_WORLD_SIZE": str(task.workers),
        "MASTER_ADDR": task.address,
        "MASTER_PORT": str(task.port),
        SHARING: str(task.sharing),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cpus // task.sharing)),
        **interface_variables(task.address),
    }
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", _WORKER, text],
            env={
                **os.environ, **shared,
                "RANK": str(node * task.workers + n), "LOCAL_RANK": str(n),
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
