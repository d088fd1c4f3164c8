"""A worker that measures the all-reduce over all workers with PyTorch: NCCL on GPUs, else gloo.

A program of its own (`python -m slurmllm.launch.diagnose.allreduce`) with torchrun's variables,
started on each node by the hidden verb `allreduce`. Reports bus bandwidths as nccl-tests defines
them: 2 (n - 1) / n times bytes per second, comparable between numbers of workers n
(NVIDIA/nccl-tests, doc/PERFORMANCE.md).

One slow node slows the whole all-reduce down. If it is below the floor, pairs of neighbouring nodes
are measured too: the bandwidth of a node is that of the faster of its two pairs.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from slurmllm.launch.diagnose.probe import report
from slurmllm.train.backends.native.device import KINDS
from slurmllm.train.backends.process_group import init_process_group

Pairs = list[tuple[int, int]]  # of nodes, by index
MESSAGE_BYTES = {"cuda": 256 << 20, "cpu": 16 << 20}
LIMIT = timedelta(seconds=120)


def main(device: str, floor_gb_s: float) -> None:
    """Measure; rank 0 reports the bandwidth of all nodes and that of each node's faster pair."""
    kind = KINDS[device](int(os.environ["LOCAL_RANK"]))
    rank = int(os.environ["RANK"])
    workers = int(os.environ["WORLD_SIZE"])
    init_process_group(kind.process_group, rank, workers, LIMIT)
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = workers // per_node
    tensor = torch.ones(MESSAGE_BYTES[device] // 4, device=kind.torch)
    overall = _bus_gb_s(tensor, None)
    if rank == 0:
        report("", gb_s=overall)
    # The result is the slowest worker's, the same on all: every worker takes the same branch.
    if overall < floor_gb_s and nodes > 2:
        best = torch.zeros(nodes, device=kind.torch)
        for pairs in pair_rounds(nodes):
            best = torch.maximum(best, _measure_pairs(tensor, pairs, per_node, nodes))
        if rank == 0:
            for node, gb_s in enumerate(best.tolist()):
                report(str(node), gb_s=gb_s)
    dist.barrier()
    dist.destroy_process_group()


def pair_rounds(nodes: int) -> list[Pairs]:
    """The pairs of neighbours in a ring, in rounds in which no node has two pairs."""
    rounds: list[Pairs] = [[], [], []]
    for first in range(nodes):
        last = nodes % 2 == 1 and first == nodes - 1
        rounds[2 if last else first % 2].append((first, (first + 1) % nodes))
    return [pairs for pairs in rounds if pairs]


def _measure_pairs(tensor: torch.Tensor, pairs: Pairs, per_node: int, nodes: int) -> torch.Tensor:
    """Measure pairs at the same time; bus bandwidth by node, GB/s, the same on every worker."""
    group = None
    members = (-1, -1)
    for pair in pairs:
        ranks = [node * per_node + local for node in pair for local in range(per_node)]
        pair_group = dist.new_group(ranks, timeout=LIMIT)  # collective: every worker calls it
        if dist.get_rank() in ranks:
            group = pair_group
            members = pair
    measured = torch.zeros(nodes, device=tensor.device)
    if group is not None:
        measured[list(members)] = _bus_gb_s(tensor, group)
    dist.all_reduce(measured, dist.ReduceOp.MAX)
    return measured


def _bus_gb_s(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    """Bus bandwidth of an all-reduce of the tensor over a group, by its slowest worker, GB/s."""
    workers = dist.get_world_size(group)
    for count in (2, 5):  # warm-up, then those that are timed
        dist.barrier(group)
        _synchronize(tensor)
        started = time.perf_counter()
        for _ in range(count):
            # MAX keeps the values; a sum would overflow after some rounds.
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        _synchronize(tensor)
        seconds = torch.tensor((time.perf_counter() - started) / count, device=tensor.device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    moved = tensor.numel() * tensor.element_size() * 2 * (workers - 1) / workers
    return moved / float(seconds) / 1e9


def _synchronize(tensor: torch.Tensor) -> None:
    if not tensor.is_cpu:  # collectives of devices return before they are done
        torch.get_device_module(tensor.device).synchronize()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
