"""A worker that measures the all-reduce over all workers with PyTorch: NCCL on GPUs, else gloo.

A program of its own (`python -m slurmllm.diagnose.allreduce`) with torchrun's variables, started on
each node by the hidden verb `allreduce`. Bandwidths are bus bandwidths as nccl-tests counts them:
2 (n - 1) / n times the bytes by the seconds, so that they compare across numbers of workers
(NVIDIA/nccl-tests, doc/PERFORMANCE.md).

One slow node slows the whole all-reduce down. Where that stays under the floor, pairs of
neighbouring nodes are measured too: a node is as good as the better of its pairs.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from slurmllm.diagnose.probe import say

MANY_BYTES = {"cuda": 256 << 20, "cpu": 16 << 20}
NUM_WARM_UP, NUM_TIMED = 2, 5
LIMIT = timedelta(seconds=120)


def main(device: str, floor_gb_s: float) -> None:
    """Measure; the first worker says the bandwidth of all, and that of each node's better pair."""
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=LIMIT)
    rank, per_node = dist.get_rank(), int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = dist.get_world_size() // per_node
    tensor = torch.ones(MANY_BYTES[device] // 4, device=device)
    whole = _gb_s(tensor, None)
    if rank == 0:
        say("", gb_s=whole)
    if whole < floor_gb_s and nodes > 2:
        best = [0.0] * nodes
        for pairs in _rounds(nodes):
            _measure_pairs(tensor, pairs, per_node, best)
        if rank == 0:
            for node, gb_s in enumerate(best):
                say(str(node), gb_s=gb_s)
    dist.barrier()
    dist.destroy_process_group()


def _rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """The pairs of neighbours in a ring, in rounds in which no node has two."""
    rounds: list[list[tuple[int, int]]] = [[], [], []]
    for first in range(nodes):
        last = nodes % 2 == 1 and first == nodes - 1
        rounds[2 if last else first % 2].append((first, (first + 1) % nodes))
    return [pairs for pairs in rounds if pairs]


def _measure_pairs(
    tensor: torch.Tensor, pairs: list[tuple[int, int]], per_node: int, best: list[float]
) -> None:
    """Measure pairs at the same time, and keep what is better than before, on every worker."""
    own, own_nodes = None, (-1, -1)
    for pair in pairs:
        ranks = [node * per_node + local for node in pair for local in range(per_node)]
        group = dist.new_group(ranks, timeout=LIMIT)  # every worker must take part
        if dist.get_rank() in ranks:
            own, own_nodes = group, pair
    found = torch.zeros(len(best), device=tensor.device)
    if own is not None:
        gb_s = _gb_s(tensor, own)
        for node in own_nodes:
            found[node] = gb_s
    dist.all_reduce(found, dist.ReduceOp.MAX)
    best[:] = [max(before, float(now)) for before, now in zip(best, found, strict=True)]


def _gb_s(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    """Bus bandwidth of an all-reduce of the tensor over a group, by its slowest worker, GB/s."""
    workers = dist.get_world_size(group)
    for count in (NUM_WARM_UP, NUM_TIMED):
        dist.barrier(group)
        _wait(tensor)
        started = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        _wait(tensor)
        seconds = torch.tensor((time.perf_counter() - started) / count, device=tensor.device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    moved = tensor.numel() * tensor.element_size() * 2 * (workers - 1) / workers
    return moved / float(seconds) / 1e9


def _wait(tensor: torch.Tensor) -> None:
    """Until the device has done what it was told: collectives on GPUs come back before."""
    if tensor.is_cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
