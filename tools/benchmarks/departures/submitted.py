"""Small runs by `slurmllm submit --local`, and what compare answers with all their records.

One rank's backward pass is made wrong from a step on without a change to the package: a
sitecustomize module, which Python imports by itself, scales the gradient that enters the backward
pass of rank 1. Runs that exist are not trained again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from departures.answers import read_answer
from slurmllm.run.rundir import RunDir

SMALL = (
    "model.num_layers=2",
    "model.hidden_size=128",
    "model.num_heads=4",
    "model.ffn_hidden_size=512",
    "model.seq_len=64",
    "train.compile=false",
    "checkpoint.every_steps=20",
    "checkpoint.keep=9",
)
FACTOR = 1.05  # of the gradient of the bad rank
INIT_STEP = 20  # of the first run's checkpoint that the shuffled ones start from
HOOK = """
import importlib.abc, importlib.machinery, os, sys

NAME = "slurmllm.backends.native.runtime"


class Loader(importlib.abc.Loader):
    def __init__(self, inner):
        self.inner = inner

    def create_module(self, spec):
        return self.inner.create_module(spec)

    def exec_module(self, module):
        self.inner.exec_module(module)
        import torch

        backend = module.NativeBackend
        forward_backward, backward, calls = backend.forward_backward, torch.Tensor.backward, []

        def counted(self, *arguments):
            calls.append(None)
            return forward_backward(self, *arguments)

        def scaled(tensor, gradient=None, *rest, **more):
            bad = len(calls) >= int(os.environ["BAD_STEP"]) and torch.distributed.get_rank() == 1
            if bad and gradient is None:
                gradient = torch.full_like(tensor, float(os.environ["BAD_FACTOR"]))
            return backward(tensor, gradient, *rest, **more)

        backend.forward_backward, torch.Tensor.backward = counted, scaled


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = Loader(spec.loader)
        return spec


sys.meta_path.insert(0, Finder())
"""


@dataclass(frozen=True)
class Case:
    """A comparison whose answer is known.

    Attributes:
        departure: What was changed.
        a: The reference's run.
        b: The other's.
        kind: That the diagnosis must name; None: the runs must match.
        step: At which the curves part, or of roundings that at which the values begin to differ;
            None: on a match.
        slack: Steps that the answer may be off.
        equivalent: The runs differ only by the order of their batches: `equivalent` is right too,
            and the step is any at which the systematic part begins.
        options: Of compare.
    """

    departure: str
    a: str
    b: str
    kind: str | None
    step: int | None
    slack: int = 0
    equivalent: bool = False
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What came out."""

    departure: str
    expected: str
    found: str
    right: bool
    reason: str


def measure(runs: Path, *, train_missing: bool, steps: int = 100, at: int = 61) -> list[Answer]:
    """Submit the runs that are missing, and compare all; departures begin at step `at`."""
    if train_missing:
        train(runs.absolute(), steps, at)
    return [ask(case, runs) for case in cases(at)]


def show(answers: list[Answer]) -> str:
    """Returns the answers as a Markdown table."""
    lines = ["| departure | expected | found | |", "|---|---|---|---|"]
    for one in answers:
        verdict = "right" if one.right else f"WRONG: {one.reason}"
        lines.append(f"| {one.departure} | {one.expected} | {one.found} | {verdict} |")
    return "\n".join(lines)


def train(runs: Path, steps: int, at: int) -> None:
    """Make the runs that are not there."""
    hook = runs / ".hook"
    hook.mkdir(parents=True, exist_ok=True)
    (hook / "sitecustomize.py").write_text(HOOK)
    bad = {"PYTHONPATH": str(hook), "BAD_STEP": str(at), "BAD_FACTOR": str(FACTOR)}
    weights = f"train.init_from={RunDir(runs / 'base').checkpoint(INIT_STEP)}"
    full = f"train.steps={steps}"
    submit(runs, "base", full)
    submit(runs, "again", full)
    submit(runs, "two_workers", full, nodes=2)
    submit(runs, "bad_rank", full, nodes=2, environment=bad)
    submit(runs, "other_seed", full, "train.seed=7")
    submit(runs, "bf16", full, "train.precision=bf16")
    submit(runs, "mixed", full, "train.precision=bf16_mixed")
    submit(runs, "stochastic", full, "train.precision=bf16_sr")
    submit(runs, "stochastic_lr", full, "train.precision=bf16_sr", "optim.lr=2.04e-3")
    submit(runs, "other_batch", full, "train.global_batch=16")
    submit(runs, "from_weights", full, weights)
    submit(runs, "shuffled", full, weights, "train.seed=99")
    if not (runs / "other_lr").exists():
        submit(runs, "other_lr", f"train.steps={at - 1}", f"optim.decay_steps={steps}")
        slurmllm(runs, "resume", "other_lr", "--local", "--set", full, "--set", "optim.lr=4e-3")
    for name in ("base", "two_workers", "bad_rank", "from_weights", "shuffled", "bf16", "other_lr"):
        copy_metrics_only(runs, name)


