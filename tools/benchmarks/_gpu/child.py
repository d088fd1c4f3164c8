"""One process of `gpu.py`: `python -m _gpu.child train TRAINER TASK`, `… describe DEVICE` or
`… calibrate DEVICE quick|whole`.

A process each, so that one that fails takes nothing with it and all find the memory free. The last
line of the output is the result, JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, SupportsFloat

import numpy as np
import torch

from _gpu.task import Measured, Task
from slurmllm.core.config.resolve import resolve
from slurmllm.core.errors import ConfigError

_WARM_UP = 3  # steps after the first one, before the timed ones


def train(trainer: str, task: Task) -> Iterator[Measured]:
    """Train and measure; yields `missing`, a reason, if this trainer cannot run here.

    `first_step_s` includes compilation, `step_s` is the mean of the timed steps, `loss` of the last
    one. `peak_bytes` and `reserved_bytes` are the most that tensors needed and torch's allocator
    held in the timed steps; on a CPU, the process's memory. Then what `task.extras` names.
    """
    from _gpu.trainers import TRAINERS, timed

    torch.manual_seed(0)
    try:
        trainer_step = TRAINERS[trainer](task)
    except (ImportError, ConfigError) as error:  # such as a precision that this version lacks
        yield {"missing": str(error)}
        return
    batches = _batches(task)

    def step() -> SupportsFloat:
        return trainer_step(*next(batches))

    began = time.perf_counter()
    float(step())
    yield {"first_step_s": time.perf_counter() - began}
    if not task.steps:
        return
    for _ in range(_WARM_UP):
        step()
    yield timed(step, task.steps, task.device)
    for extra in task.extras:
        yield {extra: getattr(trainer_step, extra)(step)}


def calibrate(device: str, quick: str) -> Measured:
    """Measure the device as `slurmllm calibrate --local` does."""
    from slurmllm.analysis.calibrate.run import calibrate as measure
    from slurmllm.launch.supervise.allocation import LocalAllocation

    is_quick = quick == "quick"
    settings = [f"cluster.device={device}", f"train.compile={str(not is_quick).lower()}"]
    config = resolve("tiny_neox", "local", settings)
    calibration = measure(config, LocalAllocation(), logging.info, quick=is_quick)
    hardware = calibration.hardware
    figures = f"bf16 {hardware.bf16_tflops:.0f} TFLOP/s, memory {hardware.memory_gb_s:.0f} GB/s"
    return {
        "summary": f"measured in {calibration.seconds:.1f} s: {figures}",
        "seconds": calibration.seconds,
        "hardware": hardware.model_dump(mode="json"),
        "notes": calibration.notes,
    }


def _batches(task: Task) -> Iterator[tuple[Any, Any]]:
    """Yield random tokens and labels, [batch, seq] each: speed does not depend on them."""
    recipe = task.config().recipe
    random = np.random.default_rng(0)
    shape = (recipe.train.global_batch, recipe.model.seq_len + 1)
    rows = [random.integers(0, recipe.model.vocab_size, shape) for _ in range(4)]
    while True:
        for row in rows:
            yield row[:, :-1].copy(), row[:, 1:].copy()


def describe(device: str) -> Measured:
    facts: Measured = {"torch": torch.__version__, "name": "CPU", "memory_bytes": None}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {"name": properties.name, "memory_bytes": properties.total_memory}
    return facts


def main() -> None:
    """Print the result as it grows, a line of JSON each, so that a part's limit costs no figure."""
    verb, *rest = sys.argv[1:]
    results: Iterable[Measured]
    if verb == "train":
        results = train(rest[0], Task(**json.loads(rest[1])))
    else:
        results = [describe(*rest) if verb == "describe" else calibrate(*rest)]
    whole: Measured = {}
    for result in results:
        whole |= result
        print(json.dumps(whole), flush=True)


if __name__ == "__main__":
    main()
