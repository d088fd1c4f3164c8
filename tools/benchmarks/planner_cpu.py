"""What the planner says of small meshes on this machine's CPUs, beside what they measure.

    python tools/benchmarks/planner_cpu.py [--mesh NAME …] [--rounds 3] [--json FILE]

For each number of workers this machine is calibrated as `slurmllm calibrate --local` does
it. Each mesh then trains as runs do (compiled, with the workers' environment), one CPU thread a
worker; four workers share two cores, in calibration as in training. A step is the median of
several, of the slowest worker. Others may use the machine meanwhile: between steps a matrix product
is timed, and a round counts only where that takes as long as calibration says (--rounds).

Memory is the kernel's resident set at its largest within a step (VmHWM), of the worker with the
most, against the predicted peak and what a worker holds without a model (`reserved_gib`). It is
taken of the same training with a glibc that gives freed tensors back at once, as in memory.py: a
run's glibc keeps them, and the holes between them, which the last column counts in.

Exit code 1 where memory is off by more than 10 % or the step by more than 25 %, by the median of
the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memory import resident, settled
from mesh_pool import Case, MeshPool, counted, micro_batches, small_run

from slurmllm.backends.base import Backend
from slurmllm.backends.environment import load_environment
from slurmllm.calibrate.run import calibrate
from slurmllm.config.cluster import Hardware
from slurmllm.config.resolve import RunConfig
from slurmllm.plan.estimate import LayoutEstimate, predict
from slurmllm.plan.parameters import Product
from slurmllm.plan.step import peak_flops, product_s
from slurmllm.supervise.allocation import LocalAllocation

_MODEL = (
    "model.num_layers=8", "model.hidden_size=512", "model.num_heads=8",
    "model.ffn_hidden_size=2048", "model.vocab_size=16384", "model.seq_len=256",
    "model.num_kv_heads=null", "train.compile=true", "train.micro_batch=2", "parallel.zero=1",
)  # fmt: skip
# glibc maps every large tensor by itself, so that a freed one leaves the resident set at once.
_RETURNING = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "MALLOC_TOP_PAD_": "0"}
_MEMORY, _STEP = 0.10, 0.25
_WARM_UP, _STEPS = 2, 5
_PRODUCT, _PRODUCTS = Product(512, 2048, 512), 40
# Between calibration and training; a round in which it changed by more says nothing.
_SPEED = 0.15


@dataclass(frozen=True)
class Layout:
    """One mesh.

    Attributes:
        family: Of the model.
        degrees: Tensor, pipeline, data.
        overrides: Beside the shape.
    """

    family: str
    degrees: tuple[int, int, int]
    overrides: tuple[str, ...]

    @property
    def workers(self) -> int:
        """Processes."""
        tensor, pipeline, data = self.degrees
        return tensor * pipeline * data

    def config(self) -> RunConfig:
        """The run's; hardware is still missing."""
        threads = f"cluster.cpus_per_node={self.workers}"
        return small_run(self.family, *self.degrees, *_MODEL, threads, *self.overrides)


LAYOUTS = {
    "one": Layout("neox", (1, 1, 1), ("train.global_batch=4",)),
    "tp2": Layout("gpt3", (2, 1, 1), ("train.global_batch=8",)),
    "dp2": Layout(
        "llama", (1, 1, 2),
        ("train.global_batch=8", "parallel.zero=3", "train.activation_checkpointing=selective"),
    ),
    "pp2": Layout("neox", (1, 2, 1), ("train.global_batch=8",)),
    "tp2dp2": Layout(
        "llama", (2, 1, 2), ("train.global_batch=8", "parallel.zero=2", "parallel.sequence=true")
    ),
    "pp2dp2": Layout(
        "neox", (1, 2, 2), ("train.global_batch=16", "train.activation_checkpointing=full")
    ),
}  # fmt: skip


def timed(backend: Backend) -> dict[str, float]:
    """Seconds of some steps, and the resident set at its largest within them."""
    forget()
    step_seconds(backend, 0)  # takes back from the system what was just given away
    seconds, products = [], []
    for step in range(1, _STEPS + 1):
        seconds.append(step_seconds(backend, step))
        products.append(product_seconds(backend))
    return {
        "step_s": statistics.median(seconds),
        "product_s": statistics.median(products),
        "kept": resident("VmHWM"),
    }


def product_seconds(backend: Backend) -> float:
    """Of a matrix product, while all workers compute it: how fast the machine is just now."""
    import torch

    x, weight = torch.randn(_PRODUCT.m, _PRODUCT.k), torch.randn(_PRODUCT.k, _PRODUCT.n)
    torch.mm(x, weight)
    backend.control.barrier()
    begun = time.perf_counter()
    for _ in range(_PRODUCTS):
        torch.mm(x, weight)
    return (time.perf_counter() - begun) / _PRODUCTS


def largest(backend: Backend) -> dict[str, float]:
    """The resident set at its largest within a step."""
    forget()
    step_seconds(backend, 1)
    return {"memory": resident("VmHWM")}


