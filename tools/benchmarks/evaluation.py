"""The cost of validation while training: a step, and an evaluation of as many sequences.

    python tools/benchmarks/evaluation.py [--set NAME=VALUE …] [--mesh 1,1,1] [--json]

Steps and evaluations take turns, so that a slow moment of the machine meets both; the ratio is
taken within each round. The training waits for its evaluations: with `eval.sequences` S, `texts` T
and `eval.every_steps` E, the share of the time is about T · S / train.global_batch · ratio / E.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from mesh_pool import Case, MeshPool, counted, micro_batches, small_run

from slurmllm.backends.base import Backend

WARM_UP = 2  # rounds that compile and allocate
SHAPE = (
    "model.num_layers=4", "model.hidden_size=256", "model.ffn_hidden_size=1024",
    "model.vocab_size=8192", "model.seq_len=256", "train.global_batch=8", "train.micro_batch=2",
    "train.compile=false",
)  # fmt: skip
ROUNDS = 8


def rounds(backend: Backend) -> list[tuple[float, float]]:
    """Seconds of a step and of an evaluation of the same sequences, in each round."""
    found = []
    for number in range(1, ROUNDS + WARM_UP + 1):
        batches, targets = micro_batches(backend, number), counted(backend.config, number)
        began = time.perf_counter()
        float(backend.forward_backward(batches, targets))
        float(backend.optimizer_step(1e-4))
        stepped = time.perf_counter()
        float(backend.evaluate(batches, targets))
        found.append((stepped - began, time.perf_counter() - stepped))
    return found[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--mesh", default="1,1,1", help="tensor, pipeline, data")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    tensor, pipeline, data = map(int, given.mesh.split(","))
    config = small_run("neox", tensor, pipeline, data, *SHAPE, *given.set)
    with MeshPool(tensor * pipeline * data, given.threads) as pool:
        seconds = pool.run(Case(config, last=0, after=rounds), timeout_s=1200)[0].after
    ratios = [evaluation / step for step, evaluation in seconds]
    batch = config.recipe.train.global_batch
    result: dict[str, Any] = {
        "step_s": statistics.median(step for step, _ in seconds),
        "evaluation_s": statistics.median(evaluation for _, evaluation in seconds),
        "ratio": statistics.median(ratios),
        "lowest_ratio": min(ratios),
        "highest_ratio": max(ratios),
        # One text of 256 sequences every 1000 steps.
        "share_of_time": 256 / batch * statistics.median(ratios) / 1000,
    }
    if given.json:
        print(json.dumps(result, indent=2))
        return
    print(f"a step of {batch} sequences             {result['step_s']:.3f} s")
    print(f"an evaluation of {batch} sequences      {result['evaluation_s']:.3f} s")
    print(f"evaluation / step                {result['ratio']:.3f} "
          f"({result['lowest_ratio']:.3f} to {result['highest_ratio']:.3f})")  # fmt: skip
    print(f"256 sequences every 1000 steps   {100 * result['share_of_time']:.2f} % of the time")


if __name__ == "__main__":
    main()
