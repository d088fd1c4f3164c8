"""What a checkpoint costs: a blocking save against the disk, an asynchronous one against blocking.

    python tools/benchmarks/checkpoint.py [--gb 2] [--rounds 3] [--folder .] [--device cpu] [--json]

One worker trains a Llama whose weights and AdamW moments are about so large, and saves: the whole
path of a run, with plan, shards, sha256, fsync, manifest and rename. In turn, for the speed of a
disk changes: `dd … conv=fsync` of as many bytes into the same folder, a blocking save, and an
asynchronous save with steps meanwhile. Medians are told; the rounds before the first are not
counted, for there the host's memory is handed out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from slurmllm.backends.base import Backend, MicroBatch, Worker, load_backend
from slurmllm.checkpoint.save import Save
from slurmllm.checkpoint.state import TrainState, fingerprint
from slurmllm.config.resolve import RunConfig, change, resolve
from slurmllm.model.decoder import build_model
from slurmllm.plan.mesh import make_mesh
from slurmllm.run.rundir import RunDir

HIDDEN, FFN, VOCAB, SEQ = 1024, 4096, 8192, 64
BYTES_PER_PARAMETER = 12
LAYER_PARAMETERS = 12 * HIDDEN**2
QUIET_STEPS = 3
DD_BLOCK_BYTES = 16 * 2**20


def configuration(gb: float, device: str) -> RunConfig:
    """Of a model whose state is about so large."""
    layers = round((gb * 1e9 / BYTES_PER_PARAMETER - 2 * VOCAB * HIDDEN) / LAYER_PARAMETERS)
    return resolve(
        "tiny_neox",
        "local",
        [
            f"model.num_layers={max(1, layers)}",
            f"model.hidden_size={HIDDEN}",
            "model.num_heads=16",
            f"model.ffn_hidden_size={FFN}",
            f"model.vocab_size={VOCAB}",
            f"model.seq_len={SEQ}",
            "train.global_batch=1",
            "train.micro_batch=1",
            "train.compile=false",
            "checkpoint.keep=1",
            f"cluster.device={device}",
        ],
    )


def open_backend(config: RunConfig) -> Backend:
    """A backend of one worker, ready to train."""
    backend = load_backend("native")(config, make_mesh(config, 1), Worker(0, 1, 0, "here"))
    backend.start()
    backend.build(lambda: build_model(config.recipe.model))
    backend.build_optimizer()
    return backend


class Bench:
    """One model and one run directory, measured again and again."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.backend = open_backend(config)
        self.run = RunDir(folder)
        self.step = 0
        self.num_bytes = 0
        self._asynchronous = change(config, None, ["checkpoint.asynchronous=true"])
        self._blocking = config
        self._tokens = np.random.default_rng(0).integers(0, VOCAB, (1, SEQ + 1))

    def train_step(self) -> float:
        """Seconds of one step."""
        began = time.perf_counter()
        batch = MicroBatch(self._tokens[:, :-1], self._tokens[:, 1:])
        self.backend.forward_backward([batch], SEQ)
        self.backend.optimizer_step(1e-4)
        self.backend.param_norm()
        self.step += 1
        return time.perf_counter() - began

    def blocking_s(self) -> float:
        """Seconds of a blocking save."""
        self.backend.config = self._blocking
        began = time.perf_counter()
        save = self._save()
        save.finish()
        seconds = time.perf_counter() - began
        self.num_bytes = save.num_bytes
        save.join_retention()
        return seconds

    def asynchronous_s(self) -> dict[str, float]:
        """Seconds that an asynchronous save makes training wait, and of the steps meanwhile."""
        self.backend.config = self._asynchronous
        quiet = median(self.train_step() for _ in range(QUIET_STEPS))
        began = time.perf_counter()
        save = self._save()
        begin_s = time.perf_counter() - began
        steps = []
        while not save.written():
            steps.append(self.train_step())
        ending = time.perf_counter()
        save.finish()
        end_s = time.perf_counter() - ending
        whole_s = time.perf_counter() - began
        save.join_retention()
        return {
            "begin": begin_s,
            "within steps": save.waited_s,
            "finish": end_s,
            "waited": begin_s + save.waited_s + end_s,
            "longer steps": max(0.0, sum(steps) - len(steps) * quiet),
            "steps": len(steps),
            "quiet step": quiet,
            "whole": whole_s,
        }

    def dd_s(self) -> float:
        """Seconds in which dd writes as many bytes."""
        target = self.run.path / "dd"
        command = [
            "dd",
            "if=/dev/zero",
            f"of={target}",
            f"bs={DD_BLOCK_BYTES}",
            f"count={max(1, round(self.num_bytes / DD_BLOCK_BYTES))}",
            "conv=fsync",
        ]
        began = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds = time.perf_counter() - began
        target.unlink()
        return seconds

    def _save(self) -> Save:
        recipe = self.backend.config.recipe
        held = TrainState(
            step=self.step, tokens=0, data={}, fingerprint=fingerprint(recipe, "none", "none")
        )
        return Save(self.run, self.backend, held, attempt=0)


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Medians, in seconds; and the two ratios."""
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=options.folder))
    try:
        bench = Bench(configuration(options.gb, options.device), folder)
        bench.train_step()
        bench.blocking_s()
        first = bench.asynchronous_s()
        rounds = []
        for number in range(options.rounds):
            dd_s = bench.dd_s()
            bench.train_step()
            blocking_s = bench.blocking_s()
            asynchronous = bench.asynchronous_s()
            rounds.append({"dd": dd_s, "blocking": blocking_s, **asynchronous})
            told = "  ".join(f"{key} {value:.3f}" for key, value in rounds[-1].items())
            print(f"round {number + 1}: {told}", file=sys.stderr, flush=True)
        bench.backend.stop()
        found = {key: median(one[key] for one in rounds) for key in rounds[0]}
        return {
            "bytes": bench.num_bytes,
            **found,
            "first wait": first["waited"],
            "blocking to dd": found["dd"] / found["blocking"],
            "wait to blocking": found["waited"] / found["blocking"],
        }
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, default=2.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    gb = found["bytes"] / 1e9
    print(f"a checkpoint of {gb:.2f} GB on {options.device}, medians of {options.rounds} rounds")
    print(f"  dd with fsync          {found['dd']:7.3f} s  {gb / found['dd']:5.2f} GB/s")
    print(
        f"  blocking save          {found['blocking']:7.3f} s  {gb / found['blocking']:5.2f} GB/s"
    )
    print(
        f"  asynchronous save      {found['whole']:7.3f} s, of it training waited "
        f"{found['waited']:.3f} s (the first time {found['first wait']:.3f} s)"
    )
    print(
        f"    begin {found['begin']:.3f} s, within steps {found['within steps']:.3f} s, "
        f"finish {found['finish']:.3f} s; {found['steps']:.0f} step(s) meanwhile took "
        f"{found['longer steps']:.3f} s longer (a quiet step {found['quiet step']:.3f} s)"
    )
    print(f"blocking save / dd: {found['blocking to dd']:.0%} of its speed")
    print(f"waiting for an asynchronous save / blocking: {found['wait to blocking']:.1%}")


if __name__ == "__main__":
    main()
