"""How closely each precision mode follows the fp32 loss: same seed, same data, same schedule.

    python tools/benchmarks/precision.py [--recipe tiny_neox] [--steps 2000] [--seed 1234]
        [--runs-dir runs/precision] [--picture precision.png] [--as-is] [--json]

Each mode is a run by `slurmllm submit --local`, one after the other; a run that is complete already
is not made again, so that a stopped measurement can be gone on with; --as-is trains nothing and
compares the steps that there are. The runs named `… again` train
on the same batches with half the micro batch: the same sums in another order. How far they part
from their twins is what no precision can get below, for training amplifies every rounding.

The distance of a mode is |loss - fp32 loss|, both averaged over 50 steps before, averaged over a
window of steps. The loss is that of each step's batch, which is the same in all runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from slurmllm.metrics.source import read_curve
from slurmllm.run.rundir import RunDir

Floats = npt.NDArray[np.float64]

MICRO_BATCH = 8
SMOOTHED = 50
LAST = 200
WINDOWS = 4
# A peak and a tenfold decay as in the AWS runs (9.7e-5 to 1e-5), higher for a model this small.
SETTINGS = ("optim.lr=1e-3", "optim.min_lr=1e-4", "optim.warmup_steps=100")


@dataclass(frozen=True)
class Contestant:
    """One of the runs.

    Attributes:
        name: In table and picture.
        precision: `train.precision`.
        micro_batch: `train.micro_batch`.
        color: In the picture.
    """

    name: str
    precision: str
    micro_batch: int
    color: str


CONTESTANTS = (
    Contestant("fp32", "fp32", MICRO_BATCH, "#222222"),
    Contestant("fp32 again", "fp32", MICRO_BATCH // 2, "#9a9a9a"),
    Contestant("bf16_mixed", "bf16_mixed", MICRO_BATCH, "#f2a65a"),
    Contestant("bf16_mixed again", "bf16_mixed", MICRO_BATCH // 2, "#c9a227"),
    Contestant("bf16_sr", "bf16_sr", MICRO_BATCH, "#12466b"),
    Contestant("bf16_sr again", "bf16_sr", MICRO_BATCH // 2, "#5b9bd5"),
    Contestant("bf16", "bf16", MICRO_BATCH, "#a3195b"),
)


@dataclass(frozen=True)
class Result:
    """How far a run lies from fp32, nats.

    Attributes:
        steps: Steps compared.
        distances: In each window; NaN where it lacks some.
        whole: Over all steps compared.
        ratio: Its distance over bf16_mixed's on the same steps.
        loss: Mean loss over the last steps compared.
        last: Mean difference there, with its sign.
    """

    steps: int
    distances: tuple[float, ...]
    whole: float
    ratio: float
    loss: float
    last: float


def trained(contestant: Contestant, options: argparse.Namespace) -> Floats:
    """The losses of a run by step, trained now unless it was before."""
    name = f"{contestant.name.replace(' ', '_')}-{options.seed}"
    run = RunDir(options.runs_dir / name)
    if options.as_is:
        return read_curve(run.path).series("loss")[1] if run.metrics_files() else np.empty(0)
    if not run.path.exists():
        settings = (
            *SETTINGS,
            f"train.steps={options.steps}",
            f"train.seed={options.seed}",
            f"train.precision={contestant.precision}",
            f"train.micro_batch={contestant.micro_batch}",
            f"checkpoint.every_steps={max(1, options.steps // 4)}",
            *options.set,
        )
        command = ["submit", options.recipe, "--local", "--name", name]
        for setting in settings:
            command += ["--set", setting]
        _slurmllm(*command, "--runs-dir", str(options.runs_dir))
    elif not run.metrics_files() or read_curve(run.path).steps[-1] < options.steps:
        _slurmllm("resume", name, "--runs-dir", str(options.runs_dir))
    steps, losses = read_curve(run.path).series("loss")
    if list(steps) != list(range(1, options.steps + 1)):
        raise SystemExit(f"{name} has not the steps 1 to {options.steps}; remove {run.path}")
    return losses


def _slurmllm(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "slurmllm", *arguments], check=True, stdout=sys.stderr)


def smooth(losses: Floats) -> Floats:
    """Means over SMOOTHED neighbouring steps."""
    return np.convolve(losses, np.full(SMOOTHED, 1 / SMOOTHED), mode="valid")


def results(losses: dict[str, Floats], steps: int) -> dict[str, Result]:
    """The distances of all runs."""
    apart = {name: np.abs(smooth(difference(losses, name))) for name in losses}
    mixed = apart["bf16_mixed"]
    found = {}
    for name, distances in apart.items():
        common = min(len(distances), len(mixed))
        count = len(distances) + SMOOTHED - 1
        windows = [
            distances[round(i * steps / WINDOWS) : round((i + 1) * steps / WINDOWS)]
            for i in range(WINDOWS)
        ]
        found[name] = Result(
            steps=count,
            distances=tuple(
                float(window.mean()) if count >= (i + 1) * steps // WINDOWS else np.nan
                for i, window in enumerate(windows)
            ),
            whole=float(distances.mean()),
            ratio=float(distances[:common].mean() / mixed[:common].mean()),
            loss=float(losses[name][:count][-LAST:].mean()),
            last=float(difference(losses, name)[-LAST:].mean()),
        )
    return found


def difference(losses: dict[str, Floats], name: str) -> Floats:
    """A run's losses minus fp32's, as far as both go."""
    count = min(len(losses[name]), len(losses["fp32"]))
    result: Floats = losses[name][:count] - losses["fp32"][:count]
    return result


def table(found: dict[str, Result], steps: int) -> str:
    """Markdown."""
    ends = [round(steps * i / WINDOWS) for i in range(WINDOWS + 1)]
    heads = [f"{first + 1}–{last}" for first, last in pairwise(ends)]
    lines = [
        f"| run | {' | '.join(heads)} | all | × bf16_mixed | last {LAST}: − fp32 | loss |",
        "|---|" + "--:|" * (WINDOWS + 4),
    ]
    for name, result in found.items():
        if name == "fp32":
            cells = ["0"] * (WINDOWS + 1) + ["", ""]
        else:
            cells = [
                "" if np.isnan(value) else f"{value:.4f}"
                for value in (*result.distances, result.whole)
            ]
            cells += [f"{result.ratio:.2f}", f"{result.last:+.4f}"]
        label = name if result.steps == steps else f"{name}, {result.steps} steps"
        lines.append(f"| {label} | {' | '.join(cells)} | {result.loss:.4f} |")
    return "\n".join(lines)


def draw(losses: dict[str, Floats], path: Path) -> None:
    """The curves above, their differences to fp32 below."""
    picture = Figure(figsize=(9, 7), dpi=110, layout="constrained")
    above, below = picture.subplots(2, 1, sharex=True, height_ratios=[1, 1.4])
    for contestant in CONTESTANTS:
        if contestant.name not in losses:
            continue
        again = contestant.name.endswith("again")
        style = {
            "label": contestant.name,
            "color": contestant.color,
            "linewidth": 1.0 if again else 1.6,
        }
        curve = smooth(losses[contestant.name])
        apart = smooth(difference(losses, contestant.name))
        if not again:
            above.plot(np.arange(len(curve)) + SMOOTHED, curve, **style)
        if contestant.name != "fp32":
            below.plot(np.arange(len(apart)) + SMOOTHED, apart, **style)
    above.set_ylabel("loss (nats)")
    below.set_ylabel("loss − fp32 loss (nats)")
    below.set_xlabel(f"step; means over {SMOOTHED}")
    below.axhline(0.0, color="#222222", linewidth=0.8)
    for axes in (above, below):
        axes.grid(visible=True, color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path)


def main() -> None:
    """Train what is missing, then print the table and draw the picture."""
    names = [contestant.name for contestant in CONTESTANTS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="tiny_neox")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/precision"))
    parser.add_argument("--picture", type=Path, default=Path("precision.png"))
    parser.add_argument("--without", action="append", default=[], choices=names, metavar="RUN")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--as-is", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if missing := {"fp32", "bf16_mixed"} & set(options.without):
        parser.error(f"{', '.join(sorted(missing))} cannot be left out: others are held against it")
    losses = {
        contestant.name: losses_of_run
        for contestant in CONTESTANTS
        if contestant.name not in options.without
        and len(losses_of_run := trained(contestant, options)) > SMOOTHED
    }
    found = results(losses, options.steps)
    draw(losses, options.picture)
    if options.json:
        print(json.dumps({name: vars(result) for name, result in found.items()}, indent=1))
    else:
        print(table(found, options.steps))


if __name__ == "__main__":
    main()
