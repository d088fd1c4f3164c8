"""The former way to agree: a world-sized gloo group and an `all_gather_object` in every step.

    python tools/benchmarks/scale_reference.py WORKERS [--rounds 3]

Prints a JSON object: workers, reference_open_s, reference_agree_ms (median over rounds and
workers), descriptors of a worker. `scale.py --reference` calls it for each number of workers.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from scale_workers import Gate, Table, fork, shared
from torch._C._distributed_c10d import TCPStore

from slurmllm.control.rendezvous import free_port

TIMEOUT = timedelta(minutes=30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workers", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    workers, port = args.workers, free_port()
    opened, agree, files = shared(workers), shared(workers, args.rounds), shared(workers)
    ready, gate = Gate(), Gate()
    children = []
    for rank in range(workers):

        def work(rank: int = rank) -> None:
            gate.close_write()
            ready.close()
            gate.wait()
            _work(rank, workers, port, opened, agree, files)

        children.append(fork(work))
    ready.close_write()
    ready.wait()
    begun = time.perf_counter()
    gate.close_write()
    codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        raise SystemExit("a process failed; see above")
    print(
        json.dumps(
            {
                "workers": workers,
                "reference_open_s": float(opened.max() - begun),
                "reference_agree_ms": float(np.median(agree)) * 1e3,
                "reference_descriptors": float(files.max()),
            }
        )
    )


def _work(rank: int, workers: int, port: int, opened: Table, agree: Table, files: Table) -> None:
    store = TCPStore("127.0.0.1", port, workers, rank == 0, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers, timeout=TIMEOUT)
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    dist.barrier(group)
    opened[rank] = time.perf_counter()
    files[rank] = sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1
    for index in range(agree.shape[1]):
        begun = time.perf_counter()
        dist.all_gather_object([None] * workers, (None, None), group=group)  # signal, divergence
        agree[rank, index] = time.perf_counter() - begun
    dist.barrier(group)


if __name__ == "__main__":
    main()
