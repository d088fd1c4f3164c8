"""Training tokens/s on this machine's CPUs: ours and others in turn, and their ratios.

    python tools/benchmarks/train_speed.py [--models neox_30m,neox_125m] [--seq 512,1024]
        [--precision fp32,bf16] [--rounds 5] [--steps 4]

Every contestant (`contestants/`) is a child process that stays alive and computes only in its
turn: in each round all of them run the same number of steps, in an order that moves on by one from
round to round, and between rounds the machine's matrix products are measured. A slow moment of the
machine therefore meets all of them, and the ratio is taken within the round. All train the same
shape on the same batches in the same order with the same AdamW settings, clipping and threads.
Ours has the environment variables that slurmllm's launcher gives its workers (the allocator's
settings are among them); with --share-variables the others have them too.

The peers come with `pip install '.[bench]'`; those that are not there are said to be missing. One
that wants an environment of its own gets it by --python, e.g. --python litgpt=PATH/bin/python.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from contestants.ours import config_of
from contestants.processes import CONTESTANTS, PRODUCTS_A_TURN, Contestant, Surroundings, started
from contestants.task import Shape, Task

from slurmllm.plan.parameters import model_flops, parameters

MODELS = {
    "neox_30m": Shape("neox", layers=6, hidden=512, heads=8, kv_heads=8, ffn=2048, vocab=50304),
    "neox_125m": Shape("neox", layers=12, hidden=768, heads=12, kv_heads=12, ffn=3072, vocab=50304),
    "llama_30m": Shape("llama", layers=6, hidden=512, heads=8, kv_heads=4, ffn=1408, vocab=50304),
    "llama_125m": Shape("llama", 12, hidden=768, heads=12, kv_heads=4, ffn=2048, vocab=50304),
}
TOKENS_PER_STEP = 2048
_ROWS = 64


def measure(
    task: Task, names: list[str], surroundings: Surroundings, rounds: int, steps: int
) -> str:
    peaks: dict[str, list[float]] = {"fp32": [], "bf16": []}
    with started(task, names, surroundings) as (contestants, products):
        present = [name for name in names if contestants[name].missing is None]
        for number in range(rounds):
            for precision, rate in products.turn(PRODUCTS_A_TURN).items():
                peaks[precision].append(rate)
            first = number % len(present)
            for name in present[first:] + present[:first]:
                answer = contestants[name].turn(steps)
                contestants[name].seconds.append(answer["seconds"])
                contestants[name].loss = answer["loss"]
            print(f"  round {number + 1} of {rounds}", file=sys.stderr)
    gflops = {precision: statistics.median(rates) for precision, rates in peaks.items()}
    return table(task, contestants, gflops, steps)


def table(
    task: Task, contestants: dict[str, Contestant], peak_gflops: dict[str, float], steps: int
) -> str:
    model = config_of(task).recipe.model
    # Attention's products under the causal mask, of which MFU counts the whole square.
    masked = 6 * model.num_layers * model.hidden_size * task.seq
    flops_per_token = model_flops(model, 1) / task.seq - masked
    lines = [
        f"seq {task.seq}  batch {task.batch}  {task.precision}: "
        f"{parameters(model) / 1e6:.1f} M parameters, {flops_per_token / 1e6:.0f} MFLOP/token; "
        f"products of 2048³: {peak_gflops['fp32']:.0f} GFLOP/s in fp32, "
        f"{peak_gflops['bf16']:.0f} in bf16",
        f"{'':<9}{'tokens/s':>9}{'min':>7}{'max':>7}{'GFLOP/s':>9}{'share':>7}"
        f"{'ours / it':>11}{'min':>7}{'max':>7}{'loss':>8}",
    ]
    ours = contestants["ours"].seconds
    for name, contestant in contestants.items():
        if contestant.missing is not None:
            lines.append(f"{name:<9}missing: {contestant.missing}")
            continue
        rates = [task.batch * task.seq * steps / seconds for seconds in contestant.seconds]
        gflops = statistics.median(rates) * flops_per_token / 1e9
        line = (
            f"{name:<9}{statistics.median(rates):9.0f}{min(rates):7.0f}{max(rates):7.0f}"
            f"{gflops:9.0f}{gflops / peak_gflops[task.precision]:7.0%}"
        )
        if name != "ours" and ours:
            ratios = [its / our for its, our in zip(contestant.seconds, ours, strict=True)]
            line += f"{statistics.median(ratios):11.3f}{min(ratios):7.3f}{max(ratios):7.3f}"
        else:
            line += " " * 25
        lines.append(line + f"{contestant.loss:8.3f}")
    return "\n".join(lines)


def write_tokens(path: Path, seq: int) -> None:
    """The language reference as sequences with the token after each, int64 [rows, seq + 1]."""
    import pydoc_data.topics

    from tokenizers import Tokenizer

    from slurmllm.data.corpus.builtin import ensure_stdlib

    encoder = Tokenizer.from_file(str(ensure_stdlib(path.parent)[1]))
    text = Path(pydoc_data.topics.__file__).read_text(encoding="utf-8")
    ids = np.array(encoder.encode(text).ids, dtype=np.int64)
    rows = min(_ROWS, (len(ids) - 1) // seq)
    starts = np.arange(rows)[:, None] * seq
    np.save(path, ids[starts + np.arange(seq + 1)])


def _words(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=_words, default=list(MODELS))
    parser.add_argument("--seq", type=_words, default=["512", "1024"])
    parser.add_argument("--precision", type=_words, default=["fp32", "bf16"])
    parser.add_argument("--peers", type=_words, default=["trainer", "litgpt", "loop"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="counted steps in a turn")
    parser.add_argument(
        *("--python", "-p"),
        action="append",
        default=[],
        metavar="CONTESTANT=PATH",
        help="the interpreter of one contestant; default: this one",
    )
    parser.add_argument(
        "--share-variables", action="store_true", help="the environment variables of ours to all"
    )
    options = parser.parse_args()
    pythons = dict(pair.split("=", 1) for pair in options.python)
    unknown = [name for name in options.peers if name not in CONTESTANTS]
    unknown += [name for name in options.models if name not in MODELS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {[*MODELS, *CONTESTANTS]}")
    names = ["ours", *(name for name in options.peers if name != "ours")]
    with tempfile.TemporaryDirectory() as temporary:
        surroundings = Surroundings(Path(temporary), pythons, options.share_variables)
        for model in options.models:
            for seq in map(int, options.seq):
                tokens = Path(temporary) / f"tokens_{seq}.npy"
                write_tokens(tokens, seq)
                batch = max(1, TOKENS_PER_STEP // seq)
                for precision in options.precision:
                    threads = os.cpu_count() or 1
                    task = Task(MODELS[model], seq, batch, precision, threads, str(tokens))
                    result = measure(task, names, surroundings, options.rounds, options.steps)
                    print(f"{model}  {result}\n", flush=True)


if __name__ == "__main__":
    main()