def forget() -> None:
    """Give back what is free, and count VmHWM anew (proc(5))."""
    settled()
    Path("/proc/self/clear_refs").write_text("5")


def step_seconds(backend: Backend, step: int) -> float:
    """Of one step, as the training loop makes it."""
    batches, labels = micro_batches(backend, step), counted(backend.config, step)
    backend.control.barrier()
    begun = time.perf_counter()
    float(backend.forward_backward(batches, labels))
    backend.optimizer_step(1e-4)
    backend.param_norm()
    return time.perf_counter() - begun


def measure(config: RunConfig) -> dict[str, float]:
    """Of the slowest worker and of the one with the most memory."""
    variables = load_environment("native").variables(config)
    kept = {name: variable.value for name, variable in variables.items()}
    return {
        **train(Case(config, last=_WARM_UP, after=timed), kept),
        **train(Case(config, last=_WARM_UP, after=largest), _RETURNING),
    }


def train(case: Case, variables: dict[str, str]) -> dict[str, float]:
    """The largest of each figure over the workers, which have these variables."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        with MeshPool(case.mesh.world_size, staying=True) as pool:
            found = [outcome.after for outcome in pool.run(case, timeout_s=600)]
    finally:
        os.environ.clear()
        os.environ.update(before)
    return {name: max(worker[name] for worker in found) for name in found[0]}


def with_hardware(config: RunConfig, hardware: Hardware) -> RunConfig:
    """A configuration whose cluster is known."""
    return replace(config, cluster=config.cluster.model_copy(update={"hardware": hardware}))


def predicted(config: RunConfig) -> tuple[LayoutEstimate, int]:
    """What the planner says, and the resident set that follows, bytes."""
    candidate = predict(config, Case(config).mesh)
    hardware = config.cluster.hardware
    assert hardware is not None
    return candidate, candidate.memory.peak + int(hardware.reserved_gib * 2**30)


def row(name: str, config: RunConfig, found: dict[str, float]) -> dict[str, Any]:
    """Predicted and measured of one mesh."""
    candidate, memory = predicted(config)
    hardware = config.cluster.hardware
    assert hardware is not None
    product = product_s(_PRODUCT, peak_flops(config), 4, hardware)
    return {
        "mesh": name,
        **found,
        "memory_predicted": memory,
        "memory_ratio": memory / found["memory"],
        "speed": product / found["product_s"],
        "step_predicted": candidate.step.total,
        "step_ratio": candidate.step.total / found["step_s"],
        "parts_s": candidate.step.parts(),
        "parts_bytes": dict(candidate.memory.parts),
    }


def report(name: str, rows: list[dict[str, Any]]) -> bool:
    """Print a mesh's line; whether it is as near as it is to be."""
    memory = middle(rows, "memory_ratio")
    steady = [one for one in rows if abs(one["speed"] - 1) <= _SPEED]
    step = middle(steady or rows, "step_ratio")
    print(
        f"{name:8} {memory['memory_predicted'] / 1e6:9.0f} {memory['memory'] / 1e6:9.0f} "
        f"{memory['memory_ratio']:6.3f}   {step['step_predicted']:9.2f} {step['step_s']:9.2f} "
        f"{step['step_ratio']:6.3f}  {step['speed']:6.2f} {len(steady):3}/{len(rows)}"
        f"   {memory['kept'] / 1e6:9.0f}"
    )
    near = abs(memory["memory_ratio"] - 1) <= _MEMORY and abs(step["step_ratio"] - 1) <= _STEP
    return bool(near and steady)


def middle(rows: list[dict[str, Any]], ratio: str) -> dict[str, Any]:
    """The row with the median of a ratio."""
    return sorted(rows, key=lambda one: float(one[ratio]))[len(rows) // 2]


def main() -> None:
    """Calibrate, train, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", action="append", choices=sorted(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=1, help="of which the median counts")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    options = parser.parse_args()
    names = options.mesh or list(LAYOUTS)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for workers in sorted({LAYOUTS[name].workers for name in names}):
            configs = {n: LAYOUTS[n].config() for n in names if LAYOUTS[n].workers == workers}
            found = calibrate(next(iter(configs.values())), LocalAllocation(), say)
            say(found.hardware.model_dump_json())
            for name, config in configs.items():
                measured = measure(config)
                rows[name].append(row(name, with_hardware(config, found.hardware), measured))
                say(json.dumps(rows[name][-1]))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    three = f" {'predicted':>9} {'measured':>9} {'ratio':>6}"
    print(f"{'':8} {'memory, MB':>26}   {'step, s':>26}  {'speed':>6} rounds   {'kept, MB':>9}")
    print(f"{'mesh':8}{three}  {three}")
    near = [report(name, rows[name]) for name in names]
    print(f"allowed: memory {_MEMORY:.0%}, step {_STEP:.0%}")
    sys.exit(not all(near))


def say(words: str) -> None:
    """Progress, apart from the result."""
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
