"""How an attempt ends: the records of its nodes and workers, and what the supervisor sees.

The class of the ending and its evidence are not chosen here: `classify` derives them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmllm.run.records import FailureRecord, HangRecord, NodeRecord
from slurmllm.supervise.classify import Evidence

# Fault → weight. Hardware fails most, as in Meta's table of Llama 3's interruptions; the others are
# there once in a hundred attempts or more, so that a run of 200 has endings of all classes.
WEIGHTS: Mapping[str, float] = {
    "device": 33, "node": 16, "network": 9, "killed": 3, "signal": 14, "hang": 9, "storage": 4,
    "software": 2, "crash": 1, "memory": 2, "divergence": 2, "compiler": 1, "configuration": 1,
    "cancelled": 1, "superseded": 1, "preflight": 1,
}  # fmt: skip
BEFORE_STEPS = ("compiler", "configuration")  # the workers start and complete no step
_ECHOES = 64  # workers that record that they lost a peer, before their launchers end them
_VERSIONS = {
    "torch": "2.9.1", "torch-xla": "2.9.0", "neuronx-cc": "2.22.12471.0", "libneuronxla": "2.2.14",
    "neuronx-distributed": "0.16.25997", "aws-neuronx-dkms": "2.25.4.0", "efa": "1.43.2",
    "aws-neuronx-runtime-lib": "2.29.40.0", "aws-neuronx-collectives": "2.29.41.0",
}  # fmt: skip
_ENVIRONMENT = {
    "NEURON_CC_FLAGS": "--model-type=transformer --distribution-strategy=llm-training",
    "NEURON_FUSE_SOFTMAX": "1", "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "7",
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1", "FI_PROVIDER": "efa", "FI_EFA_FORK_SAFE": "1",
    "FI_EFA_USE_DEVICE_RDMA": "1", "MALLOC_ARENA_MAX": "64", "XLA_DOWNCAST_BF16": "1",
}  # fmt: skip
# Fault → class, message, blame and exit code of the worker that fails by itself.
_FAILURES: Mapping[str, tuple[str, str, str, int]] = {
    "device": ("RuntimeError", 'nrt_execute status=1201 message="HBM UE"', "code", 70),
    "storage": (
        "StorageError",
        "cannot write /fsx/runs/large/checkpoints/.step: [Errno 30] Read-only file system",
        "infrastructure", 4,
    ),
    "software": ("ValueError", "operands could not be broadcast together", "code", 70),
    "memory": ("OutOfMemoryError", "Failed to allocate 4.000GB on ND 0:NC 4", "code", 70),
    "divergence": ("DivergenceError", "loss is nan after the step", "code", 71),
    "compiler": (
        "RuntimeError", "neuronx-cc failed with 70: [NCC_EVRF007] out of instruction memory",
        "code", 70,
    ),
    "configuration": ("DataError", "/fsx/corpora/c4 has no index.json", "user", 2),
}  # fmt: skip


@dataclass
class Ended:
    """The files of an attempt that has ended."""

    nodes: dict[str, NodeRecord]
    failures: list[FailureRecord] = field(default_factory=list)
    hang: HangRecord | None = None
    stop_signal: str | None = None
    slurm_state: str = "RUNNING"
    superseded_by: int | None = None

    def evidence(self, expected: Sequence[str]) -> Evidence:
        """What the supervisor classifies."""
        return Evidence(
            expected_nodes=expected, nodes=self.nodes, failures=self.failures, hang=self.hang,
            stop_signal=self.stop_signal, slurm_state=self.slurm_state,
            superseded_by=self.superseded_by,
        )  # fmt: skip


def node_record(names: Sequence[str], index: int, per_node: int, **more: Any) -> NodeRecord:
    """A node's record before its workers end."""
    ranks = range(index * per_node, (index + 1) * per_node)
    return NodeRecord(
        node=names[index], cache="broadcast", cache_s=4.2 + 0.01 * index, versions=_VERSIONS,
        environment={**_ENVIRONMENT, "SLURMLLM_NODE": names[index]},
        pids={rank: 20_000 + rank % per_node for rank in ranks}, **more,
    )  # fmt: skip


def end_by(
    fault: str, names: Sequence[str], per_node: int, attempt: int, step: int, at: float,
    rng: random.Random,
) -> Ended:  # fmt: skip
    """End an attempt by a fault; `step` is the last one completed, `at` Unix time, s."""
    world = len(names) * per_node
    victim = rng.randrange(world)
    all_leave = {"signal": 75, "cancelled": 75, "done": 0}.get(fault)
    codes = dict.fromkeys(range(world), -9 if all_leave is None else all_leave)
    stopped = set(range(world)) if all_leave is None else set()
    found = Ended({})

    def fail(rank: int, error: str, message: str, blame: str, code: int, late_s: float) -> None:
        codes[rank] = code
        stopped.discard(rank)
        node = names[rank // per_node]
        trace = "".join(
            f'  File "/fsx/env/lib/python3.11/site-packages/slurmllm/train/{name}", line {line}\n'
            for name, line in (("worker.py", 88), ("loop.py", 47), ("loop.py", 96))
        )
        record = {"blame": blame, "time": at + late_s, "step": step, "node": node}
        trace = f"Traceback (most recent call last):\n{trace}{error}: {message}\n"
        found.failures.append(
            FailureRecord.model_validate(
                {"rank": rank, "error": error, "message": message, "exit_code": code,
                 "traceback": trace, **record}
            )
        )  # fmt: skip

    if fault in _FAILURES:
        fail(victim, *_FAILURES[fault], late_s=0.0)
    if fault in ("killed", "crash"):
        codes[victim] = -9 if fault == "killed" else -11
        stopped.discard(victim)
    if fault in ("device", "node", "network", "killed", "crash", "software"):
        others = [rank for rank in rng.sample(range(world), min(_ECHOES, world)) if rank != victim]
        for rank in others:
            if fault == "node" and rank // per_node == victim // per_node:
                continue  # its launcher is gone too
            message = "Failed to execute the model status=5 message=Timeout"
            fail(rank, "RuntimeError", message, "code", 70, late_s=1 + 2 * rng.random())
    if fault == "hang":
        node = names[victim // per_node]
        found.hang = HangRecord(
            found_at=at, phase="stepping", step=step, waited_s=181.0, limit_s=180.0,
            behind=tuple(range(victim, min(victim + 2, world))), suspects=(node,),
        )  # fmt: skip
    if fault == "signal":
        found.stop_signal = "SIGUSR1"
    if fault == "cancelled":
        found.slurm_state = "CANCELLED"
    if fault == "superseded":
        found.superseded_by = attempt + 1
    for index, name in enumerate(names):
        ranks = range(index * per_node, (index + 1) * per_node)
        silent = fault == "node" and victim in ranks
        found.nodes[name] = node_record(
            names, index, per_node,
            exit_codes={} if silent else {rank: codes[rank] for rank in ranks},
            stopped_ranks=() if silent else tuple(rank for rank in ranks if rank in stopped),
        )  # fmt: skip
    return found
