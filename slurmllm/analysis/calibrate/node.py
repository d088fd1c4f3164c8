"""The process of each node: starts the measuring workers like those of a run.

Run as `python -m slurmllm.analysis.calibrate.node TASK`. Task and results are lines of JSON.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import ClassVar, Literal

from slurmllm.core.config.resolve import RunConfig, resolve
from slurmllm.core.run.records import Record
from slurmllm.launch.diagnose.probe import JsonLine
from slurmllm.train.backends.environment import load_environment
from slurmllm.train.control.rendezvous import (
    NODE_NAME,
    SHARING,
    die_with_parent,
    own_node_rank,
    rendezvous_variables,
)

_WORKER = "slurmllm.analysis.calibrate.worker"
_POLL_S = 0.1

Kind = (
    Literal["progress", "reserved", "memory", "busy", "product", "attention", "copy"]
    | Literal["elementwise", "step", "gpu_step", "all_reduce", "all_gather", "reduce_scatter"]
)

# Of a GPU: for all measurements of a node, so that `calibrate` takes 45 s at most. Compilations and
# first calls cannot be cut short; what they leave is divided among the measurements.
GPU_LIMIT_S = 40.0

# Device → tokens, and hidden sizes, of the matrix products.
PRODUCT_SIZES = {
    "cuda": ((2048, 8192), (256, 512, 1024, 2048, 4096, 8192)),
    "cpu": ((512, 2048), (64, 128, 256, 512, 1024)),
}


def product_grid(tokens: Sequence[int], widths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return [m, n, k] of feed-forward matrices (n = 4k), and of products of which k varies."""
    columns = [4 * width for width in (widths[0], widths[len(widths) // 2], widths[-1])]
    return sorted({(max(tokens), n, k) for k in widths for n in (4 * k, *columns)})


# The models whose steps are timed: layers of both; width, micro batch, accumulation. On CPUs tiny
# ones, whose steps are the host's overhead; on GPUs as wide as those of a billion parameters.
STEP_LAYERS: dict[str, tuple[int, int]] = {"cpu": (2, 8), "cuda": (2, 6)}
_TINY = "hidden_size=64 num_heads=2 ffn_hidden_size=128 vocab_size=256 seq_len=32"
_WIDE = "hidden_size=2048 num_heads=16 ffn_hidden_size=8192 vocab_size=50304 seq_len=2048"
_STEPS = {"cpu": (_TINY, 1, 4), "cuda": (_WIDE, 4, 1)}


def step_config(task: Task, layers: int) -> RunConfig:
    model, micro_batch, accumulation = _STEPS["cpu" if task.quick else task.device]
    precision = "fp32" if task.precision == "fp32" else "bf16_mixed"
    settings = [f"model.{setting}" for setting in model.split()]
    settings += [f"model.num_layers={layers}", f"train.micro_batch={micro_batch}"]
    settings += [f"train.global_batch={micro_batch * accumulation}", "parallel.zero=1"]
    settings += ["cluster.devices_per_node=1", f"cluster.device={task.device}"]
    settings += [f"train.precision={precision}", f"train.compile={str(task.compiled).lower()}"]
    return resolve("tiny_neox", "local", settings)


class Task(Record):
    """The task of the measuring processes."""

    nodes: int
    workers: int  # processes of a node
    sharing: int  # workers that share a machine's CPUs and memory
    cpus: int | None  # CPUs of a machine; None: all of them
    device: Literal["cpu", "cuda"]
    address: str  # of the first node
    port: int  # a free port there
    precision: Literal["fp32", "bf16"]
    compiled: bool  # whether the recipe compiles blocks
    variables: dict[str, str]  # environment of the workers
    quick: bool = False  # whether to measure as little as possible, for tests
    products_only: bool = False  # whether to measure matrix products only
    begun: float = 0.0  # time.monotonic() at which this node began


class Sample(JsonLine):
    """One measurement: the mean over all workers, or of one node."""

    PREFIX: ClassVar[str] = "slurmllm-calibrate "

    kind: Kind
    # Variant of the kind: a precision, `node` or `network`, a kind of elementwise work; text of
    # `progress`; node name of `busy`.
    of: str = ""
    # Size of the work: [m, n, k] of a product; FLOPs of attention; bytes moved; workers and bytes
    # of a collective; layers and micro batches of a step.
    sizes: tuple[int, ...] = ()
    # Seconds, of `step` the host's and of `gpu_step` the device's; bytes for `reserved` and
    # `memory`; load average per CPU before the start for `busy`.
    value: float = 0.0


Samples = Sequence[Sample]


def main(task_json: str) -> int:
    """Run the workers; returns the code of the first that fails."""
    task = Task.model_validate_json(task_json).model_copy(update={"begun": time.monotonic()})
    node = own_node_rank()
    name = os.environ.get(NODE_NAME) or socket.gethostname()
    # Load of the last minute, read before the workers add theirs.
    busy = os.getloadavg()[0] / (os.cpu_count() or 1)
    Sample(kind="busy", of=name, value=busy).write()
    # A folder of its own: by default torch uses one in /tmp whose name anybody can take, and runs
    # the libraries that it finds there.
    with tempfile.TemporaryDirectory(prefix="slurmllm-calibrate-") as cache:
        return _measure(task, node, cache)


def _measure(task: Task, node: int, cache: str) -> int:
    caches = load_environment("native").cache_variables(cache)
    cpus = task.cpus or int(os.environ.get("SLURM_CPUS_ON_NODE") or len(os.sched_getaffinity(0)))
    shared = {name: variable.value for name, variable in caches.items()}
    shared |= {**task.variables, SHARING: str(task.sharing)}

    workers = []
    for local_rank in range(task.workers):
        rendezvous = rendezvous_variables(
            task.address,
            task.port,
            nodes=task.nodes,
            workers_per_node=task.workers,
            node_rank=node,
            local_rank=local_rank,
            threads=max(1, cpus // task.sharing),
        )
        worker = subprocess.Popen(
            [sys.executable, "-P", "-m", _WORKER, task.model_dump_json()],
            env={**os.environ, **shared, **rendezvous},
            preexec_fn=die_with_parent,
        )
        workers.append(worker)
    try:
        # A worker that fails leaves its peers waiting in a collective: end them all.
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
