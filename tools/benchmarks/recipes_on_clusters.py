"""Every shipped recipe on cluster profiles: what `submit` chooses, relative to the best layout.

python tools/benchmarks/recipes_on_clusters.py [--clusters h100_ib,trn1] [--nodes 1,8,64]

A cell is the predicted throughput as a share of the best layout's with any degrees, micro batch and
activation checkpointing; or, if `submit` refuses, the nodes that its error names (`fits 2`), or
`refused` if it would fit these nodes; `never`: it fits no number of nodes.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from slurmllm.backends.environment import load_environment
from slurmllm.config.profiles import available
from slurmllm.config.resolve import TRIAL, RunConfig, recipes_dir, resolve
from slurmllm.errors import ConfigError
from slurmllm.plan.fit_check import FitCheck
from slurmllm.plan.search import search
from slurmllm.submit.prepare import RunRequest, prepare

CLUSTERS = ("trn1", "p4d", "p5", "h100_ib", "p5en")
NODES = (1, 2, 4, 8, 16, 32, 64)
_DATA = {f"data.{name}": (TRIAL, "stdlib") for name in ("corpus", "tokenizer")}


@dataclass(frozen=True)
class Outcome:
    """What a dry run of `submit` says."""

    share: float | None  # of the best layout's throughput; None if it is refused
    refusals: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    fits: bool = True  # whether any layout fits on these nodes

    def __str__(self) -> str:
        if self.share is not None:
            return f"{self.share:.2f}"
        if self.fits:
            return "refused"
        counts = re.findall(r"--nodes (\d+)", " ".join(self.refusals))
        return f"fits {','.join(counts)}" if counts else "never"


def configure(recipe: str, cluster: str) -> RunConfig:
    """Return the configuration of `submit RECIPE --cluster CLUSTER --data builtin`."""
    return resolve(recipe, cluster, options=_DATA)


def submit(config: RunConfig, nodes: int) -> Outcome:
    """Return the outcome of a dry run."""
    fit: FitCheck | None = None
    try:
        run = prepare(RunRequest(config, nodes, Path("runs"), dry_run=True))
        refusals, fit = tuple(run.refusals), run.fit
    except ConfigError as error:
        refusals = tuple(error.faults)
    best = search(config, nodes, load_environment(config.backend).unsupported).fitting
    if refusals or fit is None:
        return Outcome(None, refusals, fits=bool(best))
    speed = fit.candidate.seq_per_s
    return Outcome(speed / max(best[0].seq_per_s, speed), (), tuple(fit.warnings))


def main() -> None:
    """Print a table for each cluster."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument("--nodes", default=",".join(map(str, NODES)))
    options = parser.parse_args()
    counts = [int(count) for count in options.nodes.split(",")]
    for cluster in options.clusters.split(","):
        print(f"{cluster:<20}", *(f"{count:>9}" for count in counts))
        for recipe in available(recipes_dir()):
            config = configure(recipe, cluster)
            cells = [str(submit(config, count)) for count in counts]
            print(f"{recipe:<20}", *(f"{cell:>9}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