def submit(
    runs: Path, name: str, *settings: str, nodes: int = 1, environment: dict[str, str] | None = None
) -> None:
    """Train a run, unless it is there."""
    if (runs / name).exists():
        return
    command = ["submit", "tiny_neox", "--local", "--name", name, "--nodes", str(nodes)]
    for setting in (*SMALL, *settings):
        command += ["--set", setting]
    slurmllm(runs, *command, environment=environment)


def slurmllm(runs: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
    """Run a verb; its output goes to standard error."""
    subprocess.run(
        [sys.executable, "-m", "slurmllm", *arguments, "--runs-dir", str(runs)],
        check=True,
        stdout=sys.stderr,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
    )


def copy_metrics_only(runs: Path, name: str) -> None:
    """Copy only the metrics of a run, as if its framework recorded nothing else."""
    target = runs / f"{name}-bare" / "metrics"
    if not target.exists():
        shutil.copytree(runs / name / "metrics", target)


def cases(at: int) -> list[Case]:
    """What is compared, and what must come out."""
    return [
        Case("the same again", "base", "again", None, None, options=("--exact",)),
        Case("two workers instead of one", "base", "two_workers", None, None),
        Case(f"learning rate from step {at}", "base", "other_lr", "lr", at + 1),
        Case("the same, nothing recorded", "base-bare", "other_lr-bare", "lr", at + 1),
        Case(f"a bad rank from step {at}", "two_workers", "bad_rank", "gradient", at),
        Case("the same, against one worker", "base", "bad_rank", "gradient", at),
        Case("the same, nothing recorded", "base-bare", "bad_rank-bare", "gradient", at),
        Case("another seed", "base", "other_seed", "seed", 1, equivalent=True),
        Case("bf16", "base", "bf16", "precision", 1),
        Case("the same, nothing recorded", "base-bare", "bf16-bare", "precision", 1),
        Case("bf16_mixed and bf16_sr", "mixed", "stochastic", None, None),
        Case(
            "the same, learning rate 2 % higher",
            "mixed",
            "stochastic_lr",
            "lr",
            2,
            20,
            options=("--as", "precision"),
        ),
        Case("another global batch", "base", "other_batch", "batches", 1, 20),
        Case("shuffled data", "from_weights", "shuffled", "data", 1, equivalent=True),
        Case(
            "the same, nothing recorded",
            "from_weights-bare",
            "shuffled-bare",
            "batches",
            1,
            equivalent=True,
        ),
    ]


def ask(case: Case, runs: Path) -> Answer:
    """Compare two of the runs."""
    answer = subprocess.run(
        [
            sys.executable,
            "-m",
            "slurmllm",
            "compare",
            str(runs / case.a),
            str(runs / case.b),
            "--json",
            "--no-plot",
            *case.options,
        ],
        check=False,
        capture_output=True,
        text=True,
    )
    if answer.returncode > 1:
        raise SystemExit(answer.stderr)
    found = json.loads(answer.stdout)
    read = read_answer(found)
    kind = read.causes[0].kind if read.causes and read.verdict == "differ" else None
    onsets = [one["onset_step"] for one in found["metrics"].values() if one["departs"]]
    step = min(onsets, default=None)
    if kind in ("precision", "rounding"):  # the tolerance hides it at first
        step = read.causes[0].step
    right = kind == case.kind and (
        step is None
        if case.step is None
        else step is not None and abs(step - case.step) <= case.slack
    )
    if case.equivalent:
        right = read.verdict == "equivalent" or (read.verdict == "differ" and kind == case.kind)
    return Answer(
        case.departure, _shown(case.kind, case.step), _shown(kind, step), right, found["reason"]
    )


def _shown(kind: str | None, step: int | None) -> str:
    return "match" if kind is None else f"{kind}, step {step}"
